"""Which round a library is in, told from the scores it passes: neither says so to an objective."""

from typing import Any

from numpy.typing import NDArray


class RoundCounter:
    """Counts calls; equal scores for all rows, or another number of rows, are the first round of a training.

    Continued training with a score of its own for every row counts on from where the counter stands.

    >>> import numpy as np
    >>> counter = RoundCounter()
    >>> [counter.next(scores) for scores in (np.zeros(2), np.array([0.1, 0.2]), np.array([0.2, 0.3]), np.zeros(2))]
    [0, 1, 2, 0]
    """

    def __init__(self) -> None:
        self.count, self.rows = 0, -1

    def next(self, scores: NDArray[Any]) -> int:
        """The number of this round, from 0."""
        if len(scores) != self.rows or bool((scores == scores[:1]).all()):
            self.count = 0
        self.rows = len(scores)
        self.count += 1
        return self.count - 1
