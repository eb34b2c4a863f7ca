"""The optimisation problem of a decision rule: a metric and constraints, evaluated on many confusions at once."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evalign import metrics
from evalign.confusion import Confusion, Task
from evalign.decision.constraints import FLAGGED, Constraint, class_index, flagged, label_score, parse_constraints
from evalign.decision.rule import Floats, Labels, Rule
from evalign.metrics import Average, Beta, MetricFunction

RARE = 0.05  # expected rows below which a class counts as absent
SLACK = 1e-9  # scores this close are equal, and constraints may be missed by this much: counts are sums of floats
BUDGET = 2**17  # size of a batch: 1 MB, which stays in the cache
LOOP = 1024  # confusions evaluated at once, for a function that torch.vmap cannot handle

Scored = tuple[Floats, Floats]  # (shortfall of the constraints, value of the metric) per candidate


def present_classes(actual: Floats, weight: Floats) -> Tensor:
    """Mask of the classes that enter a mean over classes: those with at least 0.05 expected rows.

    Without it, the recall of a class with next to no probability anywhere would weigh as much as any other's. A row
    has weight 1, or the mean weight if that is smaller (weights that add up to 1).
    """
    row = min(1.0, float(weight.sum() / max(np.count_nonzero(weight), 1)))
    return torch.from_numpy(np.atleast_1d(actual > RARE * row))


def class_betas(beta: Any, classes: Sequence[Any], order: Any) -> float | list[float] | None:
    """A beta for each of `classes`, given by label (1 for the others) or as numbers, reordered by `order`."""
    if beta is None or (np.ndim(beta) == 0 and not isinstance(beta, Mapping)):
        return None if beta is None else float(beta)
    if isinstance(beta, Mapping):
        by_index = {class_index(label, classes, "label of beta"): float(value) for label, value in beta.items()}
        return [by_index.get(k, 1.0) for k in range(len(classes))]
    values = np.asarray(beta, dtype=np.float64)
    if values.shape != (len(classes),):
        raise ValueError(f"beta must be one number, or one for each of {len(classes)} classes, got {values.size}")
    return [float(value) for value in values[order]]


class BatchedMetric:
    """A metric of a batch of confusions: batched if it is built in, by vmap or a loop if it is a function."""

    def __init__(self, function: MetricFunction, name: str) -> None:
        self.function, self.name = function, name
        named = isinstance(function, partial) and (
            function.func in metrics.METRICS.values() or function.func in (label_score, flagged)
        )
        self.way = "batch" if named else "vmap"
        self.reads_matrix = False

    def probe(self, classes: int, multilabel: bool) -> None:
        """Check on example counts that the function returns one number, and whether it reads the matrix."""
        cells = torch.full((classes, classes), 1.0, dtype=torch.float64) + torch.eye(classes, dtype=torch.float64)

        def matrix() -> Tensor:
            self.reads_matrix = True
            return cells

        total = cells.sum().expand(classes) if multilabel else cells.sum()
        c = Confusion(cells.diagonal(), cells.sum(1), cells.sum(0), total,
                      multilabel=multilabel, matrix=None if multilabel else matrix)  # fmt: skip
        try:
            shape = torch.as_tensor(self.function(c)).shape
        except TypeError as error:
            raise TypeError(
                f"a metric is a name, such as 'f1', or a function of one Confusion; {self.name} failed on one: {error}"
            ) from error
        if shape != ():
            raise ValueError(f"{self.name} must return one number for a Confusion, got shape {tuple(shape)}")

    def __call__(self, c: Confusion) -> Tensor:
        """Scores (K,) of a batch of K confusions."""
        if self.way == "batch":
            return self.function(c)
        parts = {"tp": c.tp, "actual": c.actual, "predicted": c.predicted, "total": c.total}
        if c.built_matrix is not None:
            parts["matrix"] = c.built_matrix

        def one(parts: dict[str, Tensor]) -> Tensor:
            return torch.as_tensor(self.function(Confusion(**parts, present=c.present, multilabel=c.multilabel)))  # type: ignore[arg-type]

        if self.way == "vmap":
            try:
                return torch.vmap(one)(parts)
            except Exception:  # control flow on values, numpy, item(): a loop works, or raises the actual error
                self.way = "loop"
        return torch.stack([one({k: v[i] for k, v in parts.items()}).detach() for i in range(len(c.tp))])


class Problem:
    """Maximise a metric subject to constraints, both functions of a `Confusion`."""

    def __init__(
        self, metric: str | MetricFunction, constraints: Sequence[Constraint] = (), *, average: Average,
        beta: Beta | None, classes: int, multilabel: bool,
    ) -> None:  # fmt: skip
        budgets = [c for c in constraints if c.count]
        if budgets and (classes != 2 or multilabel or any(c.label not in (None, 1) for c in budgets)):
            raise ValueError(f"{budgets[0]} limits rows of the positive class of two; use a share such as 2% instead")
        self.at_most = min((int(c.value) for c in budgets), default=None)
        constraints = [c for c in constraints if not c.count]
        self.average: Average = average
        self.beta, self.source = beta, metric
        names = [metric, *(c.metric for c in constraints)]
        if multilabel and "quadratic_kappa" in names:
            raise ValueError("quadratic_kappa needs ordered classes, got task 'multilabel'; choose another metric")
        self.name = metrics.name_of(metric)
        self.classes, self.multilabel, self.constraints = classes, multilabel, tuple(constraints)
        self.metric = BatchedMetric(metrics.resolve(metric, average=average, beta=beta), self.name)
        self.limits = [BatchedMetric(c.resolve(average=average, beta=beta), str(c)) for c in constraints]
        for measure in (self.metric, *self.limits):
            measure.probe(classes, multilabel)
        self.reads_matrix = any(m.reads_matrix for m in (self.metric, *self.limits))
        # A mean of one score per label: labels can be decided separately.
        self.separable = multilabel and isinstance(metric, str) and not constraints
        self.separable &= average != "micro" or not metrics.is_averaged(str(metric))

    @classmethod
    def of(
        cls, metric: str | MetricFunction, p: Floats, task: Task, average: Average | None, beta: Any, subject_to: Any
    ) -> "Problem":
        """Problem for checked probabilities and the options of a user."""
        multilabel, columns = task == "multilabel", p.shape[1]
        if average is None:
            average = "binary" if columns == 2 and not multilabel else "macro"
        if average == "binary" and (columns != 2 or multilabel):
            raise ValueError(
                f"average='binary' needs two classes, got {columns} {'labels' if multilabel else 'classes'}; "
                "use 'macro', 'micro' or 'weighted'"
            )
        constraints = () if subject_to is None else parse_constraints(subject_to)
        return cls(metric, constraints, average=average, beta=beta, classes=columns, multilabel=multilabel)

    @property
    def task(self) -> Task:
        """Name of the task."""
        return "multilabel" if self.multilabel else "multiclass"

    @property
    def needs_labels(self) -> bool:
        """Whether a constraint depends on the labels; the share of flagged rows does not."""
        return any(c.metric != FLAGGED for c in self.constraints)

    def per_label(self) -> "list[Problem]":
        """Problem of each label, for metrics that are a mean over labels."""
        betas = np.broadcast_to(np.asarray(1.0 if self.beta is None else self.beta, dtype=np.float64), self.classes)
        return [
            Problem(
                self.source, average=self.average, beta=None if self.beta is None else float(b), classes=1,
                multilabel=True,
            )
            for b in betas
        ]  # fmt: skip

    def observed(self, decisions: Labels, y: Labels, weight: Floats) -> Confusion:
        """Confusion of decisions on labelled rows."""
        return Confusion.hard(
            torch.from_numpy(decisions), torch.from_numpy(y), self.classes, sample_weight=torch.from_numpy(weight),
            multilabel=self.multilabel,
        )  # fmt: skip

    def batch_size(self, width: int, budget: int = BUDGET) -> int:
        """Number of confusions of `width` numbers to evaluate at once."""
        loops = any(m.way == "loop" for m in (self.metric, *self.limits))
        return min(LOOP if loops else budget, max(64, budget // width))

    def value(self, c: Confusion) -> Floats:
        """Metric (K,), with nan as -inf."""
        with torch.no_grad():
            scores = self.metric(c).double().numpy()
        return np.where(np.isnan(scores), -np.inf, scores)

    def shortfalls(self, c: Confusion) -> Floats:
        """Shortfall of each constraint, (constraints, K); 0 where it is met."""
        if not self.constraints:
            return np.zeros((0, len(c.tp)))
        with torch.no_grad():
            return self.missing(np.stack([limit(c).double().numpy() for limit in self.limits]))

    def missing(self, reached: Any) -> Floats:
        """Shortfall of values of the constraints, (constraints,) or (constraints, K)."""
        shape = (-1,) + (1,) * (np.ndim(reached) - 1)
        signs = np.array([1.0 if r.op == ">=" else -1.0 for r in self.constraints]).reshape(shape)
        missing = signs * (np.array([r.value for r in self.constraints]).reshape(shape) - reached)
        return np.where(np.isnan(missing), np.inf, np.where(missing <= SLACK, 0.0, missing))

    def lagrangian(self, multipliers: Floats) -> MetricFunction:
        """M(C) + sum_r multiplier_r g_r(C), with a negative sign for upper limits."""
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

    def metric_value(self, c: Confusion) -> float | None:
        """The metric of one confusion; None if it is not finite."""
        value = float(torch.as_tensor(self.metric.function(c)))
        return value if np.isfinite(value) else None

    def constraint_values(self, c: Confusion) -> list[float]:
        """Value of each constraint for one confusion."""
        return [float(torch.as_tensor(limit.function(c))) for limit in self.limits]

    def argmax_rule(self) -> Rule:
        """Rule of the largest probability; multilabel: the threshold 1/2."""
        if self.multilabel:
            return Rule("thresholds", self.classes, thresholds=(0.5,) * self.classes)
        return Rule("argmax", self.classes)

    def lead(self, one: Labels, other: Labels, y: Labels, weight: Floats, group: Labels) -> tuple[float, float]:
        """Lead of decisions `one` over `other` in the metric, and its jackknife error over groups of rows."""

        def difference(rows: NDArray[np.bool_]) -> float:
            found = (self.metric_value(self.observed(d[rows], y[rows], weight[rows])) for d in (one, other))
            first, second = (value or 0.0 for value in found)
            return first - second

        kept = [group != g for g in np.unique(group)]
        leads = np.array([difference(rows) for rows in kept if weight[rows].any()])
        error = float(np.sqrt(max(len(leads) - 1, 0) * leads.var())) if len(leads) else np.inf
        return difference(np.ones(len(y), dtype=bool)), error

    def completed(self, rule: Rule, c: Confusion) -> Rule:
        """The rule with its metric, the constraints and their values in `c`; warns if a constraint is missed."""
        reached = self.constraint_values(c)
        rule = replace(
            rule,
            metric=self.name,
            subject_to=tuple(map(str, self.constraints)),
            reached=tuple(reached),
            feasible=not self.missing(reached).any(),
        )
        if not rule.feasible:
            self.warn_infeasible(reached)
        return rule

    def warn_infeasible(self, reached: list[float], confidence: float | None = None) -> None:
        """Warn with the nearest feasible values of the constraints."""
        wanted = " and ".join(c.describe() for c in self.constraints)
        nearest = " and ".join(c.describe(v) for c, v in zip(self.constraints, reached, strict=True))
        certified = "" if confidence is None else f" with confidence {confidence:g}"
        warnings.warn(
            f"no decision meets {wanted}{certified}; nearest feasible: {nearest} (feasible=False)",
            UserWarning,
            stacklevel=4,
        )


def best_of(shortfall: Floats, value: Floats, distance: Floats | None = None) -> int:
    """Index of the highest value among the smallest shortfalls; ties go to the smallest `distance`.

    >>> best_of(np.array([0.0, 0.0, 0.2]), np.array([0.5, 0.6, 0.9]))
    1
    """
    missed = shortfall > shortfall.min() + SLACK
    value = np.where(missed, -np.inf, value)
    best = ~missed & (value >= value.max() - SLACK * 1e-3)
    if distance is None:
        return int(best.argmax())
    return int(np.where(best, distance, np.inf).argmin())


def coarse_to_fine(score: Callable[[Labels], Scored], size: int, near: int, batch_size: int) -> int:
    """Best of candidates 0 … size - 1; ties go to the one nearest to `near`.

    All candidates are scored if they fit in one batch. Otherwise evenly spaced ones are scored, then those around
    the best of them, and so on.
    """
    low, high = 0, size
    while True:
        exact = high - low <= batch_size
        index = np.arange(low, high) if exact else np.linspace(low, high - 1, batch_size).astype(np.int64)
        if not exact and low <= near < high:
            place = int(np.searchsorted(index, near))
            index = index if index[place] == near else np.insert(index, place, near)
        k = best_of(*score(index), np.abs(index - near).astype(np.float64))
        if exact:
            return int(index[k])
        low, high = int(index[max(k - 1, 0)]), int(index[min(k + 1, len(index) - 1)]) + 1
