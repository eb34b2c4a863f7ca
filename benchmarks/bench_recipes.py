"""Test F1 of our recipes and every rival: ten splits 64/16/20, default settings, test rows read once.

    python benchmarks/bench_recipes.py --data-dir DIR                     # all sets, stacked trials
    python benchmarks/bench_recipes.py --data-dir DIR --sets yeast --engine single   # EASTClassifier itself
    python benchmarks/bench_recipes.py --data-dir DIR --methods embedding ensemble "embedding ensemble"
    python benchmarks/bench_recipes.py --data-dir DIR --methods "anchored, 5 folds" "cross-entropy, 5 folds"
    python benchmarks/bench_recipes.py --data-dir DIR --methods blend --sets shuttle --only 3   # one split of ten
    python benchmarks/bench_trees.py --data-dir DIR --processes 14        # trees, a process for a set, method and split
    python benchmarks/bench_recipes.py --summary                          # the table from the stored rows

Rows are added to benchmarks/results/bench_quality.csv whenever a set and method (boosters: a split) is done; existing
rows are not run again.
`--engine stacked` trains the ten splits, and their folds, as one stacked network, which equals training them one by one
(tests/training/test_trials.py) and saves a GPU's time; columns that a split lacks are zeros there, and networks that
embed columns are stacked with splits that have the same ones.
"""

import argparse
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from sklearn.ensemble import HistGradientBoostingClassifier, RandomForestClassifier
from sklearn.metrics import f1_score
from sklearn.model_selection import train_test_split
from stacked_splits import Folds, Part, average_and_labels, network_probabilities, parts

from evalign import EASTBlend, EASTBooster, EASTClassifier, decision
from evalign.comparison.contenders import StockBooster
from evalign.decision import Rule
from evalign.storage.atomic import write_atomically
from evalign.tables.split import HeldOutPredictions
from evalign.training.recipes import find_recipe

RESULTS = Path(__file__).parent / "results" / "bench_quality.csv"
SETS = ["yeast", "mammography", "letter", "shuttle", "adult", "creditcard"]
PAPER = find_recipe("paper")
NETWORKS: dict[str, dict[str, Any]] = {  # options of EASTClassifier
    "anchored": {},
    "cross-entropy": {"recipe": "cross_entropy"},
    "EAST as printed": {"recipe": replace(PAPER, stages=tuple(replace(stage, epochs=200) for stage in PAPER.stages))},
}
LARGER: dict[str, dict[str, Any]] = {  # run on request; with a single validation set unless named otherwise
    "anchored, one division": {"folds": 1},
    "anchored, 5 folds": {"folds": 5},
    "cross-entropy, one division": {"recipe": "cross_entropy", "folds": 1},
    "cross-entropy, 5 folds": {"recipe": "cross_entropy", "folds": 5},
    "embedding": {"network": "embedding", "folds": 1},
    "embedding, cross-entropy": {"network": "embedding", "recipe": "cross_entropy", "folds": 1},
    "embedding, narrow": {"network": "embedding", "hidden": (256, 128), "folds": 1},
    "ensemble": {"ensemble": 8, "folds": 1},
    "embedding ensemble": {"network": "embedding", "ensemble": 8, "folds": 1},
    "embedding ensemble, cross-entropy": {
        "network": "embedding",
        "ensemble": 8,
        "recipe": "cross_entropy",
        "folds": 1,
    },
    "embedding ensemble, narrow": {"network": "embedding", "ensemble": 8, "hidden": (256, 128), "folds": 1},
}
TREES: dict[str, Callable[[int, int], Any]] = {  # of a seed and a number of threads
    "random forest": lambda seed, jobs: RandomForestClassifier(300, random_state=seed, n_jobs=jobs),
    "histogram gradient boosting": lambda seed, _: HistGradientBoostingClassifier(
        random_state=seed, early_stopping=True
    ),
}
BOOSTED = ("booster", "booster, cross-entropy", "stock LightGBM", "stock XGBoost")  # on the unencoded table
BLENDS: dict[str, dict[str, Any]] = {  # options of EASTBlend; run on request, on the unencoded table
    "blend": {},
    "blend, equal weights": {"weights": "equal"},
    "blend of trees": {"members": ("boost", "forest")},
    "blend, cross-entropy": {"recipe": "cross_entropy"},
}
Ints = NDArray[np.int64]


def load(name: str, folder: Path) -> tuple[pd.DataFrame, Ints]:
    """Features and labels 0 … C - 1 as the papers have them."""
    frame = pd.read_parquet(folder / f"{name}.parquet")
    if name == "adult":
        return frame.drop(columns=["income", "split", "target", "fnlwgt"]), frame["target"].to_numpy(np.int64)
    if name == "creditcard":
        y = frame["Class"].to_numpy(np.int64)
        return frame.drop(columns=["Class", "Time"]).assign(Amount=np.log(frame["Amount"] + 1e-3)), y
    codes = pd.factorize(frame["target"], sort=True)[0].astype(np.int64)
    return frame.drop(columns=[c for c in ("target", "split") if c in frame]), codes


def single_scores(
    options: dict[str, Any], X: pd.DataFrame, y: Ints, splits: int, device: str
) -> Iterator[dict[str, Any]]:
    """The same through EASTClassifier on the raw table; it holds out validation rows and decides by itself."""
    average, labels = average_and_labels(int(y.max()) + 1)
    for seed in range(splits):
        dev, test = train_test_split(np.arange(len(y)), test_size=0.2, random_state=seed, stratify=y)
        model = EASTClassifier(**options, random_state=seed, device=device).fit(X.iloc[dev], y[dev])
        argmax = model.classes_[model.predict_proba(X.iloc[test]).argmax(1)]
        for rule, predicted in (("argmax", argmax), ("plug-in", model.predict(X.iloc[test]))):
            score = f1_score(y[test], predicted, average=average, labels=labels, zero_division=0.0)
            yield {"decision": rule, "split": seed, "score": round(float(score), 6)}


def tree_probabilities(
    make: Callable[[int, int], Any], made: list[Part], classes: int, jobs: int = -1
) -> list[tuple[Any, Any]]:
    found = []
    for part in made:
        division = part.divisions[0]
        copies = np.repeat(division.train, np.rint(division.train_weight).astype(np.int64))  # as given
        model = make(part.seed, jobs).fit(part.x[copies], part.y[copies])
        both = []
        for z in (part.x[division.valid], part.test):
            p = np.zeros((len(z), classes))
            p[:, model.classes_] = model.predict_proba(z)
            both.append(p)
        found.append((both[0], both[1]))
    return found


def decided(valid: Any, test: Any, part: Part, classes: int) -> dict[str, float]:
    """Test F1 of argmax, tuned and plug-in decisions, learned on held-out rows, and of joint prediction."""
    return decided_by(
        HeldOutPredictions(valid, part.y[part.held_out], part.held_out_weight), test, part.test_y, classes
    )


def decided_by(valid: HeldOutPredictions, test: Any, truth: Ints, classes: int) -> dict[str, float]:
    average, labels = average_and_labels(classes)
    p, options = valid.probabilities, {"average": average, "sample_weight": valid.weight}
    rules = {
        "argmax": Rule("argmax", classes),
        "tuned": decision.tuned(p, valid.labels, "f1", **options),  # type: ignore[arg-type]
        "plug-in": decision.plug_in(p, "f1", margin=1 / len(p), **options),  # type: ignore[arg-type]
        "together": decision.plug_in(test, "f1", margin=1 / len(test), average=average),  # predict_jointly
    }
    return {
        name: float(f1_score(truth, rule.predict(test), average=average, labels=labels, zero_division=0.0))
        for name, rule in rules.items()
    }


def boosted_scores(
    method: str, X: pd.DataFrame, y: Ints, seed: int, jobs: int, device: str = "cpu"
) -> Iterator[dict[str, Any]]:
    """One split on the raw table: our booster, a blend, or a library's own objective stopped by held-out log-loss."""
    dev, test = train_test_split(np.arange(len(y)), test_size=0.2, random_state=seed, stratify=y)
    started, clock = time.process_time(), time.perf_counter()
    more: dict[str, Any] = {}
    if method in BLENDS:
        model: Any = EASTBlend(**BLENDS[method], random_state=seed, n_jobs=jobs, device=device)
    elif method.startswith("booster"):
        recipe = "cross_entropy" if "cross-entropy" in method else "anchored"
        model = EASTBooster(recipe=recipe, random_state=seed, n_jobs=jobs)
    else:
        model = StockBooster(library=method.removeprefix("stock ").lower(), random_state=seed, n_jobs=jobs)
    model.fit(X.iloc[dev], y[dev])
    seconds = round(time.process_time() - started, 2)
    scores = decided_by(model.held_out_predictions_, model.predict_proba(X.iloc[test]), y[test], int(y.max()) + 1)
    if method in BLENDS:
        more = {"seconds": round(time.perf_counter() - clock, 1), "weights": _words(model.weights_)}
    if not method.startswith("stock"):  # its own decision
        average, labels = average_and_labels(int(y.max()) + 1)
        own = f1_score(y[test], model.predict(X.iloc[test]), average=average, labels=labels, zero_division=0.0)
        scores["own"] = float(own)
    for rule, score in scores.items():
        yield {"decision": rule, "split": seed, "score": round(score, 6), "cpu_seconds": seconds, **more}


def _words(weights: dict[str, float]) -> str:
    return " ".join(f"{name}={weight:.2f}" for name, weight in weights.items())


def summary(rows: pd.DataFrame) -> str:
    """Mean and standard error per set, method and decision, and the difference to cross-entropy + plug-in."""
    lines = [
        "| set | method | decision | F1 | ± se | ours (anchored, plug-in) - this | ± se | splits |",
        "|" + "---|" * 8,
    ]
    for name, own in rows.groupby("set", sort=False):
        table = own.pivot_table(index="split", columns=["method", "decision"], values="score")
        ours = table.get(("anchored", "plug-in"))
        for method, rule in dict.fromkeys(zip(own.method, own.decision, strict=True)):
            score = table[method, rule].dropna()
            line = f"| {name} | {method} | {rule} | {score.mean():.4f} | {score.sem():.4f} |"
            if ours is not None:
                gap = (ours - score).dropna()
                line += f" {gap.mean():+.4f} | {gap.sem():.4f} |"
            lines.append(f"{line} {len(score)} |")
    return "\n".join(lines)


def _splits(X: pd.DataFrame, y: Ints, count: int, folds: Folds) -> list[Part]:
    return list(parts(X, y, range(count), folds))


def _is_stored(stored: pd.DataFrame, name: str, method: str, split: int | None = None) -> bool:
    if stored.empty:
        return False
    found = stored[(stored.set == name) & (stored.method == method)]
    return not found.empty if split is None else bool((found.split == split).any())


def store(rows: pd.DataFrame, path: Path) -> None:
    write_atomically(path, rows.to_csv(index=False))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--sets", nargs="+", default=SETS)
    parser.add_argument("--methods", nargs="+", default=[*NETWORKS, *TREES])
    parser.add_argument("--splits", type=int, default=10)
    parser.add_argument("--only", nargs="+", type=int, metavar="SPLIT", help="of boosters and blends: these splits")
    parser.add_argument("--engine", choices=["stacked", "single"], default="stacked")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--jobs", type=int, default=-1, help="threads of boosters")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--summary", action="store_true")
    options = parser.parse_args()
    stored = pd.read_csv(options.out) if options.out.exists() else pd.DataFrame()
    if options.summary:
        print(summary(stored))
        return
    if options.data_dir is None:
        parser.error("--data-dir is needed: the folder with yeast.parquet and the other sets")
    networks = NETWORKS | LARGER
    device_name = torch.cuda.get_device_name() if options.device == "cuda" else platform.machine()
    for name in options.sets:
        todo = [
            method for method in options.methods
            if method in BOOSTED or method in BLENDS or not _is_stored(stored, name, method)
        ]  # fmt: skip
        if not todo:
            continue
        X, y = load(name, options.data_dir)
        classes = int(y.max()) + 1
        splits = cache(partial(_splits, X, y, options.splits))
        for method in todo:
            if method in BOOSTED or method in BLENDS:
                engine = "blend" if method in BLENDS else "trees"
                known = {"set": name, "method": method, "engine": engine, "device": device_name}
                for seed in options.only or range(options.splits):
                    if _is_stored(stored, name, method, seed):
                        continue
                    found = boosted_scores(method, X, y, seed, options.jobs, options.device)
                    rows = [{**known, **row} for row in found]
                    stored = pd.concat([stored, pd.DataFrame(rows)], ignore_index=True)
                    store(stored, options.out)
                    print(name, method, seed, {row["decision"]: row["score"] for row in rows}, flush=True)
                continue
            if method in networks and options.engine == "single":
                rows = list(single_scores(networks[method], X, y, options.splits, options.device))
            else:
                if method in TREES:
                    own = splits(1)
                    probabilities = tree_probabilities(TREES[method], own, classes)
                else:
                    own = splits(EASTClassifier(**networks[method]).folds)
                    probabilities = network_probabilities(networks[method], own, classes, options.device)
                rows = [
                    {"decision": rule, "split": part.seed, "score": round(score, 6)}
                    for part, (valid, test) in zip(own, probabilities, strict=True)
                    for rule, score in decided(valid, test, part, classes).items()
                ]
            engine = "scikit-learn" if method in TREES else options.engine
            known = {"set": name, "method": method, "engine": engine, "device": device_name, "torch": torch.__version__}
            rows = [{**known, **row} for row in rows]
            stored = pd.concat([stored, pd.DataFrame(rows)], ignore_index=True)
            store(stored, options.out)
            print(summary(pd.DataFrame(rows)), flush=True)


if __name__ == "__main__":
    main()
