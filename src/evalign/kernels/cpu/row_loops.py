"""The loops behind `compiled_rows`: one row at a time, which stays in the cache between the sweeps over it.

With e_j = exp(z_j - max z), p / tau = 2 e_j / (1 + e_second): below c tau the step needs no sum of exponentials, so
that this sum, the sum of h and the cross-entropy come out of one sweep.
"""

import numpy as np
from numpy.typing import NDArray

from evalign.kernels.cpu.exponential import HALF, ONE, ZERO, exp
from evalign.kernels.cpu.jit import loop

F = np.float32
INT = np.int32
BLOCK = 128  # rows whose float32 sums are added before they join a float64 one
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
        room = ONE - c * tau
        loss = low * (ONE - p) / room
        return ONE - loss, low / room, -c * loss / room
    x = p / tau
    return HALF + b * (x - ONE), b / tau, -b * x / tau


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
    """Adds tp, actual, predicted of rows start to stop to `sums` (3, C); returns their cross-entropies' sum.

    Keeps maximum, e of the second place, sum of e and sum of h in `stats` (M, 4), both places in `places` (M, 2).
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
        places[i, 0], places[i, 1] = first, second
        if (i - start) % BLOCK == BLOCK - 1:
            for j in range(d):
                sums[2, j] += column[j]
                column[j] = ZERO
    for j in range(d):
        sums[2, j] += column[j]
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
    """dL/dz of rows start to stop; see `rows` for the formulas."""
    a, b, low, cut, c, smoothing = points[0], points[1], points[2], points[3], points[4], points[5]
    d = z.shape[1]
    for i in range(start, stop):
        weight = w[i]
        if weight == ZERO:
            out[i] = ZERO
            continue
        row, gradient = z[i], out[i]
        largest, e_second, total, total_h = stats[i, 0], stats[i, 1], stats[i, 2], stats[i, 3]
        first, second, label = places[i, 0], places[i, 1], y[i]
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
        # The sweep took the largest entry for one at tau, with h = 1/2 and p h' = b.
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
