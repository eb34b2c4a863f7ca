"""The tree methods of `bench_recipes.py`, one single-threaded process per set, method and split, longest first.

    python benchmarks/bench_trees.py --data-dir DIR --processes 14 --minutes 9     # all missing cells
    python benchmarks/bench_trees.py --data-dir DIR --list                         # list them with estimated times
    python benchmarks/bench_trees.py --data-dir DIR --sets adult yeast --methods booster --splits 0 1 2
    python benchmarks/bench_trees.py --data-dir DIR --methods booster --out again.csv     # with other defaults
    python benchmarks/bench_trees.py --merge again.csv                                    # its rows replace stored ones

Rows are added to `--out` whenever a split is done; cells found there or in bench_quality.csv are not run again. After
`--minutes`, running cells are stopped; the next call starts them again.
"""

import os

for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(name, "1")  # before anything that makes threads is imported

import argparse
import multiprocessing
import platform
import time
import traceback
from collections.abc import Sequence
from functools import cache, reduce
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
from bench_recipes import BOOSTED, RESULTS, SETS, TREES, boosted_scores, decided, load, store, tree_probabilities
from stacked_splits import parts

OWN = RESULTS.with_name("bench_quality_boost.csv")
# CPU seconds of a split, only for ordering.
SECONDS = {
    "booster": {"yeast": 4, "mammography": 3, "letter": 300, "shuttle": 250, "adult": 10, "creditcard": 120},
    "booster, cross-entropy": {
        "yeast": 3, "mammography": 2, "letter": 300, "shuttle": 300, "adult": 8, "creditcard": 50,
    },
    "stock LightGBM": {"letter": 7, "shuttle": 2, "creditcard": 3},
    "stock XGBoost": {"letter": 9, "shuttle": 8, "creditcard": 5},
    "random forest": {"yeast": 2, "mammography": 5, "letter": 15, "shuttle": 20, "adult": 25, "creditcard": 400},
    "histogram gradient boosting": {"letter": 15, "shuttle": 10, "adult": 3, "creditcard": 4},
}  # fmt: skip


class Cell(NamedTuple):
    """One training: a data set, a method, and the seed of a split."""

    set: str
    method: str
    split: int

    @property
    def seconds(self) -> int:
        return SECONDS[self.method].get(self.set, 1)


class Job(NamedTuple):
    cell: Cell
    folder: Path


@cache
def _loaded(name: str, folder: Path) -> Any:
    return load(name, folder)


def scores(job: Job) -> tuple[Cell, list[dict[str, Any]], str]:
    """The rows of a cell, or its error: one failure must not stop the others."""
    (name, method, seed), folder = job
    try:
        X, y = _loaded(name, folder)
        known: dict[str, Any] = {"set": name, "method": method, "device": platform.machine()}
        if method in BOOSTED:
            rows = [{**known, "engine": "trees", **row} for row in boosted_scores(method, X, y, seed, 1)]
            return job.cell, rows, ""
        classes, (part,) = int(y.max()) + 1, parts(X, y, [seed])
        started = time.process_time()
        ((valid, test),) = tree_probabilities(TREES[method], [part], classes, jobs=1)
        seconds = round(time.process_time() - started, 2)
        found = decided(valid, test, part, classes)
        known |= {"engine": "scikit-learn", "split": seed, "cpu_seconds": seconds}
        return job.cell, [{**known, "decision": rule, "score": round(score, 6)} for rule, score in found.items()], ""
    except Exception:
        return job.cell, [], traceback.format_exc()


def missing(cells: Sequence[Cell], stored: pd.DataFrame) -> list[Cell]:
    """Cells without rows, longest first."""
    done = set() if stored.empty else set(zip(stored.set, stored.method, stored.split, strict=True))
    return sorted((cell for cell in cells if tuple(cell) not in done), key=lambda cell: -cell.seconds)


def merged(stored: pd.DataFrame, new: pd.DataFrame) -> pd.DataFrame:
    """All rows; where both have a cell, the new rows replace the old."""
    if stored.empty or new.empty:
        return pd.concat([stored, new], ignore_index=True)
    cell = list(Cell._fields)
    replaced = pd.MultiIndex.from_frame(stored[cell]).isin(pd.MultiIndex.from_frame(new[cell]))
    return pd.concat([stored[~replaced], new], ignore_index=True).sort_values(cell, kind="stable", ignore_index=True)


def run(todo: Sequence[Cell], folder: Path, out: Path, *, processes: int, minutes: float) -> None:
    """Run cells in parallel processes and store each when done, until time is up."""
    end = time.monotonic() + 60 * minutes
    rows = pd.read_csv(out) if out.exists() else pd.DataFrame()
    with multiprocessing.get_context("spawn").Pool(processes) as pool:  # leaving the context ends running cells
        results = pool.imap_unordered(scores, [Job(cell, folder) for cell in todo])
        for left in range(len(todo), 0, -1):
            try:
                cell, found, problem = results.next(timeout=max(0.0, end - time.monotonic()))
            except multiprocessing.TimeoutError:
                print(f"{minutes:g} minutes are over with {left} of {len(todo)} cells left; call again for them")
                return
            if problem:
                print(f"{' '.join(map(str, cell))} failed:\n{problem}", flush=True)
                continue
            rows = merged(rows, pd.DataFrame(found))
            store(rows, out)
            print(*cell, {row["decision"]: row["score"] for row in found}, found[0]["cpu_seconds"], "s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--sets", nargs="+", default=SETS, choices=SETS)
    parser.add_argument("--methods", nargs="+", default=list(SECONDS), choices=list(SECONDS))
    parser.add_argument("--splits", nargs="+", type=int, default=list(range(10)))
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=24 * 60)
    parser.add_argument("--out", type=Path, default=OWN)
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--merge", nargs="+", type=Path, default=[], metavar="CSV")
    options = parser.parse_args()
    if options.merge:
        stored = pd.read_csv(options.out) if options.out.exists() else pd.DataFrame()
        store(reduce(merged, map(pd.read_csv, options.merge), stored), options.out)
        return
    if options.data_dir is None:
        parser.error("--data-dir is needed: the folder with yeast.parquet and the other sets")
    files = [path for path in {options.out, RESULTS} if path.exists()]
    stored = pd.concat([pd.DataFrame(), *map(pd.read_csv, files)])
    cells = [Cell(*cell) for cell in product(options.sets, options.methods, options.splits)]
    todo = missing(cells, stored)
    total = sum(cell.seconds for cell in todo)
    print(f"{len(todo)} cells to run, about {total} CPU seconds, {total / options.processes / 60:.1f} minutes at best")
    if options.list:
        for cell in todo:
            print(*cell, f"{cell.seconds} s")
        return
    run(todo, options.data_dir, options.out, processes=options.processes, minutes=options.minutes)


if __name__ == "__main__":
    main()
