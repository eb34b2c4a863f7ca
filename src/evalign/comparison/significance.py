"""Intervals of any confusion-matrix score by resampling test rows, all contenders on the same rows.

A score sees a row only by its label and its predictions, so rows that share them are drawn together: resampling n
rows is a multinomial draw of the counts of these patterns, however large n is. Each class is resampled by itself and
keeps its number of rows, as it does in a stratified split; else a rare class would vanish from some resamples.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.stats import t as student_t

from evalign.comparison.run import Row
from evalign.tables.split import Codes, Floats

FEWEST_SPLITS = 5  # for a p value; with fewer, hardly any difference is significant
CELLS = 2**22  # of matrices held at once, 32 MB
Scorer = Callable[[NDArray[np.int64]], Floats]  # matrices (K, C, C) -> (K,) or (K, C)


def resampled_scores(
    truth: Codes, predictions: Mapping[str, Codes], classes: int, score: Scorer, *, repeats: int = 1000, seed: int = 0
) -> dict[str, Floats]:
    """The score of every prediction on `repeats` resamples; a resample has the same rows for all predictions.

    Multilabel truth and predictions are 0/1 (n, L), and `score` takes counts (K, L, 2, 2).
    """
    if truth.ndim == 2:
        return _multilabel_scores(truth, predictions, score, repeats, seed)
    stacked = np.stack([truth, *predictions.values()])
    patterns, counts = np.unique(stacked, axis=1, return_counts=True)
    generator = np.random.default_rng(seed)
    parts: dict[str, list[Floats]] = {name: [] for name in predictions}
    at_once = max(1, min(repeats, CELLS // classes**2, CELLS // len(counts)))
    for start in range(0, repeats, at_once):
        draws = _drawn(generator, counts, patterns[0], min(at_once, repeats - start))
        for name, predicted in zip(predictions, patterns[1:], strict=True):
            parts[name].append(score(_matrices(draws, patterns[0] * classes + predicted, classes)))
    return {name: np.concatenate(part) for name, part in parts.items()}


def _multilabel_scores(
    truth: Codes, predictions: Mapping[str, Codes], score: Scorer, repeats: int, seed: int
) -> dict[str, Floats]:
    """Resampled scores of multilabel predictions, row by row: there are too many patterns of labels."""
    generator, cells = np.random.default_rng(seed), {name: 2 * truth + one for name, one in predictions.items()}
    counts: dict[str, list[NDArray[np.int64]]] = {name: [] for name in predictions}
    for _ in range(repeats):
        rows = generator.integers(len(truth), size=len(truth))
        for name, cell in cells.items():
            drawn = cell[rows]
            counts[name].append(np.stack([(drawn == k).sum(0) for k in range(4)], axis=-1).reshape(-1, 2, 2))
    return {name: score(np.stack(part)) for name, part in counts.items()}


def resampled_matrices(
    confusion: NDArray[np.int64], *, repeats: int = 1000, seed: int = 0
) -> Iterator[NDArray[np.int64]]:
    """Resamples of one matrix (C, C), as pieces (K, C, C) of `repeats` in all.

    >>> pieces = list(resampled_matrices(np.array([[3, 1], [0, 2]]), repeats=5))
    >>> pieces[0].shape, pieces[0].sum(axis=2).tolist()
    ((5, 2, 2), [[4, 2], [4, 2], [4, 2], [4, 2], [4, 2]])
    """
    generator, cells = np.random.default_rng(seed), np.flatnonzero(confusion)
    counts, labels = confusion.ravel()[cells], cells // len(confusion)
    at_once = max(1, min(repeats, CELLS // confusion.size))
    for start in range(0, repeats, at_once):
        out = np.zeros((min(at_once, repeats - start), confusion.size), dtype=np.int64)
        out[:, cells] = _drawn(generator, counts, labels, len(out))
        yield out.reshape(-1, *confusion.shape)


def interval(values: Floats, level: float = 0.95) -> Floats:
    """The percentile interval, low and high along the first dimension.

    >>> interval(np.arange(101.0), level=0.9).round(6).tolist()
    [5.0, 95.0]
    """
    tail = (1 - level) / 2
    return np.quantile(values, [tail, 1 - tail], axis=0)


def _drawn(generator: np.random.Generator, counts: Codes, labels: Codes, size: int) -> NDArray[np.int64]:
    """Resampled counts (size, P) of patterns that come ordered by label."""
    out = np.empty((size, len(counts)), dtype=np.int64)
    for part in np.split(np.arange(len(counts)), np.flatnonzero(np.diff(labels)) + 1):
        total = counts[part].sum()
        out[:, part] = generator.multinomial(total, counts[part] / total, size=size)
    return out


def _matrices(draws: NDArray[np.int64], cells: Codes, classes: int) -> NDArray[np.int64]:
    """Counts of patterns (K, P), each in one cell of the matrix -> matrices (K, C, C)."""
    order = np.argsort(cells, kind="stable")
    starts = np.flatnonzero(np.r_[True, np.diff(cells[order]) > 0])
    out = np.zeros((len(draws), classes * classes), dtype=np.int64)
    out[:, cells[order][starts]] = np.add.reduceat(draws[:, order], starts, axis=1)
    return out.reshape(-1, classes, classes)


@dataclass(frozen=True)
class Line:
    """One contender with one decision over all splits; errors are None with a single split.

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
    p: float | None  # of no difference, paired by split (Nadeau and Bengio 2003); None for the reference and few splits
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


def corrected_error(values: Iterable[float], test_to_train: float) -> float:
    """Standard error of the mean of J >= 2 values from random splits, which share rows (Nadeau and Bengio 2003).

    sqrt((1 / J + n_test / n_train) s²): training parts overlap, so 1 / J alone would mistake noise for a difference.
    """
    x = np.array(list(values))
    return float(math.sqrt((1 / len(x) + test_to_train) * x.var(ddof=1)))


def paired_p(gaps: Iterable[float], test_to_train: float) -> float | None:
    """The p value of no difference over random splits, by Student's t with J - 1 degrees; None for one split.

    >>> round(paired_p([0.1, 0.2, 0.3], 0.25), 3)
    0.12
    """
    d = np.array(list(gaps))
    return two_sided_p(d.mean(), corrected_error(d, test_to_train), len(d) - 1) if len(d) > 1 else None


def two_sided_p(distance: float, error: float, freedom: int) -> float:
    """Two-sided p value of a distance by Student's t; 0 or 1 if the error is 0."""
    if error == 0:
        return 1.0 if distance == 0 else 0.0
    return float(2 * student_t.sf(abs(distance) / error, freedom))


def summarise(rows: Iterable[Row], reference: tuple[str, str], *, test_size: float = 0.2) -> list[Line]:
    """A line for every (contender, decision), the best mean first; differences are to the `reference` pair.

    `test_size` is the share of rows in a test part, which sets how much training parts overlap.
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
        p = None if key == reference or len(gaps) < FEWEST_SPLITS else paired_p(gaps, overlap)
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
