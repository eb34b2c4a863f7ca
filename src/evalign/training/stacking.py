"""What a stack of networks needs beside the networks: dropout from outside, one AdamW for all, padded indices."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class SharedDropout(nn.Module):
    """Dropout whose rate and choice come from outside, so that each trial has its own of both: x keep / (1 - rate).

    `keep` is 1 where a value stays and 0 where it is dropped.

    >>> layer = SharedDropout(0.5)
    >>> layer.keep = torch.tensor([1.0, 0.0])
    >>> layer(torch.tensor([3.0, 3.0]))
    tensor([6., 0.])
    """

    keep: Tensor
    rate: Tensor

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.register_buffer("rate", torch.tensor(rate))
        self.register_buffer("keep", torch.empty(0))

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        return (x * self.keep).div_(1 - self.rate)


def with_shared_dropout(network: nn.Module, rate: float | None) -> nn.Module:
    for name, module in list(network.named_modules()):
        if type(module) is nn.Dropout:
            network.set_submodule(name, SharedDropout(module.p if rate is None else rate))
    return network


def dropout_widths(network: nn.Module, x: Tensor) -> dict[str, tuple[int, ...]]:
    """The shape of one sample at every dropout layer, found by sending two rows through."""
    widths: dict[str, tuple[int, ...]] = {}
    hooks = []
    for name, module in network.named_modules():
        if isinstance(module, SharedDropout):

            def note(_module: nn.Module, args: tuple[Tensor, ...], name: str = name) -> None:
                widths[name] = tuple(args[0].shape[1:])

            hooks.append(module.register_forward_pre_hook(note))
    network.eval()
    with torch.no_grad():
        network(x)
    for hook in hooks:
        hook.remove()
    return widths


class FlatParameters:
    """The parameters of S networks in one matrix (S, P), each parameter a view of it.

    One matrix, because an optimiser that walks over the parameters launches a dozen small kernels for each.
    """

    def __init__(self, stacked: dict[str, Tensor]) -> None:
        count = len(next(iter(stacked.values())))
        self.flat = torch.cat([p.detach().reshape(count, -1) for p in stacked.values()], 1)
        self.shapes = {name: p.shape for name, p in stacked.items()}
        self.views = self.views_of(self.flat)

    def views_of(self, flat: Tensor) -> dict[str, Tensor]:
        """A matrix (S, P) as the parameters that it holds, each a view of it."""
        parts = torch.split(flat, [shape[1:].numel() for shape in self.shapes.values()], 1)
        return {name: part.view(shape) for (name, shape), part in zip(self.shapes.items(), parts, strict=True)}

    def leaves(self, own: slice) -> dict[str, Tensor]:
        """The parameters of some of the networks, to take a gradient by."""
        return {name: view[own].detach().requires_grad_() for name, view in self.views.items()}

    @staticmethod
    def gradient(loss: Tensor, leaves: dict[str, Tensor]) -> Tensor:
        """d loss / d flat of these networks, a row for each."""
        parts = torch.autograd.grad(loss, list(leaves.values()))
        return torch.cat([part.flatten(1) if part.dim() > 1 else part[:, None] for part in parts], 1)


class StackedAdamW:
    """AdamW with one learning rate, weight decay and step count per network (Loshchilov and Hutter 2019)."""

    def __init__(self, parameters: FlatParameters) -> None:
        self.flat = parameters.flat
        self.first, self.second = torch.zeros_like(self.flat), torch.zeros_like(self.flat)
        self.steps = torch.zeros(len(self.flat), 1, dtype=torch.float64, device=self.flat.device)

    @torch.no_grad()
    def step(self, own: slice, gradient: Tensor, learning_rate: Tensor, decay: Tensor) -> None:
        """One update of these networks; `gradient` is (s, P), `learning_rate` and `decay` are (s, 1)."""
        flat, first, second, steps = (kept[own] for kept in self.state)
        steps += 1
        size = (learning_rate / (1 - 0.9**steps)).to(gradient.dtype)
        scale = (1 - 0.999**steps).rsqrt().to(gradient.dtype)
        first.lerp_(gradient, 0.1)
        second.mul_(0.999).addcmul_(gradient, gradient, value=0.001)
        flat.mul_(1 - learning_rate * decay)
        flat.sub_((size * first).div_(second.sqrt().mul_(scale).add_(1e-8)))

    def restart(self, s: int) -> None:
        self.steps[s] = 0
        self.first[s] = 0
        self.second[s] = 0

    @property
    def state(self) -> list[Tensor]:
        return [self.flat, self.first, self.second, self.steps]


def padded(indices: Sequence[Tensor], device: torch.device) -> tuple[Tensor, Tensor]:
    """Index vectors as one matrix, and a mask that is 0 where a shorter one was filled up."""
    longest = max(len(i) for i in indices)
    dtype = indices[0].dtype if device.type == "cpu" else torch.long  # a GPU would turn short ones into long every time
    matrix = torch.zeros(len(indices), longest, dtype=dtype, device=device)
    mask = torch.zeros(len(indices), longest, device=device)
    for row, i in enumerate(indices):
        matrix[row, : len(i)] = i.to(device)
        mask[row, : len(i)] = 1
    return matrix, mask
