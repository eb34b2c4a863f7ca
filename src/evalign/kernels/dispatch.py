"""Which compiled form takes a tensor: numba's on a CPU, Triton's on a GPU, or none."""

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

import torch
from torch import Tensor

from evalign.kernels.cpu import jit as compiled

ON_GPU = (torch.float32, torch.float16, torch.bfloat16)


@cache
def has_triton() -> bool:
    return find_spec("triton") is not None


def takes(z: Tensor) -> bool:
    """Whether there is a compiled form for logits of this kind, outside of `torch.compile` and `vmap`."""
    if torch.compiler.is_compiling() or torch._C._functorch.is_functorch_wrapped_tensor(z):
        return False
    if z.is_cuda:
        return z.dtype in ON_GPU and has_triton()
    return z.device.type == "cpu" and z.dtype == torch.float32 and compiled.available()


@cache
def _module(name: str) -> ModuleType:
    """Imported when first needed: numba takes half a second, and Triton more."""
    return import_module(f"evalign.kernels.{name}")


def rows(z: Tensor) -> ModuleType:
    return _module("gpu.rows" if z.is_cuda else "cpu.row_counts" if takes(z) else "reference")


def columns(z: Tensor) -> ModuleType:
    return _module("gpu.columns" if z.is_cuda else "cpu.column_counts")


def whole() -> ModuleType:
    return _module("gpu.triton_loss")
