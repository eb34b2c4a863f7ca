"""Row counts on a CPU by compiled loops: nothing of the batch's size is kept for backward but the logits."""

from functools import lru_cache, partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evalign.kernels import row_loops
from evalign.kernels.compiled import in_threads, parts
from evalign.kernels.interface import Counts, Slopes
from evalign.kernels.points import FivePoints, Settings


@lru_cache
def _numbers(points: FivePoints, smoothing: float) -> NDArray[np.float32]:
    return np.array([*points.numbers(), smoothing], np.float32)


Kept = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def forward(z: Tensor, y: Tensor, weight: Tensor, settings: Settings) -> tuple[Counts, Kept]:
    (n, d), z, y, weight = z.shape, z.detach().contiguous(), y.contiguous(), weight.contiguous()
    stats, places = torch.empty(n, 4), torch.empty(n, 2, dtype=torch.int32)
    ranges = parts(n, n * d)
    sums = np.zeros((len(ranges), 3, d))
    array = z.numpy()
    fixed = (array, array.view(np.int32), y.numpy(), weight.numpy(), _numbers(settings.points, settings.smoothing))
    kept = stats.numpy(), places.numpy()
    jobs = [
        partial(row_loops.forward, *fixed, start, stop, *kept, part)
        for (start, stop), part in zip(ranges, sums, strict=True)
    ]
    losses = sum(in_threads(jobs))
    tp, actual, predicted = torch.from_numpy(sums.sum(0)).to(z.dtype).unbind()
    return Counts(tp, predicted, torch.tensor(losses, dtype=z.dtype), actual), (z, y, weight, stats, places)


def backward(kept: Kept, settings: Settings, slopes: Slopes) -> Tensor:
    z, y, weight, stats, places = (x.detach().numpy() for x in kept)
    gradient = torch.empty(z.shape)
    numbers = _numbers(settings.points, settings.smoothing)
    by_losses = np.float32(0 if slopes.losses is None else slopes.losses.item())
    by = slopes.tp.detach().numpy(), slopes.predicted.detach().numpy(), by_losses, gradient.numpy()
    in_threads(
        [
            partial(row_loops.backward, z, y, weight, numbers, start, stop, stats, places, *by)
            for start, stop in parts(z.shape[0], z.size)
        ]
    )
    return gradient
