"""Tally: the counts of decisions between several classes, expected or counted, and their sweeps."""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evalign.confusion import Confusion
from evalign.decision.arrays import Floats, Labels
from evalign.decision.goal import Goal, Judged
from evalign.decision.sweep import occurs

State = NDArray[np.float64]  # (..., 2, C): tp and predicted; or (..., C, C): the matrix


class Tally:
    """What decisions are worth: `target` (n, C) says how much each row counts for each true class.

    Rows of probabilities give expected counts, C[i, j] = sum of p_i(x) over the rows decided j; one-hot labels
    give the counts themselves. A state is linear in the (possibly randomised) decisions; it is tp and predicted,
    or the whole matrix if the goal reads it, so that C classes cost O(n C) time and not O(n C^2).
    """

    def __init__(self, target: Floats, weight: Floats, *, expected: bool, reads_matrix: bool) -> None:
        self.target, self.weight, self.reads_matrix = target * weight[:, None], weight, reads_matrix
        self.classes = target.shape[1]
        self.actual, self.total = torch.from_numpy(self.target.sum(axis=0)), float(weight.sum())
        self.present = occurs(self.actual.numpy(), weight) if expected else None
        self.width = self.classes * (self.classes if reads_matrix else 2)

    def count(self, decisions: Labels) -> State:
        """The state of decisions (n,)."""
        size = self.classes
        if self.reads_matrix:
            cells = (np.arange(size) * size)[None, :] + decisions[:, None]
            return np.bincount(cells.ravel(), self.target.ravel(), size * size).reshape(size, size).astype(np.float64)
        hits = self.target[np.arange(len(decisions)), decisions]
        return np.stack([np.bincount(decisions, hits, size), np.bincount(decisions, self.weight, size)])

    def count_mixed(self, q: Floats) -> State:
        """The state of randomised decisions, row i falling to class j with probability q_ij."""
        if self.reads_matrix:
            return np.asarray(self.target.T @ q)
        return np.stack([(self.target * q).sum(axis=0), self.weight @ q])

    def confusion(self, state: Tensor) -> Confusion:
        """Of one state, or of a batch."""
        batch = state.shape[:-2]
        actual = self.actual.expand(*batch, self.classes)
        total = torch.full(batch, self.total, dtype=torch.float64)
        if self.reads_matrix:
            return Confusion(state.diagonal(dim1=-2, dim2=-1), actual, state.sum(-2), total,
                             present=self.present, matrix=state)  # fmt: skip
        return Confusion(state[..., 0, :], actual, state[..., 1, :], total, present=self.present)

    def value(self, state: State, goal: Goal) -> float:
        return float(goal.value(self.confusion(torch.from_numpy(state[None])))[0])

    def shortfalls(self, state: State, goal: Goal) -> Floats:
        return goal.shortfalls(self.confusion(torch.from_numpy(state[None])))[:, 0]


class Column(NamedTuple):
    """What happens when class j's score is raised by t: row order[0] turns to j first, at t = margin[0]."""

    j: int
    order: NDArray[np.int64]
    margin: Floats
    rival: Labels  # the class a row has while it is not j
    taken: NDArray[np.int64]  # rows taken at each cut: equal margins are taken together

    @classmethod
    def of(cls, scores: Floats, j: int) -> "Column":
        others = scores.copy()
        others[:, j] = -np.inf
        rival = others.argmax(axis=1)
        margin = others[np.arange(len(scores)), rival] - scores[:, j]
        order = np.argsort(margin, kind="stable")
        margin = margin[order]
        change = np.flatnonzero(margin[1:] > margin[:-1] + 1e-12) + 1
        return cls(j, order, margin, rival[order], np.concatenate([[0], change, [len(order)]]))

    def __len__(self) -> int:
        return len(self.taken)

    def here(self) -> int:
        """The cut of the scores as they are."""
        return int(np.searchsorted(self.margin[self.taken[:-1]], 0.0, side="left"))

    def raise_by(self, k: int) -> float:
        """t of cut k, halfway between neighbours; beyond the ends, just past the last row."""
        low = self.margin[self.taken[k] - 1] if k > 0 else self.margin[0] - 1e-3
        high = self.margin[self.taken[k]] if k < len(self) - 1 else self.margin[-1] + 1e-3
        return float((low + high) / 2)

    def states(self, tally: Tally, index: NDArray[np.int64]) -> State:
        """States at increasing cuts `index`: rows between two of them are added up before they are summed."""
        size, n = tally.classes, len(self.order)
        # Row r counts from the first cut that takes it on; rows that no cut takes fall past the end.
        segment = np.searchsorted(self.taken[index], np.arange(n), side="right")
        length = (len(index) + 1) * tally.width
        start = tally.count(self._back(n))
        if tally.reads_matrix:
            target = tally.target[self.order].ravel()
            base = segment[:, None] * tally.width + np.arange(size) * size
            moved = np.bincount((base + self.j).ravel(), target, length)
            moved -= np.bincount((base + self.rival[:, None]).ravel(), target, length)
        else:
            weight, base = tally.weight[self.order], segment * tally.width
            moved = np.bincount(base + self.j, tally.target[self.order, self.j], length)
            moved -= np.bincount(base + self.rival, tally.target[self.order, self.rival], length)
            moved += np.bincount(base + size + self.j, weight, length)
            moved -= np.bincount(base + size + self.rival, weight, length)
        steps = moved.reshape(len(index) + 1, *start.shape)[:-1]
        return np.asarray(start + np.cumsum(steps, axis=0))

    def _back(self, n: int) -> Labels:
        rival = np.empty(n, dtype=np.int64)
        rival[self.order] = self.rival
        return rival

    def judge(self, goal: Goal, values: Tally, limits: Tally, index: NDArray[np.int64]) -> Judged:
        c = values.confusion(torch.from_numpy(self.states(values, index)))
        value = goal.value(c)
        if not goal.constraints:
            return np.zeros_like(value), value
        if limits is not values:
            c = limits.confusion(torch.from_numpy(self.states(limits, index)))
        return goal.shortfalls(c).sum(axis=0), value
