"""A whole loss on a CPU: compiled loops for the counts and for the gradient, numpy for the metric."""

import torch
from torch import Tensor

from evalign.kernels import array_metric, dispatch
from evalign.kernels.columns import by_class, by_column
from evalign.kernels.interface import Kept, Plan, Slopes
from evalign.kernels.points import FivePoints


def forward(logits: Tensor, y: Tensor, weight: Tensor, points: FivePoints, plan: Plan) -> tuple[Tensor, Kept]:
    """The loss, and what `backward` needs."""
    settings, kept = plan.settings(points), (logits.detach().contiguous(), y.contiguous(), weight.detach().contiguous())
    rows = not settings.thresholds
    if rows:
        (tp, predicted, losses, actual), kept = dispatch.rows(logits).forward(*kept, settings)
        total = actual.sum()
    else:
        tp, predicted, losses, actual, total = dispatch.columns(logits).forward(kept, settings)
        if plan.two_classes:
            tp, predicted, actual, total = by_class(tp, predicted, actual, total)
        tp, predicted = tp[0], predicted[0]
    loss, by_tp, by_predicted = array_metric.value_and_slopes(
        tp, predicted, actual, total, plan.quotient, plan.average, per_label=not rows and not plan.two_classes
    )
    by_losses = None
    if plan.anchor:
        loss, by_losses = array_metric.anchored(loss, losses, total, plan.anchor)
    return loss, (*kept, by_tp, by_predicted, by_losses)


@torch.no_grad()
def backward(kept: Kept, points: FivePoints, plan: Plan, by_loss: Tensor) -> Tensor:
    settings = plan.settings(points)
    *batch, by_tp, by_predicted, by_losses = kept
    by_tp, by_predicted = by_loss * by_tp, by_loss * by_predicted
    by_losses = None if by_losses is None else by_loss * by_losses
    gradient: Tensor
    if not plan.thresholds:
        slopes = Slopes(by_tp, by_predicted, by_losses)
        gradient = dispatch.rows(batch[0]).backward(batch, settings, slopes)
        return gradient
    by_tp, by_predicted = by_tp[None], by_predicted[None]
    if plan.two_classes:
        by_tp, by_predicted = by_column(by_tp, by_predicted)
    gradient = dispatch.columns(batch[0]).backward(tuple(batch), settings, by_tp, by_predicted, by_losses)
    return gradient
