"""Which decision rule to use by default: held-out and test probabilities once, then every rule on them.

    python benchmarks/search_rules.py probabilities --data-dir DIR --cache CACHE --splits 5
    python benchmarks/search_rules.py compare --cache CACHE --out benchmarks/results/search_rules.csv

DIR holds Parquet tables with a column `target`. A split is 75 / 25, stratified; held-out probabilities come from five
folds of the larger part, test probabilities from a model of all of it. Rules see held-out rows only.
"""

import argparse
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from sklearn.base import clone
from sklearn.compose import make_column_selector, make_column_transformer
from sklearn.ensemble import HistGradientBoostingClassifier, RandomForestClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import StratifiedKFold, train_test_split
from sklearn.naive_bayes import GaussianNB
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler

Floats = NDArray[np.float64]


def models() -> dict[str, Any]:
    """Good and bad probabilities: two smooth models, two kinds of trees, naive Bayes, class weights."""
    import lightgbm

    boosted = lightgbm.LGBMClassifier(n_estimators=100, n_jobs=1, verbose=-1, random_state=0)
    return {
        "logistic": LogisticRegression(max_iter=500),
        "balanced logistic": LogisticRegression(max_iter=500, class_weight="balanced"),
        "naive Bayes": GaussianNB(),
        "forest": RandomForestClassifier(200, n_jobs=1, random_state=0),
        "lightgbm": boosted,
        "histogram boosting": HistGradientBoostingClassifier(early_stopping=False, random_state=0),
    }


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


def cache_probabilities(data: Path, cache: Path, splits: int, names: list[str] | None) -> None:
    cache.mkdir(parents=True, exist_ok=True)
    for split in range(splits):
        for path in sorted(data.glob("*.parquet"), key=lambda p: p.stat().st_size):
            X, y = load(path)
            parts = train_test_split(X, y, test_size=0.25, stratify=y, random_state=split)
            fit, test, y_fit, y_test = parts
            for name, model in models().items():
                out = cache / f"{path.stem}-{name}-{split}.npz"
                if out.exists() or (names and name not in names):
                    continue
                start = time.perf_counter()
                held_out = np.zeros((len(fit), int(y.max()) + 1))
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    for a, b in StratifiedKFold(5, shuffle=True, random_state=split).split(fit, y_fit):
                        p = probabilities(model, fit.iloc[a], y_fit[a], fit.iloc[b])
                        held_out[b, : p.shape[1]] = p
                    p = probabilities(model, fit, y_fit, test)
                np.savez(out, held_out=held_out, target=y_fit, test=p, truth=y_test)
                print(out.name, f"{time.perf_counter() - start:.1f} s", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=("probabilities", "compare"))
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--splits", type=int, default=5)
    parser.add_argument("--models", nargs="*")
    options = parser.parse_args()
    if options.step == "probabilities":
        cache_probabilities(options.data_dir, options.cache, options.splits, options.models)
