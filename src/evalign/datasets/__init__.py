"""Data sets of the papers and some more: where they come from, their checksums, and the splits.

>>> from evalign.datasets import load, splits
>>> blobs = load("synthetic_33")
>>> train, valid, test = next(splits(blobs, trials=1))
>>> len(train), len(valid), len(test)
(4800, 1200, 1500)
"""

from evalign.datasets.base import PROTOCOLS, Card, DataError, Dataset, Graphs, equitability
from evalign.datasets.registry import find_card, load, names
from evalign.datasets.splits import Split, check_split, splits
from evalign.datasets.store import open_store

__all__ = [
    "PROTOCOLS",
    "Card",
    "DataError",
    "Dataset",
    "Graphs",
    "Split",
    "check_split",
    "equitability",
    "find_card",
    "load",
    "names",
    "open_store",
    "splits",
]
