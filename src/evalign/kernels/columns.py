"""Soft counts of yes/no problems at fixed thresholds, and binary cross-entropy, with an analytic backward."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from evalign.kernels import dispatch
from evalign.kernels.plan import Settings, once


class ColumnCounts(NamedTuple):
    """tp and predicted (G, L) for G thresholds and L columns; actual and total (L,), which have no gradient."""

    tp: Tensor
    predicted: Tensor
    losses: Tensor
    actual: Tensor
    total: Tensor


def column_counts(
    logits: Tensor, y: Tensor, weight: Tensor, settings: Settings, *, two_classes: bool = False
) -> ColumnCounts:
    """Counts of logits, 0/1 labels and weights (M, L) at every threshold of the settings.

    With `two_classes` the one column there is gives counts of both its classes: (G, 2), (2,), and total ().

    >>> from evalign.kernels.plan import FivePoints
    >>> settings = Settings(FivePoints(low=0.1, reach=0.5), thresholds=(0.5,))
    >>> counts = column_counts(torch.tensor([[0.0], [10.0]]), torch.tensor([[1], [1]]), torch.ones(2, 1), settings)
    >>> counts.tp, counts.total
    (tensor([[1.5000]]), tensor([2.]))
    """
    return ColumnCounts(*_Columns.apply(logits, y, weight, settings, two_classes))  # type: ignore[no-untyped-call]


def by_class(tp: Tensor, predicted: Tensor, actual: Tensor, total: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Counts of class 0 and class 1, (G, 2), (G, 2), (2,) and (), from those of the one column."""
    tn = total - actual - predicted + tp
    tp, predicted = torch.cat([tn, tp], 1), torch.cat([total - predicted, predicted], 1)
    return tp, predicted, torch.cat([total - actual, actual]), total[0]


def by_column(tp: Tensor, predicted: Tensor) -> tuple[Tensor, Tensor]:
    """Derivatives by the column's tp and predicted from those by the counts of both classes."""
    return tp[:, 1:] + tp[:, :1], predicted[:, 1:] - predicted[:, :1] - tp[:, :1]


class _Columns(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, y: Tensor, weight: Tensor, settings: Settings, two_classes: bool
    ) -> tuple[Tensor, ...]:
        kept = (logits.detach().contiguous(), y.contiguous(), weight.detach().contiguous())
        ctx.save_for_backward(*kept)
        ctx.kernel, ctx.settings, ctx.two_classes = dispatch.columns(logits), settings, two_classes
        tp, predicted, losses, actual, total = ctx.kernel.forward(kept, settings)
        if two_classes:
            tp, predicted, actual, total = by_class(tp, predicted, actual, total)
        ctx.mark_non_differentiable(actual, total)
        ctx.set_materialize_grads(False)
        return tp, predicted, losses, actual, total

    @staticmethod
    def backward(
        ctx: Any, tp: Tensor | None, predicted: Tensor | None, losses: Tensor | None, actual: None, total: None
    ) -> tuple[Tensor | None, ...]:
        kept = ctx.saved_tensors
        with torch.no_grad():
            columns = 2 if ctx.two_classes else kept[0].shape[1]
            zero = kept[2].new_zeros(len(ctx.settings.thresholds), columns) if tp is None or predicted is None else None
            tp, predicted = zero if tp is None else tp, zero if predicted is None else predicted
            assert tp is not None
            assert predicted is not None
            if ctx.two_classes:
                tp, predicted = by_column(tp, predicted)
            gradient = ctx.kernel.backward(kept, ctx.settings, tp, predicted, losses)
        return once(gradient), None, None, None, None
