"""Data sets of the papers and a few others: sources, checksums and splits.

>>> from evalign_papers.datasets import load
>>> from evalign_papers.datasets import splits
>>> blobs = load("synthetic_33")
>>> train, valid, test = next(splits(blobs, trials=1))
>>> len(train), len(valid), len(test)
(4800, 1200, 1500)
"""

from evalign_papers.datasets.dataset import PROTOCOLS, Card, DataError, Dataset, Graphs, equitability
from evalign_papers.datasets.registry import find_card, load, names, open_store
from evalign_papers.datasets.splits import Split, check_split, splits

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
