"""Launches and scratch memory for kernels of small batches, which cost the host more than the GPU.

A launch through Triton looks at every argument to find the program that was compiled for such ones. Here the caller
says what it depends on, and from the second launch on the program found then is started at once.
"""

from collections.abc import Callable, Hashable, Iterable
from copy import copy
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

# Triton's own take ten microseconds: they also serve inside of kernels.


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()


class Launcher:
    """A kernel that is called with a key: all that Triton compiles it anew for, besides the constants."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.programs: dict[Hashable, Any] = {}

    def __call__(
        self, device: int, key: Hashable, grid: tuple[int, int, int], arguments: tuple[Any, ...],
        constants: tuple[Any, ...], warps: int,
    ) -> Any:  # fmt: skip
        """Run the kernel on the device's current stream; arguments and then constants are in the kernel's order.

        Returns the program that was run, or None where there is none to keep: the interpreter is asked every time.
        """
        if device >= 0 and device != torch._C._cuda_getDevice():
            with torch.cuda.device(device):
                return self(device, key, grid, arguments, constants, warps)
        case = (device, key, constants, warps)
        program = self.programs.get(case)
        if program is not None:
            run(program, device, grid, arguments, constants)
            return program
        program = self.kernel[grid](*arguments, *constants, num_warps=warps)
        if not hasattr(program, "packed_metadata"):
            return None
        self.programs[case] = program
        return program


def run(
    program: Any, device: int, grid: tuple[int, int, int], arguments: Iterable[Any], constants: Iterable[Any]
) -> None:
    stream = torch._C._cuda_getCurrentRawStream(device)
    program.run(*grid, stream, *before_arguments(program), *arguments, *constants)


def before_arguments(program: Any) -> tuple[Any, ...]:
    """What a program is told between stream and arguments: no metadata for hooks around a launch, none of those."""
    return program.function, program.packed_metadata, None, None, None


class Start(NamedTuple):
    """What starts a program, and what it is told before the stream, and between that and the arguments."""

    run: Any
    before: tuple[Any, ...]
    between: tuple[Any, ...]
    packed: bool = False  # all arguments are one tuple

    def on(self, stream: int) -> Callable[..., Any]:
        """What starts it on a stream, given the arguments."""
        start = partial(self.run, *self.before, stream, *self.between)
        return (lambda *arguments: start(arguments)) if self.packed else start


def start_of(program: Any, grid: tuple[int, int, int]) -> Start:
    """The function in C under Triton's launcher, where there is one, else the launcher itself.

    The launcher, in Python, takes half as long as a whole small batch may, to tell its function the same every time.
    So it is asked once: a copy of it tells a function that only listens. What it tells depends on Triton's version;
    where it is nothing to be repeated, such as memory taken for one launch, the launcher is called every time.
    """
    stream, argument, heard = object(), object(), []
    try:
        launcher = copy(program.run)
        run, launcher.launch = launcher.launch, lambda *words: heard.extend(words)
        launcher(*grid, stream, *before_arguments(program), argument)
    except (AttributeError, TypeError, RuntimeError):
        heard = []
    last = heard[-1] if heard else None
    if heard.count(stream) != 1 or not (last is argument or last == (argument,)) or has_memory(heard):
        return Start(program.run, grid, before_arguments(program))
    at = heard.index(stream)
    return Start(run, tuple(heard[:at]), tuple(heard[at + 1 : -1]), last is not argument)


def has_memory(words: Iterable[Any]) -> bool:
    return any(hasattr(word, "data_ptr") for word in words)


def questions(device: int) -> tuple[Callable[[], int], Callable[[], int]]:
    """What says which device is the current one, and which stream is that of `device`; -1 is where kernels are
    interpreted. One call each: to find torch's functions in its modules takes as long as to call them.
    """
    if device < 0:
        return (lambda: -1), (lambda: -1)
    return torch._C._cuda_getDevice, partial(torch._C._cuda_getCurrentRawStream, device)


class Launch:
    """One launch of a kernel again and again, with other tensors, which come first, but the same numbers.

    Its device has to be the current one. `starts` has, for streams that it was called on before, what starts the
    program there. That takes addresses, as each tensor would be looked up with the driver, and then what is in `last`.
    """

    __slots__ = ("constants", "device", "grid", "key", "last", "launcher", "numbers", "start", "starts",
                 "stream", "warps")  # fmt: skip

    def __init__(
        self, launcher: Launcher, device: int, key: Hashable, grid: tuple[int, int, int], numbers: tuple[Any, ...],
        constants: tuple[Any, ...], warps: int,
    ) -> None:  # fmt: skip
        self.launcher, self.device, self.key, self.grid = launcher, device, key, grid
        self.numbers, self.constants, self.warps = numbers, constants, warps
        self.last = numbers + constants
        _, self.stream = questions(device)
        self.start: Start | None = None
        self.starts: dict[int, Callable[..., Any]] = {}

    def __call__(self, *tensors: Tensor) -> None:
        if self.start is None:
            given = *tensors, *self.numbers
            program = self.launcher(self.device, self.key, self.grid, given, self.constants, self.warps)
            self.start = None if program is None else start_of(program, self.grid)
            return
        stream = self.stream()
        start = self.starts.get(stream)
        if start is None:
            start = self.starts[stream] = self.start.on(stream)
        start(*map(Tensor.data_ptr, tensors), *self.last)


# What compiled graphs make room with: past the dispatcher, in half the time.
_empty_cuda: Any = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)


def room(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, index: int) -> Callable[[], Tensor]:
    """What makes tensors of one kind, dense and of any value, where the device (-1 if there is none) is current."""
    if index < 0 or _empty_cuda is None:
        return partial(torch.empty, shape, dtype=dtype, device=device)
    return partial(_empty_cuda, tuple(shape), torch.empty(shape, device="meta").stride(), dtype)


class Scratch(NamedTuple):
    """Counters at 0, which a kernel leaves at 0, and floats of any value; their addresses, and the stream whose they
    are, -1 if they are no stream's.
    """

    counters: Tensor
    room: Tensor
    counters_at: int
    room_at: int
    stream: int


_scratch: dict[tuple[int, int], tuple[Scratch, int, int]] = {}  # and how many places they have


def scratch(z: Tensor, counters: int, size: int) -> Scratch:
    """At least so many counters and floats on the device of z.

    Both are the stream's own, and used again by its next kernel. A recorded kernel has some to itself: its graph may
    be replayed on any stream.
    """
    device = z.get_device()
    if device < 0 or torch._C._cuda_isCurrentStreamCapturing():
        return _new_scratch(z.device, counters, size, -1)
    owner = device, torch._C._cuda_getCurrentRawStream(device)
    found = _scratch.get(owner)
    if found is None or found[1] < counters or found[2] < size:
        counters = max(counters, 32)
        found = _scratch[owner] = _new_scratch(z.device, counters, size, owner[1]), counters, size
    return found[0]


def _new_scratch(device: torch.device, counters: int, size: int, stream: int) -> Scratch:
    zeros = torch.zeros(counters, dtype=torch.int64, device=device)
    room = torch.empty(size, dtype=torch.float32, device=device)
    return Scratch(zeros, room, zeros.data_ptr(), room.data_ptr(), stream)
