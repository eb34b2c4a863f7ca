"""Constraints of a decision: "recall >= 0.9", "recall['fraud'] >= 90%", "flagged <= 200"."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import ceil, floor, isfinite
from typing import Any, Literal

from torch import Tensor

from evalign import checks, metrics
from evalign.confusion import Confusion
from evalign.metrics import Average, Beta, MetricFunction

Op = Literal[">=", "<="]
OPS: tuple[Op, ...] = (">=", "<=")
FLAGGED = "flagged"
SIGNED = ("mcc", "cohen_kappa", "quadratic_kappa")  # between -1 and 1; all others are between 0 and 1
_FORM = re.compile(r"\s*([A-Za-z_]\w*)\s*(?:\[\s*(.*?)\s*\])?\s*([<>=!]+)\s*([^\s%]+)\s*(%?)\s*", re.DOTALL)


@dataclass(frozen=True)
class Constraint:
    """A lower or upper limit of a metric, given by name or as a function of a `Confusion`.

    `label` limits the score of one class instead of the average. "flagged" is the share of rows decided positive
    (or decided `label`); with `count` the limit is a number of rows in every call of `predict`.
    """

    metric: str | MetricFunction
    op: Op
    value: float
    label: Any = None
    count: bool = False
    class_name: Any = field(default=None, compare=False, repr=False)  # the user's name for the class of `label`

    def __str__(self) -> str:
        return self._text(self.label, self.value)

    def _text(self, label: Any, value: float) -> str:
        return f"{self.name}{'' if label is None else f'[{label!r}]'} {self.op} {value:g}"

    def describe(self, reached: float | None = None) -> str:
        """Text with the user's name of the class and, if given, `reached` as the limit, rounded to the safe side.

        >>> parse_constraint("recall['fraud'] >= 0.9").with_index(["fine", "fraud"]).describe(0.85678)
        "recall['fraud'] >= 0.8567"
        """
        label = self.label if self.class_name is None else self.class_name
        if reached is None:
            return self._text(label, self.value)
        nearest = floor(reached * 1e4 + 1e-6) if self.op == ">=" else ceil(reached * 1e4 - 1e-6)
        return self._text(label, nearest / 1e4)

    @property
    def name(self) -> str:
        return metrics.name_of(self.metric)

    def with_index(self, classes: Sequence[Any]) -> "Constraint":
        """The same constraint with the label replaced by its index in `classes`.

        A whole number that is not a label is an index, unless labels are whole numbers themselves.
        """
        if self.label is None:
            return self
        named = not any(str(name).removesuffix(".0").lstrip("-").isdigit() for name in classes)
        if named and isinstance(self.label, int) and self.label < len(classes):
            return self
        index = class_index(self.label, classes, f"the class in {str(self)!r}")
        return replace(self, label=index, class_name=self.label)

    def resolve(self, *, average: Average, beta: Beta | None) -> MetricFunction:
        """The constrained metric as a function of a Confusion."""
        if self.metric == FLAGGED:
            return partial(flagged, label=self.label)
        beta = beta if self.metric == "fbeta" else None
        if self.label is None or not isinstance(self.metric, str):
            return metrics.resolve(self.metric, average=average, beta=beta)
        options = {} if beta is None else {"beta": beta}
        return partial(label_score, metric=metrics.METRICS[self.metric], label=self.label, options=options)


def class_index(label: Any, classes: Sequence[Any], what: str) -> int:
    """Index of a label in `classes`, by its text; 1 and 1.0 name the same class.

    >>> class_index("2", [1.0, 2.0], "label")
    1
    """
    names, text = [str(name) for name in classes], str(label)
    if text not in names:
        text = next((name for name in names if name.removesuffix(".0") == text.removesuffix(".0")), text)
    checks.check_choice(what, text, names)
    return names.index(text)


def label_score(c: Confusion, *, metric: Any, label: int, options: dict[str, Any]) -> Tensor:
    """Score of one class."""
    if not isinstance(label, int) or not 0 <= label < c.num_classes:
        raise ValueError(f"a constraint names class {label}, but the classes are 0 to {c.num_classes - 1}")
    scores: Tensor = metric(c, average=None, **options)[..., label]
    return scores


def flagged(c: Confusion, *, label: int | None = None) -> Tensor:
    """Share of rows decided positive, or decided `label`; the mean over labels if multilabel."""
    if c.multilabel and label is None:
        return c.predicted.sum(-1) / c.total.sum(-1)
    if label is None and c.num_classes != 2:
        raise ValueError(f"flagged needs a class, as in \"flagged['fraud'] <= 2%\", with {c.num_classes} classes")
    index = 1 if label is None else label
    if not isinstance(index, int) or not 0 <= index < c.num_classes:
        raise ValueError(f"a constraint names class {index}, but the classes are 0 to {c.num_classes - 1}")
    total = c.total[..., index] if c.multilabel else c.total
    return c.predicted[..., index] / total


def parse_constraint(text: Any) -> Constraint:
    """Parse a constraint such as "precision >= 0.9" or "recall['fraud'] >= 90%", or (metric, op, value).

    >>> parse_constraint("recall>=0.9")
    Constraint(metric='recall', op='>=', value=0.9, label=None, count=False)
    >>> str(parse_constraint("recall['fraud'] >= 90%"))
    "recall['fraud'] >= 0.9"
    >>> parse_constraint("flagged <= 200").count
    True
    """
    if isinstance(text, Constraint):
        return text
    label: Any = None
    percent = ""
    if isinstance(text, str):
        match = _FORM.fullmatch(text)
        if match is None:
            raise ValueError(f"a constraint must look like 'recall >= 0.9', got {text!r}")
        metric: Any = match[1]
        label = _label(match[2])
        op, value, percent = match[3], _number(match[4], text), match[5]
    elif isinstance(text, (tuple, list)) and len(text) == 3:
        metric, op, value = text
        value = _number(value, text)
    else:
        raise TypeError(f"a constraint must be a string like 'recall >= 0.9' or (metric, op, value), got {text!r}")
    if op not in OPS:
        nearest = ">=" if ">" in str(op) or "<" not in str(op) else "<="
        raise ValueError(f"a constraint compares with >= or <=, got {op!r} in {text!r}; did you mean {nearest!r}?")
    count = metric == FLAGGED and not percent and value >= 1
    value = value / 100 if percent else value
    if not callable(metric):
        checks.check_choice("metric of a constraint", metric, (*metrics.METRICS, FLAGGED))
        if label is not None and metric != FLAGGED and not metrics.is_averaged(metric):
            raise ValueError(f"{metric} has no score per class, so {text!r} cannot name one; leave out [{label}]")
        low = -1.0 if metric in SIGNED else 0.0
        if not count and not low <= value <= 1.0:
            raise ValueError(f"{metric} lies between {low:g} and 1, got {text!r}; write 90 % as 0.9 or 90%")
        if count and (op != "<=" or value != int(value)):
            raise ValueError(f"a budget must look like 'flagged <= 200' (rows) or 'flagged <= 2%', got {text!r}")
    return Constraint(metric, op, value, label, count)


def parse_constraints(subject_to: Any, classes: Sequence[Any] | None = None) -> tuple[Constraint, ...]:
    """None, one constraint or several; labels become indices in `classes`.

    >>> [str(c) for c in parse_constraints(["recall['b'] >= 0.9", "specificity >= 0.5"], classes="ab")]
    ['recall[1] >= 0.9', 'specificity >= 0.5']
    """
    if subject_to is None:
        return ()
    one = isinstance(subject_to, (str, Constraint)) or (
        isinstance(subject_to, (tuple, list)) and len(subject_to) == 3 and subject_to[1] in ("<", ">", "=", "==", *OPS)
    )
    if not one and (isinstance(subject_to, (bytes, Mapping)) or not isinstance(subject_to, Iterable)):
        raise TypeError(f"subject_to must be a constraint like 'recall >= 0.9' or a list of them, got {subject_to!r}")
    parsed = [parse_constraint(item) for item in ([subject_to] if one else subject_to)]
    return tuple(c if classes is None else c.with_index(classes) for c in parsed)


def _label(text: str | None) -> Any:
    """A label without its quotes; an unquoted whole number is an index."""
    if text is None:
        return None
    if text[:1] in "'\"" and text[:1] == text[-1:] and len(text) > 1:
        return text[1:-1]
    return int(text) if text.isdigit() else text


def _number(value: Any, text: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = float("nan")
    if not isfinite(number):
        raise ValueError(f"a constraint must end in a number, as in 'recall >= 0.9', got {text!r}")
    return number
