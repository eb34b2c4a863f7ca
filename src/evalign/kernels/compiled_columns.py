"""Counts of yes/no problems on a CPU by compiled loops: nothing is kept for backward but what came in."""

from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evalign.kernels import column_loops
from evalign.kernels.compiled import in_threads, parts
from evalign.kernels.points import Lines

Doubles = NDArray[np.float64]


def forward(
    kept: tuple[Tensor, ...], lines: tuple[Lines, ...], smoothing: float, with_losses: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """tp and predicted (G, L), the sum of cross-entropies, actual and total (L,)."""
    arrays = tuple(x.numpy() for x in kept)
    columns, size = arrays[0].shape
    ranges = parts(size, arrays[0].size * len(lines))
    sums = np.zeros((len(ranges), columns, 3, max(2, len(lines))))
    table, e = np.array(lines, np.float32), np.float32(smoothing)

    def run(start: int, stop: int, into: Doubles) -> float:
        total = 0.0
        for k in range(columns):
            z, y, w = (x[k] for x in arrays)
            total += column_loops.forward(z, y, w, table, e, with_losses, start, stop, into[k])
        return total

    losses = in_threads([partial(run, *part, into) for part, into in zip(ranges, sums, strict=True)])
    added, g = torch.from_numpy(sums.sum(0)).float(), len(lines)
    return added[:, 0, :g].t(), added[:, 1, :g].t(), torch.tensor(sum(losses)), added[:, 2, 0], added[:, 2, 1]


def backward(
    kept: tuple[Tensor, ...],
    lines: tuple[Lines, ...],
    smoothing: float,
    tp: Tensor,
    predicted: Tensor,
    losses: Tensor | None,
) -> Tensor:
    """dL/dlogits (L, M) from dL/dtp and dL/dpredicted (G, L)."""
    arrays = tuple(x.detach().numpy() for x in kept)
    gradient = torch.empty(kept[0].shape)
    out, (columns, size) = gradient.numpy(), gradient.shape
    table, e = np.array(lines, np.float32), np.float32(smoothing)
    by_tp, by_predicted = tp.t().contiguous().numpy(), predicted.t().contiguous().numpy()
    by_losses = np.float32(0 if losses is None else losses.item())

    def run(start: int, stop: int) -> None:
        for k in range(columns):
            z, y, w = (x[k] for x in arrays)
            column_loops.backward(z, y, w, table, e, start, stop, by_tp[k], by_predicted[k], by_losses, out[k])

    in_threads([partial(run, *part) for part in parts(size, gradient.numel() * len(lines))])
    return gradient
