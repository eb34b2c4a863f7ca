"""Counts of yes/no problems on a CPU by compiled loops: nothing is kept for backward but what came in."""

from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evalign.kernels.cpu import column_loops
from evalign.kernels.cpu.jit import in_threads, parts
from evalign.kernels.plan import FivePoints, Lines, Settings

Doubles = NDArray[np.float64]
Floats = NDArray[np.float32]
NO_TOTALS = np.empty(0)


@lru_cache
def _table(points: FivePoints, thresholds: tuple[float, ...]) -> NDArray[np.float32]:
    return np.array([Lines.at(tau, points) for tau in thresholds], np.float32)


def _by_column(batch: tuple[Tensor, ...]) -> tuple[NDArray[Any], ...]:
    """(L, M), every column a run of its own; a single one is so already."""
    return tuple(x.detach().t().contiguous().numpy() for x in batch)


def _sums(batch: tuple[Tensor, ...], settings: Settings) -> tuple[Doubles, float]:
    """tp of every threshold, predicted of every threshold, (actual, total) of each column, and all cross-entropies."""
    arrays, table, e = _by_column(batch), _table(settings.points, settings.thresholds), np.float32(settings.smoothing)
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
    return sums.sum(0) if len(ranges) > 1 else sums[0], sum(losses)


def counted(batch: tuple[Tensor, ...], settings: Settings, into: Doubles, two_classes: bool) -> tuple[float, Doubles]:
    """tp, actual and predicted of every column at the one threshold into `into` (3, L), or those of both classes of the
    one column into (3, 2); the sum of the cross-entropies, and the totals, which two classes have in their counts."""
    sums, losses = _sums(batch, settings)
    tp, predicted, actual, total = sums[:, 0, 0], sums[:, 1, 0], sums[:, 2, 0], sums[:, 2, 1]
    if not two_classes:
        into[0], into[1], into[2] = tp, actual, predicted
        return losses, total
    into[:, 1] = tp[0], actual[0], predicted[0]
    into[:, 0] = total[0] - actual[0] - predicted[0] + tp[0], total[0] - actual[0], total[0] - predicted[0]
    return losses, NO_TOTALS


def forward(batch: tuple[Tensor, ...], settings: Settings) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """tp and predicted (G, L), the sum of cross-entropies, actual and total (L,) of z, y, weight (M, L)."""
    sums, losses = _sums(batch, settings)
    added, g = torch.from_numpy(sums).float(), len(settings.thresholds)
    return added[:, 0, :g].t(), added[:, 1, :g].t(), torch.tensor(losses), added[:, 2, 0], added[:, 2, 1]


def gradient(
    batch: tuple[Tensor, ...], settings: Settings, by_tp: Floats, by_predicted: Floats, by_losses: np.float32
) -> Tensor:
    """dL/dlogits (M, L) from dL by the counts (L, G)."""
    arrays, table, e = _by_column(batch), _table(settings.points, settings.thresholds), np.float32(settings.smoothing)
    columns, size = arrays[0].shape
    found = np.empty((columns, size), np.float32)

    def run(start: int, stop: int) -> None:
        for k in range(columns):
            z, y, w = (x[k] for x in arrays)
            column_loops.backward(z, y, w, table, e, start, stop, by_tp[k], by_predicted[k], by_losses, found[k])

    in_threads([partial(run, *part) for part in parts(size, found.size * len(table))])
    return torch.from_numpy(found).t()


def backward(
    batch: tuple[Tensor, ...], settings: Settings, tp: Tensor, predicted: Tensor, losses: Tensor | None
) -> Tensor:
    """dL/dlogits (M, L) from dL/dtp and dL/dpredicted (G, L)."""
    by_tp, by_predicted = (np.ascontiguousarray(x.detach().numpy().T) for x in (tp, predicted))
    return gradient(batch, settings, by_tp, by_predicted, np.float32(0 if losses is None else losses.item()))
