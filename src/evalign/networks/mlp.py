"""Networks for encoded tables: multilayer perceptrons, ensembles of them, with or without embeddings of the columns.

All members of an `Ensemble` are one batched product per layer. On a CPU k members cost about k times one; on a GPU that
one network does not fill, several take the same time.
"""

import math
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from evalign.networks.embedding import Fields, TableEmbedding
from evalign.tables.columns import CategoryColumn
from evalign.tables.encode import TableEncoder


class MemberLinear(nn.Module):
    """A linear layer for each member, (k, n, inputs) -> (k, n, outputs)."""

    def __init__(self, members: int, inputs: int, outputs: int) -> None:
        super().__init__()
        bound = inputs**-0.5  # as in nn.Linear
        self.weight = nn.Parameter(torch.empty(members, inputs, outputs).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(members, 1, outputs).uniform_(-bound, bound))

    def forward(self, x: Tensor) -> Tensor:
        return torch.baddbmm(self.bias, x, self.weight)


class Ensemble(nn.Module):
    """`members` networks like `mlp`: logits of each in training, (k, n, C), of their mean in evaluation, (n, C).

    In evaluation the output is log p of the mean probabilities p = 1/k sum_m softmax(z_m), so that softmax returns p.
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
    ) -> None:
        super().__init__()
        self.members = members
        self.layers, self.dropouts = nn.ModuleList(), nn.ModuleList()
        width = features
        for size in hidden:
            self.layers.append(MemberLinear(members, width, size))
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
    """Separately trained networks with averaged predictions: log of the mean of their probabilities, (n, C).

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


def mlp(features: int, classes: int, hidden: Sequence[int] = (512, 256, 128), dropout: float = 0.25) -> nn.Sequential:
    """features -> hidden -> classes, ReLU and dropout after every hidden layer (EAST Sec. E; BtG uses 32, 16).

    >>> mlp(4, 2, hidden=(8,))
    Sequential(
      (0): Linear(in_features=4, out_features=8, bias=True)
      (1): ReLU(inplace=True)
      (2): Dropout(p=0.25, inplace=False)
      (3): Linear(in_features=8, out_features=2, bias=True)
    )
    """
    layers: list[nn.Module] = []
    width = features
    for size in hidden:
        layers += [nn.Linear(width, size), nn.ReLU(inplace=True), nn.Dropout(dropout)]
        width = size
    return nn.Sequential(*layers, nn.Linear(width, classes))


def fields_of(encoder: TableEncoder) -> Fields:
    """Positions of the columns for embeddings: a number's rank with its quantiles as edges, else its scaled value.

    >>> import pandas as pd
    >>> frame = pd.DataFrame({"age": [20.0, 40.0, 60.0], "job": ["cook", "smith", "cook"]})
    >>> fields = fields_of(TableEncoder(numeric="both").fit(frame))
    >>> fields.features, fields.numbers, fields.categories, np.round(fields.edges, 1).tolist()
    (4, (1,), ((2, 4),), [[-5.2, 0.0, 5.2]])
    """
    numbers, edges, categories, start = [], [], [], 0
    for column in encoder.columns_:
        if isinstance(column, CategoryColumn):
            categories.append((start, start + column.width))
        elif column.kind == "number" and column.scale:
            numbers.append(start + column.both)
            known = () if column.quantiles is None else np.unique(column.ranked(np.array(column.quantiles))).tolist()
            edges.append(tuple(known))
        start += column.width
    return Fields(start, tuple(numbers), tuple(edges), tuple(categories))


Network = Literal["mlp", "embedding"]
NETWORKS: tuple[Network, ...] = ("mlp", "embedding")


def table_network(
    network: Network,
    fields: Fields,
    classes: int,
    hidden: Sequence[int] = (512, 256, 128),
    dropout: float = 0.25,
    *,
    ensemble: int = 1,
    **embedding: Any,
) -> nn.Module:
    """The network for a table, by name: "mlp" on the columns, "embedding" with piecewise linear curves and
    vectors of categories. Members of an `ensemble` share the embedding.

    >>> fields = Fields(3, numbers=(0,), edges=((0.0, 1.0),), categories=((1, 3),))
    >>> table_network("embedding", fields, 2, hidden=(16,), ensemble=4)[1].members
    4
    """
    front = TableEmbedding(fields, **embedding) if network == "embedding" else None
    features = fields.features if front is None else front.width
    body = (
        mlp(features, classes, hidden, dropout)
        if ensemble == 1
        else Ensemble(features, classes, hidden, dropout, members=ensemble)
    )
    return body if front is None else nn.Sequential(front, body)
