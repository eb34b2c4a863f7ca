"""Which compiled form takes a tensor: numba's on a CPU, Triton's on a GPU, or none."""

from functools import cache
from importlib.util import find_spec
from types import ModuleType

import torch
from torch import Tensor

from evalign.kernels import compiled

ON_GPU = (torch.float32, torch.float16, torch.bfloat16)


@cache
def has_triton() -> bool:
    return find_spec("triton") is not None


def takes(z: Tensor) -> bool:
    """Whether there is a compiled form for logits of this kind, outside of `torch.compile` and `vmap`."""
    if torch.compiler.is_compiling() or torch._C._functorch.is_functorch_wrapped_tensor(z):
        return False
    if z.device.type == "cpu":
        return z.dtype == torch.float32 and compiled.available()
    return z.device.type == "cuda" and z.dtype in ON_GPU and has_triton()


# Imported when first needed: numba takes half a second, and Triton more.


def rows(z: Tensor) -> ModuleType:
    if z.is_cuda:
        from evalign.kernels import triton_rows

        return triton_rows
    if not takes(z):
        from evalign.kernels import torch_rows

        return torch_rows
    from evalign.kernels import compiled_rows

    return compiled_rows


def columns(z: Tensor) -> ModuleType:
    if z.is_cuda:
        from evalign.kernels import triton_columns

        return triton_columns
    from evalign.kernels import compiled_columns

    return compiled_columns
