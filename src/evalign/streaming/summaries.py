"""What is kept of a column that passes by: moments of numbers, counts of categories. Summaries of ranks add up."""

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evalign.tables.columns import Column, Kind, Label, factorized
from evalign.tables.encoders import (
    CategoryColumn,
    NumberColumn,
    Numeric,
    categories_of_counts,
    mean_and_std,
    quantiles_of,
)

MOST_DISTINCT = 100_000  # categories that are counted at a time; an id would fill memory with names


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
            with np.errstate(over="ignore"):  # what overflows is taken from the sample, see `column`
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
        """The encoder; quantiles come from a sample of the values. None where there is no value."""
        if not self.count:
            return None
        indicator, own = self.missing > 0, "bool" if kind == "bool" else "number"
        if self.low == self.high:
            return NumberColumn(own, self.low, 0.0, 0.0, indicator)  # type: ignore[arg-type]
        if own == "bool":
            return NumberColumn("bool", 0.0, 1.0, self.mean, indicator)
        sample = sample[~np.isnan(sample)]
        if len(sample) < 2:  # of a column that is almost always missing; the extremes are known at least
            sample = np.array([self.low, self.high])
        quantiles = None if numeric == "standard" else quantiles_of(sample)
        if numeric == "quantile":
            return NumberColumn("number", 0.0, 1.0, 0.0, indicator, quantiles)
        mean, deviation = self.mean, self.deviation
        if not math.isfinite(mean) or not math.isfinite(deviation):
            mean, deviation = mean_and_std(sample)
        return NumberColumn("number", mean, deviation, 0.0, indicator, quantiles, both=numeric == "both")


@dataclass
class CategorySummary:
    """How often each category comes; beyond `most` of them the rarest half is forgotten and counted anew."""

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
        """The encoder; None where there is no value."""
        if not self.counts:
            return None
        return categories_of_counts(
            np.array(list(self.counts), dtype=object), np.array(list(self.counts.values())), label,
            text=self.text, missing=self.missing > 0, rows=self.counts.total() + self.forgotten + self.missing,
            forgotten=self.forgotten, max_categories=max_categories,
        )  # fmt: skip
