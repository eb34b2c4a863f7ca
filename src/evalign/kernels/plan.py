"""Parameters of kernels: the step, the metric as linear forms of the counts, the plan."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from evalign import metrics
from evalign.confusion import Confusion


class FivePoints(NamedTuple):
    """A step whose threshold is tau <= 1/2 of its row: lines that meet at tau (1 -+ reach) with values low, 1 - low.

    With x = p / tau: h = a x below 1 - reach, 1/2 + b (x - 1) up to 1 + reach. `annealed` has low = T and
    reach = 5 T / 2, `linear` low = delta and reach = 1/2. On a GPU kernels read `temperature` in place of both numbers:
    copying it to the host would stop the queue, and freeze it in a CUDA graph.
    """

    low: float
    reach: float
    temperature: Tensor | None = None

    @property
    def a(self) -> float:  # without effect if the outer line has length 0 (T = 0.4)
        return self.low / (1 - self.reach) if self.reach < 1 else 0.0

    @property
    def b(self) -> float:
        return (0.5 - self.low) / self.reach

    def numbers(self) -> tuple[float, float, float, float, float]:
        """a, b, low, and the ends of the middle line over tau, the left one below 0 if there is no outer line."""
        assert self.temperature is None
        return self.a, self.b, self.low, 1 - self.reach if self.reach < 1 else -1.0, 1 + self.reach


class Lines(NamedTuple):
    """A step at a fixed threshold: three lines, joined at `left` and at 1 - `gap`.

    h = below p, 1/2 + middle (p - tau), 1 - above (1 - p).
    """

    left: float
    gap: float
    tau: float
    below: float
    middle: float
    above: float

    @classmethod
    def at(cls, tau: float, points: FivePoints) -> "Lines":
        """The step at a threshold on either side of 1/2: beyond it, the mirror image.

        >>> Lines.at(0.5, FivePoints(low=0.1, reach=0.5))
        Lines(left=0.25, gap=0.25, tau=0.5, below=0.4, middle=1.6, above=0.4)
        """
        half = points.reach * min(tau, 1 - tau)
        left, gap = tau - half, 1 - tau - half
        below, above = (points.low / end if end > 0 else 0.0 for end in (left, gap))
        return cls(left, gap, tau, below, (1 - 2 * points.low) / (2 * half), above)


class KernelSettings(NamedTuple):
    """Options of a fused loss; `thresholds` are those of binary problems."""

    points: FivePoints
    smoothing: float = 0.0
    losses: bool = True  # whether cross-entropies are needed
    thresholds: tuple[float, ...] = ()


TILE_CLASSES = 1024  # maximum number of classes of a row in one tile of a GPU kernel
FORMS = ("macro", "micro", "weighted", "binary", "mcc", "cohen_kappa")  # kernels take the index
AGREEMENTS = FORMS[4:]
# With mutually exclusive classes these equal an average of another metric.
SAME = {"accuracy": ("recall", "micro"), "balanced_accuracy": ("recall", "macro")}
# Metrics of each task whose value and slopes linear forms give.
_AVERAGED = frozenset(filter(metrics.is_averaged, metrics.METRICS))
_ALL = _AVERAGED | {*AGREEMENTS, *SAME}
CLOSED_FORMS = {"binary": _ALL, "multiclass": _ALL, "multilabel": _AVERAGED}


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


@lru_cache
def closed_form(
    metric: str, average: str, classes: int, beta: float | None = None, label_smoothing: float = 0.0
) -> ClosedForm:
    """The linear forms behind a metric that has them, its labels smoothed.

    >>> closed_form("f1", "macro", 3)
    ClosedForm(name='macro', top=(2.0, 0.0, 0.0, 0.0), bottom=(0.0, 1.0, 1.0, 0.0), weight=(0.0, 1.0, 0.0, 0.0))
    """
    # The parts of a metric are linear in the counts, so its values at unit counts (4, C) are the coefficients.
    unit = torch.eye(4, dtype=torch.float64, device="cpu")
    tp, actual, predicted = (unit[:, k, None].expand(4, classes) for k in range(3))
    counts = Confusion(tp, actual, predicted, unit[:, 3], outcomes=classes).smoothed(label_smoothing)
    metric, name = SAME.get(metric, (metric, average))
    if metric in AGREEMENTS:
        name, pair = metric, (counts.tp, counts.predicted)
    else:
        pair = metrics.quotient(metric, counts, beta=beta)
    return ClosedForm(name, *(tuple(part[:, 0].tolist()) for part in (*pair, counts.actual)))


Saved = tuple[Any, ...]  # what a backward pass needs: tensors, or None


class Plan(NamedTuple):
    """The metric of a multiclass problem or, with thresholds in the settings, of binary problems, and the anchor."""

    metric: ClosedForm
    anchor: float = 0.0
    two_classes: bool = False
    ignored: int = 0  # without weights, the label to ignore


class Counts(NamedTuple):
    """Soft counts of a batch, and the weighted sum of its cross-entropies; `actual` has no gradient."""

    tp: Tensor
    predicted: Tensor
    losses: Tensor
    actual: Tensor


class LaunchPlan(Protocol):
    """Computes the loss of GPU batches with the same `dispatch.batch_key`."""

    def loss(
        self, z: Tensor, y: Tensor, weight: Tensor | None, temperature: Tensor | None, eager: "Eager | None" = None
    ) -> Tensor:
        """The loss as one autograd node; a temperature is read on the device, `eager` gives second derivatives."""


class Slopes(NamedTuple):
    """dL of the first three; None is 0."""

    tp: Tensor
    predicted: Tensor
    losses: Tensor | None


def slopes(counts_like: Tensor, tp: Tensor | None, predicted: Tensor | None, losses: Tensor | None) -> Slopes:
    def dense(x: Tensor | None) -> Tensor:
        return torch.zeros_like(counts_like) if x is None else x.contiguous()

    return Slopes(dense(tp), dense(predicted), losses)


# The outputs of a fused node from (logits, labels, weights), by operations that can be differentiated twice.
Eager = Callable[[Tensor, Tensor, Any], Sequence[Tensor]]


def twice_differentiable(
    gradient: Tensor, batch: tuple[Tensor, Tensor, Tensor | None], by: Sequence[Tensor | None], eager: Eager | None
) -> Tensor:
    """`gradient`; under `create_graph=True` the same by the eager form, which has a graph."""
    if not torch.is_grad_enabled():
        return gradient
    if eager is None:
        raise RuntimeError("create_graph=True needs the `eager` form of a fused loss")
    pairs = [(out, slope) for out, slope in zip(eager(*batch), by, strict=True) if slope is not None]
    outputs, slopes_given = zip(*pairs, strict=True)
    return torch.autograd.grad(outputs, batch[0], slopes_given, create_graph=True)[0]
