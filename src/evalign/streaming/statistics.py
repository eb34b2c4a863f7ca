"""What encoders need to know of the training rows, learned as they pass by."""

from collections import Counter
from dataclasses import dataclass, field, replace

import numpy as np
import pandas as pd

from evalign.streaming.parts import Numbers
from evalign.streaming.sample import Sample
from evalign.streaming.summaries import CategorySummary, NumberSummary
from evalign.tables import TableEncoder
from evalign.tables.columns import ColumnTypeError, Kind, TableError, column_kind, floats, quoted
from evalign.tables.encoders import AnyColumn, Numeric

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
        """Take what another rank has learned."""
        for name, kind in other.kinds.items():
            self._check_kind(name, kind)
        for name, summary in other.summaries.items():
            self._take(name, summary)
        self.blank.update(other.blank)
        self.sample.merge(other.sample)
        self.rows += other.rows

    def encoder(self, numeric: Numeric, max_categories: int = 64) -> TableEncoder:
        """The encoder that `TableEncoder.fit` learns from the same rows; quantiles are those of a sample."""
        columns = [self._column(j, name, numeric, max_categories) for j, name in enumerate(self.features)]
        if empty := [name for name, column in zip(self.features, columns, strict=True) if column is None]:
            raise TableError(f"no training row has a value in the column {quoted(empty)}; leave it out with --drop")
        encoder = TableEncoder(numeric=numeric, max_categories=max_categories)
        encoder._learned(self.features, [column for column in columns if column is not None])
        return encoder

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
