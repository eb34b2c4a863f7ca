"""Rows dealt into folds: every row is held out once, so that all of them tell when to stop and how to decide."""

import numpy as np
from numpy.typing import NDArray

from evalign.tables.distinct import HEAVY, Division, divide_rows


def fold_rows(
    labels: NDArray[np.int64], weight: NDArray[np.float64], folds: int, seed: int, *, fraction: float = 0.2
) -> list[Division]:
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
    fold = np.empty(len(labels), dtype=np.int64)
    fold[by_class] = np.arange(len(labels)) % folds  # dealt on from class to class, so that folds are of one size
    fold[counts[labels] == 1] = -1
    mean = np.bincount(labels, weight) / np.maximum(counts, 1)
    heavy = (weight > HEAVY * mean[labels]) & (fold >= 0)
    made = []
    for k in range(folds):
        train, valid = np.flatnonzero((fold != k) | heavy), np.flatnonzero((fold == k) | heavy)
        if len(np.flatnonzero(fold == k)):
            made.append(
                Division(
                    train, np.where(heavy, 1 - 1 / folds, 1.0)[train] * weight[train],
                    valid, np.where(heavy, 1 / folds, 1.0)[valid] * weight[valid],
                )
            )  # fmt: skip
    return made or [divide_rows(labels, weight, fraction, seed)]
