"""Mergeable column statistics of a stream (moments, category counts, samples) and the survey that collects them."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from numpy.typing import NDArray

from evalign.streaming.source import Chunk, Numbers, ParquetRows, Parts, RowGroup, gathered, hashed
from evalign.tables.columns import (
    AnyColumn,
    CategoryColumn,
    Column,
    ColumnTypeError,
    Kind,
    Label,
    NumberColumn,
    Numeric,
    categories_of_counts,
    column_kind,
    factorized,
    floats,
    mean_and_std,
    number_column,
    quantiles_of,
)
from evalign.tables.encode import TableEncoder
from evalign.tables.files import TableError, quoted
from evalign.tables.profile import ColumnProfile, TableProfile
from evalign.tables.read import check_class_counts, to_pandas

MOST_DISTINCT = 100_000  # categories counted at a time; an identifier would fill memory


@dataclass
class NumberSummary:
    """Count, mean and sum of squared deviations, by the update of Chan, Golub and LeVeque (1979), and the extremes.

    >>> summary = NumberSummary()
    >>> for part in ([1.0, 2.0], [3.0, np.nan]):
    ...     summary.add(np.array(part))
    >>> summary.mean, summary.deviation, summary.missing
    (2.0, 0.816496580927726, 1)
    """

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0
    low: float = math.inf
    high: float = -math.inf
    missing: int = 0

    def add(self, x: NDArray[np.float64]) -> None:
        present = x[~np.isnan(x)]
        part = NumberSummary(missing=len(x) - len(present))
        if len(present):
            part.count, part.low, part.high = len(present), float(present.min()), float(present.max())
            with np.errstate(over="ignore"):  # if this overflows, `column` uses the sample
                part.mean = float(present.mean())
                part.squares = float(np.square(present - part.mean).sum())
        self.merge(part)

    def merge(self, other: "NumberSummary") -> None:
        self.missing += other.missing
        if not other.count:
            return
        total, gap = self.count + other.count, other.mean - self.mean
        self.mean += gap * (other.count / total)
        self.squares += other.squares + gap * gap * (self.count * (other.count / total))
        self.count, self.low, self.high = total, min(self.low, other.low), max(self.high, other.high)

    @property
    def deviation(self) -> float:
        return math.sqrt(self.squares / self.count)

    def column(self, kind: Kind, numeric: Numeric, sample: NDArray[np.float64]) -> NumberColumn | None:
        """The encoder, with quantiles of a sample of the values; None if there is no value."""
        if not self.count:
            return None
        sample = sample[~np.isnan(sample)]
        if len(sample) < 2:  # of a column that is almost always missing, only the extremes are known
            sample = np.array([self.low, self.high])
        known = math.isfinite(self.mean) and math.isfinite(self.deviation)
        return number_column(
            "bool" if kind == "bool" else "number", numeric, (self.low, self.high), self.missing > 0,
            lambda: quantiles_of(sample), lambda: (self.mean, self.deviation) if known else mean_and_std(sample),
        )  # fmt: skip


@dataclass
class CategorySummary:
    """Category counts; beyond `most` categories the rarest half is dropped."""

    text: bool
    most: int = MOST_DISTINCT
    counts: Counter[Any] = field(default_factory=Counter)
    missing: int = 0
    forgotten: int = 0

    def add(self, column: Column) -> None:
        codes, uniques = factorized(column)
        found = np.bincount(codes[codes >= 0], minlength=len(uniques))
        self.missing += int((codes < 0).sum())
        self._take({value: int(n) for value, n in zip(uniques.tolist(), found, strict=True) if n})

    def merge(self, other: "CategorySummary") -> None:
        self.missing += other.missing
        self.forgotten += other.forgotten
        self._take(other.counts)

    def _take(self, counts: dict[Any, int]) -> None:
        self.counts.update(counts)
        if len(self.counts) > self.most:
            kept = self.counts.most_common(self.most // 2)
            self.forgotten += len(self.counts) - len(kept)
            self.counts = Counter(dict(kept))

    def column(self, label: Label, max_categories: int) -> CategoryColumn | None:
        """The encoder; None if there is no value."""
        return categories_of_counts(
            np.array(list(self.counts), dtype=object), np.array(list(self.counts.values())), label,
            text=self.text, missing=self.missing > 0, rows=self.counts.total() + self.forgotten + self.missing,
            forgotten=self.forgotten, max_categories=max_categories,
        )  # fmt: skip


SIZE = 50_000  # rows: a quantile's rank is off by 0.2 % (one standard error, in the middle)
SALT = 0x5A3  # a different order from the one that partitions rows


class Sample:
    """A uniform sample: the rows with the smallest hashed numbers, independent of their order.

    >>> sample = Sample(columns=1, seed=0, size=3)
    >>> sample.add(np.arange(100, dtype=np.uint64), np.arange(100.0)[:, None])
    >>> sample.values.shape
    (3, 1)
    """

    def __init__(self, columns: int, seed: int, size: int = SIZE) -> None:
        self.seed, self.size = seed, size
        self.keys, self.values = np.empty(0, np.uint64), np.empty((0, columns))

    def add(self, numbers: Numbers, values: NDArray[np.float64]) -> None:
        """Offer rows (n, columns) by their numbers."""
        self._take(hashed(numbers, self.seed + SALT), values)

    def merge(self, other: "Sample") -> None:
        self._take(other.keys, other.values)

    def _take(self, keys: Numbers, values: NDArray[np.float64]) -> None:
        if len(self.keys) == self.size:  # most later rows end here
            low = keys < self.keys.max()
            keys, values = keys[low], values[low]
        keys, values = np.concatenate([self.keys, keys]), np.concatenate([self.values, values])
        kept = np.argsort(keys, kind="stable")[: self.size]
        self.keys, self.values = keys[kept], values[kept]


Summary = NumberSummary | CategorySummary


@dataclass
class Statistics:
    """A summary of every column; the statistics of several ranks merge into those of all rows.

    >>> statistics = Statistics(["age", "job"], seed=0)
    >>> frame = pd.DataFrame({"age": [20.0, 40.0, None], "job": ["cook", "smith", "cook"]})
    >>> statistics.add(frame, np.arange(3, dtype=np.uint64))
    >>> statistics.encoder("standard").feature_names_out
    ['age', 'age=<missing>', 'job=cook', 'job=smith']
    """

    features: list[str]
    seed: int
    summaries: dict[str, Summary] = field(default_factory=dict)
    kinds: dict[str, Kind] = field(default_factory=dict)
    blank: Counter[str] = field(default_factory=Counter)  # rows of chunks in which a column has no value at all
    rows: int = 0
    sample: Sample = field(init=False)

    def __post_init__(self) -> None:
        self.sample = Sample(len(self.features), self.seed)

    def add(self, frame: pd.DataFrame, numbers: Numbers) -> None:
        """Take training rows with these numbers."""
        self.rows += len(frame)
        drawn = np.full((len(frame), len(self.features)), np.nan)
        for j, name in enumerate(self.features):
            column = frame[name]
            kind = column_kind(column, name)
            if kind == "empty":
                self.blank[name] += len(frame)
                continue
            self._check_kind(name, kind)
            if kind == "text" or isinstance(column.dtype, pd.CategoricalDtype):
                categories = CategorySummary(kind == "text")
                categories.add(column)
                self._take(name, categories)
            else:
                moments = NumberSummary()
                drawn[:, j] = floats(column, name)
                moments.add(drawn[:, j])
                self._take(name, moments)
        self.sample.add(numbers, drawn)

    def merge(self, other: "Statistics") -> None:
        """Merge the statistics of another rank."""
        for name, kind in other.kinds.items():
            self._check_kind(name, kind)
        for name, summary in other.summaries.items():
            self._take(name, summary)
        self.blank.update(other.blank)
        self.sample.merge(other.sample)
        self.rows += other.rows

    def encoder(self, numeric: Numeric) -> TableEncoder:
        """The encoder that `TableEncoder.fit` learns from the same rows; quantiles are those of a sample."""
        encoder = TableEncoder(numeric=numeric)
        texts = sum(isinstance(found, CategorySummary) for found in self.summaries.values())
        most = encoder.most_categories(self.rows, texts)
        columns = [self._column(j, name, numeric, most) for j, name in enumerate(self.features)]
        if empty := [name for name, column in zip(self.features, columns, strict=True) if column is None]:
            raise TableError(f"no training row has a value in the column {quoted(empty)}; remove it with --drop")
        encoder.set_columns(self.features, [column for column in columns if column is not None])
        return encoder

    def profile(self, labels: Counter[Any]) -> TableProfile:
        """Profile of the training rows: numbers are only checked for constants, and equal rows are not counted."""
        columns = []
        for name in self.features:
            found, kind = self.summaries.get(name), self.kinds.get(name, "empty")
            missing = self.blank[name] + (found.missing if found else 0)
            if isinstance(found, CategorySummary):
                distinct = len(found.counts) + found.forgotten
            else:
                distinct = 0 if found is None else 1 if found.low == found.high else 2
            columns.append(ColumnProfile(name, kind, missing, distinct))
        total = sum(labels.values())
        shares = {str(label): round(count * self.rows / total) for label, count in sorted(labels.items(), key=str)}
        return TableProfile(self.rows, tuple(columns), shares, None, None)

    def _column(self, j: int, name: str, numeric: Numeric, max_categories: int) -> AnyColumn | None:
        summary = self.summaries.get(name)
        if summary is None:
            return None
        summary = replace(summary, missing=summary.missing + self.blank[name])
        if isinstance(summary, CategorySummary):
            return summary.column(name, max_categories)
        return summary.column(self.kinds[name], numeric, self.sample.values[:, j])

    def _check_kind(self, name: str, kind: Kind) -> None:
        if self.kinds.setdefault(name, kind) != kind:
            raise ColumnTypeError(
                f"column {name!r} holds {self.kinds[name]} values in one file and {kind} values in another; "
                "write it alike in all of them"
            )

    def _take(self, name: str, found: Summary) -> None:
        match self.summaries.get(name), found:
            case None, _:
                self.summaries[name] = found
            case NumberSummary() as known, NumberSummary():
                known.merge(found)
            case CategorySummary() as known, CategorySummary():
                known.merge(found)
            case _:
                raise ColumnTypeError(
                    f"column {name!r} holds numbers in one file and categories in another; write it alike in all"
                )


MOST_TABLES = 64  # number of frames after which neighbours are joined


@dataclass
class HeldOutRows:
    """Marked rows of the chunks of a stream, in order; neighbours of equal types are joined from time to time.

    >>> held = HeldOutRows(most=2)
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
        """The rows kept so far, which are then released."""
        self._join()
        tables, self.tables = self.tables, []
        return [to_pandas(table) for table in tables]

    def _join(self) -> None:
        # Files may differ in column types; the encoders report this.
        alike = groupby(self.tables, key=lambda table: table.schema)
        self.tables = [pa.concat_tables(tables).combine_chunks() for _, tables in alike]


MOST_CLASSES = 1000


@dataclass
class Survey:
    """Result of the first pass. Held-out rows differ by rank; everything else is the same on all ranks."""

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
    """Read this rank's row groups once and merge the statistics of all ranks."""
    found = Survey(Statistics(source.features, parts.seed))
    valid, test = HeldOutRows(), HeldOutRows()
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
    check_class_counts(source.target, dict(sorted(merged.labels.items(), key=str)))
    return merged


def labels_of(column: Any, target: str) -> NDArray[Any]:
    """A chunk's labels as plain values; every row must have one."""
    kind = column_kind(column, target)
    if lacking := int(column.isna().sum()):
        raise TableError(
            f"the target {target!r} must have a label in every row, but {lacking} of {len(column)} consecutive rows "
            "have none; drop them"
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
            f"the target {source.target!r} looks like a regression target, with values such as "
            f"{quoted(labels, most=3)}; at most {MOST_CLASSES} classes are supported: bin it into ranges first"
        )
