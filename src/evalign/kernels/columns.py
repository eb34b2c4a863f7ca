"""Soft counts of yes/no problems at fixed thresholds, and binary cross-entropy, with an analytic backward."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from evalign.kernels.interface import once
from evalign.kernels.points import Lines


class ColumnCounts(NamedTuple):
    """tp and predicted (G, L) for G thresholds and L columns; actual and total (L,), which have no gradient."""

    tp: Tensor
    predicted: Tensor
    losses: Tensor
    actual: Tensor
    total: Tensor


def column_counts(
    logits: Tensor,
    y: Tensor,
    weight: Tensor,
    lines: tuple[Lines, ...],
    *,
    smoothing: float = 0.0,
    losses: bool = True,
    two_classes: bool = False,
) -> ColumnCounts:
    """Counts of logits, 0/1 labels and weights (L, M); without `losses` their cross-entropies are left at 0.

    With `two_classes` the one column there is gives counts of both its classes: (G, 2), (2,), and total ().

    >>> lines = (Lines(left=0.25, room=0.25, tau=0.5, below=0.4, middle=1.6, above=0.4),)
    >>> counts = column_counts(torch.tensor([[0.0, 10.0]]), torch.tensor([[1, 1]]), torch.ones(1, 2), lines)
    >>> counts.tp, counts.total
    (tensor([[1.5000]]), tensor([2.]))
    """
    options = (lines, smoothing, losses, two_classes)
    return ColumnCounts(*_Columns.apply(logits, y, weight, *options))  # type: ignore[no-untyped-call]


class _Columns(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        y: Tensor,
        weight: Tensor,
        lines: tuple[Lines, ...],
        smoothing: float,
        with_losses: bool,
        two_classes: bool,
    ) -> tuple[Tensor, ...]:
        from evalign.kernels import compiled_columns

        kept = (logits.detach().contiguous(), y.contiguous(), weight.detach().contiguous())
        ctx.save_for_backward(*kept)
        ctx.settings, ctx.two_classes = (lines, smoothing), two_classes
        tp, predicted, losses, actual, total = compiled_columns.forward(kept, lines, smoothing, with_losses)
        if two_classes:
            tn = total - actual - predicted + tp
            tp, predicted = torch.cat([tn, tp], 1), torch.cat([total - predicted, predicted], 1)
            actual, total = torch.cat([total - actual, actual]), total[0]
        ctx.mark_non_differentiable(actual, total)
        ctx.set_materialize_grads(False)
        return tp, predicted, losses, actual, total

    @staticmethod
    def backward(
        ctx: Any, tp: Tensor | None, predicted: Tensor | None, losses: Tensor | None, actual: None, total: None
    ) -> tuple[Tensor | None, ...]:
        from evalign.kernels import compiled_columns

        kept = ctx.saved_tensors
        with torch.no_grad():
            zero = kept[0].new_zeros(len(ctx.settings[0]), 2 if ctx.two_classes else kept[0].shape[0])
            tp, predicted = zero if tp is None else tp, zero if predicted is None else predicted
            if ctx.two_classes:
                predicted = predicted[:, 1:] - predicted[:, :1] - tp[:, :1]
                tp = tp[:, 1:] + tp[:, :1]
            lines, smoothing = ctx.settings
            gradient = compiled_columns.backward(kept, lines, smoothing, tp, predicted, losses)
        return once(gradient), None, None, None, None, None, None
