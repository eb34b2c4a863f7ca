"""Memory and speed of a streamed fit, on rows that are generated file by file.

    python benchmarks/bench_stream.py                                  # 20 million rows, about 1 GB on the disk
    python benchmarks/bench_stream.py --rows 1000000 --epochs 4        # adds a row to results/bench_stream.csv

The fit runs in a process of its own. `peak_mib` is the most memory that it held, `start_mib` what it held before the
first row was read: libraries. Beside them stands what the encoded table would take as one array of float32.
"""

import argparse
import csv
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet

RESULTS = Path(__file__).parent / "results" / "bench_stream.csv"
NUMBERS, ROW_GROUP, FILE = 10, 100_000, 1_000_000


def generate(folder: Path, rows: int) -> None:
    """Ten numbers, one of them with gaps, a category, and a label of which 3 % are positive."""
    for i, start in enumerate(range(0, rows, FILE)):
        n, rng = min(FILE, rows - start), np.random.default_rng(i)
        x = rng.standard_normal((n, NUMBERS), dtype=np.float32)
        columns: dict[str, Any] = {f"x{j}": x[:, j] for j in range(NUMBERS)}
        columns["x0"] = np.where(rng.random(n) < 0.05, np.nan, np.exp(x[:, 0])).astype(np.float32)
        columns["town"] = pa.array(np.array([f"town {k}" for k in range(20)])[rng.integers(0, 20, n)])
        columns["y"] = (x[:, :3].sum(1) + x[:, 3] * x[:, 4] + rng.standard_normal(n) > 4.2).astype(np.int8)
        table = pa.table(columns)
        pa.parquet.write_table(table, folder / f"part-{i:04}.parquet", row_group_size=ROW_GROUP)


def memory(name: str) -> float:
    """VmRSS or VmHWM of this process in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) / 1024


def fit(folder: Path, hidden: tuple[int, ...], epochs: int | None) -> dict[str, Any]:
    """Survey and train, and say what it took."""
    import torch

    from evalign import EASTClassifier, metric_loss
    from evalign.streaming.fit import Stream, fit_stream
    from evalign.streaming.loop import epoch_updates
    from evalign.streaming.source import ParquetRows
    from evalign.training.batches import default_batch_size

    # What is loaded on first use (the optimiser's compiler, the loss's loops) is no memory of the rows'.
    logits = torch.zeros(4, 2, requires_grad=True)
    metric_loss(logits, torch.tensor([0, 1, 0, 1]), "f1", anchor=1.0).backward()  # type: ignore[no-untyped-call]
    torch.optim.AdamW([logits], fused=True).step()
    source = ParquetRows(folder, "y")
    model = EASTClassifier("f1", hidden=hidden, epochs=epochs, random_state=0, device="cpu")
    start, clock = memory("VmRSS"), time.perf_counter()
    stream = Stream.open(source, seed=0)
    survey, surveyed = time.perf_counter() - clock, memory("VmHWM")
    clock = time.perf_counter()
    fit_stream(model, stream)
    training, train_rows = time.perf_counter() - clock, stream.survey.statistics.rows
    size = default_batch_size(train_rows)
    seen = len(model.history_) * epoch_updates(train_rows, size) * size
    width = len(model.encoder_.feature_names_out)
    return {
        "rows": source.rows, "files_mib": _mib(source.files),
        "table_as_float32_mib": round(source.rows * width / 2**18),
        "start_mib": round(start), "survey_peak_mib": round(surveyed), "peak_mib": round(memory("VmHWM")),
        "survey_rows_a_second": round(source.rows / survey), "training_rows_a_second": round(seen / training),
        "seconds": round(survey + training, 1), "batch": size, "epochs": len(model.history_), "rows_seen": seen,
        "hidden": "-".join(map(str, hidden)), "valid_f1": round(max(row["score"] for row in model.history_), 4),
        "threads": torch.get_num_threads(), "device": f"{platform.machine()} cpu", "torch": torch.__version__,
    }  # fmt: skip


def _mib(files: list[Path]) -> int:
    return round(sum(file.stat().st_size for file in files) / 2**20)


def measured(folder: Path, hidden: str, epochs: int | None) -> dict[str, Any]:
    """The fit in a process of its own, whose memory is nobody else's."""
    options = ["--hidden", hidden, *(["--epochs", str(epochs)] if epochs else [])]
    command = [sys.executable, __file__, "--folder", str(folder), *options]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    names, values = list(csv.reader(done.stdout.splitlines()))
    return dict(zip(names, values, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=20_000_000)
    parser.add_argument("--epochs", type=int, default=None, help="at most; the recipe's unless given")
    parser.add_argument("--hidden", default="512,256,128")
    parser.add_argument("--folder", type=Path, default=None, help="fit what is there, print the row and write nothing")
    options = parser.parse_args()
    if options.folder is not None:
        row = fit(options.folder, tuple(map(int, options.hidden.split(","))), options.epochs)
        csv.writer(sys.stdout).writerows([list(row), list(row.values())])
        return
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder), options.rows)
        row = measured(Path(folder), options.hidden, options.epochs)
    git = ["git", "rev-parse", "--short", "HEAD"]
    row["commit"] = subprocess.run(git, stdout=subprocess.PIPE, text=True, cwd=RESULTS.parent).stdout.strip()
    print(row)
    new = not RESULTS.exists()
    with RESULTS.open("a", newline="") as file:
        writer = csv.DictWriter(file, list(row))
        if new:
            writer.writeheader()
        writer.writerow(row)


if __name__ == "__main__":
    main()
