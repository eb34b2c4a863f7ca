"""A whole loss on a GPU: one kernel forward and one backward, unless there are very many classes."""

from functools import lru_cache

import torch
from torch import Tensor

from evalign.kernels import triton_columns, triton_metric
from evalign.kernels.interface import Kept, Plan
from evalign.kernels.points import FivePoints
from evalign.kernels.triton_columns import Entries
from evalign.kernels.triton_rows import Batch, gradient, rows_of, streamed_counts
from evalign.kernels.triton_tiles import WHOLE, Ending, Tiles, places_kept, tiles


@lru_cache(1024)
def _ending(plan: Plan) -> Ending:
    form = tuple(float(x) for part in plan.quotient for x in part)
    return Ending(triton_metric.AVERAGES.index(plan.average), float(plan.anchor), form)


def forward(
    logits: Tensor, y: Tensor, weight: Tensor | None, points: FivePoints, plan: Plan
) -> tuple[Tensor, Kept, Tiles | None]:
    """The loss, and what `backward` needs: the batch as it is read, slopes, and the rows' sums; launches."""
    d, settings = logits.shape[1], plan.settings(points)
    if plan.thresholds:
        logits = logits.contiguous()
    z, y, weight = rows_of(logits, y, weight)
    if d > WHOLE and not plan.thresholds:
        return (*_of_long_rows(Batch(z, y, weight, settings, plan.ignored), (z, y, weight), plan), None)
    loss = torch.empty((), dtype=torch.float32, device=z.device)
    if plan.thresholds:
        slopes = torch.empty(2 * d + 1, dtype=torch.float32, device=z.device)
        entries = Entries(z, y, weight, settings, plan.ignored)
        triton_columns.whole(entries, _ending(plan), loss, slopes, two_classes=plan.two_classes)
        return loss, (z, y, weight, slopes), None
    ready = tiles(z, y, weight, settings, plan.ignored, _ending(plan))
    rows = torch.empty(places_kept(z.shape[0], d), dtype=torch.float32, device=z.device)
    ready.forward(z, y, weight, points, loss, rows)
    return loss, (z, y, weight, rows), ready


def _of_long_rows(batch: Batch, kept: Kept, plan: Plan) -> tuple[Tensor, Kept]:
    (tp, predicted, losses, actual), more = streamed_counts(batch)
    loss, slopes = triton_metric.loss_and_slopes(
        tp, predicted, actual, actual.sum(), plan.quotient, plan.average, per_label=False,
        losses=losses if plan.anchor else None, anchor=plan.anchor,
    )  # fmt: skip
    return loss, (*kept, slopes, *more)


def backward(kept: Kept, ready: Tiles | None, points: FivePoints, plan: Plan, by_loss: Tensor) -> Tensor:
    z, y, weight, slopes, *more = kept
    by, losses = (by_loss, slopes, slopes, slopes), bool(plan.anchor)
    if ready is not None:
        return ready.backward(z, y, weight, points, slopes, by, losses, packed=True)
    settings = plan.settings(points)
    if plan.thresholds:
        return triton_columns.gradient(Entries(z, y, weight, settings, plan.ignored), by, losses, packed=True)
    return gradient(Batch(z, y, weight, settings, plan.ignored), more[0], by, losses, packed=True)
