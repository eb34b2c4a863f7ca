"""Batch sizes: rows that a batch needs for its metric to be meaningful.

`advise` looks at the counts of a batch of n rows as shares of n. EAST Theorem 5.8 bounds their largest deviation from
those of all rows by sqrt(log(2 d^2 / delta) / (2 n)) with probability 1 - delta; multiplied by the slope of the metric
this bounds its error, for any classifier. The standard error by the same slope is what to expect, and far smaller.
Slopes are taken at a classifier that finds `recall` of the rarest class.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from evalign import checks, metrics
from evalign.confusion import Confusion
from evalign.memory import ROWS_OF_RAREST
from evalign.metrics import Average, Beta

TOLERANCE, DELTA, RECALL = 0.05, 0.05, 0.8
MISSED_RARELY = 0.01


@dataclass(frozen=True)
class BatchAdvice:
    """How well a batch of `batch` rows estimates the metric."""

    batch: int
    rows_of_rarest: float
    missing: float  # probability that the batch lacks a class
    standard_error: float  # of the metric
    decay: float  # decay of a memory that makes up for the missing rows; 0 if none is needed


@dataclass(frozen=True)
class Advice:
    """Batch sizes that a metric needs for these class shares; `at` describes one batch size."""

    shares: tuple[float, ...]
    variance: float  # variance for one row: the standard error for n rows is its root over sqrt(n)
    slope: float  # sum of the absolute derivatives with respect to the counts

    @property
    def for_every_class(self) -> int:
        """Batch size at which at most one batch in a hundred lacks a class."""
        low, high = 1, 2
        while _missing(self.shares, high) > MISSED_RARELY:
            low, high = high, 2 * high
        while low + 1 < high:
            middle = (low + high) // 2
            low, high = (middle, high) if _missing(self.shares, middle) > MISSED_RARELY else (low, middle)
        return high

    def for_error(self, tolerance: float = TOLERANCE) -> int:
        """Batch size for a standard error of `tolerance`."""
        return math.ceil(self.variance / tolerance**2)

    def guaranteed(self, tolerance: float = TOLERANCE, delta: float = DELTA) -> int:
        """Batch size for an error of at most `tolerance`, with probability 1 - delta, to first order (Theorem 5.8)."""
        return math.ceil(math.log(2 * len(self.shares) ** 2 / delta) / 2 * (self.slope / tolerance) ** 2)

    def at(self, batch: int) -> BatchAdvice:
        checks.check_number("batch", batch, low=1)
        rarest = batch * min(self.shares)
        return BatchAdvice(
            batch, rarest, _missing(self.shares, batch), math.sqrt(self.variance / batch),
            max(0.0, 1 - rarest / ROWS_OF_RAREST),
        )  # fmt: skip


def advise(
    labels: Sequence[float] | Tensor,
    metric: str = "f1",
    *,
    average: Average | None = None,
    beta: Beta | None = None,
    recall: float = RECALL,
) -> Advice:
    """Advise a batch size for a metric on data with the label counts `labels`, one per class.

    >>> advice = advise([9800, 200], "f1")
    >>> advice.for_every_class, advice.for_error(0.05), advice.guaranteed(0.05)
    (228, 1920, 2537587)
    >>> print(f"{advice.at(64).missing:.2f}, {advice.at(64).standard_error:.2f}, {advice.at(64).decay:.4f}")
    0.27, 0.27, 0.9872
    """
    counts = torch.as_tensor(labels, dtype=torch.float64)
    if counts.dim() != 1 or len(counts) < 2 or not bool((counts > 0).all()):
        raise ValueError(f"labels must hold positive counts for at least two classes, got {counts.tolist()}")
    checks.check_number("recall", recall, low=0.0, high=1.0, open_low=True, open_high=True)
    shares = counts / counts.sum()
    if average is None:
        average = "binary" if len(shares) == 2 else "macro"
    matrix = _typical(shares, recall).requires_grad_()
    score = metrics.resolve(metric, average=average, beta=beta)(Confusion.of_matrix(matrix))
    (slope,) = torch.autograd.grad(score, matrix)
    p = matrix.detach()
    variance = (p * slope**2).sum() - (p * slope).sum() ** 2
    return Advice(tuple(shares.tolist()), max(0.0, float(variance)), float(slope.abs().sum()))


def _typical(shares: Tensor, recall: float) -> Tensor:
    """Confusion of a classifier with the given `recall` of the rarest class, and a higher one of the others.

    C_ij = (1 - recall) t_i t_j / (1 - min t) off the diagonal: errors in proportion to both classes, and every class
    predicted as often as it occurs.
    """
    matrix = (1 - recall) / (1 - shares.min()) * torch.outer(shares, shares)
    matrix.fill_diagonal_(0.0)
    return matrix + torch.diag(shares - matrix.sum(1))


def _missing(shares: Sequence[float], batch: int) -> float:
    """Probability that `batch` rows lack a class, by Bonferroni: never more than the sum over the classes."""
    return min(1.0, sum((1 - share) ** batch for share in shares))
