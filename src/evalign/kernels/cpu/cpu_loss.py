"""The fused loss on a CPU: compiled loops from the logits to the loss and back.

Nothing of the batch's size is saved for the backward pass except the logits. A small batch costs mostly calls: one
call of torch or numpy takes about as long as a loop over all of its rows, so there are few.
"""

import math
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evalign._batch import rows_of_images
from evalign.kernels.cpu.block_loops import block_backward, block_forward
from evalign.kernels.cpu.column_loops import By, column_gradient, column_sums, entry_gradient, entry_sums
from evalign.kernels.cpu.compilation import in_threads, loop, parts, summed
from evalign.kernels.cpu.row_loops import row_backward as run_row_backward
from evalign.kernels.cpu.row_loops import row_forward as run_row_forward
from evalign.kernels.plan import (
    AGREEMENTS,
    FORMS,
    ClosedForm,
    Counts,
    Eager,
    FivePoints,
    Plan,
    Settings,
    Slopes,
    closed_form,
    twice_differentiable,
)
from evalign.kernels.private_apis import fast_apply

if TYPE_CHECKING:
    from evalign.kernels.dispatch import CountsHook

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
Batch = tuple[Tensor, Tensor, Tensor]  # logits, labels or shares, weights
FEW = 64  # classes up to which blocks of rows are faster than single rows
DENSE_CLASSES = 256  # classes up to which images are read in place
SHORT_PLANE = 2048  # pixels below which a call for each column of an image costs more than a copy
Saved = tuple[Tensor, Tensor, Tensor, Tensor]
NO_LABELS, NO_TOTALS = np.empty(0, np.int64), np.empty(0)
NO_SHARES = {2: np.empty((0, 0), np.float32), 3: np.empty((0, 0, 0), np.float32)}
NO_STATS = np.empty((0, 7), np.float32)


@lru_cache
def _step_numbers(points: FivePoints, smoothing: float) -> Floats:
    return np.array([*points.numbers(), smoothing], np.float32)


def _arrays(batch: Batch) -> tuple[Floats, NDArray[np.int64], Floats, Floats]:
    """Logits, labels, weights and shares as the loops take them."""
    z, y, weight = (x.numpy() for x in batch)
    return (z, y, weight, NO_SHARES[z.ndim]) if y.dtype == np.int64 else (z, NO_LABELS, weight, y)


def _in_blocks(z: Tensor) -> bool:
    return z.dim() == 3 or 1 < z.shape[1] <= FEW


def count_rows(batch: Batch, settings: Settings, into: Doubles) -> tuple[float, Floats]:
    """Add tp, actual and predicted of rows (M, C) or images (N, C, S) to `into` (3, C).

    Returns the sum of the cross-entropies, and what `row_gradient` needs.
    """
    z = batch[0]
    given = _arrays(batch), _step_numbers(settings.points, settings.smoothing)
    rows, stats = batch[2].shape[0], NO_STATS
    if _in_blocks(z):
        return summed(partial(block_forward, *given, settings.losses), rows, z.numel(), into), stats
    stats = np.empty((rows, 7), np.float32)
    return summed(partial(run_row_forward, *given, stats), rows, z.numel(), into), stats


def row_gradient(batch: Batch, settings: Settings, stats: Floats, by: By) -> Tensor:
    """dL/dlogits from dL by the counts."""
    z, found = batch[0], torch.empty_like(batch[0])
    given = _arrays(batch), _step_numbers(settings.points, settings.smoothing), by
    run = partial(block_backward, *given) if _in_blocks(z) else partial(run_row_backward, *given, stats)
    out = found.numpy()
    in_threads([partial(run, *part, out) for part in parts(batch[2].shape[0], z.numel())])
    return found


def row_forward(z: Tensor, y: Tensor, weight: Tensor, settings: Settings) -> tuple[Counts, Saved]:
    batch, sums = (z.detach().contiguous(), y.contiguous(), weight.detach().contiguous()), np.zeros((3, z.shape[1]))
    losses, stats = count_rows(batch, settings, sums)
    tp, actual, predicted = torch.from_numpy(sums).to(z.dtype).unbind()
    return Counts(tp, predicted, torch.tensor(losses, dtype=z.dtype), actual), (*batch, torch.from_numpy(stats))


def row_backward(saved: Saved, settings: Settings, slopes: Slopes) -> Tensor:
    z, y, weight, stats = saved
    by_losses = np.float32(0 if slopes.losses is None else slopes.losses.item())
    by = slopes.tp.detach().numpy(), slopes.predicted.detach().numpy(), by_losses
    return row_gradient((z, y, weight), settings, stats.numpy(), by)


def _by_entry(z: Tensor) -> bool:
    return z.dim() == 2 and z.shape[1] > 1


def count_columns(
    batch: tuple[Tensor, ...], settings: Settings, into: Doubles, two_classes: bool
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


def column_forward(batch: tuple[Tensor, ...], settings: Settings) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """tp and predicted (G, L), the sum of cross-entropies, actual and total (L,) of z, y, weight (M, L)."""
    sums, losses = column_sums(batch, settings)
    added, g = torch.from_numpy(sums).float(), len(settings.thresholds)
    return added[:, 0, :g].t(), added[:, 1, :g].t(), torch.tensor(losses), added[:, 2, 0], added[:, 2, 1]


def column_backward(
    batch: tuple[Tensor, ...], settings: Settings, tp: Tensor, predicted: Tensor, losses: Tensor | None
) -> Tensor:
    """dL/dlogits (M, L) from dL/dtp and dL/dpredicted (G, L)."""
    by_tp, by_predicted = (np.ascontiguousarray(x.detach().numpy().T) for x in (tp, predicted))
    return column_gradient(batch, settings, (by_tp, by_predicted, np.float32(0 if losses is None else losses.item())))


# The metric of the counts, in loops over classes. The formulas are those of `gpu.device_functions`; both are tested
# against autograd for every metric and average.
MACRO, MICRO, WEIGHTED, BINARY = range(4)  # indices in `plan.FORMS`


@loop(exact=True)
def form(numbers: Doubles, counts: Doubles, totals: Doubles, k: int) -> float:
    """A linear form of the counts of class k."""
    total = totals[k] if totals.shape[0] > 1 else totals[0]
    value: float = numbers[0] * counts[0, k] + numbers[1] * counts[1, k] + numbers[2] * counts[2, k]
    value += numbers[3] * total
    return value


@loop(exact=True)
def share(weight: Doubles, counts: Doubles, totals: Doubles, average: int, k: int) -> float:
    """How much class k counts in the mean, before all of these are made to add up to 1."""
    if average == BINARY:
        return 1.0 if k == 1 else 0.0
    if average == WEIGHTED:
        return form(weight, counts, totals, k)
    return 1.0 if counts[1, k] > 0 else 0.0


@loop(exact=True)
def value_and_slopes(counts: Doubles, totals: Doubles, forms: Doubles, average: int, slopes: Doubles) -> float:
    """1 - the averaged metric of `counts` (3, C), which are tp, actual and predicted; 0 for counts of nothing.

    `totals` has one entry for every label, one entry for all classes, or none where it is the sum of the label counts;
    `forms` (3, 4) has the numbers of `ClosedForm`. The derivatives by tp and predicted are written to
    `slopes` (2, C).
    """
    d = counts.shape[1]
    top, bottom, weight = forms[0], forms[1], forms[2]
    per_label = totals.shape[0] == d
    if totals.shape[0] == 0:
        totals = np.array([counts[1].sum()])
    slopes[:] = 0.0
    if totals.sum() == 0:
        return 0.0
    # Yes/no problems without a positive label: the share of rows that are flagged; see `Objective.metric_term`.
    alarms = bottom[2] > 0 and (average == BINARY or per_label)
    labelled = counts[1, 1] if average == BINARY else counts[1].sum()
    if alarms and labelled == 0:
        mass = totals.sum()
        for k in range(d):
            if average != BINARY or k == 1:
                slopes[1, k] = 1 / mass
        flagged: float = (counts[2, 1] if average == BINARY else counts[2].sum()) / mass
        return flagged
    if average == MICRO:
        above, below = 0.0, 0.0
        for k in range(d):
            above += form(top, counts, totals, k)
            below += form(bottom, counts, totals, k)
        if below == 0:
            return 1.0
        slopes[0] = above / below**2 * bottom[0] - top[0] / below
        slopes[1] = above / below**2 * bottom[2] - top[2] / below
        return 1 - above / below
    added, otherwise = 0.0, 1.0 / d if average == WEIGHTED else 0.0
    for k in range(d):
        added += share(weight, counts, totals, average, k)
    value = 0.0
    for k in range(d):
        if alarms and average == MACRO and counts[1, k] == 0:
            if totals[k] > 0:
                slopes[1, k] = 1 / (d * totals[k])
                value -= counts[2, k] / (d * totals[k])
            continue
        part = share(weight, counts, totals, average, k) / added if added != 0 else otherwise
        divisor = form(bottom, counts, totals, k)
        if divisor == 0:
            continue
        score, slope = form(top, counts, totals, k) / divisor, part / divisor
        if part != 0:  # a class that does not count does not count where its score is nan either
            value += part * score
        slopes[0, k] = slope * (score * bottom[0] - top[0])
        slopes[1, k] = slope * (score * bottom[2] - top[2])
    return 1 - value


MCC = FORMS.index("mcc")


@loop(exact=True)
def agreement_and_slopes(counts: Doubles, totals: Doubles, forms: Doubles, metric: int, slopes: Doubles) -> float:
    """As `value_and_slopes`; the `forms` are tp, predicted and actual."""
    d = counts.shape[1]
    if totals.shape[0] == 0:
        totals = np.array([counts[1].sum()])
    n = totals[0]
    slopes[:] = 0.0
    if n == 0:
        return 0.0
    right, chance, of_guesses, of_labels = 0.0, 0.0, 0.0, 0.0
    for k in range(d):
        guesses, labels = form(forms[1], counts, totals, k), form(forms[2], counts, totals, k)
        right += form(forms[0], counts, totals, k)
        chance += guesses * labels
        of_guesses += guesses * (n - guesses)
        of_labels += labels * (n - labels)
    if counts[1].max() == n:  # labels of one class only: accuracy
        slopes[0] = -1 / n
        wrong: float = 1 - counts[0].sum() / n
        return wrong
    bottom = n * n - chance
    if metric == MCC:
        bottom = 0.0 if of_guesses <= 0 or of_labels <= 0 else math.sqrt(of_guesses) * math.sqrt(of_labels)
    if bottom == 0:
        return 1.0
    value: float = (right * n - chance) / bottom
    for k in range(d):
        guesses, labels = form(forms[1], counts, totals, k), form(forms[2], counts, totals, k)
        # How the bottom grows with the predictions of class k.
        growth = bottom * (n - 2 * guesses) / (2 * of_guesses) if metric == MCC else -labels
        by_hits, by_guesses = -n / bottom, (labels + value * growth) / bottom
        slopes[0, k] = by_hits * forms[0, 0] + by_guesses * forms[1, 0]
        slopes[1, k] = by_hits * forms[0, 2] + by_guesses * forms[1, 2]
    return 1 - value


@loop(exact=True)
def remember(
    counts: Doubles, rows: Doubles, weight: float, state: Doubles, seen: Doubles, decay: float, rows_of_rarest: float
) -> float:
    """Adds what is remembered to `counts`, remembers the batch, and returns how many times the batch the sum is.

    `state` has the remembered counts and their weight, `seen` the rows of each class. A `decay` below 0 is "auto".
    """
    rows = rows.copy()  # a part of the counts, which change
    kept = decay
    if decay < 0:
        rarest, everything = np.inf, 0.0
        for k in range(rows.size):
            known = seen[k] + rows[k]
            everything += known
            if known > 0:
                rarest = min(rarest, known)
        kept = max(0.0, 1 - rows.sum() * (rarest / everything) / rows_of_rarest) if everything > 0 else 1.0
    mass = weight + kept * state[-1]
    sound = mass
    for i in range(counts.size):
        counts[i] += kept * state[i]
        sound += counts[i]
    if np.isfinite(sound):
        state[:-1] = counts
        state[-1] = mass
        for k in range(rows.size):
            seen[k] += rows[k]
    return mass / weight if weight > 0 else 1.0


@lru_cache
def _form_numbers(metric: ClosedForm) -> Doubles:
    return np.array(metric.numbers).reshape(3, 4)


def metric_of(counts: Doubles, totals: Doubles, plan: Plan, slopes: Doubles) -> float:
    """1 - metric of tp, actual and predicted (3, C); its slopes by tp and predicted go to `slopes` (2, C)."""
    run, form = agreement_and_slopes if plan.metric.name in AGREEMENTS else value_and_slopes, plan.metric
    return run(counts, totals, _form_numbers(form), FORMS.index(form.name), slopes)


def by_column(slopes: NDArray[Any]) -> NDArray[Any]:
    """Slopes by tp and predicted of the one column, (2, 1), from those by the counts of both its classes, (2, 2)."""
    (tn, tp), (no, yes) = slopes.tolist()
    return np.array([[tp + tn], [yes - no - tn]], slopes.dtype)


def _settings(points: FivePoints, plan: Plan) -> Settings:
    return Settings(points, plan.smoothing, bool(plan.anchor), plan.thresholds)


def _forward(
    batch: Batch, points: FivePoints, plan: Plan, hook: "CountsHook | None" = None
) -> tuple[float, Doubles, Floats]:
    """The loss; its slopes by tp and by predicted of every class and by the cross-entropies; what rows saved."""
    settings, totals, stats = _settings(points, plan), NO_TOTALS, NO_STATS
    classes = 2 if plan.two_classes else batch[0].shape[1]
    vector = np.zeros(3 * classes + 2)
    counts = vector[:-2].reshape(3, classes)
    if plan.thresholds:
        vector[-2], totals = count_columns(batch, settings, counts, plan.two_classes)
    else:
        vector[-2], stats = count_rows(batch, settings, counts)
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
    return loss, slopes, stats


def _backward(batch: Batch, points: FivePoints, plan: Plan, slopes: Doubles, stats: Floats, by_loss: float) -> Tensor:
    settings = _settings(points, plan)
    with np.errstate(over="ignore", invalid="ignore"):  # a gradient scaler tries factors that are too large
        scaled = (by_loss * slopes).astype(np.float32)
    by_counts = scaled[:-1].reshape(2, -1)
    by_tp, by_predicted = by_column(by_counts) if plan.two_classes else by_counts
    if not plan.thresholds:
        return row_gradient(batch, settings, stats, (by_tp, by_predicted, scaled[-1]))
    if _by_entry(batch[0]):
        return entry_gradient(batch, settings, (by_tp, by_predicted, scaled[-1]))
    return column_gradient(batch, settings, (by_tp[:, None], by_predicted[:, None], scaled[-1]))


class CompiledLoss(torch.autograd.Function):
    """1 - metric + anchor * cross-entropy; `how` is the step, the plan, the hook and the eager form."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, y: Tensor, weight: Tensor, how: tuple[Any, ...]) -> Tensor:
        batch = logits.detach().contiguous(), y.contiguous(), weight.contiguous()
        ctx.save_for_backward(*batch, logits)
        *given, ctx.eager = how
        loss, *saved = _forward(batch, *given)
        ctx.given = *given[:2], *saved
        return torch.tensor(loss, dtype=logits.dtype)

    @staticmethod
    def backward(ctx: Any, by_loss: Tensor) -> tuple[Tensor | None, ...]:
        *batch, logits = ctx.saved_tensors
        points, plan, slopes, stats = ctx.given
        gradient = _backward(batch, points, plan, slopes, stats, by_loss.item())
        if torch.is_grad_enabled():
            gradient = twice_differentiable(gradient, (logits, batch[1], batch[2]), (by_loss,), ctx.eager)
        return gradient, None, None, None


_apply: Any = fast_apply(CompiledLoss)


def arranged(logits: Tensor, y: Tensor, weight: Tensor, columns: bool) -> Batch:
    """The batch as loops read it: images as rows where that is faster, columns of few classes as those of an image."""
    if logits.dim() == 3:
        if columns and logits.shape[2] < SHORT_PLANE:
            logits, y, weight = rows_of_images(logits), rows_of_images(y), rows_of_images(weight)
        elif not columns and (logits.shape[1] > DENSE_CLASSES or not logits.is_contiguous()):
            logits, y = rows_of_images(logits), rows_of_images(y) if y.dim() == 3 else y
    if logits.dim() == 2 and not columns and logits.shape[1] <= FEW and not logits.is_contiguous():
        logits, y = logits.t()[None], y.t()[None] if y.dim() == 2 else y
    return logits, y, weight


def fused_loss(
    logits: Tensor, y: Tensor, weight: Tensor, points: FivePoints, plan: Plan, hook: "CountsHook | None" = None,
    eager: Eager | None = None,
) -> Tensor:  # fmt: skip
    """See `dispatch.fused_loss`."""
    return _apply(*arranged(logits, y, weight, bool(plan.thresholds)), (points, plan, hook, eager))  # type: ignore[no-any-return]


def forward(logits: Tensor, y: Tensor, weight: Tensor, points: FivePoints, plan: Plan) -> tuple[Tensor, Tensor, Tensor]:
    """The loss of a batch as `arranged` returns it, and two tensors that `backward` needs; without autograd."""
    loss, slopes, stats = _forward((logits.contiguous(), y.contiguous(), weight.contiguous()), points, plan)
    return torch.tensor(loss, dtype=logits.dtype), torch.from_numpy(slopes), torch.from_numpy(stats).clone()


def backward(
    logits: Tensor, y: Tensor, weight: Tensor, points: FivePoints, plan: Plan, slopes: Tensor, stats: Tensor,
    by_loss: Tensor,
) -> Tensor:  # fmt: skip
    batch = logits.contiguous(), y.contiguous(), weight.contiguous()
    return _backward(batch, points, plan, slopes.numpy(), stats.numpy(), by_loss.item())


def saved_like(logits: Tensor, *, columns: bool, two_classes: bool) -> tuple[Tensor, Tensor]:
    """Empty tensors in the shapes of what `forward` saves."""
    rows = 0 if columns or _in_blocks(logits) else logits.shape[0]
    classes = 2 if two_classes else logits.shape[1]
    return logits.new_empty(2 * classes + 1, dtype=torch.float64), logits.new_empty((rows, 7))


def run_all_loops() -> None:
    """Run every loop once on tiny batches, of every type and memory layout that a batch may have: compiles them all."""
    points, ones = FivePoints(0.2, 0.5), torch.ones(4, 2)
    macro, agreement = closed_form("f1", "macro", 2), closed_form("mcc", "macro", 2)
    y, weight = torch.tensor([0, 1, 1, 0]), torch.ones(4)
    for logits in (torch.eye(4)[:, :2], torch.zeros(2, 2, 2), torch.zeros(4, FEW + 1)):  # blocks, images, rows
        form = closed_form("f1", "macro", logits.shape[1])
        _first_step(logits, y, weight, points, Plan(form, 1.0))
        _first_step(logits, torch.ones_like(logits), weight, points, Plan(form, 1.0))
    _first_step(ones, y, weight, points, Plan(agreement, 1.0))
    for labels in (torch.eye(4)[:, :2].long(), torch.eye(4)[:, :2]):
        _first_step(ones, labels, ones, points, Plan(macro, 1.0, 0.0, (0.5,)))
        column = ones[:, :1], labels[:, :1], ones[:, :1]
        _first_step(*column, points, Plan(macro, 1.0, 0.0, (0.5,), two_classes=True))
        settings = Settings(points, thresholds=(0.3, 0.5))
        column_forward((ones, labels, ones), settings)
        column_backward((ones, labels, ones), settings, torch.ones(2, 2), torch.ones(2, 2), None)
    remember(np.zeros(6), np.zeros(2), 1.0, np.zeros(7), np.zeros(2), 0.9, 1.0)


def _first_step(logits: Tensor, y: Tensor, weight: Tensor, points: FivePoints, plan: Plan) -> None:
    x = logits.detach().clone().requires_grad_()
    torch.autograd.grad(_apply(x, y, weight, (points, plan, None, None)), x)
