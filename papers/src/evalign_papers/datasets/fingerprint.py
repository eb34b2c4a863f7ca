"""Checksum of the content of a table, independent of file format and row order."""

import hashlib
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

WORD = (1 << 64) - 1


def fingerprint(frame: pd.DataFrame, labels: NDArray[Any]) -> str:
    """Sum over rows of a hash of all values and the label, in hexadecimal digits.

    Numbers count as their nearest float32, which is what some files hold. The columns' order matters, their names do
    not. A sum, so that rows may be in any order and duplicates still count.

    >>> table = pd.DataFrame({"a": [1.0, 2.0], "b": ["x", "y"]})
    >>> same = fingerprint(table, np.array([0, 1])) == fingerprint(table[::-1], np.array([1, 0]))
    >>> same, fingerprint(table, np.array([1, 0])) == fingerprint(table, np.array([0, 1]))
    (True, False)
    """
    total = np.zeros(len(frame), dtype=np.uint64)
    for j, column in enumerate([*(frame.iloc[:, j] for j in range(frame.shape[1])), pd.Series(labels)]):
        total = _mix(total ^ _mix(_words(column) + np.uint64(j + 1)))
    return f"{int(total.sum(dtype=np.uint64)) & WORD:016x}"


def _words(column: "pd.Series[Any]") -> NDArray[np.uint64]:
    """One word for every value."""
    if pd.api.types.is_numeric_dtype(column.dtype):
        x = column.to_numpy(dtype=np.float64).astype(np.float32) + np.float32(0)  # no -0
        return x.view(np.uint32).astype(np.uint64)
    codes, values = pd.factorize(column)
    words = [int.from_bytes(hashlib.sha256(str(value).encode()).digest()[:8]) for value in values]
    return np.array([*words, 0], dtype=np.uint64)[codes]


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of splitmix64 (Steele, Lea and Flood 2014): every input bit affects every output bit."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
