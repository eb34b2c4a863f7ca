"""A metric as numbers that a kernel can take: three linear forms of the counts of a class, and what is made of them.

Most metrics are a quotient of two linear forms, averaged over classes; Matthews' correlation and Cohen's kappa are made
of sums over classes. The coefficients are not written down a second time: the metric itself is applied to counts that
are linear forms.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import torch

from evalign import metrics
from evalign.confusion import Confusion

FORMS = ("macro", "micro", "weighted", "binary", "mcc", "cohen_kappa")  # kernels know them by their places
AGREEMENTS = FORMS[4:]
# Where classes exclude each other, these are others under a name of their own.
SAME = {"accuracy": ("recall", "micro"), "balanced_accuracy": ("recall", "macro")}


class Linear:
    """A multiple of tp, plus one of actual, of predicted and of total; what a metric may do to it before dividing."""

    dtype, device = torch.float64, torch.device("cpu")

    def __init__(self, *numbers: float, classes: int) -> None:
        self.numbers, self.shape = numbers, (classes,)

    def __add__(self, other: "Linear") -> "Linear":
        added = (a + b for a, b in zip(self.numbers, other.numbers, strict=True))
        return Linear(*added, classes=self.shape[0])

    def __sub__(self, other: "Linear") -> "Linear":
        return self + -1.0 * other

    def __mul__(self, number: Any) -> "Linear":
        return Linear(*(float(number) * x for x in self.numbers), classes=self.shape[0])

    __rmul__ = __mul__

    def unsqueeze(self, dim: int) -> "Linear":
        return self


class ClosedForm(NamedTuple):
    """Coefficients of tp, actual, predicted and total in three linear forms of the counts of a class.

    For an average over classes: both parts of the quotient, and the label counts that may weigh classes. For an
    agreement: tp, predicted and actual.
    """

    name: str  # of FORMS
    top: tuple[float, ...]
    bottom: tuple[float, ...]
    weight: tuple[float, ...]

    @property
    def code(self) -> int:
        return FORMS.index(self.name)

    @property
    def numbers(self) -> tuple[float, ...]:
        return tuple(float(x) for part in (self.top, self.bottom, self.weight) for x in part)


def has_closed_form(metric: str, *, multilabel: bool) -> bool:
    """Whether value and slopes of a metric come from linear forms, without its dozens of operations.

    >>> has_closed_form("mcc", multilabel=False), has_closed_form("mcc", multilabel=True)
    (True, False)
    """
    return metrics.is_averaged(metric) or (not multilabel and (metric in AGREEMENTS or metric in SAME))


@lru_cache
def closed_form(
    metric: str, average: str, classes: int, beta: float | None = None, label_smoothing: float = 0.0
) -> ClosedForm:
    """The linear forms behind a metric that has them, its labels smoothed.

    >>> closed_form("f1", "macro", 3)
    ClosedForm(name='macro', top=(2.0, 0.0, 0.0, 0.0), bottom=(0.0, 1.0, 1.0, 0.0), weight=(0.0, 1.0, 0.0, 0.0))
    """
    unit: list[Any] = [Linear(*(float(i == k) for i in range(4)), classes=classes) for k in range(4)]
    tp, actual, predicted, total = unit
    counts = Confusion(tp, actual, predicted, total, outcomes=classes).smoothed(label_smoothing)
    metric, name = SAME.get(metric, (metric, average))
    pair: tuple[Any, Any]
    if metric in AGREEMENTS:
        name, pair = metric, (counts.tp, counts.predicted)
    else:
        pair = metrics.quotient(metric, counts, beta=beta)
    parts: tuple[Any, ...] = *pair, counts.actual
    return ClosedForm(name, *(part.numbers for part in parts))
