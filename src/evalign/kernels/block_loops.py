"""The loops behind `compiled_rows` for few classes: a block of rows at a time, all of its rows in step.

`row_loops` sweeps along a row, which pays where a row is long. Of few classes a row has too few entries to fill a
vector and its own overhead weighs more than they do, so here the sweep over classes is the outer loop and the rows of a
block the inner one: the same formulas, with a choice in place of every branch.
"""

import numpy as np
from numpy.typing import NDArray

from evalign.kernels.compiled import loop
from evalign.kernels.exponential import HALF, ONE, ZERO, exp, log

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
