"""Triton kernels of the row counts: `stats` along rows, `columns` down them, `gradient` along rows again.

All three stream the classes in blocks, so that any number of them fits; formulas and names are those of `row_loops`.
Sums are taken in float32 in a fixed order, without atomics: the same batch always gives the same bits.
"""

import triton
import triton.language as tl


@triton.jit
def _numbers(temperature, low, reach, ANNEALED: tl.constexpr):
    """a, b, low and the ends of the middle line over tau. A temperature stays on the device, for CUDA graphs."""
    if ANNEALED:
        low = tl.load(temperature).to(tl.float32)
        reach = 2.5 * low
    a = tl.where(reach < 1.0, low / tl.where(reach < 1.0, 1.0 - reach, 1.0), 0.0)
    return a, (0.5 - low) / reach, low, tl.where(reach < 1.0, 1.0 - reach, -1.0), 1.0 + reach


@triton.jit
def _step(x, a, b, cut):
    """h of entries at x = p / tau <= 1."""
    return tl.where(x >= cut, 0.5 + b * (x - 1.0), a * x)


@triton.jit
def _scaled(e, e_second):
    """p / tau, at most 1; in this order a nan stays one."""
    x = e * (2.0 / (1.0 + e_second))
    return tl.where(x > 1.0, 1.0, x)


@triton.jit
def _top(p, tau, low, b, c):
    """The step at a row's largest entry, its slope there, and its derivative by tau."""
    beyond = p > c * tau
    room = tl.where(beyond, 1.0 - c * tau, 1.0)
    loss = low * (1.0 - p) / room
    x = p / tau
    return (
        tl.where(beyond, 1.0 - loss, 0.5 + b * (x - 1.0)),
        tl.where(beyond, low / room, b / tau),
        tl.where(beyond, -c * loss / room, -b * x / tau),
    )


@triton.jit
def stats_kernel(
    z, y, w, temperature, low, reach, smoothing, stats, places, losses, n, d, stride,
    ANNEALED: tl.constexpr, LOSSES: tl.constexpr, SMOOTHING: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Maximum, e of the second place, sum of e and sum of h to `stats` (4, n), both places to `places` (2, n)."""
    a, b, low, cut, c = _numbers(temperature, low, reach, ANNEALED)
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = rows < n
    start = z + rows * stride
    minus = float("-inf")
    # Every lane keeps its own two largest: a reduction in each turn of the loop would cost more than the rest of it.
    best, runner_up = tl.full([ROWS, BLOCK], minus, tl.float32), tl.full([ROWS, BLOCK], minus, tl.float32)
    best_at, runner_up_at = tl.zeros([ROWS, BLOCK], tl.int32), tl.zeros([ROWS, BLOCK], tl.int32)
    for at in range(0, d, BLOCK):
        j = at + tl.arange(0, BLOCK)
        here = j[None, :] + tl.zeros([ROWS, BLOCK], tl.int32)
        mask = inside[:, None] & (j < d)[None, :]
        x = tl.load(start[:, None] + j[None, :], mask=mask, other=minus).to(tl.float32)
        leads = x > best
        loser, loser_at = tl.where(leads, best, x), tl.where(leads, best_at, here)
        best, best_at = tl.where(leads, x, best), tl.where(leads, here, best_at)
        follows = loser > runner_up
        runner_up, runner_up_at = tl.where(follows, loser, runner_up), tl.where(follows, loser_at, runner_up_at)
    lane = tl.arange(0, BLOCK)[None, :]
    largest, winner = tl.max(best, 1, return_indices=True)
    won = lane == winner[:, None]
    first = tl.sum(tl.where(won, best_at, 0), 1)
    left, left_at = tl.where(won, runner_up, best), tl.where(won, runner_up_at, best_at)
    second_largest, winner = tl.max(left, 1, return_indices=True)
    second = tl.sum(tl.where(lane == winner[:, None], left_at, 0), 1)
    e_second = tl.exp(second_largest - largest)
    totals, totals_h = tl.zeros([ROWS, BLOCK], tl.float32), tl.zeros([ROWS, BLOCK], tl.float32)
    totals_z = tl.zeros([ROWS, BLOCK], tl.float32)
    for at in range(0, d, BLOCK):
        j = at + tl.arange(0, BLOCK)
        mask = inside[:, None] & (j < d)[None, :]
        x = tl.load(start[:, None] + j[None, :], mask=mask, other=minus).to(tl.float32)
        e = tl.exp(x - largest[:, None])
        h = _step(_scaled(e, e_second[:, None]), a, b, cut)
        totals += tl.where(mask, e, 0.0)
        totals_h += tl.where(mask & (j[None, :] != first[:, None]), h, 0.0)
        if SMOOTHING:
            totals_z += tl.where(mask, x, 0.0)
    total, total_h, added = tl.sum(totals, 1), tl.sum(totals_h, 1), tl.sum(totals_z, 1)
    value, _, _ = _top(1.0 / total, (1.0 + e_second) / (2.0 * total), low, b, c)
    tl.store(stats + rows, largest, mask=inside)
    tl.store(stats + n + rows, e_second, mask=inside)
    tl.store(stats + 2 * n + rows, total, mask=inside)
    tl.store(stats + 3 * n + rows, total_h + value, mask=inside)
    tl.store(places + rows, first, mask=inside)
    tl.store(places + n + rows, second, mask=inside)
    if LOSSES:
        weight = tl.load(w + rows, mask=inside, other=0.0)
        label = tl.load(y + rows, mask=inside, other=0)
        target = tl.load(start + label, mask=inside, other=0.0).to(tl.float32) - largest
        if SMOOTHING:
            target += smoothing * (added / d - largest - target)
        # An ignored row counts for nothing even where its loss is infinite.
        tl.store(losses + rows, tl.where(weight == 0.0, 0.0, weight * (tl.log(total) - target)), mask=inside)


@triton.jit
def columns_kernel(
    z, y, w, temperature, low, reach, stats, places, partial, n, d, stride, chunk,
    ANNEALED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """tp, predicted and actual of `chunk` rows and BLOCK classes, to `partial` (chunks, 3, d)."""
    a, b, low, cut, c = _numbers(temperature, low, reach, ANNEALED)
    j = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    begin = tl.program_id(0).to(tl.int64) * chunk
    tp, predicted = tl.zeros([ROWS, BLOCK], tl.float32), tl.zeros([ROWS, BLOCK], tl.float32)
    actual = tl.zeros([ROWS, BLOCK], tl.float32)
    for offset in range(0, chunk, ROWS):
        rows = begin + offset + tl.arange(0, ROWS)
        weight = tl.load(w + rows, mask=rows < n, other=0.0)
        counts = (rows < n) & (weight != 0.0)
        largest = tl.load(stats + rows, mask=counts, other=0.0)
        e_second = tl.load(stats + n + rows, mask=counts, other=1.0)
        total = tl.load(stats + 2 * n + rows, mask=counts, other=1.0)
        share = weight / tl.load(stats + 3 * n + rows, mask=counts, other=1.0)
        first = tl.load(places + rows, mask=counts, other=0)
        label = tl.load(y + rows, mask=counts, other=0)
        mask = counts[:, None] & (j < d)[None, :]
        x = tl.load(z + rows[:, None] * stride + j[None, :], mask=mask, other=0.0).to(tl.float32)
        h = _step(_scaled(tl.exp(x - largest[:, None]), e_second[:, None]), a, b, cut)
        value, _, _ = _top(1.0 / total, (1.0 + e_second) / (2.0 * total), low, b, c)
        h = tl.where(j[None, :] == first[:, None], value[:, None], h)
        part = tl.where(mask, h * share[:, None], 0.0)
        hit = j[None, :] == label[:, None]
        predicted += part
        tp += tl.where(hit, part, 0.0)
        actual += tl.where(hit & mask, weight[:, None], 0.0)
    out = partial + tl.program_id(0).to(tl.int64) * 3 * d + j
    tl.store(out, tl.sum(tp, 0), mask=j < d)
    tl.store(out + d, tl.sum(predicted, 0), mask=j < d)
    tl.store(out + 2 * d, tl.sum(actual, 0), mask=j < d)


@triton.jit
def gradient_kernel(
    z, y, w, temperature, low, reach, smoothing, stats, places, by_tp, by_predicted, by_losses, out, n, d, stride,
    ANNEALED: tl.constexpr, LOSSES: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """dL/dz; one sweep for the three sums that a row needs, one that writes."""
    a, b, low, cut, c = _numbers(temperature, low, reach, ANNEALED)
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = rows < n
    weight = tl.load(w + rows, mask=inside, other=0.0)
    counts = inside & (weight != 0.0)
    largest = tl.load(stats + rows, mask=counts, other=0.0)
    e_second = tl.load(stats + n + rows, mask=counts, other=1.0)
    total = tl.load(stats + 2 * n + rows, mask=counts, other=1.0)
    total_h = tl.load(stats + 3 * n + rows, mask=counts, other=1.0)
    first = tl.load(places + rows, mask=counts, other=0)
    second = tl.load(places + n + rows, mask=counts, other=0)
    label = tl.load(y + rows, mask=counts, other=0).to(tl.int32)
    start = z + rows * stride
    dots_h, dots_scaled = tl.zeros([ROWS, BLOCK], tl.float32), tl.zeros([ROWS, BLOCK], tl.float32)
    sums_scaled = tl.zeros([ROWS, BLOCK], tl.float32)
    for at in range(0, d, BLOCK):
        j = at + tl.arange(0, BLOCK)
        slope = tl.load(by_predicted + j, mask=j < d, other=0.0)[None, :]
        mask = counts[:, None] & (j < d)[None, :]
        e = tl.exp(tl.load(start[:, None] + j[None, :], mask=mask, other=0.0).to(tl.float32) - largest[:, None])
        x = _scaled(e, e_second[:, None])
        others = mask & (j[None, :] != first[:, None])
        h = tl.where(others, _step(x, a, b, cut), 0.0)
        scaled = tl.where(others, tl.where(x >= cut, b, a) * x, 0.0)
        dots_h += h * slope
        dots_scaled += scaled * slope
        sums_scaled += scaled
    dot_h, dot_scaled, sum_scaled = tl.sum(dots_h, 1), tl.sum(dots_scaled, 1), tl.sum(sums_scaled, 1)
    p, tau = 1.0 / total, (1.0 + e_second) / (2.0 * total)
    value, top_slope, by_tau = _top(p, tau, low, b, c)
    at_first = tl.load(by_predicted + first, mask=counts, other=0.0)
    at_label = tl.load(by_tp + label, mask=counts, other=0.0)
    is_first = label == first
    label_e = tl.exp(tl.load(start + label, mask=counts, other=0.0).to(tl.float32) - largest)
    label_x = _scaled(label_e, e_second)
    label_scaled = tl.where(label_x >= cut, b, a) * label_x
    label_h = tl.where(is_first, value, _step(label_x, a, b, cut))
    mean = (dot_h + value * at_first + label_h * at_label) / total_h
    share = weight / total_h
    entropy = tl.zeros([ROWS], tl.float32)
    if LOSSES:
        entropy += weight * tl.load(by_losses)
    rest = dot_scaled - mean * sum_scaled + tl.where(is_first, 0.0, at_label * label_scaled)
    by_top = at_first - mean + tl.where(is_first, at_label, 0.0)
    in_top = share * by_top * p * top_slope
    through_tau = share * by_top * by_tau
    half = 0.5 * (through_tau - share * rest / tau)
    factor = (entropy - in_top - tau * through_tau) * p
    spread = entropy * smoothing / d
    at_target = tl.where(is_first, 0.0, share * at_label * label_scaled) - entropy * (1.0 - smoothing)
    for at in range(0, d, BLOCK):
        j = at + tl.arange(0, BLOCK)
        slope = tl.load(by_predicted + j, mask=j < d, other=0.0)[None, :]
        mask = counts[:, None] & (j < d)[None, :]
        e = tl.exp(tl.load(start[:, None] + j[None, :], mask=mask, other=0.0).to(tl.float32) - largest[:, None])
        x = _scaled(e, e_second[:, None])
        scaled = tl.where(x >= cut, b, a) * x
        found = share[:, None] * (slope - mean[:, None]) * scaled + e * factor[:, None]
        found = tl.where(j[None, :] == first[:, None], (in_top + factor + half * p)[:, None], found)
        found += tl.where(j[None, :] == second[:, None], (half * e_second * p)[:, None], 0.0)
        found += tl.where(j[None, :] == label[:, None], at_target[:, None], 0.0) - spread[:, None]
        found = tl.where(mask, found, 0.0)
        tl.store(out + rows[:, None] * d + j[None, :], found, mask=inside[:, None] & (j < d)[None, :])


@triton.jit
def whole_rows_kernel(
    z, y, w, temperature, low, reach, smoothing, stats, places, losses, partial, n, d, stride, chunk,
    ANNEALED: tl.constexpr, LOSSES: tl.constexpr, SMOOTHING: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`stats_kernel` and `columns_kernel` in one, where a row fits into a tile: the logits are read once."""
    a, b, low, cut, c = _numbers(temperature, low, reach, ANNEALED)
    j = tl.arange(0, BLOCK)
    begin = tl.program_id(0).to(tl.int64) * chunk
    minus = float("-inf")
    tp, predicted = tl.zeros([ROWS, BLOCK], tl.float32), tl.zeros([ROWS, BLOCK], tl.float32)
    actual = tl.zeros([ROWS, BLOCK], tl.float32)
    for offset in range(0, chunk, ROWS):
        rows = begin + offset + tl.arange(0, ROWS)
        inside = rows < n
        weight = tl.load(w + rows, mask=inside, other=0.0)
        label = tl.load(y + rows, mask=inside, other=0)
        mask = inside[:, None] & (j < d)[None, :]
        x = tl.load(z + rows[:, None] * stride + j[None, :], mask=mask, other=minus).to(tl.float32)
        largest, first = tl.max(x, 1, return_indices=True)
        first = first.to(tl.int32)
        second_largest, second = tl.max(tl.where(j[None, :] == first[:, None], minus, x), 1, return_indices=True)
        e = tl.exp(x - largest[:, None])
        total = tl.sum(tl.where(mask, e, 0.0), 1)
        e_second = tl.exp(second_largest - largest)
        h = _step(_scaled(e, e_second[:, None]), a, b, cut)
        value, _, _ = _top(1.0 / total, (1.0 + e_second) / (2.0 * total), low, b, c)
        h = tl.where(mask, tl.where(j[None, :] == first[:, None], value[:, None], h), 0.0)
        total_h = tl.sum(h, 1)
        part = tl.where(mask & (weight != 0.0)[:, None], h * (weight / total_h)[:, None], 0.0)
        hit = mask & (j[None, :] == label[:, None])
        predicted += part
        tp += tl.where(hit, part, 0.0)
        actual += tl.where(hit, weight[:, None], 0.0)
        tl.store(stats + rows, largest, mask=inside)
        tl.store(stats + n + rows, e_second, mask=inside)
        tl.store(stats + 2 * n + rows, total, mask=inside)
        tl.store(stats + 3 * n + rows, total_h, mask=inside)
        tl.store(places + rows, first, mask=inside)
        tl.store(places + n + rows, second.to(tl.int32), mask=inside)
        if LOSSES:
            target = tl.sum(tl.where(hit, x, 0.0), 1) - largest
            if SMOOTHING:
                target += smoothing * (tl.sum(tl.where(mask, x, 0.0), 1) / d - largest - target)
            tl.store(losses + rows, tl.where(weight == 0.0, 0.0, weight * (tl.log(total) - target)), mask=inside)
    out = partial + tl.program_id(0).to(tl.int64) * 3 * d + j
    tl.store(out, tl.sum(tp, 0), mask=j < d)
    tl.store(out + d, tl.sum(predicted, 0), mask=j < d)
    tl.store(out + 2 * d, tl.sum(actual, 0), mask=j < d)
