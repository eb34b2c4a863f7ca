"""Input layer for images: bytes to normalised floats, shifted and mirrored in training."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

BORDER = 4


class Pictures(nn.Module):
    """uint8 (N, H, W, 3) -> float (N, 3, H, W), (x / 255 - mean) / std, channels last, by a permutation.

    With `augment`, in training mode, every image is moved by up to `border` pixels each way, its borders reflected,
    and mirrored half of the time: one gather of bytes for the whole batch, from torch's own random numbers.

    >>> layer = Pictures(mean=(0.5, 0.5, 0.5), std=(0.25, 0.25, 0.25)).eval()
    >>> x = layer(torch.full((2, 8, 8, 3), 255, dtype=torch.uint8))
    >>> x.shape, round(float(x.max()), 4), x.is_contiguous(memory_format=torch.channels_last)
    (torch.Size([2, 3, 8, 8]), 2.0, True)
    """

    scale: Tensor
    shift: Tensor

    def __init__(
        self, mean: Sequence[float], std: Sequence[float], *, augment: bool = True, border: int = BORDER
    ) -> None:
        super().__init__()
        middle, spread = torch.tensor(mean, dtype=torch.float64), torch.tensor(std, dtype=torch.float64)
        # x / 255 / std - mean / std as one multiplication and one addition
        self.register_buffer("scale", (1 / (255 * spread)).float())
        self.register_buffer("shift", (-middle / spread).float())
        self.augment, self.border = augment, border

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype != torch.uint8 or x.dim() != 4:
            raise ValueError(f"images must be uint8 (N, H, W, 3), got {x.dtype} {tuple(x.shape)}")
        if self.training and self.augment:
            x = moved(x, self.border)
        return torch.addcmul(self.shift, x.to(self.scale.dtype), self.scale).permute(0, 3, 1, 2)


def moved(x: Tensor, border: int) -> Tensor:
    """Every image shifted by -border … border pixels along both sides and mirrored or not, independently."""
    n, height, width = x.shape[:3]
    if border >= min(height, width):
        raise ValueError(f"images must be larger than the border of {border} pixels, got {height} x {width}")
    down, right = torch.randint(-border, border + 1, (2, n, 1), device=x.device)
    mirrored = torch.rand(n, 1, device=x.device) < 0.5
    columns = torch.arange(width, device=x.device)
    rows = _reflected(torch.arange(height, device=x.device) + down, height)
    columns = _reflected(torch.where(mirrored, width - 1 - columns, columns) + right, width)
    picture = torch.arange(n, device=x.device)[:, None, None]
    return x[picture, rows[:, :, None], columns[:, None, :]]


def _reflected(index: Tensor, size: int) -> Tensor:
    """Positions beyond either end, mirrored back: -1 becomes 1, and size becomes size - 2.

    >>> _reflected(torch.arange(-2, 6), 4).tolist()
    [2, 1, 0, 1, 2, 3, 2, 1]
    """
    return size - 1 - (size - 1 - index.abs()).abs()


def channel_statistics(x: Tensor) -> tuple[list[float], list[float]]:
    """Mean and standard deviation of each channel of uint8 (N, H, W, 3), of values scaled to [0, 1].

    By counting bytes: exact for any number of images, and never a float copy of them. A constant channel gets the
    deviation of one step of 1/255, so that it can be divided by.

    >>> mean, std = channel_statistics(torch.tensor([0, 255], dtype=torch.uint8).reshape(2, 1, 1, 1).expand(2, 4, 4, 3))
    >>> mean, std
    ([0.5, 0.5, 0.5], [0.5, 0.5, 0.5])
    """
    values = torch.arange(256, dtype=torch.float64) / 255
    means, stds = [], []
    for channel in range(x.shape[3]):
        counts = torch.bincount(x[..., channel].reshape(-1), minlength=256).cpu().double()
        share = counts / counts.sum()
        mean = float(share @ values)
        means.append(mean)
        stds.append(max(float(share @ (values - mean) ** 2) ** 0.5, 1 / 255))
    return means, stds
