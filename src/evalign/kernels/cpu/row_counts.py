"""Row counts on a CPU by compiled loops: nothing of the batch's size is kept for backward but the logits."""

from functools import lru_cache, partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evalign.kernels.cpu import block_loops, row_loops
from evalign.kernels.cpu import block_loops as block_gradients
from evalign.kernels.cpu.jit import in_threads, parts
from evalign.kernels.plan import Counts, FivePoints, Settings, Slopes

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
Batch = tuple[Tensor, Tensor, Tensor]  # logits (M, C) as `in_runs` leaves them, labels and weights, contiguous
Stats = tuple[Floats, NDArray[np.int32]]
FEW, FEW_BACK = 96, 24  # classes, up to which rows in step are quicker than one after the other
Kept = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


@lru_cache
def _numbers(points: FivePoints, smoothing: float) -> Floats:
    return np.array([*points.numbers(), smoothing], np.float32)


def in_runs(z: Tensor) -> Tensor:
    """Logits (M, C) whose rows are runs; of few classes, as blocks of rows take them, their columns may be."""
    return z if z.shape[1] <= FEW_BACK and z.t().is_contiguous() else z.contiguous()


def counted(batch: Batch, settings: Settings, into: Doubles) -> tuple[float, Stats]:
    """Adds tp, actual and predicted to `into` (3, C); the sum of the cross-entropies, and what `gradient` needs."""
    z, y, weight = (x.numpy() for x in batch)
    n, d = z.shape
    stats = np.empty((n, 4), np.float32), np.empty((n, 2), np.int32)
    fixed = z, y, weight, _numbers(settings.points, settings.smoothing)
    forward = (block_loops if 1 < d <= FEW else row_loops).forward
    ranges = parts(n, n * d)
    if len(ranges) == 1:
        return forward(*fixed, 0, n, *stats, into), stats
    sums = np.zeros((len(ranges), 3, d))
    jobs = [
        partial(forward, *fixed, start, stop, *stats, part) for (start, stop), part in zip(ranges, sums, strict=True)
    ]
    losses = sum(in_threads(jobs))
    into += sums.sum(0)
    return losses, stats


def gradient(
    batch: Batch, settings: Settings, stats: Stats, by_tp: Floats, by_predicted: Floats, by_losses: np.float32
) -> Tensor:
    """dL/dlogits from dL by the counts."""
    z, y, weight = (x.numpy() for x in batch)
    found = np.empty_like(z)  # laid out as z is
    numbers = _numbers(settings.points, settings.smoothing)
    rest = *stats, by_tp, by_predicted, by_losses, found
    backward = (block_gradients if 1 < z.shape[1] <= FEW_BACK else row_loops).backward
    ranges = parts(z.shape[0], z.size)
    in_threads([partial(backward, z, y, weight, numbers, start, stop, *rest) for start, stop in ranges])
    return torch.from_numpy(found)


def forward(z: Tensor, y: Tensor, weight: Tensor, settings: Settings) -> tuple[Counts, Kept]:
    batch, sums = (in_runs(z.detach()), y.contiguous(), weight.detach().contiguous()), np.zeros((3, z.shape[1]))
    losses, (stats, places) = counted(batch, settings, sums)
    tp, actual, predicted = torch.from_numpy(sums).to(z.dtype).unbind()
    kept = *batch, torch.from_numpy(stats), torch.from_numpy(places)
    return Counts(tp, predicted, torch.tensor(losses, dtype=z.dtype), actual), kept


def backward(kept: Kept, settings: Settings, slopes: Slopes) -> Tensor:
    z, y, weight, stats, places = kept
    by_losses = np.float32(0 if slopes.losses is None else slopes.losses.item())
    by = slopes.tp.detach().numpy(), slopes.predicted.detach().numpy(), by_losses
    return gradient((z, y, weight), settings, (stats.numpy(), places.numpy()), *by)
