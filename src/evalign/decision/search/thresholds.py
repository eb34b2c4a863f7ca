"""Sweep of all thresholds of one score, for expected counts and for observed labels."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evalign.confusion import Confusion
from evalign.decision.rule import NEVER, Floats
from evalign.decision.search.problem import Problem, Scored, present_classes
from evalign.decision.search.refine import coarse_to_fine

EXACT = 2**22  # cuts searched exhaustively
BATCH = 2**14  # cuts whose confusions are in memory at a time


class ThresholdSweep:
    """All cuts of n scores, highest scores first; O(n log n).

    Cut k predicts the k highest distinct scores positive. tp_k is the sum of their targets: 0/1 labels, or
    probabilities for expected counts. With `multilabel` a confusion has one label, otherwise two classes.
    """

    def __init__(self, p: Floats, target: Floats, weight: Floats, *, expected: bool, multilabel: bool = False) -> None:
        # Sorted by score, then target, then weight: the result, resampling included, is independent of row order.
        order = np.lexsort((weight, target, -p))
        p = p[order]
        self.target, self.weight = target[order], weight[order]
        self.expected, self.multilabel = expected, multilabel
        change = np.flatnonzero(p[1:] < p[:-1]) + 1
        self.sizes = np.concatenate([[0], change, [len(p)]])
        # A threshold in (low[k], high[k]] makes cut k.
        self.high = np.concatenate([[1.0], p[self.sizes[1:] - 1]])
        self.low = np.concatenate([p[self.sizes[:-1]], [0.0]])

    def __len__(self) -> int:
        return len(self.sizes)

    def counts(self, times: Floats | None = None) -> tuple[Floats, Floats]:
        """(tp, predicted) of every cut; `times` are multiplicities of the sorted rows, for resampling."""
        weight = self.weight if times is None else self.weight * times
        tp = np.concatenate([[0.0], np.cumsum(weight * self.target)])[self.sizes]
        return tp, np.concatenate([[0.0], np.cumsum(weight)])[self.sizes]

    def confusion(self, tp: Tensor, predicted: Tensor, actual: float, total: float) -> Confusion:
        """Confusions (K,) of two classes, or of one label."""
        present = present_classes(np.asarray(actual), self.weight) if self.expected else None
        actuals, totals = torch.full_like(tp, actual), torch.full_like(tp, total)
        if self.multilabel:
            return Confusion(tp[..., None], actuals[..., None], predicted[..., None], totals[..., None],
                             present=present, multilabel=True)  # fmt: skip
        tn = totals - actuals - predicted + tp
        both = torch.stack([totals - actuals, actuals], -1)
        if self.expected:
            present = present_classes(np.array([total - actual, actual]), self.weight)
        matrix = torch.stack([torch.stack([tn, predicted - tp], -1), torch.stack([actuals - tp, tp], -1)], -2)
        return Confusion(torch.stack([tn, tp], -1), both, torch.stack([totals - predicted, predicted], -1), totals,
                         present=present, matrix=matrix)  # fmt: skip

    def at(self, index: NDArray[np.int64], counts: tuple[Floats, Floats] | None = None) -> Confusion:
        """Confusions of the cuts in `index`."""
        tp, predicted = counts or self.counts()
        return self.confusion(
            torch.from_numpy(tp[index]), torch.from_numpy(predicted[index]), float(tp[-1]), float(predicted[-1])
        )

    def cut_at(self, threshold: float) -> int:
        """Cut made by a threshold."""
        return int(np.searchsorted(-self.low[:-1], -threshold, side="right"))

    def threshold(self, k: int) -> float:
        """Threshold halfway between the scores on either side of cut k."""
        low, high = float(self.low[k]), float(self.high[k])
        if k == 0 and low >= 1.0:
            return NEVER
        if k == len(self) - 1 and high <= 0.0:
            return 0.0
        middle = (low + high) / 2
        return middle if middle > low else high

    def stationary_threshold(self, k: int, problem: Problem) -> float:
        """t = - (dM / d predicted) / (dM / d tp), where one more positive gains nothing, if it makes cut k.

        For F1 this is F* / 2, independent of where the sample's scores lie between the cuts.
        """
        tp, predicted = self.counts()
        x = torch.tensor([tp[k], predicted[k]], dtype=torch.float64, requires_grad=True)
        value = problem.metric.function(_single(self.confusion(x[:1], x[1:], float(tp[-1]), float(predicted[-1]))))
        if isinstance(value, Tensor) and value.requires_grad:
            slope_tp, slope_predicted = torch.autograd.grad(value, x)[0].tolist()
            t = -slope_predicted / slope_tp if slope_tp > 0 else np.nan
            if self.low[k] < t <= self.high[k]:
                return float(t)
        return self.threshold(k)

    def score(self, problem: Problem, index: NDArray[np.int64]) -> Scored:
        """Shortfall of the constraints and value of the metric at the cuts in `index`."""
        counts = self.counts()
        found = []
        for part in np.array_split(index, -(-len(index) // BATCH)):
            c = self.at(part, counts)
            found.append((problem.shortfalls(c).sum(axis=0), problem.value(c)))
        shortfall, value = zip(*found, strict=True)
        return np.concatenate(shortfall), np.concatenate(value)

    def misses(self, problem: Problem, k: int) -> bool:
        """Whether cut k misses a constraint."""
        return bool(self.score(problem, np.array([k]))[0].any())

    def best(self, problem: Problem, limits: "ThresholdSweep | None" = None, near: float = 0.5) -> int:
        """Best cut for a problem, with constraints on `limits` of the same scores; ties go to the nearest to `near`."""
        limits = limits or self

        def score(index: NDArray[np.int64]) -> Scored:
            if limits is self:
                return self.score(problem, index)
            return limits.score(problem, index)[0], self.score(problem, index)[1]

        return coarse_to_fine(score, len(self), self.cut_at(near), problem.batch_size(1, EXACT))


def _single(c: Confusion) -> Confusion:
    """First confusion of a batch."""
    present = c.present
    matrix = None if c._matrix is None else c.matrix[0]
    return Confusion(c.tp[0], c.actual[0], c.predicted[0], c.total[0], present=present, multilabel=c.multilabel,
                     matrix=matrix)  # fmt: skip
