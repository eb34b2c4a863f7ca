"""Many rows -> one line per contender and decision: mean, standard error, paired difference to ours."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from evalign.comparison.run import Row


@dataclass(frozen=True)
class Line:
    """One contender with one decision over all splits; an error is None where there is one split only.

    `difference` is the reference's score minus this one, split by split: above 0 the reference is better.
    """

    contender: str
    title: str
    decision: str
    scores: tuple[float, ...]
    mean: float
    error: float | None
    difference: float
    difference_error: float | None
    limits: dict[str, float]
    confusion: NDArray[np.int64]  # summed over the splits
    seconds: float


def standard_error(values: Iterable[float]) -> float | None:
    """s / sqrt(k) with s² = sum (x - mean)² / (k - 1).

    >>> standard_error([1.0, 2.0, 3.0])
    0.5773502691896258
    """
    x = np.array(list(values))
    return float(x.std(ddof=1) / math.sqrt(len(x))) if len(x) > 1 else None


def summarise(rows: Iterable[Row], reference: tuple[str, str]) -> list[Line]:
    """A line for every (contender, decision), the best mean first; differences are to the `reference` pair."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.contender, row.decision), []).append(row)
    if reference not in groups:
        raise ValueError(f"the reference must be among {sorted(groups)}, got {reference}")
    theirs = {row.split: row.score for row in groups[reference]}
    lines = []
    for group in groups.values():
        scores = tuple(row.score for row in group)
        gaps = [theirs[row.split] - row.score for row in group]
        limits = {name: float(np.mean([row.limits[name] for row in group])) for name in group[0].limits}
        lines.append(
            Line(
                group[0].contender, group[0].title, group[0].decision, scores, float(np.mean(scores)),
                standard_error(scores), float(np.mean(gaps)), standard_error(gaps), limits,
                np.sum([row.confusion for row in group], axis=0), float(np.mean([row.seconds for row in group])),
            )
        )  # fmt: skip
    return sorted(lines, key=lambda line: -line.mean)
