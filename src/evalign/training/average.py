"""An average of the weights along the way: steadier than the last update, which still jumps with every batch."""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn


def weight_of_newest(updates: Tensor, share: float | Tensor) -> Tensor:
    """What the newest of `updates` weighs in an average over about the last `share` of them: 1 / max(1, share x t).

    The horizon grows with the updates, so that the start is forgotten at any time and no length need be known
    beforehand: (k / t)^(1 / share - 1), nearly, is what update k still counts after t of them (polynomial decay,
    Shamir and Zhang 2013). Share 1 is the plain mean, share 0 the last update alone.

    >>> weight_of_newest(torch.tensor([1.0, 10.0, 40.0]), 0.1)
    tensor([1.0000, 1.0000, 0.2500])
    """
    return (updates * share).clamp_min(1).reciprocal()


class WeightAverage:
    """The average of a network's parameters over about the last `share` of a stage's updates so far.

    a <- a + (w - a) / max(1, share x t) after update t. Buffers are not averaged: those of batch norm are averages
    already, and stay those that training has. Everything is on the device, so that a recorded step can hold it.
    """

    def __init__(self, network: nn.Module, share: float) -> None:
        self.share = share
        self.parameters = [parameter.detach() for parameter in network.parameters()]
        self.values = [parameter.clone() for parameter in self.parameters]
        first = self.values[0]
        self.updates = torch.zeros((), dtype=torch.promote_types(first.dtype, torch.float32), device=first.device)

    @torch.no_grad()
    def update(self) -> None:
        """To be called after every update of the parameters."""
        self.updates += 1
        newest = weight_of_newest(self.updates, self.share).to(self.values[0].dtype)
        torch._foreach_lerp_(self.values, self.parameters, [newest] * len(self.values))

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """The network has the averaged parameters inside, and its own again afterwards."""
        own = [parameter.clone() for parameter in self.parameters]
        torch._foreach_copy_(self.parameters, self.values)
        try:
            yield
        finally:
            torch._foreach_copy_(self.parameters, own)

    @property
    def state(self) -> list[Tensor]:
        """All that an update changes."""
        return [self.updates, *self.values]
