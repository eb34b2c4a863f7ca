"""Best thresholds: a sweep for one score, coordinate ascent for coupled labels; and the best rule of any problem."""

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import expit
from torch import Tensor

from evalign.confusion import Confusion
from evalign.decision.rule import NEVER, Floats, Labels, Rule
from evalign.decision.search.counts import ClassCounts
from evalign.decision.search.frank_wolfe import maximise, search_multipliers
from evalign.decision.search.problem import Problem, Scored, best_of, coarse_to_fine, present_classes

EXACT = 2**22  # cuts searched exhaustively
BATCH = 2**14  # cuts whose confusions are in memory at a time
Cuts = NDArray[np.int64]  # one cut per label


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
        """t = - (dM / d predicted) / (dM / d tp), where one more positive gains nothing, if it gives cut k.

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

    def best(self, problem: Problem, limits: "ThresholdSweep | None" = None) -> int:
        """Best cut for a problem, with constraints on `limits` of the same scores; ties go to the nearest to 1/2."""

        def score(index: NDArray[np.int64]) -> Scored:
            shortfall, value = self.score(problem, index)
            return shortfall if limits is None else limits.score(problem, index)[0], value

        return coarse_to_fine(score, len(self), self.cut_at(0.5), problem.batch_size(1, EXACT))


def _single(c: Confusion) -> Confusion:
    """First confusion of a batch."""
    matrix = None if c.built_matrix is None else c.built_matrix[0]
    parts = (x[0] for x in (c.tp, c.actual, c.predicted, c.total))
    return Confusion(*parts, present=c.present, multilabel=c.multilabel, matrix=matrix)


class LabelCounts:
    """(tp, predicted) of every cut of every label; targets are probabilities or 0/1 labels."""

    def __init__(self, p: Floats, target: Floats, weight: Floats, *, expected: bool) -> None:
        self.sweeps = [
            ThresholdSweep(p[:, k], target[:, k], weight, expected=expected, multilabel=True) for k in range(p.shape[1])
        ]
        self.counts = [sweep.counts() for sweep in self.sweeps]
        actual = np.array([tp[-1] for tp, _ in self.counts])
        self.actual, self.total = torch.from_numpy(actual), float(weight.sum())
        self.present = present_classes(actual, weight) if expected else None

    def at(self, cuts: Cuts) -> Floats:
        """(tp, predicted) of one cut per label, (2, L)."""
        return np.array([[tp[k], predicted[k]] for (tp, predicted), k in zip(self.counts, cuts, strict=True)]).T

    def confusion(self, states: Floats) -> Confusion:
        """Confusions of states (K, 2, L)."""
        x = torch.from_numpy(states)
        tp, predicted = x[:, 0], x[:, 1]
        actual, total = self.actual.expand_as(tp), torch.full_like(tp, self.total)
        return Confusion(tp, actual, predicted, total, present=self.present, multilabel=True)

    def moved(self, cuts: Cuts, label: int, index: Cuts) -> Confusion:
        """Confusions with one label's cut moved to each of `index`."""
        states = np.repeat(self.at(cuts)[None], len(index), axis=0)
        states[:, 0, label], states[:, 1, label] = (part[index] for part in self.counts[label])
        return self.confusion(states)

    def common(self, thresholds: Floats) -> tuple[Confusion, NDArray[np.int64]]:
        """Confusions and cuts of one common threshold, for each of several."""
        cuts = np.array([[sweep.cut_at(t) for sweep in self.sweeps] for t in thresholds])
        return self.confusion(np.stack([self.at(row) for row in cuts])), cuts


class LabelSearch:
    """Best cuts for a problem: the metric is evaluated on `values`, constraints on `limits`."""

    def __init__(self, problem: Problem, values: LabelCounts, limits: LabelCounts) -> None:
        self.problem, self.values, self.limits = problem, values, limits
        self.half = np.array([sweep.cut_at(0.5) for sweep in values.sweeps])
        self.best, self.shortfall, self.value = self.half, np.full(len(problem.constraints), np.inf), -np.inf
        self.add(self.half)

    def add(self, cuts: Cuts) -> Floats:
        """Keep the cuts if they are the best so far; returns their shortfalls."""
        value = float(self.problem.value(self.values.confusion(self.values.at(cuts)[None]))[0])
        shortfall = self.problem.shortfalls(self.limits.confusion(self.limits.at(cuts)[None]))[:, 0]
        both = np.array([self.shortfall.sum(), shortfall.sum()])
        if best_of(both, np.array([self.value, value])) == 1:
            self.best, self.shortfall, self.value = cuts, shortfall, value
        return shortfall

    def ascend(self, start: Cuts, multipliers: Floats | None, passes: int = 3) -> Cuts:
        """Coordinate ascent: each label's best cut with the others fixed, until none moves.

        With multipliers the objective is M + sum_r multiplier_r g_r; with None, the least shortfall comes first.
        """
        cuts, problem = start.copy(), self.problem
        objective = None if multipliers is None else problem.lagrangian(multipliers)
        for _ in range(passes):
            before = cuts.copy()
            for label in range(len(cuts)):

                def score(index: Cuts, label: int = label) -> tuple[Floats, Floats]:
                    c = self.values.moved(cuts, label, index)
                    if objective is not None:
                        with torch.no_grad():
                            value = objective(c).double().numpy()
                        return np.zeros(len(index)), np.where(np.isnan(value), -np.inf, value)
                    value = problem.value(c)
                    c = c if self.limits is self.values else self.limits.moved(cuts, label, index)
                    return problem.shortfalls(c).sum(axis=0), value

                batch_size = problem.batch_size(2 * len(cuts))
                cuts[label] = coarse_to_fine(score, len(self.values.sweeps[label]), int(cuts[label]), batch_size)
            if (cuts == before).all():
                break
        return cuts

    def run(self) -> None:
        grid = expit(np.linspace(-9.0, 9.0, 361))
        c, cuts = self.values.common(grid)
        value = self.problem.value(c)
        common = cuts[best_of(np.zeros_like(value), value, np.abs(grid - 0.5))]
        self.add(common)
        none = np.zeros(len(self.problem.constraints))
        for start in (self.half, common):
            self.add(self.ascend(start, none))
        if self.shortfall.any():
            start = self.best
            search_multipliers(lambda m: self.add(self.ascend(start, m, passes=1)), none, self.shortfall)
        if self.problem.constraints:
            for start in (self.best, self.half, common):
                self.add(self.ascend(start, None))


def best_thresholds(problem: Problem, values: LabelCounts, limits: LabelCounts) -> list[float]:
    """One threshold a label."""
    found = LabelSearch(problem, values, limits)
    found.run()
    return [sweep.threshold(int(k)) for sweep, k in zip(values.sweeps, found.best, strict=True)]


def best_expected(q: Floats, problem: Problem, weight: Floats, y: Labels | None) -> Rule:
    """Rule of the best expected metric for calibrated probabilities q, among those that meet constraints on y."""
    limited = y is not None and bool(problem.constraints)
    if problem.multilabel:
        if problem.separable:
            sweeps = [
                ThresholdSweep(q[:, k], q[:, k], weight, expected=True, multilabel=True) for k in range(q.shape[1])
            ]
            found = [
                s.stationary_threshold(s.best(own), own) for s, own in zip(sweeps, problem.per_label(), strict=True)
            ]
            return Rule("thresholds", problem.classes, thresholds=tuple(found))
        values = LabelCounts(q, q, weight, expected=True)
        limits = LabelCounts(q, np.asarray(y, np.float64), weight, expected=False) if limited else values
        return Rule("thresholds", problem.classes, thresholds=tuple(best_thresholds(problem, values, limits)))
    if problem.classes == 2:
        sweep = ThresholdSweep(q[:, 1], q[:, 1], weight, expected=True)
        observed = ThresholdSweep(q[:, 1], np.asarray(y, np.float64), weight, expected=False) if limited else sweep
        k = sweep.best(problem, observed)
        threshold = sweep.threshold(k) if problem.constraints else sweep.stationary_threshold(k, problem)
        return Rule("threshold", 2, threshold=threshold, at_most=problem.at_most)
    counts = ClassCounts(q, weight, problem.classes, reads_matrix=problem.reads_matrix)
    limit_counts = counts
    if limited and y is not None:
        limit_counts = ClassCounts(y, weight, problem.classes, reads_matrix=problem.reads_matrix)
    return maximise(q, problem, counts, limit_counts).gain.rule()
