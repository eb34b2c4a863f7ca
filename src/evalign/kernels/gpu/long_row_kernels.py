"""Triton kernels for rows (M, C) of any number of classes.

They stream the classes in blocks: `stats_kernel` along rows, `row_columns_kernel` down them, `row_gradient_kernel`
along rows again. Where a row is swept twice, the second sweep goes backwards: what the first one read last is still in
the cache. Sums are taken in float32 in a fixed order: the same batch always gives the same bits.
"""

import triton
import triton.language as tl

from evalign.kernels.gpu import device_functions as fn


@triton.jit
def _inside(j, d, EVEN: tl.constexpr):
    """j < d, which always holds if blocks divide d."""
    return (j >= 0) if EVEN else (j < d)


@triton.jit(**fn.FREE)
def stats_kernel(
    z, y, w, temperature, low, reach, smoothing, ignored, stats, losses, n, d, stride,
    ANNEALED: tl.constexpr, WEIGHTED: tl.constexpr, LOSSES: tl.constexpr, SMOOTHING: tl.constexpr,
    EVEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """To `stats` (7, n): a row's maximum, e of its second place, sums of e and of h, weight over the latter, top h.

    Also the row's contribution to tp.
    """
    a, b, low, cut, c = fn.numbers(temperature, low, reach, ANNEALED)
    first, first_start, second, second_start, sign = fn.lines(a, b, cut)
    row = tl.program_id(0).to(tl.int64)
    start = z + row * stride
    minus = float("-inf")
    # Every lane tracks its own two largest values: a reduction per iteration would cost more than the rest.
    best, runner_up = tl.full([BLOCK], minus, tl.float32), tl.full([BLOCK], minus, tl.float32)
    for at in range(0, d, BLOCK):
        j = at + tl.arange(0, BLOCK)
        x = tl.load(start + j, mask=_inside(j, d, EVEN), other=minus).to(tl.float32)
        runner_up = tl.maximum(runner_up, tl.minimum(best, x))
        best = tl.maximum(best, x)
    largest, winner = tl.max(best, 0, return_indices=True)
    second_largest = tl.max(tl.where(tl.arange(0, BLOCK) == winner, runner_up, best), 0)
    e_second = fn.exponential(second_largest - largest)
    tau_e = fn.over_tau(e_second)
    first, second = first * tau_e, second * tau_e
    totals, totals_h = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    totals_z = tl.zeros([BLOCK], tl.float32)
    last = (tl.cdiv(d, BLOCK) - 1) * BLOCK
    for back in range(0, d, BLOCK):
        j = last - back + tl.arange(0, BLOCK)
        inside = _inside(j, d, EVEN)
        x = tl.load(start + j, mask=inside, other=minus).to(tl.float32)
        e = fn.exponential(x - largest)
        totals += e
        totals_h += fn.step(e, first, first_start, second, second_start)
        if SMOOTHING:
            totals_z += tl.where(inside, x, 0.0)
    total = tl.sum(totals, 0)
    value, _, _ = fn.top(total, e_second, low, b, c)
    beyond = tl.maximum(first_start, second_start) * (last + BLOCK - d)  # as which those places were counted
    total_h = sign * (tl.sum(totals_h, 0) - (second + second_start) - beyond) + value
    label, weight = fn.labels_and_weights(y, w, row, row < n, ignored, WEIGHTED)
    label_z = tl.load(start + label).to(tl.float32)
    label_e = fn.exponential(label_z - largest)
    label_h = sign * fn.step(label_e, first, first_start, second, second_start)
    share = tl.where(weight == 0.0, 0.0, weight / total_h)
    tl.store(stats + row, largest)
    tl.store(stats + n + row, e_second)
    tl.store(stats + 2 * n + row, total)
    tl.store(stats + 3 * n + row, total_h)
    tl.store(stats + 4 * n + row, share)
    tl.store(stats + 5 * n + row, value)
    tl.store(stats + 6 * n + row, tl.where(share == 0.0, 0.0, share * tl.where(label_e == 1.0, value, label_h)))
    if LOSSES:
        target = label_z - largest
        if SMOOTHING:
            target += smoothing * (tl.sum(totals_z, 0) / d - largest - target)
        # An ignored row counts for nothing, even if its loss is infinite.
        tl.store(losses + row, tl.where(weight == 0.0, 0.0, weight * (tl.log(total) - target)))


@triton.jit
def _at_labels(
    y, w, ignored, values, begin, chunk, n, first, WEIGHTED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """The sums of rows' values and of their weights, each at the row's label, for BLOCK classes from `first` on."""
    k = first + tl.arange(0, BLOCK)
    added, weights = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for offset in range(0, chunk, ROWS):
        i = offset + tl.arange(0, ROWS)
        inside = (i < chunk) & (begin + i < n)
        label, weight = fn.labels_and_weights(y, w, begin + i, inside, ignored, WEIGHTED)
        here = inside & (label >= first) & (label < first + BLOCK)
        if tl.max(here.to(tl.int32), 0) > 0:  # of very many classes, few occur in so few rows
            hit = label[:, None] == k[None, :]
            value = tl.load(values + begin + i, mask=here, other=0.0)
            added += tl.sum(tl.where(hit, value[:, None], 0.0), 0)
            weights += tl.sum(tl.where(hit, weight[:, None], 0.0), 0)
    return added, weights


@triton.jit(**fn.FREE)
def row_columns_kernel(
    z, y, w, temperature, low, reach, ignored, stats, parts, n, d, stride, chunk,
    ANNEALED: tl.constexpr, WEIGHTED: tl.constexpr, EVEN: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """tp, predicted and actual of `chunk` rows and BLOCK classes, to `parts` (chunks, 3, d)."""
    a, b, low, cut, _ = fn.numbers(temperature, low, reach, ANNEALED)
    first, first_start, second, second_start, sign = fn.lines(a, b, cut)
    left = tl.program_id(1) * BLOCK
    j = left + tl.arange(0, BLOCK)
    begin = tl.program_id(0).to(tl.int64) * chunk
    predicted = tl.zeros([ROWS, BLOCK], tl.float32)
    for offset in range(0, chunk, ROWS):
        rows = begin + offset + tl.arange(0, ROWS)
        inside = rows < n
        x = tl.load(
            z + rows[:, None] * stride + j[None, :], mask=inside[:, None] & _inside(j, d, EVEN)[None, :], other=0.0
        ).to(tl.float32)
        largest = tl.load(stats + rows, mask=inside, other=0.0)
        e_second = tl.load(stats + n + rows, mask=inside, other=1.0)
        share = tl.load(stats + 4 * n + rows, mask=inside, other=0.0)
        value = tl.load(stats + 5 * n + rows, mask=inside, other=0.0)
        e = fn.exponential(x - largest[:, None])
        tau_e = fn.over_tau(e_second)
        h = fn.step(e, (first * tau_e)[:, None], first_start, (second * tau_e)[:, None], second_start)
        h = tl.where(e == 1.0, (sign * value)[:, None], h)
        # An ignored row may hold anything.
        predicted += tl.where((share != 0.0)[:, None], h * share[:, None], 0.0)
    tp, actual = _at_labels(y, w, ignored, stats + 6 * n, begin, chunk, n, left, WEIGHTED, 8, BLOCK)
    out = parts + tl.program_id(0).to(tl.int64) * 3 * d + j
    mask = _inside(j, d, EVEN)
    tl.store(out, tp, mask=mask)
    tl.store(out + d, sign * tl.sum(predicted, 0), mask=mask)
    tl.store(out + 2 * d, actual, mask=mask)


@triton.jit(**fn.FREE)
def row_gradient_kernel(
    z, y, w, temperature, low, reach, smoothing, ignored, stats, by_loss, by_tp, by_predicted, by_losses, out,
    n, d, stride,
    ANNEALED: tl.constexpr, WEIGHTED: tl.constexpr, LOSSES: tl.constexpr, PACKED: tl.constexpr, EVEN: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """dL/dz; one sweep for the three sums of a row, one that writes. PACKED: as in `tile_gradient_kernel`."""
    a, b, low, cut, c = fn.numbers(temperature, low, reach, ANNEALED)
    by_predicted, scale, through_losses = fn.unpacked(by_loss, by_tp, by_predicted, by_losses, d, LOSSES, PACKED)
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = rows < n
    label, weight = fn.labels_and_weights(y, w, rows, inside, ignored, WEIGHTED)
    counts = weight != 0.0
    largest = tl.load(stats + rows, mask=counts, other=0.0)
    e_second = tl.load(stats + n + rows, mask=counts, other=1.0)
    total = tl.load(stats + 2 * n + rows, mask=counts, other=1.0)
    total_h = tl.load(stats + 3 * n + rows, mask=counts, other=1.0)
    start = z + rows * stride
    minus = float("-inf")
    tau_e = fn.over_tau(e_second)[:, None]
    dots_rest, dots_scaled = tl.zeros([ROWS, BLOCK], tl.float32), tl.zeros([ROWS, BLOCK], tl.float32)
    sums_scaled, tops = tl.zeros([ROWS, BLOCK], tl.float32), tl.zeros([ROWS, BLOCK], tl.float32)
    seconds = tl.zeros([ROWS, BLOCK], tl.float32)
    for at in range(0, d, BLOCK):
        j = at + tl.arange(0, BLOCK)
        mask = _inside(j, d, EVEN)
        slope = tl.load(by_predicted + j, mask=mask, other=0.0)[None, :]
        logits = tl.load(start[:, None] + j[None, :], mask=counts[:, None] & mask[None, :], other=minus).to(tl.float32)
        e = fn.exponential(logits - largest[:, None])
        part, rest = fn.scaled(e, tau_e, a, b, cut)
        dots_rest += rest * slope
        dots_scaled += part * slope
        sums_scaled += part
        tops += tl.where(e == 1.0, slope, 0.0)
        seconds += tl.where(e == e_second[:, None], 1.0, 0.0)
    at_label = tl.load(by_tp + label, mask=counts, other=0.0)
    label_e = fn.exponential(tl.load(start + label, mask=counts, other=0.0).to(tl.float32) - largest)
    mean, share, factor, top_scaled, at_top, at_second, at_target, elsewhere = fn.row_slopes(
        weight, scale, through_losses, smoothing, d, total, total_h, e_second, tl.sum(seconds, 1), tl.sum(dots_rest, 1),
        tl.sum(dots_scaled, 1), tl.sum(sums_scaled, 1), tl.sum(tops, 1), at_label, label_e, a, b, low, cut, c,
    )  # fmt: skip
    last = (tl.cdiv(d, BLOCK) - 1) * BLOCK
    for back in range(0, d, BLOCK):
        j = last - back + tl.arange(0, BLOCK)
        mask = _inside(j, d, EVEN)
        slope = tl.load(by_predicted + j, mask=mask, other=0.0)
        logits = tl.load(start[:, None] + j[None, :], mask=counts[:, None] & mask[None, :], other=minus).to(tl.float32)
        e = fn.exponential(logits - largest[:, None])
        part, _ = fn.scaled(e, tau_e, a, b, cut)
        found = fn.entry_slopes(
            e, e_second[:, None], part, slope[None, :], j[None, :] == label[:, None], mean[:, None], share[:, None],
            factor[:, None], top_scaled[:, None], at_top[:, None], at_second[:, None], at_target[:, None],
            elsewhere[:, None],
        )  # fmt: skip
        tl.store(out + rows[:, None] * d + j[None, :], found, mask=inside[:, None] & mask[None, :])
