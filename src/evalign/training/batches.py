"""Shuffled batches of an in-memory table: index vectors, no per-sample loader."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor


class Batches:
    """A new order every epoch, cut into batches of nearly equal size; deterministic for a seed.

    The number of batches is n / batch_size rounded, so that no epoch ends in a sliver: a metric of ten samples
    says little. With `labels` every batch gets its share of every class, to within one sample.

    >>> batches = Batches(10, 4, seed=0)
    >>> [len(batch) for batch in batches.epoch()]
    [5, 5]
    """

    def __init__(self, n: int, batch_size: int, *, seed: int, labels: Tensor | None = None) -> None:
        if n < 1 or batch_size < 1:
            raise ValueError(f"rows and batch_size must be at least 1, got {n} and {batch_size}")
        self.n, self.count = n, max(1, round(n / batch_size))
        self.generator = torch.Generator().manual_seed(seed)
        self.labels = None if labels is None else labels.cpu()

    def order(self) -> Tensor:
        """The order of one epoch."""
        shuffled = torch.randperm(self.n, generator=self.generator)
        if self.labels is None:
            return shuffled
        # Spread each class evenly over the epoch: its r-th row goes to about (r + u) / n_c of the way.
        by_class = shuffled[self.labels[shuffled].argsort(stable=True)]
        counts = self.labels.bincount()
        counts = counts[counts > 0]
        rank = torch.cat([torch.arange(int(c)) for c in counts])
        place = (rank + torch.rand(self.n, generator=self.generator)) / counts.repeat_interleave(counts)
        return by_class[place.argsort(stable=True)]

    def epoch(self) -> Iterator[Tensor]:
        return iter(self.order().tensor_split(self.count))


def default_batch_size(n: int) -> int:
    """The power of two nearest to 4 sqrt(n), 32 at least and 4096 at most, for `n` training rows.

    A batch must hold some of every class for its metric to mean something, and an epoch must have enough batches
    to learn from: both grow with sqrt(n). Half and twice as much were measured in docs/recipes.md.

    >>> [default_batch_size(n) for n in (100, 1000, 10_000, 200_000)]
    [32, 128, 512, 2048]
    """
    return int(min(4096, max(32, 2 ** round(math.log2(4 * math.sqrt(max(1, n)))))))
