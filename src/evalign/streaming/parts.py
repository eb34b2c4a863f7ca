"""Which part a row belongs to, from its number alone: no pass over the labels, and every rank and run agrees."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.uint64]
MOST_HELD_OUT = 100_000  # rows: a score of so many is known to 0.002, and they fit into memory


def hashed(numbers: Numbers, seed: int) -> Numbers:
    """What SplitMix64 (Steele et al. 2014) with this seed gives at each of these places, in 64 bits.

    >>> hashed(np.arange(2, dtype=np.uint64), 1234567).tolist()
    [6457827717110365317, 3203168211198807973]
    """
    z = np.uint64(seed) + (numbers + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: Numbers = z ^ (z >> np.uint64(31))
    return mixed


@dataclass(frozen=True)
class Parts:
    """Shares of test and validation rows; the others are for training.

    >>> parts = Parts(test=0.25, valid=0.25, seed=0)
    >>> numbers = np.arange(1000, dtype=np.uint64)
    >>> [int(part.sum()) for part in (parts.test_rows(numbers), parts.valid_rows(numbers), parts.train_rows(numbers))]
    [245, 272, 483]
    """

    test: float
    valid: float
    seed: int

    @classmethod
    def for_rows(cls, rows: int, test_size: float, validation_fraction: float, seed: int) -> "Parts":
        """The shares asked for, but no more than `MOST_HELD_OUT` rows of either: the rest serves training better."""
        most = MOST_HELD_OUT / rows
        return cls(min(test_size, most), min((1 - test_size) * validation_fraction, most), seed)

    def test_rows(self, numbers: Numbers) -> NDArray[np.bool_]:
        return self._place(numbers) < self.test

    def valid_rows(self, numbers: Numbers) -> NDArray[np.bool_]:
        place = self._place(numbers)
        return (place >= self.test) & (place < self.test + self.valid)

    def train_rows(self, numbers: Numbers) -> NDArray[np.bool_]:
        return self._place(numbers) >= self.test + self.valid

    def _place(self, numbers: Numbers) -> NDArray[np.float64]:
        """A number in [0, 1) for every row."""
        return (hashed(numbers, self.seed) >> np.uint64(11)).astype(np.float64) * 2.0**-53
