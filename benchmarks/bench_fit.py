"""Seconds of `EASTBlend.fit` on tables of several sizes, compared with other tools in the same run.

    python benchmarks/bench_fit.py --rounds 5            # writes benchmarks/results/bench_fit.csv
    python benchmarks/bench_fit.py --sizes 1500 5000     # some of the sizes

Runs are interleaved; the median is kept; rows are written after every size. Peers get a tuned decision by five folds
(`MetricDecision`), as their users would, and on tables of up to 5,000 rows one thread, where a second only waits. `cpu`
is the processor time of all threads: on a busy machine it says more than the clock. `limit` is what the default preset
is to take on two quiet cores. Tables are drawn from a mixture, with a tenth of the labels at random.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # spinning threads compete for busy cores

import argparse
import platform
import statistics
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pandas as pd
from sklearn.datasets import make_classification
from threadpoolctl import threadpool_limits

from evalign import EASTBlend, MetricDecision
from evalign.storage.atomic import write_atomically

RESULTS = Path(__file__).parent / "results" / "bench_fit.csv"
SIZES = {1500: (9, 3, 6.0), 5000: (11, 6, 25.0), 13000: (216, 2, 60.0), 28000: (6, 18, 120.0), 100000: (29, 8, 240.0)}


def table(rows: int) -> tuple[Any, Any]:
    columns, classes, _ = SIZES[rows]
    informative = min(columns, max(5, columns // 4))
    return make_classification(  # type: ignore[no-any-return]
        rows, columns, n_informative=informative, n_redundant=0, n_classes=classes, n_clusters_per_class=1,
        flip_y=0.1, random_state=0,
    )  # fmt: skip


def lightgbm(threads: int) -> Any:
    from lightgbm import LGBMClassifier

    return MetricDecision(LGBMClassifier(verbose=-1, n_jobs=threads), "f1", decision="tuned")


def random_forest(threads: int) -> Any:
    from sklearn.ensemble import RandomForestClassifier

    return MetricDecision(RandomForestClassifier(300, n_jobs=2), "f1", decision="tuned")


def histogram_boosting(threads: int) -> Any:
    from sklearn.ensemble import HistGradientBoostingClassifier

    return MetricDecision(HistGradientBoostingClassifier(), "f1", decision="tuned")


TOOLS: dict[str, Callable[[int], Any]] = {
    "evalign": lambda threads: EASTBlend("f1", n_jobs=2, random_state=0),
    "evalign quick": lambda threads: EASTBlend("f1", preset="quick", n_jobs=2, random_state=0),
    "LightGBM, tuned": lightgbm,
    "histogram boosting, tuned": histogram_boosting,
    "random forest, tuned": random_forest,
}


def measure(sizes: list[int], tools: list[str], rounds: int, out: Path) -> None:
    small = make_classification(200, 5, random_state=0)
    for tool in tools:
        TOOLS[tool](1).fit(*small)  # imports and compilers
    rows = []
    for size in sizes:
        X, y = table(size)
        threads = 1 if size <= 5000 else 2
        seconds: dict[str, list[tuple[float, float]]] = {tool: [] for tool in tools}
        for _ in range(rounds):
            for tool in tools:
                ours = tool.startswith("evalign")
                clock, cpu = time.perf_counter(), time.process_time()
                with nullcontext() if ours else threadpool_limits(threads, "openmp"):
                    TOOLS[tool](threads).fit(X, y)
                seconds[tool].append((time.perf_counter() - clock, time.process_time() - cpu))
        for tool, found in seconds.items():
            clock, cpu = (round(statistics.median(times), 2) for times in zip(*found, strict=True))
            columns, classes, limit = SIZES[size]
            rows.append(
                {"rows": size, "columns": columns, "classes": classes, "tool": tool, "seconds": clock, "cpu": cpu,
                 "limit": limit if tool == "evalign" else None, "rounds": rounds,
                 "machine": f"{platform.machine()}, {len(os.sched_getaffinity(0))} of {os.cpu_count()} cores"}
            )  # fmt: skip
            print(rows[-1], flush=True)
        write_atomically(out, pd.DataFrame(rows).to_csv(index=False))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", type=int, default=list(SIZES), choices=list(SIZES))
    parser.add_argument("--tools", nargs="+", default=list(TOOLS), choices=list(TOOLS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    measure(options.sizes, options.tools, options.rounds, options.out)


if __name__ == "__main__":
    main()
