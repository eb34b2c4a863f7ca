"""Is a plug-in rule better learned on held-out rows, or on the rows it decides (`predict_jointly`)?

    python benchmarks/search_together.py --data-dir DIR                                  # Yeast and Mammography
    python benchmarks/search_together.py --data-dir DIR --sets adult --methods booster --divisions 5

No test row is read: a division takes the development rows of a split, fits on 80 % of them and judges by the rest,
which stand for new rows. F1 (macro for more than two classes) of each rule, and paired differences from plug-in on rows
held out. A forest holds out 20 % of what it is given; the booster holds out every row once, by folds.
"""

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from bench_recipes import SETS, decided_by, load
from sklearn.ensemble import RandomForestClassifier
from sklearn.model_selection import train_test_split

from evalign import EASTBooster
from evalign.tables.split import HeldOutPredictions

METHODS = ("random forest", "booster")


def forest(X: pd.DataFrame, y: Any, rows: Any, new: Any, seed: int) -> tuple[HeldOutPredictions, Any]:
    table = pd.get_dummies(X, dtype=float).to_numpy()
    train, held_out = train_test_split(rows, test_size=0.2, random_state=seed, stratify=y[rows])
    model = RandomForestClassifier(300, random_state=seed, n_jobs=1).fit(table[train], y[train])

    def probabilities(at: Any) -> Any:
        found = np.zeros((len(at), int(y.max()) + 1))
        found[:, model.classes_] = model.predict_proba(table[at])
        return found

    return HeldOutPredictions(probabilities(held_out), y[held_out], np.ones(len(held_out))), probabilities(new)


def booster(X: pd.DataFrame, y: Any, rows: Any, new: Any, seed: int) -> tuple[HeldOutPredictions, Any]:
    model = EASTBooster(random_state=seed, n_jobs=1).fit(X.iloc[rows], y[rows])
    return model.held_out_predictions_, model.predict_proba(X.iloc[new])


def division(name: str, method: str, seed: int, folder: Path) -> dict[str, float]:
    X, y = load(name, folder)
    development, _ = train_test_split(np.arange(len(y)), test_size=0.2, random_state=seed, stratify=y)
    rows, new = train_test_split(development, test_size=0.2, random_state=100 + seed, stratify=y[development])
    held_out, p = (forest if method == "random forest" else booster)(X, y, rows, new, seed)
    return decided_by(held_out, p, y[new], int(y.max()) + 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--sets", nargs="+", default=["yeast", "mammography"], choices=SETS)
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--divisions", type=int, default=20)
    options = parser.parse_args()
    for name in options.sets:
        for method in options.methods:
            found = pd.DataFrame(division(name, method, seed, options.data_dir) for seed in range(options.divisions))
            gain = found.sub(found["plug-in"], axis=0)
            error = gain.std(ddof=1) / len(gain) ** 0.5
            words = [
                f"{rule} {found[rule].mean():.4f} ({gain[rule].mean():+.4f} ± {error[rule]:.4f})" for rule in found
            ]
            print(f"{name}, {method}, {len(found)} divisions:", ", ".join(words), flush=True)


if __name__ == "__main__":
    main()
