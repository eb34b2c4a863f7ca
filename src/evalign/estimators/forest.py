"""EASTForest: cross-fitted randomised trees, stored as plain arrays that can be loaded without executing code."""

import time
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.ensemble import ExtraTreesClassifier

from evalign import checks
from evalign.estimators.base import Arrays, MetricClassifier
from evalign.tables.encode import TreeTable
from evalign.tables.split import Floats, TrainingRows
from evalign.training.loop import Epoch, OnEpoch

BLOCK = 2**14  # rows predicted at a time, so that lookups stay in the cache
LEAF = -1


@dataclass(frozen=True)
class TreeArrays:
    """Binary trees, concatenated; `roots` are the positions where they begin.

    A node sends a row left if x[`feature`] <= `threshold` (nan if `gap_left`), else right, each a position later in
    the arrays. At a leaf `feature` is -1 and `left` is its row in `shares`, the classes' shares (leaves, C).
    """

    roots: NDArray[np.int64]
    feature: NDArray[np.int32]
    threshold: Floats
    left: NDArray[np.int64]
    right: NDArray[np.int64]
    gap_left: NDArray[np.bool_]
    shares: Floats

    @classmethod
    def of(cls, forest: Any, classes: int) -> Self:
        """Convert a fitted forest of scikit-learn, whose labels are codes from 0 to `classes` - 1."""
        parts: dict[str, list[Any]] = {name: [] for name in cls.__dataclass_fields__}
        start = leaves = 0
        for tree in (estimator.tree_ for estimator in forest.estimators_):
            is_leaf = tree.children_left == LEAF
            shares = np.zeros((int(is_leaf.sum()), classes))
            shares[:, forest.classes_] = tree.value[is_leaf, 0]
            parts["roots"].append([start])
            parts["feature"].append(np.where(is_leaf, LEAF, tree.feature))
            parts["threshold"].append(np.where(is_leaf, 0.0, tree.threshold))
            parts["left"].append(np.where(is_leaf, leaves + np.cumsum(is_leaf) - 1, start + tree.children_left))
            parts["right"].append(np.where(is_leaf, 0, start + tree.children_right))
            parts["gap_left"].append(tree.missing_go_to_left.astype(bool) & ~is_leaf)
            parts["shares"].append(shares / shares.sum(axis=1, keepdims=True))
            start, leaves = start + len(is_leaf), leaves + len(shares)
        joined = {name: np.concatenate(arrays) for name, arrays in parts.items()}
        return cls(**{name: array.astype(TYPES[name]) for name, array in joined.items()})

    def probabilities(self, x: NDArray[Any]) -> Floats:
        """Mean of the trees' shares, (n, columns) -> (n, C)."""
        # As in scikit-learn, thresholds lie between float32 values.
        rows = x.astype(np.float32)
        blocks = [self._mean_shares(rows[at : at + BLOCK]) for at in range(0, len(rows), BLOCK)]
        return np.concatenate(blocks) if blocks else np.empty((0, self.shares.shape[1]))

    def _mean_shares(self, x: NDArray[np.float32]) -> Floats:
        total = np.zeros((len(x), self.shares.shape[1]))
        for root in self.roots:
            node = np.full(len(x), root)
            open_rows = np.flatnonzero(self.feature[node] != LEAF)
            while len(open_rows):
                at = node[open_rows]
                value = x[open_rows, self.feature[at]]
                goes_left = (value <= self.threshold[at]) | (np.isnan(value) & self.gap_left[at])
                node[open_rows] = at = np.where(goes_left, self.left[at], self.right[at])
                open_rows = open_rows[self.feature[at] != LEAF]
            total += self.shares[self.left[node]]
        return total / len(self.roots)

    def check(self, columns: int) -> None:
        """Refuse arrays with positions out of range, or pointing backwards, where a row would loop forever."""
        inner = np.flatnonzero(self.feature != LEAF)
        places = np.stack([self.left[inner], self.right[inner]])
        leaf = self.left[self.feature == LEAF]
        sound = (
            len(self.roots)
            and ((self.roots >= 0) & (self.roots < len(self.feature))).all()
            and ((self.feature[inner] >= 0) & (self.feature[inner] < columns)).all()
            and ((places > inner) & (places < len(self.feature))).all()
            and ((leaf >= 0) & (leaf < len(self.shares))).all()
        )
        if not sound:
            raise ValueError("the trees in this file have nodes out of range; fit and save the model again")


TYPES: dict[str, Any] = {
    "roots": np.int64, "feature": np.int32, "threshold": np.float64, "left": np.int64, "right": np.int64,
    "gap_left": np.bool_, "shares": np.float64,
}  # fmt: skip


STEP = 10  # trees per fold between checks of the time
LARGEST = float(np.finfo(np.float32).max)


@dataclass(kw_only=True, eq=False, repr=False)
class EASTForest(MetricClassifier):
    """Scikit-learn's extremely randomised trees, cross-fitted, with a decision rule for a metric.

    A node tries one random threshold per column and takes the best. Averaged over many trees, the boundary of a small
    class then runs through the middle of the gap around it, while boosted trees place it next to a row. The metric
    affects only the decision: probabilities are class shares in the leaves.

    Parameters
    ----------
    metric and the other parameters of every classifier: see `MetricClassifier`.
    trees: number per fold; `n_estimators` is an alias.
    columns: share of the columns that a node tries.
    min_rows: minimum rows per leaf.

    Attributes: `classes_`, `n_features_in_`, `feature_names_in_`, `decision_`, `encoder_`, `forests_` (one for each
    fold), and after `fit` only `held_out_predictions_`; `history_` is empty, as there are no epochs.

    >>> from sklearn.datasets import load_iris
    >>> X, y = load_iris(return_X_y=True)
    >>> EASTForest("f1", trees=10, random_state=0).fit(X, y).predict_proba(X).shape
    (150, 3)
    """

    FORMAT = "evalign.forest"

    trees: int = 200
    n_estimators: int | None = None
    columns: float = 1.0
    min_rows: int = 1

    def _cross_fit(self, data: TrainingRows, on_epoch: OnEpoch | None) -> Floats:
        self.encoder_ = data.encoder(TreeTable)
        x = _bounded(data.encoded(TreeTable))
        forests = self._grown(x, data, self._listener(on_epoch))
        self.forests_ = [TreeArrays.of(forest, data.classes) for forest in forests]
        held_out = np.zeros((len(data.held_out), data.classes))
        p = [forest.predict_proba(x[d.valid]) for forest, d in zip(forests, data.divisions, strict=True)]
        held_out[:, forests[0].classes_] = np.concatenate(p)
        return held_out

    def _probabilities(self, X: Any, fold: int | None = None) -> Floats:
        x = _bounded(self.encoder_.transform(X))
        forests = self.forests_ if fold is None else [self.forests_[fold]]
        return np.asarray(np.mean([forest.probabilities(x) for forest in forests], axis=0))

    def _content(self) -> tuple[Arrays, dict[str, Any]]:
        arrays = {
            f"{i}.{name}": torch.from_numpy(getattr(forest, name))
            for i, forest in enumerate(self.forests_)
            for name in TYPES
        }
        return arrays, {"encoder": self.encoder_.to_json(), "forests": len(self.forests_)}

    def _set_content(self, arrays: Arrays, fitted: dict[str, Any]) -> None:
        self.encoder_ = TreeTable.from_json(fitted["encoder"])
        self.forests_ = [
            TreeArrays(**{name: arrays[f"{i}.{name}"].numpy() for name in TYPES}) for i in range(fitted["forests"])
        ]
        for forest in self.forests_:
            forest.check(self.n_features_in_)

    def _check_options(self) -> None:
        self._check_metric_and_decision()
        for name in ("trees", "min_rows", "folds", *(() if self.n_estimators is None else ("n_estimators",))):
            checks.check_number(name, getattr(self, name), low=1, whole=True)
        checks.check_number("columns", self.columns, low=0.0, high=1.0, open_low=True)

    def _grown(self, x: NDArray[np.float32], data: TrainingRows, on_epoch: OnEpoch) -> list[Any]:
        """Grow a forest per fold, all in steps, so that the folds have about as many trees whenever growing ends."""
        forests = [self._forest(data.seed + i) for i in range(len(data.divisions))]
        started = time.monotonic()
        most = self.trees if self.n_estimators is None else self.n_estimators
        for step, trees in enumerate(range(min(STEP, most), most + STEP, STEP), start=1):
            try:
                for forest, own in zip(forests, data.divisions, strict=True):
                    forest.set_params(n_estimators=min(trees, most))
                    forest.fit(x[own.train], data.codes[own.train], own.train_weight)
                unknown, seconds = float("nan"), time.monotonic() - started
                on_epoch(Epoch(step, "trees", 0.0, 0.0, unknown, unknown, unknown, unknown, seconds=seconds))
            except KeyboardInterrupt:
                if not all(hasattr(forest, "estimators_") for forest in forests):
                    raise
                break
        return forests

    def _forest(self, seed: int) -> Any:
        options: Any = {"max_features": float(self.columns), "min_samples_leaf": self.min_rows, "n_jobs": self.n_jobs}
        return ExtraTreesClassifier(**options, random_state=seed % 2**31, warm_start=True)


def _bounded(x: NDArray[np.float64]) -> NDArray[np.float32]:
    return np.clip(x, -LARGEST, LARGEST).astype(np.float32)
