"""Constraints: "recall >= 0.9", parsed and held."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from math import isfinite
from typing import Any, Literal

from torch import Tensor

from evalign import _checks as checks
from evalign import metrics
from evalign.confusion import Confusion
from evalign.metrics import Average, Beta, MetricFunction

Op = Literal[">=", "<="]
OPS: tuple[Op, ...] = (">=", "<=")
_FORM = re.compile(r"\s*([A-Za-z_]\w*)\s*(?:\[\s*(\d+)\s*\])?\s*([<>=!]+)\s*(\S+?)\s*")


@dataclass(frozen=True)
class Constraint:
    """A metric (by name, or any function of a `Confusion`) kept at or above (or below) a value.

    `label` asks for the score of one class instead of the average over classes.
    """

    metric: str | MetricFunction
    op: Op
    value: float
    label: int | None = None

    def __str__(self) -> str:
        name = self.metric if isinstance(self.metric, str) else getattr(self.metric, "__name__", "metric")
        return f"{name}{'' if self.label is None else f'[{self.label}]'} {self.op} {self.value:g}"

    def resolve(self, *, average: Average, beta: Beta | None) -> MetricFunction:
        """The constrained metric as a function of a Confusion."""
        beta = beta if self.metric == "fbeta" else None
        if self.label is None or not isinstance(self.metric, str):
            return metrics.resolve(self.metric, average=average, beta=beta)
        options = {} if beta is None else {"beta": beta}
        return partial(_of_label, metric=metrics.METRICS[self.metric], label=self.label, options=options)


def _of_label(c: Confusion, *, metric: Any, label: int, options: dict[str, Any]) -> Tensor:
    if label >= c.num_classes:
        raise ValueError(f"a constraint names class {label}, but the classes are 0 to {c.num_classes - 1}")
    scores: Tensor = metric(c, average=None, **options)[..., label]
    return scores


def parse_constraint(text: Any) -> Constraint:
    """The constraint "precision >= 0.9", "recall[2] >= 0.8" (class 2 alone), or (metric or function, op, value).

    >>> parse_constraint("recall>=0.9")
    Constraint(metric='recall', op='>=', value=0.9, label=None)
    >>> str(parse_constraint(("specificity", "<=", 0.5)))
    'specificity <= 0.5'
    """
    if isinstance(text, Constraint):
        return text
    label: int | None = None
    if isinstance(text, str):
        match = _FORM.fullmatch(text)
        if match is None:
            raise ValueError(f"a constraint reads like 'recall >= 0.9', got {text!r}")
        metric: Any = match[1]
        label = None if match[2] is None else int(match[2])
        op, value = match[3], _number(match[4], text)
    elif isinstance(text, (tuple, list)) and len(text) == 3:
        metric, op, value = text
        value = _number(value, text)
    else:
        raise TypeError(f"a constraint is a string like 'recall >= 0.9' or (metric, op, value), got {text!r}")
    if op not in OPS:
        nearest = ">=" if ">" in str(op) or "<" not in str(op) else "<="
        raise ValueError(f"a constraint compares with >= or <=, got {op!r} in {text!r}; did you mean {nearest!r}?")
    if not callable(metric):
        checks.check_choice("metric of a constraint", metric, metrics.METRICS)
        if label is not None and not metrics.is_averaged(metric):
            raise ValueError(f"{metric} has no score per class, so {text!r} cannot name one; leave out [{label}]")
    return Constraint(metric, op, value, label)


def parse_constraints(subject_to: Any) -> tuple[Constraint, ...]:
    """None, one constraint or several.

    >>> [str(c) for c in parse_constraints(["recall >= 0.9", "specificity >= 0.5"])]
    ['recall >= 0.9', 'specificity >= 0.5']
    """
    if subject_to is None:
        return ()
    if isinstance(subject_to, (str, Constraint)):
        return (parse_constraint(subject_to),)
    if isinstance(subject_to, (tuple, list)) and len(subject_to) == 3 and subject_to[1] in ("<", ">", "=", "==", *OPS):
        return (parse_constraint(subject_to),)
    if not isinstance(subject_to, Iterable):
        raise TypeError(f"subject_to is a constraint like 'recall >= 0.9' or a list of them, got {subject_to!r}")
    return tuple(parse_constraint(one) for one in subject_to)


def _number(value: Any, text: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = float("nan")
    if not isfinite(number):
        raise ValueError(f"a constraint ends in a number, as in 'recall >= 0.9', got {text!r}")
    return number
