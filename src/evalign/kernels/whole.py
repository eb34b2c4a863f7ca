"""A whole loss as one node of autograd: counts, metric and anchor forward, one kernel backward.

On a GPU nothing may happen between counts and metric: batches that are remembered or summed over ranks take the longer
way through `Objective.counts`. On a CPU (`compiled_whole`) they need not.
"""

from typing import TYPE_CHECKING

from torch import Tensor

from evalign.kernels import dispatch
from evalign.kernels.plan import FivePoints, Plan

if TYPE_CHECKING:
    from evalign.kernels.cpu.compiled_loss import Between


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

    >>> import torch
    >>> from evalign.kernels.plan import closed_form
    >>> plan, points = Plan(closed_form("f1", "macro", 2)), FivePoints(low=0.2, reach=0.5)
    >>> whole_loss(torch.tensor([[4.0, 0.0], [0.0, 4.0]]), torch.tensor([0, 1]), torch.ones(2), points, plan)
    tensor(0.0144)
    """
    if not logits.is_cuda:
        from evalign.kernels.cpu.compiled_loss import compiled_loss  # when first needed: numba takes half a second

        return compiled_loss(logits, y, weight, points, plan, between)  # type: ignore[no-any-return]
    assert between is None
    return gpu_loss(logits, y, weight, points, plan)


def gpu_loss(logits: Tensor, y: Tensor, weight: Tensor | None, points: FivePoints, plan: Plan) -> Tensor:
    kernels = dispatch.whole()
    batch = kernels.in_one_piece(logits, y, weight, plan)
    loss: Tensor = kernels.ready(*batch, points, plan).loss(*batch, points.temperature)
    return loss
