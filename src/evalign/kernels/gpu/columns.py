"""Counts of yes/no problems on a GPU by Triton, from rows (M, L) as they come: no transposed copy."""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from evalign.kernels.gpu.column_kernels import counts_kernel, gradient_kernel
from evalign.kernels.gpu.launch import Launcher, cdiv, next_power_of_2, scratch
from evalign.kernels.gpu.rows import step_arguments
from evalign.kernels.gpu.step_kernels import GROUP
from evalign.kernels.gpu.tiles import COUNTS_ONLY, Ending
from evalign.kernels.plan import Settings

BLOCK = 1024
launch_counts, launch_gradient = Launcher(counts_kernel), Launcher(gradient_kernel)


@lru_cache
def _on_device(taus: tuple[float, ...], device: torch.device) -> Tensor:
    return torch.tensor(taus, dtype=torch.float32, device=device)


class Entries:
    """Logits, labels and weights (M, L) as kernels take them; see `triton_rows.Batch`."""

    __slots__ = ("arguments", "constants", "device", "key", "z")

    def __init__(self, z: Tensor, y: Tensor, weight: Tensor | None, settings: Settings, ignored: int = 0) -> None:
        points, smoothing, losses, taus = settings
        labels, step = (y, y if weight is None else weight), step_arguments(points, z)
        self.z, self.device = z, z.get_device()
        self.arguments: tuple[Any, ...] = (z, *labels, _on_device(taus, z.device), *step, float(smoothing), ignored)
        self.constants = points.temperature is not None, weight is not None, losses
        kinds = z.dtype, y.dtype, labels[1].dtype, step[0].dtype
        self.key = kinds, z.shape[1], len(taus), z.data_ptr() % 16, ignored


def forward(kept: tuple[Tensor, ...], settings: Settings) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """tp and predicted (G, L), the sum of cross-entropies, actual and total (L,) of `kept` = z, y, weight (M, L)."""
    z, y, weight = kept
    (n, columns), thresholds = z.shape, len(settings.thresholds)
    chunk = _chunk(n)
    parts = z.new_empty(cdiv(n, chunk), thresholds, 5, columns, dtype=torch.float32)
    _launch(Entries(z, y, weight, settings), (*parts.shape[:2],), chunk, 5 * columns, COUNTS_ONLY, (parts,) * 5)
    added = parts[0] if parts.shape[0] == 1 else parts.sum(0)
    losses = added[0, 4].sum() if settings.losses else added.new_zeros(())
    return added[:, 0], added[:, 1], losses, added[0, 2], added[0, 3]


def whole(entries: Entries, ending: Ending, loss: Tensor, slopes: Tensor, *, two_classes: bool) -> None:
    """The loss at one threshold, and its slopes by the columns' tp and predicted, and by the sum of losses."""
    n, columns = entries.z.shape
    chunk, width = _chunk(n), 16 * cdiv(5 * columns, 16)
    chunks = max(1, cdiv(n, chunk))
    groups = cdiv(chunks, GROUP)
    counters, room, *_ = scratch(entries.z, groups + 1, (1 + groups + chunks) * width)
    parts = room[(1 + groups) * width :]
    _launch(entries, (chunks, 1), chunk, width, ending, (parts, room, counters, loss, slopes), two_classes=two_classes)


def _launch(
    entries: Entries, grid: tuple[int, int], chunk: int, width: int, ending: Ending, into: tuple[Tensor, ...], *,
    two_classes: bool = False,
) -> None:  # fmt: skip
    n, columns = entries.z.shape
    chunks, thresholds = grid
    launch_counts(
        entries.device, entries.key, (chunks, columns, thresholds),
        (*entries.arguments, *into, n, columns, chunk, width, ending.anchor, *ending.numbers),
        (*entries.constants, ending.form, two_classes, BLOCK, GROUP, min(128, next_power_of_2(width))), 4,
    )  # fmt: skip


def _chunk(n: int) -> int:
    """Entries of a column for one program: as few as fit into one level of groups."""
    return BLOCK * max(1, cdiv(n, BLOCK * GROUP * GROUP))


def backward(
    kept: tuple[Tensor, ...], settings: Settings, tp: Tensor, predicted: Tensor, losses: Tensor | None
) -> Tensor:
    """dL/dlogits (M, L) from dL/dtp and dL/dpredicted (G, L)."""
    z, y, weight = kept
    tp, predicted = tp.contiguous(), predicted.contiguous()
    by = tp, tp, predicted, tp if losses is None else losses
    return gradient(Entries(z, y, weight, settings), by, losses is not None)


def gradient(
    entries: Entries, by: tuple[Tensor, Tensor, Tensor, Tensor], losses: bool, *, packed: bool = False
) -> Tensor:
    """dL/dlogits; `by` and `packed` as in `triton_rows.gradient`."""
    z = entries.z
    found = torch.empty_like(z)
    annealed, weighted, _ = entries.constants
    key = entries.key, by[0].dtype, by[1].data_ptr() % 16, by[2].data_ptr() % 16, z.numel() > 2**31 - 1
    launch_gradient(
        entries.device, key, (cdiv(z.numel(), BLOCK), 1, 1),
        (*entries.arguments, *by, found, z.numel(), z.shape[1], entries.key[2]),
        (annealed, weighted, losses, packed, BLOCK), 4,
    )  # fmt: skip
    return found
