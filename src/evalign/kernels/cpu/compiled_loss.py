"""A whole loss on a CPU: compiled loops from the logits to the loss and back, and next to nothing between them.

What a small batch costs is calls: one of torch's or numpy's takes about as long as a loop over all of its rows.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evalign.kernels.cpu import column_counts as compiled_columns
from evalign.kernels.cpu import row_counts as compiled_rows
from evalign.kernels.cpu.column_counts import NO_TOTALS
from evalign.kernels.cpu.metric_loops import agreement_and_slopes, value_and_slopes
from evalign.kernels.plan import AGREEMENTS, ClosedForm, FivePoints, Plan, bare, once

Doubles = NDArray[np.float64]
# Takes tp, actual and predicted of every class, the sum of the cross-entropies and that of the weights as one vector,
# changes them in place, and says by what the slopes of the counts and that of the cross-entropies are multiplied.
Between = Callable[[Doubles], tuple[float, float]]


@lru_cache
def _numbers(metric: ClosedForm) -> Doubles:
    return np.array(metric.numbers).reshape(3, 4)


def metric_of(counts: Doubles, totals: Doubles, plan: Plan) -> tuple[float, Doubles]:
    """1 - metric of tp, actual and predicted (3, C), and its slopes by tp and predicted (2, C)."""
    slopes, form = np.empty((2, counts.shape[1])), plan.metric
    loop = agreement_and_slopes if form.name in AGREEMENTS else value_and_slopes
    return loop(counts, totals, _numbers(form), form.code, slopes), slopes


def by_column(slopes: NDArray[Any]) -> NDArray[Any]:
    """Slopes by tp and predicted of the one column, (2, 1), from those by the counts of both its classes, (2, 2)."""
    no, yes = slopes[:, :1], slopes[:, 1:]
    return np.stack([yes[0] + no[0], yes[1] - no[1] - no[0]])


class CompiledLoss(torch.autograd.Function):
    """1 - metric + anchor * cross-entropy; `between` may change the sums before the metric is taken of them."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        y: Tensor,
        weight: Tensor,
        points: FivePoints,
        plan: Plan,
        between: Between | None = None,
    ) -> Tensor:
        detached = logits.detach()
        kept = detached if plan.thresholds else compiled_rows.in_runs(detached), y.contiguous(), weight.contiguous()
        ctx.save_for_backward(*kept)
        ctx.settings, ctx.two_classes, totals = plan.settings(points), plan.two_classes, NO_TOTALS
        classes = 2 if plan.two_classes else logits.shape[1]
        vector = np.zeros(3 * classes + 2)
        counts = vector[:-2].reshape(3, classes)
        if not plan.thresholds:
            vector[-2], ctx.stats = compiled_rows.counted(kept, ctx.settings, counts)
        else:
            vector[-2], totals = compiled_columns.counted(kept, ctx.settings, counts, plan.two_classes)
        if plan.anchor or between is not None:
            vector[-1] = (counts[1] if totals is NO_TOTALS else totals).sum()
        by_counts, by_losses = (1.0, 1.0) if between is None else between(vector)
        loss, slopes = metric_of(counts, totals, plan)
        ctx.slopes, ctx.by_losses = slopes if by_counts == 1 else by_counts * slopes, 0.0
        if plan.anchor:
            entropy, mass = vector[-2:].tolist()
            anchor = plan.anchor / mass if mass else 0.0
            ctx.by_losses = by_losses * anchor
            loss += anchor * entropy if anchor else 0.0
        return torch.tensor(loss, dtype=logits.dtype)

    @staticmethod
    def backward(ctx: Any, by_loss: Tensor) -> tuple[Tensor | None, ...]:
        kept, settings, factor = ctx.saved_tensors, ctx.settings, by_loss.item()
        with np.errstate(over="ignore", invalid="ignore"):  # a gradient scaler tries factors that are too large
            slopes = (factor * ctx.slopes).astype(np.float32)
            by_losses = np.float32(factor * ctx.by_losses)
        if not settings.thresholds:
            gradient = compiled_rows.gradient(kept, settings, ctx.stats, slopes[0], slopes[1], by_losses)
        else:
            by_tp, by_predicted = by_column(slopes) if ctx.two_classes else slopes
            gradient = compiled_columns.gradient(kept, settings, by_tp[:, None], by_predicted[:, None], by_losses)
        return once(gradient), None, None, None, None, None


compiled_loss: Any = bare(CompiledLoss)
