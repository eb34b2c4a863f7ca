"""How long the first step of a loss waits on a CPU, with an empty cache of compiled code and with a filled one.

    python benchmarks/bench_first_step.py --out benchmarks/results/bench_first_step.csv

Every row is a separate process: seconds to import, seconds of the first and of the second step (forward and
backward), and, where the eager form serves first, seconds until compiled loops take over. `import` is without the
loss; cross-entropy in the same process says how busy the machine is.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from bench_loss import circumstances, save

SIZES = ["128x10", "1024x257", "2x19x128x128", "1024x20:multilabel"]
SCRIPT = """
import json, sys, time
start = time.perf_counter()
import torch
import torch.nn.functional as F
from evalign import MetricLoss
from bench_loss import Size
from evalign.kernels.cpu import compilation
found = {"import": time.perf_counter() - start}
size = Size.of(sys.argv[1])
z, y = size.batch("cpu")
loss = MetricLoss("f1", task="multilabel" if size.kind == "multilabel" else "multiclass")
entropy = F.binary_cross_entropy_with_logits if size.kind == "multilabel" else F.cross_entropy
def step(f):
    start = time.perf_counter()
    f(z, y).backward()
    return time.perf_counter() - start
found["cross_entropy"] = step(entropy)
begin = time.perf_counter()
found["first"], found["second"] = step(loss), step(loss)
while sys.argv[2] == "background" and not compilation.ready() and time.perf_counter() - begin < 300:
    time.sleep(0.1)
found["until_compiled"] = time.perf_counter() - begin if sys.argv[2] == "background" else float("nan")
found["after"] = step(loss), step(loss)
found["after"] = found["after"][1]
print(json.dumps(found))
"""


def measure(size: str, mode: str, folder: str) -> dict[str, object]:
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    variables = {**os.environ, "EVALIGN_COMPILE": mode, "NUMBA_CACHE_DIR": folder, "PYTHONPATH": path}
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, size, mode], env=variables, capture_output=True, text=True, check=True
    )
    return {name: round(value, 4) for name, value in json.loads(run.stdout).items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="*", default=SIZES)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "bench_first_step.csv")
    options = parser.parse_args()
    rows: list[dict[str, object]] = []
    for mode in ("wait", "background"):
        for size in options.sizes:
            with tempfile.TemporaryDirectory() as folder:
                for cache in ("empty", "filled"):
                    row = {"size": size, "mode": mode, "cache": cache, **measure(size, mode, folder)}
                    rows.append({**row, **circumstances("cpu")})
                    shown = "{size:>20} {mode:10} {cache:6} first {first:>8} s, second {second:>8} s, "
                    shown += "compiled after {until_compiled:>8} s, then {after:>8} s"
                    print(shown.format(**row), flush=True)
            save(options.out, rows)


if __name__ == "__main__":
    main()
