"""The loops behind `compiled_rows` for few classes: a block of rows at a time, all of its rows in step.

`row_loops` sweeps along a row, which pays where a row is long. Of few classes a row has too few entries to fill a
vector and its own overhead weighs more than they do, so here the sweep over classes is the outer loop and the rows of a
block the inner one: the same formulas, with a choice in place of every branch.
"""

import numpy as np
from numpy.typing import NDArray

from evalign.kernels.cpu.exponential import HALF, ONE, ZERO, exp, log
from evalign.kernels.cpu.jit import loop

F = np.float32
INT = np.int32
TWO = F(2)
ROWS = 64  # of a block: what it needs of ten classes stays in the first cache
Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
Ints = NDArray[np.int32]
Labels = NDArray[np.int64]


@loop()
def load(z: Floats, y: Labels, w: Floats, i: int, count: int, rows: Floats, label: Ints, weight: Floats) -> None:
    """A block by class (C, ROWS). Rows that do not count, and those past the end, are zeros of weight 0: whatever their
    numbers are, nan too, they shall leave no trace."""
    for r in range(count):
        weight[r], label[r] = w[i + r], INT(y[i + r])
    for r in range(count, ROWS):
        weight[r], label[r] = ZERO, INT(0)
    d = z.shape[1]
    if z.strides[0] < z.strides[1]:  # along whatever lies side by side
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
    for r in range(count, ROWS):
        for j in range(d):
            rows[j, r] = ZERO


@loop()
def find_two(rows: Floats, largest: Floats, next_one: Floats, first: Ints, second: Ints) -> None:
    """The two largest entries of every row and their places; of equal ones the earlier place is the larger."""
    start, other = rows[0], rows[1]
    for r in range(ROWS):
        swapped = other[r] > start[r]
        largest[r] = other[r] if swapped else start[r]
        next_one[r] = start[r] if swapped else other[r]
        first[r] = INT(1) if swapped else INT(0)
        second[r] = INT(0) if swapped else INT(1)
    for j in range(2, rows.shape[0]):
        row = rows[j]
        for r in range(ROWS):
            value, top, below, at_top = row[r], largest[r], next_one[r], first[r]
            above, between = value > top, value > below
            largest[r] = value if above else top
            first[r] = INT(j) if above else at_top
            next_one[r] = top if above else (value if between else below)
            second[r] = at_top if above else (INT(j) if between else second[r])


@loop()
def forward(
    z: Floats,
    y: Labels,
    w: Floats,
    points: Floats,
    start: int,
    stop: int,
    stats: Floats,
    places: Ints,
    sums: Doubles,
) -> float:
    """As `row_loops.forward`."""
    a, b, low, cut, c, smoothing = points[0], points[1], points[2], points[3], points[4], points[5]
    d = z.shape[1]
    rows, h = np.empty((d, ROWS), np.float32), np.empty((d, ROWS), np.float32)
    ints, s = np.empty((3, ROWS), np.int32), np.empty((8, ROWS), np.float32)
    label, first, second = ints[0], ints[1], ints[2]
    weight, largest, e_second, scale, total, total_h, target, share = s[0], s[1], s[2], s[3], s[4], s[5], s[6], s[7]
    losses = 0.0
    for i in range(start, stop, ROWS):
        count = min(ROWS, stop - i)
        load(z, y, w, i, count, rows, label, weight)
        find_two(rows, largest, e_second, first, second)
        for r in range(ROWS):
            e_second[r] = exp(e_second[r] - largest[r])
            scale[r] = TWO / (ONE + e_second[r])
            total[r], total_h[r] = ZERO, ZERO
        for r in range(ROWS):
            target[r] = (ONE - smoothing) * (rows[label[r], r] - largest[r])
        if smoothing != ZERO:
            for j in range(d):
                row = rows[j]
                for r in range(ROWS):
                    target[r] += smoothing / F(d) * (row[r] - largest[r])
        for j in range(d):
            row, row_h = rows[j], h[j]
            for r in range(ROWS):
                e = exp(row[r] - largest[r])
                x = e * scale[r]
                x = ONE if x > ONE else x
                value = HALF + b * (x - ONE) if x >= cut else a * x
                total[r] += e
                total_h[r] += value
                row_h[r] = value
        for r in range(ROWS):
            p = ONE / total[r]
            tau = (ONE + e_second[r]) * HALF * p
            above = ONE - low * (ONE - p) / (ONE - c * tau)
            at_first = above if p > c * tau else HALF + b * (p / tau - ONE)
            total_h[r] += at_first - HALF  # the sweep took the largest entry for one at tau
            share[r] = weight[r] / total_h[r]
            target[r] = weight[r] * (log(total[r]) - target[r])
            scale[r] = at_first
        block = ZERO
        for r in range(ROWS):
            h[first[r], r] = scale[r]
            block += target[r]
        losses += float(block)
        for j in range(d):
            row_h, predicted = h[j], ZERO
            for r in range(ROWS):
                predicted += row_h[r] * share[r]
            sums[2, j] += predicted
        for r in range(count):
            sums[0, label[r]] += h[label[r], r] * share[r]
            sums[1, label[r]] += weight[r]
        for r in range(count):
            stats[i + r, 0], stats[i + r, 1], stats[i + r, 2] = largest[r], e_second[r], total[r]
            stats[i + r, 3], places[i + r, 0], places[i + r, 1] = total_h[r], first[r], second[r]
    return losses


@loop()
def backward(
    z: Floats,
    y: Labels,
    w: Floats,
    points: Floats,
    start: int,
    stop: int,
    stats: Floats,
    places: Ints,
    by_tp: Floats,
    by_predicted: Floats,
    by_losses: F,
    out: Floats,
) -> None:
    """As `row_loops.backward`."""
    a, b, low, cut, c, smoothing = points[0], points[1], points[2], points[3], points[4], points[5]
    d = z.shape[1]
    rows = np.empty((d, ROWS), np.float32)
    ints, s = np.empty((3, ROWS), np.int32), np.ones((19, ROWS), np.float32)
    label, first, second = ints[0], ints[1], ints[2]
    weight, largest, scale, total, total_h = s[0], s[1], s[2], s[3], s[4]
    e_second, dot_h, dot_scaled, sum_scaled, e_label = s[5], s[6], s[7], s[8], s[9]
    at_first, at_label, share, mean, factor = s[10], s[11], s[12], s[13], s[14]
    in_first, in_second, in_label, spread = s[15], s[16], s[17], s[18]
    for i in range(start, stop, ROWS):
        count = min(ROWS, stop - i)
        load(z, y, w, i, count, rows, label, weight)
        for r in range(count):
            largest[r], e_second[r], total[r] = stats[i + r, 0], stats[i + r, 1], stats[i + r, 2]
            total_h[r], first[r], second[r] = stats[i + r, 3], places[i + r, 0], places[i + r, 1]
        for r in range(count, ROWS):
            largest[r], first[r], second[r] = ZERO, INT(0), INT(1)
        for r in range(ROWS):
            scale[r] = TWO / (ONE + e_second[r])
            dot_h[r], dot_scaled[r], sum_scaled[r] = ZERO, ZERO, ZERO
        for j in range(d):
            row, slope_predicted = rows[j], by_predicted[j]
            for r in range(ROWS):
                e = exp(row[r] - largest[r])
                row[r] = e
                x = e * scale[r]
                x = ONE if x > ONE else x
                scaled = b * x if x >= cut else a * x
                value = HALF + b * (x - ONE) if x >= cut else a * x
                dot_h[r] += value * slope_predicted
                dot_scaled[r] += scaled * slope_predicted
                sum_scaled[r] += scaled
        for r in range(ROWS):
            at_first[r], at_label[r], e_label[r] = by_predicted[first[r]], by_tp[label[r]], rows[label[r], r]
        for r in range(ROWS):
            p = ONE / total[r]
            tau = (ONE + e_second[r]) * HALF * p
            room = ONE - c * tau
            loss = low * (ONE - p) / room
            over = p / tau
            is_above = p > c * tau
            value = ONE - loss if is_above else HALF + b * (over - ONE)
            top_slope = low / room if is_above else b / tau
            by_tau = -c * loss / room if is_above else -b * over / tau
            x = e_label[r] * scale[r]
            in_middle = x >= cut
            is_first = label[r] == first[r]
            label_scaled = b * x if in_middle else a * x
            label_h = value if is_first else (HALF + b * (x - ONE) if in_middle else a * x)
            # The sweep took the largest entry for one at tau, with h = 1/2 and p h' = b.
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
            for r in range(ROWS):
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
