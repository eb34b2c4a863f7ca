"""Linear layers with ReLU and dropout, forward and back on a CPU, in room that is taken once.

Autograd asks the heap for every tensor of a step anew and gives it back in another order: what lies between, free and
too short for the next one, grew to as much as a step needs. Here nothing is asked for.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

SOME = 256  # rows


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


class PlainLayers:
    """a_l = ReLU(s (a_(l-1) W_l^T + b_l)) where dropout keeps it, s = 1 / (1 - rate); the last layer is linear alone.

    s may stand inside of ReLU because it is positive. Of a layer only a_l stays: where it is 0, so is the gradient,
    dropped or negative. On the way back the gradient of layer l takes the place of a_l, which nobody needs any more.
    `names` are those of the linear layers and `dropouts` those of the dropout layers between them.
    """

    def __init__(
        self, names: Sequence[str], dropouts: Sequence[str], widths: Sequence[int], rows: int, dtype: torch.dtype
    ) -> None:
        self.names, self.dropouts = names, dropouts
        self.rows = rows
        self.outputs = [torch.empty(rows, width, dtype=dtype) for width in widths]
        self.gradient = torch.empty(SOME * max(widths), dtype=dtype)
        self.turn = 0  # of whose forward pass the outputs are

    @classmethod
    def of(cls, network: nn.Module, rows: int) -> "PlainLayers | None":
        """Room for `rows` rows, if the network is linear, ReLU, dropout, linear, ..., linear, else None.

        >>> layers = [nn.Linear(2, 3), nn.ReLU(), SharedDropout(0.5), nn.Linear(3, 1)]
        >>> PlainLayers.of(nn.Sequential(*layers), 5) is None, PlainLayers.of(nn.Sequential(*layers[1:]), 5) is None
        (False, True)
        """
        if type(network) is not nn.Sequential or len(network) < 4 or len(network) % 3 != 1:
            return None
        kinds = [type(layer) for layer in network]
        if kinds != [nn.Linear, nn.ReLU, SharedDropout] * (len(network) // 3) + [nn.Linear]:
            return None
        linear = [layer for layer in network if isinstance(layer, nn.Linear)]
        if any(layer.bias is None for layer in linear):
            return None
        names = [str(i) for i in range(0, len(network), 3)]
        dropouts = [str(i) for i in range(2, len(network), 3)]
        return cls(names, dropouts, [layer.out_features for layer in linear[:-1]], rows, linear[0].weight.dtype)

    def logits(self, x: Tensor, parameters: dict[str, Tensor], keeps: Sequence[Tensor], scales: list[float]) -> Tensor:
        """(n, C) with a gradient by `parameters`; `keeps` (n, width) are True where a layer keeps a value.

        The gradient must be asked for before this is called again, and once.
        """
        found: Tensor = _Through.apply(self, x, keeps, scales, *self._of(parameters))  # type: ignore[no-untyped-call]
        return found

    @torch.no_grad()
    def judged(self, x: Tensor, parameters: dict[str, Tensor]) -> Tensor:
        """Logits without dropout and without a gradient, of at most as many rows as there is room for."""
        flat = self._of(parameters)
        return self.forward(x, flat, [None] * len(self.outputs), [1.0] * len(self.outputs))

    def _of(self, parameters: dict[str, Tensor]) -> list[Tensor]:
        return [parameters[f"{name}.{kind}"] for name in self.names for kind in ("weight", "bias")]

    def forward(
        self, x: Tensor, flat: Sequence[Tensor], keeps: Sequence[Tensor | None], scales: Sequence[float]
    ) -> Tensor:
        self.turn += 1
        weights, biases, below = flat[::2], flat[1::2], x
        for weight, bias, room, keep, scale in zip(weights[:-1], biases[:-1], self.outputs, keeps, scales, strict=True):
            below = torch.addmm(bias, below, weight.t(), beta=scale, alpha=scale, out=room[: len(x)]).relu_()
            if keep is not None:
                for part, kept in zip(torch.split(below, SOME), torch.split(keep, SOME), strict=True):
                    part.mul_(kept)  # which widens `kept` first: a little at a time
        return torch.addmm(biases[-1], below, weights[-1].t())

    def backward(self, x: Tensor, flat: Sequence[Tensor], scales: list[float], gradient: Tensor) -> list[Tensor]:
        """d loss / d weight and bias of every layer, for the gradient by the logits."""
        weights, found = flat[::2], []
        for layer in reversed(range(len(weights))):
            last = layer == len(scales)
            below = x if layer == 0 else self.outputs[layer - 1][: len(x)]
            scale = 1.0 if last else scales[layer]
            found += [gradient.sum(0).mul_(scale), (gradient.t() @ below).mul_(scale)]
            if layer:
                for own, above in zip(torch.split(below, SOME), torch.split(gradient, SOME), strict=True):
                    room = self.gradient[: own.numel()].view_as(own)
                    torch.addmm(room, above, weights[layer], beta=0, alpha=scale, out=room)
                    torch.ops.aten.threshold_backward.grad_input(room, own, 0, grad_input=own)
                gradient = below
        return found[::-1]


class _Through(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, layers: PlainLayers, x: Tensor, keeps: Sequence[Tensor], scales: list[float], *flat: Tensor
    ) -> Tensor:
        ctx.layers, ctx.x, ctx.scales, ctx.flat = layers, x, scales, flat
        found = layers.forward(x, flat, keeps, scales)
        ctx.turn = layers.turn
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.turn != ctx.layers.turn:
            raise RuntimeError("the outputs of these layers were overwritten; ask for a gradient once, before the next")
        ctx.layers.turn += 1
        return None, None, None, None, *ctx.layers.backward(ctx.x, ctx.flat, ctx.scales, gradient)
