"""Counts of yes/no problems on a CPU by compiled loops: nothing is kept for backward but what came in."""

from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evalign.kernels import column_loops
from evalign.kernels.compiled import in_threads, parts
from evalign.kernels.points import FivePoints, Lines, Settings

Doubles = NDArray[np.float64]


@lru_cache
def _table(points: FivePoints, thresholds: tuple[float, ...]) -> NDArray[np.float32]:
    return np.array([Lines.at(tau, points) for tau in thresholds], np.float32)


def _by_column(kept: tuple[Tensor, ...]) -> tuple[NDArray[Any], ...]:
    """(L, M), every column a run of its own; a single one is so already."""
    return tuple(x.detach().t().contiguous().numpy() for x in kept)


def forward(kept: tuple[Tensor, ...], settings: Settings) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """tp and predicted (G, L), the sum of cross-entropies, actual and total (L,) of `kept` = z, y, weight (M, L)."""
    arrays, table, e = _by_column(kept), _table(settings.points, settings.thresholds), np.float32(settings.smoothing)
    columns, size = arrays[0].shape
    ranges = parts(size, arrays[0].size * len(table))
    sums = np.zeros((len(ranges), columns, 3, max(2, len(table))))

    def run(start: int, stop: int, into: Doubles) -> float:
        total = 0.0
        for k in range(columns):
            z, y, w = (x[k] for x in arrays)
            total += column_loops.forward(z, y, w, table, e, settings.losses, start, stop, into[k])
        return total

    losses = in_threads([partial(run, *part, into) for part, into in zip(ranges, sums, strict=True)])
    added, g = torch.from_numpy(sums.sum(0)).float(), len(table)
    return added[:, 0, :g].t(), added[:, 1, :g].t(), torch.tensor(sum(losses)), added[:, 2, 0], added[:, 2, 1]


def backward(
    kept: tuple[Tensor, ...], settings: Settings, tp: Tensor, predicted: Tensor, losses: Tensor | None
) -> Tensor:
    """dL/dlogits (M, L) from dL/dtp and dL/dpredicted (G, L)."""
    arrays, table, e = _by_column(kept), _table(settings.points, settings.thresholds), np.float32(settings.smoothing)
    gradient = torch.empty(arrays[0].shape)
    out, (columns, size) = gradient.numpy(), gradient.shape
    by_tp, by_predicted = tp.t().contiguous().numpy(), predicted.t().contiguous().numpy()
    by_losses = np.float32(0 if losses is None else losses.item())

    def run(start: int, stop: int) -> None:
        for k in range(columns):
            z, y, w = (x[k] for x in arrays)
            column_loops.backward(z, y, w, table, e, start, stop, by_tp[k], by_predicted[k], by_losses, out[k])

    in_threads([partial(run, *part) for part in parts(size, gradient.numel() * len(table))])
    return gradient.t()
