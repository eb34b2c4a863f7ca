"""Compiled loops over images (N, C, S), read in place: a block of neighbouring pixels at a time, class by class.

As in the GPU kernels, nothing is saved for the backward pass: it derives a pixel's sums again. A pixel's largest entry
is where e = 1, and its second largest where e = e_second; entries that tie share what goes through the threshold.
Formulas: `kernels.reference`.
"""

import numpy as np
from numpy.typing import NDArray

from evalign.kernels.cpu.elementary import HALF, ONE, ZERO, exp, log
from evalign.kernels.cpu.jit import loop

F = np.float32
TWO = F(2)
LOWEST = F(-np.inf)
PIXELS = 128  # of a block: 19 classes take a third of the L1 cache
Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
Labels = NDArray[np.int64]


@loop()
def load_pixels(
    z: Floats, y: Labels, w: Floats, image: int, pixel: int, count: int, x: Floats, label: Labels, weight: Floats
) -> None:
    """Copy a block to x (C, PIXELS). Ignored pixels, which may hold nan, and those past the end become zeros."""
    begin = image * z.shape[2] + pixel
    weights, labels = w[begin : begin + count], y[begin : begin + count]
    for r in range(count):
        weight[r], label[r] = weights[r], labels[r]
    for r in range(count, PIXELS):
        weight[r], label[r] = ZERO, 0
    for j in range(z.shape[1]):
        source, row = z[image, j, pixel : pixel + count], x[j]
        for r in range(count):
            value = source[r]  # read before it is chosen: a branch around a load is not vectorised
            row[r] = value if weight[r] != ZERO else ZERO
        for r in range(count, PIXELS):
            row[r] = ZERO


@loop()
def two_largest(x: Floats, largest: Floats, runner_up: Floats) -> None:
    for r in range(PIXELS):
        largest[r], runner_up[r] = x[0, r], LOWEST
    for j in range(1, x.shape[0]):
        row = x[j]
        for r in range(PIXELS):
            value, top, below = row[r], largest[r], runner_up[r]
            smaller = top if value > top else value
            runner_up[r] = smaller if smaller > below else below
            largest[r] = value if value > top else top


@loop()
def dense_forward(
    z: Floats, y: Labels, w: Floats, points: Floats, start: int, stop: int, with_losses: bool, sums: Doubles
) -> float:
    """Add tp, actual, predicted of pixels start to stop to `sums` (3, C); return the sum of their cross-entropies."""
    a, b, low, cut, c, smoothing = points[0], points[1], points[2], points[3], points[4], points[5]
    d, pixels = z.shape[1], z.shape[2]
    x, label = np.empty((d, PIXELS), np.float32), np.empty(PIXELS, np.int64)
    s = np.empty((8, PIXELS), np.float32)
    weight, largest, e_second, scale, total, total_h, target, share = s[0], s[1], s[2], s[3], s[4], s[5], s[6], s[7]
    losses = 0.0
    at = start
    while at < stop:
        image, pixel = at // pixels, at % pixels
        count = min(PIXELS, stop - at, pixels - pixel)
        at += count
        load_pixels(z, y, w, image, pixel, count, x, label, weight)
        two_largest(x, largest, e_second)
        for r in range(PIXELS):
            e_second[r] = exp(e_second[r] - largest[r])
            scale[r] = TWO / (ONE + e_second[r])
            total[r], total_h[r] = ZERO, ZERO
        if with_losses:
            for r in range(PIXELS):
                target[r] = (ONE - smoothing) * (x[label[r], r] - largest[r])
            if smoothing != ZERO:
                for j in range(d):
                    row = x[j]
                    for r in range(PIXELS):
                        target[r] += smoothing / F(d) * (row[r] - largest[r])
        for j in range(d):
            row = x[j]
            for r in range(PIXELS):
                e = exp(row[r] - largest[r])
                over = e * scale[r]
                total[r] += e
                total_h[r] += HALF + b * (over - ONE) if over >= cut else a * over
                row[r] = e
        for r in range(PIXELS):
            p = ONE / total[r]
            tau = (ONE + e_second[r]) * HALF * p
            above = ONE - low * (ONE - p) / (ONE - c * tau)
            value = above if p > c * tau else HALF + b * (p / tau - ONE)
            total_h[r] += value - (HALF + b * (scale[r] - ONE))  # the sweep had the top on the line through tau
            share[r] = weight[r] / total_h[r]
            largest[r] = value * share[r]
        if with_losses:
            block = ZERO
            for r in range(PIXELS):
                block += weight[r] * (log(total[r]) - target[r])
            losses += float(block)
        for j in range(d):
            row, predicted = x[j], ZERO
            for r in range(PIXELS):
                over = row[r] * scale[r]
                h = share[r] * (HALF + b * (over - ONE) if over >= cut else a * over)
                at_top = largest[r]
                h = at_top if row[r] == ONE else h
                predicted += h
                row[r] = h
            sums[2, j] += predicted
        for r in range(count):
            sums[0, label[r]] += x[label[r], r]
            sums[1, label[r]] += weight[r]
    return losses


@loop()
def dense_backward(
    z: Floats,
    y: Labels,
    w: Floats,
    points: Floats,
    start: int,
    stop: int,
    by_tp: Floats,
    by_predicted: Floats,
    by_losses: F,
    out: Floats,
) -> None:
    """dL/dz of pixels start to stop, to `out` (N, C, S)."""
    a, b, low, cut, c, smoothing = points[0], points[1], points[2], points[3], points[4], points[5]
    d, pixels = z.shape[1], z.shape[2]
    x, label = np.empty((d, PIXELS), np.float32), np.empty(PIXELS, np.int64)
    s = np.empty((17, PIXELS), np.float32)
    weight, largest, e_second, scale, total, sum_rest = s[0], s[1], s[2], s[3], s[4], s[5]
    dot_rest, dot_scaled, sum_scaled, tops, seconds, at_label = s[6], s[7], s[8], s[9], s[10], s[11]
    e_label, mean, factor, at_top, at_second = s[12], s[13], s[14], s[15], s[16]
    at = start
    while at < stop:
        image, pixel = at // pixels, at % pixels
        count = min(PIXELS, stop - at, pixels - pixel)
        at += count
        load_pixels(z, y, w, image, pixel, count, x, label, weight)
        two_largest(x, largest, e_second)
        for r in range(PIXELS):
            e_second[r] = exp(e_second[r] - largest[r])
            scale[r] = TWO / (ONE + e_second[r])
            total[r], sum_rest[r], dot_rest[r], dot_scaled[r] = ZERO, ZERO, ZERO, ZERO
            sum_scaled[r], tops[r], seconds[r] = ZERO, ZERO, ZERO
        for j in range(d):
            row, slope = x[j], by_predicted[j]
            for r in range(PIXELS):
                e = exp(row[r] - largest[r])
                row[r] = e
                total[r] += e
                tops[r] += slope if e == ONE else ZERO
            # One loop with all seven sums is not vectorised: LLVM gives up on that many pointers.
            for r in range(PIXELS):
                over = row[r] * scale[r]
                part = b * over if over >= cut else a * over
                sum_scaled[r] += part
                dot_scaled[r] += part * slope
                seconds[r] += ONE if row[r] == e_second[r] else ZERO
            for r in range(PIXELS):
                rest = HALF - b if row[r] * scale[r] >= cut else ZERO
                sum_rest[r] += rest
                dot_rest[r] += rest * slope
        for r in range(PIXELS):
            at_label[r], e_label[r] = by_tp[label[r]], x[label[r], r]
        for r in range(PIXELS):
            p = ONE / total[r]
            tau = (ONE + e_second[r]) * HALF * p
            gap = ONE - c * tau
            loss, over = low * (ONE - p) / gap, p / tau
            beyond = p > c * tau
            value = ONE - loss if beyond else HALF + b * (over - ONE)
            top_slope = low / gap if beyond else b / tau
            by_tau = -c * loss / gap if beyond else -b * over / tau
            line = b * scale[r]
            total_h = sum_scaled[r] + sum_rest[r] - (line + (HALF - b)) + value
            x_label = e_label[r] * scale[r]
            label_scaled = b * x_label if x_label >= cut else a * x_label
            is_top = e_label[r] == ONE
            label_h = value if is_top else label_scaled + (HALF - b if x_label >= cut else ZERO)
            center = dot_rest[r] + dot_scaled[r] + (value - (line + (HALF - b))) * tops[r] + label_h * at_label[r]
            center /= total_h
            part = weight[r] / total_h
            entropy = by_losses * weight[r]
            spread = entropy * smoothing / F(d)
            rest = dot_scaled[r] - line * tops[r] - center * (sum_scaled[r] - line)
            rest += ZERO if is_top else at_label[r] * label_scaled
            by_top = tops[r] - center + (at_label[r] if is_top else ZERO)
            through_tau = part * by_top * by_tau
            half = HALF * p * (through_tau - part * rest / tau)
            top_scaled = p * top_slope
            slope = (entropy - part * by_top * top_scaled - tau * through_tau) * p
            # What remains of the sums is reused for the second sweep.
            total[r], mean[r], factor[r], sum_rest[r] = part, part * center, slope, -spread
            dot_rest[r], at_top[r] = top_scaled, half - spread
            both = TWO * half if e_second[r] == ONE else half * e_second[r]
            at_second[r] = both / seconds[r] - spread
            tops[r] = part * at_label[r] * (top_scaled if is_top else label_scaled) - entropy * (ONE - smoothing)
        for j in range(d):
            row, slope, into = x[j], by_predicted[j], out[image, j, pixel : pixel + count]
            for r in range(PIXELS):
                e, top_scaled = row[r], dot_rest[r]
                over = e * scale[r]
                part = b * over if over >= cut else a * over
                part = top_scaled if e == ONE else part
                dot_scaled[r] = (slope * total[r] - mean[r]) * part + e * factor[r]
            for r in range(count):
                e, first, second, place = row[r], at_top[r], at_second[r], sum_rest[r]
                place = first if e == ONE else place
                place = second if e == e_second[r] else place
                found = dot_scaled[r] + place
                into[r] = found if weight[r] != ZERO else ZERO
        for r in range(count):
            if weight[r] != ZERO:
                out[image, label[r], pixel + r] += tops[r]
