"""Compiled loops along single rows of many classes: soft counts and cross-entropy forward, dL/dz backward.

As `block_loops`, for rows that fill vector registers by themselves; what the backward pass needs of a row is saved.
"""

import numpy as np
from numpy.typing import NDArray

from evalign.kernels.cpu.block_loops import TWO, Batch, By, Doubles, F, Floats
from evalign.kernels.cpu.compilation import loop
from evalign.kernels.cpu.elementary import HALF, ONE, ZERO, exp

INT = np.int32
FLUSH_ROWS = 128  # rows summed in float32 before the sum is added to a float64 one
NONE = INT(2**31 - 1)
LOWEST = INT(-(2**31))
Ints = NDArray[np.int32]


@loop(exact=True)
def ordered(bits: INT) -> INT:
    """Bits of a float32 as an integer that is ordered like it: integer maxima compile to vector instructions."""
    return bits ^ ((bits >> INT(31)) & INT(0x7FFFFFFF))


@loop()
def first_two(bits: Ints) -> tuple[INT, INT]:
    """Indices of the two largest entries of a row, given as bits; among equal ones the first index wins."""
    top = LOWEST
    for j in range(bits.shape[0]):
        top = max(top, ordered(bits[j]))
    count, next_top = INT(0), LOWEST
    for j in range(bits.shape[0]):
        key = ordered(bits[j])
        count += INT(1) if key == top else INT(0)
        next_top = max(next_top, LOWEST if key == top else key)
    first, second = NONE, NONE
    for j in range(bits.shape[0]):
        key = ordered(bits[j])
        first = min(first, INT(j) if key == top else NONE)
        second = min(second, INT(j) if key == next_top else NONE)
    if count > INT(1):
        second = NONE
        for j in range(bits.shape[0]):
            second = min(second, INT(j) if ordered(bits[j]) == top and INT(j) > first else NONE)
    return first, second


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
def row_forward(batch: Batch, points: Floats, stats: Floats, start: int, stop: int, sums: Doubles) -> float:
    """As `block_forward`, of rows (M, C).

    Saves to `stats` (M, 7): maximum, e of the second largest entry, sum of e, sum of h, weight, and the indices of both
    entries, which float32 holds exactly up to 2^24 classes.
    """
    z, y, w, shares = batch
    a, b, low, cut, c, smoothing = points[0], points[1], points[2], points[3], points[4], points[5]
    d, bits, soft = z.shape[1], z.view(np.int32), shares.size > 0
    h, added = np.empty(d, np.float32), np.zeros((3, d), np.float32)
    by_label, labels, column = added[0], added[1], added[2]
    losses = 0.0
    for i in range(start, stop):
        weight = w[i]
        stats[i, 4] = weight
        if weight == ZERO:
            continue
        row = z[i]
        first, second = first_two(bits[i])
        largest = row[first]
        e_second = exp(row[second] - largest)
        scale = TWO / (ONE + e_second)
        total, total_h = ZERO, ZERO
        for j in range(d):
            e = exp(row[j] - largest)
            x = e * scale
            x = ONE if x > ONE else x
            value = HALF + b * (x - ONE) if x >= cut else a * x
            total += e
            total_h += value
            h[j] = value
        value = top_step(ONE / total, (ONE + e_second) / (TWO * total), low, b, c)[0]
        total_h += value - h[first]
        h[first] = value
        target = ZERO
        if soft:
            share, own, mass = weight / total_h, shares[i], ZERO
            for j in range(d):
                by_label[j] += h[j] * share * own[j]
                labels[j] += weight * own[j]
                target += own[j] * (row[j] - largest)
                mass += own[j]
            weight *= mass
            target = target / mass if mass != ZERO else ZERO
            stats[i, 4] = weight
        share = weight / total_h
        for j in range(d):
            column[j] += h[j] * share
        if not soft:
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
        stats[i, 5], stats[i, 6] = F(first), F(second)
        if (i - start) % FLUSH_ROWS == FLUSH_ROWS - 1:
            sums += added
            added[:] = ZERO
    sums += added
    return losses


@loop()
def row_backward(batch: Batch, points: Floats, by: By, stats: Floats, start: int, stop: int, out: Floats) -> None:
    """As `block_backward`, of rows (M, C)."""
    z, y, w, shares = batch
    by_tp, by_predicted, by_losses = by
    a, b, low, cut, c, smoothing = points[0], points[1], points[2], points[3], points[4], points[5]
    d, soft = z.shape[1], shares.size > 0
    slopes = by_predicted.copy()
    for i in range(start, stop):
        weight = stats[i, 4]
        if weight == ZERO:
            out[i] = ZERO
            continue
        row, gradient = z[i], out[i]
        largest, e_second, total, total_h = stats[i, 0], stats[i, 1], stats[i, 2], stats[i, 3]
        first, second = INT(stats[i, 5]), INT(stats[i, 6])
        if soft:
            own, over_mass = shares[i], w[i] / weight
            for j in range(d):
                slopes[j] = by_predicted[j] + by_tp[j] * own[j] * over_mass
        scale = TWO / (ONE + e_second)
        dot_h, dot_scaled, sum_scaled = ZERO, ZERO, ZERO
        for j in range(d):
            e = exp(row[j] - largest)
            gradient[j] = e
            x = e * scale
            x = ONE if x > ONE else x
            slope = b if x >= cut else a
            value = HALF + b * (x - ONE) if x >= cut else a * x
            dot_h += value * slopes[j]
            dot_scaled += slope * x * slopes[j]
            sum_scaled += slope * x
        p, tau = ONE / total, (ONE + e_second) / (TWO * total)
        value, top_slope, by_tau = top_step(p, tau, low, b, c)
        # The sweep treated the largest entry as if it were at tau, with h = 1/2 and p h' = b.
        at_first = slopes[first]
        dot_h += (value - HALF) * at_first
        dot_scaled -= b * at_first
        sum_scaled -= b
        label, at_label, label_scaled, label_h = INT(-1), ZERO, ZERO, ZERO
        if not soft:
            label = INT(y[i])
            x = gradient[label] * scale
            label_scaled = b * x if x >= cut else a * x
            label_h = HALF + b * (x - ONE) if x >= cut else a * x
            at_label = by_tp[label]
        if label == first:
            label_h = value
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
            gradient[j] = share * (slopes[j] - mean) * slope * x + e * factor - spread
        gradient[first] = in_top + factor + half * p - spread
        gradient[second] += half * e_second * p
        if soft:
            own, by_share = shares[i], by_losses * w[i] * (ONE - smoothing)
            for j in range(d):
                gradient[j] -= by_share * own[j]
            continue
        if label != first:
            gradient[label] += share * at_label * label_scaled
        gradient[label] -= entropy * (ONE - smoothing)
