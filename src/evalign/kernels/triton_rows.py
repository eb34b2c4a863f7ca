"""Row counts on a GPU by Triton: the logits are read, nothing of their size is kept, no value goes to the host."""

from typing import Any

import torch
import triton
from torch import Tensor

from evalign.kernels.interface import Counts, Slopes
from evalign.kernels.points import FivePoints, Settings
from evalign.kernels.triton_row_kernels import columns_kernel, gradient_kernel, stats_kernel, whole_rows_kernel

WHOLE = 1024  # classes up to which a row is one tile of one kernel
Kept = tuple[Tensor, ...]


def forward(z: Tensor, y: Tensor, weight: Tensor, settings: Settings) -> tuple[Counts, Kept]:
    z = z.detach()
    if z.stride(1) != 1:
        z = z.contiguous()
    y, weight = y.contiguous(), weight.contiguous()
    n, d = z.shape
    stats = torch.empty((4, n), dtype=torch.float32, device=z.device)
    places = torch.empty((2, n), dtype=torch.int32, device=z.device)
    each = stats.new_empty(n) if settings.losses else stats
    partial = (_whole_rows if d <= WHOLE else _streamed)(z, y, weight, settings, stats, places, each)
    tp, predicted, actual = (partial[0] if partial.shape[0] == 1 else partial.sum(0)).unbind()
    losses = each.sum() if settings.losses else stats.new_empty(())
    return Counts(tp, predicted, losses, actual), (z, y, weight, stats, places)


def _whole_rows(
    z: Tensor, y: Tensor, weight: Tensor, settings: Settings, stats: Tensor, places: Tensor, each: Tensor
) -> Tensor:
    """Sums of tp, predicted and actual over chunks of rows, (chunks, 3, d); fills `stats`, `places` and `each`."""
    points, smoothing, losses, _ = settings
    n, d = z.shape
    rows, block, warps = _tile(d)
    # A small batch is one chunk, which saves adding up; a large one has enough of them to fill a GPU.
    chunk = rows * triton.cdiv(n, rows) if n * block <= 1 << 15 else rows * max(1, n // (rows * 1024))
    partial = stats.new_empty(triton.cdiv(n, chunk), 3, d)
    whole_rows_kernel[(partial.shape[0],)](
        z, y, weight, *step_arguments(points, z), smoothing, stats, places, each, partial, n, d, z.stride(0), chunk,
        ANNEALED=points.temperature is not None, LOSSES=losses, SMOOTHING=smoothing > 0, ROWS=rows, BLOCK=block,
        num_warps=warps,
    )  # fmt: skip
    return partial


def _streamed(
    z: Tensor, y: Tensor, weight: Tensor, settings: Settings, stats: Tensor, places: Tensor, each: Tensor
) -> Tensor:
    """The same for rows that are too long for one tile, in two kernels."""
    points, smoothing, losses, _ = settings
    (n, d), annealed = z.shape, points.temperature is not None
    rows, block, warps = _tile(d)
    step = step_arguments(points, z)
    stats_kernel[(triton.cdiv(n, rows),)](
        z, y, weight, *step, smoothing, stats, places, each, n, d, z.stride(0), ANNEALED=annealed, LOSSES=losses,
        SMOOTHING=smoothing > 0, ROWS=rows, BLOCK=block, num_warps=warps,
    )  # fmt: skip
    chunk = max(4, min(64, triton.next_power_of_2(n)), triton.next_power_of_2(triton.cdiv(n, 64)))  # few, short sums
    partial = stats.new_empty(triton.cdiv(n, chunk), 3, d)
    columns_kernel[(partial.shape[0], triton.cdiv(d, 256))](
        z, y, weight, *step, stats, places, partial, n, d, z.stride(0), chunk, ANNEALED=annealed, ROWS=4, BLOCK=256,
        num_warps=4,
    )  # fmt: skip
    return partial


def backward(kept: Kept, settings: Settings, slopes: Slopes) -> Tensor:
    z, y, weight, stats, places = kept
    points, smoothing, *_ = settings
    n, d = z.shape
    gradient = torch.empty((n, d), dtype=z.dtype, device=z.device)
    rows, block, warps = _tile(d)
    gradient_kernel[(triton.cdiv(n, rows),)](
        z, y, weight, *step_arguments(points, z), smoothing, stats, places, slopes.tp, slopes.predicted,
        stats if slopes.losses is None else slopes.losses, gradient, n, d, z.stride(0),
        ANNEALED=points.temperature is not None, LOSSES=slopes.losses is not None, ROWS=rows, BLOCK=block,
        num_warps=warps,
    )  # fmt: skip
    return gradient


def step_arguments(points: FivePoints, z: Tensor) -> tuple[Any, float, float]:
    """Where the temperature lies, or the step's numbers; `z` stands in for a pointer that is not read."""
    return (z if points.temperature is None else points.temperature), points.low, points.reach


def _tile(d: int) -> tuple[int, int, int]:
    """Rows and classes of one program's tile, and its warps; of those tried on an H200, the quickest."""
    block = min(2048, triton.next_power_of_2(max(d, 16)))
    if block <= 256:
        return 1024 // block, block, 4
    return 1, block, 2 if block == 512 else 4
