"""Equal rows with equal labels, counted once: what fitting a weighted table rests on.

A weight of 3 then is the same as three copies, and a weight of 0 the same as no row, to the last bit; the order of
the rows does not matter either. And no copy of a training row can sit in the validation part and flatter it.
"""

from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray


def distinct_rows(
    X: Any, labels: NDArray[np.int64], weight: NDArray[np.float64]
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Positions of the distinct (row, label) pairs with a positive weight, and their summed weights.

    Pairs come ordered by label, then by a 64-bit hash of the row: an order that depends on the content alone.

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
    """Positions to keep and to hold out: every class gives its share, but keeps at least one row.

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
    """Positions of training and validation rows, and what they weigh there."""

    train: NDArray[np.int64]
    train_weight: NDArray[np.float64]
    valid: NDArray[np.int64]
    valid_weight: NDArray[np.float64]


HEAVY = 20  # times the mean weight of its class


def divide_rows(labels: NDArray[np.int64], weight: NDArray[np.float64], fraction: float, seed: int) -> Division:
    """Training and validation rows of a weighted table.

    A row of more than `HEAVY` times its class's mean weight goes to both sides, with its weight divided: a third of
    Mammography is one row, copied, and the side without it would be of another kind than the data. Where nothing
    can be spared for validation, the training rows serve as both.

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
