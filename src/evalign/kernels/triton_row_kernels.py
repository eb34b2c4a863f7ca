"""Triton kernels for rows of any length: `stats` along rows, `columns` down them, `gradient` along rows again.

All three stream the classes in blocks; formulas and names are those of `row_loops`. Sums are taken in float32 in a
fixed order, without atomics: the same batch always gives the same bits. Where a row is swept twice, the second sweep
goes backwards: what the first one read last is still in the cache.
"""

import triton
import triton.language as tl

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

# As in `triton_tile_kernels`.
FREE = {
    "do_not_specialize": ["n", "chunk", "ignored"],
    "do_not_specialize_on_alignment": ["y", "w", "temperature", "by_loss", "by_losses"],
}


@triton.jit
def _inside(j, d, EVEN: tl.constexpr):
    """j < d, which is no question where blocks divide d."""
    return (j >= 0) if EVEN else (j < d)


@triton.jit(**FREE)
def stats_kernel(
    z, y, w, temperature, low, reach, smoothing, ignored, stats, places, losses, n, d, stride,
    ANNEALED: tl.constexpr, WEIGHTED: tl.constexpr, LOSSES: tl.constexpr, SMOOTHING: tl.constexpr,
    EVEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """To `stats` (6, n): a row's maximum, e of its second place, sums of e and of h, weight over the latter, top h.

    Both places go to `places` (2, n).
    """
    a, b, low, cut, c = numbers(temperature, low, reach, ANNEALED)
    row = tl.program_id(0).to(tl.int64)
    start = z + row * stride
    minus = float("-inf")
    # Every lane keeps its own two largest values: a reduction in each turn of the loop would cost more than the rest.
    best, runner_up = tl.full([BLOCK], minus, tl.float32), tl.full([BLOCK], minus, tl.float32)
    for at in range(0, d, BLOCK):
        j = at + tl.arange(0, BLOCK)
        x = tl.load(start + j, mask=_inside(j, d, EVEN), other=minus).to(tl.float32)
        runner_up = tl.maximum(runner_up, tl.minimum(best, x))
        best = tl.maximum(best, x)
    largest, winner = tl.max(best, 0, return_indices=True)
    second_largest = tl.max(tl.where(tl.arange(0, BLOCK) == winner, runner_up, best), 0)
    e_second = tl.exp(second_largest - largest)
    totals, totals_h = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    totals_z = tl.zeros([BLOCK], tl.float32)
    firsts, seconds = tl.full([BLOCK], 2147483647, tl.int32), tl.zeros([BLOCK], tl.int32)
    last = (tl.cdiv(d, BLOCK) - 1) * BLOCK
    for back in range(0, d, BLOCK):
        j = last - back + tl.arange(0, BLOCK)
        inside = _inside(j, d, EVEN)
        x = tl.load(start + j, mask=inside, other=minus).to(tl.float32)
        e = tl.exp(x - largest)
        totals += e
        totals_h += tl.where(inside, step(over_tau(e, e_second), a, b, cut), 0.0)
        # The first of those that tie for the top, and the last of those for second place: never the same.
        firsts = tl.where(x == largest, j, firsts)
        seconds = tl.maximum(seconds, tl.where(x == second_largest, j, 0))
        if SMOOTHING:
            totals_z += tl.where(inside, x, 0.0)
    total = tl.sum(totals, 0)
    value, _, _ = top(total, e_second, low, b, c)
    total_h = tl.sum(totals_h, 0) - 0.5 + value  # at x = 1, where the top was counted, the step is 1/2
    label, weight = labels_and_weights(y, w, row, row < n, ignored, WEIGHTED)
    tl.store(stats + row, largest)
    tl.store(stats + n + row, e_second)
    tl.store(stats + 2 * n + row, total)
    tl.store(stats + 3 * n + row, total_h)
    tl.store(stats + 4 * n + row, weight / total_h)
    tl.store(stats + 5 * n + row, value)
    tl.store(places + row, tl.minimum(tl.min(firsts, 0), d - 1))  # in a row of nan there is none
    tl.store(places + n + row, tl.max(seconds, 0))
    if LOSSES:
        target = tl.load(start + label).to(tl.float32) - largest
        if SMOOTHING:
            target += smoothing * (tl.sum(totals_z, 0) / d - largest - target)
        # An ignored row counts for nothing even where its loss is infinite.
        tl.store(losses + row, tl.where(weight == 0.0, 0.0, weight * (tl.log(total) - target)))


@triton.jit(**FREE)
def columns_kernel(
    z, y, w, temperature, low, reach, ignored, stats, places, parts, n, d, stride, chunk,
    ANNEALED: tl.constexpr, WEIGHTED: tl.constexpr, EVEN: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """tp, predicted and actual of `chunk` rows and BLOCK classes, to `parts` (chunks, 3, d)."""
    a, b, low, cut, _ = numbers(temperature, low, reach, ANNEALED)
    j = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    begin = tl.program_id(0).to(tl.int64) * chunk
    tp, predicted = tl.zeros([ROWS, BLOCK], tl.float32), tl.zeros([ROWS, BLOCK], tl.float32)
    actual = tl.zeros([ROWS, BLOCK], tl.float32)
    for offset in range(0, chunk, ROWS):
        rows = begin + offset + tl.arange(0, ROWS)
        inside = rows < n
        x = tl.load(
            z + rows[:, None] * stride + j[None, :], mask=inside[:, None] & _inside(j, d, EVEN)[None, :], other=0.0
        ).to(tl.float32)
        label, weight = labels_and_weights(y, w, rows, inside, ignored, WEIGHTED)
        largest = tl.load(stats + rows, mask=inside, other=0.0)
        e_second = tl.load(stats + n + rows, mask=inside, other=1.0)
        share = tl.load(stats + 4 * n + rows, mask=inside, other=0.0)
        value = tl.load(stats + 5 * n + rows, mask=inside, other=0.0)
        first = tl.load(places + rows, mask=inside, other=0)
        h = step(over_tau(tl.exp(x - largest[:, None]), e_second[:, None]), a, b, cut)
        h = tl.where(j[None, :] == first[:, None], value[:, None], h)
        part = tl.where((weight != 0.0)[:, None], h * share[:, None], 0.0)
        hit = j[None, :] == label[:, None]
        predicted += part
        tp += tl.where(hit, part, 0.0)
        actual += tl.where(hit, weight[:, None], 0.0)
    out = parts + tl.program_id(0).to(tl.int64) * 3 * d + j
    mask = _inside(j, d, EVEN)
    tl.store(out, tl.sum(tp, 0), mask=mask)
    tl.store(out + d, tl.sum(predicted, 0), mask=mask)
    tl.store(out + 2 * d, tl.sum(actual, 0), mask=mask)


@triton.jit(**FREE)
def gradient_kernel(
    z, y, w, temperature, low, reach, smoothing, ignored, stats, places, by_loss, by_tp, by_predicted, by_losses, out,
    n, d, stride,
    ANNEALED: tl.constexpr, WEIGHTED: tl.constexpr, LOSSES: tl.constexpr, PACKED: tl.constexpr, EVEN: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """dL/dz; one sweep for the three sums that a row needs, one that writes. PACKED: as in `tile_gradient_kernel`."""
    a, b, low, cut, c = numbers(temperature, low, reach, ANNEALED)
    by_predicted, scale, through_losses = unpacked(by_loss, by_tp, by_predicted, by_losses, d, LOSSES, PACKED)
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = rows < n
    label, weight = labels_and_weights(y, w, rows, inside, ignored, WEIGHTED)
    counts = weight != 0.0
    largest = tl.load(stats + rows, mask=counts, other=0.0)
    e_second = tl.load(stats + n + rows, mask=counts, other=1.0)
    total = tl.load(stats + 2 * n + rows, mask=counts, other=1.0)
    total_h = tl.load(stats + 3 * n + rows, mask=counts, other=1.0)
    first = tl.load(places + rows, mask=counts, other=0)
    second = tl.load(places + n + rows, mask=counts, other=0)
    start = z + rows * stride
    minus = float("-inf")
    dots_h, dots_scaled = tl.zeros([ROWS, BLOCK], tl.float32), tl.zeros([ROWS, BLOCK], tl.float32)
    sums_scaled = tl.zeros([ROWS, BLOCK], tl.float32)
    for at in range(0, d, BLOCK):
        j = at + tl.arange(0, BLOCK)
        mask = _inside(j, d, EVEN)
        slope = tl.load(by_predicted + j, mask=mask, other=0.0)[None, :]
        logits = tl.load(start[:, None] + j[None, :], mask=counts[:, None] & mask[None, :], other=minus).to(tl.float32)
        x = over_tau(tl.exp(logits - largest[:, None]), e_second[:, None])
        x = tl.where(j[None, :] == first[:, None], 0.0, x)
        scaled = tl.where(x >= cut, b, a) * x
        dots_h += step(x, a, b, cut) * slope
        dots_scaled += scaled * slope
        sums_scaled += scaled
    at_first = tl.load(by_predicted + first, mask=counts, other=0.0)
    at_label = tl.load(by_tp + label, mask=counts, other=0.0)
    label_e = tl.exp(tl.load(start + label, mask=counts, other=0.0).to(tl.float32) - largest)
    dot_h = tl.sum(dots_h, 1) - step(0.0, a, b, cut) * at_first  # as which the top was counted
    mean, share, factor, at_top, at_second, at_target, spread = row_slopes(
        weight, scale, through_losses, smoothing, d, total, total_h, e_second, dot_h, tl.sum(dots_scaled, 1),
        tl.sum(sums_scaled, 1), at_first, at_label, label_e, label == first, a, b, low, cut, c,
    )  # fmt: skip
    last = (tl.cdiv(d, BLOCK) - 1) * BLOCK
    for back in range(0, d, BLOCK):
        j = last - back + tl.arange(0, BLOCK)
        mask = _inside(j, d, EVEN)
        slope = tl.load(by_predicted + j, mask=mask, other=0.0)
        logits = tl.load(start[:, None] + j[None, :], mask=counts[:, None] & mask[None, :], other=minus).to(tl.float32)
        e = tl.exp(logits - largest[:, None])
        x = over_tau(e, e_second[:, None])
        found = entry_slopes(
            e, tl.where(x >= cut, b, a) * x, slope, j, first, second, label,
            mean, share, factor, at_top, at_second, at_target, spread,
        )  # fmt: skip
        found = tl.where(counts[:, None], found, 0.0)
        tl.store(out + rows[:, None] * d + j[None, :], found, mask=inside[:, None] & mask[None, :])
