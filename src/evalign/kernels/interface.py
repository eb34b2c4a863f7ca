"""What kernels of every kind take and give, their nodes of autograd, and the refusal of a second derivative."""

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from evalign.kernels.closed_forms import ClosedForm
from evalign.kernels.points import FivePoints, Settings

Kept = tuple[Any, ...]  # what a backward needs: tensors, or None


class Plan(NamedTuple):
    """What to compute: the metric of a multiclass problem, or with thresholds that of one or many yes/no problems."""

    metric: ClosedForm
    anchor: float = 0.0
    smoothing: float = 0.0
    thresholds: tuple[float, ...] = ()
    two_classes: bool = False
    ignored: int = 0  # where there are no weights, the label that does not count

    def settings(self, points: FivePoints) -> Settings:
        return Settings(points, self.smoothing, bool(self.anchor), self.thresholds)


class Counts(NamedTuple):
    """Soft counts of a batch, and the weighted sum of its cross-entropies; `actual` has no gradient."""

    tp: Tensor
    predicted: Tensor
    losses: Tensor
    actual: Tensor


class Ready(Protocol):
    """The loss of batches of one kind on a GPU, which are in one piece."""

    def loss(self, z: Tensor, y: Tensor, weight: Tensor | None, temperature: Tensor | None) -> Tensor:
        """The temperature, where the step has one, is read on the device."""


class Slopes(NamedTuple):
    """dL of the first three; None is 0."""

    tp: Tensor
    predicted: Tensor
    losses: Tensor | None


def slopes(counts_like: Tensor, tp: Tensor | None, predicted: Tensor | None, losses: Tensor | None) -> Slopes:
    def dense(x: Tensor | None) -> Tensor:
        return torch.zeros_like(counts_like) if x is None else x.contiguous()

    return Slopes(dense(tp), dense(predicted), losses)


def bare(function: type[torch.autograd.Function]) -> Any:
    """`function.apply` without what small batches wait for.

    That is forward what torch does for transforms of functions, which `dispatch.takes` refuses, a tenth of a small
    batch's time; and backward the search, every time, for the function that does it.
    """
    node = getattr(function, "_backward_cls", None)
    if node is not None:
        node.apply = function.backward
    return super(torch.autograd.Function, function).apply  # type: ignore[misc]


class NoSecondDerivative(torch.autograd.Function):
    """A gradient that depends on its inputs in a way that no one wrote down: asking for it is an error."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, mark: Tensor) -> Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise RuntimeError("the fused loss has no second derivative; take it from MetricLoss(..., backend='eager')")


def once(gradient: Tensor) -> Tensor:
    """`gradient`, which refuses to be differentiated where someone might (`create_graph=True`)."""
    if not torch.is_grad_enabled():
        return gradient
    mark = gradient.new_empty(0, requires_grad=True)
    return NoSecondDerivative.apply(gradient, mark)  # type: ignore[no-any-return, no-untyped-call]
