"""Confusion counts of multiclass decisions, expected or observed, and their sweep along one class's score."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evalign.confusion import Confusion, Task
from evalign.decision.rule import BLOCK, Floats, Labels, as_held_out
from evalign.decision.search.problem import Problem, Scored, present_classes

State = NDArray[np.float64]  # (..., 2, C): tp and predicted; or (..., C, C): the matrix


class ClassCounts:
    """Counts of decisions: `target` is (n, C) class probabilities, or (n,) labels.

    Probabilities give expected counts, C[i, j] = sum of w p_i(x) over the rows decided j; labels give observed
    counts. A state is linear in the (possibly randomised) decisions. It is (tp, predicted), or the whole matrix if
    the problem reads it: C classes then cost O(n C) instead of O(n C^2). Temporary arrays are limited to BLOCK numbers.
    """

    def __init__(self, target: Floats | Labels, weight: Floats, classes: int, *, reads_matrix: bool) -> None:
        self.target, self.weight, self.classes, self.reads_matrix = target, weight, classes, reads_matrix
        self.expected, self.rows = target.ndim == 2, len(target)
        actual = weight @ target if self.expected else np.bincount(target, weight, classes)
        self.actual, self.total = torch.from_numpy(np.asarray(actual, dtype=np.float64)), float(weight.sum())
        self.present = present_classes(self.actual.numpy(), weight) if self.expected else None
        self.width = classes * (classes if reads_matrix else 2)

    def hits(self, rows: NDArray[np.int64], decisions: Labels) -> Floats:
        """Weighted target of each row for the class it is decided to be."""
        at = self.target[rows, decisions] if self.expected else self.target[rows] == decisions
        return np.asarray(self.weight[rows] * at)

    def cells(self, rows: NDArray[np.int64], decisions: Labels) -> Iterator[tuple[NDArray[np.int64], Labels, Floats]]:
        """Blocks of (position in `rows`, cell of the flat matrix, weighted target)."""
        size = self.classes
        if not self.expected:
            yield np.arange(len(rows)), self.target[rows].astype(np.int64) * size + decisions, self.weight[rows]
            return
        step = max(1, BLOCK // size)
        for start in range(0, len(rows), step):
            part = rows[start : start + step]
            place = np.repeat(np.arange(start, start + len(part)), size)
            cell = (np.arange(size) * size)[None, :] + decisions[start : start + step, None]
            yield place, cell.ravel(), (self.target[part] * self.weight[part, None]).ravel()

    def count(self, decisions: Labels) -> State:
        """State of decisions (n,)."""
        size, rows = self.classes, np.arange(len(decisions))
        if not self.reads_matrix:
            hits = np.bincount(decisions, self.hits(rows, decisions), size)
            return np.stack([hits, np.bincount(decisions, self.weight, size)])
        state = np.zeros(size * size)
        for _, cell, value in self.cells(rows, decisions):
            state += np.bincount(cell, value, size * size)
        return state.reshape(size, size)

    def count_mixed(self, q: Floats) -> State:
        """State of randomised decisions: row i is decided j with probability q_ij."""
        n, step = len(q), max(1, BLOCK // self.classes)
        state = np.zeros((self.classes if self.reads_matrix else 2, self.classes))
        for start in range(0, n, step):
            rows = slice(start, start + step)
            part = self.target[rows]
            target = part if self.expected else np.eye(self.classes)[part]
            weighted = q[rows] * self.weight[rows, None]
            state += target.T @ weighted if self.reads_matrix else [(target * weighted).sum(0), weighted.sum(0)]
        return state

    def confusion(self, state: Tensor) -> Confusion:
        """Confusion of one state, or of a batch."""
        batch = state.shape[:-2]
        actual = self.actual.expand(*batch, self.classes)
        total = torch.full(batch, self.total, dtype=torch.float64)
        if self.reads_matrix:
            return Confusion(state.diagonal(dim1=-2, dim2=-1), actual, state.sum(-2), total,
                             present=self.present, matrix=state)  # fmt: skip
        return Confusion(state[..., 0, :], actual, state[..., 1, :], total, present=self.present)

    def value(self, state: State, problem: Problem) -> float:
        """Metric of one state."""
        return float(problem.value(self.confusion(torch.from_numpy(state[None])))[0])

    def shortfalls(self, state: State, problem: Problem) -> Floats:
        """Shortfall of each constraint in one state."""
        return problem.shortfalls(self.confusion(torch.from_numpy(state[None])))[:, 0]


class OffsetSweep(NamedTuple):
    """Decisions as class j's score is raised by t: row order[0] becomes j first, at t = margin[0]."""

    j: int
    order: NDArray[np.int64]
    margin: Floats
    rival: Labels  # best other class of each row
    sizes: NDArray[np.int64]  # rows decided j at each cut; equal margins change together

    @classmethod
    def of(cls, scores: Floats, j: int) -> "OffsetSweep":
        n, column = len(scores), scores[:, j].copy()
        scores[:, j] = -np.inf  # in place and restored, since a copy of all scores may not fit in memory
        rival = scores.argmax(axis=1)
        margin = scores[np.arange(n), rival] - column
        scores[:, j] = column
        order = np.argsort(margin, kind="stable")
        margin = margin[order]
        change = np.flatnonzero(margin[1:] > margin[:-1] + 1e-12) + 1
        return cls(j, order, margin, rival[order], np.concatenate([[0], change, [n]]))

    def __len__(self) -> int:
        return len(self.sizes)

    def current(self) -> int:
        """Cut of the scores as they are."""
        return int(np.searchsorted(self.margin[self.sizes[:-1]], 0.0, side="left"))

    def offset(self, k: int) -> float:
        """t of cut k, halfway between neighbours; at the ends, just past the last row."""
        low = self.margin[self.sizes[k] - 1] if k > 0 else self.margin[0] - 1e-3
        high = self.margin[self.sizes[k]] if k < len(self) - 1 else self.margin[-1] + 1e-3
        return float((low + high) / 2)

    def states(self, counts: ClassCounts, index: NDArray[np.int64]) -> State:
        """States at the increasing cuts `index`."""
        size, n = counts.classes, len(self.order)
        # First cut that includes each row; rows that no cut includes fall past the end.
        segment = np.searchsorted(self.sizes[index], np.arange(n), side="right")
        without_j = np.empty_like(self.rival)
        without_j[self.order] = self.rival
        start, length = counts.count(without_j), (len(index) + 1) * counts.width
        j = np.full(n, self.j)
        moved = np.zeros(length)
        for decisions, sign in ((j, 1.0), (self.rival, -1.0)):
            if counts.reads_matrix:
                for place, cell, value in counts.cells(self.order, decisions):
                    moved += sign * np.bincount(segment[place] * counts.width + cell, value, length)
            else:
                base = segment * counts.width + decisions
                moved += sign * np.bincount(base, counts.hits(self.order, decisions), length)
                moved += sign * np.bincount(base + size, counts.weight[self.order], length)
        steps = moved.reshape(len(index) + 1, *start.shape)[:-1]
        return np.asarray(start + np.cumsum(steps, axis=0))

    def score(self, problem: Problem, values: ClassCounts, limits: ClassCounts, index: NDArray[np.int64]) -> Scored:
        """Shortfall of the constraints on `limits` and metric on `values`, at the cuts in `index`."""
        c = values.confusion(torch.from_numpy(self.states(values, index)))
        value = problem.value(c)
        if not problem.constraints:
            return np.zeros_like(value), value
        if limits is not values:
            c = limits.confusion(torch.from_numpy(self.states(limits, index)))
        return problem.shortfalls(c).sum(axis=0), value


def expected_confusion(
    probabilities: Any, predicted: Any, *, task: Task = "multiclass", sample_weight: Any = None
) -> Confusion:
    """Expected confusion of decisions if the probabilities are calibrated.

    A metric of it is an estimate without labels. A class with fewer than 0.05 expected rows is left out of means over
    classes.

    >>> from evalign import metrics
    >>> metrics.accuracy(expected_confusion([0.1, 0.7], [0, 1]))
    tensor(0.8000, dtype=torch.float64)
    """
    p, d, weight = as_held_out(probabilities, predicted, sample_weight, task)
    if task == "multilabel":
        actual, total = weight @ p, np.full(p.shape[1], weight.sum())
        tp, count = np.einsum("n,nl,nl->l", weight, p, d), weight @ d
        return Confusion(
            *map(torch.from_numpy, (tp, actual, count, total)), present=present_classes(actual, weight), multilabel=True
        )
    counts = ClassCounts(p, weight, p.shape[1], reads_matrix=True)
    return counts.confusion(torch.from_numpy(counts.count(d)))


def expected_gain(problem: Problem, q: Floats, one: Labels, other: Labels, weight: Floats) -> float:
    """Expected lead of decisions `one` over `other` in the metric; -inf if that of `one` is not finite."""
    if problem.multilabel:
        counts = [expected_confusion(q, d, task=problem.task, sample_weight=weight) for d in (one, other)]
    else:
        of = ClassCounts(q, weight, problem.classes, reads_matrix=problem.reads_matrix)
        counts = [of.confusion(torch.from_numpy(of.count(d))) for d in (one, other)]
    first, second = (problem.metric_value(c) for c in counts)
    return -np.inf if first is None else first - (second or 0.0)
