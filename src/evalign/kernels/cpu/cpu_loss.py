"""The fused loss on a CPU: compiled loops from the logits to the loss and back.

Of data of the batch's size, only the logits and, for many classes, the buffer of the gradient are kept for the backward
pass. The time of a small batch is mostly calls: one call of torch or numpy takes about as long as a loop over all of
its rows, so there are few.
"""

from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evalign._batch import rows_of_images
from evalign.kernels.cpu.block_loops import UNROLLED, By, Doubles, Floats, block_backward, block_forward, few_backward
from evalign.kernels.cpu.column_loops import column_gradient, column_sums, entry_gradient, entry_sums
from evalign.kernels.cpu.compilation import in_threads, parts, summed
from evalign.kernels.cpu.count_loops import agreement_and_slopes, remember, scaled_slopes, value_and_slopes
from evalign.kernels.cpu.row_loops import STATS
from evalign.kernels.cpu.row_loops import row_backward as run_row_backward
from evalign.kernels.cpu.row_loops import row_forward as run_row_forward
from evalign.kernels.plan import (
    AGREEMENTS,
    FORMS,
    ClosedForm,
    Counts,
    Eager,
    FivePoints,
    KernelSettings,
    Plan,
    Slopes,
    closed_form,
    twice_differentiable,
)
from evalign.kernels.private_apis import fast_apply

if TYPE_CHECKING:
    from evalign.kernels.dispatch import CountsHook

Batch = tuple[Tensor, Tensor, Tensor]  # logits, labels or shares, weights
FEW = 31  # maximum number of classes for which blocks of rows are faster than single rows
DENSE_CLASSES = 256  # maximum number of classes for which images are read in place
SHORT_PLANE = 2048  # pixels below which a call per column of an image costs more than a copy
Kept = tuple[Tensor, Tensor]
Saved = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
NO_TOTALS = np.empty(0)
NOTHING: Kept = torch.empty(0), torch.empty(STATS, 0)


@lru_cache
def _step_numbers(points: FivePoints, smoothing: float) -> Floats:
    return np.array([*points.numbers(), smoothing], np.float32)


def _arrays(batch: Batch) -> tuple[Floats, NDArray[Any], Floats]:
    z, y, weight = batch
    return z.numpy(), y.numpy(), weight.numpy()


def _in_blocks(z: Tensor) -> bool:
    return z.dim() == 3 or 1 < z.shape[1] <= FEW


def count_rows(batch: Batch, settings: KernelSettings, into: Doubles, keep: bool = True) -> tuple[float, Kept]:
    """Add tp, actual and predicted of rows (M, C) or images (N, C, S) to `into` (3, C).

    Returns the sum of the cross-entropies, and the data that `row_gradient` needs for many classes.
    """
    z, rows = batch[0], batch[2].shape[0]
    given = *_arrays(batch), _step_numbers(settings.points, settings.smoothing)
    if _in_blocks(z):
        return summed(partial(block_forward, *given, settings.losses), rows, z.numel(), into), NOTHING
    kept = torch.empty_like(z if keep else z[:0]), torch.empty(STATS, rows)
    run = partial(run_row_forward, *given, settings.losses, kept[0].numpy(), kept[1].numpy())
    return summed(run, rows, z.numel(), into), kept


def row_gradient(batch: Batch, settings: KernelSettings, kept: Kept, by: By) -> Tensor:
    """dL/dlogits from the slopes of the counts; for many classes, in place of the kept data."""
    z, y, w = _arrays(batch)
    numbers = _step_numbers(settings.points, settings.smoothing)
    if z.ndim == 3 and y.ndim == 1 and z.shape[1] <= UNROLLED:
        found, run = (
            torch.empty_like(batch[0]),
            partial(few_backward, z, y, w, numbers, tuple(by[0]), tuple(by[1]), by[2]),
        )
    elif _in_blocks(batch[0]):
        found, run = torch.empty_like(batch[0]), partial(block_backward, z, y, w, numbers, by)
    else:
        found, run = kept[0], partial(run_row_backward, y, w, numbers, by, kept[1].numpy())
    out = found.numpy()
    in_threads([partial(run, *part, out) for part in parts(len(w), found.numel())])
    return found


def row_forward(z: Tensor, y: Tensor, weight: Tensor, settings: KernelSettings) -> tuple[Counts, Saved]:
    batch, sums = (z.detach().contiguous(), y.contiguous(), weight.detach().contiguous()), np.zeros((3, z.shape[1]))
    losses, kept = count_rows(batch, settings, sums)
    tp, actual, predicted = torch.from_numpy(sums).to(z.dtype).unbind()
    return Counts(tp, predicted, torch.tensor(losses, dtype=z.dtype), actual), (*batch, *kept)


def row_backward(saved: Saved, settings: KernelSettings, slopes: Slopes) -> Tensor:
    z, y, weight, kept, stats = saved
    by_losses = np.float32(0 if slopes.losses is None else slopes.losses.item())
    by = slopes.tp.detach().numpy(), slopes.predicted.detach().numpy(), by_losses
    return row_gradient((z, y, weight), settings, (kept.clone(), stats), by)


def _by_entry(z: Tensor) -> bool:
    return z.dim() == 2 and z.shape[1] > 1


def count_columns(
    batch: tuple[Tensor, ...], settings: KernelSettings, into: Doubles, two_classes: bool
) -> tuple[float, Doubles]:
    """Write tp, actual and predicted of every column at the one threshold to `into` (3, L), or of both classes of the
    single column to (3, 2); return the sum of the cross-entropies, and the totals, unless two classes add up to them.
    """
    if _by_entry(batch[0]):
        (tp, predicted, actual, total), losses = entry_sums(batch, settings)
    else:
        sums, losses = column_sums(batch, settings)
        tp, predicted, actual, total = sums[:, 0, 0], sums[:, 1, 0], sums[:, 2, 0], sums[:, 2, 1]
    if not two_classes:
        into[0], into[1], into[2] = tp, actual, predicted
        return losses, total
    into[:, 1] = tp[0], actual[0], predicted[0]
    into[:, 0] = total[0] - actual[0] - predicted[0] + tp[0], total[0] - actual[0], total[0] - predicted[0]
    return losses, NO_TOTALS


def column_forward(
    batch: tuple[Tensor, ...], settings: KernelSettings
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """tp and predicted (G, L), the sum of cross-entropies, actual and total (L,) of z, y, weight (M, L)."""
    sums, losses = column_sums(batch, settings)
    added, g = torch.from_numpy(sums).float(), len(settings.thresholds)
    return added[:, 0, :g].t(), added[:, 1, :g].t(), torch.tensor(losses), added[:, 2, 0], added[:, 2, 1]


def column_backward(
    batch: tuple[Tensor, ...], settings: KernelSettings, tp: Tensor, predicted: Tensor, losses: Tensor | None
) -> Tensor:
    """dL/dlogits (M, L) from dL/dtp and dL/dpredicted (G, L)."""
    by_tp, by_predicted = (np.ascontiguousarray(x.detach().numpy().T) for x in (tp, predicted))
    return column_gradient(batch, settings, (by_tp, by_predicted, np.float32(0 if losses is None else losses.item())))


@lru_cache
def _form_numbers(metric: ClosedForm) -> Doubles:
    return np.array(metric.numbers).reshape(3, 4)


def metric_of(counts: Doubles, totals: Doubles, plan: Plan, slopes: Doubles) -> float:
    """1 - metric of tp, actual and predicted (3, C); writes its slopes for tp and predicted to `slopes` (2, C)."""
    run, form = agreement_and_slopes if plan.metric.name in AGREEMENTS else value_and_slopes, plan.metric
    return run(counts, totals, _form_numbers(form), FORMS.index(form.name), slopes)


def _forward(
    batch: Batch, settings: KernelSettings, plan: Plan, hook: "CountsHook | None" = None, keep: bool = True
) -> tuple[float, Doubles, Kept]:
    """The loss; its slopes by tp and by predicted of every class and by the cross-entropies; what rows keep."""
    totals, kept = NO_TOTALS, NOTHING
    classes = 2 if plan.two_classes else batch[0].shape[1]
    vector = np.zeros(3 * classes + 2)
    counts = vector[:-2].reshape(3, classes)
    if settings.thresholds:
        vector[-2], totals = count_columns(batch, settings, counts, plan.two_classes)
    else:
        vector[-2], kept = count_rows(batch, settings, counts, keep)
    if plan.anchor or hook is not None:
        vector[-1] = (counts[1] if totals is NO_TOTALS else totals).sum()
    by_counts, by_losses = (1.0, 1.0) if hook is None else hook(vector)
    slopes = np.zeros(2 * classes + 1)
    loss = metric_of(counts, totals, plan, slopes[:-1].reshape(2, classes))
    if by_counts != 1:
        slopes *= by_counts
    if plan.anchor:
        entropy, mass = vector[-2:].tolist()
        anchor = plan.anchor / mass if mass else 0.0
        slopes[-1] = by_losses * anchor
        loss += anchor * entropy if anchor else 0.0
    return loss, slopes, kept


def _backward(
    batch: Batch, settings: KernelSettings, plan: Plan, slopes: Doubles, kept: Kept, by_loss: float
) -> Tensor:
    scaled = scaled_slopes(slopes, by_loss, plan.two_classes)
    by_tp, by_predicted = scaled[:-1].reshape(2, -1)
    if not settings.thresholds:
        return row_gradient(batch, settings, kept, (by_tp, by_predicted, scaled[-1]))
    if _by_entry(batch[0]):
        return entry_gradient(batch, settings, (by_tp, by_predicted, scaled[-1]))
    return column_gradient(batch, settings, (by_tp[:, None], by_predicted[:, None], scaled[-1]))


class CompiledLoss(torch.autograd.Function):
    """1 - metric + anchor * cross-entropy; `how`: settings, plan, hook, whether to keep, eager form."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, y: Tensor, weight: Tensor, how: tuple[Any, ...]) -> Tensor:
        batch = logits.detach().contiguous(), y.contiguous(), weight.contiguous()
        ctx.save_for_backward(*batch, logits)
        *given, ctx.eager = how
        loss, slopes, ctx.kept = _forward(batch, *given)
        ctx.given = *given[:2], slopes
        return torch.scalar_tensor(loss, dtype=logits.dtype)

    @staticmethod
    def backward(ctx: Any, by_loss: Tensor) -> tuple[Tensor | None, ...]:
        *batch, logits = ctx.saved_tensors
        settings, plan, slopes = ctx.given
        # The gradient overwrites the kept data: a second pass through the same graph computes them again.
        kept = ctx.__dict__.pop("kept", None)
        gradient = _backward(batch, settings, plan, slopes, kept or _forward(batch, settings, plan)[2], by_loss.item())
        if torch.is_grad_enabled():
            gradient = twice_differentiable(gradient, (logits, batch[1], batch[2]), (by_loss,), ctx.eager)
        return gradient, None, None, None


_apply: Any = fast_apply(CompiledLoss)


def arranged(logits: Tensor, y: Tensor, weight: Tensor, columns: bool) -> Batch:
    """The batch in the layout of the loops: images as rows if faster, rows with contiguous classes as an image."""
    if logits.dim() == 3:
        if columns and logits.shape[2] < SHORT_PLANE:
            logits, y, weight = rows_of_images(logits), rows_of_images(y), rows_of_images(weight)
        elif not columns and (logits.shape[1] > DENSE_CLASSES or not logits.is_contiguous()):
            logits, y = rows_of_images(logits), rows_of_images(y) if y.dim() == 3 else y
    by_class = logits.dim() == 2 and not columns and not logits.is_contiguous() and logits.t().is_contiguous()
    if by_class and logits.shape[1] <= DENSE_CLASSES:
        logits, y = logits.t()[None], y.t()[None] if y.dim() == 2 else y
    return logits, y, weight


def fused_loss(
    logits: Tensor, y: Tensor, weight: Tensor, settings: KernelSettings, plan: Plan, hook: "CountsHook | None" = None,
    eager: Eager | None = None,
) -> Tensor:  # fmt: skip
    """See `dispatch.fused_loss`."""
    how = settings, plan, hook, logits.requires_grad and torch.is_grad_enabled(), eager
    return _apply(*arranged(logits, y, weight, bool(settings.thresholds)), how)  # type: ignore[no-any-return]


def forward(
    logits: Tensor, y: Tensor, weight: Tensor, settings: KernelSettings, plan: Plan
) -> tuple[Tensor, Tensor, Tensor]:
    """The loss of an `arranged` batch, and two tensors for `backward`; without autograd."""
    loss, slopes, (kept, stats) = _forward((logits.contiguous(), y.contiguous(), weight.contiguous()), settings, plan)
    rows = stats.numel() > 0
    saved = torch.from_numpy(np.append(slopes, stats.numpy()) if rows else slopes)
    return torch.tensor(loss, dtype=logits.dtype), saved, kept if rows else torch.empty(0)


def backward(
    logits: Tensor, y: Tensor, weight: Tensor, settings: KernelSettings, plan: Plan, saved: Tensor, kept: Tensor,
    by_loss: Tensor,
) -> Tensor:  # fmt: skip
    batch = logits.contiguous(), y.contiguous(), weight.contiguous()
    slopes, rows = saved.numpy(), NOTHING
    if kept.numel():
        slopes, stats = np.split(slopes, [_slopes(logits, plan.two_classes)])
        rows = kept.clone(), torch.from_numpy(stats.reshape(STATS, -1).astype(np.float32))
    return _backward(batch, settings, plan, slopes, rows, by_loss.item())


def _slopes(logits: Tensor, two_classes: bool) -> int:
    return 2 * (2 if two_classes else logits.shape[1]) + 1


def saved_like(logits: Tensor, *, columns: bool, two_classes: bool) -> tuple[Tensor, Tensor]:
    """Empty tensors in the shapes of those saved by `forward`."""
    rows = 0 if columns or _in_blocks(logits) else logits.shape[0]
    saved = logits.new_empty(_slopes(logits, two_classes) + STATS * rows, dtype=torch.float64)
    return saved, logits.new_empty(logits.shape if rows else 0)


def run_all_loops() -> None:
    """Compile all loops by running them on tiny batches of every type and memory layout."""
    rows, ones = KernelSettings(FivePoints(0.2, 0.5)), torch.ones(4, 2)
    columns = rows._replace(thresholds=(0.5,))
    macro, agreement = closed_form("f1", "macro", 2), closed_form("mcc", "macro", 2)
    y, weight = torch.tensor([0, 1, 1, 0]), torch.ones(4)
    images = [torch.zeros(1, classes, 4) for classes in range(2, UNROLLED + 2)]
    for logits in (torch.eye(4)[:, :2], *images, torch.zeros(4, FEW + 1)):  # blocks, images, rows
        plan = Plan(closed_form("f1", "macro", logits.shape[1]), 1.0)
        _first_step(logits, y, weight, rows, plan)
        _first_step(logits, torch.ones_like(logits), weight, rows, plan)
    _first_step(ones, y, weight, rows, Plan(agreement, 1.0))
    for labels in (torch.eye(4)[:, :2].long(), torch.eye(4)[:, :2]):
        _first_step(ones, labels, ones, columns, Plan(macro, 1.0))
        _first_step(ones[:, :1], labels[:, :1], ones[:, :1], columns, Plan(macro, 1.0, two_classes=True))
        grid = rows._replace(thresholds=(0.3, 0.5))
        column_forward((ones, labels, ones), grid)
        column_backward((ones, labels, ones), grid, torch.ones(2, 2), torch.ones(2, 2), None)
    remember(np.zeros(6), np.zeros(2), 1.0, np.zeros(7), np.zeros(2), 0.9, 1.0)


def _first_step(logits: Tensor, y: Tensor, weight: Tensor, settings: KernelSettings, plan: Plan) -> None:
    x = logits.detach().clone().requires_grad_()
    torch.autograd.grad(_apply(x, y, weight, (settings, plan, None, True, None)), x)
