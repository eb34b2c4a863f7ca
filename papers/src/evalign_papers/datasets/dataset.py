"""`Card`, the description of a data set, and `Dataset`, its rows."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray

Protocol = Literal["honest", "paper"]
PROTOCOLS: tuple[Protocol, ...] = ("honest", "paper")
Kind = Literal["table", "images", "graphs"]


class DataError(ValueError):
    """A data set is missing or damaged; the message is one sentence for the user."""


@dataclass(frozen=True)
class File:
    """A file of a data set. `size` in bytes, checksums and `url` are None if not published."""

    name: str
    size: int | None = None
    sha256: str | None = None
    md5: str | None = None
    directory: bool = False
    url: str | None = None


@dataclass(frozen=True)
class Version:
    """One file format of a data set; all its files lie in one of `folders`, relative to a data folder."""

    form: str
    files: tuple[File, ...]
    folders: tuple[str, ...] = ("",)


@dataclass(frozen=True)
class Card:
    """Description of a data set: its source and expected content; `load` checks rows, classes and counts.

    `counts` has the rows of every class by name, or is empty if unknown. `fingerprint` is the checksum of the content,
    independent of the file. `refused` are files that cannot be used, each with what to do instead.
    `paper_test` says what the papers tested on: a random fifth, or the part that the source itself calls test.
    """

    name: str
    title: str
    kind: Kind
    source: str
    citation: str
    licence: str
    rows: int
    num_classes: int
    counts: Mapping[str, int] = field(default_factory=dict)
    versions: tuple[Version, ...] = ()
    openml: int | None = None
    fingerprint: str | None = None
    paper_test: Literal["random", "official"] = "random"
    refused: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def generated(self) -> bool:
        return not self.versions

    @property
    def imbalance(self) -> float | None:
        """Rows of the largest class over those of the smallest."""
        return max(self.counts.values()) / min(self.counts.values()) if self.counts else None

    @property
    def equitability(self) -> float | None:
        return equitability(self.counts.values()) if self.counts else None


@dataclass(frozen=True, eq=False)
class Graphs:
    """Complete graphs of one size: `nodes` (F, P, k), `pairs` (F, E, p), and `index` (E, 2), the ends of each pair."""

    nodes: NDArray[np.float32]
    pairs: NDArray[np.float32]
    index: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.nodes)

    def take(self, rows: NDArray[np.int64]) -> "Graphs":
        return Graphs(self.nodes[rows], self.pairs[rows], self.index)


Features = pd.DataFrame | NDArray[np.uint8] | Graphs


@dataclass(frozen=True, eq=False)
class Dataset:
    """A data set in memory.

    `X` is a data frame for tables, (N, H, W, 3) in uint8 for images, `Graphs` for graphs. `y` are codes into
    `classes`, (N,), or (F, E) for the pairs of graphs; of two classes, code 1 is the positive one. Rows of one entry
    of `groups` must stay together in an honest split. `official_test` marks the test part of the source.
    """

    card: Card
    X: Features
    y: NDArray[np.int64]
    classes: tuple[str, ...]
    protocol: Protocol = "honest"
    groups: NDArray[np.int64] | None = None
    official_test: NDArray[np.bool_] | None = None
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.y)

    @property
    def name(self) -> str:
        return self.card.name

    @property
    def counts(self) -> dict[str, int]:
        """Labels of every class, by name."""
        found = np.bincount(self.y.ravel(), minlength=len(self.classes))
        return dict(zip(self.classes, found.tolist(), strict=True))

    @property
    def imbalance(self) -> float:
        return max(self.counts.values()) / min(self.counts.values())

    @property
    def equitability(self) -> float:
        return equitability(self.counts.values())

    def take(self, rows: NDArray[np.int64]) -> tuple[Any, NDArray[np.int64]]:
        """Features and labels of some rows."""
        if isinstance(self.X, pd.DataFrame):
            return self.X.iloc[rows], self.y[rows]
        return (self.X.take(rows) if isinstance(self.X, Graphs) else self.X[rows]), self.y[rows]


def equitability(counts: Any) -> float:
    """Shannon's equitability: the entropy of the class shares over its maximum, 1 for even classes.

    >>> equitability([50, 50]), round(equitability([99, 1]), 3)
    (1.0, 0.081)
    """
    n = np.asarray([count for count in counts if count], dtype=np.float64)
    if len(n) < 2:
        return 0.0
    p = n / n.sum()
    return float(-(p * np.log(p)).sum() / np.log(len(n)))


def check_dataset(dataset: Dataset) -> Dataset:
    """Check that rows, classes and rows per class are those of the card."""
    card, what = dataset.card, {"table": "rows", "images": "images", "graphs": "frames"}[dataset.card.kind]
    if len(dataset.X) != len(dataset.y):  # a bug, not a user error
        raise AssertionError(f"{card.name}: {len(dataset.X)} features for {len(dataset.y)} labels")
    found = (len(dataset), len(dataset.classes))
    if found != (card.rows, card.num_classes):
        raise DataError(
            f"{card.name} must have {card.rows} {what} of {card.num_classes} classes, got {found[0]} of {found[1]}; "
            f"the files are not complete or not the original ones: get them again from {card.source}"
        )
    if card.counts and dataset.counts != dict(card.counts):
        name = next(name for name, count in dataset.counts.items() if card.counts.get(name) != count)
        raise DataError(
            f"{card.name} must have {card.counts.get(name, 0)} labels of class {name!r}, got {dataset.counts[name]}; "
            f"the files are not the original ones: get them again from {card.source}"
        )
    return dataset
