"""Ensembles: several networks trained on the same batches, each by its own loss, that predict by their mean.

All members of an `Ensemble` are one batched product per layer. On a CPU k members cost about k times one; on a GPU that
one network does not fill, several take the same time.
"""

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

Sharing = Literal["none", "rank_one"]
SHARING: tuple[Sharing, ...] = ("none", "rank_one")


class MemberLinear(nn.Module):
    """A linear layer for each member, (k, n, inputs) -> (k, n, outputs)."""

    def __init__(self, members: int, inputs: int, outputs: int) -> None:
        super().__init__()
        bound = inputs**-0.5  # as nn.Linear starts
        self.weight = nn.Parameter(torch.empty(members, inputs, outputs).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(members, 1, outputs).uniform_(-bound, bound))

    def forward(self, x: Tensor) -> Tensor:
        return torch.baddbmm(self.bias, x, self.weight)


class RankOneLinear(nn.Module):
    """One weight matrix for all members, scaled by each on both sides: ((x * r_k) W) * s_k + b_k.

    BatchEnsemble (Wen et al. 2020); k members have hardly more weights than one. r starts with random signs where
    `signs`, else with ones, as in TabM (Gorishniy et al. 2024), which has signs in its first layer alone.
    """

    def __init__(self, members: int, inputs: int, outputs: int, *, signs: bool = False) -> None:
        super().__init__()
        bound = inputs**-0.5
        ones = torch.ones(members, 1, inputs)
        self.before = nn.Parameter(2 * torch.randint_like(ones, 2) - 1 if signs else ones)
        self.weight = nn.Parameter(torch.empty(inputs, outputs).uniform_(-bound, bound))
        self.after = nn.Parameter(torch.ones(members, 1, outputs))
        self.bias = nn.Parameter(torch.empty(members, 1, outputs).uniform_(-bound, bound))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addcmul(self.bias, (x * self.before) @ self.weight, self.after)


class Ensemble(nn.Module):
    """`members` networks like `mlp`: logits of each in training, (k, n, C), of their mean in evaluation, (n, C).

    In evaluation the output is log p of the mean probabilities p = 1/k sum_m softmax(z_m), so that softmax returns p.
    `sharing` "none" gives each its own weights; "rank_one" shares all but two scales, the biases
    and the last layer.

    >>> network = Ensemble(4, 3, hidden=(8,), members=5)
    >>> x = torch.zeros(2, 4)
    >>> network(x).shape, network.eval()(x).shape
    (torch.Size([5, 2, 3]), torch.Size([2, 3]))
    """

    def __init__(
        self,
        features: int,
        classes: int,
        hidden: Sequence[int] = (512, 256, 128),
        dropout: float = 0.25,
        *,
        members: int = 8,
        sharing: Sharing = "none",
    ) -> None:
        super().__init__()
        self.members = members
        self.layers, self.dropouts = nn.ModuleList(), nn.ModuleList()
        width = features
        for i, size in enumerate(hidden):
            self.layers.append(
                MemberLinear(members, width, size)
                if sharing == "none"
                else RankOneLinear(members, width, size, signs=i == 0)
            )
            self.dropouts.append(nn.Dropout(dropout))
            width = size
        self.last = MemberLinear(members, width, classes)

    def forward(self, x: Tensor) -> Tensor:
        z = x.expand(self.members, -1, -1)
        for layer, dropout in zip(self.layers, self.dropouts, strict=True):
            # Rows first, as the dropout masks of training.stacked_networks have them.
            z = dropout(layer(z).relu().transpose(0, 1)).transpose(0, 1)
        z = self.last(z)
        return z if self.training else mean_of_members(z)


class MeanOfNetworks(nn.ModuleList):
    """Networks trained separately that predict by their mean: log of the mean of their probabilities, (n, C).

    >>> MeanOfNetworks([nn.Linear(4, 3), nn.Linear(4, 3)])(torch.zeros(2, 4)).shape
    torch.Size([2, 3])
    """

    def forward(self, x: Tensor) -> Tensor:
        # In float64, then rounded: a float32 sum depends on the position of a row in its batch.
        logits = torch.stack([network(x) for network in self])
        return mean_of_members(logits.double()).to(logits.dtype)


def mean_of_members(logits: Tensor) -> Tensor:
    """log of the mean over members of the probabilities, (k, n, C) -> (n, C).

    >>> mean_of_members(torch.tensor([[[9.0, 9.0]], [[50.0, 50.0]]])).exp()
    tensor([[0.5000, 0.5000]])
    """
    return logits.log_softmax(-1).logsumexp(0) - math.log(len(logits))
