"""Which decision rule to use by default: held-out and test probabilities once, then every rule on them.

    python benchmarks/search_rules.py probabilities --data-dir DIR --cache CACHE --splits 5
    python benchmarks/search_rules.py compare --cache CACHE --out benchmarks/results/search_rules.csv
    python benchmarks/search_rules.py choice   # gain of a rule that is chosen on other tables, from the stored results

DIR holds Parquet tables with a column `target`. A split is 75 / 25, stratified; held-out probabilities come from five
folds of the larger part, test probabilities from a model of all of it. Rules see held-out rows only.
"""

import argparse
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from multiprocessing import Pool
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from sklearn.base import clone
from sklearn.compose import make_column_selector, make_column_transformer
from sklearn.ensemble import HistGradientBoostingClassifier, RandomForestClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import StratifiedKFold, train_test_split
from sklearn.naive_bayes import GaussianNB
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler

from evalign import Confusion, decision, metrics
from evalign.decision import Rule
from evalign.decision.calibration import balanced_folds, fit_calibration

Floats = NDArray[np.float64]


def models() -> dict[str, Any]:
    """Good and bad probabilities: two smooth models, two kinds of trees, naive Bayes, class weights."""
    found: dict[str, Any] = {
        "logistic": LogisticRegression(max_iter=500),
        "balanced logistic": LogisticRegression(max_iter=500, class_weight="balanced"),
        "naive Bayes": GaussianNB(),
        "forest": RandomForestClassifier(200, n_jobs=1, random_state=0),
        "histogram boosting": HistGradientBoostingClassifier(early_stopping=False, random_state=0),
    }
    if find_spec("lightgbm"):
        import lightgbm

        found["lightgbm"] = lightgbm.LGBMClassifier(n_estimators=100, n_jobs=1, verbose=-1, random_state=0)
    return found


def encode(train: pd.DataFrame, *others: pd.DataFrame) -> list[Floats]:
    """Standardised numbers and one-hot text, learned on the first table."""
    text = OneHotEncoder(handle_unknown="ignore", sparse_output=False)
    numbers = make_pipeline(StandardScaler())
    encoder = make_column_transformer(
        (numbers, make_column_selector(dtype_include="number")), (text, make_column_selector(dtype_exclude="number"))
    )
    return [encoder.fit_transform(train), *(encoder.transform(table) for table in others)]


def load(path: Path) -> tuple[pd.DataFrame, NDArray[np.int64]]:
    """Features, and classes with the rarest last, so that it is the positive one of two."""
    table = pd.read_parquet(path)
    counts = table["target"].value_counts()
    order = {label: k for k, label in enumerate(counts.index)}
    return table.drop(columns="target"), table["target"].map(order).to_numpy(np.int64)


def probabilities(model: Any, X: pd.DataFrame, y: NDArray[np.int64], new: pd.DataFrame) -> Floats:
    train, test = encode(X, new)
    fitted = clone(model).fit(train, y)
    p = np.zeros((len(new), int(y.max()) + 1))
    p[:, fitted.classes_] = fitted.predict_proba(test)
    return p


def cache_cell(job: tuple[Path, str, int], cache: Path) -> None:
    """Held-out and test probabilities of one table, model and split."""
    path, name, split = job
    out = cache / f"{path.stem}-{name}-{split}.npz"
    if out.exists():
        return
    X, y = load(path)
    fit, test, y_fit, y_test = train_test_split(X, y, test_size=0.25, stratify=y, random_state=split)
    model = models()[name]
    held_out = np.zeros((len(fit), int(y.max()) + 1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for a, b in StratifiedKFold(5, shuffle=True, random_state=split).split(fit, y_fit):
            p = probabilities(model, fit.iloc[a], y_fit[a], fit.iloc[b])
            held_out[b, : p.shape[1]] = p
        p = probabilities(model, fit, y_fit, test)
    np.savez(out, held_out=held_out, target=y_fit, test=p, truth=y_test)


def cache_probabilities(data: Path, cache: Path, splits: int, names: list[str] | None, processes: int) -> None:
    cache.mkdir(parents=True, exist_ok=True)
    paths = sorted(data.glob("*.parquet"), key=lambda p: -p.stat().st_size)
    jobs = [(path, name, split) for split in range(splits) for path in paths for name in names or models()]
    with Pool(processes) as pool:
        for _ in pool.imap_unordered(partial(cache_cell, cache=cache), jobs):
            pass


Rules = dict[str, Callable[[Floats, NDArray[np.int64], str], Rule]]


def calibrated_plug_in(ridge: float) -> Callable[[Floats, NDArray[np.int64], str], Rule]:
    def learn(p: Floats, y: NDArray[np.int64], metric: str) -> Rule:
        calibration = fit_calibration(p, y, np.ones(len(y)), ridge=ridge)
        rule = decision.plug_in(calibration(p), metric)
        return replace(rule, kind="offsets" if rule.kind == "argmax" else rule.kind, **calibration.fields)

    return learn


CANDIDATES: Rules = {
    "argmax": lambda p, y, metric: Rule("argmax", p.shape[1]),
    "plug-in": lambda p, y, metric: decision.plug_in(p, metric),
    "tuned": lambda p, y, metric: decision.tuned(p, y, metric, guard=False),
    "calibrated .5": calibrated_plug_in(0.5),
    "calibrated 3": calibrated_plug_in(3.0),
    "calibrated 20": calibrated_plug_in(20.0),
}
GROUPS = 20


def score(predicted: NDArray[np.int64], y: NDArray[np.int64], classes: int, metric: str) -> float:
    c = Confusion.hard(torch.from_numpy(predicted), torch.from_numpy(y), classes)
    return float(metrics.resolve(metric, average="binary" if classes == 2 else "macro")(c))


def compare_cell(path: Path, names: Sequence[str], folds: int = 4) -> list[dict[str, Any]]:
    """Test score of every rule, its cross-validated score on held-out rows and the jackknife error against argmax."""
    torch.set_num_threads(1)
    table, model, split = path.stem.rsplit("-", 2)
    cell = np.load(path)
    p, y, test, truth = (cell[name] for name in ("held_out", "target", "test", "truth"))
    p, test = (x / x.sum(axis=1, keepdims=True) for x in (p, test))
    classes = p.shape[1]
    part = balanced_folds(p, y, folds * GROUPS)
    fold, group = part % folds, part // folds
    rows = []
    for metric in names:
        decided = {}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for name, learn in CANDIDATES.items():
                start = time.perf_counter()
                rule = learn(p, y, metric)
                seconds = time.perf_counter() - start
                row = {"table": table, "model": model, "split": int(split), "metric": metric, "rule": name,
                       "rows": len(y), "classes": classes, "rarest": int(np.bincount(y).min()),
                       "test": score(rule.predict(test), truth, classes, metric), "seconds": seconds}  # fmt: skip
                if name.startswith(("calibrated", "plug-in")):
                    joint = decision.plug_in(rule.calibrate(test), metric)
                    row["jointly"] = score(joint.predict(rule.calibrate(test)), truth, classes, metric)
                decided[name] = np.empty(len(y), dtype=np.int64)
                for k in range(folds):
                    decided[name][fold == k] = learn(p[fold != k], y[fold != k], metric).predict(p[fold == k])
                row["cross-validated"] = score(decided[name], y, classes, metric)
                lead = [
                    score(decided[name][group != g], y[group != g], classes, metric)
                    - score(decided["argmax"][group != g], y[group != g], classes, metric)
                    for g in range(GROUPS)
                ]
                row["error"] = float(np.sqrt((GROUPS - 1) * np.var(lead)))
                rows.append(row)
            guarded = decision.tuned(p, y, metric)
            rows.append(rows[-1] | {"rule": "tuned, guarded", "jointly": np.nan, "cross-validated": np.nan,
                                    "test": score(guarded.predict(test), truth, classes, metric)})  # fmt: skip
    return rows


def compare(cache: Path, out: Path, names: Sequence[str], processes: int) -> None:
    cells = sorted(cache.glob("*.npz"), key=lambda path: -path.stat().st_size)
    done: list[dict[str, Any]] = []
    with Pool(processes) as pool:
        for rows in pool.imap_unordered(partial(compare_cell, names=names), cells):
            done += rows
            pd.DataFrame(done).to_csv(out, index=False, float_format="%.5f")
    report(out)


def report(path: Path) -> None:
    """Difference from argmax: mean over tables ± standard error over tables."""
    rows = pd.read_csv(path)
    rows = pd.concat([rows, rows.dropna(subset="jointly").assign(
        test=lambda r: r["jointly"], rule=lambda r: r["rule"] + ", jointly")])  # fmt: skip
    wide = rows.pivot_table(index=["metric", "model", "table", "split"], columns="rule", values="test")
    lead = wide.sub(wide["argmax"], axis=0).groupby(["metric", "model", "table"]).mean()
    print(lead.groupby(["metric", "model"]).mean().round(4).to_string())
    tables = lead.groupby("table").mean()
    print(pd.DataFrame({"mean": tables.mean(), "error": tables.sem(), "worst": tables.min()}).round(4).to_string())


def mean_error(values: "pd.Series[float]") -> str:
    return f"{values.mean():+.4f} ± {values.std() / len(values) ** 0.5:.4f}"


def choice(path: Path, halves: int = 1000) -> None:
    """Gain over argmax of the rule that is best on other tables, and of the rule that is best on all.

    Variants in addition to the stored rules: the plain or the tuned calibrated rule unless argmax leads by so many
        errors in cross-validation, and the rule of the best cross-validated score.
    """
    rows = pd.read_csv(path)
    key = ["metric", "model", "table", "split"]
    test, validated, error = (
        rows.pivot_table(index=key, columns="rule", values=v) for v in ("test", "cross-validated", "error")
    )
    behind = validated["argmax"] - validated["calibrated .5"]
    for errors in (0.0, 0.5, 1.0, 2.0):
        for name in ("tuned, guarded", "calibrated .5"):
            lost = behind > errors * error["calibrated .5"]
            test[f"{name} unless argmax leads by {errors}"] = np.where(lost, test["argmax"], test[name])
    validated = validated.dropna(axis=1)
    test["best validated"] = test[validated.columns].to_numpy()[np.arange(len(test)), validated.to_numpy().argmax(1)]
    gain = test.sub(test["argmax"], axis=0).drop(columns="argmax")
    tables = gain.groupby("table").mean()
    best = str(tables.mean().idxmax())
    print(f"best on all tables: {best}, {mean_error(tables[best])}")
    left_out = pd.Series({name: tables.at[name, tables.drop(name).mean().idxmax()] for name in tables.index})
    print(f"chosen on the other tables: {mean_error(left_out)}, worst {left_out.min():+.4f}")
    generator, found = np.random.default_rng(0), []
    for _ in range(halves):
        order = generator.permutation(len(tables))
        chosen = str(tables.iloc[order[::2]].mean().idxmax())
        found.append([tables.iloc[order[half::2]][chosen].mean() for half in (0, 1)])
    print(
        "chosen on a half of the tables, there and on the other half: {:+.4f} {:+.4f}".format(*np.mean(found, axis=0))
    )
    split = gain.index.get_level_values("split")
    for own in ((0, 1), (2, 3)):
        chosen = str(gain[split.isin(own)].groupby("table").mean().mean().idxmax())
        others = gain[~split.isin(own)].groupby("table").mean()[chosen]
        print(f"chosen on splits {own}: {chosen}; on the others {mean_error(others)}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=("probabilities", "compare", "report", "choice"))
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--cache", type=Path)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/search_rules.csv"))
    parser.add_argument("--splits", type=int, default=5)
    parser.add_argument("--models", nargs="*")
    parser.add_argument("--metrics", nargs="*", default=["f1", "mcc", "balanced_accuracy"])
    parser.add_argument("--processes", type=int, default=1)
    options = parser.parse_args()
    if options.step == "probabilities":
        cache_probabilities(options.data_dir, options.cache, options.splits, options.models, options.processes)
    elif options.step == "compare":
        compare(options.cache, options.out, options.metrics, options.processes)
    else:
        (choice if options.step == "choice" else report)(options.out)
