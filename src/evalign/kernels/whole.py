"""A whole loss as one node of autograd: counts, quotient metric and anchor forward, one kernel backward.

Between counts and metric nothing may happen here: batches that are remembered or summed over ranks take the longer
way through `Objective.counts`.
"""

from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from evalign.kernels import dispatch
from evalign.kernels.columns import by_class, by_column
from evalign.kernels.interface import Slopes, once
from evalign.kernels.points import Settings
from evalign.kernels.quotients import Quotient


class Plan(NamedTuple):
    """What to compute: a multiclass problem where the settings have no threshold, else one or many yes/no problems."""

    settings: Settings
    quotient: Quotient
    average: str
    anchor: float
    two_classes: bool = False


def whole_loss(logits: Tensor, y: Tensor, weight: Tensor, plan: Plan) -> Tensor:
    """1 - metric + anchor * cross-entropy of logits (M, C), or (M, L) at the one threshold of the settings.

    >>> from evalign.kernels.points import FivePoints
    >>> from evalign.kernels.quotients import quotient
    >>> plan = Plan(Settings(FivePoints(low=0.2, reach=0.5)), quotient("f1", 2), "macro", anchor=0.0)
    >>> whole_loss(torch.tensor([[4.0, 0.0], [0.0, 4.0]]), torch.tensor([0, 1]), torch.ones(2), plan)
    tensor(0.0144)
    """
    return WholeLoss.apply(logits, y, weight, plan)  # type: ignore[no-any-return, no-untyped-call]


class WholeLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, y: Tensor, weight: Tensor, plan: Plan) -> Tensor:
        settings = plan.settings
        ctx.plan, rows = plan, not settings.thresholds
        ctx.kernel = dispatch.rows(logits) if rows else dispatch.columns(logits)
        if rows:
            (tp, predicted, losses, actual), kept = ctx.kernel.forward(logits, y, weight, settings)
            total = actual.sum()
        else:
            kept = (logits.detach().contiguous(), y.contiguous(), weight.detach().contiguous())
            tp, predicted, losses, actual, total = ctx.kernel.forward(kept, settings)
            if plan.two_classes:
                tp, predicted, actual, total = by_class(tp, predicted, actual, total)
            tp, predicted = tp[0], predicted[0]
        metric = _metric(logits)
        per_label = not rows and not plan.two_classes
        loss: Tensor
        loss, by_tp, by_predicted = metric.value_and_slopes(
            tp, predicted, actual, total, plan.quotient, plan.average, per_label=per_label
        )
        by_losses = None
        if plan.anchor:
            loss, by_losses = metric.anchored(loss, losses, total, plan.anchor)
        ctx.save_for_backward(*kept, by_tp, by_predicted, by_losses)
        return loss

    @staticmethod
    def backward(ctx: Any, by_loss: Tensor) -> tuple[Tensor | None, ...]:
        *kept, by_tp, by_predicted, by_losses = ctx.saved_tensors
        plan = ctx.plan
        with torch.no_grad():
            by_tp, by_predicted = by_loss * by_tp, by_loss * by_predicted
            by_losses = None if by_losses is None else by_loss * by_losses
            if not plan.settings.thresholds:
                gradient = ctx.kernel.backward(kept, plan.settings, Slopes(by_tp, by_predicted, by_losses))
            else:
                by_tp, by_predicted = by_tp[None], by_predicted[None]
                if plan.two_classes:
                    by_tp, by_predicted = by_column(by_tp, by_predicted)
                gradient = ctx.kernel.backward(tuple(kept), plan.settings, by_tp, by_predicted, by_losses)
        return once(gradient), None, None, None


def _metric(z: Tensor) -> ModuleType:
    if z.is_cuda:
        from evalign.kernels import triton_metric

        return triton_metric
    from evalign.kernels import array_metric

    return array_metric
