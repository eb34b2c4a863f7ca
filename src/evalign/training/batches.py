"""Rows in memory: shuffled batches to train on, and a network's logits and scores."""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from evalign.confusion import Confusion, Task
from evalign.metrics import MetricFunction
from evalign.tables.packed import EncodedTable, number_type

# (logits, labels, weights, temperature) -> loss of a stage with `metric`, without its anchor; vmappable
Term = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
Watch = Callable[[Tensor, Tensor, Tensor], Tensor]  # logits, labels, weights -> (k,) numbers recorded every epoch
Score = Callable[[Tensor, Tensor, Tensor], Tensor]  # probabilities (n, C), labels (n,), weights (n,) -> hard metric


class Batches:
    """Shuffled batches of nearly equal size, in a new order every epoch; deterministic for a seed.

    The number of batches is n / batch_size rounded, so that no epoch ends in a tiny batch: a metric of ten samples
    is noise.

    >>> batches = Batches(10, 4, seed=0)
    >>> [len(batch) for batch in batches.epoch()]
    [5, 5]
    """

    def __init__(self, n: int, batch_size: int, *, seed: int, device: torch.device | str = "cpu") -> None:
        if n < 1 or batch_size < 1:
            raise ValueError(f"rows and batch_size must be at least 1, got {n} and {batch_size}")
        self.n, self.count = n, max(1, round(n / batch_size))
        self.generator = torch.Generator(device).manual_seed(seed)

    def order(self) -> Tensor:
        """The order of one epoch."""
        return torch.randperm(self.n, generator=self.generator, device=self.generator.device)

    def epoch(self) -> Iterator[Tensor]:
        return iter(self.order().tensor_split(self.count))

    @property
    def lengths(self) -> list[int]:
        """Batch sizes of an epoch, which differ by at most one."""
        least, more = divmod(self.n, self.count)
        return [least + (batch < more) for batch in range(self.count)]


def default_batch_size(n: int) -> int:
    """The power of two closest to 4 sqrt(n), between 32 and 4096, for `n` training rows.

    A batch must hold some rows of every class for a meaningful metric, and an epoch must have enough batches to learn
    from: both grow with sqrt(n). docs/research/recipes.md has measurements of half and twice the size.

    >>> [default_batch_size(n) for n in (100, 1000, 10_000, 200_000)]
    [32, 128, 512, 2048]
    """
    return int(min(4096, max(32, 2 ** round(math.log2(4 * math.sqrt(max(1, n)))))))


MakeBatches = Callable[[Tensor, int, int, torch.device | str], Batches]  # row numbers, batch size, seed, device


def plain_batches(rows: Tensor, batch_size: int, seed: int, device: torch.device | str) -> Batches:
    return Batches(len(rows), batch_size, seed=seed, device=device)


class StackedBatches:
    """Batches of several trials in parallel: the same number for each, padded to one length and masked.

    `rows` are the row numbers that each trial draws from; `make` makes the batches of each.

    >>> one, two = torch.arange(3), torch.arange(10, 14)
    >>> made = StackedBatches([one, two], 2, seeds=[0, 1], dtype=torch.float32)
    >>> [(numbers.shape, mask.tolist()) for numbers, mask in made.epoch()]
    [(torch.Size([2, 2]), [[1.0, 1.0], [1.0, 1.0]]), (torch.Size([2, 2]), [[1.0, 0.0], [1.0, 1.0]])]
    """

    def __init__(
        self,
        rows: Sequence[Tensor],
        batch_size: int,
        *,
        seeds: Sequence[int],
        dtype: torch.dtype,
        make: MakeBatches = plain_batches,
        device: torch.device | str = "cpu",
    ) -> None:
        self.own = [make(numbers, batch_size, seed, device) for numbers, seed in zip(rows, seeds, strict=True)]
        if len({batches.count for batches in self.own}) > 1:
            sizes = sorted({len(numbers) for numbers in rows})
            raise ValueError(
                f"all trials must have the same number of batches per epoch, got {sizes} rows; train them separately"
            )
        self.rows = [numbers.to(device) for numbers in rows]
        self.count, self.dtype = self.own[0].count, dtype
        lengths = torch.tensor([batches.lengths for batches in self.own]).T
        self.longest: list[int] = lengths.amax(0).tolist()
        self.lengths = lengths[..., None].to(device)  # (batches, S, 1)
        self.starts = self.lengths.cumsum(0) - self.lengths
        self.within = torch.arange(max(self.longest), device=device)
        # A GPU indexes a whole epoch in a few kernels; a CPU indexes one batch at a time, which saves memory.
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

    x: EncodedTable
    y: Tensor
    weight: Tensor

    @classmethod
    def of(cls, x: EncodedTable, y: Tensor, weight: Tensor | None = None) -> "Rows":
        return cls(x, y, torch.ones(len(y), dtype=number_type(x), device=x.device) if weight is None else weight)

    def __getitem__(self, index: Tensor) -> "Rows":
        return Rows(self.x[index], self.y[index], self.weight[index])

    def __len__(self) -> int:
        return len(self.y)


def joined(parts: Iterable[Tensor], rows: int, dim: int = 0) -> Tensor:
    """`torch.cat` of parts that are computed in turn, with `rows` rows in total.

    The result is allocated first: small results allocated between the large temporary tensors of each part would
    fragment the heap.

    >>> joined((torch.full((1, n), float(n)) for n in (1, 2)), 3, dim=1)
    tensor([[1., 2., 2.]])
    """
    parts = iter(parts)
    first = next(parts)
    whole = first.new_empty(*first.shape[:dim], rows, *first.shape[dim + 1 :])
    start = 0
    for part in itertools.chain([first], parts):
        whole.narrow(dim, start, part.shape[dim]).copy_(part)
        start += part.shape[dim]
    return whole


def flat(logits: Tensor, y: Tensor, weight: Tensor, task: Task) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, labels and weights in the shapes that an objective takes.

    Binary logits (M,), (M, 1) or (F, E) and labels (M,) or (F, E) become vectors, a row's weight that of all its
    pairs. Multiclass ones, (M, C) and (M,), stay.

    >>> z, y, w = flat(torch.zeros(2, 3), torch.ones(2, 3), torch.tensor([1.0, 5.0]), "binary")
    >>> z.shape, w.tolist()
    (torch.Size([6]), [1.0, 1.0, 1.0, 5.0, 5.0, 5.0])
    """
    if task != "binary":
        return logits, y, weight
    if logits.numel() != y.numel():
        raise ValueError(
            f"a binary task has one logit for every label, got logits {tuple(logits.shape)} and labels "
            f"{tuple(y.shape)}; give the network one output"
        )
    if weight.dim() < y.dim():
        weight = weight.reshape(*weight.shape, *([1] * (y.dim() - weight.dim()))).expand(y.shape)
    return logits.reshape(-1), y.reshape(-1), weight.reshape(-1)


def probabilities_of(logits: Tensor, task: Task) -> Tensor:
    """Probabilities (n, C) of flat logits; (n, 2) if binary.

    >>> probabilities_of(torch.zeros(1), "binary")
    tensor([[0.5000, 0.5000]])
    """
    if task != "binary":
        return logits.softmax(-1)
    p = logits.sigmoid()
    return torch.stack([1 - p, p], -1)


IMAGES_AT_ONCE = 2048


def rows_at_once(device: torch.device) -> int:
    """Rows per forward pass outside of training."""
    return 1024 if device.type == "cpu" else 16384


@torch.no_grad()
def predict_logits(network: nn.Module, x: EncodedTable, rows: Tensor | None = None, *, amp: bool = False) -> Tensor:
    """Logits of x, or of the given `rows` of it, in evaluation mode; packed tables give float32.

    Computed in pieces, to avoid hidden layers, or copies of rows, of the size of the table.
    """
    network.eval()
    size = rows_at_once(x.device) if x.dim() <= 2 else IMAGES_AT_ONCE
    count = len(x) if rows is None else len(rows)
    places = [slice(i, i + size) for i in range(0, max(1, count), size)]
    pieces = (x[part] for part in (places if rows is None else torch.split(rows.to(x.device), size)))
    dtype = number_type(x)
    with torch.autocast(x.device.type, dtype=torch.bfloat16, enabled=amp):
        return joined((network(part).to(dtype) for part in pieces), count)


def argmax_score(metric: MetricFunction) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """(probabilities (n, C), labels, weights) -> the metric of the most probable classes; vmappable.

    >>> import torch
    >>> from evalign import metrics
    >>> p = torch.tensor([[0.9, 0.1], [0.4, 0.6]])
    >>> argmax_score(metrics.accuracy)(p, torch.tensor([0, 0]), torch.tensor([1.0, 3.0]))
    tensor(0.2500, dtype=torch.float64)
    """

    def score(p: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        return metric(Confusion.hard(p.argmax(1), y, p.shape[1], sample_weight=weight))

    return score
