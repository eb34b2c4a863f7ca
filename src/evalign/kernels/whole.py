"""A whole loss as one node of autograd: counts, quotient metric and anchor forward, one kernel backward.

On a GPU nothing may happen between counts and metric: batches that are remembered or summed over ranks take the longer
way through `Objective.counts`. On a CPU (`compiled_whole`) they need not.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from evalign.kernels import dispatch
from evalign.kernels.interface import Plan, once
from evalign.kernels.points import FivePoints

if TYPE_CHECKING:
    from evalign.kernels.compiled_whole import Between


def whole_loss(
    logits: Tensor,
    y: Tensor,
    weight: Tensor | None,
    points: FivePoints,
    plan: Plan,
    between: "Between | None" = None,
) -> Tensor:
    """1 - metric + anchor * cross-entropy of logits (M, C), or (M, L) at the one threshold of the plan.

    On a GPU there need be no weight: all labels then count 1, but for the one that the plan ignores. On a CPU the sums
    of the classes go through `between` before the metric is taken of them.

    >>> from evalign.kernels.quotients import quotient
    >>> plan, points = Plan(quotient("f1", 2), "macro"), FivePoints(low=0.2, reach=0.5)
    >>> whole_loss(torch.tensor([[4.0, 0.0], [0.0, 4.0]]), torch.tensor([0, 1]), torch.ones(2), points, plan)
    tensor(0.0144)
    """
    if not logits.is_cuda:
        from evalign.kernels.compiled_whole import CompiledLoss  # when first needed: numba takes half a second

        return CompiledLoss.apply(logits, y, weight, points, plan, between)  # type: ignore[no-any-return, no-untyped-call]
    assert between is None
    return _apply(logits, y, weight, points, plan)  # type: ignore[no-any-return, no-untyped-call]


class WholeLoss(torch.autograd.Function):
    """On a GPU."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, y: Tensor, weight: Tensor | None, points: FivePoints, plan: Plan) -> Tensor:
        ctx.kernel, ctx.points, ctx.plan = dispatch.whole(), points, plan
        loss: Tensor
        loss, kept, ctx.ready = ctx.kernel.forward(logits, y, weight, points, plan)
        ctx.save_for_backward(*kept)
        return loss

    @staticmethod
    def backward(ctx: Any, by_loss: Tensor) -> tuple[Tensor | None, ...]:
        gradient = ctx.kernel.backward(ctx.saved_tensors, ctx.ready, ctx.points, ctx.plan, by_loss)
        return once(gradient), None, None, None, None


# Without what torch does for transforms of functions, which `dispatch.takes` refuses: a tenth of a small batch's time.
_apply = super(torch.autograd.Function, WholeLoss).apply
