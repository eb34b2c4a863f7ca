"""Compiled loops along single rows of many classes: soft counts and cross-entropy forward, dL/dz backward.

Like `block_loops`, for rows that fill vector registers by themselves. The backward pass finds x in the buffer of the
gradient, and in `stats` (4, M) x of a row's two largest entries, the sum of x, and the weight. Entries are mostly
indexed as x[r, j]: numba counts references to every view of a row, which takes as long as ten entries.
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
    Labels,
    entropies,
    exp,
    row_shares,
    row_slopes,
)
from evalign.kernels.cpu.compilation import loop

STATS = 4
FLUSH_ROWS = 128  # rows summed in float32 before the sum is added to a float64 one
ENTRIES = 8192  # entries of a chunk of rows: they fit in the L1 cache
LANES = 16  # rows of a chunk are a multiple of it if possible, so that vectors of rows are filled
LOWEST, BITS_OF_ONE = INT(-(2**31)), INT(0x3F800000)


# Maxima of integers compile to vector instructions, unlike those of floats.
@loop()
def ordered(bits: INT) -> INT:
    """Bits of a float32 as an integer that is ordered like it, and back."""
    return bits ^ ((bits >> INT(31)) & INT(0x7FFFFFFF))


@loop()
def rows_together(d: int) -> int:
    """Rows of a chunk."""
    rows = ENTRIES // d
    return max(1, rows) if d > 2 * ENTRIES // LANES else (rows + LANES - 1) // LANES * LANES


@loop()
def exponentials(z: Floats, largest: Floats, out: Floats) -> None:
    """exp(z - largest) of several rows together, so that vectors are filled."""
    bits, d = z.view(np.int32), z.shape[1]
    for r in range(z.shape[0]):
        key = LOWEST
        for j in range(d):
            key = max(key, ordered(bits[r, j]))
        top = INT(ordered(key)).view(np.float32)
        largest[r] = top
        for j in range(d):
            out[r, j] = z[r, j] - top
    entries = out.reshape(-1)
    for k in range(entries.shape[0]):
        entries[k] = exp(entries[k])


@loop()
def second_largest(x: Floats, second: Floats) -> None:
    """The second largest entries of rows of numbers from 0 to 1; the largest is 1."""
    bits = x.view(np.int32)
    for r in range(x.shape[0]):
        ones, top = INT(0), LOWEST
        for j in range(x.shape[1]):
            key = bits[r, j]
            ones += INT(1) if key == BITS_OF_ONE else INT(0)
            top = max(top, LOWEST if key == BITS_OF_ONE else key)
        second[r] = ONE if ones > INT(1) else INT(top).view(np.float32)


@loop()
def expected_logits(
    z: Floats, y: Labels, w: Floats, weight: Floats, largest: Floats, smoothing: F, target: Floats
) -> None:
    """As in `block_loops`; the mass of shares is `weight` over w."""
    for r in range(z.shape[0]):
        top, value, mean = largest[r], ZERO, ZERO
        if y.ndim == 1:
            value = z[r, y[r]] - top
        else:
            for j in range(z.shape[1]):
                value += y[r, j] * (z[r, j] - top)
            value *= w[r] / weight[r] if weight[r] != ZERO else ZERO
        if smoothing != ZERO:
            for j in range(z.shape[1]):
                mean += z[r, j] - top
        target[r] = value + smoothing * (mean / F(z.shape[1]) - value)


@loop()
def row_forward(
    z: Floats, y: Labels, w: Floats, points: Floats, with_losses: bool, kept: Floats, stats: Floats, start: int,
    stop: int, sums: Doubles,
) -> float:  # fmt: skip
    """`block_forward` for rows (M, C); writes x to `kept`, unless that is empty."""
    a, b, cut, smoothing = points[0], points[1], points[3], points[5]
    d, together = z.shape[1], rows_together(z.shape[1])
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
        second_largest(x, second)
        for r in range(n):
            weight[r] = w[begin + r]
            scale[r] = TWO / (ONE + second[r])
            second[r] *= scale[r]
        for r in range(n):
            top, added_x, added_h = scale[r], ZERO, ZERO
            for j in range(d):
                over = x[r, j] * top
                added_x += over
                added_h += HALF + b * (over - ONE) if over >= cut else a * over
                x[r, j] = over
            total[r], share[r] = added_x, added_h
        if y.ndim == 2:
            for r in range(n):
                mass = ZERO
                for j in range(d):
                    mass += y[begin + r, j]
                weight[r] *= mass
        if with_losses:
            expected_logits(z[begin:end], y[begin:end], w[begin:end], weight, largest, smoothing, target)
            losses += entropies(weight, scale, total, target)
        row_shares(weight, scale, total, share, points, at_top)
        for r in range(n):
            if weight[r] == ZERO:
                continue
            each, top, first = share[r], scale[r], at_top[r]
            i = begin + r
            counts, over_mass = w[i], w[i] / weight[r]
            for j in range(d):
                over = x[r, j]
                h = each * (HALF + b * (over - ONE) if over >= cut else a * over)
                h = first if over == top else h
                column[j] += h
                if y.ndim == 2:
                    by_label[j] += y[i, j] * over_mass * h
                    labels[j] += y[i, j] * counts
            if y.ndim == 1:
                own = y[i]
                over = x[r, own]
                h = each * (HALF + b * (over - ONE) if over >= cut else a * over)
                sums[0, own] += first if over == top else h
                sums[1, own] += weight[r]
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
    a, b, cut, d, together = points[0], points[1], points[3], out.shape[1], rows_together(out.shape[1])
    flat, of = HALF - b, np.empty((8, together), np.float32)
    for begin in range(start, stop, together):
        end = min(begin + together, stop)
        n = end - begin
        scale, second, total = stats[0, begin:end], stats[1, begin:end], stats[2, begin:end]
        weight = stats[3, begin:end]
        for r in range(n):
            i, row, top, then = begin + r, out[begin + r], scale[r], second[r]
            over_mass = w[i] / weight[r] if weight[r] != ZERO else ZERO
            sum_scaled, sum_flat, dot_scaled, dot_flat, tops, seconds = ZERO, ZERO, ZERO, ZERO, ZERO, ZERO
            for j in range(d):
                over, slope = row[j], by_predicted[j]
                if y.ndim == 2:
                    slope += by_tp[j] * (y[i, j] * over_mass)
                scaled = b * over if over >= cut else a * over
                beside = flat if over >= cut else ZERO
                sum_scaled += scaled
                sum_flat += beside
                dot_scaled += scaled * slope
                dot_flat += beside * slope
                tops += slope if over == top else ZERO
                seconds += ONE if over == then else ZERO
            if y.ndim == 1:
                own = y[i]
                over, slope = row[own], by_tp[own]
                dot_scaled += slope * (b * over if over >= cut else a * over)
                dot_flat += slope * flat if over >= cut else ZERO
                tops += slope if over == top else ZERO
            of[0, r], of[1, r], of[2, r] = sum_scaled, sum_flat, dot_scaled
            of[3, r], of[4, r], of[5, r] = dot_flat, tops, seconds
        row_slopes(weight, scale, second, total, of[:, :n], points, by_losses, d)
        for r in range(n):
            i, row, top, then = begin + r, out[begin + r], scale[r], second[r]
            if weight[r] == ZERO:
                row[:] = ZERO
                continue
            factor, mean, top_scaled, of_x = of[0, r], of[1, r], of[2, r], of[3, r]
            at_top, at_second, entropy, spread = of[4, r], of[5, r], of[6, r], of[7, r]
            over_mass, own_slope = w[i] / weight[r], -entropy
            if y.ndim == 1:
                own = y[i]
                over = row[own]
                scaled = b * over if over >= cut else a * over
                own_slope += by_tp[own] * factor * (top_scaled if over == top else scaled)
            for j in range(d):
                over, slope, subtracted = row[j], by_predicted[j], spread
                if y.ndim == 2:
                    share = y[i, j] * over_mass
                    slope += by_tp[j] * share
                    subtracted += entropy * share
                scaled = b * over if over >= cut else a * over
                scaled = top_scaled if over == top else scaled
                rest = at_top if over == top else ZERO
                rest += at_second if over == then else ZERO
                row[j] = (slope * factor - mean) * scaled + over * of_x + rest - subtracted
            if y.ndim == 1:
                row[y[i]] += own_slope
