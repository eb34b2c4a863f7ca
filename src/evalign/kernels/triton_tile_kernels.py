"""Triton kernels for rows that fit into a tile: one reads the batch and ends with the loss, one writes the gradient.

What a row needs is computed from its tile again in the second, so that nothing is kept between the two but slopes.
"""

import triton
import triton.language as tl

from evalign.kernels.triton_metric import value_of_counts
from evalign.kernels.triton_step import (
    entry_slopes,
    labels_and_weights,
    numbers,
    over_tau,
    row_slopes,
    step,
    top,
    unpacked,
)
from evalign.kernels.triton_sums import is_added_up

# Numbers that differ from batch to batch, and pointers of which only numbers are read: one program for all of them.
FREE = {
    "do_not_specialize": ["n", "chunk", "ignored"],
    "do_not_specialize_on_alignment": ["y", "w", "temperature", "by_loss", "by_losses"],
}


@triton.jit
def _rows_of(
    z, y, w, ignored, begin, n, d, stride, a, b, low, cut, c,
    WEIGHTED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A tile of logits, and of every row its label and weight, top two, and the sums of e and h; h is 0 at the top."""
    j = tl.arange(0, BLOCK)
    rows = begin + tl.arange(0, ROWS)
    inside = rows < n
    mask = inside[:, None] & (j < d)[None, :]
    minus = float("-inf")
    z = tl.load(z + rows[:, None] * stride + j[None, :], mask=mask, other=minus).to(tl.float32)
    label, weight = labels_and_weights(y, w, rows, inside, ignored, WEIGHTED)
    largest, first = tl.max(z, 1, return_indices=True)
    first = tl.minimum(first.to(tl.int32), d - 1)  # in a row of nan it may be any
    others = mask & (j[None, :] != first[:, None])
    second_largest, second = tl.max(tl.where(others, z, minus), 1, return_indices=True)
    e = tl.exp(z - largest[:, None])
    e_second = tl.exp(second_largest - largest)
    total = tl.sum(tl.where(mask, e, 0.0), 1)
    x = over_tau(e, e_second[:, None])
    h = tl.where(others, step(x, a, b, cut), 0.0)
    value, _, _ = top(total, e_second, low, b, c)
    total_h = tl.sum(h, 1) + value
    return rows, z, label, weight, largest, first, second.to(tl.int32), e, e_second, total, x, h, value, total_h


@triton.jit(**FREE)
def loss_kernel(
    z, y, w, temperature, low, reach, smoothing, ignored, room, counters, counts, loss, slopes,
    n, d, stride, chunk, width, anchor, t0, t1, t2, t3, b0, b1, b2, b3, w0, w1, w2, w3,
    ANNEALED: tl.constexpr, WEIGHTED: tl.constexpr, LOSSES: tl.constexpr, SMOOTHING: tl.constexpr,
    AVERAGE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """tp, predicted and actual of all rows, the sum of their losses and of their weights to `counts` (3 d + 2).

    `room` has place for one vector of this kind for the whole, one for each group and one for each program. Unless
    AVERAGE is below 0, the loss of these counts and its slopes follow; see `value_of_counts`.
    """
    a, b, low, cut, c = numbers(temperature, low, reach, ANNEALED)
    j = tl.arange(0, BLOCK)
    begin = tl.program_id(0).to(tl.int64) * chunk
    tp, predicted = tl.zeros([ROWS, BLOCK], tl.float32), tl.zeros([ROWS, BLOCK], tl.float32)
    actual, losses = tl.zeros([ROWS, BLOCK], tl.float32), tl.zeros([ROWS], tl.float32)
    for offset in range(0, chunk, ROWS):
        rows, x, label, weight, largest, first, _, _, _, total, _, h, value, total_h = _rows_of(
            z, y, w, ignored, begin + offset, n, d, stride, a, b, low, cut, c, WEIGHTED, ROWS, BLOCK
        )
        mask = (rows < n)[:, None] & (j < d)[None, :]
        h = tl.where(j[None, :] == first[:, None], value[:, None], h)
        part = tl.where(mask & (weight != 0.0)[:, None], h * (weight / total_h)[:, None], 0.0)
        hit = mask & (j[None, :] == label[:, None])
        predicted += part
        tp += tl.where(hit, part, 0.0)
        actual += tl.where(hit, weight[:, None], 0.0)
        if LOSSES:
            target = tl.sum(tl.where(hit, x, 0.0), 1) - largest
            if SMOOTHING:
                target += smoothing * (tl.sum(tl.where(mask, x, 0.0), 1) / d - largest - target)
            # An ignored row counts for nothing even where its loss is infinite.
            losses += tl.where(weight == 0.0, 0.0, weight * (tl.log(total) - target))
    parts = room + (1 + tl.cdiv(tl.num_programs(0), GROUP)) * width
    out = parts + tl.program_id(0) * width
    tl.store(out + j, tl.sum(tp, 0), mask=j < d)
    tl.store(out + d + j, tl.sum(predicted, 0), mask=j < d)
    tl.store(out + 2 * d + j, tl.sum(actual, 0), mask=j < d)
    tl.store(out + 3 * d, tl.sum(losses, 0))
    if is_added_up(parts, room + width, counts, counters, width, GROUP, WIDE):
        # Rounded like its parts, so that one class alone has a share of exactly 1.
        total = tl.sum(tl.load(counts + 2 * d + j, mask=j < d, other=0.0), 0)
        tl.store(counts + 3 * d + 1, total)
        if AVERAGE >= 0:
            tl.debug_barrier()
            value_of_counts(
                counts, counts + d, counts + 2 * d, counts + 3 * d + 1, counts + 3 * d, counts, loss, slopes, d, anchor,
                t0, t1, t2, t3, b0, b1, b2, b3, w0, w1, w2, w3, AVERAGE, LOSSES, False, False, BLOCK,
            )  # fmt: skip


@triton.jit(**FREE)
def tile_gradient_kernel(
    z, y, w, temperature, low, reach, smoothing, ignored, by_loss, by_tp, by_predicted, by_losses, out, n, d, stride,
    ANNEALED: tl.constexpr, WEIGHTED: tl.constexpr, LOSSES: tl.constexpr, PACKED: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """dL/dz of ROWS rows; where PACKED, all slopes are at `by_tp`, and are multiplied by `by_loss`."""
    a, b, low, cut, c = numbers(temperature, low, reach, ANNEALED)
    by_predicted, scale, through_losses = unpacked(by_loss, by_tp, by_predicted, by_losses, d, LOSSES, PACKED)
    j = tl.arange(0, BLOCK)
    rows, _, label, weight, _, first, second, e, e_second, total, x, h, _, total_h = _rows_of(
        z, y, w, ignored, tl.program_id(0).to(tl.int64) * ROWS, n, d, stride, a, b, low, cut, c, WEIGHTED, ROWS, BLOCK
    )
    inside = (rows < n)[:, None] & (j < d)[None, :]
    counts = weight != 0.0
    slope = tl.load(by_predicted + j, mask=j < d, other=0.0)
    scaled = tl.where(x >= cut, b, a) * x
    others = tl.where(inside & (j[None, :] != first[:, None]), scaled, 0.0)
    dot_h, dot_scaled, sum_scaled = tl.sum(h * slope[None, :], 1), tl.sum(others * slope[None, :], 1), tl.sum(others, 1)
    at_label = tl.load(by_tp + label, mask=counts, other=0.0)
    at_first = tl.load(by_predicted + first, mask=counts, other=0.0)
    label_e = tl.sum(tl.where(j[None, :] == label[:, None], e, 0.0), 1)
    mean, share, factor, at_top, at_second, at_target, spread = row_slopes(
        weight, scale, through_losses, smoothing, d, total, total_h, e_second, dot_h, dot_scaled, sum_scaled,
        at_first, at_label, label_e, label == first, a, b, low, cut, c,
    )  # fmt: skip
    found = entry_slopes(
        e, scaled, slope, j, first, second, label, mean, share, factor, at_top, at_second, at_target, spread
    )
    tl.store(out + rows[:, None] * d + j[None, :], tl.where(counts[:, None], found, 0.0), mask=inside)
