"""Rows: what a network is trained on, in memory on one device."""

from dataclasses import dataclass

import torch
from torch import Tensor

from evalign.training.packed import PackedTable, Table, number_type


@dataclass(frozen=True)
class Rows:
    """Features, labels and weights on one device."""

    x: Table
    y: Tensor
    weight: Tensor

    @classmethod
    def of(cls, x: Table, y: Tensor, weight: Tensor | None = None) -> "Rows":
        return cls(x, y, torch.ones(len(y), dtype=number_type(x), device=x.device) if weight is None else weight)

    def __getitem__(self, index: Tensor) -> "Rows":
        return Rows(self.x[index], self.y[index], self.weight[index])

    def joined(self, other: "Rows") -> "Rows":
        y, weight = torch.cat([self.y, other.y]), torch.cat([self.weight, other.weight])
        if isinstance(self.x, PackedTable) and isinstance(other.x, PackedTable):
            return Rows(self.x.joined(other.x), y, weight)
        return Rows(torch.cat([self.x[:], other.x[:]]), y, weight)

    def __len__(self) -> int:
        return len(self.y)
