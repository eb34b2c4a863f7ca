"""Compact storage of an encoded table, converted to float32 one batch at a time.

One-hot columns need one byte instead of four, ranks two. The columns of a row are adjacent, so that a batch is one
gather of short rows and a conversion that stays in the cache.
"""

import contextlib
import ctypes
import sys
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True)
class Layout:
    """Columns stored as float32 (`exact`), as float16 (`rounded`) and as single bytes 0 or 1 (`flags`).

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
        """Bytes of a row, a multiple of four so that float32 values are aligned."""
        used = 4 * len(self.exact) + 2 * len(self.rounded) + len(self.flags)
        return -(-used // 4) * 4

    def zeros(self, rows: int) -> NDArray[np.uint8]:
        return np.zeros((rows, self.row_bytes), dtype=np.uint8)

    def views(self, data: NDArray[np.uint8]) -> tuple[NDArray[np.float32], NDArray[np.float16], NDArray[np.uint8]]:
        """Writable views of the exact, rounded and flag columns of packed rows."""
        two, one = 4 * len(self.exact), 4 * len(self.exact) + 2 * len(self.rounded)
        return (data[:, :two].view(np.float32), data[:, two:one].view(np.float16), data[:, one : one + len(self.flags)])


@dataclass(frozen=True)
class PackedTable:
    """Packed rows; indexing gives float32 tensors (..., width).

    Implements the part of the tensor interface that the training loop uses.

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
        # index_select copies whole rows; indexing would copy single bytes.
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
        """Position of each column of the table among the stored parts."""
        return torch.tensor([*self.layout.exact, *self.layout.rounded, *self.layout.flags]).argsort()

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


EncodedTable = Tensor | PackedTable


def number_type(x: EncodedTable) -> torch.dtype:
    """The dtype of a network's values: that of its input, or float32 for packed rows.

    >>> number_type(torch.zeros(2, dtype=torch.uint8))
    torch.float32
    """
    return x.dtype if x.dtype.is_floating_point else torch.float32


def release_memory() -> None:
    """Return freed heap memory to the operating system before a long run; does nothing without glibc.

    Encoding a table column by column fragments the heap into pieces that are too small for a batch.

    >>> release_memory()
    """
    with contextlib.suppress(AttributeError, OSError, TypeError):  # no glibc, or no C library found
        ctypes.CDLL(None).malloc_trim(0)
    if "pyarrow" in sys.modules:  # text columns are in Arrow's memory pool
        sys.modules["pyarrow"].default_memory_pool().release_unused()
