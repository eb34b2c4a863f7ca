"""What contenders are compared by: a metric with its options, applied to labels of any kind."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from evalign import _checks as checks
from evalign import decision, metrics
from evalign.confusion import Confusion
from evalign.decision import Rule
from evalign.estimators.rows import Codes, Floats, HeldOutPredictions
from evalign.metrics import Average, MetricFunction

DECISIONS = ("argmax", "tuned", "plug_in", "auto")


@dataclass(frozen=True)
class Aim:
    """A metric and how it is taken: what `EASTClassifier` has as options, before any label is known.

    `beta` may be a mapping from label to number, `positive` is the label that counts as positive of two, and a
    constraint may name a class by its label: "recall[dog] >= 0.8".
    """

    metric: str | MetricFunction = "f1"
    average: Average | None = None
    beta: float | Sequence[float] | Mapping[str, float] | None = None
    positive: Any = None
    subject_to: Sequence[str] = ()
    confidence: float | None = None

    @property
    def name(self) -> str:
        return self.metric if isinstance(self.metric, str) else getattr(self.metric, "__name__", "metric")


class Judge:
    """An aim at known classes. Inside, classes are 0 to C - 1 and the positive one of two is 1.

    >>> judge = Judge(Aim("f1", positive="no"), ["no", "yes"])
    >>> judge.classes.tolist(), judge.codes(["no", "yes"]).tolist()
    (['yes', 'no'], [1, 0])
    >>> judge.score(np.array([[2, 0], [1, 1]]))
    0.6666666666666666
    """

    def __init__(self, aim: Aim, classes: Any) -> None:
        self.aim = aim
        in_order = np.unique(np.asarray(classes))
        self.order = np.arange(len(in_order))
        self.positive: Any = None
        if aim.positive is not None:
            if len(in_order) != 2:
                raise ValueError(f"a positive label goes with two classes, got {len(in_order)}; leave it out")
            index = _index_of(aim.positive, in_order, "the positive label")
            self.positive = in_order.tolist()[index]
            self.order = np.array([1 - index, index])
        self.classes = in_order[self.order]
        self.average: Average = aim.average or ("binary" if len(self.classes) == 2 else "macro")
        self.beta = self._beta()
        self.subject_to = list(aim.subject_to)
        self.constraints = decision.parse_constraints(self.subject_to, self.classes.tolist())
        self._metric = metrics.resolve(aim.metric, average=self.average, beta=self.beta)
        self._limits = [limit.resolve(average=self.average, beta=self.beta) for limit in self.constraints]
        one_each = np.eye(len(self.classes), dtype=np.int64)
        self.score(one_each)  # so that an average or a constraint that does not fit is told before any training
        self.limits(one_each)

    @property
    def names(self) -> list[str]:
        """The classes as text."""
        return [str(label) for label in self.classes.tolist()]

    def codes(self, labels: Any) -> Codes:
        """Labels as 0 to C - 1."""
        values = np.asarray(labels)
        in_order = np.empty_like(self.classes)
        in_order[self.order] = self.classes
        at = np.searchsorted(in_order, values).clip(max=len(in_order) - 1)
        if (unknown := in_order[at] != values).any():
            found = ", ".join(repr(label) for label in np.unique(values[unknown])[:5].tolist())
            raise ValueError(f"labels must be among {', '.join(map(repr, in_order.tolist()[:20]))}, got {found}")
        codes: Codes = np.argsort(self.order)[at].astype(np.int64)
        return codes

    def confusion(self, truth: Codes, predicted: Codes) -> NDArray[np.int64]:
        """Counts (C, C): rows are labels, columns predictions."""
        count = len(self.classes)
        return np.bincount(truth * count + predicted, minlength=count * count).reshape(count, count)

    def score(self, confusion: NDArray[Any]) -> float:
        """The metric of a matrix of counts."""
        return float(self._metric(as_confusion(confusion)))

    def scores(self, confusions: NDArray[Any]) -> Floats:
        """The metric of many matrices (K, C, C)."""
        if isinstance(self.aim.metric, str):
            return self._metric(as_confusion(confusions)).numpy()
        return np.array([self.score(matrix) for matrix in confusions])

    def limits(self, confusion: NDArray[Any]) -> dict[str, float]:
        """What each constraint is about, on a matrix of counts: {"precision >= 0.9": 0.87}."""
        c = as_confusion(confusion)
        return {text: float(f(c)) for text, f in zip(self.aim.subject_to, self._limits, strict=True)}

    def missed(self, limits: Mapping[str, float]) -> list[str]:
        """The constraints that these values, of `limits`, do not meet."""
        pairs = zip(self.constraints, limits.items(), strict=True)
        return [text for c, (text, value) in pairs if not (value >= c.value if c.op == ">=" else value <= c.value)]

    def rule(self, name: str, held_out: HeldOutPredictions) -> Rule:
        """A decision rule by name, learned from held-out predictions."""
        checks.check_choice("decision", name, DECISIONS)
        p = held_out.probabilities
        if name == "argmax":  # also beside constraints, which it then may miss
            return Rule("argmax", p.shape[1])
        return decision.learn_rule(
            name, p, held_out.labels, self.aim.metric, average=self.average, beta=self.beta,
            sample_weight=held_out.weight, subject_to=self.constraints or None,
            confidence=self.aim.confidence if name == "auto" else None,
        )  # fmt: skip

    def _beta(self) -> float | list[float] | None:
        beta = self.aim.beta
        if beta is None or isinstance(beta, (int, float)):
            return beta
        if not isinstance(beta, Mapping):
            return [float(b) for b in np.asarray(beta, dtype=float)[self.order]]
        values = np.ones(len(self.classes))
        for label, value in beta.items():
            values[_index_of(label, self.classes, "a label of beta")] = value
        return [float(value) for value in values]


def as_confusion(matrix: NDArray[Any]) -> Confusion:
    """A matrix of counts (..., C, C) as a `Confusion`."""
    cells = torch.from_numpy(np.asarray(matrix, dtype=np.float64))
    tp = cells.diagonal(dim1=-2, dim2=-1)
    return Confusion(tp, cells.sum(-1), cells.sum(-2), cells.sum((-2, -1)), matrix=cells)


def _index_of(label: Any, classes: NDArray[Any], what: str) -> int:
    """Where a label stands, which a command line has as text."""
    names = [str(name) for name in classes.tolist()]
    checks.check_choice(what, str(label), names)
    return names.index(str(label))
