"""Arithmetic that stays finite, in value and in gradient."""

from typing import Any

import torch
from torch import Tensor


def safe_divide(a: Tensor, b: Tensor, *, at_zero: float | Tensor = 0.0) -> Tensor:
    """a / b, and `at_zero` where b is 0.

    >>> safe_divide(torch.tensor([1.0, 0.0]), torch.tensor([2.0, 0.0]), at_zero=1.0)
    tensor([0.5000, 1.0000])
    """
    # Masking the result alone still sends nan back through the untaken branch, so the denominator is masked too.
    empty = b == 0
    return torch.where(empty, at_zero, a / torch.where(empty, 1.0, b))


def safe_sqrt(x: Tensor) -> Tensor:
    """sqrt(x) with gradient 0 at 0, where the true one is infinite; rounding below 0 counts as 0."""
    positive = x > 0
    return torch.where(positive, torch.where(positive, x, 1.0).sqrt(), 0.0)


def counting_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32 for what is narrower: a float16 sum overflows at 65504 samples, a bfloat16 one stalls at 256."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


class FiniteGradient(torch.autograd.Function):
    """Identity whose backward turns nan and infinity into 0, for functions that divide by an absent class."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return torch.nan_to_num(grad, nan=0.0, posinf=0.0, neginf=0.0)
