"""Triton kernels for rows that fit into a tile: one reads the batch and ends with the loss, one writes the gradient.

A tile has three dimensions: a row lies in PIECES of the WIDTH of a warp, or of what its threads load at once. Warps are
spread over the last dimension first, then over another, which is to be that of ROWS: every row then belongs to one
warp, or a part of one, and its sums need no shared memory. What a row needs is computed from its tile again in the
second kernel: nothing is kept between the two but slopes.
"""

import triton
import triton.language as tl

from evalign.kernels.triton_metric import value_of_counts
from evalign.kernels.triton_step import (
    FREE,
    entry_slopes,
    exponential,
    labels_and_weights,
    numbers,
    over_tau,
    row_slopes,
    scaled_and_step,
    top,
    unpacked,
)
from evalign.kernels.triton_sums import is_added_up

# The dimensions of rows and of pieces. Triton 3.6 spreads warps over the first one second, 3.9 over the middle one.
ROW = tl.constexpr(0 if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7) else 1)
PIECE = tl.constexpr(1 - ROW.value)


@triton.jit
def _places(PIECES: tl.constexpr, WIDTH: tl.constexpr):
    """The class of every place of a row, of the shape of a tile of one row."""
    begin = tl.expand_dims(tl.expand_dims(tl.arange(0, PIECES) * WIDTH, ROW), 2)
    return begin + tl.arange(0, WIDTH)[None, None, :]


@triton.jit
def _sum(x):
    """Of every row; first over what a thread has."""
    return tl.sum(tl.sum(x, PIECE), 1)


@triton.jit
def _max(x):
    return tl.max(tl.max(x, PIECE), 1)


@triton.jit
def _each(x):
    """A number of every row beside its entries."""
    return tl.expand_dims(tl.expand_dims(x, PIECE), 2)


@triton.jit
def _rows_of(
    z, y, w, ignored, begin, n, d, stride, WEIGHTED: tl.constexpr, PIECES: tl.constexpr, ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """A tile of logits as e = exp(z - largest), and of every row its number, label, weight, largest, sum and second e.

    What is beyond the classes has e = 0. A row that does not count is one of zeros, whatever was in it.
    """
    j = _places(PIECES, WIDTH)
    rows = begin + tl.arange(0, ROWS)
    inside = rows < n
    x = tl.load(z + _each(rows) * stride + j, mask=_each(inside) & (j < d), other=float("-inf")).to(tl.float32)
    label, weight = labels_and_weights(y, w, rows, inside, ignored, WEIGHTED)
    x = tl.where(_each(weight != 0.0), x, 0.0)
    largest = _max(x)
    e = exponential(x - _each(largest))
    tied = _sum(tl.where(e >= 1.0, 1.0, 0.0)) > 1.0
    e_second = tl.where(tied, 1.0, _max(tl.where(e >= 1.0, 0.0, e)))
    return rows, x, e, label, weight, largest, _sum(e), e_second


@triton.jit
def _actual(y, w, ignored, begin, chunk, n, WEIGHTED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """The weights of rows, each at its label."""
    k = tl.arange(0, BLOCK)
    found = tl.zeros([BLOCK], tl.float32)
    for offset in range(0, chunk, ROWS):
        i = offset + tl.arange(0, ROWS)
        label, weight = labels_and_weights(y, w, begin + i, (i < chunk) & (begin + i < n), ignored, WEIGHTED)
        found += tl.sum(tl.where(k[None, :] == label[:, None], weight[:, None], 0.0), 0)
    return found


@triton.jit
def _sum_of_h(h, value, d, a, b, cut, PIECES: tl.constexpr, WIDTH: tl.constexpr):
    """With the top, which was taken for one at tau, and without what is beyond the classes."""
    _, nothing = scaled_and_step(0.0, a, b, cut)
    return _sum(h) + (value - 0.5 - (PIECES * WIDTH - d) * nothing)


@triton.jit(**FREE)
def loss_kernel(
    z, y, w, temperature, room, counters, counts, loss, slopes, low, reach, smoothing, ignored,
    n, d, stride, chunk, width, anchor, t0, t1, t2, t3, b0, b1, b2, b3, w0, w1, w2, w3,
    ANNEALED: tl.constexpr, WEIGHTED: tl.constexpr, LOSSES: tl.constexpr, SMOOTHING: tl.constexpr,
    AVERAGE: tl.constexpr, ALIGNED: tl.constexpr, PIECES: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
    GROUP: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """tp, predicted and actual of all rows, the sum of their losses and of their weights to `counts` (3 d + 2).

    `room` has place for one vector of this kind for the whole, one for each group and one for each program. Unless
    AVERAGE is below 0, the loss of these counts and its slopes follow; see `value_of_counts`.
    """
    a, b, low, cut, c = numbers(temperature, low, reach, ANNEALED)
    if ALIGNED:  # so that four logits are read at once
        d, stride = d // 4 * 4, stride // 4 * 4
    j = _places(PIECES, WIDTH)
    begin = tl.program_id(0).to(tl.int64) * chunk
    losses = tl.zeros([ROWS], tl.float32)
    tp = (j * 0).to(tl.float32) + _each(losses)
    predicted = tp
    for offset in range(0, chunk, ROWS):
        rows, x, e, label, weight, largest, total, e_second = _rows_of(
            z, y, w, ignored, begin + offset, n, d, stride, WEIGHTED, PIECES, ROWS, WIDTH
        )
        value, _, _ = top(total, e_second, low, b, c)
        _, h = scaled_and_step(over_tau(e, _each(e_second)), a, b, cut)
        total_h = _sum_of_h(h, value, d, a, b, cut, PIECES, WIDTH)
        part = tl.where(e == 1.0, _each(value), h) * _each(weight / total_h)
        predicted += part
        tp += tl.where(j == _each(label), part, 0.0)
        if LOSSES:
            # Read once more: to find it in the tile would take longer.
            target = tl.load(z + rows * stride + label, mask=weight != 0.0, other=0.0).to(tl.float32) - largest
            if SMOOTHING:
                target += smoothing * (_sum(tl.where(j < d, x, 0.0)) / d - largest - target)
            # An ignored row counts for nothing even where its loss is infinite.
            losses += tl.where(weight == 0.0, 0.0, weight * (tl.log(total) - target))
    parts = room + (1 + tl.cdiv(tl.num_programs(0), GROUP)) * width
    out = parts + tl.program_id(0) * width
    at = (tl.arange(0, PIECES) * WIDTH)[:, None] + tl.arange(0, WIDTH)[None, :]
    tl.store(out + at, tl.sum(tp, ROW), mask=at < d)
    tl.store(out + d + at, tl.sum(predicted, ROW), mask=at < d)
    k = tl.arange(0, PIECES * WIDTH)
    more: tl.constexpr = 16 if PIECES * WIDTH > 256 else 4096 // (PIECES * WIDTH)
    actual = _actual(y, w, ignored, begin, chunk, n, WEIGHTED, more, PIECES * WIDTH)
    tl.store(out + 2 * d + k, actual, mask=k < d)
    tl.store(out + 3 * d, tl.sum(losses, 0))
    if is_added_up(parts, room + width, counts, counters, width, GROUP, WIDE):
        # Rounded like its parts, so that one class alone has a share of exactly 1.
        total = tl.sum(tl.load(counts + 2 * d + k, mask=k < d, other=0.0), 0)
        tl.store(counts + 3 * d + 1, total)
        if AVERAGE >= 0:
            tl.debug_barrier()
            value_of_counts(
                counts, counts + d, counts + 2 * d, counts + 3 * d + 1, counts + 3 * d, counts, loss, slopes, d, anchor,
                t0, t1, t2, t3, b0, b1, b2, b3, w0, w1, w2, w3, AVERAGE, LOSSES, False, False, PIECES * WIDTH,
            )  # fmt: skip


@triton.jit(**FREE)
def tile_gradient_kernel(
    z, y, w, temperature, by_loss, by_tp, by_predicted, by_losses, out, low, reach, smoothing, ignored, n, d, stride,
    ANNEALED: tl.constexpr, WEIGHTED: tl.constexpr, LOSSES: tl.constexpr, PACKED: tl.constexpr, ALIGNED: tl.constexpr,
    PIECES: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """dL/dz of TILES times ROWS rows; where PACKED, all slopes are at `by_tp`, and are multiplied by `by_loss`."""
    a, b, low, cut, c = numbers(temperature, low, reach, ANNEALED)
    if ALIGNED:
        d, stride = d // 4 * 4, stride // 4 * 4
    by_predicted, scale, through_losses = unpacked(by_loss, by_tp, by_predicted, by_losses, d, LOSSES, PACKED)
    j = _places(PIECES, WIDTH)
    # The same for every row, but read for each: so it comes to the threads that need it.
    slope = tl.load(by_predicted + j + _each(tl.zeros([ROWS], tl.int32)), mask=j < d, other=0.0)
    begin = tl.program_id(0).to(tl.int64) * ROWS * TILES
    for tile in range(0, TILES):
        rows, _, e, label, weight, largest, total, e_second = _rows_of(
            z, y, w, ignored, begin + tile * ROWS, n, d, stride, WEIGHTED, PIECES, ROWS, WIDTH
        )
        counts = weight != 0.0
        value, _, _ = top(total, e_second, low, b, c)
        scaled, h = scaled_and_step(over_tau(e, _each(e_second)), a, b, cut)
        total_h = _sum_of_h(h, value, d, a, b, cut, PIECES, WIDTH)
        tops, seconds = _sum(tl.where(e >= 1.0, slope, 0.0)), _sum(tl.where(e == _each(e_second), 1.0, 0.0))
        at_label = tl.load(by_tp + label, mask=counts, other=0.0)
        label_z = tl.load(z + rows * stride + label, mask=counts, other=0.0).to(tl.float32)
        mean, share, factor, top_scaled, at_top, at_second, at_target, spread = row_slopes(
            weight, scale, through_losses, smoothing, d, total, total_h, e_second, seconds, _sum(h * slope),
            _sum(scaled * slope), _sum(scaled), tops, at_label, exponential(label_z - largest), a, b, low, cut, c,
        )  # fmt: skip
        found = entry_slopes(
            e, _each(e_second), scaled, slope, j == _each(label), _each(mean), _each(share), _each(factor),
            _each(top_scaled), _each(at_top), _each(at_second), _each(at_target), _each(spread),
        )  # fmt: skip
        tl.store(out + _each(rows) * d + j, found, mask=_each(rows < n) & (j < d))
