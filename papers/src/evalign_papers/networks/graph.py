"""Message passing over complete graphs of a few nodes: who talks with whom (BtG Sec. 5.3, CocktailParty).

With six people a graph has fifteen pairs, so everything is dense and no graph library is needed.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class PairNetwork(nn.Module):
    """Affinities of all pairs of a complete graph: rows (F, P k + E p) -> logits (F, E).

    A row is a graph: the P nodes' k features, then the E = P (P - 1) / 2 pairs' p features, in the order of
    `itertools.combinations`. With h_i a node's state and e_ij a pair's features, each of `rounds` rounds is

        h_i <- h_i + update(h_i, sum_{j != i} message(h_i, h_j, e_ij)),

    and the logit of a pair is the mean of affinity(h_i, h_j, e_ij) and affinity(h_j, h_i, e_ij): neither the order of
    the nodes nor that of a pair's two ends matters.

    >>> PairNetwork(6, 4, 1)(torch.zeros(2, 6 * 4 + 15)).shape
    torch.Size([2, 15])
    """

    first: Tensor
    second: Tensor

    def __init__(
        self, nodes: int, node_features: int, pair_features: int, *, hidden: int = 32, rounds: int = 2
    ) -> None:
        super().__init__()
        self.shape = (nodes, node_features, pair_features)
        ends = torch.combinations(torch.arange(nodes))
        # Both directions of every pair: the message into `first` comes from `second`.
        self.register_buffer("first", torch.cat([ends[:, 0], ends[:, 1]]))
        self.register_buffer("second", torch.cat([ends[:, 1], ends[:, 0]]))
        self.inlet = _layers(node_features, hidden, hidden)
        both = 2 * hidden + pair_features
        self.messages = nn.ModuleList(_layers(both, hidden, hidden) for _ in range(rounds))
        self.updates = nn.ModuleList(_layers(2 * hidden, hidden, hidden) for _ in range(rounds))
        self.affinity = _layers(both, hidden, 1)

    def forward(self, x: Tensor) -> Tensor:
        nodes, k, p = self.shape
        count = len(self.first) // 2
        h = self.inlet(x[:, : nodes * k].reshape(-1, nodes, k))
        pairs = x[:, nodes * k :].reshape(-1, count, p)
        pairs = torch.cat([pairs, pairs], 1)
        # A sum over the edges into each node as a product: no scatter, which has no fixed order on a GPU.
        into = (torch.arange(nodes, device=x.device)[:, None] == self.first).to(x.dtype)
        for message, update in zip(self.messages, self.updates, strict=True):
            sent = message(self._both(h, pairs))
            h = h + update(torch.cat([h, into @ sent], -1))
        logits: Tensor = self.affinity(self._both(h, pairs)).squeeze(-1)
        return (logits[:, :count] + logits[:, count:]) / 2

    def _both(self, h: Tensor, pairs: Tensor) -> Tensor:
        return torch.cat([h[:, self.first], h[:, self.second], pairs], -1)


def _layers(inputs: int, hidden: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, outputs))


def pair_network(nodes: int, width: int, hidden: Sequence[int], rounds: int = 2) -> PairNetwork:
    """The network for rows of `width` numbers that hold one number for every pair and the rest for nodes.

    >>> pair_network(6, 39, (16,)).shape
    (6, 4, 1)
    """
    pairs = nodes * (nodes - 1) // 2
    features, rest = divmod(width - pairs, nodes)
    if rest or features < 1 or len(hidden) != 1:
        raise ValueError(
            f"a graph of {nodes} nodes needs rows of {nodes} k + {pairs} numbers and one hidden width, "
            f"got {width} and {tuple(hidden)}"
        )
    return PairNetwork(nodes, features, 1, hidden=hidden[0], rounds=rounds)
