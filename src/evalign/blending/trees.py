"""Trees of a forest as plain arrays, which are saved as they are and read without executing anything."""

from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
BLOCK = 2**14  # rows at once: what is looked up for them stays in the cache
LEAF = -1


@dataclass(frozen=True)
class TreeArrays:
    """Binary trees one after the other; `roots` says where each begins.

    A node sends a row left where x[`feature`] <= `threshold` (nan where `gap_left`), else right, each a place later in
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
        """From a fitted forest of scikit-learn, whose labels are codes among 0 to `classes` - 1."""
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
        # As scikit-learn has it: thresholds lie between values in float32.
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
        """Refuse arrays that point outside of themselves, or backwards, where a row would never arrive."""
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
            raise ValueError("the trees in this file point outside of themselves; fit and save the model again")


TYPES: dict[str, Any] = {
    "roots": np.int64, "feature": np.int32, "threshold": np.float64, "left": np.int64, "right": np.int64,
    "gap_left": np.bool_, "shares": np.float64,
}  # fmt: skip
