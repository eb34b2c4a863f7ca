"""Rows that are kept of a stream, in few tables: thousands of small ones take more room than their rows."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from numpy.typing import NDArray

from evalign.streaming.source import Chunk, ParquetRows, Parts, RowGroup, gathered
from evalign.streaming.statistics import Statistics
from evalign.tables.columns import TableError, column_kind, quoted
from evalign.tables.delimited import to_pandas

MOST_TABLES = 64  # before neighbours are joined


@dataclass
class HeldOut:
    """Marked rows of the chunks of a stream, in their order; neighbours of one type are joined from time to time.

    >>> held = HeldOut(most=2)
    >>> for first in (0, 3, 6):
    ...     chunk = Chunk(first, pa.record_batch({"x": [first, first + 1, first + 2]}))
    ...     held.add(chunk, np.array([True, False, True]))
    >>> [frame["x"].tolist() for frame in held.frames()]
    [[0, 2, 3, 5, 6, 8]]
    """

    most: int = MOST_TABLES
    tables: list[Any] = field(default_factory=list)

    def add(self, chunk: Chunk, rows: NDArray[np.bool_]) -> None:
        if rows.any():
            self.tables.append(chunk.table(rows))
        if len(self.tables) > self.most:
            self._join()

    def frames(self) -> list[pd.DataFrame]:
        """What was kept, which is then no longer here."""
        self._join()
        tables, self.tables = self.tables, []
        return [to_pandas(table) for table in tables]

    def _join(self) -> None:
        # Files may differ in the types of their columns, which is for the encoders to say.
        alike = groupby(self.tables, key=lambda table: table.schema)
        self.tables = [pa.concat_tables(tables).combine_chunks() for _, tables in alike]


MOST_CLASSES = 1000


@dataclass
class Survey:
    """What one pass tells. Held-out rows are this rank's own; all else is the same on all ranks."""

    statistics: Statistics
    labels: Counter[Any] = field(default_factory=Counter)
    valid: list[pd.DataFrame] = field(default_factory=list)
    test: list[pd.DataFrame] = field(default_factory=list)

    @property
    def classes(self) -> NDArray[Any]:
        """The labels in sorted order, text as Python objects."""
        values = sorted(self.labels)
        return np.array(values, dtype=object if isinstance(values[0], str) else None)


def survey(source: ParquetRows, groups: Sequence[RowGroup], parts: Parts) -> Survey:
    """Read the row groups of this rank once, and share with the other ranks what was learned."""
    found = Survey(Statistics(source.features, parts.seed))
    valid, test = HeldOut(), HeldOut()
    for chunk in source.chunks(groups):
        numbers = chunk.numbers
        frame = chunk.frame(np.ones(len(numbers), dtype=bool))
        codes, uniques = pd.factorize(labels_of(frame[source.target], source.target))
        found.labels.update(dict(zip(uniques.tolist(), np.bincount(codes).tolist(), strict=True)))
        _check_amounts(found.labels, source)
        valid.add(chunk, parts.valid_rows(numbers))
        test.add(chunk, parts.test_rows(numbers))
        train = parts.train_rows(numbers)
        found.statistics.add(frame[train], numbers[train])
    others = gathered((found.statistics, found.labels))
    merged = Survey(Statistics(source.features, parts.seed), valid=valid.frames(), test=test.frames())
    for statistics, labels in others:
        merged.statistics.merge(statistics)
        merged.labels.update(labels)
    _check_classes(merged.labels, source)
    return merged


def labels_of(column: Any, target: str) -> NDArray[Any]:
    """A chunk's labels as plain values; every row must have one."""
    kind = column_kind(column, target)
    if lacking := int(column.isna().sum()):
        raise TableError(
            f"the target {target!r} must have a label in every row, {lacking} of {len(column)} neighbouring rows have "
            "none; drop such rows"
        )
    if isinstance(column.dtype, pd.CategoricalDtype):
        column = column.astype(column.cat.categories.dtype)
    labels: NDArray[Any] = column.infer_objects().to_numpy()
    if kind == "number" and labels.dtype.kind not in "iuf":  # decimals
        return np.asarray(labels, dtype=np.float64)
    return labels.astype(object) if kind == "text" else labels


def _check_amounts(labels: Counter[Any], source: ParquetRows) -> None:
    fractions = any(isinstance(label, float) and not label.is_integer() for label in labels)
    if fractions or len(labels) > MOST_CLASSES:
        raise TableError(
            f"the target {source.target!r} looks like regression, it has values such as {quoted(labels, most=3)}; "
            f"at most {MOST_CLASSES} classes are expected: cut it into ranges first"
        )


def _check_classes(labels: Counter[Any], source: ParquetRows) -> None:
    if len(labels) < 2:
        raise TableError(f"the target {source.target!r} must have two classes or more, it has only {quoted(labels)}")
    if rare := sorted((str(label) for label, count in labels.items() if count < 2)):
        raise TableError(
            f"every class of the target {source.target!r} must have 2 rows or more, {quoted(rare)} "
            f"{'has' if len(rare) == 1 else 'have'} fewer; add rows, or merge or drop the class"
        )
