"""Sweep: every cut point of one score at once, for expected counts and for counted labels alike."""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evalign.confusion import Confusion
from evalign.decision.goal import Goal, Judged, search
from evalign.decision.rule import Floats, Labels

EXACT = 2**22  # cuts evaluated in one go, so that nothing is left out
AT_ONCE = 2**14  # cuts whose confusions are held at a time
NEVER = 2.0  # a threshold that no probability reaches
RARE = 0.05  # rows: a class expected less often than this is taken for absent


def occurs(actual: Floats, weight: Floats) -> Tensor:
    """Classes that a mean over classes counts: those expected in 0.05 rows at least.

    A class with next to no probability anywhere would otherwise have a recall worth as much as any other's. A row
    weighs 1, so that a weight of 2 is two rows; or the mean, where weights are smaller, as those that add up to 1.
    """
    row = min(1.0, float(weight[weight > 0].mean()))
    return torch.from_numpy(np.atleast_1d(actual > RARE * row))


class Sweep:
    """All ways to cut n scores in two, highest scores first; O(n log n).

    Cut k takes the k highest distinct scores for positive: tp_k is the sum of their targets, which are 0/1
    labels, or probabilities for expected counts. `multilabel` makes confusions of one label, else of two classes.
    """

    def __init__(self, p: Floats, target: Floats, weight: Floats, *, expected: bool, multilabel: bool = False) -> None:
        # By score, then target, then weight: row order must not matter, not even to the resampling.
        order = np.lexsort((weight, target, -p))
        p = p[order]
        self.target, self.weight = target[order], weight[order]
        self.expected, self.multilabel = expected, multilabel
        change = np.flatnonzero(p[1:] < p[:-1]) + 1
        self.taken = np.concatenate([[0], change, [len(p)]])
        # Cut k lies above `low[k]` and not above `high[k]`; the ends are the bounds of a probability.
        self.high = np.concatenate([[1.0], p[self.taken[1:] - 1]])
        self.low = np.concatenate([p[self.taken[:-1]], [0.0]])

    def __len__(self) -> int:
        return len(self.taken)

    def counts(self, times: Floats | None = None) -> tuple[Floats, Floats]:
        """(tp, predicted) of every cut; `times` says how often each (sorted) row counts, for resampling."""
        weight = self.weight if times is None else self.weight * times
        tp = np.concatenate([[0.0], np.cumsum(weight * self.target)])[self.taken]
        return tp, np.concatenate([[0.0], np.cumsum(weight)])[self.taken]

    def confusion(self, tp: Tensor, predicted: Tensor, actual: float, total: float) -> Confusion:
        """Confusions (K,) of two classes, or of one label."""
        present = occurs(np.asarray(actual), self.weight) if self.expected else None
        actuals, totals = torch.full_like(tp, actual), torch.full_like(tp, total)
        if self.multilabel:
            return Confusion(tp[..., None], actuals[..., None], predicted[..., None], totals[..., None],
                             present=present, multilabel=True)  # fmt: skip
        tn = totals - actuals - predicted + tp
        both = torch.stack([totals - actuals, actuals], -1)
        if self.expected:
            present = occurs(np.array([total - actual, actual]), self.weight)
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
        """The cut that a threshold makes."""
        return int(np.searchsorted(-self.low[:-1], -threshold, side="right"))

    def threshold(self, k: int) -> float:
        """Halfway between the neighbours of cut k."""
        low, high = float(self.low[k]), float(self.high[k])
        if k == 0 and low >= 1.0:
            return NEVER
        if k == len(self) - 1 and high <= 0.0:
            return 0.0
        middle = (low + high) / 2
        return middle if middle > low else high

    def stationary_threshold(self, k: int, goal: Goal) -> float:
        """Where one more positive gains nothing, t = - (dM / d predicted) / (dM / d tp), if it makes cut k.

        For F1 that is F* / 2 exactly, wherever the sample's scores happen to lie.
        """
        tp, predicted = self.counts()
        x = torch.tensor([tp[k], predicted[k]], dtype=torch.float64, requires_grad=True)
        value = goal.metric.function(_single(self.confusion(x[:1], x[1:], float(tp[-1]), float(predicted[-1]))))
        if isinstance(value, Tensor) and value.requires_grad:
            slope_tp, slope_predicted = torch.autograd.grad(value, x)[0].tolist()
            t = -slope_predicted / slope_tp if slope_tp > 0 else np.nan
            if self.low[k] < t <= self.high[k]:
                return float(t)
        return self.threshold(k)

    def judge(self, goal: Goal, index: NDArray[np.int64]) -> Judged:
        counts = self.counts()
        found = []
        for part in np.array_split(index, -(-len(index) // AT_ONCE)):  # a confusion is twenty numbers on its way
            c = self.at(part, counts)
            found.append((goal.shortfalls(c).sum(axis=0), goal.value(c)))
        shortfall, value = zip(*found, strict=True)
        return np.concatenate(shortfall), np.concatenate(value)

    def misses(self, goal: Goal, k: int) -> bool:
        """Whether cut k misses a constraint."""
        return bool(self.judge(goal, np.array([k]))[0].any())

    def best(self, goal: Goal) -> int:
        """The best cut for a goal; of equals the one nearest to 1/2."""
        return search(lambda i: self.judge(goal, i), len(self), self.cut_at(0.5), goal.at_once(1, EXACT))


def _single(c: Confusion) -> Confusion:
    """The one confusion of a batch of one."""
    present = c.present
    matrix = None if c._matrix is None else c.matrix[0]
    return Confusion(c.tp[0], c.actual[0], c.predicted[0], c.total[0], present=present, multilabel=c.multilabel,
                     matrix=matrix)  # fmt: skip


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
