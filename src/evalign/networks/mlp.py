"""The papers' network for tables: linear layers with ReLU and dropout."""

from collections.abc import Sequence

from torch import nn


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
