"""Many rows -> one line per contender and decision: mean, standard error, paired difference to ours."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.stats import t as student_t

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
    p: float | None  # of no difference, paired by split (Nadeau and Bengio 2003); None for the reference and one split
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


def paired_p(gaps: Iterable[float], test_to_train: float) -> float | None:
    """The p value of no difference over random splits; None for one split.

    t = mean(d) / sqrt((1 / J + n_test / n_train) var(d)), J - 1 degrees of freedom (Nadeau and Bengio 2003): splits
    share most of their training rows, and 1 / J alone would call noise a difference.

    >>> round(paired_p([0.1, 0.2, 0.3], 0.25), 3)
    0.12
    """
    d = np.array(list(gaps))
    if len(d) < 2:
        return None
    error = math.sqrt((1 / len(d) + test_to_train) * d.var(ddof=1))
    if error == 0:
        return 1.0 if d.mean() == 0 else 0.0
    return float(2 * student_t.sf(abs(d.mean()) / error, len(d) - 1))


def summarise(rows: Iterable[Row], reference: tuple[str, str], *, test_size: float = 0.2) -> list[Line]:
    """A line for every (contender, decision), the best mean first; differences are to the `reference` pair.

    `test_size` is the share of the rows in a test part: how much training parts overlap decides what noise is.
    """
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.contender, row.decision), []).append(row)
    if reference not in groups:
        raise ValueError(f"the reference must be among {sorted(groups)}, got {reference}")
    theirs = {row.split: row.score for row in groups[reference]}
    lines = []
    overlap = test_size / (1 - test_size)
    for key, group in groups.items():
        scores = tuple(row.score for row in group)
        gaps = [theirs[row.split] - row.score for row in group]
        p = None if key == reference else paired_p(gaps, overlap)
        limits = {name: float(np.mean([row.limits[name] for row in group])) for name in group[0].limits}
        lines.append(
            Line(
                group[0].contender, group[0].title, group[0].decision, scores, float(np.mean(scores)),
                standard_error(scores), float(np.mean(gaps)), standard_error(gaps),
                p, limits,
                np.sum([row.confusion for row in group], axis=0), float(np.mean([row.seconds for row in group])),
            )
        )  # fmt: skip
    return sorted(lines, key=lambda line: -line.mean)
