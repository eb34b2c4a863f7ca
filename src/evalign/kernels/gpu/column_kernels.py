"""Triton kernels for binary columns: entries (M, L), or (N, L, S) for images, read in place."""

import triton
import triton.language as tl

from evalign.kernels.gpu import device_functions as fn


@triton.jit
def _lines(temperature, low, reach, tau, ANNEALED: tl.constexpr):
    """left, gap, and the slopes below, in and above the middle line; see `plan.Lines`."""
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
    """p, 1 - p and exp(-|z|), none computed as a difference."""
    e = tl.exp(-tl.abs(z))
    large = 1.0 / (1.0 + e)
    return tl.where(z >= 0.0, large, e * large), tl.where(z >= 0.0, e * large, large), e


@triton.jit
def _loss_of_one_column(
    counts, loss, slopes, anchor, t0, t1, t2, t3, b0, b1, b2, b3, w0, w1, w2, w3,
    FORM: tl.constexpr, LOSSES: tl.constexpr,
):  # fmt: skip
    """The loss of the counts of both classes of a column, and its slopes with respect to the column's counts."""
    tp, predicted, actual, total = tl.load(counts), tl.load(counts + 1), tl.load(counts + 2), tl.load(counts + 3)
    k, both = tl.arange(0, 2), counts + 5
    tl.store(both + k, tl.where(k == 0, total - actual - predicted + tp, tp))
    tl.store(both + 2 + k, tl.where(k == 0, total - predicted, predicted))
    tl.store(both + 4 + k, tl.where(k == 0, total - actual, actual))
    tl.debug_barrier()
    fn.value_of_counts(
        both, both + 2, both + 4, counts + 3, counts + 4, counts, loss, both + 6, 2, anchor,
        t0, t1, t2, t3, b0, b1, b2, b3, w0, w1, w2, w3, FORM, LOSSES, False, False, 2,
    )  # fmt: skip
    tl.debug_barrier()
    by_tp, by_tn = tl.load(both + 7), tl.load(both + 6)
    tl.store(slopes, by_tp + by_tn)
    tl.store(slopes + 1, tl.load(both + 9) - tl.load(both + 8) - by_tn)
    if LOSSES:
        tl.store(slopes + 2, tl.load(both + 10))


@triton.jit(**fn.FREE)
def column_counts_kernel(
    z, y, w, temperature, workspace, counters, taus, loss, saved, low, reach, smoothing, ignored, tau,
    rows, columns, row_stride, column_stride, image_stride, tiles_per_image, tiles, chunk, width, anchor,
    t0, t1, t2, t3, b0, b1, b2, b3, w0, w1, w2, w3,
    ANNEALED: tl.constexpr, WEIGHTED: tl.constexpr, LOSSES: tl.constexpr, FORM: tl.constexpr, TWO: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, GROUP: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """tp, predicted, actual, total and losses (5, columns) of `chunk` tiles of ROWS x COLS entries at one threshold.

    With FORM below 0 they go to `workspace` (programs, thresholds, width), for the thresholds `taus`. Otherwise the one
    threshold is `tau`, `workspace` has space for the sum of all vectors, of each group, and for those of programs; the
    last program computes the loss, and its slopes by tp, predicted and losses, to `saved` (2 columns + 1).
    """
    column, g = tl.program_id(1) * COLS + tl.arange(0, COLS), tl.program_id(2)
    if FORM < 0:
        tau = tl.load(taus + g)
    left, gap, below, middle, above = _lines(temperature, low, reach, tau, ANNEALED)
    tp, predicted = tl.zeros([ROWS, COLS], tl.float32), tl.zeros([ROWS, COLS], tl.float32)
    actual, total = tl.zeros([ROWS, COLS], tl.float32), tl.zeros([ROWS, COLS], tl.float32)
    losses = tl.zeros([ROWS, COLS], tl.float32)
    for offset in range(0, chunk):
        tile = tl.program_id(0) * chunk + offset
        image = (tile // tiles_per_image).to(tl.int64)
        i = (tile % tiles_per_image) * ROWS + tl.arange(0, ROWS)
        inside = (i < tl.where(tile < tiles, rows, 0))[:, None] & (column < columns)[None, :]
        at = image * image_stride + i.to(tl.int64)[:, None] * row_stride + column[None, :] * column_stride
        target, weight = fn.targets_and_weights(y, w, at, inside, ignored, WEIGHTED)
        yes, counted = target.to(tl.float32), weight != 0.0
        x = tl.load(z + at, mask=inside & counted, other=0.0).to(tl.float32)
        p, q, e = _sigmoid(x)
        h = tl.where(q < gap, 1.0 - above * q, 0.5 + middle * (p - tau))
        h = weight * tl.where(p < left, below * p, h)
        tp += h * yes
        predicted += h
        actual += weight * yes
        total += weight
        if LOSSES:
            soft = (1.0 - smoothing) * yes + 0.5 * smoothing
            each = tl.where(x > 0.0, x, 0.0) - x * soft + tl.log(1.0 + e)
            losses += tl.where(counted, weight * each, 0.0)
    groups = tl.cdiv(tl.num_programs(0), GROUP)
    parts = workspace
    if FORM >= 0:
        parts = workspace + (1 + groups) * width
    out = parts + (tl.program_id(0) * tl.num_programs(2) + g) * width + column
    mask = column < columns
    tl.store(out, tl.sum(tp, 0), mask=mask)
    tl.store(out + columns, tl.sum(predicted, 0), mask=mask)
    tl.store(out + 2 * columns, tl.sum(actual, 0), mask=mask)
    tl.store(out + 3 * columns, tl.sum(total, 0), mask=mask)
    tl.store(out + 4 * columns, tl.sum(losses, 0), mask=mask)
    if FORM >= 0:  # noqa: SIM102 - known when it is compiled, unlike the other
        if fn.is_added_up(parts, workspace + width, workspace, counters, width, GROUP, WIDE):
            if TWO:
                _loss_of_one_column(
                    workspace, loss, saved, anchor, t0, t1, t2, t3, b0, b1, b2, b3, w0, w1, w2, w3, FORM, LOSSES
                )
            else:
                losses_of = workspace + 4 * columns
                if LOSSES:
                    added = tl.zeros([64], tl.float32)
                    for start in range(0, columns, 64):
                        k = start + tl.arange(0, 64)
                        added += tl.load(losses_of + k, mask=k < columns, other=0.0)
                    tl.debug_barrier()
                    tl.store(losses_of, tl.sum(added, 0))
                    tl.debug_barrier()
                fn.value_of_counts(
                    workspace, workspace + columns, workspace + 2 * columns, workspace + 3 * columns, losses_of,
                    workspace, loss, saved, columns, anchor, t0, t1, t2, t3, b0, b1, b2, b3, w0, w1, w2, w3, FORM,
                    LOSSES, False, True, 64,
                )  # fmt: skip


@triton.jit(**fn.FREE)
def column_gradient_kernel(
    z, y, w, temperature, taus, by_loss, by_tp, by_predicted, by_losses, out, low, reach, smoothing, ignored, tau,
    n, columns, inner, thresholds,
    ANNEALED: tl.constexpr, WEIGHTED: tl.constexpr, LOSSES: tl.constexpr, PACKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """dL/dz of n entries; the k-th belongs to column (k / inner) mod `columns`.

    PACKED: all slopes are at `by_tp` and are multiplied by `by_loss`; the single threshold is `tau`, not in `taus`.
    """
    by_predicted, scale, through_losses = fn.unpacked(by_loss, by_tp, by_predicted, by_losses, columns, LOSSES, PACKED)
    begin = tl.program_id(0).to(tl.int64) * BLOCK
    lane = tl.arange(0, BLOCK)
    k = begin + lane
    # The block's start modulo both numbers, which avoids 64-bit divisions per entry.
    past = (begin % inner).to(tl.int32) + lane
    column = ((begin // inner) % columns).to(tl.int32) + past // inner
    column = column % columns
    target, weight = fn.targets_and_weights(y, w, k, k < n, ignored, WEIGHTED)
    yes, counted = target.to(tl.float32), weight != 0.0
    p, q, _ = _sigmoid(tl.load(z + k, mask=(k < n) & counted, other=0.0).to(tl.float32))
    slope = tl.zeros([BLOCK], tl.float32)
    for g in range(0, thresholds):
        if not PACKED:
            tau = tl.load(taus + g)
        left, gap, below, middle, above = _lines(temperature, low, reach, tau, ANNEALED)
        rise = tl.where(p < left, below, tl.where(q < gap, above, middle))
        a = tl.load(by_predicted + g * columns + column, mask=counted, other=0.0)
        b = tl.load(by_tp + g * columns + column, mask=counted, other=0.0)
        slope += rise * (a + b * yes)
    found = p * q * slope
    if LOSSES:
        soft = (1.0 - smoothing) * yes + 0.5 * smoothing
        found += through_losses * (p - soft)
    tl.store(out + k, tl.where(counted, scale * weight * found, 0.0), mask=k < n)
