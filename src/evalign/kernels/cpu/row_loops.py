"""Compiled loops over multiclass rows: soft counts and cross-entropy forward, dL/dz backward.

With e_j = exp(z_j - max z), p / tau = 2 e_j / (1 + e_second): below c tau the step needs no sum of exponentials, so
one sweep gives this sum, the sum of h and the cross-entropy (formulas: `kernels.reference`).

`row_forward` and `row_backward` sweep along one row at a time, which pays for long rows. A row of few classes does not
fill a vector register, and its overhead outweighs its entries: `block_forward` and `block_backward` therefore take a
block of rows, with the classes in the outer loop, the rows in the inner one, and selections in place of branches.
"""

import numpy as np
from numpy.typing import NDArray

from evalign.kernels.cpu.elementary import HALF, ONE, ZERO, exp, log
from evalign.kernels.cpu.jit import loop

F = np.float32
INT = np.int32
TWO = F(2)
FLUSH_ROWS = 128  # rows summed in float32 before the sum is added to a float64 one
BLOCK_ROWS = 64  # a block of ten classes fits into the L1 cache
NONE = INT(2**31 - 1)
LOWEST = INT(-(2**31))
Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
Ints = NDArray[np.int32]
Labels = NDArray[np.int64]


@loop(exact=True)
def ordered(bits: INT) -> INT:
    """Bits of a float32 as an integer that is ordered like it: integer maxima compile to vector instructions."""
    return bits ^ ((bits >> INT(31)) & INT(0x7FFFFFFF))


@loop()
def top_step(p: F, tau: F, low: F, b: F, c: F) -> tuple[F, F, F]:
    """The step at a row's largest entry, its slope there, and its derivative by tau."""
    if p > c * tau:
        gap = ONE - c * tau
        loss = low * (ONE - p) / gap
        return ONE - loss, low / gap, -c * loss / gap
    x = p / tau
    return HALF + b * (x - ONE), b / tau, -b * x / tau


@loop()
def row_forward(
    z: Floats,
    y: Labels,
    w: Floats,
    points: Floats,
    start: int,
    stop: int,
    stats: Floats,
    top_two: Ints,
    sums: Doubles,
) -> float:
    """Adds tp, actual, predicted of rows start to stop to `sums` (3, C); returns their cross-entropies' sum.

    Saves maximum, e of the second largest entry, sum of e and sum of h to `stats` (M, 4), and the indices of both
    entries to `top_two` (M, 2).
    """
    a, b, low, cut, c, smoothing = points[0], points[1], points[2], points[3], points[4], points[5]
    d = z.shape[1]
    bits = z.view(np.int32)
    h = np.empty(d, np.float32)
    column = np.zeros(d, np.float32)
    losses = 0.0
    for i in range(start, stop):
        weight = w[i]
        if weight == ZERO:
            continue
        row, row_bits = z[i], bits[i]
        top = LOWEST
        for j in range(d):
            top = max(top, ordered(row_bits[j]))
        first, next_top = NONE, LOWEST
        for j in range(d):
            key = ordered(row_bits[j])
            first = min(first, INT(j) if key == top else NONE)
            next_top = max(next_top, LOWEST if key == top else key)
        second = NONE
        for j in range(d):
            key = ordered(row_bits[j])
            second = min(second, INT(j) if key == top and INT(j) > first else NONE)
        if second == NONE:
            for j in range(d):
                second = min(second, INT(j) if ordered(row_bits[j]) == next_top else NONE)
        largest = row[first]
        e_second = exp(row[second] - largest)
        scale = F(2) / (ONE + e_second)
        total, total_h = ZERO, ZERO
        for j in range(d):
            e = exp(row[j] - largest)
            x = e * scale
            x = ONE if x > ONE else x
            value = HALF + b * (x - ONE) if x >= cut else a * x
            total += e
            total_h += value
            h[j] = value
        value = top_step(ONE / total, (ONE + e_second) / (F(2) * total), low, b, c)[0]
        total_h += value - h[first]
        h[first] = value
        share = weight / total_h
        for j in range(d):
            column[j] += h[j] * share
        label = y[i]
        sums[0, label] += h[label] * share
        sums[1, label] += weight
        target = row[label] - largest
        if smoothing != ZERO:
            mean = ZERO
            for j in range(d):
                mean += row[j] - largest
            target += smoothing * (mean / F(d) - target)
        losses += weight * (np.log(total) - target)
        stats[i, 0], stats[i, 1], stats[i, 2], stats[i, 3] = largest, e_second, total, total_h
        top_two[i, 0], top_two[i, 1] = first, second
        if (i - start) % FLUSH_ROWS == FLUSH_ROWS - 1:
            for j in range(d):
                sums[2, j] += column[j]
                column[j] = ZERO
    for j in range(d):
        sums[2, j] += column[j]
    return losses


@loop()
def row_backward(
    z: Floats,
    y: Labels,
    w: Floats,
    points: Floats,
    start: int,
    stop: int,
    stats: Floats,
    top_two: Ints,
    by_tp: Floats,
    by_predicted: Floats,
    by_losses: F,
    out: Floats,
) -> None:
    """dL/dz of rows start to stop; formulas in `kernels.reference`."""
    a, b, low, cut, c, smoothing = points[0], points[1], points[2], points[3], points[4], points[5]
    d = z.shape[1]
    for i in range(start, stop):
        weight = w[i]
        if weight == ZERO:
            out[i] = ZERO
            continue
        row, gradient = z[i], out[i]
        largest, e_second, total, total_h = stats[i, 0], stats[i, 1], stats[i, 2], stats[i, 3]
        first, second, label = top_two[i, 0], top_two[i, 1], y[i]
        scale = F(2) / (ONE + e_second)
        dot_h, dot_scaled, sum_scaled = ZERO, ZERO, ZERO
        for j in range(d):
            e = exp(row[j] - largest)
            gradient[j] = e
            x = e * scale
            x = ONE if x > ONE else x
            slope = b if x >= cut else a
            value = HALF + b * (x - ONE) if x >= cut else a * x
            dot_h += value * by_predicted[j]
            dot_scaled += slope * x * by_predicted[j]
            sum_scaled += slope * x
        p, tau = ONE / total, (ONE + e_second) / (F(2) * total)
        value, top_slope, by_tau = top_step(p, tau, low, b, c)
        # The sweep treated the largest entry as if it were at tau, with h = 1/2 and p h' = b.
        at_first = by_predicted[first]
        dot_h += (value - HALF) * at_first
        dot_scaled -= b * at_first
        sum_scaled -= b
        x = gradient[label] * scale
        label_scaled = b * x if x >= cut else a * x
        label_h = HALF + b * (x - ONE) if x >= cut else a * x
        if label == first:
            label_h = value
        at_label = by_tp[label]
        mean = (dot_h + label_h * at_label) / total_h
        share = weight / total_h
        entropy = by_losses * weight
        rest = dot_scaled - mean * sum_scaled
        by_top = at_first - mean
        if label == first:
            by_top += at_label
        else:
            rest += at_label * label_scaled
        in_top = share * by_top * p * top_slope
        through_tau = share * by_top * by_tau
        half = HALF * (through_tau - share * rest / tau)
        factor = (entropy - in_top - tau * through_tau) * p
        e_second = gradient[second]
        spread = entropy * smoothing / F(d)
        for j in range(d):
            e = gradient[j]
            x = e * scale
            slope = b if x >= cut else a
            gradient[j] = share * (by_predicted[j] - mean) * slope * x + e * factor - spread
        gradient[first] = in_top + factor + half * p - spread
        gradient[second] += half * e_second * p
        if label != first:
            gradient[label] += share * at_label * label_scaled
        gradient[label] -= entropy * (ONE - smoothing)


@loop()
def load_block(z: Floats, y: Labels, w: Floats, i: int, count: int, rows: Floats, label: Ints, weight: Floats) -> None:
    """Copy a block to `rows` (C, BLOCK_ROWS). Rows of weight 0, which may hold nan, and those past the end become
    zeros."""
    for r in range(count):
        weight[r], label[r] = w[i + r], INT(y[i + r])
    for r in range(count, BLOCK_ROWS):
        weight[r], label[r] = ZERO, INT(0)
    d = z.shape[1]
    if z.strides[0] < z.strides[1]:  # along the contiguous dimension
        for j in range(d):
            row = rows[j]
            for r in range(count):
                value = z[i + r, j]
                row[r] = value if weight[r] != ZERO else ZERO
    else:
        for r in range(count):
            counts = weight[r] != ZERO
            for j in range(d):
                rows[j, r] = z[i + r, j] if counts else ZERO
    for r in range(count, BLOCK_ROWS):
        for j in range(d):
            rows[j, r] = ZERO


@loop()
def block_top_two(rows: Floats, largest: Floats, next_one: Floats, first: Ints, second: Ints) -> None:
    """The two largest entries of every row and their indices; among equal ones the first index wins."""
    start, other = rows[0], rows[1]
    for r in range(BLOCK_ROWS):
        swapped = other[r] > start[r]
        largest[r] = other[r] if swapped else start[r]
        next_one[r] = start[r] if swapped else other[r]
        first[r] = INT(1) if swapped else INT(0)
        second[r] = INT(0) if swapped else INT(1)
    for j in range(2, rows.shape[0]):
        row = rows[j]
        for r in range(BLOCK_ROWS):
            value, top, below, at_top = row[r], largest[r], next_one[r], first[r]
            above, between = value > top, value > below
            largest[r] = value if above else top
            first[r] = INT(j) if above else at_top
            next_one[r] = top if above else (value if between else below)
            second[r] = at_top if above else (INT(j) if between else second[r])


@loop()
def block_forward(
    z: Floats,
    y: Labels,
    w: Floats,
    points: Floats,
    start: int,
    stop: int,
    stats: Floats,
    top_two: Ints,
    sums: Doubles,
) -> float:
    """As `row_loops.forward`."""
    a, b, low, cut, c, smoothing = points[0], points[1], points[2], points[3], points[4], points[5]
    d = z.shape[1]
    rows, h = np.empty((d, BLOCK_ROWS), np.float32), np.empty((d, BLOCK_ROWS), np.float32)
    ints, s = np.empty((3, BLOCK_ROWS), np.int32), np.empty((8, BLOCK_ROWS), np.float32)
    label, first, second = ints[0], ints[1], ints[2]
    weight, largest, e_second, scale, total, total_h, target, share = s[0], s[1], s[2], s[3], s[4], s[5], s[6], s[7]
    losses = 0.0
    for i in range(start, stop, BLOCK_ROWS):
        count = min(BLOCK_ROWS, stop - i)
        load_block(z, y, w, i, count, rows, label, weight)
        block_top_two(rows, largest, e_second, first, second)
        for r in range(BLOCK_ROWS):
            e_second[r] = exp(e_second[r] - largest[r])
            scale[r] = TWO / (ONE + e_second[r])
            total[r], total_h[r] = ZERO, ZERO
        for r in range(BLOCK_ROWS):
            target[r] = (ONE - smoothing) * (rows[label[r], r] - largest[r])
        if smoothing != ZERO:
            for j in range(d):
                row = rows[j]
                for r in range(BLOCK_ROWS):
                    target[r] += smoothing / F(d) * (row[r] - largest[r])
        for j in range(d):
            row, row_h = rows[j], h[j]
            for r in range(BLOCK_ROWS):
                e = exp(row[r] - largest[r])
                x = e * scale[r]
                x = ONE if x > ONE else x
                value = HALF + b * (x - ONE) if x >= cut else a * x
                total[r] += e
                total_h[r] += value
                row_h[r] = value
        for r in range(BLOCK_ROWS):
            p = ONE / total[r]
            tau = (ONE + e_second[r]) * HALF * p
            above = ONE - low * (ONE - p) / (ONE - c * tau)
            at_first = above if p > c * tau else HALF + b * (p / tau - ONE)
            total_h[r] += at_first - HALF  # the sweep treated the largest entry as if it were at tau
            share[r] = weight[r] / total_h[r]
            target[r] = weight[r] * (log(total[r]) - target[r])
            scale[r] = at_first
        block = ZERO
        for r in range(BLOCK_ROWS):
            h[first[r], r] = scale[r]
            block += target[r]
        losses += float(block)
        for j in range(d):
            row_h, predicted = h[j], ZERO
            for r in range(BLOCK_ROWS):
                predicted += row_h[r] * share[r]
            sums[2, j] += predicted
        for r in range(count):
            sums[0, label[r]] += h[label[r], r] * share[r]
            sums[1, label[r]] += weight[r]
        for r in range(count):
            stats[i + r, 0], stats[i + r, 1], stats[i + r, 2] = largest[r], e_second[r], total[r]
            stats[i + r, 3], top_two[i + r, 0], top_two[i + r, 1] = total_h[r], first[r], second[r]
    return losses


@loop()
def block_backward(
    z: Floats,
    y: Labels,
    w: Floats,
    points: Floats,
    start: int,
    stop: int,
    stats: Floats,
    top_two: Ints,
    by_tp: Floats,
    by_predicted: Floats,
    by_losses: F,
    out: Floats,
) -> None:
    """As `row_loops.backward`."""
    a, b, low, cut, c, smoothing = points[0], points[1], points[2], points[3], points[4], points[5]
    d = z.shape[1]
    rows = np.empty((d, BLOCK_ROWS), np.float32)
    ints, s = np.empty((3, BLOCK_ROWS), np.int32), np.ones((19, BLOCK_ROWS), np.float32)
    label, first, second = ints[0], ints[1], ints[2]
    weight, largest, scale, total, total_h = s[0], s[1], s[2], s[3], s[4]
    e_second, dot_h, dot_scaled, sum_scaled, e_label = s[5], s[6], s[7], s[8], s[9]
    at_first, at_label, share, mean, factor = s[10], s[11], s[12], s[13], s[14]
    in_first, in_second, in_label, spread = s[15], s[16], s[17], s[18]
    for i in range(start, stop, BLOCK_ROWS):
        count = min(BLOCK_ROWS, stop - i)
        load_block(z, y, w, i, count, rows, label, weight)
        for r in range(count):
            largest[r], e_second[r], total[r] = stats[i + r, 0], stats[i + r, 1], stats[i + r, 2]
            total_h[r], first[r], second[r] = stats[i + r, 3], top_two[i + r, 0], top_two[i + r, 1]
        for r in range(count, BLOCK_ROWS):
            largest[r], first[r], second[r] = ZERO, INT(0), INT(1)
        for r in range(BLOCK_ROWS):
            scale[r] = TWO / (ONE + e_second[r])
            dot_h[r], dot_scaled[r], sum_scaled[r] = ZERO, ZERO, ZERO
        for j in range(d):
            row, slope_predicted = rows[j], by_predicted[j]
            for r in range(BLOCK_ROWS):
                e = exp(row[r] - largest[r])
                row[r] = e
                x = e * scale[r]
                x = ONE if x > ONE else x
                scaled = b * x if x >= cut else a * x
                value = HALF + b * (x - ONE) if x >= cut else a * x
                dot_h[r] += value * slope_predicted
                dot_scaled[r] += scaled * slope_predicted
                sum_scaled[r] += scaled
        for r in range(BLOCK_ROWS):
            at_first[r], at_label[r], e_label[r] = by_predicted[first[r]], by_tp[label[r]], rows[label[r], r]
        for r in range(BLOCK_ROWS):
            p = ONE / total[r]
            tau = (ONE + e_second[r]) * HALF * p
            gap = ONE - c * tau
            loss = low * (ONE - p) / gap
            over = p / tau
            is_above = p > c * tau
            value = ONE - loss if is_above else HALF + b * (over - ONE)
            top_slope = low / gap if is_above else b / tau
            by_tau = -c * loss / gap if is_above else -b * over / tau
            x = e_label[r] * scale[r]
            in_middle = x >= cut
            is_first = label[r] == first[r]
            label_scaled = b * x if in_middle else a * x
            label_h = value if is_first else (HALF + b * (x - ONE) if in_middle else a * x)
            # The sweep treated the largest entry as if it were at tau, with h = 1/2 and p h' = b.
            center = (dot_h[r] + (value - HALF) * at_first[r] + label_h * at_label[r]) / total_h[r]
            part = weight[r] / total_h[r]
            entropy = by_losses * weight[r]
            rest = dot_scaled[r] - b * at_first[r] - center * (sum_scaled[r] - b)
            rest += ZERO if is_first else at_label[r] * label_scaled
            by_top = at_first[r] - center + (at_label[r] if is_first else ZERO)
            in_top = part * by_top * p * top_slope
            through_tau = part * by_top * by_tau
            half = HALF * (through_tau - part * rest / tau)
            even = entropy * smoothing / F(d)
            slope = (entropy - in_top - tau * through_tau) * p
            share[r], mean[r], factor[r], spread[r] = part, center, slope, even
            in_first[r] = in_top + slope + half * p - even
            in_second[r] = half * e_second[r] * p
            in_label[r] = (ZERO if is_first else part * at_label[r] * label_scaled) - entropy * (ONE - smoothing)
        for j in range(d):
            row, slope_predicted = rows[j], by_predicted[j]
            for r in range(BLOCK_ROWS):
                e = row[r]
                x = e * scale[r]
                scaled = b * x if x >= cut else a * x
                row[r] = share[r] * (slope_predicted - mean[r]) * scaled + e * factor[r] - spread[r]
        for r in range(count):
            rows[first[r], r] = in_first[r]
            rows[second[r], r] += in_second[r]
            rows[label[r], r] += in_label[r]
        for j in range(d):
            for r in range(count):
                out[i + r, j] = rows[j, r] if weight[r] != ZERO else ZERO
