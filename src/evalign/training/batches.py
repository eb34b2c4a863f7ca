"""Shuffled batches of an in-memory table: index vectors, no per-sample loader."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor


class Batches:
    """A new order every epoch, cut into batches of nearly equal size; deterministic for a seed.

    The number of batches is n / batch_size rounded, so that no epoch ends in a sliver: a metric of ten samples
    says little. With `labels` every batch gets its share of every class, to within one sample; with `oversample`
    too, an epoch is n draws with replacement in which every class is as likely as any other.

    >>> batches = Batches(10, 4, seed=0)
    >>> [len(batch) for batch in batches.epoch()]
    [5, 5]
    """

    def __init__(
        self,
        n: int,
        batch_size: int,
        *,
        seed: int,
        labels: Tensor | None = None,
        oversample: bool = False,
        device: torch.device | str = "cpu",
    ) -> None:
        if n < 1 or batch_size < 1:
            raise ValueError(f"rows and batch_size must be at least 1, got {n} and {batch_size}")
        if oversample and labels is None:
            raise ValueError("oversample draws every class equally often and needs labels, got none")
        self.n, self.count = n, max(1, round(n / batch_size))
        self.generator = torch.Generator(device).manual_seed(seed)
        self.labels = None if labels is None else labels.to(device)
        self.oversample = oversample
        self.counts = torch.ones(0) if self.labels is None else self.labels.bincount()
        self.counts = self.counts[self.counts > 0]

    def order(self) -> Tensor:
        """The order of one epoch."""
        if self.oversample:
            return self._drawn()
        shuffled = torch.randperm(self.n, generator=self.generator, device=self.generator.device)
        if self.labels is None:
            return shuffled
        # Spread each class evenly over the epoch: its r-th row goes to about (r + u) / n_c of the way.
        by_class = shuffled[self.labels[shuffled].argsort(stable=True)]
        start = (self.counts.cumsum(0) - self.counts).repeat_interleave(self.counts)
        rank = torch.arange(self.n, device=start.device) - start
        place = (rank + self._uniform()) / self.counts.repeat_interleave(self.counts)
        return by_class[place.argsort(stable=True)]

    def _drawn(self) -> Tensor:
        """n rows with replacement, every class as likely as any other."""
        assert self.labels is not None
        by_class = self.labels.argsort(stable=True)
        which = (self._uniform() * len(self.counts)).long()
        start = self.counts.cumsum(0) - self.counts
        return by_class[start[which] + (self._uniform() * self.counts[which]).long()]

    def _uniform(self) -> Tensor:
        return torch.rand(self.n, generator=self.generator, device=self.generator.device, dtype=torch.float64)

    def epoch(self) -> Iterator[Tensor]:
        return iter(self.order().tensor_split(self.count))

    @property
    def lengths(self) -> list[int]:
        """How many rows each batch of an epoch has: as many as any other, or one more."""
        least, more = divmod(self.n, self.count)
        return [least + (batch < more) for batch in range(self.count)]


def default_batch_size(n: int) -> int:
    """The power of two nearest to 4 sqrt(n), 32 at least and 4096 at most, for `n` training rows.

    A batch must hold some of every class for its metric to mean something, and an epoch must have enough batches
    to learn from: both grow with sqrt(n). Half and twice as much were measured in docs/recipes.md.

    >>> [default_batch_size(n) for n in (100, 1000, 10_000, 200_000)]
    [32, 128, 512, 2048]
    """
    return int(min(4096, max(32, 2 ** round(math.log2(4 * math.sqrt(max(1, n)))))))
