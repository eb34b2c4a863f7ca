"""Launches for rows that fit into a tile, made ready once for batches of a kind: small ones wait for the host."""

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from evalign.kernels.points import FivePoints, Settings
from evalign.kernels.triton_launch import Launch, Launcher, cdiv, next_power_of_2, scratch
from evalign.kernels.triton_sums import GROUP
from evalign.kernels.triton_tile_kernels import loss_kernel, tile_gradient_kernel

WHOLE = 1024  # classes up to which a row is one tile
launch_loss, launch_gradient = Launcher(loss_kernel), Launcher(tile_gradient_kernel)
By = tuple[Tensor, Tensor, Tensor, Tensor]


class Ending(NamedTuple):
    """What a kernel does once the counts are summed: nothing, or the loss and its slopes; see `value_of_counts`."""

    average: int = -1
    anchor: float = 0.0
    form: tuple[float, ...] = (0.0,) * 12


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

    __slots__ = ("backwards", "counters", "kind", "loss", "places")

    def __init__(self, kind: Kind) -> None:
        self.kind, (n, d) = kind, kind.shape
        aligned = kind.offset == kind.stride % 4 == d % 4 == 0
        pieces, rows, wide, warps, most = tile(d, aligned)
        chunk = rows * max(1, cdiv(n, rows * most))
        programs, width = max(1, cdiv(n, chunk)), places_of_counts(d)
        groups = cdiv(programs, GROUP)
        self.counters, self.places = groups + 1, (1 + groups + programs) * width
        constants = kind.dtypes[3] is not None, kind.dtypes[2] is not None, kind.losses
        self.loss = Launch(
            launch_loss, kind.devices[0], self._key(), (programs, 1, 1),
            (*self._numbers(), chunk, width, kind.ending.anchor, *kind.ending.form),
            (
                *constants, kind.smoothing > 0, kind.ending.average, aligned, pieces, rows, wide, GROUP,
                min(64 * warps, next_power_of_2(width)), next_power_of_2(d),
            ),
            warps,
        )  # fmt: skip
        self.backwards: dict[Any, Launch] = {}

    def _key(self) -> tuple[Any, ...]:
        kind = self.kind
        return kind.dtypes, kind.shape[1], kind.stride, kind.offset, kind.ignored

    def _numbers(self) -> tuple[Any, ...]:
        kind = self.kind
        return kind.low, kind.reach, kind.smoothing, kind.ignored, *kind.shape, kind.stride

    def forward(
        self, z: Tensor, y: Tensor, weight: Tensor | None, points: FivePoints, loss: Tensor, kept: Tensor,
        counts: Tensor | None = None,
    ) -> None:  # fmt: skip
        """The loss, or where the ending says so the counts alone, and what `backward` needs to `kept`."""
        counters, room = scratch(z, self.counters, self.places)
        temperature = z if points.temperature is None else points.temperature  # or a pointer that is not read
        counts = room if counts is None else counts
        self.loss(z, y, y if weight is None else weight, temperature, room, counters, counts, loss, kept)

    def backward(
        self, z: Tensor, y: Tensor, weight: Tensor | None, points: FivePoints, kept: Tensor, by: By, losses: bool, *,
        packed: bool = False,
    ) -> Tensor:  # fmt: skip
        """dL/dz from what `forward` kept and from `by`, and where they are `packed`: as in `triton_rows.gradient`."""
        kind = by[0].dtype, by[1].data_ptr() % 16, by[2].data_ptr() % 16, losses, packed
        launch = self.backwards.get(kind)
        if launch is None:
            launch = self.backwards[kind] = self._backward(kind)
        found = torch.empty(self.kind.shape, dtype=z.dtype, device=z.device)
        if found.shape[0]:
            temperature = z if points.temperature is None else points.temperature
            launch(z, y, y if weight is None else weight, temperature, kept, *by, found)
        return found

    def _backward(self, by: tuple[Any, ...]) -> Launch:
        kind, (n, d) = self.kind, self.kind.shape
        aligned = kind.offset == kind.stride % 4 == d % 4 == by[1] == by[2] == 0
        pieces, rows, wide, warps, each = back_tile(d, aligned)
        constants = kind.dtypes[3] is not None, kind.dtypes[2] is not None, *by[3:]
        return Launch(
            launch_gradient, kind.devices[0], (self._key(), by), (cdiv(n, rows * each), 1, 1), self._numbers(),
            (*constants, aligned, pieces, rows, wide, each), warps,
        )  # fmt: skip


def places_of_counts(d: int) -> int:
    """Places of a vector of counts; each of many starts where 16 bytes are read at once."""
    return 16 * cdiv(3 * d + 2, 16)


def places_kept(n: int, d: int) -> int:
    """Of 2 d + 1 slopes, and of four numbers for each row; see `loss_kernel`."""
    return 16 * (d // 8 + 1) + 4 * n


made = lru_cache(4096)(Tiles)


def tiles(
    z: Tensor, y: Tensor, weight: Tensor | None, settings: Settings, ignored: int = 0, ending: Ending = COUNTS_ONLY
) -> Tiles:
    """What is ready for such a batch; its rows are in one piece."""
    (low, reach, temperature), smoothing, losses, _ = settings
    others = None if weight is None else weight.dtype, None if temperature is None else temperature.dtype
    dtypes = z.dtype, y.dtype, *others
    devices = z.get_device(), y.get_device()
    return made(
        Kind(z.shape, z.stride(0), z.data_ptr() % 16, dtypes, devices, low, reach, smoothing, losses, ignored, ending)
    )


# Tiles, warps and programs, the fastest of those that `benchmarks/tune_tiles.py` times: on an H200, at 257 and 1000.


def tile(d: int, aligned: bool) -> tuple[int, int, int, int, int]:
    """Pieces, rows and width of a tile, warps, and how many programs there are at most."""
    warps, most = (8, 256) if d <= 512 else (4, 264)
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
