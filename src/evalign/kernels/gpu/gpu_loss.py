"""The fused loss on a GPU: Triton kernels from the logits to the loss and back.

The logits are read in place, nothing of their size is saved for the backward pass, and no value goes to the
host. Up to `TILE_CLASSES` classes there is one kernel forward and one backward (`loss_plans`); longer rows take three
and one.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from evalign._batch import rows_of_images
from evalign.confusion import Confusion
from evalign.kernels.gpu.device_functions import GROUP, value_of_counts
from evalign.kernels.gpu.launch import Launcher, cdiv, next_power_of_2
from evalign.kernels.gpu.long_row_kernels import row_columns_kernel, row_gradient_kernel, stats_kernel
from evalign.kernels.gpu.loss_plans import (
    COUNTS_ONLY,
    ENTRIES,
    ColumnGeometry,
    LossPlan,
    launch_column_gradient,
    launch_columns,
    loss_plan,
    row_plan,
    saved_size,
)
from evalign.kernels.plan import (
    AGREEMENTS,
    TILE_CLASSES,
    ClosedForm,
    Counts,
    Eager,
    FivePoints,
    KernelSettings,
    LaunchPlan,
    Plan,
    Saved,
    Slopes,
    twice_differentiable,
)
from evalign.kernels.private_apis import fast_apply

launch_stats, launch_row_columns = Launcher(stats_kernel), Launcher(row_columns_kernel)
launch_row_gradient = Launcher(row_gradient_kernel)


class Batch:
    """Rows as kernels take them: their pointers, and the key of the compiled programs.

    Without weights every label has weight 1, except the `ignored` one.
    """

    __slots__ = ("arguments", "constants", "device", "key", "shape", "z")

    def __init__(self, z: Tensor, y: Tensor, weight: Tensor | None, settings: KernelSettings, ignored: int = 0) -> None:
        points, smoothing, losses, _ = settings
        labels, step = (y, y if weight is None else weight), _step_arguments(points, z)
        self.z, self.shape, self.device = z, z.shape, z.get_device()
        self.arguments: tuple[Any, ...] = (z, *labels, *step, float(smoothing), ignored)
        self.constants = points.temperature is not None, weight is not None, losses, smoothing > 0
        kinds = z.dtype, y.dtype, labels[1].dtype, step[0].dtype
        self.key = kinds, z.shape[1], z.stride(0), z.data_ptr() % 16, ignored


def rows_of(z: Tensor, y: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """A batch with contiguous rows."""
    if z.stride(1) != 1:
        z = z.contiguous()
    return z, y.contiguous(), None if weight is None else weight.contiguous()


def row_forward(z: Tensor, y: Tensor, weight: Tensor, settings: KernelSettings) -> tuple[Counts, Saved]:
    batch, d = rows_of(z.detach(), y, weight), z.shape[1]
    if d > TILE_CLASSES:
        counts, more = streamed_counts(Batch(*batch, settings))
        return counts, (*batch, *more)
    added, saved = row_plan(*batch, settings).counts(*batch, settings.points.temperature)
    tp, predicted, actual = added[: 3 * d].view(3, d).unbind()
    return Counts(tp, predicted, added[3 * d], actual), (*batch, saved)


def streamed_counts(batch: Batch) -> tuple[Counts, Saved]:
    """Counts of rows that are too long for one tile, in two kernels; and the rows' sums."""
    (n, d), z = batch.shape, batch.z
    annealed, weighted, losses, _ = batch.constants
    stats = torch.empty((7, n), dtype=torch.float32, device=z.device)
    each = stats.new_empty(n) if losses else stats
    block, warps = along(d)
    launch_stats(
        batch.device, batch.key, (n, 1, 1), (*batch.arguments, stats, each, n, d, z.stride(0)),
        (*batch.constants, d % block == 0, block), warps,
    )  # fmt: skip
    rows, block, warps = down(d)
    across = cdiv(d, block)
    chunk = rows * max(1, cdiv(n, rows * max(1, 2048 // across)))
    parts = stats.new_empty(cdiv(n, chunk), 3, d)
    arguments = *batch.arguments[:6], batch.arguments[7]  # all but the smoothing
    launch_row_columns(
        batch.device, batch.key, (parts.shape[0], across, 1),
        (*arguments, stats, parts, n, d, z.stride(0), chunk),
        (annealed, weighted, d % block == 0, rows, block), warps,
    )  # fmt: skip
    tp, predicted, actual = (parts[0] if parts.shape[0] == 1 else parts.sum(0)).unbind()
    return Counts(tp, predicted, each.sum() if losses else stats.new_empty(()), actual), (stats,)


def row_backward(saved: Saved, settings: KernelSettings, slopes: Slopes) -> Tensor:
    z, y, weight, more = saved
    by_losses = slopes.tp if slopes.losses is None else slopes.losses
    by = slopes.tp, slopes.tp, slopes.predicted, by_losses
    losses = slopes.losses is not None
    if z.shape[1] <= TILE_CLASSES:
        return row_plan(z, y, weight, settings).gradient(z, y, weight, more, settings.points.temperature, by, losses)
    return row_gradient(Batch(z, y, weight, settings), more, by, losses)


def row_gradient(
    batch: Batch, stats: Tensor, by: tuple[Tensor, Tensor, Tensor, Tensor], losses: bool, *, packed: bool = False
) -> Tensor:
    """dL/dz from `by`: by_loss, by_tp, by_predicted and by_losses; `stats` are from `streamed_counts`.

    If `packed`, the last three are one vector, to be multiplied by `by_loss`, which is not read otherwise.
    """
    (n, d), z = batch.shape, batch.z
    annealed, weighted, *_ = batch.constants
    found = torch.empty((n, d), dtype=z.dtype, device=z.device)
    if n == 0:
        return found
    rows, block, warps = back_along(d)
    launch_row_gradient(
        batch.device, (batch.key, by[0].dtype, by[1].data_ptr() % 16, by[2].data_ptr() % 16), (cdiv(n, rows), 1, 1),
        (*batch.arguments, stats, *by, found, n, d, z.stride(0)),
        (annealed, weighted, losses, packed, d % block == 0, rows, block), warps,
    )  # fmt: skip
    return found


def _step_arguments(points: FivePoints, z: Tensor) -> tuple[Any, float, float]:
    """Pointer to the temperature, or the numbers of the step; `z` replaces a pointer that is not read."""
    return (z if points.temperature is None else points.temperature), float(points.low), float(points.reach)


# Rows and classes of one program, and its warps; beyond 8192 classes the fastest of those that
# `benchmarks/tune_tiles.py` times, on an H200 at 32768.


def along(d: int) -> tuple[int, int]:
    """Classes, and warps: of one row."""
    return (2048, 8) if d <= 8192 else (4096, 8)


def down(d: int) -> tuple[int, int, int]:
    return 4, 512, 4


def back_along(d: int) -> tuple[int, int, int]:
    """Two rows per program, which halves the reads of class slopes; long rows are faster alone."""
    return (2, 1024, 8) if d <= 8192 else (1, 4096, 16)


def loss_and_slopes(
    tp: Tensor,
    predicted: Tensor,
    actual: Tensor,
    total: Tensor,
    metric: ClosedForm,
    *,
    per_label: bool,
    present: Tensor | None = None,
    losses: Tensor | None = None,
    anchor: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """1 - metric + anchor * losses / total (0 for empty counts), and its derivatives.

    They are those of tp (d), predicted (d) and, if given, losses (1), in one vector. A macro mean is over the classes
    that are `present`, by default those with labels.
    """
    d = tp.shape[0]
    tp, predicted, actual, total = (x.contiguous() for x in (tp, predicted, actual, total))
    loss, slopes = tp.new_empty(()), tp.new_empty(2 * d + 1)
    value_of_counts[(1,)](
        tp, predicted, actual, total, tp if losses is None else losses, tp if present is None else present, loss,
        slopes, d, float(anchor), *metric.numbers, FORM=metric.code, LOSSES=losses is not None,
        MASKED=present is not None, PER_LABEL=per_label, BLOCK=block(d, metric), num_warps=4 if d <= 2048 else 16,
    )  # fmt: skip
    return loss, slopes


def block(d: int, metric: ClosedForm) -> int:
    """Classes per block: as many as registers allow; a float64 takes two."""
    return min(4096 if metric.name in AGREEMENTS else 8192, next_power_of_2(max(d, 2)))


class LossOfCounts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tp: Tensor, predicted: Tensor, c: Confusion, metric: ClosedForm, eager: Callable[[Confusion], Tensor]
    ) -> Tensor:
        loss, slopes = loss_and_slopes(
            tp, predicted, c.actual, c.total, metric, per_label=c.multilabel, present=c.present
        )
        ctx.save_for_backward(slopes, tp, predicted)
        ctx.c, ctx.eager = c, eager
        return loss

    @staticmethod
    def backward(ctx: Any, by_loss: Tensor) -> tuple[Tensor | None, ...]:
        slopes, tp, predicted = ctx.saved_tensors
        if torch.is_grad_enabled():
            loss = ctx.eager(ctx.c.replaced(tp=tp, predicted=predicted, matrix=None))
            by_tp, by_predicted = torch.autograd.grad(loss, (tp, predicted), by_loss, create_graph=True)
        else:
            by_tp, by_predicted = (by_loss * slopes[:-1]).chunk(2)
        return by_tp, by_predicted, None, None, None


def loss_of_counts(c: Confusion, metric: ClosedForm, eager: Callable[[Confusion], Tensor]) -> Tensor:
    """1 - metric, 0 for empty counts; `c` before its labels are smoothed."""
    return LossOfCounts.apply(c.tp, c.predicted, c, metric, eager)  # type: ignore[no-any-return]


@lru_cache
def _on_device(taus: tuple[float, ...], device: torch.device) -> Tensor:
    return torch.tensor(taus, dtype=torch.float32, device=device)


def column_forward(
    saved: tuple[Tensor, ...], settings: KernelSettings
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """tp and predicted (G, L), the sum of cross-entropies, actual and total (L,) of `saved` = z, y, weight (M, L)."""
    (z, y, weight), taus = saved, settings.thresholds
    geometry = ColumnGeometry.of(z.shape, two_classes=False)
    parts = z.new_empty(geometry.programs, len(taus), 5, geometry.columns, dtype=torch.float32)
    step = _step_arguments(settings.points, z)
    launch_columns(
        z.get_device(), (z.shape, z.dtype, y.dtype, weight.dtype, step[0].dtype, z.data_ptr() % 16),
        (geometry.programs, geometry.blocks, len(taus)),
        (
            z, y, weight, step[0], parts, parts, _on_device(taus, z.device), parts, parts, *step[1:],
            float(settings.smoothing), 0, 0.0, *geometry.numbers, 5 * geometry.columns, COUNTS_ONLY.anchor,
            *COUNTS_ONLY.numbers,
        ),
        (settings.points.temperature is not None, True, settings.losses, -1, False, *geometry.tile, GROUP, 64), 4,
    )  # fmt: skip
    added = parts[0] if parts.shape[0] == 1 else parts.sum(0)
    losses = added[0, 4].sum() if settings.losses else added.new_zeros(())
    return added[:, 0], added[:, 1], losses, added[0, 2], added[0, 3]


def column_backward(
    saved: tuple[Tensor, ...], settings: KernelSettings, tp: Tensor, predicted: Tensor, losses: Tensor | None
) -> Tensor:
    """dL/dlogits (M, L) from dL/dtp and dL/dpredicted (G, L)."""
    (z, y, weight), taus = saved, settings.thresholds
    tp, predicted, found = tp.contiguous(), predicted.contiguous(), torch.empty_like(z)
    step = _step_arguments(settings.points, z)
    kinds = z.dtype, y.dtype, weight.dtype, step[0].dtype, tp.dtype
    launch_column_gradient(
        z.get_device(), (z.shape, kinds, *(x.data_ptr() % 16 for x in (z, tp, predicted))),
        (max(1, cdiv(z.numel(), ENTRIES)), 1, 1),
        (
            z, y, weight, step[0], _on_device(taus, z.device), tp, tp, predicted, tp if losses is None else losses,
            found, *step[1:], float(settings.smoothing), 0, 0.0, z.numel(), z.shape[1], 1, len(taus),
        ),
        (settings.points.temperature is not None, True, losses is not None, False, ENTRIES), 4,
    )  # fmt: skip
    return found


class LongRowLoss(NamedTuple):
    """Loss of rows that are too long for one tile."""

    settings: KernelSettings
    plan: Plan

    def loss(
        self, z: Tensor, y: Tensor, weight: Tensor | None, temperature: Tensor | None, eager: Eager | None = None
    ) -> Tensor:
        return _apply(z, y, weight, temperature, self, eager)  # type: ignore[no-any-return]

    def forward(self, z: Tensor, y: Tensor, weight: Tensor | None, temperature: Tensor | None) -> tuple[Tensor, ...]:
        """The loss, its slopes and the rows' sums; without autograd."""
        plan = self.plan
        (tp, predicted, losses, actual), more = streamed_counts(self._rows(z, y, weight, temperature))
        loss, slopes = loss_and_slopes(
            tp, predicted, actual, actual.sum(), plan.metric, per_label=False, losses=losses if plan.anchor else None,
            anchor=plan.anchor,
        )  # fmt: skip
        return loss, slopes, *more

    def backward(
        self, z: Tensor, y: Tensor, weight: Tensor | None, temperature: Tensor | None, slopes: Tensor, stats: Tensor,
        by_loss: Tensor,
    ) -> Tensor:  # fmt: skip
        by = by_loss, slopes, slopes, slopes
        return row_gradient(self._rows(z, y, weight, temperature), stats, by, bool(self.plan.anchor), packed=True)

    def _rows(self, z: Tensor, y: Tensor, weight: Tensor | None, temperature: Tensor | None) -> Batch:
        points = self.settings.points._replace(temperature=temperature)
        return Batch(z, y, weight, self.settings._replace(points=points), self.plan.ignored)


class LongRowNode(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, z: Tensor, y: Tensor, weight: Tensor | None, temperature: Tensor | None, how: LongRowLoss,
        eager: Eager | None,
    ) -> Tensor:  # fmt: skip
        loss, *saved = how.forward(z, y, weight, temperature)
        ctx.save_for_backward(z, y, weight, temperature, *saved)
        ctx.how, ctx.eager = how, eager
        return loss

    @staticmethod
    def backward(ctx: Any, by_loss: Tensor) -> tuple[Tensor | None, ...]:
        z, y, weight, temperature, slopes, stats = ctx.saved_tensors
        gradient = ctx.how.backward(z, y, weight, temperature, slopes, stats, by_loss)
        return twice_differentiable(gradient, (z, y, weight), (by_loss,), ctx.eager), None, None, None, None, None


_apply: Any = fast_apply(LongRowNode)


def arranged(logits: Tensor, y: Tensor, weight: Tensor | None, columns: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """The batch in the layout of the kernels: images with many classes, classes last or soft labels, as rows."""
    soft = logits.dim() == y.dim()
    if not columns and logits.dim() > 2 and (is_last(logits) or soft or logits.shape[1] > TILE_CLASSES):
        logits, y = rows_of_images(logits), rows_of_images(y) if soft else y
    return _contiguous(logits, y, weight, columns)


def fused_loss(
    logits: Tensor, y: Tensor, weight: Tensor | None, settings: KernelSettings, plan: Plan, hook: None = None,
    eager: Eager | None = None,
) -> Tensor:  # fmt: skip
    """See `dispatch.fused_loss`; there is no hook on a GPU, where one kernel computes counts and metric."""
    assert hook is None
    batch = arranged(logits, y, weight, bool(settings.thresholds))
    return _prepare(*batch, settings, plan).loss(*batch, settings.points.temperature, eager)


def forward(
    logits: Tensor, y: Tensor, weight: Tensor | None, settings: KernelSettings, plan: Plan
) -> tuple[Tensor, Tensor, Tensor]:
    """The loss of an `arranged` batch, and two tensors for `backward`; without autograd."""
    batch = _contiguous(logits, y, weight, bool(settings.thresholds))
    loss, saved, *more = _prepare(*batch, settings, plan).forward(*batch, settings.points.temperature)
    return loss, saved, more[0] if more else saved.new_empty(0)


def backward(
    logits: Tensor, y: Tensor, weight: Tensor | None, settings: KernelSettings, plan: Plan, saved: Tensor, more: Tensor,
    by_loss: Tensor,
) -> Tensor:  # fmt: skip
    batch = _contiguous(logits, y, weight, bool(settings.thresholds))
    prepared, temperature = _prepare(*batch, settings, plan), settings.points.temperature
    if isinstance(prepared, LongRowLoss):
        return prepared.backward(*batch, temperature, saved, more, by_loss)
    return prepared.backward(*batch, temperature, saved, by_loss)


def saved_like(logits: Tensor, *, columns: bool, two_classes: bool) -> tuple[Tensor, Tensor]:
    """Empty tensors in the shapes of those saved by `forward`."""
    n, d, size = logits.shape[0], 1 if two_classes else logits.shape[1], 0
    if columns:
        size = 2 * d + 1
    elif logits.dim() > 2:
        size = 16 * cdiv(2 * d + 1, 16)
    elif d <= TILE_CLASSES:
        size = saved_size(n, d)
    else:
        return logits.new_empty(2 * d + 1, dtype=torch.float32), logits.new_empty((7, n), dtype=torch.float32)
    return logits.new_empty(size, dtype=torch.float32), logits.new_empty(0, dtype=torch.float32)


def is_last(images: Tensor) -> bool:
    """Whether the classes of a pixel are contiguous (channels_last)."""
    return images.movedim(1, -1).is_contiguous() and not images.is_contiguous()


def launch_plan(logits: Tensor, y: Tensor, settings: KernelSettings, plan: Plan) -> LaunchPlan | None:
    """See `dispatch.launch_plan`."""
    scores = 1 if settings.thresholds or logits.dim() < 2 else logits.shape[1]
    labels_fit = y.dtype == torch.int64 or (bool(settings.thresholds) and y.dtype == torch.float32)
    if logits.numel() != scores * y.numel() or not labels_fit:
        return None
    if not settings.thresholds and logits.dim() > 2 and logits.shape[1] > TILE_CLASSES:
        return None
    z, labels, _ = _contiguous(logits, y, None, bool(settings.thresholds))
    return _prepare(z, y, None, settings, plan) if z is logits and labels is y else None


def _contiguous(
    logits: Tensor, y: Tensor, weight: Tensor | None, columns: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The batch in the layout of the kernels: each row must be contiguous."""
    if columns or logits.dim() != 2 or logits.stride(1) != 1:
        logits = logits.contiguous()
    return logits, y.contiguous(), None if weight is None else weight.contiguous()


def _prepare(
    z: Tensor, y: Tensor, weight: Tensor | None, settings: KernelSettings, plan: Plan
) -> LossPlan | LongRowLoss:
    if not settings.thresholds and z.dim() == 2 and z.shape[1] > TILE_CLASSES:
        return LongRowLoss(settings, plan)
    return loss_plan(z, y, weight, settings, plan)
