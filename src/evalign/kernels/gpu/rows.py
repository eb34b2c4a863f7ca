"""Row counts on a GPU by Triton: the logits are read, nothing of their size is kept, no value goes to the host."""

from typing import Any

import torch
from torch import Tensor

from evalign.kernels.gpu.launch import Launcher, cdiv
from evalign.kernels.gpu.row_kernels import columns_kernel, gradient_kernel, stats_kernel
from evalign.kernels.gpu.tiles import WHOLE, tiles
from evalign.kernels.plan import Counts, FivePoints, Kept, Settings, Slopes

launch_stats, launch_columns, launch_gradient = map(Launcher, (stats_kernel, columns_kernel, gradient_kernel))


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
    batch, d = rows_of(z.detach(), y, weight), z.shape[1]
    if d > WHOLE:
        counts, more = streamed_counts(Batch(*batch, settings))
        return counts, (*batch, *more)
    added, kept = tiles(*batch, settings).counts(*batch, settings.points.temperature)
    tp, predicted, actual = added[: 3 * d].view(3, d).unbind()
    return Counts(tp, predicted, added[3 * d], actual), (*batch, kept)


def streamed_counts(batch: Batch) -> tuple[Counts, Kept]:
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


def backward(kept: Kept, settings: Settings, slopes: Slopes) -> Tensor:
    z, y, weight, more = kept
    by_losses = slopes.tp if slopes.losses is None else slopes.losses
    by = slopes.tp, slopes.tp, slopes.predicted, by_losses
    losses = slopes.losses is not None
    if z.shape[1] <= WHOLE:
        return tiles(z, y, weight, settings).gradient(z, y, weight, more, settings.points.temperature, by, losses)
    return gradient(Batch(z, y, weight, settings), more, by, losses)


def gradient(
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
    launch_gradient(
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
