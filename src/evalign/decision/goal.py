"""Goal: what a rule is judged by, evaluated on many confusions at once."""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evalign import metrics
from evalign.confusion import Confusion
from evalign.decision.constraints import Constraint, _of_label
from evalign.decision.rule import Floats
from evalign.metrics import Average, Beta, MetricFunction

SLACK = 1e-9  # scores this close are equal, and a constraint missed by less is met: counts are sums of floats
BUDGET = 2**17  # numbers evaluated in one go: 1 MB, which stays in the cache
LOOP = 1024  # confusions evaluated in one go, of a function that torch.vmap cannot handle

Judged = tuple[Floats, Floats]  # (shortfall of the constraints, value of the metric), one of each per candidate


class Measure:
    """A metric that takes a batch of confusions, one after the other if it must."""

    def __init__(self, function: MetricFunction, name: str) -> None:
        self.function, self.name = function, name
        named = isinstance(function, partial) and (
            function.func in metrics.METRICS.values() or function.func is _of_label
        )
        self.way = "batch" if named else "vmap"
        self.reads_matrix = False

    def probe(self, classes: int, multilabel: bool) -> None:
        """Try the function on made-up counts: does it return one number, and does it read the matrix?"""
        cells = torch.full((classes, classes), 1.0, dtype=torch.float64) + torch.eye(classes, dtype=torch.float64)

        def matrix() -> Tensor:
            self.reads_matrix = True
            return cells

        total = cells.sum().expand(classes) if multilabel else cells.sum()
        c = Confusion(cells.diagonal(), cells.sum(1), cells.sum(0), total,
                      multilabel=multilabel, matrix=None if multilabel else matrix)  # fmt: skip
        shape = torch.as_tensor(self.function(c)).shape
        if shape != ():
            raise ValueError(f"{self.name} must return one number for a Confusion, got shape {tuple(shape)}")

    def __call__(self, c: Confusion) -> Tensor:
        """Scores (K,) of a batch of K confusions."""
        if self.way == "batch":
            return self.function(c)
        parts = {"tp": c.tp, "actual": c.actual, "predicted": c.predicted, "total": c.total}
        if c._matrix is not None:
            parts["matrix"] = c.matrix

        def one(parts: dict[str, Tensor]) -> Tensor:
            return torch.as_tensor(self.function(Confusion(**parts, present=c.present, multilabel=c.multilabel)))  # type: ignore[arg-type]

        if self.way == "vmap":
            try:
                return torch.vmap(one)(parts)
            except Exception:  # control flow on values, numpy, item(): a loop manages, or raises what is really wrong
                self.way = "loop"
        return torch.stack([one({k: v[i] for k, v in parts.items()}).detach() for i in range(len(c.tp))])


class Goal:
    """Maximise a metric subject to constraints: both as functions of counts."""

    def __init__(
        self,
        metric: str | MetricFunction,
        constraints: Sequence[Constraint] = (),
        *,
        average: Average,
        beta: Beta | None,
        classes: int,
        multilabel: bool,
    ) -> None:
        names = [metric, *(c.metric for c in constraints)]
        if multilabel and "quadratic_kappa" in names:
            raise ValueError("quadratic_kappa needs ordered classes, got task 'multilabel'; choose another metric")
        self.name = metric if isinstance(metric, str) else getattr(metric, "__name__", "metric")
        self.classes, self.multilabel, self.constraints = classes, multilabel, tuple(constraints)
        self.metric = Measure(metrics.resolve(metric, average=average, beta=beta), self.name)
        self.limits = [Measure(c.resolve(average=average, beta=beta), str(c)) for c in constraints]
        for measure in (self.metric, *self.limits):
            measure.probe(classes, multilabel)
        self.reads_matrix = any(m.reads_matrix for m in (self.metric, *self.limits))
        # A mean over labels of a score per label: every label can then be decided by itself.
        self.separable = multilabel and isinstance(metric, str) and not constraints
        self.separable &= average != "micro" or not metrics.is_averaged(str(metric))

    def at_once(self, width: int, budget: int = BUDGET) -> int:
        """How many confusions of `width` numbers to evaluate in one go."""
        loops = any(m.way == "loop" for m in (self.metric, *self.limits))
        return min(LOOP if loops else budget, max(64, budget // width))

    def value(self, c: Confusion) -> Floats:
        """The metric (K,); nan counts as the worst."""
        with torch.no_grad():
            scores = self.metric(c).double().numpy()
        return np.where(np.isnan(scores), -np.inf, scores)

    def shortfalls(self, c: Confusion) -> Floats:
        """By how much each constraint is missed, (number of constraints, K); 0 where it is met."""
        if not self.constraints:
            return np.zeros((0, len(c.tp)))
        with torch.no_grad():
            scores = np.stack([limit(c).double().numpy() for limit in self.limits])
        signs = np.array([[1.0 if r.op == ">=" else -1.0] for r in self.constraints])
        missing = signs * (np.array([[r.value] for r in self.constraints]) - scores)
        return np.where(np.isnan(missing), np.inf, np.where(missing <= SLACK, 0.0, missing))

    def lagrangian(self, multipliers: Floats) -> MetricFunction:
        """M(C) + sum_r multiplier_r g_r(C) as one differentiable function, a constraint from above with its sign."""
        terms = [
            (m if r.op == ">=" else -m, limit)
            for m, r, limit in zip(multipliers, self.constraints, self.limits, strict=True)
        ]

        def function(c: Confusion) -> Tensor:
            single = c.tp.dim() == 1
            value = self.metric.function(c) if single else self.metric(c)
            for multiplier, limit in terms:
                if multiplier:
                    value = value + multiplier * (limit.function(c) if single else limit(c))
            return value

        return function


def best_of(shortfall: Floats, value: Floats, distance: Floats | None = None) -> int:
    """The best metric among those that miss the constraints least; equals go to the least `distance`.

    >>> best_of(np.array([0.0, 0.0, 0.2]), np.array([0.5, 0.6, 0.9]))
    1
    """
    missed = shortfall > shortfall.min() + SLACK
    value = np.where(missed, -np.inf, value)
    best = ~missed & (value >= value.max() - SLACK * 1e-3)
    if distance is None:
        return int(best.argmax())
    return int(np.where(best, distance, np.inf).argmin())


def search(judge: Callable[[NDArray[np.int64]], Judged], size: int, near: int, at_once: int) -> int:
    """The best of candidates 0 … size - 1, of equals the one nearest to `near`.

    All are looked at if they fit in one go; else evenly spaced ones, then those around the best of them.
    """
    low, high = 0, size
    while True:
        exact = high - low <= at_once
        index = np.arange(low, high) if exact else np.linspace(low, high - 1, at_once).astype(np.int64)
        if not exact and low <= near < high:
            place = int(np.searchsorted(index, near))
            index = index if index[place] == near else np.insert(index, place, near)
        k = best_of(*judge(index), np.abs(index - near).astype(np.float64))
        if exact:
            return int(index[k])
        low, high = int(index[max(k - 1, 0)]), int(index[min(k + 1, len(index) - 1)]) + 1
