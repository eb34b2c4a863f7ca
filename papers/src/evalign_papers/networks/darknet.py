"""Darknet-19 and Tiny Darknet, the papers' networks for images (Redmon and Farhadi 2017, Table 6; pjreddie.com).

Every convolution but the last has no bias, batch norm and a leaky ReLU of slope 0.1; convolutions of 1 x 1 compress.
"""

from collections.abc import Sequence
from typing import NamedTuple

from torch import nn

SLOPE = 0.1


class Conv(NamedTuple):
    width: int
    kernel: int = 3


# Blocks of convolutions; a max pooling of 2 x 2 stands between two blocks.
Blocks = Sequence[Sequence[Conv]]
DARKNET19: Blocks = (
    (Conv(32),),
    (Conv(64),),
    (Conv(128), Conv(64, 1), Conv(128)),
    (Conv(256), Conv(128, 1), Conv(256)),
    (Conv(512), Conv(256, 1), Conv(512), Conv(256, 1), Conv(512)),
    (Conv(1024), Conv(512, 1), Conv(1024), Conv(512, 1), Conv(1024)),
)
TINY: Blocks = (
    (Conv(16),),
    (Conv(32),),
    (Conv(16, 1), Conv(128), Conv(16, 1), Conv(128)),
    (Conv(32, 1), Conv(256), Conv(32, 1), Conv(256)),
    (Conv(64, 1), Conv(512), Conv(64, 1), Conv(512), Conv(128, 1)),
)


def darknet(blocks: Blocks, classes: int, channels: int = 3) -> nn.Sequential:
    """Blocks of convolutions, a linear 1 x 1 one with a bias for the classes, and the mean over what is left of a
    image: (N, channels, H, W) -> (N, classes).

    >>> [type(layer).__name__ for layer in darknet(((Conv(4),),), classes=2)]
    ['Conv2d', 'BatchNorm2d', 'LeakyReLU', 'Conv2d', 'AdaptiveAvgPool2d', 'Flatten']
    """
    layers: list[nn.Module] = []
    width = channels
    for i, block in enumerate(blocks):
        if i:
            layers.append(nn.MaxPool2d(2))
        for conv in block:
            layers += [
                nn.Conv2d(width, conv.width, conv.kernel, padding=conv.kernel // 2, bias=False),
                nn.BatchNorm2d(conv.width),
                nn.LeakyReLU(SLOPE),
            ]
            width = conv.width
    return nn.Sequential(*layers, nn.Conv2d(width, classes, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten())


def darknet19(classes: int) -> nn.Sequential:
    """EAST's network for images: 19 convolutions, 20.8 million parameters at 1000 classes; 32 pixels a side at least.

    >>> sum(p.numel() for p in darknet19(1000).parameters())
    20842376
    """
    return darknet(DARKNET19, classes)


def tiny_darknet(classes: int) -> nn.Sequential:
    """BtG's network for images: 16 convolutions, a million parameters at 1000 classes; 16 pixels a side at least.

    >>> sum(p.numel() for p in tiny_darknet(1000).parameters())
    1042104
    """
    return darknet(TINY, classes)
