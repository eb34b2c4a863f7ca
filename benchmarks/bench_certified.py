"""How often certified constraints are missed on test rows, compared with the noise of these rows alone.

    python benchmarks/bench_certified.py --data-dir DIR --splits 10   # adds splits to results/bench_certified.csv
    python benchmarks/bench_certified.py --summary

Two-class tables (at most 4,000 rows and all positives), splits of 50/50, confidence 0.9. "folds" certifies with
probabilities of five folds and decides with a model of all training rows; "share" holds out 30 % of the training rows,
certifies on them and decides with the model of the others. `expected` is the miss rate of an exact certificate: if k of
n held-out rows meet it, the new rate is Beta(k + 1/2, n - k + 1/2) up to ties, and test counts are binomial.
"""

import argparse
import os
import warnings
from pathlib import Path
from typing import Any

import bench_decisions as bench
import numpy as np
import pandas as pd
from scipy.stats import betabinom, binom
from sklearn.model_selection import StratifiedKFold, StratifiedShuffleSplit

from evalign import decision

RESULTS = Path(__file__).with_name("results") / "bench_certified.csv"
CONSTRAINTS = {"recall >= 0.9": "precision", "specificity >= 0.9": "recall", "flagged <= 10%": "recall"}
CONSTRAINTS["precision >= 0.9"] = "recall"
MODELS = ("logistic", "naive Bayes", "boosted", "forest")
LEVEL = 0.9  # of every constraint: at most 10 % flagged is at least 90 % not flagged


def hits(constraint: str, decided: Any, y: Any) -> tuple[int, int]:
    """Rows that count for a constraint, and those among them that meet it."""
    name = constraint.split()[0]
    rows = {"recall": y == 1, "specificity": y == 0, "flagged": y >= 0, "precision": decided == 1}[name]
    right = decided == (0 if name == "flagged" else y)
    return int((right & rows).sum()), int(rows.sum())


def cell(X: Any, y: Any, model: str, split: int) -> list[dict[str, Any]]:
    """A row for each constraint and method of certification."""

    def probabilities(train: Any, new: Any) -> Any:
        return bench.fitted_probabilities(bench.MODELS[model](split), X.iloc[train], y[train], X.iloc[new], 2)

    train, test = next(StratifiedShuffleSplit(1, test_size=0.5, random_state=split).split(X, y))
    folds, p = StratifiedKFold(5, shuffle=True, random_state=split), np.zeros((len(train), 2))
    for some, rest in folds.split(train, y[train]):
        p[rest] = probabilities(train[some], train[rest])
    fit, held = next(StratifiedShuffleSplit(1, test_size=0.3, random_state=split).split(train, y[train]))
    both = probabilities(train[fit], np.concatenate([train[held], test]))
    ways = {
        "folds": (p, y[train], probabilities(train, test)),
        "share": (both[: len(held)], y[train[held]], both[len(held) :]),
    }
    out = []
    for constraint, metric in CONSTRAINTS.items():
        for way, (known, labels, new) in ways.items():
            rule = decision.calibrated(known, labels, metric, subject_to=constraint, confidence=0.9)
            row: dict[str, Any] = {"constraint": constraint, "way": way, "certified": rule.feasible}
            if rule.feasible:
                decided = rule.predict(new)
                k, n = hits(constraint, rule.predict(known), labels)
                met, rows = hits(constraint, decided, y[test])
                reached, of = hits(metric, decided, y[test])
                enough = int(np.ceil(LEVEL * rows - 1e-9))
                row |= {"missed": rows > 0 and met < enough, "proven": rows > 0 and binom.cdf(met, rows, LEVEL) < 0.05,
                        "expected": betabinom.cdf(enough - 1, rows, k + 0.5, n - k + 0.5) if n else 0.0,
                        "value": reached / max(of, 1)}  # fmt: skip
            out.append(row)
    return out


def run(args: argparse.Namespace) -> None:
    """Run the splits that are not stored yet; a split is appended when all its tables are done."""
    bench.MOST = 4_000
    paths = sorted((args.data_dir / "suite").glob("*.parquet")) + [args.data_dir / f"{n}.parquet" for n in bench.PAPERS]
    tables = {path.stem: bench.load(path) for path in paths if path.exists()}
    tables = {name: (X, y) for name, (X, y) in tables.items() if y.max() == 1}
    first = pd.read_csv(args.out).split.max() + 1 if args.out.exists() else 0
    for split in range(first, args.splits):
        rows = [
            {"table": name, "model": model, "split": split} | row
            for name, (X, y) in tables.items()
            for model in MODELS
            for row in cell(X, y, model, split)
        ]
        args.out.parent.mkdir(parents=True, exist_ok=True)
        header = not args.out.exists()
        pd.DataFrame(rows).to_csv(args.out, mode="a", header=header, index=False, float_format="%.4g")
        print(f"split {split} of {len(tables)} tables is done", flush=True)


def summary(source: Path) -> None:
    """Shares of cells by constraint, way and model; misses of certified cells only."""
    table = pd.read_csv(source)
    numbers = ["missed", "expected", "proven", "value"]
    with pd.option_context("display.width", 160, "display.float_format", "{:.3f}".format):
        for by in (["constraint", "way"], ["constraint", "way", "model"]):
            found = table[table.certified].astype(dict.fromkeys(numbers, float)).groupby(by)[numbers].mean()
            print(found.join(table.groupby(by).certified.mean()).to_string(), end="\n\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, default=Path(os.environ.get("EVALIGN_DATA", "data")))
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--splits", type=int, default=10)
    parser.add_argument("--summary", action="store_true", help="only the tables")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    if not args.summary:
        run(args)
    summary(args.out)


if __name__ == "__main__":
    main()
