"""The batches of many trials side by side: every trial has its own rows, order and batch lengths."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from evalign.training.batches import Batches


class StackedBatches:
    """As many batches an epoch for every trial, each the trial's own; a shorter one is filled up and masked.

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
        # A GPU lists an epoch at once, in few kernels; a CPU one batch after the other, which takes no room.
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
