"""The fused loss on a CPU: compiled loops from the logits to the loss and back.

Nothing of the batch's size is saved for the backward pass except the logits. A small batch costs mostly calls: one
call of torch or numpy takes about as long as a loop over all of its rows, so there are few.
"""

from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evalign.kernels.cpu import column_loops, row_loops
from evalign.kernels.cpu.jit import in_threads, parts
from evalign.kernels.cpu.metric_loops import agreement_and_slopes, value_and_slopes
from evalign.kernels.plan import (
    AGREEMENTS,
    ClosedForm,
    Counts,
    Eager,
    FivePoints,
    Lines,
    Plan,
    Settings,
    Slopes,
    twice_differentiable,
)
from evalign.kernels.private_apis import fast_apply

if TYPE_CHECKING:
    from evalign.kernels.dispatch import CountsHook

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
Batch = tuple[Tensor, Tensor, Tensor]  # logits (M, C) as `strided_rows` leaves them, labels and weights, contiguous
Stats = tuple[Floats, NDArray[np.int32]]
FEW, FEW_BACK = 96, 24  # classes, up to which rows in step are quicker than one after the other
Saved = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


@lru_cache
def _step_numbers(points: FivePoints, smoothing: float) -> Floats:
    return np.array([*points.numbers(), smoothing], np.float32)


def strided_rows(z: Tensor) -> Tensor:
    """Logits (M, C) whose rows are runs; of few classes, as blocks of rows take them, their columns may be."""
    return z if z.shape[1] <= FEW_BACK and z.t().is_contiguous() else z.contiguous()


def count_rows(batch: Batch, settings: Settings, into: Doubles) -> tuple[float, Stats]:
    """Adds tp, actual and predicted to `into` (3, C); the sum of the cross-entropies, and what `gradient` needs."""
    z, y, weight = (x.numpy() for x in batch)
    n, d = z.shape
    stats = np.empty((n, 4), np.float32), np.empty((n, 2), np.int32)
    fixed = z, y, weight, _step_numbers(settings.points, settings.smoothing)
    run = row_loops.block_forward if 1 < d <= FEW else row_loops.row_forward
    ranges = parts(n, n * d)
    if len(ranges) == 1:
        return run(*fixed, 0, n, *stats, into), stats
    sums = np.zeros((len(ranges), 3, d))
    jobs = [partial(run, *fixed, start, stop, *stats, part) for (start, stop), part in zip(ranges, sums, strict=True)]
    losses = sum(in_threads(jobs))
    into += sums.sum(0)
    return losses, stats


def row_gradient(
    batch: Batch, settings: Settings, stats: Stats, by_tp: Floats, by_predicted: Floats, by_losses: np.float32
) -> Tensor:
    """dL/dlogits from dL by the counts."""
    z, y, weight = (x.numpy() for x in batch)
    found = np.empty_like(z)  # laid out as z is
    numbers = _step_numbers(settings.points, settings.smoothing)
    rest = *stats, by_tp, by_predicted, by_losses, found
    run = row_loops.block_backward if 1 < z.shape[1] <= FEW_BACK else row_loops.row_backward
    ranges = parts(z.shape[0], z.size)
    in_threads([partial(run, z, y, weight, numbers, start, stop, *rest) for start, stop in ranges])
    return torch.from_numpy(found)


def row_forward(z: Tensor, y: Tensor, weight: Tensor, settings: Settings) -> tuple[Counts, Saved]:
    batch, sums = (strided_rows(z.detach()), y.contiguous(), weight.detach().contiguous()), np.zeros((3, z.shape[1]))
    losses, (stats, top_two) = count_rows(batch, settings, sums)
    tp, actual, predicted = torch.from_numpy(sums).to(z.dtype).unbind()
    saved = *batch, torch.from_numpy(stats), torch.from_numpy(top_two)
    return Counts(tp, predicted, torch.tensor(losses, dtype=z.dtype), actual), saved


def row_backward(saved: Saved, settings: Settings, slopes: Slopes) -> Tensor:
    z, y, weight, stats, top_two = saved
    by_losses = np.float32(0 if slopes.losses is None else slopes.losses.item())
    by = slopes.tp.detach().numpy(), slopes.predicted.detach().numpy(), by_losses
    return row_gradient((z, y, weight), settings, (stats.numpy(), top_two.numpy()), *by)


NO_TOTALS = np.empty(0)


@lru_cache
def _lines_table(points: FivePoints, thresholds: tuple[float, ...]) -> NDArray[np.float32]:
    return np.array([Lines.at(tau, points) for tau in thresholds], np.float32)


def _column_arrays(batch: tuple[Tensor, ...]) -> tuple[NDArray[Any], ...]:
    """(L, M), every column a run of its own; a single one is so already."""
    return tuple(x.detach().t().contiguous().numpy() for x in batch)


def _column_sums(batch: tuple[Tensor, ...], settings: Settings) -> tuple[Doubles, float]:
    """tp of every threshold, predicted of every threshold, (actual, total) of each column, and all cross-entropies."""
    arrays, table, e = (
        _column_arrays(batch),
        _lines_table(settings.points, settings.thresholds),
        np.float32(settings.smoothing),
    )
    columns, size = arrays[0].shape
    ranges = parts(size, arrays[0].size * len(table))
    sums = np.zeros((len(ranges), columns, 3, max(2, len(table))))

    def run(start: int, stop: int, into: Doubles) -> float:
        total = 0.0
        for k in range(columns):
            z, y, w = (x[k] for x in arrays)
            total += column_loops.column_forward(z, y, w, table, e, settings.losses, start, stop, into[k])
        return total

    losses = in_threads([partial(run, *part, into) for part, into in zip(ranges, sums, strict=True)])
    return sums.sum(0) if len(ranges) > 1 else sums[0], sum(losses)


def count_columns(
    batch: tuple[Tensor, ...], settings: Settings, into: Doubles, two_classes: bool
) -> tuple[float, Doubles]:
    """tp, actual and predicted of every column at the one threshold into `into` (3, L), or those of both classes of the
    one column into (3, 2); the sum of the cross-entropies, and the totals, which two classes have in their counts."""
    sums, losses = _column_sums(batch, settings)
    tp, predicted, actual, total = sums[:, 0, 0], sums[:, 1, 0], sums[:, 2, 0], sums[:, 2, 1]
    if not two_classes:
        into[0], into[1], into[2] = tp, actual, predicted
        return losses, total
    into[:, 1] = tp[0], actual[0], predicted[0]
    into[:, 0] = total[0] - actual[0] - predicted[0] + tp[0], total[0] - actual[0], total[0] - predicted[0]
    return losses, NO_TOTALS


def column_forward(batch: tuple[Tensor, ...], settings: Settings) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """tp and predicted (G, L), the sum of cross-entropies, actual and total (L,) of z, y, weight (M, L)."""
    sums, losses = _column_sums(batch, settings)
    added, g = torch.from_numpy(sums).float(), len(settings.thresholds)
    return added[:, 0, :g].t(), added[:, 1, :g].t(), torch.tensor(losses), added[:, 2, 0], added[:, 2, 1]


def column_gradient(
    batch: tuple[Tensor, ...], settings: Settings, by_tp: Floats, by_predicted: Floats, by_losses: np.float32
) -> Tensor:
    """dL/dlogits (M, L) from dL by the counts (L, G)."""
    arrays, table, e = (
        _column_arrays(batch),
        _lines_table(settings.points, settings.thresholds),
        np.float32(settings.smoothing),
    )
    columns, size = arrays[0].shape
    found = np.empty((columns, size), np.float32)

    def run(start: int, stop: int) -> None:
        for k in range(columns):
            z, y, w = (x[k] for x in arrays)
            column_loops.column_backward(z, y, w, table, e, start, stop, by_tp[k], by_predicted[k], by_losses, found[k])

    in_threads([partial(run, *part) for part in parts(size, found.size * len(table))])
    return torch.from_numpy(found).t()


def column_backward(
    batch: tuple[Tensor, ...], settings: Settings, tp: Tensor, predicted: Tensor, losses: Tensor | None
) -> Tensor:
    """dL/dlogits (M, L) from dL/dtp and dL/dpredicted (G, L)."""
    by_tp, by_predicted = (np.ascontiguousarray(x.detach().numpy().T) for x in (tp, predicted))
    return column_gradient(batch, settings, by_tp, by_predicted, np.float32(0 if losses is None else losses.item()))


@lru_cache
def _form_numbers(metric: ClosedForm) -> Doubles:
    return np.array(metric.numbers).reshape(3, 4)


def metric_of(counts: Doubles, totals: Doubles, plan: Plan) -> tuple[float, Doubles]:
    """1 - metric of tp, actual and predicted (3, C), and its slopes by tp and predicted (2, C)."""
    slopes, form = np.empty((2, counts.shape[1])), plan.metric
    loop = agreement_and_slopes if form.name in AGREEMENTS else value_and_slopes
    return loop(counts, totals, _form_numbers(form), form.code, slopes), slopes


def by_column(slopes: NDArray[Any]) -> NDArray[Any]:
    """Slopes by tp and predicted of the one column, (2, 1), from those by the counts of both its classes, (2, 2)."""
    no, yes = slopes[:, :1], slopes[:, 1:]
    return np.stack([yes[0] + no[0], yes[1] - no[1] - no[0]])


class CompiledLoss(torch.autograd.Function):
    """1 - metric + anchor * cross-entropy; `hook` may change the sums before the metric is taken of them."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        y: Tensor,
        weight: Tensor,
        points: FivePoints,
        plan: Plan,
        hook: "CountsHook | None" = None,
        eager: Eager | None = None,
    ) -> Tensor:
        detached = logits.detach()
        saved = detached if plan.thresholds else strided_rows(detached), y.contiguous(), weight.contiguous()
        ctx.save_for_backward(*saved, logits)
        ctx.eager = eager
        ctx.settings, ctx.two_classes, totals = plan.settings(points), plan.two_classes, NO_TOTALS
        classes = 2 if plan.two_classes else logits.shape[1]
        vector = np.zeros(3 * classes + 2)
        counts = vector[:-2].reshape(3, classes)
        if not plan.thresholds:
            vector[-2], ctx.stats = count_rows(saved, ctx.settings, counts)
        else:
            vector[-2], totals = count_columns(saved, ctx.settings, counts, plan.two_classes)
        if plan.anchor or hook is not None:
            vector[-1] = (counts[1] if totals is NO_TOTALS else totals).sum()
        by_counts, by_losses = (1.0, 1.0) if hook is None else hook(vector)
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
        *saved, logits = ctx.saved_tensors
        settings, factor = ctx.settings, by_loss.item()
        with np.errstate(over="ignore", invalid="ignore"):  # a gradient scaler tries factors that are too large
            slopes = (factor * ctx.slopes).astype(np.float32)
            by_losses = np.float32(factor * ctx.by_losses)
        if not settings.thresholds:
            gradient = row_gradient(saved, settings, ctx.stats, slopes[0], slopes[1], by_losses)
        else:
            by_tp, by_predicted = by_column(slopes) if ctx.two_classes else slopes
            gradient = column_gradient(saved, settings, by_tp[:, None], by_predicted[:, None], by_losses)
        gradient = twice_differentiable(gradient, (logits, saved[1], saved[2]), (by_loss,), ctx.eager)
        return gradient, None, None, None, None, None, None


_apply: Any = fast_apply(CompiledLoss)


def fused_loss(
    logits: Tensor,
    y: Tensor,
    weight: Tensor,
    points: FivePoints,
    plan: Plan,
    hook: "CountsHook | None" = None,
    eager: Eager | None = None,
) -> Tensor:
    """See `dispatch.fused_loss`."""
    return _apply(logits, y, weight, points, plan, hook, eager)  # type: ignore[no-any-return]
