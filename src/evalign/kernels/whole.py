"""A whole loss as one node of autograd: counts, quotient metric and anchor forward, one kernel backward.

Between counts and metric nothing may happen here: batches that are remembered or summed over ranks take the longer
way through `Objective.counts`.
"""

from typing import Any

import torch
from torch import Tensor

from evalign.kernels import dispatch
from evalign.kernels.interface import Plan, once
from evalign.kernels.points import FivePoints


def whole_loss(logits: Tensor, y: Tensor, weight: Tensor | None, points: FivePoints, plan: Plan) -> Tensor:
    """1 - metric + anchor * cross-entropy of logits (M, C), or (M, L) at the one threshold of the plan.

    On a GPU there need be no weight: all labels then count 1, but for the one that the plan ignores.

    >>> from evalign.kernels.quotients import quotient
    >>> plan, points = Plan(quotient("f1", 2), "macro"), FivePoints(low=0.2, reach=0.5)
    >>> whole_loss(torch.tensor([[4.0, 0.0], [0.0, 4.0]]), torch.tensor([0, 1]), torch.ones(2), points, plan)
    tensor(0.0144)
    """
    return WholeLoss.apply(logits, y, weight, points, plan)  # type: ignore[no-any-return, no-untyped-call]


class WholeLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, y: Tensor, weight: Tensor | None, points: FivePoints, plan: Plan) -> Tensor:
        ctx.kernel, ctx.points, ctx.plan = dispatch.whole(logits), points, plan
        loss: Tensor
        loss, kept = ctx.kernel.forward(logits, y, weight, points, plan)
        ctx.save_for_backward(*kept)
        return loss

    @staticmethod
    def backward(ctx: Any, by_loss: Tensor) -> tuple[Tensor | None, ...]:
        gradient = ctx.kernel.backward(ctx.saved_tensors, ctx.points, ctx.plan, by_loss)
        return once(gradient), None, None, None, None
