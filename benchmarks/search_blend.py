"""Blends of boosted trees, randomised trees and networks, compared for F1 on held-out training data.

    python benchmarks/search_blend.py --data-dir DIR --out blends --sets yeast --splits 0 1 2 3 4 5
    python benchmarks/search_blend.py --report blends --sets yeast --blends booster+forest booster+forest+network

As in search_folds.py a split keeps 20 % of the rows as test rows, which are never looked at, and 16 % as selection
rows; members are fitted on the others, by the same five folds. What each says of the rows that it held out and of the
selection rows is kept (SET-MEMBER-SPLIT.npz), so that a blend can be tried without training again. A report scores all
these rows together, since selection rows of a rare class are two or three, by argmax and by the plug-in rule, which is
learned from held-out probabilities without labels; in brackets the selection rows alone.
"""

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from bench_recipes import SETS, load
from numpy.typing import NDArray
from sklearn.ensemble import RandomForestClassifier
from sklearn.metrics import f1_score
from sklearn.model_selection import train_test_split
from stacked_splits import average_and_labels

from evalign import EASTBooster, EASTClassifier, decision
from evalign.estimators.blend import blended, mixture_weights
from evalign.estimators.forest import EASTForest

FOLDS = 5
BASE = "booster"


class RandomForest(EASTForest):
    """The same with scikit-learn's random forest."""

    def _forest(self, seed: int) -> Any:
        return RandomForestClassifier(self.trees, n_jobs=self.n_jobs, random_state=seed % 2**31)


EMBEDDING: dict[str, Any] = {"network": "embedding", "hidden": (256, 128), "folds": FOLDS}
MEMBERS: dict[str, tuple[type[Any], dict[str, Any]]] = {
    BASE: (EASTBooster, {"n_jobs": 1}),
    "all-columns": (EASTBooster, {"n_jobs": 1, "columns": 1.0}),
    "cross-entropy": (EASTBooster, {"n_jobs": 1, "recipe": "cross_entropy"}),
    "xgboost": (EASTBooster, {"n_jobs": 1, "library": "xgboost"}),
    "forest": (EASTForest, {"n_jobs": 1}),
    "forest-few": (EASTForest, {"n_jobs": 1, "columns": 0.33}),
    "random-forest": (RandomForest, {"n_jobs": 1}),
    "network": (EASTClassifier, {**EMBEDDING, "epochs": 40}),
    "network-short": (EASTClassifier, {**EMBEDDING, "epochs": 30, "learning_rate": 1e-3, "batch_size": 256}),
    "mlp": (EASTClassifier, {"folds": FOLDS}),
}


class MemberOutputs(NamedTuple):
    """Probabilities of one member for held-out and selection rows."""

    held_out: NDArray[np.float64]
    labels: NDArray[np.int64]
    weight: NDArray[np.float64]
    select: NDArray[np.float64]
    select_labels: NDArray[np.int64]


def fit(member: str, X: Any, y: NDArray[np.int64], split: int) -> MemberOutputs:
    dev, _ = train_test_split(np.arange(len(y)), test_size=0.2, random_state=split, stratify=y)
    rows, select = train_test_split(dev, test_size=0.2, random_state=split, stratify=y[dev])
    cls, options = MEMBERS[member]
    model = cls(**options, random_state=split).fit(X.iloc[rows], y[rows])
    valid = model.held_out_predictions_
    return MemberOutputs(
        valid.probabilities, valid.labels, valid.weight, model.predict_proba(X.iloc[select]), y[select]
    )


def scores(outputs: Sequence[MemberOutputs], weights: Sequence[float]) -> NDArray[np.float64]:
    """Argmax and plug-in on all rows, then on the selection rows alone."""
    first = outputs[0]
    p, q = blended([t.held_out for t in outputs], weights), blended([t.select for t in outputs], weights)
    average, labels = average_and_labels(p.shape[1])
    rule = decision.plug_in(p, "f1", average=average, sample_weight=first.weight, margin=1 / len(p))
    truth = np.concatenate([first.labels, first.select_labels])
    weight = np.concatenate([first.weight, np.ones(len(q))])
    found = []
    for held_out, select in ((p.argmax(1), q.argmax(1)), (rule.predict(p), rule.predict(q))):
        both = np.concatenate([held_out, select])
        options: dict[str, Any] = {"average": average, "labels": labels, "zero_division": 0.0}
        found.append(
            [f1_score(truth, both, sample_weight=weight, **options), f1_score(first.select_labels, select, **options)]
        )
    return np.array(found).T.ravel()


def report(folder: Path, name: str, blends: Sequence[str]) -> Iterator[str]:
    """A line for every member and blend: the difference from the booster, split by split."""
    stored: dict[tuple[str, int], MemberOutputs] = {}
    for path in sorted(folder.glob(f"{name}-*.npz")):
        member, split = path.stem.removeprefix(f"{name}-").rsplit("-", 1)
        with np.load(path) as arrays:
            stored[member, int(split)] = MemberOutputs(*(arrays[field] for field in MemberOutputs._fields))
    members = [member for member in MEMBERS if any(key[0] == member for key in stored)]
    yield f"| {name} | weights | argmax | plug-in | splits |"
    yield "|" + "---|" * 5
    for blend in [*members, *blends]:
        parts = blend.split("+")
        common = [k for k in range(1000) if all((part, k) in stored for part in (*parts, BASE))]
        if not common:
            continue
        for how in ("equal", "auto")[: len(parts)]:
            gaps, shares = [], []
            for k in common:
                outputs = [stored[part, k] for part in parts]
                weights: Sequence[float] = [1 / len(parts)] * len(parts)
                if how == "auto":
                    weights = mixture_weights([t.held_out for t in outputs], outputs[0].labels, outputs[0].weight)
                own = scores(outputs, weights)
                gaps.append(own if blend == BASE else own - scores([stored[BASE, k]], [1.0]))
                shares.append(weights)
            mean = np.mean(gaps, 0)
            error = np.std(gaps, 0, ddof=1) / len(gaps) ** 0.5 if len(gaps) > 1 else np.full(4, np.nan)
            said = [f"{mean[i]:+.4f} ± {error[i]:.4f} ({mean[i + 2]:+.4f})" for i in (0, 1)]
            share = " ".join(f"{s:.2f}" for s in np.mean(shares, 0))
            yield f"| {blend} | {share} | {' | '.join(said)} | {len(common)} |"


def fill(
    folder: Path, data: Path, sets: Sequence[str], splits: Sequence[int], members: Sequence[str],
    fit: Callable[[str, Any, NDArray[np.int64], int], MemberOutputs],
) -> None:  # fmt: skip
    """Fit every member on every set and split, with a file each; existing files are not fitted again."""
    torch.set_num_threads(1)
    folder.mkdir(parents=True, exist_ok=True)
    for name in sets:
        X, y = load(name, data)
        for split in splits:
            for member in members:
                path = folder / f"{name}-{member}-{split}.npz"
                if not path.exists():
                    started = time.process_time()
                    np.savez_compressed(path, **fit(member, X, y, split)._asdict())
                    print(f"{name} {member} {split}: {time.process_time() - started:.0f} CPU s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--sets", nargs="+", choices=SETS, default=SETS)
    parser.add_argument("--members", nargs="+", choices=list(MEMBERS), default=[BASE, "forest", "network"])
    parser.add_argument("--splits", nargs="+", type=int, default=list(range(4)))
    parser.add_argument("--out", type=Path, help="a folder")
    parser.add_argument("--report", type=Path, help="a folder filled before")
    parser.add_argument("--blends", nargs="+", default=[f"{BASE}+forest", f"{BASE}+network", f"{BASE}+forest+network"])
    args = parser.parse_args()
    if args.report is not None:
        for name in args.sets:
            print("\n".join(report(args.report, name, args.blends)), flush=True)
        return
    if args.data_dir is None or args.out is None:
        parser.error("--data-dir and --out are needed: the folder with the sets, and one to fill; or --report")
    fill(args.out, args.data_dir, args.sets, args.splits, args.members, fit)


if __name__ == "__main__":
    main()
