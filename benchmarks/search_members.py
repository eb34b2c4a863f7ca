"""Members, repeats and weights of the blend, compared on selection rows inside the training part of many tables.

    python benchmarks/search_members.py --data-dir DIR --out members              # fit and store, resumable
    python benchmarks/search_members.py --report members                          # compare blends of the stored members

A split keeps 25 % of the rows as test rows, which are never read, and 25 % of the others as selection rows. Each member
is cross-fitted on the remaining rows, once for each of two deals into folds, and its probabilities of held-out and
selection rows are stored (TABLE-SPLIT.npz). A report blends them as `EASTBlend` does: weights and decision are learned
from held-out rows alone, log-loss and F1 are those of the selection rows.
"""

import argparse
import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from bench_quality import load, tables
from numpy.typing import NDArray
from sklearn.ensemble import RandomForestClassifier
from sklearn.kernel_approximation import Nystroem
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import f1_score
from sklearn.neighbors import KNeighborsClassifier
from sklearn.pipeline import make_pipeline

from evalign import EASTBlend
from evalign.estimators import planning
from evalign.estimators.blend import NEGLIGIBLE, make_member, mixture_weights
from evalign.estimators.explain import log_loss
from evalign.tables.encode import TableEncoder, TreeTable
from evalign.tables.split import HeldOutPredictions, TrainingRows, fold_rows, split_rows

DEFAULT = ["linear", "forest", "boost", "network"]
REPEATED = {*DEFAULT, "xgboost", "random forest", "kernel"}  # members fitted on the second deal as well
FIRST_SEED = 2000  # of splits; those of bench_quality.py begin at 1000
TEST = 0.25
SMALL = 600  # rows, below which there are twice as many splits
BOUND = 20.0
Floats = NDArray[np.float64]
Fitted = tuple[Floats, Floats]  # probabilities of held-out rows, fold after fold, and of selection rows


def ours(name: str, **options: Any) -> Callable[[EASTBlend, TrainingRows, Any], Fitted]:
    """A member of the blend, with the options that the default preset gives it and some others."""

    def fit(blend: EASTBlend, data: TrainingRows, select: Any) -> Fitted:
        shape = blend._shape(data, len(data.encoder(TableEncoder, numeric="both").feature_names_out))
        given = {**planning.member_options(name, "default", shape), **options}
        member = make_member(name, blend._shared(data.seed), given)
        member.n_jobs = 1
        member.fit_prepared(data)
        return member.held_out_predictions_.probabilities, member._probabilities(select)

    return fit


def theirs(make: Callable[[int, int], Any], encoder: Any, **options: Any) -> Callable[..., Fitted]:
    """A classifier of scikit-learn on encoded columns; of several settings the one of least held-out log-loss."""

    def fit(blend: EASTBlend, data: TrainingRows, select: Any) -> Fitted:
        encode = data.encoder(encoder, **options)
        x, new = data.encoded(encoder, **options), encode.transform(select)
        if encoder is TableEncoder:
            x, new = np.clip(x, -BOUND, BOUND), np.clip(new, -BOUND, BOUND)
        truth, best, kept = data.predictions(np.empty((0, data.classes))), math.inf, None
        for setting in range(100):
            held_out, selected = [], np.zeros((len(new), data.classes))
            for d in data.divisions:
                model = make(setting, len(d.train))
                if model is None:
                    break
                name = model.steps[-1][0] + "__" if hasattr(model, "steps") else ""
                given = {} if isinstance(model, KNeighborsClassifier) else {f"{name}sample_weight": d.train_weight}
                model.fit(x[d.train], data.codes[d.train], **given)
                p = np.zeros((len(d.valid), data.classes))
                p[:, model.classes_] = model.predict_proba(x[d.valid])
                held_out.append(p)
                selected[:, model.classes_] += model.predict_proba(new) / len(data.divisions)
            if not held_out:
                break
            p = np.concatenate(held_out)
            loss = log_loss(p, truth.labels, truth.weight)
            if loss < best:
                best, kept = loss, (p, selected)
        assert kept is not None
        return kept

    return fit


def _forest(setting: int, rows: int) -> Any:
    return RandomForestClassifier(60, min_samples_leaf=2, random_state=setting) if setting < 1 else None


def _kernel(setting: int, rows: int) -> Any:
    settings = [(g, c) for g in (0.3, 1.0) for c in (0.3, 3.0, 30.0)]
    if setting >= len(settings):
        return None
    width, strength = settings[setting]
    return make_pipeline(
        ScaledNystroem(width, n_components=min(200, rows), random_state=0), LogisticRegression(C=strength, tol=1e-3)
    )


class ScaledNystroem(Nystroem):
    """RBF kernel whose width is that of the median column count: gamma = `width` / columns."""

    def __init__(self, width: float = 1.0, n_components: int = 100, random_state: Any = None) -> None:
        super().__init__(n_components=n_components, random_state=random_state)
        self.width = width

    def fit(self, X: Any, y: Any = None) -> Any:
        self.gamma = self.width / X.shape[1]
        return super().fit(X, y)


def _neighbours(setting: int, rows: int) -> Any:
    counts = [k for k in (5, 15, 40) if k <= rows // 2]
    return KNeighborsClassifier(counts[setting], weights="distance") if setting < len(counts) else None


MEMBERS: dict[str, Callable[..., Fitted]] = {
    "linear": ours("linear"),
    "forest": ours("forest"),
    "forest x2": ours("forest", trees=120),
    "forest one-row leaves": ours("forest", min_rows=1),
    "boost": ours("boost"),
    "boost tiny leaves": ours("boost", leaves=4, min_rows=2),
    "xgboost": ours("boost", library="xgboost"),
    "network": ours("network"),
    "random forest": theirs(_forest, TreeTable),
    "kernel": theirs(_kernel, TableEncoder, numeric="both"),
    "neighbours": theirs(_neighbours, TableEncoder, numeric="both"),
}


def fit(folder: Path, table: str, split: int, repeats: int, max_rows: int, stored: Mapping[str, Any]) -> dict[str, Any]:
    """Probabilities of all members that are not stored yet, with the labels they are held against."""
    X, y = load(table, folder)
    if len(y) > max_rows:
        kept, _ = split_rows(y, 1 - max_rows / len(y), 0)
        X, y = X.iloc[kept], y[kept]
    train, _ = split_rows(y, TEST, FIRST_SEED + split)
    inner, select = split_rows(y[train], TEST, split)
    rows, select = train[inner], train[select]
    blend = EASTBlend("f1", n_jobs=1, device="cpu", random_state=split)
    blend._time = planning.TimeBudget(math.inf)
    whole, found = blend._prepare(X.iloc[rows], y[rows], None), dict(stored)
    for repeat in range(repeats):
        seed = whole.seed + repeat
        folds = fold_rows(whole.codes, whole.weight, len(whole.divisions), seed)
        data = replace(whole, seed=seed, divisions=folds)
        truth = data.predictions(np.empty((0, data.classes)))
        # Not y: of two classes the rarer one is 1, which `_prepare` may number otherwise.
        found |= {f"at {repeat}": truth.rows, f"labels {repeat}": truth.labels, f"weight {repeat}": truth.weight}
        found["select"] = blend.class_order[np.searchsorted(blend.classes_, y[select])]
        for name, make in MEMBERS.items():
            if f"{name} {repeat} held-out" not in found and (not repeat or name in REPEATED):
                started = time.process_time()
                p, q = make(blend, data, X.iloc[select])
                found |= {f"{name} {repeat} held-out": p, f"{name} {repeat} select": q}
                found[f"{name} {repeat} seconds"] = np.array(time.process_time() - started)
    return found


def merged(stored: Mapping[str, Any], repeats: int) -> tuple[list[NDArray[np.int64]], Any]:
    """Places that average held-out rows over repeats, and labels and weights by distinct row."""
    at = np.concatenate([stored[f"at {r}"] for r in range(repeats)])
    distinct, places = np.unique(at, return_inverse=True)
    labels = np.zeros(len(distinct), dtype=np.int64)
    labels[places] = np.concatenate([stored[f"labels {r}"] for r in range(repeats)])
    weight = np.bincount(places, np.concatenate([stored[f"weight {r}"] for r in range(repeats)])) / repeats
    return [places, np.bincount(places)], (labels, weight)


def blended(stored: Mapping[str, Any], members: list[str], repeats: int, prior: float) -> dict[str, float]:
    """Log-loss and F1 of the selection rows, and held-out log-loss, for one blend."""
    (places, counts), (labels, weight) = merged(stored, repeats)
    held_out, select, seconds = [], [], 0.0
    for name in members:
        p = np.concatenate([stored[f"{name} {r} held-out"] for r in range(repeats)])
        held_out.append(np.stack([np.bincount(places, column) / counts for column in p.T], axis=1))
        select.append(np.mean([stored[f"{name} {r} select"] for r in range(repeats)], axis=0))
        seconds += sum(float(stored[f"{name} {r} seconds"]) for r in range(repeats))
    weights = np.array(mixture_weights(held_out, labels, weight, prior_rows=prior))
    weights[weights < NEGLIGIBLE] = 0
    weights /= weights.sum()
    p, q = (sum(w * m for w, m in zip(weights, part, strict=True)) for part in (held_out, select))
    truth, classes = stored["select"], p.shape[1]
    model = EASTBlend("f1")
    model.classes_ = np.arange(classes)
    predicted = model._rule(HeldOutPredictions(p, labels, weight)).predict(q)
    average: Any = "binary" if classes == 2 else "macro"
    labels_of = None if classes == 2 else range(classes)
    return {
        "loss": log_loss(q, truth, np.ones(len(truth))), "held_out": log_loss(p, labels, weight),
        "f1": f1_score(truth, predicted, average=average, labels=labels_of, zero_division=0.0), "seconds": seconds,
    }  # fmt: skip


def swapped(**changes: str) -> list[str]:
    return [changes.get(name, name) for name in DEFAULT]


BLENDS: dict[str, tuple[list[str], int, float]] = {
    "default": (DEFAULT, 1, 100),
    "quick": (DEFAULT[:3], 1, 100),
    "two repeats": (DEFAULT, 2, 100),
    "two repeats, quick": (DEFAULT[:3], 2, 100),
    "weights nearer to equal": (DEFAULT, 1, 400),
    "forest of twice the trees": (swapped(forest="forest x2"), 1, 100),
    "forest with leaves of one row": (swapped(forest="forest one-row leaves"), 1, 100),
    "trees of four leaves": (swapped(boost="boost tiny leaves"), 1, 100),
    "XGBoost for LightGBM": (swapped(boost="xgboost"), 1, 100),
    **{f"+ {name}": ([*DEFAULT, name], 1, 100.0) for name in (
        "xgboost", "boost tiny leaves", "random forest", "kernel", "neighbours")},
    "+ random forest, kernel": ([*DEFAULT, "random forest", "kernel"], 1, 100),
    "+ xgboost, random forest": ([*DEFAULT, "xgboost", "random forest"], 1, 100),
    "+ xgboost, random forest, kernel": ([*DEFAULT, "xgboost", "random forest", "kernel"], 1, 100),
    "two repeats, + xgboost, random forest": ([*DEFAULT, "xgboost", "random forest"], 2, 100),
    "two repeats, + random forest, kernel": ([*DEFAULT, "random forest", "kernel"], 2, 100),
    "two repeats, + all of these": ([*DEFAULT, "xgboost", "random forest", "kernel"], 2, 100),
}  # fmt: skip


def report(folder: Path) -> Iterator[str]:
    """Paired differences from the default: over tables, and with Nadeau and Bengio's error of the choice of splits."""
    rows = []
    for path in sorted(folder.glob("*.npz")):
        table, split = path.stem.rsplit("-", 1)
        with np.load(path) as arrays:
            stored = dict(arrays)
        for name, (members, repeats, prior) in BLENDS.items():
            if all(f"{member} {r} held-out" in stored for member in members for r in range(repeats)):
                scores = blended(stored, members, repeats, prior)
                rows.append({"table": table, "split": split, "blend": name, **scores})
    found = pd.DataFrame(rows).set_index(["blend", "table", "split"])
    base = found.loc["default"]
    yield f"{base.index.get_level_values('table').nunique()} tables, {len(base)} splits"
    yield "| blend | log-loss | ± tables | ± splits | better on | F1 | ± tables | ± splits | better on | CPU s |"
    yield "|" + "---|" * 10
    for name in BLENDS:
        own = found.loc[name]
        line = f"| {name} |"
        for column, sign in (("loss", -1), ("f1", 1)):
            gap = (own[column] - base.loc[own.index, column]).groupby("table")
            mean, splits = gap.mean(), gap.size()
            spread = gap.var().fillna(0.0)
            error = math.sqrt(((1 / splits + TEST / (1 - TEST)) * spread).sum()) / len(mean)
            over = mean.std() / math.sqrt(len(mean))
            better, worse = np.sum(sign * mean > 1e-9), np.sum(sign * mean < -1e-9)
            line += f" {mean.mean():+.4f} | {over:.4f} | {error:.4f} | {better}:{worse} |"
        yield f"{line} {own.seconds.groupby('table').mean().mean():.1f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--tables", nargs="+")
    parser.add_argument("--splits", type=int, default=3, help="twice as many of small tables")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--max-rows", type=int, default=2000)
    parser.add_argument("--out", type=Path, help="a folder")
    parser.add_argument("--report", type=Path, help="a folder filled before")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if args.report is not None:
        print("\n".join(report(args.report)))
        return
    if args.data_dir is None or args.out is None:
        parser.error("--data-dir and --out are needed: the folder with the tables, and one to fill; or --report")
    args.out.mkdir(parents=True, exist_ok=True)
    names = args.tables or [name for name in tables(args.data_dir) if name.startswith("suite/")]
    for split in range(2 * args.splits):
        for name in names:
            if split >= args.splits and len(load(name, args.data_dir)[1]) >= SMALL:
                continue
            path = args.out / f"{name.split('/')[-1]}-{split}.npz"
            stored = dict(np.load(path)) if path.exists() else {}
            found = fit(args.data_dir, name, split, args.repeats, args.max_rows, stored)
            if len(found) > len(stored):
                np.savez_compressed(path, **found)
                seconds = {key: round(float(v), 1) for key, v in found.items() if key.endswith("0 seconds")}
                print(name, split, seconds, flush=True)


if __name__ == "__main__":
    main()
