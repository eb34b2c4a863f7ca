"""Soft multiclass counts with the dynamic threshold, and cross-entropy, with an analytic backward.

`compiled_rows` has the loops for float32 on a CPU, `triton_rows` the kernels for a GPU, `torch_rows` the same in
torch's operations.
"""

from typing import Any

import torch
from torch import Tensor

from evalign.kernels import dispatch
from evalign.kernels.plan import Counts, Settings, once, slopes


def row_counts(logits: Tensor, y: Tensor, weight: Tensor, settings: Settings) -> Counts:
    """Counts of logits (M, C), labels y (M,) and weights (M,); losses are those of labels smoothed over the classes.

    >>> from evalign.kernels.plan import FivePoints
    >>> settings = Settings(FivePoints(low=0.2, reach=0.5))
    >>> counts = row_counts(torch.eye(3), torch.tensor([0, 1, 1]), torch.ones(3), settings)
    >>> counts.actual.tolist(), round(float(counts.predicted.sum()), 4)
    ([1.0, 2.0, 0.0], 3.0)
    """
    return Counts(*RowCounts.apply(logits, y, weight, settings))  # type: ignore[no-untyped-call]


class RowCounts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, y: Tensor, weight: Tensor, settings: Settings) -> tuple[Tensor, ...]:
        ctx.kernel, ctx.settings = dispatch.rows(logits), settings
        counts, kept = ctx.kernel.forward(logits, y, weight, settings)
        ctx.save_for_backward(*kept)
        ctx.mark_non_differentiable(counts.actual)
        ctx.set_materialize_grads(False)
        return tuple(counts)

    @staticmethod
    def backward(
        ctx: Any, tp: Tensor | None, predicted: Tensor | None, losses: Tensor | None, actual: None
    ) -> tuple[Tensor | None, ...]:
        given = next((x for x in (tp, predicted) if x is not None), None)
        kept = ctx.saved_tensors
        if given is None:
            if losses is None:
                return None, None, None, None
            given = losses.new_empty(kept[0].shape[1])
        with torch.no_grad():
            gradient = ctx.kernel.backward(kept, ctx.settings, slopes(given, tp, predicted, losses))
        return once(gradient), None, None, None
