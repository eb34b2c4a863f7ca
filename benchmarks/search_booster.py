"""Options of EASTBooster, compared for F1 on rows put aside from training data; no test row is read.

    python benchmarks/search_booster.py --data-dir DIR --out boosters --sets adult --variants half half,10-folds
    python benchmarks/search_booster.py --report boosters --sets adult --base half

Division d takes the development rows of split d modulo 10 (four fifths of the table), fits on four fifths of them and
judges by the rest. What a variant says of the rows that its folds held out and of the rows put aside is kept
(SET-VARIANT-DIVISION.npz), so that blends (half+half,xgboost) and rules are compared without training again.
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightgbm
import numpy as np
import pandas as pd
from bench_recipes import SETS, decided_by
from numpy.typing import NDArray
from search_blend import MemberOutputs, fill, scores
from search_folds import mean_and_error
from sklearn.metrics import f1_score
from sklearn.model_selection import train_test_split
from stacked_splits import average_and_labels

from evalign import EASTBooster
from evalign.boosting.score_objective import BoostRecipe
from evalign.tables.split import HeldOutPredictions

SPLITS = 10
OPTIONS: dict[str, dict[str, Any]] = {  # of EASTBooster
    "auto": {},
    "all": {"columns": 1.0},
    "half": {"columns": 0.5},
    "third": {"columns": 0.3},
    "10-folds": {"folds": 10},
    "20-folds": {"folds": 20},
    "rate-.05": {"learning_rate": 0.05, "patience": 60},
    "150-rounds": {"rounds": 150},
    "entropy": {"recipe": "cross_entropy"},
    "anchor-1": {"recipe": BoostRecipe("anchor 1", "", anchor=1.0, metric=1.0)},
    "anchor-10": {"recipe": BoostRecipe("anchor 10", "", anchor=10.0, metric=1.0)},
    "xgboost": {"library": "xgboost"},
    "7-leaves": {"leaves": 7},
    "15-leaves": {"leaves": 15},
    "63-leaves": {"leaves": 63},
    "1-row": {"min_rows": 1},
    "l2-10": {"l2": 10.0},
    "low-floor": {"floor": 1e-5},
}
PARAMS: dict[str, dict[str, Any]] = {  # of LightGBM, for which EASTBooster has no option
    "one-hot": {"max_cat_to_onehot": 100},
    "smooth": {"cat_smooth": 100.0, "cat_l2": 30.0},
    "1023-bins": {"max_bin": 1023},
    "extra": {"extra_trees": True},
    "path": {"path_smooth": 10.0},
    "linear": {"linear_tree": True, "linear_lambda": 1.0},
    "hessian-1": {"min_sum_hessian_in_leaf": 1.0},
}
BINNING = ("max_bin", "linear_tree")  # those of them that the table must know
SEEDS = {"again": (1,), "thrice": (0, 1, 2)}  # of folds and trees: others than usual, or the mean of several
SHARES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.75, 1.0)  # of a class's log prior, taken off


@contextmanager
def lightgbm_with(params: Mapping[str, Any]) -> Iterator[None]:
    """LightGBM with more params than the booster gives it."""
    booster, data = lightgbm.Booster, lightgbm.Dataset
    binning = {name: params[name] for name in BINNING if name in params}

    def more_booster(own: Any = None, *args: Any, **options: Any) -> Any:
        return booster(None if own is None else {**own, **params}, *args, **options)

    def more_data(*args: Any, **options: Any) -> Any:
        return data(*args, **{**options, "params": {**options["params"], **binning}})

    with patch.object(lightgbm, "Booster", more_booster), patch.object(lightgbm, "Dataset", more_data):
        yield


def fit(variant: str, X: Any, y: NDArray[np.int64], number: int) -> MemberOutputs:
    """`variant` are names of OPTIONS, PARAMS and SEEDS with commas between."""
    dev, _ = train_test_split(np.arange(len(y)), test_size=0.2, random_state=number % SPLITS, stratify=y)
    rows, aside = train_test_split(dev, test_size=0.2, random_state=number, stratify=y[dev])
    options: dict[str, Any] = {"n_jobs": 1}
    params: dict[str, Any] = {}
    seeds: Sequence[int] = (0,)
    for name in variant.split(","):
        if not any(name in known for known in (OPTIONS, PARAMS, SEEDS)):
            raise SystemExit(f"variants are made of {[*OPTIONS, *PARAMS, *SEEDS]}, got {name!r}")
        options |= OPTIONS.get(name, {})
        params |= PARAMS.get(name, {})
        seeds = SEEDS.get(name, seeds)
    with lightgbm_with(params):
        models = [EASTBooster(**options, random_state=number + 1000 * seed) for seed in seeds]
        outputs = [outputs_of(model.fit(X.iloc[rows], y[rows]), X.iloc[aside], y[aside]) for model in models]
    held_out, select = means(outputs)
    return outputs[0]._replace(held_out=held_out, select=select)


def outputs_of(model: EASTBooster, aside: Any, labels: NDArray[np.int64]) -> MemberOutputs:
    """Probabilities of a model; held-out rows in the order of the table, which is the same for all folds."""
    order = np.argsort(model.held_out_predictions_.rows, kind="stable")
    valid = model.held_out_predictions_
    return MemberOutputs(
        valid.probabilities[order], valid.labels[order], valid.weight[order], model.predict_proba(aside), labels
    )


def means(outputs: Sequence[MemberOutputs]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    return np.mean([t.held_out for t in outputs], axis=0), np.mean([t.select for t in outputs], axis=0)


def judged(outputs: Sequence[MemberOutputs]) -> dict[str, float]:
    """F1 on the rows put aside by every rule, and log-loss there and on the rows that folds held out, of the mean."""
    first = outputs[0]
    held_out, aside = means(outputs)
    valid = HeldOutPredictions(held_out, first.labels, first.weight)
    found = decided_by(valid, aside, first.select_labels, held_out.shape[1])
    found["off prior"] = off_prior(valid, aside, first.select_labels)
    found["plug-in, all rows"] = scores(outputs, [1 / len(outputs)] * len(outputs))[1]
    for name, p, labels, weight in (
        ("log-loss", aside, first.select_labels, np.ones(len(aside))),
        ("log-loss held out", held_out, first.labels, first.weight),
    ):
        at_label = np.log(np.maximum(p[np.arange(len(p)), labels], 1e-12))
        found[name] = float(-np.average(at_label, weights=weight))
    return found


def off_prior(valid: HeldOutPredictions, aside: NDArray[np.float64], truth: NDArray[np.int64]) -> float:
    """F1 of argmax (log p - share x log prior), the share that is best on held-out rows; of equal ones the least."""
    classes = aside.shape[1]
    average, labels = average_and_labels(classes)
    prior = np.log(np.bincount(valid.labels, valid.weight, minlength=classes) / valid.weight.sum())
    options: dict[str, Any] = {"average": average, "labels": labels, "zero_division": 0.0}

    def decided(p: NDArray[np.float64], share: float) -> NDArray[np.int64]:
        return np.asarray((np.log(np.maximum(p, 1e-9)) - share * prior).argmax(1))

    held_out = [
        f1_score(valid.labels, decided(valid.probabilities, share), sample_weight=valid.weight, **options)
        for share in SHARES
    ]
    return float(f1_score(truth, decided(aside, SHARES[int(np.argmax(held_out))]), **options))


def report(folder: Path, name: str, base: str, blends: Sequence[str]) -> Iterator[str]:
    """The base's means, and below them paired differences from it."""
    stored: dict[str, dict[int, MemberOutputs]] = {}
    for path in sorted(folder.glob(f"{name}-*.npz")):
        variant, number = path.stem.removeprefix(f"{name}-").rsplit("-", 1)
        with np.load(path) as arrays:
            stored.setdefault(variant, {})[int(number)] = MemberOutputs(
                *(arrays[field] for field in MemberOutputs._fields)
            )
    own = {number: judged([outputs]) for number, outputs in stored[base].items()}
    rules = list(next(iter(own.values())))
    yield f"| {name} | {' | '.join(rules)} | divisions |"
    yield "|" + "---|" * (len(rules) + 2)
    for variant in [base, *(v for v in stored if v != base), *blends]:
        parts = variant.split("+")
        common = [k for k in own if all(k in stored.get(part, {}) for part in parts)]
        if len(common) < 2:
            continue
        found = own if variant == base else {k: judged([stored[part][k] for part in parts]) for k in common}
        gaps = {rule: [found[k][rule] - (variant != base) * own[k][rule] for k in common] for rule in rules}
        yield f"| {variant} | {' | '.join(mean_and_error(pd.Series(gaps[rule])) for rule in rules)} | {len(common)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--sets", nargs="+", choices=SETS, default=SETS)
    parser.add_argument("--variants", nargs="+", default=["auto"])
    parser.add_argument("--divisions", nargs="+", type=int, default=list(range(SPLITS)))
    parser.add_argument("--out", type=Path, help="a folder")
    parser.add_argument("--report", type=Path, help="a folder filled before")
    parser.add_argument("--base", default="auto", help="what a report compares with")
    parser.add_argument("--blends", nargs="+", default=[], help="of a report, such as half+half,xgboost")
    args = parser.parse_args()
    if args.report is not None:
        for name in args.sets:
            print("\n".join(report(args.report, name, args.base, args.blends)), flush=True)
        return
    if args.data_dir is None or args.out is None:
        parser.error("--data-dir and --out are needed: the folder with the sets, and one to fill; or --report")
    fill(args.out, args.data_dir, args.sets, args.divisions, args.variants, fit)


if __name__ == "__main__":
    main()
