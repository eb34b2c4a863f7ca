"""Launches for rows that fit into a tile, made ready once for batches of a kind: small ones wait for the host."""

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, is_grad_enabled

from evalign.kernels.gpu.launch import Launch, Launcher, cdiv, next_power_of_2, workspace
from evalign.kernels.gpu.step_kernels import GROUP
from evalign.kernels.gpu.tile_kernels import loss_kernel, tile_gradient_kernel
from evalign.kernels.plan import Settings, first_order_only
from evalign.kernels.private_apis import allocator, device_queries, fast_apply

TILE_CLASSES = 1024  # classes up to which a row is one tile
SCATTERED = 512  # classes from which the sums of labels are not saved in registers
launch_loss, launch_gradient = Launcher(loss_kernel), Launcher(tile_gradient_kernel)
By = tuple[Tensor, Tensor, Tensor, Tensor]


class Ending(NamedTuple):
    """What a kernel does once the counts are summed: nothing, or the loss and its slopes; see `value_of_counts`."""

    form: int = -1
    anchor: float = 0.0
    numbers: tuple[float, ...] = (0.0,) * 12


COUNTS_ONLY = Ending()


class Kind(NamedTuple):
    """All that a launch depends on, besides where the tensors are."""

    shape: torch.Size
    stride: int
    offset: int
    dtypes: tuple[torch.dtype | None, ...]  # of logits, labels, weights and temperature
    devices: tuple[int, int]
    low: float
    reach: float
    smoothing: float
    losses: bool
    ignored: int
    ending: Ending


class Tiles:
    """Counts, or a loss, and gradient of batches of one kind."""

    __slots__ = ("back", "backwards", "counters", "current_device", "device", "front", "kind", "new_counts",
                 "new_gradient", "new_loss", "new_saved", "size")  # fmt: skip

    def __init__(self, kind: Kind, device: torch.device) -> None:
        self.kind, (n, d) = kind, kind.shape
        aligned = kind.offset == kind.stride % 4 == d % 4 == 0
        scattered = kind.ending.form >= 0 and kind.dtypes[2] is None and d >= SCATTERED
        pieces, rows, wide, warps, most = tile(d, aligned, scattered)
        chunk = rows * max(1, cdiv(n, rows * most))
        programs, width = max(1, cdiv(n, chunk)), 16 * cdiv(d + 1, 16) if scattered else counts_size(d)
        groups = cdiv(programs, GROUP)
        self.counters, self.size = groups + 1, (1 + groups + programs) * width
        if scattered:
            self.counters, self.size = self.counters + 2 * d, self.size + counts_size(d)
        self.device = kind.devices[0]
        self.current_device, _ = device_queries(self.device)
        where = device, self.device
        self.new_loss = allocator((), torch.float32, *where)
        self.new_counts = allocator((counts_size(d),), torch.float32, *where)
        self.new_saved = allocator((saved_size(n, d),), torch.float32, *where)
        self.new_gradient = allocator((n, d), kind.dtypes[0] or torch.float32, *where)
        constants = kind.dtypes[3] is not None, kind.dtypes[2] is not None, kind.losses
        self.front = Launch(
            launch_loss, kind.devices[0], self._key(), (programs, 1, 1),
            (*self._numbers(), chunk, width, kind.ending.anchor, *kind.ending.numbers),
            (
                *constants, kind.smoothing > 0, kind.ending.form, scattered, aligned, pieces, rows, wide, GROUP,
                min(64 * warps, next_power_of_2(width)), next_power_of_2(d),
            ),
            warps,
        )  # fmt: skip
        self.back = self._back((torch.float32, 0, 0, kind.losses, True))
        self.backwards: dict[Any, Launch] = {}  # of counts

    def _key(self) -> tuple[Any, ...]:
        kind = self.kind
        return kind.dtypes, kind.shape[1], kind.stride, kind.offset, kind.ignored

    def _numbers(self) -> tuple[Any, ...]:
        kind = self.kind
        return kind.low, kind.reach, kind.smoothing, kind.ignored, *kind.shape, kind.stride

    def loss(self, z: Tensor, y: Tensor, weight: Tensor | None, temperature: Tensor | None) -> Tensor:
        """Of a batch of this kind, as one node of autograd."""
        if self.current_device() != self.device:
            with torch.cuda.device(self.device):
                return self.loss(z, y, weight, temperature)
        return _tile_loss(z, (self, y, weight, temperature))  # type: ignore[no-any-return]

    def counts(self, z: Tensor, y: Tensor, weight: Tensor | None, temperature: Tensor | None) -> tuple[Tensor, Tensor]:
        """tp, predicted and actual of every class and the sum of losses, 3 d + 1 numbers; what `gradient` needs."""
        weight, temperature = y if weight is None else weight, z if temperature is None else temperature
        with torch.cuda.device(self.device):  # -1 is none
            added, saved = self.new_counts(), self.new_saved()
            counters, floats, *_ = workspace(z, self.counters, self.size)
            self.front(z, y, weight, temperature, floats, counters, added, added, saved)
        return added, saved

    def gradient(
        self, z: Tensor, y: Tensor, weight: Tensor | None, saved: Tensor, temperature: Tensor | None, by: By,
        losses: bool,
    ) -> Tensor:  # fmt: skip
        """dL/dz from `by`, as in `triton_rows.gradient`, where they are not packed."""
        kind = by[0].dtype, by[1].data_ptr() % 16, by[2].data_ptr() % 16, losses, False
        launch = self.backwards.get(kind)
        if launch is None:
            launch = self.backwards[kind] = self._back(kind)
        weight, temperature = y if weight is None else weight, z if temperature is None else temperature
        with torch.cuda.device(self.device):
            found = self.new_gradient()
            launch(z, y, weight, temperature, saved, *by, found)
        return found

    def _back(self, by: tuple[Any, ...]) -> Launch:
        kind, (n, d) = self.kind, self.kind.shape
        aligned = kind.offset == kind.stride % 4 == d % 4 == by[1] == by[2] == 0
        pieces, rows, wide, warps, each = back_tile(d, aligned)
        constants = kind.dtypes[3] is not None, kind.dtypes[2] is not None, *by[3:]
        return Launch(
            launch_gradient, kind.devices[0], (self._key(), by), (max(1, cdiv(n, rows * each)), 1, 1), self._numbers(),
            (*constants, aligned, pieces, rows, wide, each), warps,
        )  # fmt: skip


Given = tuple[Tiles, Tensor, Tensor | None, Tensor | None]  # labels, weights and temperature


class TileLoss(torch.autograd.Function):
    """Written flat: a small batch is done before the host has made a dozen calls.

    On a GPU the way back is in another thread, on a core that has nothing of Python at hand: it asks for little. Only
    the logits and the labels are looked up again, as hooks on what is saved may have moved them. Another tensor stands
    in for weights or a temperature that are not read.
    """

    @staticmethod
    def forward(ctx: Any, z: Tensor, given: Given) -> Tensor:
        tiles, y, weight, temperature = given
        ctx.save_for_backward(z, y)
        counters, floats, counters_at, floats_at, stream = workspace(z, tiles.counters, tiles.size)
        loss, saved, front = tiles.new_loss(), tiles.new_saved(), tiles.front
        z_at, y_at, saved_at = z.data_ptr(), y.data_ptr(), saved.data_ptr()
        weight_at = y_at if weight is None else weight.data_ptr()
        temperature_at = z_at if temperature is None else temperature.data_ptr()
        ctx.given = tiles, weight, temperature, saved, weight_at, temperature_at, saved_at
        start = front.starts.get(stream)
        if start is None:
            weight, temperature = y if weight is None else weight, z if temperature is None else temperature
            front(z, y, weight, temperature, floats, counters, floats, loss, saved)
        else:
            at = z_at, y_at, weight_at, temperature_at, floats_at, counters_at, floats_at, loss.data_ptr(), saved_at
            start(*(at + front.last))
        return loss

    @staticmethod
    def backward(ctx: Any, by_loss: Tensor) -> tuple[Tensor, None]:
        z, y = ctx.saved_tensors
        tiles, weight, temperature, saved, weight_at, temperature_at, saved_at = ctx.given
        device, back = tiles.device, tiles.back
        if tiles.current_device() != device:
            with torch.cuda.device(device):
                return TileLoss.backward(ctx, by_loss)
        found = tiles.new_gradient()
        start = back.starts.get(back.stream())
        if start is None:
            weight, temperature = y if weight is None else weight, z if temperature is None else temperature
            back(z, y, weight, temperature, saved, by_loss, saved, saved, saved, found)
        else:
            at = (
                z.data_ptr(), y.data_ptr(), weight_at, temperature_at, saved_at, by_loss.data_ptr(), saved_at, saved_at,
                saved_at, found.data_ptr(),
            )  # fmt: skip
            start(*(at + back.last))
        return (first_order_only(found, z, by_loss) if is_grad_enabled() else found), None


_tile_loss: Any = fast_apply(TileLoss)


def counts_size(d: int) -> int:
    """Places of a vector of counts; each of many starts where 16 bytes are read at once."""
    return 16 * cdiv(3 * d + 2, 16)


def saved_size(n: int, d: int) -> int:
    """Of 2 d + 1 slopes, and of four numbers for each row; see `loss_kernel`."""
    return 16 * (d // 8 + 1) + 4 * n


cached_tiles = lru_cache(4096)(Tiles)


def tiles(
    z: Tensor, y: Tensor, weight: Tensor | None, settings: Settings, ignored: int = 0, ending: Ending = COUNTS_ONLY
) -> Tiles:
    """What is ready for such a batch; its rows are in one piece."""
    (low, reach, temperature), smoothing, losses, _ = settings
    others = None if weight is None else weight.dtype, None if temperature is None else temperature.dtype
    dtypes = z.dtype, y.dtype, *others
    devices = z.get_device(), y.get_device()
    return cached_tiles(
        Kind(z.shape, z.stride(0), z.data_ptr() % 16, dtypes, devices, low, reach, smoothing, losses, ignored, ending),
        z.device,
    )


# Tiles, warps and programs, the fastest of those that `benchmarks/tune_tiles.py` times: on an H200, at 257 and 1000.


def tile(d: int, aligned: bool, scattered: bool = False) -> tuple[int, int, int, int, int]:
    """Pieces, rows and width of a tile, warps, and how many programs there are at most."""
    warps, most = (8, 256) if d <= 512 else (4, 528 if scattered else 264)
    return (*shape(d, aligned, warps), warps, most)


def back_tile(d: int, aligned: bool) -> tuple[int, int, int, int, int]:
    """Pieces, rows and width of a tile, warps, and tiles of a program."""
    warps = 4 if d <= 128 else 2
    return (*shape(d, aligned, warps), warps, 1)


def shape(d: int, aligned: bool, warps: int) -> tuple[int, int, int]:
    """A row to a warp, and more of them if they are short, but not so many that their numbers fill the registers."""
    wide = min(max(4, next_power_of_2(d)), 128 if aligned else 32)
    pieces = cdiv(d, wide)
    return pieces, warps * max(1, 256 // next_power_of_2(pieces * wide)), wide
