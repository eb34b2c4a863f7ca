"""Triton kernels of the counts of yes/no problems; formulas and names are those of `column_loops`."""

import triton
import triton.language as tl

from evalign.kernels.gpu.metric_kernels import value_of_counts
from evalign.kernels.gpu.step_kernels import FREE, is_added_up, labels_and_weights, unpacked


@triton.jit
def _lines(temperature, low, reach, tau, ANNEALED: tl.constexpr):
    """left, gap, and the slopes below, in and above the middle; see `points.Lines`."""
    if ANNEALED:
        low = tl.load(temperature).to(tl.float32)
        reach = 2.5 * low
    half = reach * tl.minimum(tau, 1.0 - tau)
    left, gap = tau - half, 1.0 - tau - half
    below = tl.where(left > 0.0, low / tl.where(left > 0.0, left, 1.0), 0.0)
    above = tl.where(gap > 0.0, low / tl.where(gap > 0.0, gap, 1.0), 0.0)
    return left, gap, below, (1.0 - 2.0 * low) / (2.0 * half), above


@triton.jit
def _sigmoid(z):
    """p, 1 - p and exp(-|z|), none of them a difference."""
    e = tl.exp(-tl.abs(z))
    large = 1.0 / (1.0 + e)
    return tl.where(z >= 0.0, large, e * large), tl.where(z >= 0.0, e * large, large), e


@triton.jit
def _loss_of_one_column(
    counts, loss, slopes, anchor, t0, t1, t2, t3, b0, b1, b2, b3, w0, w1, w2, w3,
    FORM: tl.constexpr, LOSSES: tl.constexpr,
):  # fmt: skip
    """The loss of the counts of both classes of a column, and its slopes by those of the column; see `by_class`."""
    tp, predicted, actual, total = tl.load(counts), tl.load(counts + 1), tl.load(counts + 2), tl.load(counts + 3)
    k, both = tl.arange(0, 2), counts + 5
    tl.store(both + k, tl.where(k == 0, total - actual - predicted + tp, tp))
    tl.store(both + 2 + k, tl.where(k == 0, total - predicted, predicted))
    tl.store(both + 4 + k, tl.where(k == 0, total - actual, actual))
    tl.debug_barrier()
    value_of_counts(
        both, both + 2, both + 4, counts + 3, counts + 4, counts, loss, both + 6, 2, anchor,
        t0, t1, t2, t3, b0, b1, b2, b3, w0, w1, w2, w3, FORM, LOSSES, False, False, 2,
    )  # fmt: skip
    tl.debug_barrier()
    by_tp, by_tn = tl.load(both + 7), tl.load(both + 6)
    tl.store(slopes, by_tp + by_tn)
    tl.store(slopes + 1, tl.load(both + 9) - tl.load(both + 8) - by_tn)
    if LOSSES:
        tl.store(slopes + 2, tl.load(both + 10))


@triton.jit(**FREE)
def column_counts_kernel(
    z, y, w, taus, temperature, low, reach, smoothing, ignored, parts, workspace, counters, loss, slopes,
    n, columns, chunk, width, anchor, t0, t1, t2, t3, b0, b1, b2, b3, w0, w1, w2, w3,
    ANNEALED: tl.constexpr, WEIGHTED: tl.constexpr, LOSSES: tl.constexpr, FORM: tl.constexpr, TWO: tl.constexpr,
    BLOCK: tl.constexpr, GROUP: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """tp, predicted, actual, total and losses (5, columns) of `chunk` entries of one column at one threshold.

    They go to `parts` (chunks, thresholds, width). Unless FORM is below 0, there is one threshold, and the loss of
    all counts and its slopes follow; `workspace` has space for the sum of all vectors, then for the sum of each group.
    """
    column, g = tl.program_id(1), tl.program_id(2)
    tau = tl.load(taus + g)
    left, gap, below, middle, above = _lines(temperature, low, reach, tau, ANNEALED)
    tp, predicted = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    actual, total = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    losses = tl.zeros([BLOCK], tl.float32)
    begin = tl.program_id(0).to(tl.int64) * chunk
    for offset in range(0, chunk, BLOCK):
        i = begin + offset + tl.arange(0, BLOCK)
        at = i * columns + column
        label, weight = labels_and_weights(y, w, at, i < n, ignored, WEIGHTED)
        counts = weight != 0.0
        yes = label.to(tl.float32)
        x = tl.load(z + at, mask=counts, other=0.0).to(tl.float32)
        p, q, e = _sigmoid(x)
        h = tl.where(q < gap, 1.0 - above * q, 0.5 + middle * (p - tau))
        h = tl.where(p < left, below * p, h)
        tp += h * weight * yes
        predicted += h * weight
        actual += weight * yes
        total += weight
        if LOSSES:
            soft = (1.0 - smoothing) * yes + 0.5 * smoothing
            each = tl.where(x > 0.0, x, 0.0) - x * soft + tl.log(1.0 + e)
            losses += tl.where(counts, weight * each, 0.0)
    out = parts + (tl.program_id(0) * tl.num_programs(2) + g) * width + column
    tl.store(out, tl.sum(tp, 0))
    tl.store(out + columns, tl.sum(predicted, 0))
    tl.store(out + 2 * columns, tl.sum(actual, 0))
    tl.store(out + 3 * columns, tl.sum(total, 0))
    tl.store(out + 4 * columns, tl.sum(losses, 0))
    if FORM >= 0:  # noqa: SIM102 - known when it is compiled, unlike the other
        if is_added_up(parts, workspace + width, workspace, counters, width, GROUP, WIDE):
            if TWO:
                _loss_of_one_column(
                    workspace, loss, slopes, anchor, t0, t1, t2, t3, b0, b1, b2, b3, w0, w1, w2, w3, FORM, LOSSES
                )
            else:
                tp_of, losses_of = workspace, workspace + 4 * columns
                if LOSSES:
                    added = tl.zeros([64], tl.float32)
                    for start in range(0, columns, 64):
                        k = start + tl.arange(0, 64)
                        added += tl.load(losses_of + k, mask=k < columns, other=0.0)
                    tl.debug_barrier()
                    tl.store(losses_of, tl.sum(added, 0))
                    tl.debug_barrier()
                value_of_counts(
                    tp_of, tp_of + columns, tp_of + 2 * columns, tp_of + 3 * columns, losses_of, workspace, loss,
                    slopes, columns, anchor, t0, t1, t2, t3, b0, b1, b2, b3, w0, w1, w2, w3, FORM, LOSSES, False, True,
                    64,
                )  # fmt: skip


@triton.jit(**FREE)
def column_gradient_kernel(
    z, y, w, taus, temperature, low, reach, smoothing, ignored, by_loss, by_tp, by_predicted, by_losses, out,
    n, columns, thresholds,
    ANNEALED: tl.constexpr, WEIGHTED: tl.constexpr, LOSSES: tl.constexpr, PACKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """dL/dz of n entries, of which the k-th belongs to column k mod `columns`. PACKED: as in `tile_gradient_kernel`."""
    by_predicted, scale, through_losses = unpacked(by_loss, by_tp, by_predicted, by_losses, columns, LOSSES, PACKED)
    k = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    column = k % columns
    label, weight = labels_and_weights(y, w, k, k < n, ignored, WEIGHTED)
    counts = weight != 0.0
    yes = label.to(tl.float32)
    p, q, _ = _sigmoid(tl.load(z + k, mask=counts, other=0.0).to(tl.float32))
    slope = tl.zeros([BLOCK], tl.float32)
    for g in range(0, thresholds):
        tau = tl.load(taus + g)
        left, gap, below, middle, above = _lines(temperature, low, reach, tau, ANNEALED)
        rise = tl.where(p < left, below, tl.where(q < gap, above, middle))
        a = tl.load(by_predicted + g * columns + column, mask=counts, other=0.0)
        b = tl.load(by_tp + g * columns + column, mask=counts, other=0.0)
        slope += rise * (a + b * yes)
    found = p * q * slope
    if LOSSES:
        soft = (1.0 - smoothing) * yes + 0.5 * smoothing
        found += through_losses * (p - soft)
    tl.store(out + k, tl.where(counts, scale * weight * found, 0.0), mask=k < n)
