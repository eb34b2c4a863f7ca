"""Row counts on a GPU by Triton: the logits are read, nothing of their size is kept, no value goes to the host."""

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from evalign.kernels.interface import Counts, Kept, Slopes
from evalign.kernels.points import FivePoints, Settings
from evalign.kernels.triton_launch import Launcher, cdiv, next_power_of_2, scratch
from evalign.kernels.triton_row_kernels import columns_kernel, gradient_kernel, stats_kernel
from evalign.kernels.triton_sums import GROUP
from evalign.kernels.triton_tile_kernels import loss_kernel, tile_gradient_kernel

WHOLE = 1024  # classes up to which rows are tiles of one kernel
launch_loss, launch_tile_gradient = Launcher(loss_kernel), Launcher(tile_gradient_kernel)
launch_stats, launch_columns, launch_gradient = map(Launcher, (stats_kernel, columns_kernel, gradient_kernel))


class Ending(NamedTuple):
    """What a kernel does once the counts are summed: nothing, or the loss and its slopes; see `value_of_counts`."""

    average: int = -1
    anchor: float = 0.0
    form: tuple[float, ...] = (0.0,) * 12


COUNTS_ONLY = Ending()


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


def forward(z: Tensor, y: Tensor, weight: Tensor, settings: Settings) -> tuple[Counts, Kept]:
    kept = rows_of(z.detach(), y, weight)
    batch, d = Batch(*kept, settings), z.shape[1]
    if d > WHOLE:
        counts, more = streamed_counts(batch)
        return counts, (*kept, *more)
    counts_of = torch.empty(_width(d), dtype=torch.float32, device=z.device)
    tiled(batch, COUNTS_ONLY, counts_of, counts_of, counts_of)
    tp, predicted, actual = counts_of[: 3 * d].view(3, d).unbind()
    return Counts(tp, predicted, counts_of[3 * d], actual), kept


def tiled(batch: Batch, ending: Ending, loss: Tensor, slopes: Tensor, counts: Tensor | None = None) -> None:
    """Counts of rows up to WHOLE classes, in one kernel; the loss and its slopes where the ending has any."""
    (n, d), z = batch.shape, batch.z
    rows, block, warps = tile(d)
    chunk, programs, groups, width, size, wide = _division(n, d, rows)
    counters, room = scratch(z, groups + 1, size)
    launch_loss(
        batch.device, batch.key, (programs, 1, 1),
        (
            *batch.arguments, room, counters, room if counts is None else counts, loss, slopes, n, d, z.stride(0),
            chunk, width, ending.anchor, *ending.form,
        ),
        (*batch.constants, ending.average, rows, block, GROUP, wide), warps,
    )  # fmt: skip


@lru_cache(1024)
def _division(n: int, d: int, rows: int) -> tuple[int, int, int, int, int, int]:
    """Rows of a program, programs, groups of them, places of a vector of counts, of all, and of what is added at once.

    Every other vector starts where 16 bytes are read at once.
    """
    chunk = rows * max(1, cdiv(n, rows * GROUP * GROUP))
    programs, width = max(1, cdiv(n, chunk)), _width(d)
    groups = cdiv(programs, GROUP)
    return chunk, programs, groups, width, (1 + groups + programs) * width, min(256, next_power_of_2(width))


def _width(d: int) -> int:
    return 16 * cdiv(3 * d + 2, 16)


def streamed_counts(batch: Batch) -> tuple[Counts, Kept]:
    """The same for rows that are too long for one tile, in two kernels; and the rows' sums and places."""
    (n, d), z = batch.shape, batch.z
    annealed, weighted, losses, _ = batch.constants
    stats = torch.empty((6, n), dtype=torch.float32, device=z.device)
    places = torch.empty((2, n), dtype=torch.int32, device=z.device)
    each = stats.new_empty(n) if losses else stats
    block, warps = along(d)
    launch_stats(
        batch.device, batch.key, (n, 1, 1), (*batch.arguments, stats, places, each, n, d, z.stride(0)),
        (*batch.constants, d % block == 0, block), warps,
    )  # fmt: skip
    rows, block, warps = down(d)
    across = cdiv(d, block)
    chunk = rows * max(1, cdiv(n, rows * max(1, 2048 // across)))
    parts = stats.new_empty(cdiv(n, chunk), 3, d)
    arguments = *batch.arguments[:6], batch.arguments[7]  # all but the smoothing
    launch_columns(
        batch.device, batch.key, (parts.shape[0], across, 1),
        (*arguments, stats, places, parts, n, d, z.stride(0), chunk),
        (annealed, weighted, d % block == 0, rows, block), warps,
    )  # fmt: skip
    tp, predicted, actual = (parts[0] if parts.shape[0] == 1 else parts.sum(0)).unbind()
    return Counts(tp, predicted, each.sum() if losses else stats.new_empty(()), actual), (stats, places)


def backward(kept: Kept, settings: Settings, slopes: Slopes) -> Tensor:
    z, y, weight, *more = kept
    by_losses = slopes.tp if slopes.losses is None else slopes.losses
    by = slopes.tp, slopes.tp, slopes.predicted, by_losses
    return gradient(Batch(z, y, weight, settings), tuple(more), by, slopes.losses is not None)


def gradient(
    batch: Batch, more: Kept, by: tuple[Tensor, Tensor, Tensor, Tensor], losses: bool, *, packed: bool = False
) -> Tensor:
    """dL/dz from `by`: by_loss, by_tp, by_predicted and by_losses; `more` is what `streamed_counts` gave.

    Where they are `packed`, the last three are one vector, and are multiplied by `by_loss`; else that is not read.
    """
    (n, d), z = batch.shape, batch.z
    annealed, weighted, *_ = batch.constants
    found = torch.empty((n, d), dtype=z.dtype, device=z.device)
    if n == 0:
        return found
    constants = annealed, weighted, losses, packed
    key = batch.key, by[0].dtype, by[1].data_ptr() % 16, by[2].data_ptr() % 16
    if d <= WHOLE:
        rows, block, warps = tile(d)
        launch_tile_gradient(
            batch.device, key, (cdiv(n, rows), 1, 1), (*batch.arguments, *by, found, n, d, z.stride(0)),
            (*constants, rows, block), warps,
        )  # fmt: skip
    else:
        rows, block, warps = back_along(d)
        launch_gradient(
            batch.device, key, (cdiv(n, rows), 1, 1), (*batch.arguments, *more, *by, found, n, d, z.stride(0)),
            (*constants, d % block == 0, rows, block), warps,
        )  # fmt: skip
    return found


def step_arguments(points: FivePoints, z: Tensor) -> tuple[Any, float, float]:
    """Where the temperature lies, or the step's numbers; `z` stands in for a pointer that is not read."""
    return (z if points.temperature is None else points.temperature), float(points.low), float(points.reach)


# Rows and classes of one program, and its warps.


@lru_cache
def tile(d: int) -> tuple[int, int, int]:
    block = next_power_of_2(max(d, 16))
    return 2048 // block, block, 8


def along(d: int) -> tuple[int, int]:
    """Few rows at a time, so that a row is still in the cache when it is swept again."""
    return (2048, 8) if d <= 8192 else (8192, 32)


def down(d: int) -> tuple[int, int, int]:
    return 4, 512, 8


def back_along(d: int) -> tuple[int, int, int]:
    """Two rows, so that the slopes of the classes are read half as often."""
    return (2, 1024, 8) if d <= 8192 else (2, 4096, 32)
