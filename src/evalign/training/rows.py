"""Rows: what a network is trained on, in memory on one device."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rows:
    """Features, labels and weights on one device."""

    x: Tensor
    y: Tensor
    weight: Tensor

    @classmethod
    def of(cls, x: Tensor, y: Tensor, weight: Tensor | None = None) -> "Rows":
        dtype = x.dtype if x.is_floating_point() else torch.float32
        return cls(x, y, torch.ones(len(y), dtype=dtype, device=x.device) if weight is None else weight)

    def __getitem__(self, index: Tensor) -> "Rows":
        return Rows(self.x[index], self.y[index], self.weight[index])

    def joined(self, other: "Rows") -> "Rows":
        return Rows(*(torch.cat(pair) for pair in zip(vars(self).values(), vars(other).values(), strict=True)))

    def __len__(self) -> int:
        return len(self.y)
