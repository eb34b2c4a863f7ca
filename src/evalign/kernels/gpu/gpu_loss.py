"""The fused loss on a GPU: Triton kernels from the logits to the loss and back.

The logits are read where they are, nothing of their size is saved for the backward pass, and no value goes to the
host. Up to `TILE_CLASSES` classes there is one kernel forward and one backward (`tile_launches`); longer rows take
three and one.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from evalign.kernels.gpu.column_kernels import column_counts_kernel, column_gradient_kernel
from evalign.kernels.gpu.launch import Launcher, cdiv, next_power_of_2, workspace
from evalign.kernels.gpu.metric_kernels import loss_and_slopes
from evalign.kernels.gpu.metric_kernels import loss_of_counts as loss_of_counts
from evalign.kernels.gpu.row_kernels import row_columns_kernel, row_gradient_kernel, stats_kernel
from evalign.kernels.gpu.step_kernels import GROUP
from evalign.kernels.gpu.tile_launches import COUNTS_ONLY, TILE_CLASSES, Ending, tiles
from evalign.kernels.plan import Counts, FivePoints, LaunchPlan, Plan, Saved, Settings, Slopes, first_order_only
from evalign.kernels.private_apis import fast_apply

launch_stats, launch_columns = Launcher(stats_kernel), Launcher(row_columns_kernel)
launch_row_gradient = Launcher(row_gradient_kernel)


class Batch:
    """Rows as kernels take them: their pointers, and the key of what is compiled for them.

    Without weights every label counts 1, but for the `ignored` one.
    """

    __slots__ = ("arguments", "constants", "device", "key", "shape", "z")

    def __init__(self, z: Tensor, y: Tensor, weight: Tensor | None, settings: Settings, ignored: int = 0) -> None:
        points, smoothing, losses, _ = settings
        labels, step = (y, y if weight is None else weight), step_arguments(points, z)
        self.z, self.shape, self.device = z, z.shape, z.get_device()
        self.arguments: tuple[Any, ...] = (z, *labels, *step, float(smoothing), ignored)
        self.constants = points.temperature is not None, weight is not None, losses, smoothing > 0
        kinds = z.dtype, y.dtype, labels[1].dtype, step[0].dtype
        self.key = kinds, z.shape[1], z.stride(0), z.data_ptr() % 16, ignored


def rows_of(z: Tensor, y: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """With every row in one piece."""
    if z.stride(1) != 1:
        z = z.contiguous()
    return z, y.contiguous(), None if weight is None else weight.contiguous()


def row_forward(z: Tensor, y: Tensor, weight: Tensor, settings: Settings) -> tuple[Counts, Saved]:
    batch, d = rows_of(z.detach(), y, weight), z.shape[1]
    if d > TILE_CLASSES:
        counts, more = streamed_counts(Batch(*batch, settings))
        return counts, (*batch, *more)
    added, saved = tiles(*batch, settings).counts(*batch, settings.points.temperature)
    tp, predicted, actual = added[: 3 * d].view(3, d).unbind()
    return Counts(tp, predicted, added[3 * d], actual), (*batch, saved)


def streamed_counts(batch: Batch) -> tuple[Counts, Saved]:
    """The same for rows that are too long for one tile, in two kernels; and the rows' sums."""
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
    launch_columns(
        batch.device, batch.key, (parts.shape[0], across, 1),
        (*arguments, stats, parts, n, d, z.stride(0), chunk),
        (annealed, weighted, d % block == 0, rows, block), warps,
    )  # fmt: skip
    tp, predicted, actual = (parts[0] if parts.shape[0] == 1 else parts.sum(0)).unbind()
    return Counts(tp, predicted, each.sum() if losses else stats.new_empty(()), actual), (stats,)


def row_backward(saved: Saved, settings: Settings, slopes: Slopes) -> Tensor:
    z, y, weight, more = saved
    by_losses = slopes.tp if slopes.losses is None else slopes.losses
    by = slopes.tp, slopes.tp, slopes.predicted, by_losses
    losses = slopes.losses is not None
    if z.shape[1] <= TILE_CLASSES:
        return tiles(z, y, weight, settings).gradient(z, y, weight, more, settings.points.temperature, by, losses)
    return row_gradient(Batch(z, y, weight, settings), more, by, losses)


def row_gradient(
    batch: Batch, stats: Tensor, by: tuple[Tensor, Tensor, Tensor, Tensor], losses: bool, *, packed: bool = False
) -> Tensor:
    """dL/dz from `by`: by_loss, by_tp, by_predicted and by_losses; `stats` is what `streamed_counts` gave.

    Where they are `packed`, the last three are one vector, and are multiplied by `by_loss`; else that is not read.
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


def step_arguments(points: FivePoints, z: Tensor) -> tuple[Any, float, float]:
    """Where the temperature lies, or the step's numbers; `z` stands in for a pointer that is not read."""
    return (z if points.temperature is None else points.temperature), float(points.low), float(points.reach)


# Rows and classes of one program, and its warps; beyond 8192 classes the fastest of those that
# `benchmarks/tune_tiles.py` times, on an H200 at 32768.


def along(d: int) -> tuple[int, int]:
    """Classes, and warps: of one row."""
    return (2048, 8) if d <= 8192 else (4096, 8)


def down(d: int) -> tuple[int, int, int]:
    return 4, 512, 4


def back_along(d: int) -> tuple[int, int, int]:
    """Two rows read the slopes of the classes half as often; long ones are faster alone."""
    return (2, 1024, 8) if d <= 8192 else (1, 4096, 16)


COLUMN_BLOCK = 1024
launch_column_counts, launch_column_gradient = Launcher(column_counts_kernel), Launcher(column_gradient_kernel)


@lru_cache
def _thresholds_on_device(taus: tuple[float, ...], device: torch.device) -> Tensor:
    return torch.tensor(taus, dtype=torch.float32, device=device)


class Entries:
    """Logits, labels and weights (M, L) as kernels take them; see `triton_rows.Batch`."""

    __slots__ = ("arguments", "constants", "device", "key", "z")

    def __init__(self, z: Tensor, y: Tensor, weight: Tensor | None, settings: Settings, ignored: int = 0) -> None:
        points, smoothing, losses, taus = settings
        labels, step = (y, y if weight is None else weight), step_arguments(points, z)
        self.z, self.device = z, z.get_device()
        self.arguments: tuple[Any, ...] = (
            z,
            *labels,
            _thresholds_on_device(taus, z.device),
            *step,
            float(smoothing),
            ignored,
        )
        self.constants = points.temperature is not None, weight is not None, losses
        kinds = z.dtype, y.dtype, labels[1].dtype, step[0].dtype
        self.key = kinds, z.shape[1], len(taus), z.data_ptr() % 16, ignored


def column_forward(saved: tuple[Tensor, ...], settings: Settings) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """tp and predicted (G, L), the sum of cross-entropies, actual and total (L,) of `saved` = z, y, weight (M, L)."""
    z, y, weight = saved
    (n, columns), thresholds = z.shape, len(settings.thresholds)
    chunk = _column_chunk(n)
    parts = z.new_empty(cdiv(n, chunk), thresholds, 5, columns, dtype=torch.float32)
    _launch_columns(Entries(z, y, weight, settings), (*parts.shape[:2],), chunk, 5 * columns, COUNTS_ONLY, (parts,) * 5)
    added = parts[0] if parts.shape[0] == 1 else parts.sum(0)
    losses = added[0, 4].sum() if settings.losses else added.new_zeros(())
    return added[:, 0], added[:, 1], losses, added[0, 2], added[0, 3]


def column_loss(entries: Entries, ending: Ending, loss: Tensor, slopes: Tensor, *, two_classes: bool) -> None:
    """The loss at one threshold, and its slopes by the columns' tp and predicted, and by the sum of losses."""
    n, columns = entries.z.shape
    chunk, width = _column_chunk(n), 16 * cdiv(5 * columns, 16)
    chunks = max(1, cdiv(n, chunk))
    groups = cdiv(chunks, GROUP)
    counters, floats, *_ = workspace(entries.z, groups + 1, (1 + groups + chunks) * width)
    parts = floats[(1 + groups) * width :]
    _launch_columns(
        entries, (chunks, 1), chunk, width, ending, (parts, floats, counters, loss, slopes), two_classes=two_classes
    )


def _launch_columns(
    entries: Entries, grid: tuple[int, int], chunk: int, width: int, ending: Ending, into: tuple[Tensor, ...], *,
    two_classes: bool = False,
) -> None:  # fmt: skip
    n, columns = entries.z.shape
    chunks, thresholds = grid
    launch_column_counts(
        entries.device, entries.key, (chunks, columns, thresholds),
        (*entries.arguments, *into, n, columns, chunk, width, ending.anchor, *ending.numbers),
        (*entries.constants, ending.form, two_classes, COLUMN_BLOCK, GROUP, min(128, next_power_of_2(width))), 4,
    )  # fmt: skip


def _column_chunk(n: int) -> int:
    """Entries of a column for one program: as few as fit into one level of groups."""
    return COLUMN_BLOCK * max(1, cdiv(n, COLUMN_BLOCK * GROUP * GROUP))


def column_backward(
    saved: tuple[Tensor, ...], settings: Settings, tp: Tensor, predicted: Tensor, losses: Tensor | None
) -> Tensor:
    """dL/dlogits (M, L) from dL/dtp and dL/dpredicted (G, L)."""
    z, y, weight = saved
    tp, predicted = tp.contiguous(), predicted.contiguous()
    by = tp, tp, predicted, tp if losses is None else losses
    return column_gradient(Entries(z, y, weight, settings), by, losses is not None)


def column_gradient(
    entries: Entries, by: tuple[Tensor, Tensor, Tensor, Tensor], losses: bool, *, packed: bool = False
) -> Tensor:
    """dL/dlogits; `by` and `packed` as in `triton_rows.gradient`."""
    z = entries.z
    found = torch.empty_like(z)
    annealed, weighted, _ = entries.constants
    key = entries.key, by[0].dtype, by[1].data_ptr() % 16, by[2].data_ptr() % 16, z.numel() > 2**31 - 1
    launch_column_gradient(
        entries.device, key, (cdiv(z.numel(), COLUMN_BLOCK), 1, 1),
        (*entries.arguments, *by, found, z.numel(), z.shape[1], entries.key[2]),
        (annealed, weighted, losses, packed, COLUMN_BLOCK), 4,
    )  # fmt: skip
    return found


@lru_cache(1024)
def _ending(plan: Plan) -> Ending:
    return Ending(plan.metric.code, float(plan.anchor), plan.metric.numbers)


def contiguous_batch(
    logits: Tensor, y: Tensor, weight: Tensor | None, plan: Plan
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The batch as kernels read it: of logits at least every row."""
    return rows_of(logits.contiguous() if plan.thresholds else logits, y, weight)


def prepare(z: Tensor, y: Tensor, weight: Tensor | None, points: FivePoints, plan: Plan) -> LaunchPlan:
    """What computes the loss of such batches, which are in one piece."""
    if plan.thresholds:
        return ColumnLoss(points, plan)
    if z.shape[1] > TILE_CLASSES:
        return LongRowLoss(points, plan)
    return tiles(z, y, weight, plan.settings(points), plan.ignored, _ending(plan))


class ColumnLoss(NamedTuple):
    """Yes/no problems at one threshold."""

    points: FivePoints
    plan: Plan

    def loss(self, z: Tensor, y: Tensor, weight: Tensor | None, temperature: Tensor | None) -> Tensor:
        how = ColumnLoss(self.points._replace(temperature=temperature), self.plan)
        return _apply(z, y, weight, how)  # type: ignore[no-any-return]

    def forward(self, z: Tensor, y: Tensor, weight: Tensor | None) -> tuple[Tensor, Saved]:
        loss = torch.empty((), dtype=torch.float32, device=z.device)
        slopes = torch.empty(2 * z.shape[1] + 1, dtype=torch.float32, device=z.device)
        entries = self._entries(z, y, weight)
        column_loss(entries, _ending(self.plan), loss, slopes, two_classes=self.plan.two_classes)
        return loss, (slopes,)

    def backward(self, batch: tuple[Tensor, Tensor, Tensor | None], saved: Saved, by_loss: Tensor) -> Tensor:
        (slopes,) = saved
        by = by_loss, slopes, slopes, slopes
        return column_gradient(self._entries(*batch), by, bool(self.plan.anchor), packed=True)

    def _entries(self, z: Tensor, y: Tensor, weight: Tensor | None) -> Entries:
        return Entries(z, y, weight, self.plan.settings(self.points), self.plan.ignored)


class LongRowLoss(NamedTuple):
    """Rows that are too long for one tile."""

    points: FivePoints
    plan: Plan

    def loss(self, z: Tensor, y: Tensor, weight: Tensor | None, temperature: Tensor | None) -> Tensor:
        how = LongRowLoss(self.points._replace(temperature=temperature), self.plan)
        return _apply(z, y, weight, how)  # type: ignore[no-any-return]

    def forward(self, z: Tensor, y: Tensor, weight: Tensor | None) -> tuple[Tensor, Saved]:
        plan = self.plan
        (tp, predicted, losses, actual), more = streamed_counts(self._rows(z, y, weight))
        loss, slopes = loss_and_slopes(
            tp, predicted, actual, actual.sum(), plan.metric, per_label=False, losses=losses if plan.anchor else None,
            anchor=plan.anchor,
        )  # fmt: skip
        return loss, (slopes, *more)

    def backward(self, batch: tuple[Tensor, Tensor, Tensor | None], saved: Saved, by_loss: Tensor) -> Tensor:
        slopes, stats = saved
        by = by_loss, slopes, slopes, slopes
        return row_gradient(self._rows(*batch), stats, by, bool(self.plan.anchor), packed=True)

    def _rows(self, z: Tensor, y: Tensor, weight: Tensor | None) -> Batch:
        return Batch(z, y, weight, self.plan.settings(self.points), self.plan.ignored)


class GpuLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, z: Tensor, y: Tensor, weight: Tensor | None, how: ColumnLoss | LongRowLoss) -> Tensor:
        loss, saved = how.forward(z, y, weight)
        ctx.save_for_backward(z, y, weight, *saved)
        ctx.how = how
        return loss

    @staticmethod
    def backward(ctx: Any, by_loss: Tensor) -> tuple[Tensor | None, ...]:
        z, y, weight, *saved = ctx.saved_tensors
        return first_order_only(ctx.how.backward((z, y, weight), saved, by_loss), z, by_loss), None, None, None


_apply: Any = fast_apply(GpuLoss)


def fused_loss(
    logits: Tensor, y: Tensor, weight: Tensor | None, points: FivePoints, plan: Plan, hook: None = None
) -> Tensor:
    """See `dispatch.fused_loss`; there is no hook on a GPU, where counts and metric are one kernel."""
    assert hook is None
    batch = contiguous_batch(logits, y, weight, plan)
    return prepare(*batch, points, plan).loss(*batch, points.temperature)


def launch_plan(logits: Tensor, y: Tensor, points: FivePoints, plan: Plan) -> LaunchPlan | None:
    """See `dispatch.launch_plan`."""
    z, labels, _ = contiguous_batch(logits, y, None, plan)
    return prepare(z, y, None, points, plan) if z is logits and labels is y else None
