"""A table kept in fewer bytes than float32 takes, and widened a batch at a time.

Of a table that is trained on in memory most is there only to be looked up: one-hot columns need a byte of the four, and
ranks two. A row's columns lie side by side, so that a batch is one gather of short rows, then a copy that stays in the
cache.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True)
class Layout:
    """Which columns of a table are kept in four bytes, as they are; in two, rounded to float16; in one, as 0 or 1.

    >>> layout = Layout(exact=(0,), rounded=(1,), flags=(2, 3))
    >>> layout.width, layout.row_bytes
    (4, 8)
    """

    exact: tuple[int, ...]
    rounded: tuple[int, ...]
    flags: tuple[int, ...]

    @property
    def width(self) -> int:
        return len(self.exact) + len(self.rounded) + len(self.flags)

    @property
    def row_bytes(self) -> int:
        """A multiple of four, so that every row's numbers begin where a processor wants them."""
        used = 4 * len(self.exact) + 2 * len(self.rounded) + len(self.flags)
        return -(-used // 4) * 4

    def zeros(self, rows: int) -> NDArray[np.uint8]:
        return np.zeros((rows, self.row_bytes), dtype=np.uint8)

    def views(self, data: NDArray[np.uint8]) -> tuple[NDArray[np.float32], NDArray[np.float16], NDArray[np.uint8]]:
        """The exact, the rounded and the flag columns of packed rows, to be written to."""
        two, one = 4 * len(self.exact), 4 * len(self.exact) + 2 * len(self.rounded)
        return (
            data[:, :two].view(np.float32),
            data[:, two:one].view(np.float16),
            data[:, one : one + len(self.flags)],
        )


@dataclass(frozen=True)
class PackedTable:
    """Rows of `Layout.row_bytes` bytes; what is taken out of it is float32, (..., width).

    It has as much of a tensor's form as training asks of a table of float32 numbers on a CPU.

    >>> layout = Layout(exact=(0,), rounded=(2,), flags=(1,))
    >>> rows = layout.zeros(2)
    >>> exact, rounded, flags = layout.views(rows)
    >>> exact[:, 0], rounded[:, 0], flags[:, 0] = [0.1, 0.2], [0.5, 1.5], [0, 1]
    >>> table = PackedTable(torch.from_numpy(rows), layout)
    >>> table[torch.tensor([1])]
    tensor([[0.2000, 1.0000, 1.5000]])
    """

    data: Tensor
    layout: Layout

    def __getitem__(self, index: Tensor | slice) -> Tensor:
        if isinstance(index, slice):
            return self._widened(self.data[index])
        # Indexing would copy byte after byte; this copies whole rows.
        rows = self._widened(self.data.index_select(0, index.reshape(-1)))
        return rows.view(*index.shape, self.layout.width)

    def _widened(self, rows: Tensor) -> Tensor:
        layout = self.layout
        two, one = 4 * len(layout.exact), 4 * len(layout.exact) + 2 * len(layout.rounded)
        parts = [
            rows[:, :two].view(torch.float32), rows[:, two:one].view(torch.float16),
            rows[:, one : one + len(layout.flags)],
        ]  # fmt: skip
        return torch.cat(parts, 1).to(self.dtype).index_select(1, self._places)

    @cached_property
    def _places(self) -> Tensor:
        """Where each column of the table stands among the parts."""
        return torch.tensor([*self.layout.exact, *self.layout.rounded, *self.layout.flags]).argsort()

    def joined(self, other: "PackedTable") -> "PackedTable":
        return PackedTable(torch.cat([self.data, other.data]), self.layout)

    def __len__(self) -> int:
        return len(self.data)

    def dim(self) -> int:
        return 2

    @property
    def shape(self) -> torch.Size:
        return torch.Size([len(self), self.layout.width])

    @property
    def is_cuda(self) -> bool:
        return self.data.is_cuda

    @property
    def device(self) -> torch.device:
        return self.data.device

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32


Table = Tensor | PackedTable


def number_type(x: Table) -> torch.dtype:
    """The type that a network's numbers have: that of its input, of bytes float32.

    >>> number_type(torch.zeros(2, dtype=torch.uint8))
    torch.float32
    """
    return x.dtype if x.dtype.is_floating_point else torch.float32
