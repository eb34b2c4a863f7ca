"""One threshold a label for metrics that couple the labels: coordinate ascent over exact sweeps."""

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import expit

from evalign.confusion import Confusion
from evalign.decision.rule import Floats
from evalign.decision.search.frank_wolfe import search_multipliers
from evalign.decision.search.problem import Problem, present_classes
from evalign.decision.search.refine import best_of, coarse_to_fine
from evalign.decision.search.thresholds import ThresholdSweep

Cuts = NDArray[np.int64]  # one cut a label


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
        """(tp, predicted) of one cut a label, (2, L)."""
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
        self.best = self.half
        self.shortfall, self.value = self._score(self.half)

    def _score(self, cuts: Cuts) -> tuple[Floats, float]:
        value = float(self.problem.value(self.values.confusion(self.values.at(cuts)[None]))[0])
        return self.problem.shortfalls(self.limits.confusion(self.limits.at(cuts)[None]))[:, 0], value

    def add(self, cuts: Cuts) -> Floats:
        shortfall, value = self._score(cuts)
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
            self.add(self.ascend(self.best, None))


def best_thresholds(problem: Problem, values: LabelCounts, limits: LabelCounts) -> list[float]:
    """One threshold a label."""
    found = LabelSearch(problem, values, limits)
    found.run()
    return [sweep.threshold(int(k)) for sweep, k in zip(values.sweeps, found.best, strict=True)]
