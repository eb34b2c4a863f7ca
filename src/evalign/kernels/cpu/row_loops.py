"""Compiled loops along single rows of many classes: soft counts and cross-entropy forward, dL/dz backward.

Like `block_loops`, for rows that fill vector registers by themselves. The backward pass finds x in the buffer of the
gradient, and in `stats` (4, M) x of a row's two largest entries, the sum of x, and the weight.
"""

import numpy as np

from evalign.kernels.cpu.block_loops import (
    HALF,
    INT,
    ONE,
    TWO,
    ZERO,
    By,
    Doubles,
    F,
    Floats,
    Ints,
    Labels,
    entropies,
    exp,
    row_shares,
    row_slopes,
)
from evalign.kernels.cpu.compilation import loop

STATS = 4
FLUSH_ROWS = 128  # rows summed in float32 before the sum is added to a float64 one
ENTRIES = 2048  # entries whose exponentials are computed at once: they fit in the L1 cache
LOWEST, BITS_OF_ONE = INT(-(2**31)), INT(0x3F800000)


# Maxima of integers compile to vector instructions, unlike those of floats.
@loop()
def ordered(bits: INT) -> INT:
    """Bits of a float32 as an integer that is ordered like it, and back."""
    return bits ^ ((bits >> INT(31)) & INT(0x7FFFFFFF))


@loop()
def largest_of(bits: Ints) -> F:
    """The largest entry of a row, given as bits."""
    top = LOWEST
    for j in range(bits.shape[0]):
        top = max(top, ordered(bits[j]))
    return INT(ordered(top)).view(np.float32)


@loop()
def second_of(bits: Ints) -> F:
    """The second largest entry of a row of numbers from 0 to 1, given as bits; the largest is 1."""
    ones, top = INT(0), LOWEST
    for j in range(bits.shape[0]):
        key = bits[j]
        ones += INT(1) if key == BITS_OF_ONE else INT(0)
        top = max(top, LOWEST if key == BITS_OF_ONE else key)
    return ONE if ones > INT(1) else INT(top).view(np.float32)


@loop()
def exponentials(z: Floats, largest: Floats, out: Floats) -> None:
    """exp(z - largest) of several rows together, so that vectors are filled."""
    for r in range(z.shape[0]):
        row, into = z[r], out[r]
        top = largest_of(row.view(np.int32))
        largest[r] = top
        for j in range(row.shape[0]):
            into[j] = row[j] - top
    entries = out.reshape(-1)
    for k in range(entries.shape[0]):
        entries[k] = exp(entries[k])


@loop()
def expected_logits(
    z: Floats, y: Labels, w: Floats, weight: Floats, largest: Floats, smoothing: F, target: Floats
) -> None:
    """As in `block_loops`; the mass of shares is `weight` over w."""
    for r in range(z.shape[0]):
        row, top, value, mean = z[r], largest[r], ZERO, ZERO
        if y.ndim == 1:
            value = row[y[r]] - top
        else:
            own = y[r]
            for j in range(row.shape[0]):
                value += own[j] * (row[j] - top)
            value *= w[r] / weight[r] if weight[r] != ZERO else ZERO
        if smoothing != ZERO:
            for j in range(row.shape[0]):
                mean += row[j] - top
        target[r] = value + smoothing * (mean / F(row.shape[0]) - value)


@loop()
def row_forward(
    z: Floats, y: Labels, w: Floats, points: Floats, with_losses: bool, kept: Floats, stats: Floats, start: int,
    stop: int, sums: Doubles,
) -> float:  # fmt: skip
    """`block_forward` for rows (M, C); writes x to `kept`, unless that is empty."""
    a, b, cut, smoothing = points[0], points[1], points[3], points[5]
    d, together = z.shape[1], max(1, ENTRIES // z.shape[1])
    added, buffer = np.zeros((3, d), np.float32), np.empty((0 if kept.size else together, d), np.float32)
    s = np.empty((4, together), np.float32)
    by_label, labels, column = added[0], added[1], added[2]
    losses, flushed = 0.0, start
    for begin in range(start, stop, together):
        end = min(begin + together, stop)
        n = end - begin
        x = kept[begin:end] if kept.size else buffer[:n]
        scale, second, total = stats[0, begin:end], stats[1, begin:end], stats[2, begin:end]
        weight, share, at_top, target, largest = stats[3, begin:end], s[0, :n], s[1, :n], s[2, :n], s[3, :n]
        exponentials(z[begin:end], largest, x)
        for r in range(n):
            second[r] = second_of(x[r].view(np.int32))
        for r in range(n):
            weight[r] = w[begin + r]
            scale[r] = TWO / (ONE + second[r])
            second[r] *= scale[r]
        for r in range(n):
            row, top, added_x, added_h = x[r], scale[r], ZERO, ZERO
            for j in range(d):
                over = row[j] * top
                added_x += over
                added_h += HALF + b * (over - ONE) if over >= cut else a * over
                row[j] = over
            total[r], share[r] = added_x, added_h
        if y.ndim == 2:
            for r in range(n):
                own, mass = y[begin + r], ZERO
                for j in range(d):
                    mass += own[j]
                weight[r] *= mass
        if with_losses:
            expected_logits(z[begin:end], y[begin:end], w[begin:end], weight, largest, smoothing, target)
            losses += entropies(weight, scale, total, target)
        row_shares(weight, scale, total, share, points, at_top)
        for r in range(n):
            if weight[r] == ZERO:
                continue
            row, each, top, first = x[r], share[r], scale[r], at_top[r]
            for j in range(d):
                over = row[j]
                h = each * (HALF + b * (over - ONE) if over >= cut else a * over)
                column[j] += first if over == top else h
            if y.ndim == 1:
                label = y[begin + r]
                over = row[label]
                h = each * (HALF + b * (over - ONE) if over >= cut else a * over)
                sums[0, label] += first if over == top else h
                sums[1, label] += weight[r]
            else:
                own, over_mass = y[begin + r], w[begin + r] / weight[r]
                for j in range(d):
                    over = row[j]
                    h = each * (HALF + b * (over - ONE) if over >= cut else a * over)
                    by_label[j] += own[j] * over_mass * (first if over == top else h)
                    labels[j] += own[j] * w[begin + r]
        if end - flushed >= FLUSH_ROWS:
            sums += added
            added[:] = ZERO
            flushed = end
    sums += added
    return losses


@loop()
def row_backward(
    y: Labels, w: Floats, points: Floats, by: By, stats: Floats, start: int, stop: int, out: Floats
) -> None:
    """`block_backward` for rows (M, C), in place of the data that `row_forward` kept."""
    by_tp, by_predicted, by_losses = by
    a, b, cut, d, together = points[0], points[1], points[3], out.shape[1], max(1, ENTRIES // out.shape[1])
    flat, of = HALF - b, np.empty((8, together), np.float32)
    slopes = np.empty((1 if y.ndim == 1 else together, d), np.float32)  # the same for all labels, or by shares
    slopes[0] = by_predicted
    for begin in range(start, stop, together):
        end = min(begin + together, stop)
        n = end - begin
        scale, second, total = stats[0, begin:end], stats[1, begin:end], stats[2, begin:end]
        weight = stats[3, begin:end]
        for r in range(n):
            row, by_class, top, then = out[begin + r], slopes[min(r, slopes.shape[0] - 1)], scale[r], second[r]
            if y.ndim == 2:
                own, over_mass = y[begin + r], w[begin + r] / weight[r] if weight[r] != ZERO else ZERO
                for j in range(d):
                    by_class[j] = by_predicted[j] + by_tp[j] * own[j] * over_mass
            sum_scaled, sum_flat, dot_scaled, dot_flat, tops, seconds = ZERO, ZERO, ZERO, ZERO, ZERO, ZERO
            for j in range(d):
                over, slope = row[j], by_class[j]
                scaled = b * over if over >= cut else a * over
                beside = flat if over >= cut else ZERO
                sum_scaled += scaled
                sum_flat += beside
                dot_scaled += scaled * slope
                dot_flat += beside * slope
                tops += slope if over == top else ZERO
                seconds += ONE if over == then else ZERO
            if y.ndim == 1:
                over, slope = row[y[begin + r]], by_tp[y[begin + r]]
                dot_scaled += slope * (b * over if over >= cut else a * over)
                dot_flat += slope * flat if over >= cut else ZERO
                tops += slope if over == top else ZERO
            of[0, r], of[1, r], of[2, r] = sum_scaled, sum_flat, dot_scaled
            of[3, r], of[4, r], of[5, r] = dot_flat, tops, seconds
        row_slopes(weight, scale, second, total, of[:, :n], points, by_losses, d)
        for r in range(n):
            row, by_class, top, then = out[begin + r], slopes[min(r, slopes.shape[0] - 1)], scale[r], second[r]
            if weight[r] == ZERO:
                row[:] = ZERO
                continue
            factor, mean, top_scaled, of_x = of[0, r], of[1, r], of[2, r], of[3, r]
            at_top, at_second, entropy, spread = of[4, r], of[5, r], of[6, r], of[7, r]
            own_slope = -entropy
            if y.ndim == 1:
                over = row[y[begin + r]]
                scaled = b * over if over >= cut else a * over
                own_slope += by_tp[y[begin + r]] * factor * (top_scaled if over == top else scaled)
            for j in range(d):
                over = row[j]
                scaled = b * over if over >= cut else a * over
                scaled = top_scaled if over == top else scaled
                rest = at_top if over == top else ZERO
                rest += at_second if over == then else ZERO
                row[j] = (by_class[j] * factor - mean) * scaled + over * of_x + rest - spread
            if y.ndim == 1:
                row[y[begin + r]] += own_slope
            else:
                own, by_share = y[begin + r], entropy * w[begin + r] / weight[r]
                for j in range(d):
                    row[j] -= by_share * own[j]
