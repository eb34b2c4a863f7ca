"""Counts of yes/no problems on a GPU by Triton, from rows (M, L) as they come: no transposed copy."""

from functools import lru_cache

import torch
import triton
from torch import Tensor

from evalign.kernels.points import Settings
from evalign.kernels.triton_column_kernels import counts_kernel, gradient_kernel
from evalign.kernels.triton_rows import step_arguments

BLOCK = 1024


@lru_cache
def _on_device(taus: tuple[float, ...], device: torch.device) -> Tensor:
    return torch.tensor(taus, dtype=torch.float32, device=device)


def forward(kept: tuple[Tensor, ...], settings: Settings) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """tp and predicted (G, L), the sum of cross-entropies, actual and total (L,) of `kept` = z, y, weight (M, L)."""
    z, y, weight = kept
    points, smoothing, with_losses, taus = settings
    n, columns = z.shape
    chunk = max(BLOCK, triton.next_power_of_2(triton.cdiv(n, 512)))
    partial = z.new_empty(triton.cdiv(n, chunk), len(taus), 5, columns, dtype=torch.float32)
    counts_kernel[(partial.shape[0], columns, len(taus))](
        z, y, weight, _on_device(taus, z.device), *step_arguments(points, z), smoothing, partial, n, columns, chunk,
        columns, 1, ANNEALED=points.temperature is not None, LOSSES=with_losses, BLOCK=BLOCK,
    )  # fmt: skip
    added = partial[0] if partial.shape[0] == 1 else partial.sum(0)
    losses = added[0, 4].sum() if with_losses else added.new_zeros(())
    return added[:, 0], added[:, 1], losses, added[0, 2], added[0, 3]


def backward(
    kept: tuple[Tensor, ...], settings: Settings, tp: Tensor, predicted: Tensor, losses: Tensor | None
) -> Tensor:
    """dL/dlogits (M, L) from dL/dtp and dL/dpredicted (G, L)."""
    z, y, weight = kept
    points, smoothing, _, taus = settings
    gradient = torch.empty_like(z)
    gradient_kernel[(triton.cdiv(z.numel(), BLOCK),)](
        z, y, weight, _on_device(taus, z.device), *step_arguments(points, z), smoothing, tp.contiguous(),
        predicted.contiguous(), z if losses is None else losses, gradient, z.numel(), z.shape[1], len(taus),
        ANNEALED=points.temperature is not None, LOSSES=losses is not None, BLOCK=BLOCK,
    )  # fmt: skip
    return gradient
