"""Kernel launches and workspaces for small batches, which cost the host more time than the GPU.

A launch through Triton inspects every argument to find the compiled program. Here the caller passes a key of everything
that the program depends on, and from the second launch on the cached program is started directly.
"""

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from evalign.kernels import private_apis
from evalign.kernels.private_apis import Grid, Start, launcher_words, raw_launch

# Triton's versions, which also work inside kernels, take ten microseconds.


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()


class Launcher:
    """A kernel with a cache of compiled programs; the key holds all that Triton specialises on, except constants."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.programs: dict[Hashable, Any] = {}

    def __call__(
        self, device: int, key: Hashable, grid: Grid, arguments: tuple[Any, ...], constants: tuple[Any, ...], warps: int
    ) -> Any:
        """Run the kernel on the device's current stream; arguments, then constants, are in the kernel's order.

        Returns the program, or None if there is none to cache: interpreted kernels, or private APIs switched off.
        """
        if device >= 0 and device != private_apis.current_device():
            with torch.cuda.device(device):
                return self(device, key, grid, arguments, constants, warps)
        case = (device, key, constants, warps)
        program = self.programs.get(case)
        if program is not None:
            stream = private_apis.raw_stream(device)
            program.run(*grid, stream, *launcher_words(program), *arguments, *constants)
            return program
        program = self.kernel[grid](*arguments, *constants, num_warps=warps)
        if not private_apis.ENABLED or not hasattr(program, "packed_metadata"):
            return None
        self.programs[case] = program
        return program


class Launch:
    """A repeated launch of a kernel: tensors, which come first, vary; numbers and constants do not.

    Its device must be the current one. `starts` caches the launch function of every stream it was called on; it takes
    the tensors' addresses, since the driver would look each tensor up, and then the words in `last`.
    """

    __slots__ = ("constants", "device", "grid", "key", "last", "launcher", "numbers", "start", "starts",
                 "stream", "warps")  # fmt: skip

    def __init__(
        self, launcher: Launcher, device: int, key: Hashable, grid: Grid, numbers: tuple[Any, ...],
        constants: tuple[Any, ...], warps: int,
    ) -> None:  # fmt: skip
        self.launcher, self.device, self.key, self.grid = launcher, device, key, grid
        self.numbers, self.constants, self.warps = numbers, constants, warps
        self.last = numbers + constants
        _, self.stream = private_apis.device_queries(device)
        self.start: Start | None = None
        self.starts: dict[int, Callable[..., Any]] = {}

    def __call__(self, *tensors: Tensor) -> None:
        if self.start is None:
            given = *tensors, *self.numbers
            program = self.launcher(self.device, self.key, self.grid, given, self.constants, self.warps)
            self.start = None if program is None else raw_launch(program, self.grid)
            return
        stream = self.stream()
        start = self.starts.get(stream)
        if start is None:
            start = self.starts[stream] = self.start.on(stream)
        start(*map(Tensor.data_ptr, tensors), *self.last)


class Workspace(NamedTuple):
    """Counters, which are 0 and reset by every kernel, and uninitialised floats; their addresses and owning stream.

    The stream is -1 for a workspace without an owner.
    """

    counters: Tensor
    floats: Tensor
    counters_at: int
    floats_at: int
    stream: int


_workspaces: dict[tuple[int, int], tuple[Workspace, int, int]] = {}  # with their numbers of counters and floats


def workspace(z: Tensor, counters: int, size: int) -> Workspace:
    """A workspace of at least this size on the device of z.

    It belongs to the current stream, whose next kernel reuses it. A captured kernel gets a separate one, because its
    graph may be replayed on any stream.
    """
    device = z.get_device()
    if device < 0 or private_apis.is_capturing():
        return new_workspace(z.device, counters, size)
    owner = device, private_apis.raw_stream(device)
    found = _workspaces.get(owner)
    if found is None or found[1] < counters or found[2] < size:
        counters = max(counters, 32)
        found = _workspaces[owner] = new_workspace(z.device, counters, size, owner[1]), counters, size
    return found[0]


def new_workspace(device: torch.device, counters: int, size: int, stream: int = -1) -> Workspace:
    zeros = torch.zeros(counters, dtype=torch.int64, device=device)
    floats = torch.empty(size, dtype=torch.float32, device=device)
    return Workspace(zeros, floats, zeros.data_ptr(), floats.data_ptr(), stream)
