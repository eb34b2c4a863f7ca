"""Batches on a GPU that are like one before: what was found out about that one need not be found out again.

No value of such a batch is looked at, so that all there is to check and to decide follows from its kind. A small one
waits for the host, and the way to its launches is longer than they are.
"""

from typing import Any

from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor as is_wrapped
from torch.compiler import is_compiling

from evalign.kernels.interface import Ready

Kind = tuple[Any, ...]
MOST = 1024  # kinds: batches of ever new sizes shall not fill the memory


def kind(z: Tensor, y: Tensor) -> Kind | None:
    """All of a batch that its loss depends on, but values; None on a CPU and under `torch.compile` or `vmap`."""
    if is_compiling() or type(z) is not Tensor or type(y) is not Tensor or not z.is_cuda or is_wrapped(z):
        return None
    return z.shape, z.stride(), z.dtype, z.data_ptr() % 16, z.get_device(), y.shape, y.stride(), y.dtype, y.get_device()


class Known(dict[Kind, Ready]):
    """Launches by `kind`; a loss that is changed, copied or saved starts without."""

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return Known, ()

    def learn(self, kind: Kind, ready: Ready) -> None:
        if len(self) >= MOST:
            self.clear()
        self[kind] = ready
