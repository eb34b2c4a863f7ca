"""Climbing: from counts to the gain matrix to better counts (Frank-Wolfe), and along one class's score."""

from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from evalign.decision.goal import SLACK, Goal, best_of, search
from evalign.decision.rule import Floats, Labels, decide
from evalign.decision.search import Column, State, Tally
from evalign.metrics import MetricFunction

# Steps tried between the old counts and the new ones: even ones, and ever smaller ones near the old.
STEPS = np.unique(np.concatenate([np.linspace(0.05, 1.0, 20), 0.5 ** np.arange(5, 14)]))
ENOUGH = 1e-7  # relative gain of a round below which a climb ends
FIRST = 6  # rounds from every start, before the best goes on
POLISH = 2**22  # rows x classes x classes: beyond it a rule has so many rows that moving one of them is nothing


@dataclass(frozen=True)
class Gain:
    """The gradient of a metric in the counts: what row x is worth to class j, (p(x)^T G)_j.

    (C, C) as it is; (2, C) stands for diag(first row) + 1 (second row)^T, the gradient in tp and in predicted.
    """

    g: Floats

    @classmethod
    def of(cls, g: Floats) -> "Gain":
        """Scaled to 1, and without what all classes share, which decides nothing; no gain at all is argmax."""
        g = np.nan_to_num(g, nan=0.0, posinf=0.0, neginf=0.0)
        square = g.shape[0] == g.shape[1]  # two classes never come here: they are swept
        g = g - g.mean(axis=1, keepdims=True) if square else np.stack([g[0], g[1] - g[1].mean()])
        size = np.abs(g).max()
        if size <= 1e-300:
            return cls(np.eye(g.shape[1]) if square else np.stack([np.ones(g.shape[1]), np.zeros(g.shape[1])]))
        return cls(g / size)

    @property
    def affine(self) -> bool:
        return bool(self.g.shape[0] != self.g.shape[1])

    def scores(self, p: Floats) -> Floats:
        return p * self.g[0] + self.g[1] if self.affine else np.asarray(p @ self.g)

    def raised(self, j: int, t: float) -> "Gain":
        """Class j's score raised by t in every row: a row of probabilities adds up to 1."""
        g = self.g.copy()
        g[-1 if self.affine else slice(None), j] += t
        return Gain(g)


def identity(tally: Tally) -> Gain:
    """The gain matrix of argmax."""
    size = tally.classes
    return Gain(np.eye(size) if tally.reads_matrix else np.stack([np.ones(size), np.zeros(size)]))


def starts(p: Floats, tally: Tally) -> list[State]:
    """Counts to climb from: argmax, two ways of favouring rare classes, and every row spread over all classes.

    From the last one no class is missing: a metric that is 0 wherever a class is never predicted (G-mean) has
    gradient 0 at argmax.
    """
    prior = np.maximum(p.mean(axis=0), 1e-12)
    hard = [tally.count(decide(p / prior**power, p)) for power in (0.0, 0.5, 1.0)]
    return [*hard, tally.count_mixed(p)]


class Step(NamedTuple):
    """One round of a climb: its gain matrix, what that decides, and the counts reached with their score."""

    gain: Gain
    decisions: Labels
    state: State
    reached: float


def climb(p: Floats, tally: Tally, objective: MetricFunction, start: State, rounds: int) -> Iterator[Step]:
    """Frank-Wolfe with line search.

    G = dM/dC at the present counts, decisions argmax_j (p^T G)_j, and a step towards the counts of these; for a
    quotient of linear functions the full step is Dinkelbach's method and ends at the optimum.
    DIFFERS: Narasimhan 2015 steps 2 / (k + 2); the best of 29 steps costs little, since counts are small, and
    ends sooner and higher.
    """
    state = start
    reached = float(_values(tally, objective, state[None])[0])
    for _ in range(rounds):
        x = torch.from_numpy(state.copy()).requires_grad_()
        with torch.enable_grad():
            value = objective(tally.confusion(x))
        if not isinstance(value, torch.Tensor) or not value.requires_grad:
            raise ValueError(
                "the metric has no gradient: it must return a tensor computed from the Confusion's tensors, "
                "without item(), numpy or rounding on the way"
            )
        gain = Gain.of(torch.autograd.grad(value, x)[0].numpy())
        decisions = decide(gain.scores(p), p)
        towards = tally.count(decisions) - state
        values = _values(tally, objective, state + STEPS[:, None, None] * towards)
        k = int(values.argmax())
        better = values[k] > reached + ENOUGH * abs(reached)
        if better:
            state, reached = state + STEPS[k] * towards, float(values[k])
        yield Step(gain, decisions, state, reached)
        if not better:
            return


def _values(tally: Tally, objective: MetricFunction, states: State) -> Floats:
    with torch.no_grad():
        values = objective(tally.confusion(torch.from_numpy(states))).double().numpy()
    return np.where(np.isnan(values), -np.inf, values)


class Pool:
    """The best gain matrix seen so far: `values` is where the metric counts, `limits` where constraints do."""

    def __init__(self, p: Floats, goal: Goal, values: Tally, limits: Tally) -> None:
        self.p, self.goal, self.values, self.limits = p, goal, values, limits
        self.best = identity(values)
        self.shortfall, self.value = self._judge(decide(p, p))

    def _judge(self, decisions: Labels) -> tuple[Floats, float]:
        state = self.values.count(decisions)
        value = self.values.value(state, self.goal)
        if self.limits is not self.values:
            state = self.limits.count(decisions)
        return self.limits.shortfalls(state, self.goal), value

    def add(self, gain: Gain, decisions: Labels | None = None) -> Floats:
        """Judge a gain matrix, keep it if it is the best; by how much it misses each constraint."""
        shortfall, value = self._judge(decide(gain.scores(self.p), self.p) if decisions is None else decisions)
        both = np.array([self.shortfall.sum(), shortfall.sum()])
        if best_of(both, np.array([self.value, value])) == 1:
            self.best, self.shortfall, self.value = gain, shortfall, value
        return shortfall

    def polish(self, passes: int = 3) -> None:
        """Raise or lower one class's score at a time, as long as that helps: the last rows on the border."""
        n, classes = self.p.shape
        if n * classes**2 > POLISH and not self.shortfall.any():
            return
        for _ in range(passes):
            before = (self.shortfall.sum(), self.value)
            for j in range(classes):
                column = Column.of(self.best.scores(self.p), j)
                at_once = self.goal.at_once(self.values.width)
                judge = lambda index, column=column: column.judge(self.goal, self.values, self.limits, index)  # noqa: E731
                k = search(judge, len(column), column.here(), at_once)
                if k != column.here():
                    self.add(self.best.raised(j, column.raise_by(k)))
            if (self.shortfall.sum(), self.value) == before:
                return


def solve(p: Floats, goal: Goal, values: Tally, limits: Tally, *, rounds: int) -> Pool:
    """The best gain matrix for the goal, by climbing from several starts and, with constraints, at many multipliers."""
    pool = Pool(p, goal, values, limits)

    def climbed(multipliers: Floats, start: State, rounds: int) -> tuple[Floats, State, float]:
        state, shortfall, reached = start, pool.shortfall, -np.inf
        for step in climb(p, values, goal.lagrangian(multipliers), start, rounds):
            state, shortfall, reached = step.state, pool.add(step.gain, step.decisions), step.reached
        return shortfall, state, reached

    free = np.zeros(len(goal.constraints))
    ends = [climbed(free, start, min(FIRST, rounds)) for start in starts(p, values)]
    state = max(ends, key=lambda end: end[2])[1]
    if rounds > FIRST:
        state = climbed(free, state, rounds - FIRST)[1]
    if pool.shortfall.any():
        # Two ways to meet constraints, from the unconstrained optimum class by class, or by multipliers: try both.
        mended = copy(pool)
        mended.polish()
        raise_missed(lambda m: climbed(m, state, min(FIRST, rounds))[0], free, pool.shortfall)
        pool.polish()
        pool.add(mended.best)
    else:
        pool.polish()
    return pool


def raise_missed(attempt: Callable[[Floats], Floats], multipliers: Floats, shortfall: Floats, tries: int = 24) -> None:
    """Look for multipliers at which constraints are only just met.

    A missed constraint's multiplier grows, a met one's falls, by factors that tend to 1: with one constraint that
    closes in on the smallest multiplier that meets it. `attempt` judges what it finds and returns the shortfalls.
    """
    multipliers = multipliers.copy()
    factor = 4.0
    missed = shortfall > SLACK
    for _ in range(tries):
        multipliers = np.where(missed, np.maximum(multipliers * factor, 1 / 16), multipliers / factor)
        now = attempt(multipliers) > SLACK
        if (now != missed).any():
            factor = factor**0.7
        missed = now
