"""Rows dealt into folds: every row is held out once, so that all of them tell when to stop and how to decide."""

from collections.abc import Sequence
from typing import overload

import numpy as np
from numpy.typing import NDArray

from evalign.tables.distinct import HEAVY, Division, divide_rows


def fold_rows(
    labels: NDArray[np.int64], weight: NDArray[np.float64], folds: int, seed: int, *, fraction: float = 0.2
) -> Sequence[Division]:
    """Training and validation rows of each fold; one fold is `divide_rows` with `fraction` held out.

    Every class is dealt out by itself. A class of one row is never held out, and a row of more than `HEAVY` times its
    class's mean weight goes to both sides of every fold, with its weight divided, as in `divide_rows`.

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
    fold[by_class] = np.arange(len(labels)) % folds  # dealt on from class to class, so that folds are of one size
    fold[counts[labels] == 1] = -1
    mean = np.bincount(labels, weight) / np.maximum(counts, 1)
    heavy = (weight > HEAVY * mean[labels]) & (fold >= 0)
    made = Folds(fold, heavy, weight, 1 / folds)
    return made if len(made) else [divide_rows(labels, weight, fraction, seed)]


class Folds(Sequence[Division]):
    """The divisions that hold out one fold each, listed anew whenever one is asked for.

    k lists of nearly all rows and their weights would take 16 k bytes for every row; which fold a row is in takes 4.
    """

    def __init__(
        self, fold: NDArray[np.int32], heavy: NDArray[np.bool_], weight: NDArray[np.float64], share: float
    ) -> None:
        """`fold` is -1 where a row is never held out; a fold without rows is left out; of heavy rows `share` is."""
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
