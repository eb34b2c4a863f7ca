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
    empty = x <= 0  # not `x > 0`, so that a nan stays one
    return torch.where(empty, 0.0, torch.where(empty, 1.0, x).sqrt())


def sum_by_label(values: Tensor, y: Tensor, size: int) -> Tensor:
    """Sums of `values` (M, ...) over the rows of each label, (size, ...), in blocks of rows.

    One running float32 sum of a million equal terms is off by up to a percent; sums of sums are not.

    >>> sum_by_label(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([0, 1, 0]), 2)
    tensor([5., 2.])
    """
    rest = values.shape[1:]
    if torch.compiler.is_compiling():  # the number of blocks would bind a graph to the number of rows
        wide = values.double()
        sums = wide.new_zeros(size, *rest)
        return (sums.index_add(0, y, wide) if rest else sums.scatter_add(0, y, wide)).to(values.dtype)
    rows = y.shape[0]
    block = max(256, rest.numel())  # the partial sums then take no more room than the values
    blocks = max(1, -(-rows // block))
    if blocks > 1:
        y = y + size * torch.arange(rows, device=y.device).div(block, rounding_mode="floor")
    sums = values.new_zeros(blocks * size, *rest)
    sums = sums.index_add(0, y, values) if rest else sums.scatter_add(0, y, values)
    return sums.reshape(blocks, size, *rest).sum(0)


def counting_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32 for what is narrower: a float16 sum overflows at 65504 samples, a bfloat16 one stalls at 256."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def finite_gradient(x: Tensor) -> Tensor:
    """Identity whose backward turns nan and infinity into 0, for functions that divide by an absent class.

    >>> x = torch.zeros((), requires_grad=True)
    >>> (finite_gradient(x) / 0).backward()
    >>> x.grad
    tensor(0.)
    """
    return _FiniteGradient.apply(x)  # type: ignore[no-any-return, no-untyped-call]


class _FiniteGradient(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return torch.nan_to_num(grad, nan=0.0, posinf=0.0, neginf=0.0)


def represents(value: Tensor, source: Tensor, scale: float | Tensor = 1.0) -> Tensor:
    """`value` with the gradient of `scale * source`, for a part of a sum that represents the whole of it.

    >>> part = torch.tensor(2.0, requires_grad=True)
    >>> whole = represents(torch.tensor(10.0), part, 5.0)
    >>> (whole**2).backward()
    >>> whole.item(), part.grad.item()
    (10.0, 100.0)
    """
    factor = torch.as_tensor(scale, dtype=source.dtype, device=source.device)
    return _Represents.apply(value.to(source.dtype), source, factor)  # type: ignore[no-any-return, no-untyped-call]


class _Represents(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(value: Tensor, source: Tensor, scale: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[2])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, None]:
        (scale,) = ctx.saved_tensors
        return None, grad * scale, None
