"""Select the backend of a batch and wrap it for autograd; only this module knows all backends.

Every backend has `row_forward` and `row_backward` (soft counts of multiclass rows), `column_forward` and
`column_backward` (soft counts of binary columns; not in the reference), and `fused_loss` (batch to loss in one node):

- `kernels.cpu.cpu_loss`: loops compiled by numba, for float32 on a CPU;
- `kernels.gpu.gpu_loss`: Triton kernels, for float32, float16 and bfloat16 on a GPU;
- `kernels.reference`: torch operations, for float64 and wherever compilation is unavailable.
"""

from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.compiler import is_compiling, is_dynamo_compiling

from evalign.checks import in_transform
from evalign.confusion import Confusion
from evalign.kernels.cpu import compilation
from evalign.kernels.plan import (
    TILE_CLASSES,
    ClosedForm,
    Counts,
    Eager,
    FivePoints,
    KernelSettings,
    LaunchPlan,
    Plan,
    closed_form,
    slopes,
    twice_differentiable,
)
from evalign.kernels.private_apis import constant_when_traced

GPU_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Receives tp, actual and predicted of every class, the sum of the cross-entropies and the sum of the weights as one
# vector; changes it in place; returns the factors of the slopes by the counts and of the slope by the cross-entropies.
CountsHook = Callable[[NDArray[np.float64]], tuple[float, float]]


@cache
def has_triton() -> bool:
    return find_spec("triton") is not None


@cache
def _module(name: str) -> ModuleType:
    """Import a backend on first use: numba takes half a second to import, Triton longer."""
    return import_module(f"evalign.kernels.{name}")


def is_fused(z: Tensor) -> bool:
    """Whether a compiled backend supports these logits in eager mode: not under `torch.compile`, `vmap` or `jvp`."""
    if is_compiling() or in_transform():
        return False
    if z.is_cuda:
        return z.dtype in GPU_DTYPES and has_triton()
    return z.device.type == "cpu" and z.dtype == torch.float32 and compilation.ready()


def is_fused_whole(z: Tensor) -> bool:
    """Whether `fused_loss` supports these logits, also as an operator of a `torch.compile` graph."""
    if not is_compiling():
        return is_fused(z)
    dtypes = GPU_DTYPES if z.is_cuda else GPU_DTYPES[:1]
    return z.dtype in dtypes and is_dynamo_compiling() and _takes_graphs(z.device.type)


def takes_shares(z: Tensor) -> bool:
    """Whether the fused form of these logits supports class probabilities as targets."""
    return not z.is_cuda or z.dim() < 2 or z.shape[1] <= TILE_CLASSES


@constant_when_traced
def _takes_graphs(device: str) -> bool:
    if torch.compiler.is_exporting():  # an exported program must run without evalign
        return False
    return has_triton() if device == "cuda" else device == "cpu" and compilation.wait()


def backend(z: Tensor) -> ModuleType:
    return _module("gpu.gpu_loss" if z.is_cuda else "cpu.cpu_loss" if is_fused(z) else "reference")


def fused_loss(
    logits: Tensor,
    y: Tensor,
    weight: Tensor | None,
    settings: KernelSettings,
    plan: Plan,
    hook: CountsHook | None = None,
    eager: Eager | None = None,
) -> Tensor:
    """1 - metric + anchor * cross-entropy of logits (M, C), or (M, L) at the settings' one threshold, as one node.

    On a GPU `weight` may be None: every label then has weight 1, except the label that the plan ignores. On a CPU,
    `hook` may change the counts before the metric is computed from them (memory, sums over ranks). `eager` gives second
    derivatives; without it, requesting them raises an error.

    >>> from evalign.kernels.plan import closed_form
    >>> plan, settings = Plan(closed_form("f1", "macro", 2)), KernelSettings(FivePoints(low=0.2, reach=0.5))
    >>> fused_loss(torch.tensor([[4.0, 0.0], [0.0, 4.0]]), torch.tensor([0, 1]), torch.ones(2), settings, plan)
    tensor(0.0144)
    """
    found: Tensor = backend(logits).fused_loss(logits, y, weight, settings, plan, hook, eager)
    return found


class Question(NamedTuple):
    """A plan and a step as argument types of a torch operator."""

    metric: str
    average: str
    beta: float | None
    anchor: float
    smoothing: float
    thresholds: list[float]
    two_classes: bool
    ignored: int
    low: float
    reach: float

    def answered_by(self, logits: Tensor, temperature: Tensor | None) -> tuple[ModuleType, KernelSettings, Plan]:
        """The backend of a batch, the settings and the plan."""
        points = FivePoints(self.low, self.reach, temperature)
        if temperature is not None and not (logits.is_cuda and temperature.is_cuda):
            points = FivePoints(float(temperature), 2.5 * float(temperature))
        classes = 2 if self.thresholds else logits.shape[1]
        form = closed_form(self.metric, self.average, classes, self.beta, self.smoothing)
        settings = KernelSettings(points, self.smoothing, bool(self.anchor), tuple(self.thresholds))
        module = _module("gpu.gpu_loss" if logits.is_cuda else "cpu.cpu_loss")
        return module, settings, Plan(form, self.anchor, self.two_classes, self.ignored)


def loss_in_graph(
    logits: Tensor, y: Tensor, weight: Tensor | None, temperature: Tensor | None, question: Question
) -> Tensor:
    """`fused_loss` as an operator that `torch.compile` does not trace, with its shapes and gradient registered."""
    module: Any
    if logits.is_cuda:
        from evalign.kernels.gpu import gpu_loss as module
    else:
        from evalign.kernels.cpu import cpu_loss as module
    batch = module.arranged(logits, y, weight, bool(question.thresholds))
    found: Tensor = torch.ops.evalign.fused_loss(*batch, temperature, *question)[0]
    return found


ASKED = (
    "Tensor logits, Tensor y, Tensor? weight, Tensor? temperature, str metric, str average, float? beta, float anchor, "
    "float smoothing, float[] thresholds, bool two_classes, int ignored, float low, float reach"
)
_library: Any = torch.library.Library("evalign", "DEF")  # type: ignore[no-untyped-call]
_library.define(f"fused_loss({ASKED}) -> (Tensor, Tensor, Tensor)")
_library.define(f"fused_loss_backward(Tensor by_loss, Tensor saved, Tensor more, {ASKED}) -> Tensor")


def _loss_operator(logits: Tensor, y: Tensor, weight: Tensor | None, temperature: Tensor | None, *asked: Any) -> Any:
    module, settings, plan = Question(*asked).answered_by(logits, temperature)
    return module.forward(logits, y, weight, settings, plan)


def _gradient_operator(
    by_loss: Tensor, saved: Tensor, more: Tensor, logits: Tensor, y: Tensor, weight: Tensor | None,
    temperature: Tensor | None, *asked: Any,
) -> Tensor:  # fmt: skip
    module, settings, plan = Question(*asked).answered_by(logits, temperature)
    gradient: Tensor = module.backward(logits, y, weight, settings, plan, saved, more, by_loss.contiguous())
    return gradient.contiguous()


def _loss_shapes(logits: Tensor, y: Tensor, weight: Tensor | None, temperature: Tensor | None, *asked: Any) -> Any:
    module, question = _module("gpu.gpu_loss" if logits.is_cuda else "cpu.cpu_loss"), Question(*asked)
    saved = module.saved_like(logits, columns=bool(question.thresholds), two_classes=question.two_classes)
    return logits.new_empty((), dtype=torch.float32), *saved


def _gradient_shape(by_loss: Tensor, saved: Tensor, more: Tensor, logits: Tensor, *rest: Any) -> Tensor:
    return logits.new_empty(logits.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*output[1:], *inputs[:4])
    ctx.asked = inputs[4:]
    ctx.set_materialize_grads(False)


def _backward_operator(ctx: Any, by_loss: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    gradient = None
    if by_loss is not None:
        gradient = torch.ops.evalign.fused_loss_backward(by_loss, *ctx.saved_tensors, *ctx.asked)
    return gradient, *(None,) * 13


for _device in ("CPU", "CUDA"):
    _library.impl("fused_loss", _loss_operator, _device)
    _library.impl("fused_loss_backward", _gradient_operator, _device)
torch.library.register_fake("evalign::fused_loss", _loss_shapes, lib=_library)
torch.library.register_fake("evalign::fused_loss_backward", _gradient_shape, lib=_library)
torch.library.register_autograd("evalign::fused_loss", _backward_operator, setup_context=_save, lib=_library)


def launch_plan(logits: Tensor, y: Tensor, settings: KernelSettings, plan: Plan) -> LaunchPlan | None:
    """The launch plan of unweighted GPU batches with this `batch_key`; None if they have to be copied first."""
    found: LaunchPlan | None = _module("gpu.gpu_loss").launch_plan(logits, y, settings, plan)
    return found


def loss_of_counts(c: Confusion, metric: ClosedForm, eager: Callable[[Confusion], Tensor]) -> Tensor:
    """1 - metric of counts on a GPU as one kernel, 0 for empty counts; `c` before label smoothing."""
    found: Tensor = _module("gpu.gpu_loss").loss_of_counts(c, metric, eager)
    return found


def row_counts(
    logits: Tensor, y: Tensor, weight: Tensor, settings: KernelSettings, eager: Eager | None = None
) -> Counts:
    """Soft counts of logits (M, C), labels y (M,) and weights (M,); the cross-entropies are of smoothed labels.

    >>> settings = KernelSettings(FivePoints(low=0.2, reach=0.5))
    >>> counts = row_counts(torch.eye(3), torch.tensor([0, 1, 1]), torch.ones(3), settings)
    >>> counts.actual.tolist(), round(float(counts.predicted.sum()), 4)
    ([1.0, 2.0, 0.0], 3.0)
    """
    return Counts(*RowCounts.apply(logits, y, weight, settings, eager))  # type: ignore[no-untyped-call]


class RowCounts(torch.autograd.Function):
    """Soft multiclass counts with the dynamic threshold, and the cross-entropy, with an analytic gradient."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, y: Tensor, weight: Tensor, settings: KernelSettings, eager: Eager | None
    ) -> tuple[Tensor, ...]:
        ctx.backend, ctx.settings, ctx.eager = backend(logits), settings, eager
        counts, saved = ctx.backend.row_forward(logits, y, weight, settings)
        ctx.save_for_backward(logits, y, weight, *saved)
        ctx.mark_non_differentiable(counts.actual)
        ctx.set_materialize_grads(False)
        return tuple(counts)

    @staticmethod
    def backward(
        ctx: Any, tp: Tensor | None, predicted: Tensor | None, losses: Tensor | None, actual: None
    ) -> tuple[Tensor | None, ...]:
        given = next((x for x in (tp, predicted) if x is not None), None)
        kept = ctx.saved_tensors  # unpacked once, as `torch.utils.checkpoint` requires
        batch, saved = kept[:3], kept[3:]
        if given is None:
            if losses is None:
                return None, None, None, None, None
            given = losses.new_empty(saved[0].shape[1])
        with torch.no_grad():
            gradient = ctx.backend.row_backward(saved, ctx.settings, slopes(given, tp, predicted, losses))
        gradient = twice_differentiable(gradient, batch, (tp, predicted, losses), ctx.eager)
        return gradient, None, None, None, None


class ColumnCounts(NamedTuple):
    """tp and predicted (G, L) for G thresholds and L columns; actual and total (L,), which have no gradient."""

    tp: Tensor
    predicted: Tensor
    losses: Tensor
    actual: Tensor
    total: Tensor


def column_counts(
    logits: Tensor,
    y: Tensor,
    weight: Tensor,
    settings: KernelSettings,
    *,
    two_classes: bool = False,
    eager: Eager | None = None,
) -> ColumnCounts:
    """Soft counts of logits, 0/1 labels and weights (M, L) at every threshold of the settings.

    With `two_classes` the single column gives the counts of both classes: (G, 2), (2,), and a scalar total.

    >>> settings = KernelSettings(FivePoints(low=0.1, reach=0.5), thresholds=(0.5,))
    >>> counts = column_counts(torch.tensor([[0.0], [10.0]]), torch.tensor([[1], [1]]), torch.ones(2, 1), settings)
    >>> counts.tp, counts.total
    (tensor([[1.5000]]), tensor([2.]))
    """
    found = _ColumnFunction.apply(logits, y, weight, settings, two_classes, eager)  # type: ignore[no-untyped-call]
    return ColumnCounts(*found)


def _counts_by_class(
    tp: Tensor, predicted: Tensor, actual: Tensor, total: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Counts of class 0 and class 1, (G, 2), (G, 2), (2,) and (), from those of the single column."""
    tn = total - actual - predicted + tp
    tp, predicted = torch.cat([tn, tp], 1), torch.cat([total - predicted, predicted], 1)
    return tp, predicted, torch.cat([total - actual, actual]), total[0]


def _slopes_by_column(tp: Tensor, predicted: Tensor) -> tuple[Tensor, Tensor]:
    """Derivatives with respect to the column's tp and predicted, from those of both classes."""
    return tp[:, 1:] + tp[:, :1], predicted[:, 1:] - predicted[:, :1] - tp[:, :1]


class _ColumnFunction(torch.autograd.Function):
    """Soft counts of binary columns at fixed thresholds, and binary cross-entropy, with an analytic gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        y: Tensor,
        weight: Tensor,
        settings: KernelSettings,
        two_classes: bool,
        eager: Eager | None,
    ) -> tuple[Tensor, ...]:
        saved = (logits.detach().contiguous(), y.contiguous(), weight.detach().contiguous())
        ctx.save_for_backward(*saved, logits)
        ctx.eager = eager
        ctx.backend, ctx.settings, ctx.two_classes = backend(logits), settings, two_classes
        tp, predicted, losses, actual, total = ctx.backend.column_forward(saved, settings)
        if two_classes:
            tp, predicted, actual, total = _counts_by_class(tp, predicted, actual, total)
        ctx.mark_non_differentiable(actual, total)
        ctx.set_materialize_grads(False)
        return tp, predicted, losses, actual, total

    @staticmethod
    def backward(
        ctx: Any, tp: Tensor | None, predicted: Tensor | None, losses: Tensor | None, actual: None, total: None
    ) -> tuple[Tensor | None, ...]:
        *saved, logits = ctx.saved_tensors
        with torch.no_grad():
            shape = len(ctx.settings.thresholds), 2 if ctx.two_classes else saved[0].shape[1]
            by_tp = saved[2].new_zeros(shape) if tp is None else tp
            by_predicted = saved[2].new_zeros(shape) if predicted is None else predicted
            if ctx.two_classes:
                by_tp, by_predicted = _slopes_by_column(by_tp, by_predicted)
            gradient = ctx.backend.column_backward(saved, ctx.settings, by_tp, by_predicted, losses)
        batch = logits, saved[1], saved[2]
        return twice_differentiable(gradient, batch, (tp, predicted, losses), ctx.eager), None, None, None, None, None


BatchKey = tuple[Any, ...]
CACHED_PLANS = 1024


def batch_key(z: Tensor, y: Tensor) -> BatchKey | None:
    """Everything a launch plan depends on: shapes, strides, dtypes, alignment, device.

    None on a CPU, for tensor subclasses, and under `torch.compile` or `vmap`.
    """
    if is_compiling() or type(z) is not Tensor or type(y) is not Tensor or not z.is_cuda or in_transform():
        return None
    return z.shape, z.stride(), z.dtype, z.data_ptr() % 16, z.get_device(), y.shape, y.stride(), y.dtype, y.get_device()


class LaunchPlanCache(dict[BatchKey, LaunchPlan]):
    """Cache of launch plans by `batch_key`; copied or pickled, it is empty."""

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return LaunchPlanCache, ()

    def add(self, key: BatchKey, plan: LaunchPlan) -> None:
        if len(self) >= CACHED_PLANS:  # batches of ever-changing sizes must not fill memory
            self.clear()
        self[key] = plan
