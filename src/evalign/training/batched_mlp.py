"""Several multilayer perceptrons at once on a CPU: batched products, a hand-written backward pass, buffers kept.

Autograd under `vmap` spends more time on bookkeeping than on arithmetic at the batch sizes of small tables, and
allocates every intermediate tensor anew, which fragments the heap.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class SharedDropout(nn.Module):
    """Dropout with rate and mask set from outside, so that stacked networks have their own: x keep / (1 - rate).

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


class BatchedMLP:
    """a_l = ReLU(a_(l-1) W_l^T + b_l) m_l for S networks, m_l a mask that holds 0 or 1 / (1 - rate); last layer linear.

    Only a_l is stored: where it is 0 the gradient is 0, be it dropped or negative. The backward pass overwrites a_l
    with the gradient by it. `names` are the linear layers, `dropouts` the dropout layers between them.
    """

    def __init__(
        self,
        names: Sequence[str],
        dropouts: Sequence[str],
        widths: Sequence[int],
        *,
        networks: int,
        rows: int,
        dtype: torch.dtype,
    ) -> None:
        self.names, self.dropouts, self.rows = names, dropouts, rows
        self.outputs = [torch.empty(networks, rows, width, dtype=dtype) for width in widths]
        self.scratch = torch.empty(networks * rows * max(widths), dtype=dtype)
        self.input: Tensor | None = None  # of the last forward pass, until its gradient was taken

    @classmethod
    def of(cls, network: nn.Module, networks: int, rows: int, prefix: str = "") -> "BatchedMLP | None":
        """Buffers for `networks` times `rows` rows if the network is linear, ReLU, dropout, ..., linear, else None.

        >>> layers = [nn.Linear(2, 3), nn.ReLU(), SharedDropout(0.5), nn.Linear(3, 1)]
        >>> BatchedMLP.of(nn.Sequential(*layers), 1, 5) is None, BatchedMLP.of(nn.Sequential(*layers[1:]), 1, 5) is None
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
        return cls(
            [f"{prefix}{i}" for i in range(0, len(network), 3)], [f"{prefix}{i}" for i in range(2, len(network), 3)],
            [layer.out_features for layer in linear[:-1]], networks=networks, rows=rows, dtype=linear[0].weight.dtype,
        )  # fmt: skip

    @torch.no_grad()
    def forward(self, x: Tensor, parameters: dict[str, Tensor], masks: Sequence[Tensor] | None = None) -> Tensor:
        """Logits (s, n, C) of x (s, n, F), s and n at most what there are buffers for; `masks` (s, n, width)."""
        self.input, below, (count, rows, _) = x, x, x.shape
        for i, name in enumerate(self.names[:-1]):
            weight, bias = parameters[f"{name}.weight"], parameters[f"{name}.bias"]
            out = self.outputs[i][:count, :rows]
            below = torch.baddbmm(bias[:, None], below, weight.transpose(1, 2), out=out).relu_()
            if masks is not None:
                below.mul_(masks[i])
        last = self.names[-1]
        return torch.baddbmm(parameters[f"{last}.bias"][:, None], below, parameters[f"{last}.weight"].transpose(1, 2))

    @torch.no_grad()
    def backward(
        self,
        slope: Tensor,
        parameters: dict[str, Tensor],
        scales: Sequence[Tensor],
        out: dict[str, Tensor],
        *,
        by_input: bool = False,
    ) -> Tensor | None:
        """Write d loss / d parameter into `out`, for the loss's gradient by the logits of the last forward pass.

        `scales` (s, 1, 1) are the 1 / (1 - rate) of each dropout layer. Returns d loss / d x if `by_input`. To be
        called once per forward pass.
        """
        if self.input is None:
            raise RuntimeError("a backward pass needs the outputs of a forward pass, which the last one overwrote")
        x, self.input = self.input, None
        count, rows, _ = x.shape
        for layer in reversed(range(len(self.names))):
            below = self.outputs[layer - 1][:count, :rows] if layer else x
            name = self.names[layer]
            torch.sum(slope, 1, out=out[f"{name}.bias"])
            out[f"{name}.weight"].copy_(torch.bmm(slope.transpose(1, 2), below))
            if layer:
                # Scaled before the product: there it has fewer numbers. `slope` is this pass's own from here on.
                room = self.scratch[: below.numel()].view(below.shape)
                torch.bmm(slope.mul_(scales[layer - 1]), parameters[f"{name}.weight"], out=room)
                slope = torch.ops.aten.threshold_backward.grad_input(room, below, 0, grad_input=below)
        return torch.bmm(slope, parameters[f"{self.names[0]}.weight"]) if by_input else None
