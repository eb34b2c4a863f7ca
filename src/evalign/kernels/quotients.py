"""A metric as numbers: which multiples of tp, actual, predicted and total are divided.

Most metrics are a quotient of two linear forms of the counts, averaged over classes. The coefficients are not written
down a second time: the metric itself is applied to counts that are linear forms.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import torch

from evalign import metrics
from evalign.confusion import Confusion


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


class Quotient(NamedTuple):
    """Coefficients of tp, actual, predicted and total in both parts, and of the label counts that may weigh classes."""

    top: tuple[float, ...]
    bottom: tuple[float, ...]
    weight: tuple[float, ...]


@lru_cache
def quotient(metric: str, classes: int, beta: float | None = None, label_smoothing: float = 0.0) -> Quotient:
    """The quotient behind a metric that is averaged over classes, its labels smoothed.

    >>> quotient("f1", 3).top, quotient("f1", 3).bottom
    ((2.0, 0.0, 0.0, 0.0), (0.0, 1.0, 1.0, 0.0))
    """
    unit: list[Any] = [Linear(*(float(i == k) for i in range(4)), classes=classes) for k in range(4)]
    tp, actual, predicted, total = unit
    counts = Confusion(tp, actual, predicted, total, outcomes=classes).smoothed(label_smoothing)
    top, bottom = metrics.quotient(metric, counts, beta=beta)
    parts: tuple[Any, ...] = (top, bottom, counts.actual)
    return Quotient(*(part.numbers for part in parts))
