"""The batches of many trials side by side: every trial has its own rows, order and batch lengths."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from evalign.training.batches import Batches


class StackedBatches:
    """As many batches an epoch for every trial, each the trial's own; a shorter one is filled up and masked.

    `rows` are the row numbers that each trial draws from, `labels` of those rows are needed for stratified or
    oversampled batches; `table` is how many rows there are to number.
    """

    def __init__(
        self,
        rows: Sequence[Tensor],
        batch_size: int,
        *,
        seeds: Sequence[int],
        labels: Sequence[Tensor | None],
        oversample: bool,
        table: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.device = device
        self.own = [
            Batches(len(numbers), batch_size, seed=seed, labels=own, oversample=oversample, device=device)
            for numbers, seed, own in zip(rows, seeds, labels, strict=True)
        ]
        if len({batches.count for batches in self.own}) > 1:
            sizes = sorted({len(numbers) for numbers in rows})
            raise ValueError(f"all trials must have as many batches an epoch, got {sizes} rows; train them apart")
        self.count = self.own[0].count
        short = torch.long if device.type != "cpu" or table >= 2**31 else torch.int32  # half the room
        self.rows = [numbers.to(device, short) for numbers in rows]
        places = [batches.places() for batches in self.own]
        self.longest = [place.shape[1] for place in places]
        places = [nn.functional.pad(p, (0, self.width - p.shape[1]), value=-1) for p in places]
        self.masks = torch.stack([place >= 0 for place in places], 1).to(device, dtype)
        self.places = [place.clamp_min(0).to(device, short) for place in places]

    @property
    def width(self) -> int:
        """The length of the longest batch."""
        return max(self.longest)

    def epoch(self) -> Iterable[tuple[Tensor, Tensor]]:
        """Row numbers and mask (S, width) of every batch of one epoch."""
        return zip(self._row_numbers(), self.masks, strict=True)

    def _row_numbers(self) -> Iterable[Tensor]:
        """On a CPU one batch after the other, for want of room."""
        orders = [numbers[batches.order()] for numbers, batches in zip(self.rows, self.own, strict=True)]
        if self.device.type != "cpu":
            own = [order[place] for order, place in zip(orders, self.places, strict=True)]
            return torch.stack(own, 1)
        return (
            torch.stack([order[place] for order, place in zip(orders, places, strict=True)])
            for places in zip(*self.places, strict=True)
        )
