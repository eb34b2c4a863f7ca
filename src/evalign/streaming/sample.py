"""A random sample of bounded size from rows that pass by once; samples of several ranks make one."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from evalign.streaming.parts import Numbers, hashed

SIZE = 50_000  # rows: a quantile's rank is off by 0.2 % (one standard error, in the middle)
SALT = 0x5A3  # another order than the one that parts rows


@dataclass
class Sample:
    """The rows whose hashed numbers are smallest: each is as likely as any, whatever the order that they come in.

    >>> sample = Sample(columns=1, seed=0, size=3)
    >>> sample.add(np.arange(100, dtype=np.uint64), np.arange(100.0)[:, None])
    >>> sample.values.shape
    (3, 1)
    """

    columns: int
    seed: int
    size: int = SIZE
    _keys: Numbers = field(init=False)
    _values: NDArray[np.float64] = field(init=False)

    def __post_init__(self) -> None:
        self._keys, self._values = np.empty(0, np.uint64), np.empty((0, self.columns))

    def add(self, numbers: Numbers, values: NDArray[np.float64]) -> None:
        """Offer rows (n, columns) by their numbers."""
        self._take(hashed(numbers, self.seed + SALT), values)

    def merge(self, other: "Sample") -> None:
        self._take(other._keys, other._values)

    @property
    def values(self) -> NDArray[np.float64]:
        return self._values

    def _take(self, keys: Numbers, values: NDArray[np.float64]) -> None:
        if len(self._keys) == self.size:  # almost every later row ends here
            low = keys < self._keys.max()
            keys, values = keys[low], values[low]
        keys, values = np.concatenate([self._keys, keys]), np.concatenate([self._values, values])
        kept = np.argsort(keys, kind="stable")[: self.size]
        self._keys, self._values = keys[kept], values[kept]
