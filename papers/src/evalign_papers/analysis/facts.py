"""Printed facts about data (BtG supplement, Tables 8 and 10), recounted from the available data sets.

Weights and oversampled rows are those of a training part. A random split gives other positives than the authors had, so
ours are expected values: 64 % of each class, or for Adult 80 % of each class in the official training part.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from evalign_papers.datasets import DataError, Dataset, load
from evalign_papers.engine.printed import Table

SHARE, SHARE_OF_OFFICIAL = 0.64, 0.80


class Fact(NamedTuple):
    dataset: str
    title: str
    printed: float
    counted: float | None


def count_facts(table: Table, data_dir: str | Path | None = None, loader: Callable[..., Dataset] = load) -> list[Fact]:
    """Printed and counted values of a table of facts; the count is None if the data set is missing."""
    return list(_facts(table, data_dir, loader))


def _facts(table: Table, data_dir: str | Path | None, loader: Callable[..., Dataset]) -> Iterator[Fact]:
    for name in table.datasets:
        try:
            counted = facts_of(loader(name, data_dir, "paper", fetch=False))
        except (DataError, OSError):
            counted = {}
        for row in table.rows:
            for key, number in row.printed[name].items():
                value = counted.get(key)
                yield Fact(name, table.metrics[key], number.mean, None if value is None else _rounded(value))


def facts_of(dataset: Dataset) -> dict[str, float]:
    """Rows and positives of all rows, of the expected training part and oversampled, and both class weights."""
    total, positive = len(dataset.y), int(dataset.y.sum())
    negatives, positives = training_rows(dataset)
    even = 2 * max(negatives, positives)
    return {
        "total": total,
        "positive": positive,
        "positive_percent": 100 * positive / total,
        "train_total": round(even),
        "train_positive": round(even / 2),
        "train_percent": 50,
        "negative_weight": (negatives + positives) / (2 * negatives),
        "positive_weight": (negatives + positives) / (2 * positives),
    }


def training_rows(dataset: Dataset) -> tuple[float, float]:
    """Negatives and positives that a training part has in expectation."""
    kept, share = dataset.y, SHARE
    if dataset.card.paper_test == "official" and dataset.official_test is not None:
        kept, share = dataset.y[~dataset.official_test], SHARE_OF_OFFICIAL
    return share * float((kept == 0).sum()), share * float((kept == 1).sum())


def _rounded(value: float) -> float:
    return value if isinstance(value, int) else round(value, 2)
