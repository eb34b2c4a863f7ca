"""Thresholds of many labels: one sweep each where labels are apart, taken in turn where they are not."""

import numpy as np
import torch
from numpy.typing import NDArray

from evalign.confusion import Confusion
from evalign.decision.climb import raise_missed
from evalign.decision.goal import Goal, best_of, search
from evalign.decision.rule import Floats, expit
from evalign.decision.search import Sweep, occurs

Cuts = NDArray[np.int64]  # one cut a label


class LabelTally:
    """Counts of every cut of every label, (tp, predicted), for probabilities or labels as targets."""

    def __init__(self, p: Floats, target: Floats, weight: Floats, *, expected: bool) -> None:
        self.sweeps = [
            Sweep(p[:, k], target[:, k], weight, expected=expected, multilabel=True) for k in range(p.shape[1])
        ]
        self.counts = [sweep.counts() for sweep in self.sweeps]
        actual = np.array([tp[-1] for tp, _ in self.counts])
        self.actual, self.total = torch.from_numpy(actual), float(weight.sum())
        self.present = occurs(actual, weight) if expected else None

    def at(self, cuts: Cuts) -> Floats:
        """(tp, predicted) of one cut a label, (2, L)."""
        return np.array([[tp[k], predicted[k]] for (tp, predicted), k in zip(self.counts, cuts, strict=True)]).T

    def confusion(self, states: Floats) -> Confusion:
        """Of states (K, 2, L)."""
        x = torch.from_numpy(states)
        tp, predicted = x[:, 0], x[:, 1]
        actual, total = self.actual.expand_as(tp), torch.full_like(tp, self.total)
        return Confusion(tp, actual, predicted, total, present=self.present, multilabel=True)

    def moved(self, cuts: Cuts, label: int, index: Cuts) -> Confusion:
        """`cuts` with one label's cut moved to each of `index`."""
        states = np.repeat(self.at(cuts)[None], len(index), axis=0)
        states[:, 0, label], states[:, 1, label] = (part[index] for part in self.counts[label])
        return self.confusion(states)

    def common(self, thresholds: Floats) -> tuple[Confusion, NDArray[np.int64]]:
        """One threshold for all labels, for each of several; with the cuts these make."""
        cuts = np.array([[sweep.cut_at(t) for sweep in self.sweeps] for t in thresholds])
        return self.confusion(np.stack([self.at(row) for row in cuts])), cuts


class LabelSearch:
    """The best cuts for a goal: `values` is where the metric counts, `limits` where constraints do."""

    def __init__(self, goal: Goal, values: LabelTally, limits: LabelTally) -> None:
        self.goal, self.values, self.limits = goal, values, limits
        self.half = np.array([sweep.cut_at(0.5) for sweep in values.sweeps])
        self.best = self.half
        self.shortfall, self.value = self._judge(self.half)

    def _judge(self, cuts: Cuts) -> tuple[Floats, float]:
        value = float(self.goal.value(self.values.confusion(self.values.at(cuts)[None]))[0])
        return self.goal.shortfalls(self.limits.confusion(self.limits.at(cuts)[None]))[:, 0], value

    def add(self, cuts: Cuts) -> Floats:
        shortfall, value = self._judge(cuts)
        both = np.array([self.shortfall.sum(), shortfall.sum()])
        if best_of(both, np.array([self.value, value])) == 1:
            self.best, self.shortfall, self.value = cuts, shortfall, value
        return shortfall

    def in_turn(self, start: Cuts, multipliers: Floats | None, passes: int = 3) -> Cuts:
        """Each label's best cut with the others held, until none moves.

        With multipliers the constraints enter as M + sum_r multiplier_r g_r; without, they are kept or mended.
        """
        cuts, goal = start.copy(), self.goal
        objective = None if multipliers is None else goal.lagrangian(multipliers)
        for _ in range(passes):
            before = cuts.copy()
            for label in range(len(cuts)):

                def judge(index: Cuts, label: int = label) -> tuple[Floats, Floats]:
                    c = self.values.moved(cuts, label, index)
                    if objective is not None:
                        with torch.no_grad():
                            value = objective(c).double().numpy()
                        return np.zeros(len(index)), np.where(np.isnan(value), -np.inf, value)
                    value = goal.value(c)
                    c = c if self.limits is self.values else self.limits.moved(cuts, label, index)
                    return goal.shortfalls(c).sum(axis=0), value

                at_once = goal.at_once(2 * len(cuts))
                cuts[label] = search(judge, len(self.values.sweeps[label]), int(cuts[label]), at_once)
            if (cuts == before).all():
                break
        return cuts

    def run(self) -> None:
        grid = expit(np.linspace(-9.0, 9.0, 361))
        c, cuts = self.values.common(grid)
        value = self.goal.value(c)
        common = cuts[best_of(np.zeros_like(value), value, np.abs(grid - 0.5))]
        self.add(common)
        none = np.zeros(len(self.goal.constraints))
        for start in (self.half, common):
            self.add(self.in_turn(start, none))
        if self.shortfall.any():
            start = self.best
            raise_missed(lambda m: self.add(self.in_turn(start, m, passes=1)), none, self.shortfall)
        if self.goal.constraints:
            self.add(self.in_turn(self.best, None))


def best_thresholds(goal: Goal, values: LabelTally, limits: LabelTally) -> tuple[Floats, bool]:
    """One threshold a label for a goal that does not fall apart into labels, and whether constraints are met."""
    found = LabelSearch(goal, values, limits)
    found.run()
    thresholds = [sweep.threshold(int(k)) for sweep, k in zip(values.sweeps, found.best, strict=True)]
    return np.array(thresholds), not found.shortfall.any()
