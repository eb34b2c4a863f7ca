"""Costs of decisions: a matrix by true and decided class, or numbers and columns of the data; rejection at a cost."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from evalign import checks
from evalign.confusion import Confusion
from evalign.decision.calibration import fit_calibration
from evalign.decision.constraints import class_index
from evalign.decision.rule import REJECTED, Floats, Labels, Rule, as_held_out
from evalign.metrics import MetricFunction

COST = "cost"
_CELLS = {"tn": (0, 0), "fp": (0, 1), "fn": (1, 0), "tp": (1, 1)}


@dataclass(frozen=True)
class Costs:
    """Cost of each (true, decided) pair of classes: a number, or the name of a column.

    `reject` is the cost of not deciding a row. Negative costs are gains.
    """

    entries: tuple[tuple[float | str, ...], ...]
    reject: float | None = None

    @classmethod
    def of(cls, costs: Any, classes: Sequence[Any]) -> "Costs":
        """Costs from a matrix (C, C), or a mapping with keys "fp", "fn", "tp", "tn", (true, decided) or "reject".

        >>> Costs.of({"fp": 1, "fn": "amount", "reject": 0.5}, ["fine", "fraud"]).entries
        ((0.0, 1.0), ('amount', 0.0))
        >>> Costs.of([[0, 1], [5, 0]], ["fine", "fraud"]).matrix()
        array([[0., 1.],
               [5., 0.]])
        """
        size = len(classes)
        if not isinstance(costs, Mapping):
            try:
                matrix = np.asarray(costs, dtype=np.float64)
            except (TypeError, ValueError):
                raise ValueError(
                    f"costs must be a matrix of numbers, or a mapping like {{'fp': 1, 'fn': 'amount'}}, got {costs!r}"
                ) from None
            if matrix.shape != (size, size) or not np.isfinite(matrix).all():
                raise ValueError(f"costs must be finite numbers of shape {(size, size)}, got shape {matrix.shape}")
            return cls(tuple(tuple(row) for row in matrix.tolist()))
        entries: list[list[float | str]] = [[0.0] * size for _ in range(size)]
        reject = None
        for key, value in costs.items():
            if not isinstance(value, str):
                checks.check_number(f"cost {key!r}", value, open_low=True, open_high=True)
                value = float(value)
            if key == "reject":
                if isinstance(value, str):
                    raise ValueError(f"the cost of rejecting must be a number, got column {value!r}")
                reject = value
                continue
            if isinstance(key, str):
                if size != 2:
                    raise ValueError(
                        f"costs {key!r} require two classes, got {size}; use (true, decided) pairs of labels"
                    )
                checks.check_choice("cost", key, (*_CELLS, "reject"))
                i, j = _CELLS[key]
            else:
                if not isinstance(key, tuple) or len(key) != 2:
                    raise ValueError(
                        f"keys of costs must be 'fp', 'fn', 'reject' or pairs (true, decided), got {key!r}"
                    )
                i, j = (class_index(label, classes, "class of a cost") for label in key)
            entries[i][j] = value
        if reject is None and all(len(set(row)) == 1 for row in entries):
            raise ValueError("costs must differ between decisions, but all are equal; give mistakes a higher cost")
        return cls(tuple(map(tuple, entries)), reject)

    @property
    def per_row(self) -> bool:
        """Whether a cost is a column of the data."""
        return any(isinstance(value, str) for row in self.entries for value in row)

    def matrix(self) -> Floats:
        """Costs (C, C) that are the same for all rows."""
        return np.asarray(self.entries, dtype=np.float64)

    def rows(self, X: Any) -> Floats:
        """Costs (n, C, C) of the rows of a data frame."""
        n, size = len(X), len(self.entries)
        found = np.empty((n, size, size))
        for i, row in enumerate(self.entries):
            for j, value in enumerate(row):
                if isinstance(value, str):
                    if not hasattr(X, "columns") or value not in X.columns:
                        raise ValueError(f"costs name the column {value!r}; pass a data frame that has it")
                    found[:, i, j] = np.asarray(X[value], dtype=np.float64)
                else:
                    found[:, i, j] = value
        if not np.isfinite(found).all():
            raise ValueError("costs of rows must be finite numbers; fill missing values in the cost columns")
        return found


def cost_metric(matrix: Any) -> MetricFunction:
    """Minus the mean cost of a confusion, as a metric to maximise.

    >>> cost_metric([[0, 1], [5, 0]])(Confusion.hard(torch.tensor([1, 0, 1]), torch.tensor([0, 1, 1])))
    tensor(-2., dtype=torch.float64)
    """
    named: MetricFunction = partial(_minus_cost, matrix=torch.as_tensor(np.asarray(matrix, dtype=np.float64)))
    named.__name__ = COST
    return named


def _minus_cost(c: Confusion, *, matrix: Tensor) -> Tensor:
    return -(matrix.to(c.tp.dtype) * c.matrix).sum((-2, -1)) / c.total


def costs_paid(decisions: Labels, y: Labels, costs: Floats, reject: float | None = None) -> Floats:
    """Cost of each decision (n,), for costs (C, C) or (n, C, C); a rejected row costs `reject`."""
    rows, kept = np.arange(len(y)), decisions != REJECTED
    decided = np.where(kept, decisions, 0)
    paid = costs[y, decided] if costs.ndim == 2 else costs[rows, y, decided]
    return np.where(kept, paid, reject or 0.0)


def mean_cost(decisions: Labels, y: Labels, costs: Floats, weight: Floats, reject: float | None = None) -> float:
    """Weighted mean of `costs_paid`."""
    return float(weight @ costs_paid(decisions, y, costs, reject) / weight.sum())


def cheapest(
    probabilities: Any, target: Any, costs: Any, *, reject: float | None = None, sample_weight: Any = None
) -> Rule:
    """Rule of the lowest expected cost, on probabilities calibrated on held-out labels.

    Decides argmin_j sum_i q_i cost_ij, and rejects (label -1) a row whose least expected cost is above `reject`.
    `costs` is a matrix (C, C) by true and decided class, or (n, C, C) for costs of each row: such a rule needs the
    costs in `predict`, too. `value` is the mean cost of the rows, `coverage` the share that is decided.

    >>> rule = cheapest([0.1, 0.2, 0.7, 0.9] * 10, [0, 0, 1, 1] * 10, [[0, 1], [5, 0]], reject=0.1)
    >>> rule.predict([0.01, 0.3, 0.99]), rule.coverage
    (array([ 0, -1,  1]), 1.0)
    """
    p, y, weight = as_held_out(probabilities, target, sample_weight)
    table = np.asarray(costs, dtype=np.float64)
    size = p.shape[1]
    if table.shape not in ((size, size), (len(p), size, size)):
        raise ValueError(f"costs must have shape {(size, size)} or {(len(p), size, size)}, got {table.shape}")
    fields = fit_calibration(p, y, weight).fields | {"reject": None if reject is None else -float(reject)}
    if table.ndim == 2:
        rule = Rule("gain", size, gain=tuple(map(tuple, -table)), **fields)
    else:
        rule = Rule("row_costs", size, **fields)
    decisions = rule.decide(p, None if table.ndim == 2 else table)
    return replace(
        rule,
        metric=COST,
        value=mean_cost(decisions, y, table, weight, reject),
        coverage=float(weight @ (decisions != REJECTED) / weight.sum()),
        shares=tuple((np.bincount(y, weight, size) / weight.sum()).tolist()),
    )
