"""Private parts of torch and Triton that save time, behind one switch.

Set the environment variable `EVALIGN_PRIVATE_APIS=0` to use public interfaces only; the numbers are the same (see
`tests/kernels/test_private_apis.py`). The private ones save host time, which dominates small batches on a GPU: on an
H200, F1 takes 1.02 times cross-entropy's time with them and 2.41 times without at 1024 x 10, 0.94 and 2.06 times at
8192 x 1000. To measure that, run `python benchmarks/bench_loss.py --device cuda --only fused --sizes 1024x10 8192x1000`
with both settings (results: `bench_loss_dense_h200.csv`, `bench_private_apis_h200.csv`).

- `fast_apply`: `autograd.Function.apply` without the checks for function transforms, and without the lookup of the
  backward method in every backward pass;
- `raw_launch`: the C function under Triton's launcher, called with addresses instead of tensors;
- `allocator`: the allocation function that compiled graphs use, which bypasses the dispatcher;
- `device_queries`: the current device and stream without the wrappers of `torch.cuda`.
"""

import os
from collections.abc import Callable, Iterable
from copy import copy
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

__all__ = ["ENABLED", "Grid", "Start", "allocator", "constant_when_traced", "device_queries", "fast_apply",
           "is_capturing", "launcher_words", "raw_launch", "raw_stream"]  # fmt: skip

Function = TypeVar("Function", bound=Callable[..., Any])


def constant_when_traced(function: Function) -> Function:
    """Have `torch.compile` call a function instead of tracing it, and treat the result as a constant.

    Like `torch.compiler.assume_constant_result`, which imports the whole compiler; the switch does not affect it.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


ENABLED = os.environ.get("EVALIGN_PRIVATE_APIS", "1") != "0"
Grid = tuple[int, int, int]


def fast_apply(function: type[torch.autograd.Function]) -> Any:
    """`function.apply` without support for function transforms (which `dispatch.is_fused` excludes)."""
    if not ENABLED:
        return function.apply
    node = getattr(function, "_backward_cls", None)
    if node is not None:
        node.apply = function.backward
    return super(torch.autograd.Function, function).apply  # type: ignore[misc]


def current_device() -> int:
    return torch._C._cuda_getDevice() if ENABLED else torch.cuda.current_device()


def raw_stream(device: int) -> int:
    """Handle of the current stream of a device."""
    if ENABLED:
        return torch._C._cuda_getCurrentRawStream(device)
    return torch.cuda.current_stream(device).cuda_stream


def is_capturing() -> bool:
    return torch._C._cuda_isCurrentStreamCapturing() if ENABLED else torch.cuda.is_current_stream_capturing()


def device_queries(device: int) -> tuple[Callable[[], int], Callable[[], int]]:
    """Functions for the current device and for the current stream of `device`; -1 if kernels are interpreted."""
    if device < 0:
        return (lambda: -1), (lambda: -1)
    if not ENABLED:
        return torch.cuda.current_device, partial(raw_stream, device)
    return torch._C._cuda_getDevice, partial(torch._C._cuda_getCurrentRawStream, device)


_empty_cuda: Any = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)


def allocator(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, index: int) -> Callable[[], Tensor]:
    """Function that allocates uninitialised dense tensors of one kind on the current device (index -1: no GPU)."""
    if index < 0 or _empty_cuda is None or not ENABLED:
        return partial(torch.empty, shape, dtype=dtype, device=device)
    return partial(_empty_cuda, tuple(shape), torch.empty(shape, device="meta").stride(), dtype)


class Start(NamedTuple):
    """A launch function, its arguments before the stream, and those between the stream and the kernel arguments."""

    run: Any
    before: tuple[Any, ...]
    between: tuple[Any, ...]
    packed: bool = False  # the kernel arguments are one tuple

    def on(self, stream: int) -> Callable[..., Any]:
        """The launch function on a stream, as a function of the kernel arguments."""
        start = partial(self.run, *self.before, stream, *self.between)
        return (lambda *arguments: start(arguments)) if self.packed else start


def launcher_words(program: Any) -> tuple[Any, ...]:
    """Arguments of Triton's launcher between the stream and the kernel arguments; no launch hooks."""
    return program.function, program.packed_metadata, None, None, None


def raw_launch(program: Any, grid: Grid) -> Start | None:
    """The C function under Triton's launcher if it can be found, else the launcher; None with the switch off.

    The Python launcher takes half the time budget of a small batch, only to pass the same arguments at every launch. A
    copy of it is called once with a function that records these arguments. They depend on Triton's version; if they
    hold memory that is allocated per launch, the launcher is used every time.
    """
    if not ENABLED:
        return None
    stream, argument, words = object(), object(), []
    try:
        launcher = copy(program.run)
        run, launcher.launch = launcher.launch, lambda *given: words.extend(given)
        launcher(*grid, stream, *launcher_words(program), argument)
    except (AttributeError, TypeError, RuntimeError):
        words = []
    last = words[-1] if words else None
    if words.count(stream) != 1 or not (last is argument or last == (argument,)) or _has_memory(words):
        return Start(program.run, grid, launcher_words(program))
    at = words.index(stream)
    return Start(run, tuple(words[:at]), tuple(words[at + 1 : -1]), last is not argument)


def _has_memory(words: Iterable[Any]) -> bool:
    return any(hasattr(word, "data_ptr") for word in words)
