"""Choose the best of many ordered candidates, coarse to fine."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from evalign.decision.rule import Floats
from evalign.decision.search.problem import SLACK, Scored

Index = NDArray[np.int64]


def best_of(shortfall: Floats, value: Floats, distance: Floats | None = None) -> int:
    """Index of the highest value among the smallest shortfalls; ties go to the smallest `distance`.

    >>> best_of(np.array([0.0, 0.0, 0.2]), np.array([0.5, 0.6, 0.9]))
    1
    """
    missed = shortfall > shortfall.min() + SLACK
    value = np.where(missed, -np.inf, value)
    best = ~missed & (value >= value.max() - SLACK * 1e-3)
    if distance is None:
        return int(best.argmax())
    return int(np.where(best, distance, np.inf).argmin())


def coarse_to_fine(score: Callable[[Index], Scored], size: int, near: int, batch_size: int) -> int:
    """Best of candidates 0 … size - 1; ties go to the one nearest to `near`.

    All candidates are scored if they fit in one batch. Otherwise evenly spaced ones are scored, then those around
    the best of them, and so on.
    """
    low, high = 0, size
    while True:
        exact = high - low <= batch_size
        index = np.arange(low, high) if exact else np.linspace(low, high - 1, batch_size).astype(np.int64)
        if not exact and low <= near < high:
            place = int(np.searchsorted(index, near))
            index = index if index[place] == near else np.insert(index, place, near)
        k = best_of(*score(index), np.abs(index - near).astype(np.float64))
        if exact:
            return int(index[k])
        low, high = int(index[max(k - 1, 0)]), int(index[min(k + 1, len(index) - 1)]) + 1
