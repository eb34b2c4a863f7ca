"""Deduplicating rows and dividing them into training and validation parts or folds.

Equal rows with equal labels are merged first. A weight of 3 is then the same as three copies and a weight of 0 the same
as no row, to the last bit, whatever the order of the rows; and no copy of a training row can leak into validation.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, overload

import numpy as np
import pandas as pd
from numpy.typing import NDArray


def distinct_rows(
    X: Any, labels: NDArray[np.int64], weight: NDArray[np.float64]
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Positions of the distinct (row, label) pairs with a positive weight, and their summed weights.

    Pairs are ordered by label, then by a 64-bit hash of the row: an order that depends on the content alone.

    >>> rows, weight = distinct_rows(np.array([[1.0], [2.0], [1.0]]), np.array([0, 0, 0]), np.ones(3))
    >>> sorted(weight.tolist())
    [1.0, 2.0]
    """
    frame = X if isinstance(X, pd.DataFrame) else pd.DataFrame(np.asarray(X))
    hashes = pd.util.hash_pandas_object(frame, index=False).to_numpy()
    order = np.lexsort((hashes, labels))
    order = order[weight[order] > 0]
    same = (np.diff(hashes[order].view(np.int64)) == 0) & (np.diff(labels[order]) == 0)
    starts = np.flatnonzero(np.r_[True, ~same]) if len(order) else np.empty(0, np.int64)
    if not len(order):
        return order, weight[order]
    return order[starts], np.add.reduceat(weight[order], starts)


def split_rows(labels: NDArray[np.int64], fraction: float, seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Positions of rows to keep and to hold out, stratified; every class keeps at least one row.

    >>> kept, held_out = split_rows(np.array([0] * 10 + [1] * 5 + [2]), 0.2, seed=0)
    >>> len(kept), len(held_out), 15 in kept
    (13, 3, True)
    """
    shuffled = np.random.default_rng(seed).permutation(len(labels))
    by_class = shuffled[np.argsort(labels[shuffled], kind="stable")]
    counts = np.bincount(labels)
    take = np.minimum(np.maximum(np.round(fraction * counts), counts >= 4), np.maximum(counts - 1, 0)).astype(np.int64)
    rank = np.concatenate([np.arange(c) for c in counts])
    held_out = rank < np.repeat(take, counts)
    return np.sort(by_class[~held_out]), np.sort(by_class[held_out])


class Division(NamedTuple):
    """Positions and weights of training and validation rows."""

    train: NDArray[np.int64]
    train_weight: NDArray[np.float64]
    valid: NDArray[np.int64]
    valid_weight: NDArray[np.float64]


HEAVY = 20  # times the mean weight of its class


def divide_rows(labels: NDArray[np.int64], weight: NDArray[np.float64], fraction: float, seed: int) -> Division:
    """Training and validation rows of a weighted table.

    A row of more than `HEAVY` times its class's mean weight goes to both sides, with its weight divided: a third of
    Mammography is copies of one row, and a side without it would not represent the data. Where no row can be spared
    for validation, the training rows serve as both.

    >>> division = divide_rows(np.zeros(41, dtype=int), np.array([100.0] + [1.0] * 40), 0.2, seed=0)
    >>> len(division.train), len(division.valid), float(division.train_weight[0]), float(division.valid_weight[0])
    (33, 9, 80.0, 20.0)
    """
    train, valid = split_rows(labels, fraction, seed)
    if not len(valid):
        return Division(train, weight[train], train, weight[train])
    heavy = weight > HEAVY * (np.bincount(labels, weight) / np.maximum(np.bincount(labels), 1))[labels]
    train, valid = np.union1d(train, np.flatnonzero(heavy)), np.union1d(valid, np.flatnonzero(heavy))
    return Division(
        train, np.where(heavy, 1 - fraction, 1.0)[train] * weight[train],
        valid, np.where(heavy, fraction, 1.0)[valid] * weight[valid],
    )  # fmt: skip


def fold_rows(
    labels: NDArray[np.int64], weight: NDArray[np.float64], folds: int, seed: int, *, fraction: float = 0.2
) -> Sequence[Division]:
    """Training and validation rows of each fold; one fold is `divide_rows` with `fraction` held out.

    Folds are stratified by class. A class of one row is never held out, and a row of more than `HEAVY` times the mean
    weight of its class goes to both sides of every fold, with its weight divided, as in `divide_rows`.

    >>> made = fold_rows(np.array([0] * 6 + [1] * 3 + [2]), np.ones(10), 3, seed=0)
    >>> [len(fold.valid) for fold in made], sorted(np.concatenate([fold.valid for fold in made]).tolist())
    ([3, 3, 3], [0, 1, 2, 3, 4, 5, 6, 7, 8])
    """
    if folds == 1:
        return [divide_rows(labels, weight, fraction, seed)]
    counts = np.bincount(labels)
    shuffled = np.random.default_rng(seed).permutation(len(labels))
    by_class = shuffled[np.argsort(labels[shuffled], kind="stable")]
    fold = np.empty(len(labels), dtype=np.int32)
    fold[by_class] = np.arange(len(labels)) % folds  # continued from class to class, so that folds have equal sizes
    fold[counts[labels] == 1] = -1
    mean = np.bincount(labels, weight) / np.maximum(counts, 1)
    heavy = (weight > HEAVY * mean[labels]) & (fold >= 0)
    made = Folds(fold, heavy, weight, 1 / folds)
    return made if len(made) else [divide_rows(labels, weight, fraction, seed)]


class Folds(Sequence[Division]):
    """The divisions that hold out one fold each, computed on access.

    Storing k lists of rows and weights would take 16 k bytes a row; the number of a row's fold takes 4.
    """

    def __init__(
        self, fold: NDArray[np.int32], heavy: NDArray[np.bool_], weight: NDArray[np.float64], share: float
    ) -> None:
        """`fold` is -1 for rows never held out; `share` is the part of a heavy row's weight that is held out."""
        self.fold, self.heavy, self.weight, self.share = fold, heavy, weight, share
        self.numbers = np.unique(fold[fold >= 0]).tolist()

    def __len__(self) -> int:
        return len(self.numbers)

    @overload
    def __getitem__(self, index: int) -> Division: ...
    @overload
    def __getitem__(self, index: slice) -> list[Division]: ...
    def __getitem__(self, index: int | slice) -> Division | list[Division]:
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[index]]
        held_out = self.fold == self.numbers[index]
        train, valid = np.flatnonzero(~held_out | self.heavy), np.flatnonzero(held_out | self.heavy)
        return Division(
            train, np.where(self.heavy[train], 1 - self.share, 1.0) * self.weight[train],
            valid, np.where(self.heavy[valid], self.share, 1.0) * self.weight[valid],
        )  # fmt: skip
