"""Where training on the metric helps: networks trained on it and on cross-entropy, equally long, on the same folds.

    python benchmarks/bench_metric_training.py --data-dir DIR --jobs 14 --minutes 8   # resumable
    python benchmarks/bench_metric_training.py --summary                              # tables, and a figure

One factor at a time is moved away from 3,000 rows, 10 % positives, 5 % label noise and F1: rows, share, noise, metric.
Each setting is met by a linear model, a small and a large network. A cell trains on `anchored` and on `cross_entropy`
with the same seeds, folds and bound on epochs, and scores both by argmax and by the default rule on test rows that were
drawn separately; a logistic regression with its strength chosen by folds is compared with the linear ones. Tables of
`--data-dir/suite` follow, split 75/25.
"""

import os

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")

import argparse
import math
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from bench_quality import finished, load
from matplotlib.figure import Figure
from sklearn.datasets import make_classification

from evalign import EASTClassifier
from evalign.estimators.linear import EASTLinear
from evalign.storage.atomic import write_atomically
from evalign.tables.split import split_rows

RESULTS = Path(__file__).parent / "results" / "bench_metric_training.csv"
PICTURE = Path(__file__).parents[1] / "docs" / "images" / "metric_training.svg"
TEST_ROWS, TEST = 20_000, 0.25
CAPACITIES: dict[str, tuple[int, ...]] = {"linear": (), "small": (32,), "large": (256, 128)}
BASE: dict[str, Any] = {"rows": 3000, "share": 0.1, "noise": 0.05, "metric": "f1"}
LEVELS: dict[str, tuple[Any, ...]] = {
    "rows": (100, 300, 1000, 3000, 10_000, 30_000, 100_000, 300_000),
    "share": (0.5, 0.2, 0.1, 0.03, 0.01),
    "noise": (0.0, 0.05, 0.1, 0.2),
    "metric": ("f1", "mcc", "balanced_accuracy", "jaccard"),
}
NO_SETTING: dict[str, Any] = {"rows": 0, "share": 0.0, "noise": 0.0, "metric": "f1"}
KEY = ("source", "rows", "share", "noise", "metric", "capacity", "seed")
Key = tuple[str, int, float, float, str, str, int]


def settings() -> list[dict[str, Any]]:
    found = [BASE | {factor: level} for factor, levels in LEVELS.items() for level in levels]
    return [one for i, one in enumerate(found) if one not in found[:i]]


def drawn(setting: dict[str, Any], seed: int) -> tuple[Any, Any, Any, Any]:
    """Training and test rows of one mixture of four clusters a class; training labels alone are noisy."""
    rows, share = int(setting["rows"]), float(setting["share"])
    X, y = make_classification(
        rows + TEST_ROWS, 12, n_informative=8, n_redundant=0, n_clusters_per_class=4, weights=[1 - share],
        flip_y=0.0, class_sep=0.7, random_state=seed,
    )  # fmt: skip
    rng = np.random.default_rng(seed)
    train, truth = y[:rows].copy(), y[rows:]
    # As many positives become negative as vice versa, which keeps the share.
    flipped = rng.random(rows) < float(setting["noise"])
    train[flipped] = rng.permutation(train[flipped])
    if train.sum() < 5:
        train[rng.choice(rows, 5, replace=False)] = 1
    return X[:rows], train, X[rows:], truth


def cell(folder: Path | None, key: Key) -> list[dict[str, Any]]:
    warnings.simplefilter("ignore")
    source, *_, capacity, seed = key
    setting: dict[str, Any] = dict(zip(KEY[1:5], key[1:5], strict=True))
    if source == "drawn":
        X, y, X_test, z = drawn(setting, seed)
    else:
        assert folder is not None
        table, labels = load(source, folder)
        train, test = split_rows(labels, TEST, 1000 + seed)
        X, y, X_test, z = table.iloc[train], labels[train], table.iloc[test], labels[test]
    contenders: dict[str, Any] = {
        recipe: EASTClassifier(
            setting["metric"], recipe=recipe, hidden=CAPACITIES[capacity], dropout=0.2 if capacity == "large" else 0.0,
            random_state=seed, device="cpu",
        )
        for recipe in ("anchored", "cross_entropy")
    }  # fmt: skip
    if capacity == "linear":
        contenders["logistic regression"] = EASTLinear(setting["metric"], random_state=seed)
    found = []
    for training, model in contenders.items():
        started = time.process_time()
        model.fit(X, y)
        seconds, p = time.process_time() - started, model.predict_proba(X_test)
        for rule in ("argmax", "auto"):
            model.set_params(decision=rule).learn_decision(model.held_out_predictions_)
            score = model.score_labels(model.decide(p), z)
            found.append(
                dict(zip(KEY, key, strict=True))
                | {"training": training, "decision": rule, "score": round(score, 6), "cpu_seconds": round(seconds, 2)}
            )
    return found


def keys(folder: Path | None, seeds: int) -> list[Key]:
    """All cells, those of the first seed first; large tables and those of the suite have three seeds."""
    suite = [] if folder is None else [f"suite/{path.stem}" for path in sorted((folder / "suite").glob("*.parquet"))]
    return [
        (source, one["rows"], one["share"], one["noise"], one["metric"], capacity, seed)
        for seed in range(seeds)
        for capacity in CAPACITIES
        for source, one in [("drawn", one) for one in settings()] + [(name, NO_SETTING) for name in suite]
        if seed < 3 or (source == "drawn" and one["rows"] < 100_000)
    ]


def differences(rows: pd.DataFrame) -> pd.DataFrame:
    """Metric training minus cross-entropy, a row a cell and decision; `optimum` is minus the best linear model."""
    wide = rows.pivot_table(index=[*KEY, "decision"], columns="training", values="score").reset_index()
    wide["gain"] = wide["anchored"] - wide["cross_entropy"]
    wide["optimum"] = wide["anchored"] - wide.get("logistic regression", math.nan)
    return wide


def mean_error(gains: Any) -> tuple[float, float]:
    x = np.asarray(gains, dtype=float)
    return float(x.mean()), float(x.std(ddof=1) / math.sqrt(len(x))) if len(x) > 1 else math.nan


def of_tables(rows: pd.DataFrame) -> pd.Series:
    """One gain per table, since its splits overlap and are not independent draws."""
    return rows.groupby("source")["gain"].mean()


def summary(rows: pd.DataFrame) -> str:
    found = differences(rows)
    made = found[found.source == "drawn"]
    lines = ["| setting | capacity | argmax | default rule | cells |", "|---|---|---|---|---|"]

    def line(name: str, part: pd.DataFrame) -> None:
        for capacity in CAPACITIES:
            own = part[part.capacity == capacity]
            cells = []
            for rule in ("argmax", "auto"):
                one = own[own.decision == rule]
                center, error = mean_error(one["gain"] if name != "suite" else of_tables(one))
                cells.append(f"{center:+.3f} ± {error:.3f}")
            lines.append(f"| {name} | {capacity} | {' | '.join(cells)} | {len(own) // 2} |")

    for factor, levels in LEVELS.items():
        for level in levels:
            one = BASE | {factor: level}
            line(f"{factor} {level}", made[np.all([made[k] == v for k, v in one.items()], axis=0)])
    if len(tables := found[found.source != "drawn"]):
        line("suite", tables)
    linear = found[(found.capacity == "linear") & (found.decision == "auto")]
    center, error = mean_error(linear["optimum"])
    lines.append(
        f"\nLinear models, default rule, against logistic regression at its optimum: {center:+.3f} ± {error:.3f}"
    )
    return "\n".join(lines)


def draw(rows: pd.DataFrame, picture: Path) -> None:
    made = differences(rows)
    made = made[made.source == "drawn"]
    figure = Figure(figsize=(10, 5.4), layout="constrained")
    axes = figure.subplots(2, 4, sharey=True)
    tints = {"linear": "#5b6473", "small": "#d1690e", "large": "#0b62c4"}
    for i, (rule, title) in enumerate((("argmax", "argmax"), ("auto", "default rule"))):
        for j, (factor, levels) in enumerate(LEVELS.items()):
            axis = axes[i, j]
            axis.axhline(0, color="black", linewidth=0.8)
            for k, (capacity, tint) in enumerate(tints.items()):
                part = made[(made.decision == rule) & (made.capacity == capacity)]
                found = [
                    mean_error(
                        part[np.all([part[n] == v for n, v in (BASE | {factor: level}).items()], axis=0)]["gain"]
                    )
                    for level in levels
                ]
                at = np.arange(len(levels)) + 0.12 * (k - 1)
                centers, errors = np.array(found).T
                axis.errorbar(at, centers, 2 * errors, fmt="o-", color=tint, markersize=3, linewidth=1, label=capacity)
            axis.set_xticks(
                range(len(levels)), [str(level).replace("balanced_accuracy", "bal. acc.") for level in levels]
            )
            axis.tick_params(axis="x", labelsize=7, rotation=30)
            axis.grid(alpha=0.3)
            if i:
                axis.set_xlabel({"share": "share of positives", "noise": "label noise"}.get(factor, factor))
        axes[i, 0].set_ylabel(f"gain, {title}")
    axes[0, 0].legend(fontsize=8)
    figure.suptitle("Score of metric training minus cross-entropy (± 2 standard errors)", fontsize=10)
    figure.savefig(picture, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, help="folder with suite/; without it generated rows only")
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--minutes", type=float, help="start nothing after so many minutes")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--picture", type=Path, default=PICTURE)
    parser.add_argument("--summary", action="store_true")
    options = parser.parse_args()
    rows: list[Any] = pd.read_csv(options.out).to_dict("records") if options.out.exists() else []
    if options.summary:
        print(summary(pd.DataFrame(rows)))
        draw(pd.DataFrame(rows), options.picture)
        return
    done = {tuple(row[name] for name in KEY) for row in rows}
    waiting = [key for key in keys(options.data_dir, options.seeds) if key not in done]
    print(f"{len(waiting)} cells to run", flush=True)
    cells = [(options.data_dir, key) for key in waiting]
    for found in finished(cell, cells, options.jobs, options.minutes):
        rows.extend(found)
        write_atomically(options.out, pd.DataFrame(rows).to_csv(index=False))
    print(summary(pd.DataFrame(rows)))


if __name__ == "__main__":
    main()
