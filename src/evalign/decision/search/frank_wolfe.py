"""Frank-Wolfe ascent of a metric over confusion matrices, multipliers for constraints, and a coordinate polish."""

from collections.abc import Callable, Generator, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from evalign.decision.rule import Floats, Rule, decide_blocks
from evalign.decision.search.counts import ClassCounts, OffsetSweep, State
from evalign.decision.search.problem import SLACK, Problem, best_of, coarse_to_fine
from evalign.metrics import MetricFunction

# Step sizes of the line search: an even grid, and a geometric one for small steps.
STEPS = np.unique(np.concatenate([np.linspace(0.05, 1.0, 20), 0.5 ** np.arange(5, 14)]))
ENOUGH, ENOUGH_LARGE = 1e-7, 1e-5  # relative gain per iteration that ends the ascent; the second for large arrays
LARGE = 2**22  # probabilities above which a relative gain of 1e-5 is not worth a pass
SAMPLED = 2**20  # probabilities of the sample that such an array is first searched on
ROUNDS = 40  # of the ascent, at most
FIRST = 6  # iterations from every start; only the best start continues
POLISH = 2**22  # rows x classes x classes above which single rows no longer matter and no polish is done


@dataclass(frozen=True)
class Gain:
    """Gradient G of a metric in the counts; deciding j for row x gains (p(x)^T G)_j.

    (C, C), or (2, C) for diag(first row) + 1 (second row)^T, the gradient in tp and predicted.
    """

    g: Floats

    @classmethod
    def of(cls, g: Floats) -> "Gain":
        """Gain matrix with largest entry 1 and row means 0, which leave decisions unchanged; argmax if G is 0."""
        g = np.nan_to_num(g, nan=0.0, posinf=0.0, neginf=0.0)
        square = g.shape[0] == g.shape[1]  # two classes never get here: their thresholds are swept
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

    def rule(self) -> Rule:
        classes = self.g.shape[1]
        if self.affine:
            if (self.g[0] == 1).all() and not self.g[1].any():
                return Rule("argmax", classes)
            return Rule("affine", classes, weights=tuple(self.g[0]), biases=tuple(self.g[1]))
        if (self.g == np.eye(classes)).all():
            return Rule("argmax", classes)
        return Rule("gain", classes, gain=tuple(map(tuple, self.g)))

    def scaled(self, factors: Floats) -> "Gain":
        """Multiply each class's score."""
        return Gain(self.g * factors)

    def raised(self, j: int, t: float) -> "Gain":
        """Raise class j's score by t in every row (a row of probabilities adds up to 1)."""
        g = self.g.copy()
        g[-1 if self.affine else slice(None), j] += t
        return Gain(g)


def identity(counts: ClassCounts) -> Gain:
    """Gain matrix of argmax."""
    size = counts.classes
    return Gain(np.eye(size) if counts.reads_matrix else np.stack([np.ones(size), np.zeros(size)]))


def starts(p: Floats, counts: ClassCounts) -> list[State]:
    """Starting points: argmax, two ways of favouring rare classes, and randomised decisions with probabilities p.

    The last one predicts every class: a metric that is 0 if a class is never predicted (G-mean) may have gradient 0
    at argmax.
    """
    prior = np.maximum(p.mean(axis=0), 1e-12)
    hard = [counts.count(decide_blocks(p, partial(np.multiply, prior**-power))) for power in (0.0, 0.5, 1.0)]
    return [*hard, counts.count_mixed(p)]


Ascent = Generator[Gain, State, tuple[State, float]]


def ascend(counts: ClassCounts, objective: MetricFunction, start: State, rounds: int) -> Ascent:
    """Frank-Wolfe with line search: yields gain matrices, is sent the counts of their decisions, returns the last one.

    G = dM/dC at the current counts, decisions argmax_j (p^T G)_j, and a step towards their counts; for a
    quotient of linear functions the full step is Dinkelbach's method and ends at the optimum.
    DIFFERS: Narasimhan 2015 steps 2 / (k + 2); the best of 29 steps costs little, since counts are small, and
    converges faster and to higher values.
    """
    state = start
    reached = float(_values(counts, objective, state[None])[0])
    for _ in range(rounds):
        x = torch.from_numpy(state.copy()).requires_grad_()
        with torch.enable_grad():
            value = objective(counts.confusion(x))
        if not isinstance(value, torch.Tensor) or not value.requires_grad:
            raise ValueError(
                "the metric has no gradient: it must return a tensor computed from the Confusion's tensors, "
                "without item(), numpy or rounding on the way"
            )
        towards = (yield Gain.of(torch.autograd.grad(value, x)[0].numpy())) - state
        values = _values(counts, objective, state + STEPS[:, None, None] * towards)
        k = int(values.argmax())
        if values[k] <= reached + (ENOUGH_LARGE if counts.rows * counts.classes > LARGE else ENOUGH) * abs(reached):
            break
        state, reached = state + STEPS[k] * towards, float(values[k])
    return state, reached


def run_together(
    ascents: Sequence[Ascent], count: Callable[[list[Gain]], Sequence[State]]
) -> list[tuple[State, float]]:
    """Run several ascents together; `count` returns the counts of all their gain matrices of one round."""
    ends: list[tuple[State, float]] = [(np.zeros(0), -np.inf)] * len(ascents)
    waiting = {k: next(ascent) for k, ascent in enumerate(ascents)}
    while waiting:
        counted = count(list(waiting.values()))
        for k, state in zip(list(waiting), counted, strict=True):
            try:
                waiting[k] = ascents[k].send(state)
            except StopIteration as end:
                ends[k] = end.value
                del waiting[k]
    return ends


def _values(counts: ClassCounts, objective: MetricFunction, states: State) -> Floats:
    with torch.no_grad():
        values = objective(counts.confusion(torch.from_numpy(states))).double().numpy()
    return np.where(np.isnan(values), -np.inf, values)


class BestGain:
    """Best gain matrix so far: the metric is evaluated on `values`, constraints on `limits`."""

    def __init__(self, p: Floats, problem: Problem, values: ClassCounts, limits: ClassCounts) -> None:
        self.p, self.problem, self.values, self.limits = p, problem, values, limits
        self.gain, self.shortfall, self.value = identity(values), np.full(len(problem.constraints), np.inf), -np.inf
        self.add(self.gain)

    def add(self, gain: Gain) -> State:
        """Score a gain matrix, keep it if it is the best, and return the counts of its decisions."""
        decisions = decide_blocks(self.p, gain.scores)
        state = self.values.count(decisions)
        value = self.values.value(state, self.problem)
        limited = state if self.limits is self.values else self.limits.count(decisions)
        self.latest = self.limits.shortfalls(limited, self.problem)  # of the gain matrix that was added last
        both = np.array([self.shortfall.sum(), self.latest.sum()])
        if best_of(both, np.array([self.value, value])) == 1:
            self.gain, self.shortfall, self.value = gain, self.latest, value
        return state

    def polish(self, passes: int = 3) -> None:
        """Coordinate ascent: move one class's score at a time while that helps."""
        n, classes = self.p.shape
        if n * classes**2 > POLISH and not self.shortfall.any():
            return
        for _ in range(passes):
            before = (self.shortfall.sum(), self.value)
            for j in range(classes):
                sweep = OffsetSweep.of(self.gain.scores(self.p), j)
                batch_size = self.problem.batch_size(self.values.width)
                score = lambda index, sweep=sweep: sweep.score(self.problem, self.values, self.limits, index)  # noqa: E731
                k = coarse_to_fine(score, len(sweep), sweep.current(), batch_size)
                if k != sweep.current():
                    self.add(self.gain.raised(j, sweep.offset(k)))
            if (self.shortfall.sum(), self.value) == before:
                return


def maximise(p: Floats, problem: Problem, values: ClassCounts, limits: ClassCounts) -> BestGain:
    """Best gain matrix for a problem, from several starts and, with constraints, for many multipliers."""
    best = BestGain(p, problem, values, limits)

    def ascended(multipliers: Floats, start: State, rounds: int) -> tuple[State, float]:
        ascent = ascend(values, problem.lagrangian(multipliers), start, rounds)
        return run_together([ascent], lambda gains: [best.add(gain) for gain in gains])[0]

    def attempt(multipliers: Floats) -> Floats:
        ascended(multipliers, state, FIRST)
        return best.latest

    free = np.zeros(len(problem.constraints))
    if p.size > LARGE and not problem.constraints:  # start from the best gain matrix of a sample
        rows = np.sort(np.random.default_rng(0).choice(len(p), max(1, SAMPLED // values.classes), replace=False))
        few = ClassCounts(p[rows], values.weight[rows], values.classes, reads_matrix=values.reads_matrix)
        ascended(free, best.add(maximise(p[rows], problem, few, few).gain), ROUNDS)
        return best
    ends = [ascended(free, start, FIRST) for start in starts(p, values)]
    state = max(ends, key=lambda end: end[1])[0]
    state = ascended(free, state, ROUNDS - FIRST)[0]
    if best.shortfall.any():
        # Constraints are met by moving class scores from the unconstrained optimum, or by multipliers: try both.
        moved = copy(best)
        moved.polish()
        search_multipliers(attempt, free, best.shortfall)
        best.polish()
        best.add(moved.gain)
        small = p.size * values.classes <= POLISH
        for power in (0.5, 1.0) if small or best.shortfall.any() else ():  # move class scores from other starts
            moved = BestGain(p, problem, values, limits)
            moved.gain = moved.gain.scaled(np.maximum(p.mean(axis=0), 1e-12) ** -power)
            moved.shortfall = np.full(len(problem.constraints), np.inf)
            moved.add(moved.gain)
            moved.polish()
            best.add(moved.gain)
    else:
        best.polish()
    return best


def search_multipliers(
    attempt: Callable[[Floats], Floats], multipliers: Floats, shortfall: Floats, tries: int = 24
) -> None:
    """Search for multipliers that only just meet the constraints.

    The multiplier of a missed constraint grows and that of a met one shrinks, by factors that tend to 1; with one
    constraint this converges to the smallest multiplier that meets it. `attempt` returns the shortfalls.
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
