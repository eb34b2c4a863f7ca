"""The metric by which contenders are compared, with its options, for labels of any kind."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from evalign import checks, decision, metrics
from evalign.confusion import Confusion
from evalign.decision import Rule
from evalign.decision.constraints import class_index
from evalign.decision.costs import Costs, cheapest, cost_metric, costs_paid
from evalign.decision.rule import REJECTED
from evalign.decision.search.problem import class_betas
from evalign.metrics import Average, MetricFunction
from evalign.tables.split import Codes, Floats, HeldOutPredictions, indicator

INFEASIBLE = "no decision meets"  # start of the warning that a rule misses constraints
DECISIONS = ("argmax", "tuned", "plug_in", "auto")


@dataclass(frozen=True)
class Aim:
    """A metric and its options, as in `EASTClassifier`, before any label is known.

    `beta` may be a mapping from label to number, `positive` is the positive label of two, and a
    constraint may name a class by its label: "recall[dog] >= 0.8". `costs` require metric "cost".
    """

    metric: str | MetricFunction = "f1"
    average: Average | None = None
    beta: float | Sequence[float] | Mapping[str, float] | None = None
    positive: Any = None
    subject_to: Sequence[str] = ()
    confidence: float | None = None
    costs: Mapping[Any, float | str] | None = None

    @property
    def name(self) -> str:
        return metrics.name_of(self.metric)


class Judge:
    """An aim with known classes. Internally, classes are 0 to C - 1 and the positive one of two is 1.

    A data frame of labels is multilabel: each column is a label of 0 and 1, and a confusion is (L, 2, 2).

    >>> judge = Judge(Aim("f1", positive="no"), ["no", "yes"])
    >>> judge.classes.tolist(), judge.codes(["no", "yes"]).tolist()
    (['yes', 'no'], [1, 0])
    >>> judge.score(np.array([[2, 0], [1, 1]]))
    0.6666666666666666
    """

    def __init__(self, aim: Aim, classes: Any) -> None:
        self.aim, self.multilabel = aim, np.ndim(classes) == 2
        in_order = np.asarray(classes.columns) if self.multilabel else np.unique(np.asarray(classes))
        self.order = np.arange(len(in_order))
        self.positive: Any = None
        if aim.positive is not None:
            if self.multilabel:
                raise ValueError("a positive label requires a single target, got several; leave it out")
            if len(in_order) != 2:
                raise ValueError(f"a positive label requires two classes, got {len(in_order)}; leave it out")
            index = class_index(aim.positive, in_order.tolist(), "the positive label")
            self.positive = in_order.tolist()[index]
            self.order = np.array([1 - index, index])
        self.classes = in_order[self.order]
        self.average: Average = aim.average or ("binary" if self.binary else "macro")
        self.beta = class_betas(aim.beta, self.classes.tolist(), self.order)
        self.subject_to = list(aim.subject_to)
        self.constraints = decision.parse_constraints(self.subject_to, self.classes.tolist())
        self.costs = None if aim.costs is None else Costs.of(aim.costs, self.classes.tolist())
        if self.multilabel and "quadratic_kappa" in (aim.name, *(limit.metric for limit in self.constraints)):
            raise ValueError("quadratic_kappa compares the classes of one target, got several targets; choose another")
        if self.costs is not None and self.multilabel:
            raise ValueError("costs require a single target, got several; remove one of them")
        if self.costs is not None and self.subject_to and (self.costs.per_row or self.costs.reject is not None):
            raise ValueError(
                "constraints require costs that are equal for all rows, without rejection; remove one of them"
            )
        metric = aim.metric if self.costs is None else self._cost_metric()
        self._metric = metrics.resolve(metric, average=self.average, beta=self.beta)
        self._limits = [limit.resolve(average=self.average, beta=self.beta) for limit in self.constraints]
        one_each = np.eye(2 if self.multilabel else len(self.classes), dtype=np.int64)
        one_each = np.stack([one_each] * len(self.classes)) if self.multilabel else one_each
        self.score(one_each)  # reports an unsuitable average or constraint before any training
        self.limits(one_each)

    @property
    def binary(self) -> bool:
        return len(self.classes) == 2 and not self.multilabel

    @property
    def names(self) -> list[str]:
        """The classes as text."""
        return [str(label) for label in self.classes.tolist()]

    def codes(self, labels: Any) -> Codes:
        """Labels as 0 to C - 1; multilabel ones as 0/1 (n, L)."""
        if self.multilabel:
            return indicator(labels)
        values = np.asarray(labels)
        in_order = np.empty_like(self.classes)
        in_order[self.order] = self.classes
        at = np.searchsorted(in_order, values).clip(max=len(in_order) - 1)
        if (unknown := in_order[at] != values).any():
            found = ", ".join(repr(label) for label in np.unique(values[unknown])[:5].tolist())
            raise ValueError(f"labels must be among {', '.join(map(repr, in_order.tolist()[:20]))}, got {found}")
        codes: Codes = np.argsort(self.order)[at].astype(np.int64)
        return codes

    def confusion(self, truth: Codes, predicted: Codes) -> NDArray[Any]:
        """Counts (C, C): rows are labels, columns predictions, without rejected rows; multilabel (L, 2, 2)."""
        if self.multilabel:
            cells = (2 * truth + predicted).T
            return np.stack([np.bincount(label, minlength=4).reshape(2, 2) for label in cells])
        count, kept = len(self.classes), predicted != REJECTED
        return np.bincount((truth * count + predicted)[kept], minlength=count * count).reshape(count, count)

    def score(self, confusion: NDArray[Any]) -> float:
        """The metric of a matrix of counts."""
        return float(self._metric(self.counts(confusion)))

    def scores(self, confusions: NDArray[Any]) -> Floats:
        """The metric of many matrices (K, C, C)."""
        if isinstance(self.aim.metric, str):
            return self._metric(self.counts(confusions)).numpy()
        return np.array([self.score(matrix) for matrix in confusions])

    def limits(self, confusion: NDArray[Any]) -> dict[str, float]:
        """The value that each constraint limits, on a matrix of counts: {"precision >= 0.9": 0.87}."""
        c = self.counts(confusion)
        return {text: float(f(c)) for text, f in zip(self.aim.subject_to, self._limits, strict=True)}

    def missed(self, limits: Mapping[str, float]) -> list[str]:
        """The constraints that these values, of `limits`, do not meet."""
        pairs = zip(self.constraints, limits.items(), strict=True)
        return [text for c, (text, value) in pairs if not (value >= c.value if c.op == ">=" else value <= c.value)]

    def counts(self, confusion: NDArray[Any]) -> Confusion:
        """Counts that `confusion` returned, for a metric."""
        return as_confusion(confusion, multilabel=self.multilabel)

    def rule(self, name: str, held_out: HeldOutPredictions, X: Any = None) -> Rule:
        """A decision rule by name, learned from held-out predictions of the table X, whose columns may hold costs.

        Whether it meets the constraints is in `feasible`; there is no warning.
        """
        checks.check_choice("decision", name, DECISIONS)
        p, y, weight = held_out.probabilities, held_out.labels, held_out.weight
        if name == "argmax" and not self.multilabel:  # also with constraints, which it may then miss
            return Rule("argmax", p.shape[1])
        if self.costs is not None and not self.constraints:
            table = self.cost_table(X)
            table = table[held_out.rows] if self.costs.per_row else table
            return cheapest(p, y, table, reject=self.costs.reject, sample_weight=weight)
        limits = self.constraints if name != "argmax" else []
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", INFEASIBLE)
            return decision.learn_rule(
                name, p, y, self.aim.metric if self.costs is None else self._cost_metric(), average=self.average,
                beta=self.beta, sample_weight=weight, subject_to=limits or None,
                task="multilabel" if self.multilabel else "multiclass",
                confidence=self.aim.confidence if name == "auto" else None,
            )  # fmt: skip

    def decide(self, rule: Rule, p: Floats, X: Any) -> Codes:
        """Decisions on the rows X, whose columns may hold costs."""
        return rule.predict(p, costs=self.cost_table(X) if rule.kind == "row_costs" else None)

    def decisions(self, names: Sequence[str]) -> list[str]:
        """The given decision rules that apply: with costs, only "argmax" and "auto"."""
        return [name for name in names if self.costs is None or name in ("argmax", "auto")]

    def cost_table(self, X: Any) -> Floats:
        """Costs (C, C), or (n, C, C) where columns of X hold them."""
        assert self.costs is not None
        return self.costs.rows(X) if self.costs.per_row else self.costs.matrix()

    def paid(self, truth: Codes, decided: Codes, table: Floats) -> Floats:
        """Cost of each row (n,), by a `cost_table`."""
        return costs_paid(decided, truth, table, None if self.costs is None else self.costs.reject)

    def _cost_metric(self) -> MetricFunction:
        """Minus the mean cost of a confusion; it does not know costs of rows."""
        assert self.costs is not None
        size = len(self.classes)
        return cost_metric(np.zeros((size, size)) if self.costs.per_row else self.costs.matrix())


def as_confusion(matrix: NDArray[Any], *, multilabel: bool = False) -> Confusion:
    """A matrix of counts (..., C, C) as a `Confusion`; multilabel (..., L, 2, 2)."""
    cells = torch.from_numpy(np.asarray(matrix, dtype=np.float64))
    if multilabel:
        return Confusion(
            cells[..., 1, 1], cells[..., 1, :].sum(-1), cells[..., :, 1].sum(-1), cells.sum((-2, -1)), multilabel=True
        )
    return Confusion.of_matrix(cells)
