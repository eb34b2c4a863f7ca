"""Launch plans of fused losses: kernels, workspaces and outputs, prepared once per kind of batch.

Small batches are bound by the host, not the GPU, so a plan precomputes whatever does not depend on values.
There is one for each layout: `RowPlan` for logits (M, C), `DensePlan` for images (N, C, ...), `ColumnPlan` for binary
and multilabel entries.
"""

from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, is_grad_enabled

from evalign.kernels.gpu.column_kernels import column_counts_kernel, column_gradient_kernel
from evalign.kernels.gpu.dense_kernels import KEPT_CLASSES, dense_gradient_kernel, dense_loss_kernel
from evalign.kernels.gpu.device_functions import GROUP
from evalign.kernels.gpu.launch import Launch, Launcher, cdiv, new_workspace, next_power_of_2, workspace
from evalign.kernels.gpu.row_kernels import loss_kernel, tile_gradient_kernel
from evalign.kernels.plan import Eager, KernelSettings, Plan, twice_differentiable
from evalign.kernels.private_apis import allocator, device_queries, fast_apply

SCATTERED = 512  # number of classes above which the sums of labels are not kept in registers
ENTRIES = 1024  # binary entries of a tile
launch_loss, launch_gradient = Launcher(loss_kernel), Launcher(tile_gradient_kernel)
launch_columns, launch_column_gradient = Launcher(column_counts_kernel), Launcher(column_gradient_kernel)
launch_dense, launch_dense_gradient = Launcher(dense_loss_kernel), Launcher(dense_gradient_kernel)
By = tuple[Tensor, Tensor, Tensor, Tensor]


class Ending(NamedTuple):
    """What a kernel computes from the counts: nothing, or the loss and its slopes; see `value_of_counts`."""

    form: int = -1
    anchor: float = 0.0
    numbers: tuple[float, ...] = (0.0,) * 12


COUNTS_ONLY = Ending()


class Kind(NamedTuple):
    """Everything a launch plan depends on, except addresses of tensors."""

    shape: torch.Size
    stride: int  # between rows
    offset: int  # of the addresses of logits and shares, modulo 16 bytes
    dtypes: tuple[torch.dtype | None, ...]  # of logits, labels, weights and temperature
    devices: tuple[int, int]
    low: float
    reach: float
    smoothing: float
    losses: bool
    ignored: int
    ending: Ending
    tau: float | None = None  # of binary entries
    two_classes: bool = False

    @property
    def flags(self) -> tuple[bool, bool, bool]:
        """Whether there is a temperature, whether there are weights, and whether cross-entropies are computed."""
        return self.dtypes[3] is not None, self.dtypes[2] is not None, self.losses

    @property
    def soft(self) -> bool:
        """Whether labels are class probabilities."""
        return self.tau is None and self.dtypes[1] is not None and self.dtypes[1].is_floating_point

    @property
    def numbers(self) -> tuple[float, float, float, int]:
        return self.low, self.reach, self.smoothing, self.ignored


class LossPlan:
    """The loss of batches of one kind: a forward and a backward kernel, with their memory."""

    __slots__ = ("back", "counters", "current_device", "device", "front", "kind", "new_gradient", "new_loss",
                 "new_saved", "size")  # fmt: skip
    front: Launch
    back: Launch

    def __init__(self, kind: Kind, device: torch.device, programs: int, width: int, saved: int) -> None:
        groups = cdiv(programs, GROUP)
        self.kind, self.device = kind, kind.devices[0]
        self.counters, self.size = groups + 1, (1 + groups + programs) * width
        self.current_device, _ = device_queries(self.device)
        where = device, self.device
        self.new_loss = allocator((), torch.float32, *where)
        self.new_saved = allocator((saved,), torch.float32, *where)
        self.new_gradient = allocator(tuple(kind.shape), kind.dtypes[0] or torch.float32, *where)

    def loss(
        self, z: Tensor, y: Tensor, weight: Tensor | None, temperature: Tensor | None, eager: Eager | None = None
    ) -> Tensor:
        """The loss of a batch of this kind as one autograd node."""
        if self.current_device() != self.device:
            with torch.cuda.device(self.device):
                return self.loss(z, y, weight, temperature, eager)
        return _fused_node(z, (self, y, weight, temperature, eager))  # type: ignore[no-any-return]

    def forward(self, z: Tensor, y: Tensor, weight: Tensor | None, temperature: Tensor | None) -> tuple[Tensor, ...]:
        """The loss of a batch, and the data for `backward`; without autograd.

        For compiled graphs, whose operators may not keep memory: the workspace is a new one.
        """
        with torch.cuda.device(self.device):  # -1: none
            loss, saved = self.new_loss(), self.new_saved()
            counters, floats, *_ = new_workspace(z.device, self.counters, self.size)
            self.front(*_pointers(z, y, weight, temperature), floats, counters, floats, loss, saved)
        return loss, saved

    def backward(
        self, z: Tensor, y: Tensor, weight: Tensor | None, temperature: Tensor | None, saved: Tensor, by_loss: Tensor
    ) -> Tensor:
        with torch.cuda.device(self.device):
            found = self.new_gradient()
            self.back(*_pointers(z, y, weight, temperature), saved, by_loss, saved, saved, saved, found)
        return found


def _pointers(z: Tensor, y: Tensor, weight: Tensor | None, temperature: Tensor | None) -> tuple[Tensor, ...]:
    """The first four arguments of every kernel; pointers that are not read are replaced by another tensor."""
    return z, y, y if weight is None else weight, z if temperature is None else temperature


class RowPlan(LossPlan):
    """Rows (M, C) that fit in a tile: their loss, or only their counts and the gradient of these."""

    __slots__ = ("backwards", "new_counts")

    def __init__(self, kind: Kind, device: torch.device) -> None:
        n, d = kind.shape
        aligned = kind.offset == kind.stride % 4 == d % 4 == 0
        scattered = kind.ending.form >= 0 and kind.dtypes[2] is None and d >= SCATTERED
        pieces, rows, wide, warps, most = tile(d, aligned, scattered)
        chunk = rows * max(1, cdiv(n, rows * most))
        programs, width = max(1, cdiv(n, chunk)), 16 * cdiv(d + 1, 16) if scattered else counts_size(d)
        super().__init__(kind, device, programs, width, saved_size(n, d))
        if scattered:
            self.counters, self.size = self.counters + 2 * d, self.size + counts_size(d)
        self.new_counts = allocator((counts_size(d),), torch.float32, device, self.device)
        self.front = Launch(
            launch_loss, self.device, self._key(), (programs, 1, 1),
            (*self._numbers(), chunk, width, kind.ending.anchor, *kind.ending.numbers),
            (
                *kind.flags, kind.smoothing > 0, kind.ending.form, scattered, kind.soft, aligned, pieces, rows, wide,
                GROUP, min(64 * warps, next_power_of_2(width)), next_power_of_2(d),
            ),
            warps,
        )  # fmt: skip
        self.back = self._back((torch.float32, 0, 0, kind.losses, True))
        self.backwards: dict[Any, Launch] = {}  # of counts

    def _key(self) -> tuple[Any, ...]:
        kind = self.kind
        return kind.dtypes, kind.shape[1], kind.stride, kind.offset, kind.ignored

    def _numbers(self) -> tuple[Any, ...]:
        return *self.kind.numbers, *self.kind.shape, self.kind.stride

    def counts(self, z: Tensor, y: Tensor, weight: Tensor | None, temperature: Tensor | None) -> tuple[Tensor, Tensor]:
        """tp, predicted and actual of every class and the sum of losses, 3 d + 1 numbers; and data for `gradient`."""
        with torch.cuda.device(self.device):
            added, saved = self.new_counts(), self.new_saved()
            counters, floats, *_ = workspace(z, self.counters, self.size)
            self.front(*_pointers(z, y, weight, temperature), floats, counters, added, added, saved)
        return added, saved

    def gradient(
        self, z: Tensor, y: Tensor, weight: Tensor | None, saved: Tensor, temperature: Tensor | None, by: By,
        losses: bool,
    ) -> Tensor:  # fmt: skip
        """dL/dz from `by`: by_loss (not read), by_tp, by_predicted and by_losses."""
        kind = by[0].dtype, by[1].data_ptr() % 16, by[2].data_ptr() % 16, losses, False
        launch = self.backwards.get(kind)
        if launch is None:
            launch = self.backwards[kind] = self._back(kind)
        with torch.cuda.device(self.device):
            found = self.new_gradient()
            launch(*_pointers(z, y, weight, temperature), saved, *by, found)
        return found

    def _back(self, by: tuple[Any, ...]) -> Launch:
        kind, (n, d) = self.kind, self.kind.shape
        aligned = kind.offset == kind.stride % 4 == d % 4 == by[1] == by[2] == 0
        pieces, rows, wide, warps, each = back_tile(d, aligned)
        return Launch(
            launch_gradient, self.device, (self._key(), by), (max(1, cdiv(n, rows * each)), 1, 1), self._numbers(),
            (*kind.flags[:2], *by[3:], kind.soft, aligned, pieces, rows, wide, each), warps,
        )  # fmt: skip


class DensePlan(LossPlan):
    """Images (N, C, ...), contiguous, with labels (N, ...)."""

    __slots__ = ()

    def __init__(self, kind: Kind, device: torch.device) -> None:
        n, d, pixels = kind.shape[0], kind.shape[1], prod(kind.shape[2:])
        kept, size, warps, most = dense_tile(d)
        per_image = max(1, cdiv(pixels, size))
        tiles = n * per_image
        chunk = max(1, cdiv(tiles, most))
        programs, width = max(1, cdiv(tiles, chunk)), counts_size(d)
        super().__init__(kind, device, programs, width, 16 * cdiv(2 * d + 1, 16))
        key, numbers = (kind.dtypes, kind.shape, kind.offset, kind.ignored), (*kind.numbers, pixels, per_image, tiles)
        self.front = Launch(
            launch_dense, self.device, key, (programs, 1, 1),
            (*numbers, chunk, width, kind.ending.anchor, *kind.ending.numbers),
            (
                *kind.flags, kind.smoothing > 0, kind.ending.form, d, size, kept, GROUP,
                min(64 * warps, next_power_of_2(width)), next_power_of_2(d),
            ),
            warps,
        )  # fmt: skip
        self.back = Launch(
            launch_dense_gradient, self.device, key, (max(1, tiles), 1, 1), numbers, (*kind.flags, d, size, kept), warps
        )


class ColumnPlan(LossPlan):
    """Contiguous binary entries at one threshold: (M, L) or (N, L, ...) for L problems, any shape for one."""

    __slots__ = ()

    def __init__(self, kind: Kind, device: torch.device) -> None:
        geometry = ColumnGeometry.of(kind.shape, two_classes=kind.two_classes)
        width = 16 * cdiv(5 * geometry.columns, 16)
        super().__init__(kind, device, geometry.programs, width, 2 * geometry.columns + 1)
        key, numbers = (kind.dtypes, kind.shape, kind.offset, kind.ignored), (*kind.numbers, float(kind.tau or 0.0))
        self.front = Launch(
            launch_columns, self.device, key, (geometry.programs, geometry.blocks, 1),
            (*numbers, *geometry.numbers, width, kind.ending.anchor, *kind.ending.numbers),
            (*kind.flags, kind.ending.form, kind.two_classes, *geometry.tile, GROUP, min(128, next_power_of_2(width))),
            4,
        )  # fmt: skip
        self.back = Launch(
            launch_column_gradient, self.device, key, (max(1, cdiv(prod(kind.shape), ENTRIES)), 1, 1),
            (*numbers, prod(kind.shape), geometry.columns, geometry.inner, 1), (*kind.flags, True, ENTRIES), 4,
        )  # fmt: skip


class ColumnGeometry(NamedTuple):
    """How tiles of `ENTRIES` cover the entries of L columns: (images, L, rows) of these in memory, or (rows, L)."""

    columns: int
    inner: int  # adjacent entries of a column
    numbers: tuple[int, ...]  # rows, columns, their strides, that of images, tiles per image, tiles, tiles of a program
    tile: tuple[int, int]
    programs: int
    blocks: int

    @classmethod
    def of(cls, shape: tuple[int, ...], *, two_classes: bool) -> "ColumnGeometry":
        images, columns, inner = 1, 1, 1
        if two_classes:
            rows = prod(shape)
        elif len(shape) == 2:
            rows, columns = shape
        else:
            images, columns, rows = shape[0], shape[1], prod(shape[2:])
            inner = max(1, rows)
        wide = min(128, next_power_of_2(max(1, columns))) if inner == 1 else 1
        tall = ENTRIES // wide
        per_image = max(1, cdiv(rows, tall))
        tiles = images * per_image
        chunk = max(1, cdiv(tiles, GROUP * GROUP))
        strides = (columns, 1) if inner == 1 else (1, rows)
        numbers = rows, columns, *strides, rows * columns, per_image, tiles, chunk
        return cls(columns, inner, numbers, (tall, wide), max(1, cdiv(tiles, chunk)), max(1, cdiv(columns, wide)))


Given = tuple[LossPlan, Tensor, Tensor | None, Tensor | None, Eager | None]  # labels, weights, temperature


class FusedNode(torch.autograd.Function):
    """Written without helper calls: the GPU finishes a small batch before the host has made a dozen calls.

    The backward pass runs in another thread, whose cache has none of Python's objects, so lookups are minimised: only
    logits and labels are unpacked again, because hooks on saved tensors may have moved them. Weights or a temperature
    that are not read are replaced by another tensor.
    """

    @staticmethod
    def forward(ctx: Any, z: Tensor, given: Given) -> Tensor:
        plan, y, weight, temperature, eager = given
        ctx.save_for_backward(z, y)
        counters, floats, counters_at, floats_at, stream = workspace(z, plan.counters, plan.size)
        loss, saved, front = plan.new_loss(), plan.new_saved(), plan.front
        z_at, y_at, saved_at = z.data_ptr(), y.data_ptr(), saved.data_ptr()
        weight_at = y_at if weight is None else weight.data_ptr()
        temperature_at = z_at if temperature is None else temperature.data_ptr()
        ctx.given = plan, weight, temperature, saved, weight_at, temperature_at, saved_at, eager
        start = front.starts.get(stream)
        if start is None:
            front(*_pointers(z, y, weight, temperature), floats, counters, floats, loss, saved)
        else:
            at = z_at, y_at, weight_at, temperature_at, floats_at, counters_at, floats_at, loss.data_ptr(), saved_at
            start(*(at + front.last))
        return loss

    @staticmethod
    def backward(ctx: Any, by_loss: Tensor) -> tuple[Tensor, None]:
        z, y = ctx.saved_tensors
        plan, weight, temperature, saved, weight_at, temperature_at, saved_at, eager = ctx.given
        device, back = plan.device, plan.back
        if plan.current_device() != device:
            with torch.cuda.device(device):
                return FusedNode.backward(ctx, by_loss)
        found = plan.new_gradient()
        start = back.starts.get(back.stream())
        if start is None:
            back(*_pointers(z, y, weight, temperature), saved, by_loss, saved, saved, saved, found)
        else:
            at = (
                z.data_ptr(), y.data_ptr(), weight_at, temperature_at, saved_at, by_loss.data_ptr(), saved_at, saved_at,
                saved_at, found.data_ptr(),
            )  # fmt: skip
            start(*(at + back.last))
        if is_grad_enabled():
            found = twice_differentiable(found, (z, y, weight), (by_loss,), eager)
        return found, None


_fused_node: Any = fast_apply(FusedNode)


def counts_size(d: int) -> int:
    """Size of a vector of counts, padded so that each of several is aligned to 16 bytes."""
    return 16 * cdiv(3 * d + 2, 16)


def saved_size(n: int, d: int) -> int:
    """Size of 2 d + 1 slopes and of four numbers per row; see `loss_kernel`."""
    return 16 * (d // 8 + 1) + 4 * n


cached_rows, cached_dense, cached_columns = (
    lru_cache(4096)(RowPlan),
    lru_cache(4096)(DensePlan),
    lru_cache(4096)(ColumnPlan),
)


def _kind(
    z: Tensor, y: Tensor, weight: Tensor | None, settings: KernelSettings, ignored: int, ending: Ending, **options: Any
) -> Kind:
    (low, reach, temperature), smoothing, losses, _ = settings
    others = None if weight is None else weight.dtype, None if temperature is None else temperature.dtype
    stride = z.stride(0) if z.dim() else 1
    offset = z.data_ptr() % 16 | (y.data_ptr() % 16 if y.is_floating_point() else 0)  # either of them misaligned
    return Kind(
        z.shape, stride, offset, (z.dtype, y.dtype, *others), (z.get_device(), y.get_device()), low, reach,
        smoothing, losses, ignored, ending, **options,
    )  # fmt: skip


def row_plan(
    z: Tensor,
    y: Tensor,
    weight: Tensor | None,
    settings: KernelSettings,
    ignored: int = 0,
    ending: Ending = COUNTS_ONLY,
) -> RowPlan:
    """The plan of a batch (M, C) with contiguous rows."""
    return cached_rows(_kind(z, y, weight, settings, ignored, ending), z.device)


@lru_cache(1024)
def _ending(plan: Plan) -> Ending:
    return Ending(plan.metric.code, float(plan.anchor), plan.metric.numbers)


def loss_plan(z: Tensor, y: Tensor, weight: Tensor | None, settings: KernelSettings, plan: Plan) -> LossPlan:
    """The plan of a fused loss: for contiguous entries with a threshold, for contiguous images, or for rows."""
    given = z, y, weight, settings, plan.ignored, _ending(plan)
    if settings.thresholds:
        kind = _kind(*given, tau=settings.thresholds[0], two_classes=plan.two_classes)
        return cached_columns(kind, z.device)
    return row_plan(*given) if z.dim() == 2 else cached_dense(_kind(*given), z.device)


# Tiles, warps and programs, the fastest of those that `benchmarks/tune_tiles.py` times: on an H200, at 257 and 1000.


def tile(d: int, aligned: bool, scattered: bool = False) -> tuple[int, int, int, int, int]:
    """Pieces, rows and width of a tile, warps, and the maximum number of programs."""
    warps, most = (8, 256) if d <= 512 else (4, 528 if scattered else 264)
    return (*shape(d, aligned, warps), warps, most)


def back_tile(d: int, aligned: bool) -> tuple[int, int, int, int, int]:
    """Pieces, rows and width of a tile, warps, and tiles of a program."""
    warps = 4 if d <= 128 else 2
    return (*shape(d, aligned, warps), warps, 1)


def shape(d: int, aligned: bool, warps: int) -> tuple[int, int, int]:
    """One row per warp, or several short ones within the registers."""
    wide = min(max(4, next_power_of_2(d)), 128 if aligned else 32)
    pieces = cdiv(d, wide)
    return pieces, warps * max(1, 256 // next_power_of_2(pieces * wide)), wide


def dense_tile(d: int) -> tuple[bool, int, int, int]:
    """Whether a pixel's logits stay in registers, pixels of a tile, warps, and the maximum number of programs.

    As many programs of 128 threads with 40 + 4 d registers each as 132 multiprocessors hold at once.
    """
    kept = d <= KEPT_CLASSES
    return (True, 128, 4, 132 * max(1, min(12, 512 // (40 + 4 * d)))) if kept else (False, 256, 4, 528)
