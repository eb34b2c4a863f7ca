"""Shuffled batches of rows in memory, and how large a batch has to be for a metric.

`advise` looks at the counts of a batch of n rows as shares of n. EAST Theorem 5.8 bounds their largest deviation from
those of all rows by sqrt(log(2 d^2 / delta) / (2 n)) with probability 1 - delta; multiplied by the slope of the metric
this bounds its error, for any classifier. The standard error by the same slope is what to expect, and far smaller.
Slopes are taken at a classifier that finds `recall` of the rarest class.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from evalign import _checks as checks
from evalign import metrics
from evalign.confusion import Confusion
from evalign.memory import ROWS_OF_RAREST
from evalign.metrics import Average, Beta
from evalign.tables.packed import PackedTable, Table, number_type


class Batches:
    """A new order every epoch, cut into batches of nearly equal size; deterministic for a seed.

    The number of batches is n / batch_size rounded, so that no epoch ends in a sliver: a metric of ten samples
    is noise. With `labels` every batch gets its share of every class, to within one sample; with `oversample`
    also, an epoch is n draws with replacement in which every class is as likely as any other.

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
        """Sizes of the batches of an epoch, which differ by one at most."""
        least, more = divmod(self.n, self.count)
        return [least + (batch < more) for batch in range(self.count)]


def default_batch_size(n: int) -> int:
    """The power of two nearest to 4 sqrt(n), 32 at least and 4096 at most, for `n` training rows.

    A batch must hold some of every class for its metric to mean something, and an epoch must have enough batches
    to learn from: both grow with sqrt(n). Half and twice as much were measured in docs/research/recipes.md.

    >>> [default_batch_size(n) for n in (100, 1000, 10_000, 200_000)]
    [32, 128, 512, 2048]
    """
    return int(min(4096, max(32, 2 ** round(math.log2(4 * math.sqrt(max(1, n)))))))


class StackedBatches:
    """Batches of several trials in parallel: equally many for each, padded to one length and masked.

    `rows` are the row numbers that each trial draws from; `labels` of those rows are needed for stratified or
    oversampled batches.

    >>> one, two = torch.arange(3), torch.arange(10, 14)
    >>> made = StackedBatches([one, two], 2, seeds=[0, 1], labels=[None, None], dtype=torch.float32)
    >>> [(numbers.shape, mask.tolist()) for numbers, mask in made.epoch()]
    [(torch.Size([2, 2]), [[1.0, 1.0], [1.0, 1.0]]), (torch.Size([2, 2]), [[1.0, 0.0], [1.0, 1.0]])]
    """

    def __init__(
        self,
        rows: Sequence[Tensor],
        batch_size: int,
        *,
        seeds: Sequence[int],
        labels: Sequence[Tensor | None],
        dtype: torch.dtype,
        oversample: bool = False,
        device: torch.device | str = "cpu",
    ) -> None:
        self.own = [
            Batches(len(numbers), batch_size, seed=seed, labels=own, oversample=oversample, device=device)
            for numbers, seed, own in zip(rows, seeds, labels, strict=True)
        ]
        if len({batches.count for batches in self.own}) > 1:
            sizes = sorted({len(numbers) for numbers in rows})
            raise ValueError(f"all trials must have as many batches an epoch, got {sizes} rows; train them apart")
        self.rows = [numbers.to(device) for numbers in rows]
        self.count, self.dtype = self.own[0].count, dtype
        lengths = torch.tensor([batches.lengths for batches in self.own]).T
        self.longest: list[int] = lengths.amax(0).tolist()
        self.lengths = lengths[..., None].to(device)  # (batches, S, 1)
        self.starts = self.lengths.cumsum(0) - self.lengths
        self.within = torch.arange(max(self.longest), device=device)
        # A GPU indexes a whole epoch in few kernels; a CPU one batch at a time, which saves memory.
        self.at_once = 1 if self.within.device.type == "cpu" else self.count

    @property
    def width(self) -> int:
        """The length of the longest batch."""
        return len(self.within)

    def epoch(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Row numbers and mask (S, width) of every batch of one epoch."""
        orders = [numbers[batches.order()] for numbers, batches in zip(self.rows, self.own, strict=True)]
        for first in range(0, self.count, self.at_once):
            some = slice(first, first + self.at_once)
            mask = self.within < self.lengths[some]
            places = (self.starts[some] + self.within) * mask
            numbers = torch.stack([order[own] for order, own in zip(orders, places.unbind(1), strict=True)], 1)
            yield from zip(numbers, mask.to(self.dtype), strict=True)


@dataclass(frozen=True)
class Rows:
    """Features, labels and weights on one device."""

    x: Table
    y: Tensor
    weight: Tensor

    @classmethod
    def of(cls, x: Table, y: Tensor, weight: Tensor | None = None) -> "Rows":
        return cls(x, y, torch.ones(len(y), dtype=number_type(x), device=x.device) if weight is None else weight)

    def __getitem__(self, index: Tensor) -> "Rows":
        return Rows(self.x[index], self.y[index], self.weight[index])

    def joined(self, other: "Rows") -> "Rows":
        y, weight = torch.cat([self.y, other.y]), torch.cat([self.weight, other.weight])
        if isinstance(self.x, PackedTable) and isinstance(other.x, PackedTable):
            return Rows(self.x.joined(other.x), y, weight)
        return Rows(torch.cat([self.x[:], other.x[:]]), y, weight)

    def __len__(self) -> int:
        return len(self.y)


TOLERANCE, DELTA, RECALL = 0.05, 0.05, 0.8
MISSED_RARELY = 0.01


@dataclass(frozen=True)
class BatchAdvice:
    """How well a batch of `batch` rows estimates the metric."""

    batch: int
    rows_of_rarest: float
    missing: float  # probability that it lacks a class
    standard_error: float  # of the metric
    decay: float  # of a memory that makes up for what the batch lacks; 0 where none is needed


@dataclass(frozen=True)
class Advice:
    """Batch sizes that a metric needs for these class shares; `at` describes one batch size."""

    shares: tuple[float, ...]
    variance: float  # of the metric of one row: the standard error of n rows is its root over sqrt(n)
    slope: float  # sum of the absolute derivatives by the counts

    @property
    def for_every_class(self) -> int:
        """Rows of a batch that lacks a class in one of a hundred batches at most."""
        low, high = 1, 2
        while _missing(self.shares, high) > MISSED_RARELY:
            low, high = high, 2 * high
        while low + 1 < high:
            middle = (low + high) // 2
            low, high = (middle, high) if _missing(self.shares, middle) > MISSED_RARELY else (low, middle)
        return high

    def for_error(self, tolerance: float = TOLERANCE) -> int:
        """Rows for a standard error of `tolerance`."""
        return math.ceil(self.variance / tolerance**2)

    def guaranteed(self, tolerance: float = TOLERANCE, delta: float = DELTA) -> int:
        """Rows for an error of `tolerance` at most, with probability 1 - delta, to first order (Theorem 5.8)."""
        return math.ceil(math.log(2 * len(self.shares) ** 2 / delta) / 2 * (self.slope / tolerance) ** 2)

    def at(self, batch: int) -> BatchAdvice:
        checks.check_number("batch", batch, low=1)
        rarest = batch * min(self.shares)
        return BatchAdvice(
            batch, rarest, _missing(self.shares, batch), math.sqrt(self.variance / batch),
            max(0.0, 1 - rarest / ROWS_OF_RAREST),
        )  # fmt: skip


def advise(
    labels: Sequence[float] | Tensor,
    metric: str = "f1",
    *,
    average: Average | None = None,
    beta: Beta | None = None,
    recall: float = RECALL,
) -> Advice:
    """Advice for a metric on data with `labels` label counts, one per class.

    >>> advice = advise([9800, 200], "f1")
    >>> advice.for_every_class, advice.for_error(0.05), advice.guaranteed(0.05)
    (228, 1920, 2537587)
    >>> print(f"{advice.at(64).missing:.2f}, {advice.at(64).standard_error:.2f}, {advice.at(64).decay:.4f}")
    0.27, 0.27, 0.9872
    """
    counts = torch.as_tensor(labels, dtype=torch.float64)
    if counts.dim() != 1 or len(counts) < 2 or not bool((counts > 0).all()):
        raise ValueError(f"labels must hold a count above 0 for two classes or more, got {counts.tolist()}")
    checks.check_number("recall", recall, low=0.0, high=1.0, open_low=True, open_high=True)
    shares = counts / counts.sum()
    if average is None:
        average = "binary" if len(shares) == 2 else "macro"
    matrix = _typical(shares, recall).requires_grad_()
    c = Confusion(matrix.diagonal(), matrix.sum(1), matrix.sum(0), matrix.sum(), matrix=matrix)
    score = metrics.resolve(metric, average=average, beta=beta)(c)
    (slope,) = torch.autograd.grad(score, matrix)
    p = matrix.detach()
    variance = (p * slope**2).sum() - (p * slope).sum() ** 2
    return Advice(tuple(shares.tolist()), max(0.0, float(variance)), float(slope.abs().sum()))


def _typical(shares: Tensor, recall: float) -> Tensor:
    """Shares of a classifier that finds `recall` of the rarest class, and more of the others.

    C_ij = (1 - recall) t_i t_j / (1 - min t) off the diagonal: errors in proportion to both classes, and every class
    predicted as often as it comes.
    """
    matrix = (1 - recall) / (1 - shares.min()) * torch.outer(shares, shares)
    matrix.fill_diagonal_(0.0)
    return matrix + torch.diag(shares - matrix.sum(1))


def _missing(shares: Sequence[float], batch: int) -> float:
    """Probability that `batch` rows lack a class, by Bonferroni: never more than the sum over the classes."""
    return min(1.0, sum((1 - share) ** batch for share in shares))
