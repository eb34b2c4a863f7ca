"""A whole loss on a GPU: one kernel forward and one backward, unless there are very many classes."""

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from evalign.kernels.gpu import columns as triton_columns
from evalign.kernels.gpu import metric_kernels as triton_metric
from evalign.kernels.gpu.columns import Entries
from evalign.kernels.gpu.rows import Batch, gradient, rows_of, streamed_counts
from evalign.kernels.gpu.tiles import WHOLE, Ending, tiles
from evalign.kernels.plan import FivePoints, Kept, Plan, Ready, bare, once


@lru_cache(1024)
def _ending(plan: Plan) -> Ending:
    return Ending(plan.metric.code, float(plan.anchor), plan.metric.numbers)


def in_one_piece(logits: Tensor, y: Tensor, weight: Tensor | None, plan: Plan) -> tuple[Tensor, Tensor, Tensor | None]:
    """The batch as kernels read it: of logits at least every row."""
    return rows_of(logits.contiguous() if plan.thresholds else logits, y, weight)


def ready(z: Tensor, y: Tensor, weight: Tensor | None, points: FivePoints, plan: Plan) -> Ready:
    """What computes the loss of such batches, which are in one piece."""
    if plan.thresholds:
        return YesNo(points, plan)
    if z.shape[1] > WHOLE:
        return LongRows(points, plan)
    return tiles(z, y, weight, plan.settings(points), plan.ignored, _ending(plan))


class YesNo(NamedTuple):
    """Yes/no problems at one threshold."""

    points: FivePoints
    plan: Plan

    def loss(self, z: Tensor, y: Tensor, weight: Tensor | None, temperature: Tensor | None) -> Tensor:
        how = YesNo(self.points._replace(temperature=temperature), self.plan)
        return _whole_loss(z, y, weight, how)  # type: ignore[no-any-return]

    def forward(self, z: Tensor, y: Tensor, weight: Tensor | None) -> tuple[Tensor, Kept]:
        loss = torch.empty((), dtype=torch.float32, device=z.device)
        slopes = torch.empty(2 * z.shape[1] + 1, dtype=torch.float32, device=z.device)
        entries = self._entries(z, y, weight)
        triton_columns.whole(entries, _ending(self.plan), loss, slopes, two_classes=self.plan.two_classes)
        return loss, (slopes,)

    def backward(self, batch: tuple[Tensor, Tensor, Tensor | None], kept: Kept, by_loss: Tensor) -> Tensor:
        (slopes,) = kept
        by = by_loss, slopes, slopes, slopes
        return triton_columns.gradient(self._entries(*batch), by, bool(self.plan.anchor), packed=True)

    def _entries(self, z: Tensor, y: Tensor, weight: Tensor | None) -> Entries:
        return Entries(z, y, weight, self.plan.settings(self.points), self.plan.ignored)


class LongRows(NamedTuple):
    """Rows that are too long for one tile."""

    points: FivePoints
    plan: Plan

    def loss(self, z: Tensor, y: Tensor, weight: Tensor | None, temperature: Tensor | None) -> Tensor:
        how = LongRows(self.points._replace(temperature=temperature), self.plan)
        return _whole_loss(z, y, weight, how)  # type: ignore[no-any-return]

    def forward(self, z: Tensor, y: Tensor, weight: Tensor | None) -> tuple[Tensor, Kept]:
        plan = self.plan
        (tp, predicted, losses, actual), more = streamed_counts(self._rows(z, y, weight))
        loss, slopes = triton_metric.loss_and_slopes(
            tp, predicted, actual, actual.sum(), plan.metric, per_label=False, losses=losses if plan.anchor else None,
            anchor=plan.anchor,
        )  # fmt: skip
        return loss, (slopes, *more)

    def backward(self, batch: tuple[Tensor, Tensor, Tensor | None], kept: Kept, by_loss: Tensor) -> Tensor:
        slopes, stats = kept
        by = by_loss, slopes, slopes, slopes
        return gradient(self._rows(*batch), stats, by, bool(self.plan.anchor), packed=True)

    def _rows(self, z: Tensor, y: Tensor, weight: Tensor | None) -> Batch:
        return Batch(z, y, weight, self.plan.settings(self.points), self.plan.ignored)


class WholeLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, z: Tensor, y: Tensor, weight: Tensor | None, how: YesNo | LongRows) -> Tensor:
        loss, kept = how.forward(z, y, weight)
        ctx.save_for_backward(z, y, weight, *kept)
        ctx.how = how
        return loss

    @staticmethod
    def backward(ctx: Any, by_loss: Tensor) -> tuple[Tensor | None, ...]:
        z, y, weight, *kept = ctx.saved_tensors
        return once(ctx.how.backward((z, y, weight), kept, by_loss)), None, None, None


_whole_loss: Any = bare(WholeLoss)
