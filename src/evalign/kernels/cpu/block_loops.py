"""Compiled loops over blocks of multiclass rows: soft counts and cross-entropy forward, dL/dz backward.

They take rows (M, C) of few classes, and images (N, C, S), which they read in place: a row of few classes does not fill
a vector register, so a block has the classes in the outer loop, the rows in the inner one, and selections in place of
branches. Labels are whole numbers, or `shares` of every class, shaped like the logits: of the two, one is empty.

With e_j = exp(z_j - max z), p / tau = 2 e_j / (1 + e_second): below c tau the step needs no sum of exponentials, so
one sweep gives this sum, the sum of h and the cross-entropy (formulas: `kernels.reference`). Nothing is saved for the
backward pass, which derives a row's sums again. The largest entry is where e = 1, and the second largest where
e = e_second; entries that tie share what goes through the threshold.
"""

import numpy as np
from numpy.typing import NDArray

from evalign.kernels.cpu.compilation import loop
from evalign.kernels.cpu.elementary import HALF, ONE, ZERO, exp, log

F = np.float32
TWO = F(2)
MINUS = F(-np.inf)
ROWS = 128  # of a block: 19 classes take a third of the L1 cache
Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
Labels = NDArray[np.int64]
Batch = tuple[Floats, Labels, Floats, Floats]  # logits, labels, weights, shares
By = tuple[Floats, Floats, F]  # dL by tp, by predicted, by the sum of cross-entropies


@loop()
def load_block(z: Floats, image: int, place: int, count: int, weight: Floats, x: Floats) -> None:
    """Copy a block to x (C, ROWS). Rows of weight 0, which may hold nan, and those past the end become zeros."""
    if z.ndim == 3:
        for j in range(z.shape[1]):
            source, row = z[image, j, place : place + count], x[j]
            for r in range(count):
                value = source[r]  # read before it is chosen: a branch around a load is not vectorised
                row[r] = value if weight[r] != ZERO else ZERO
    else:
        for r in range(count):
            logits, counts = z[place + r], weight[r] != ZERO
            for j in range(z.shape[1]):
                x[j, r] = logits[j] if counts else ZERO
    for j in range(z.shape[1]):
        for r in range(count, ROWS):
            x[j, r] = ZERO


@loop()
def store_block(x: Floats, image: int, place: int, count: int, weight: Floats, out: Floats) -> None:
    """The reverse of `load_block`."""
    if out.ndim == 3:
        for j in range(out.shape[1]):
            into, row = out[image, j, place : place + count], x[j]
            for r in range(count):
                value = row[r]
                into[r] = value if weight[r] != ZERO else ZERO
    else:
        for r in range(count):
            gradient, counts = out[place + r], weight[r] != ZERO
            for j in range(out.shape[1]):
                gradient[j] = x[j, r] if counts else ZERO


@loop()
def load_labels(
    y: Labels, w: Floats, shares: Floats, image: int, place: int, at: int, count: int, label: Labels, weight: Floats,
    part: Floats,
) -> None:  # fmt: skip
    """Labels and weights of a block; of shares, their part of the row to `part` (C, ROWS) and its mass as weight."""
    weights = w[at : at + count]
    for r in range(count):
        weight[r] = weights[r]
    for r in range(count, ROWS):
        weight[r], label[r] = ZERO, 0
    if shares.size == 0:
        labels = y[at : at + count]
        for r in range(count):
            label[r] = labels[r]
        return
    load_block(shares, image, place, count, weight, part)
    mass = np.zeros(ROWS, np.float32)
    for j in range(part.shape[0]):
        row = part[j]
        for r in range(ROWS):
            mass[r] += row[r]
    for r in range(ROWS):
        weight[r] *= mass[r]
        mass[r] = ONE / mass[r] if mass[r] != ZERO else ZERO
    for j in range(part.shape[0]):
        row = part[j]
        for r in range(ROWS):
            row[r] *= mass[r]


@loop()
def two_largest(x: Floats, largest: Floats, runner_up: Floats) -> None:
    for r in range(ROWS):
        largest[r], runner_up[r] = x[0, r], MINUS
    for j in range(1, x.shape[0]):
        row = x[j]
        for r in range(ROWS):
            value, top, below = row[r], largest[r], runner_up[r]
            smaller = top if value > top else value
            runner_up[r] = smaller if smaller > below else below
            largest[r] = value if value > top else top


@loop()
def expected_logits(x: Floats, label: Labels, part: Floats, largest: Floats, smoothing: F, target: Floats) -> None:
    """The logit of the label less the largest, the mean of them by shares, or of smoothed labels."""
    if part.size == 0:
        for r in range(ROWS):
            target[r] = (ONE - smoothing) * (x[label[r], r] - largest[r])
    else:
        for r in range(ROWS):
            target[r] = ZERO
        for j in range(x.shape[0]):
            row, own = x[j], part[j]
            for r in range(ROWS):
                target[r] += (ONE - smoothing) * own[r] * (row[r] - largest[r])
    if smoothing != ZERO:
        for j in range(x.shape[0]):
            row = x[j]
            for r in range(ROWS):
                target[r] += smoothing / F(x.shape[0]) * (row[r] - largest[r])


@loop()
def block_forward(batch: Batch, points: Floats, with_losses: bool, start: int, stop: int, sums: Doubles) -> float:
    """Add tp, actual, predicted of rows start to stop to `sums` (3, C); return the sum of their cross-entropies."""
    z, y, w, shares = batch
    a, b, low, cut, c, smoothing = points[0], points[1], points[2], points[3], points[4], points[5]
    d, size = z.shape[1], z.size // z.shape[1] if z.ndim == 2 else z.shape[z.ndim - 1]
    x, label = np.empty((d, ROWS), np.float32), np.zeros(ROWS, np.int64)
    part = np.empty((d if shares.size else 0, ROWS), np.float32)
    s = np.empty((8, ROWS), np.float32)
    weight, largest, e_second, scale, total, total_h, target, share = s[0], s[1], s[2], s[3], s[4], s[5], s[6], s[7]
    losses = 0.0
    at = start
    while at < stop:
        image, place = at // size, at % size
        count = min(ROWS, stop - at, size - place)
        load_labels(y, w, shares, image, place, at, count, label, weight, part)
        load_block(z, image, place, count, weight, x)
        at += count
        two_largest(x, largest, e_second)
        for r in range(ROWS):
            e_second[r] = exp(e_second[r] - largest[r])
            scale[r] = TWO / (ONE + e_second[r])
            total[r], total_h[r] = ZERO, ZERO
        if with_losses:
            expected_logits(x, label, part, largest, smoothing, target)
        for j in range(d):
            row = x[j]
            for r in range(ROWS):
                e = exp(row[r] - largest[r])
                over = e * scale[r]
                total[r] += e
                total_h[r] += HALF + b * (over - ONE) if over >= cut else a * over
                row[r] = e
        for r in range(ROWS):
            p = ONE / total[r]
            tau = (ONE + e_second[r]) * HALF * p
            line = HALF + b * (scale[r] - ONE)  # through tau, on which the sweep had the top: p / tau is the scale
            above = ONE - low * (ONE - p) / (ONE - c * tau)
            value = above if p > c * tau else line
            total_h[r] += value - line
            share[r] = weight[r] / total_h[r]
            largest[r] = value * share[r]
        if with_losses:
            block = ZERO
            for r in range(ROWS):
                block += weight[r] * (log(total[r]) - target[r])
            losses += float(block)
        for j in range(d):
            row, predicted = x[j], ZERO
            for r in range(ROWS):
                over = row[r] * scale[r]
                h = share[r] * (HALF + b * (over - ONE) if over >= cut else a * over)
                at_top = largest[r]
                h = at_top if row[r] == ONE else h
                predicted += h
                row[r] = h
            sums[2, j] += predicted
        if shares.size == 0:
            for r in range(count):
                sums[0, label[r]] += x[label[r], r]
                sums[1, label[r]] += weight[r]
        else:
            for j in range(d):
                row, own, tp, actual = x[j], part[j], ZERO, ZERO
                for r in range(ROWS):
                    tp += row[r] * own[r]
                    actual += weight[r] * own[r]
                sums[0, j] += tp
                sums[1, j] += actual
    return losses


@loop()
def add_shares(
    row: Floats, own: Floats, by_tp: F, scale: Floats, a: F, b: F, cut: F, dot_scaled: Floats, dot_rest: Floats,
    tops: Floats,
) -> None:  # fmt: skip
    """Add what the shares of a class have of the slopes to the sums of `block_backward`."""
    for r in range(ROWS):
        over, slope = row[r] * scale[r], by_tp * own[r]
        dot_scaled[r] += slope * (b * over if over >= cut else a * over)
        dot_rest[r] += slope * (HALF - b) if over >= cut else ZERO
    for r in range(ROWS):
        tops[r] += by_tp * own[r] if row[r] == ONE else ZERO


@loop()
def slopes_of_shares(
    row: Floats, own: Floats, by_tp: F, scale: Floats, a: F, b: F, cut: F, ratio: Floats, top_scaled: Floats,
    entropy: Floats,
) -> None:  # fmt: skip
    """dL/dz through the shares of a class, in their place."""
    for r in range(ROWS):
        over, at_top = row[r] * scale[r], top_scaled[r]
        scaled = b * over if over >= cut else a * over
        scaled = at_top if row[r] == ONE else scaled
        own[r] *= by_tp * ratio[r] * scaled + entropy[r]


@loop()
def block_backward(batch: Batch, points: Floats, by: By, start: int, stop: int, out: Floats) -> None:
    """dL/dz of rows start to stop, to `out`, shaped like the logits."""
    z, y, w, shares = batch
    by_tp, by_predicted, by_losses = by
    a, b, low, cut, c, smoothing = points[0], points[1], points[2], points[3], points[4], points[5]
    d, size = z.shape[1], z.size // z.shape[1] if z.ndim == 2 else z.shape[z.ndim - 1]
    x, label = np.empty((d, ROWS), np.float32), np.zeros(ROWS, np.int64)
    part = np.empty((d if shares.size else 0, ROWS), np.float32)
    s = np.empty((17, ROWS), np.float32)
    weight, largest, e_second, scale, total, sum_rest = s[0], s[1], s[2], s[3], s[4], s[5]
    dot_rest, dot_scaled, sum_scaled, tops, seconds, at_label = s[6], s[7], s[8], s[9], s[10], s[11]
    e_label, mean, factor, at_top, at_second = s[12], s[13], s[14], s[15], s[16]
    at = start
    while at < stop:
        image, place = at // size, at % size
        count = min(ROWS, stop - at, size - place)
        load_labels(y, w, shares, image, place, at, count, label, weight, part)
        load_block(z, image, place, count, weight, x)
        at += count
        two_largest(x, largest, e_second)
        for r in range(ROWS):
            e_second[r] = exp(e_second[r] - largest[r])
            scale[r] = TWO / (ONE + e_second[r])
            total[r], sum_rest[r], dot_rest[r], dot_scaled[r] = ZERO, ZERO, ZERO, ZERO
            sum_scaled[r], tops[r], seconds[r] = ZERO, ZERO, ZERO
        for j in range(d):
            row, slope = x[j], by_predicted[j]
            for r in range(ROWS):
                e = exp(row[r] - largest[r])
                row[r] = e
                total[r] += e
                tops[r] += slope if e == ONE else ZERO
            # One loop with all seven sums is not vectorised: LLVM gives up on that many pointers.
            for r in range(ROWS):
                over = row[r] * scale[r]
                scaled = b * over if over >= cut else a * over
                sum_scaled[r] += scaled
                dot_scaled[r] += scaled * slope
                seconds[r] += ONE if row[r] == e_second[r] else ZERO
            for r in range(ROWS):
                rest = HALF - b if row[r] * scale[r] >= cut else ZERO
                sum_rest[r] += rest
                dot_rest[r] += rest * slope
            if shares.size > 0:
                add_shares(row, part[j], by_tp[j], scale, a, b, cut, dot_scaled, dot_rest, tops)
        if shares.size == 0:
            for r in range(ROWS):
                at_label[r], e_label[r] = by_tp[label[r]], x[label[r], r]
        else:  # the sums have them
            for r in range(ROWS):
                at_label[r], e_label[r] = ZERO, ZERO
        for r in range(ROWS):
            p, over, over_tau = ONE / total[r], scale[r], scale[r] * total[r]  # p / tau, 1 / tau
            tau = (ONE + e_second[r]) * HALF * p
            over_gap = ONE / (ONE - c * tau)
            loss = low * (ONE - p) * over_gap
            beyond = p > c * tau
            value = ONE - loss if beyond else HALF + b * (over - ONE)
            top_slope = low * over_gap if beyond else b * over_tau
            by_tau = -c * loss * over_gap if beyond else -b * over * over_tau
            line = b * over
            total_h = sum_scaled[r] + sum_rest[r] - (line + (HALF - b)) + value
            x_label = e_label[r] * scale[r]
            label_scaled = b * x_label if x_label >= cut else a * x_label
            is_top = e_label[r] == ONE
            label_h = value if is_top else label_scaled + (HALF - b if x_label >= cut else ZERO)
            center = dot_rest[r] + dot_scaled[r] + (value - (line + (HALF - b))) * tops[r] + label_h * at_label[r]
            over_total = ONE / total_h
            center *= over_total
            ratio = weight[r] * over_total
            entropy = by_losses * weight[r]
            spread = entropy * smoothing / F(d)
            rest = dot_scaled[r] - line * tops[r] - center * (sum_scaled[r] - line)
            rest += ZERO if is_top else at_label[r] * label_scaled
            by_top = tops[r] - center + (at_label[r] if is_top else ZERO)
            through_tau = ratio * by_top * by_tau
            half = HALF * p * (through_tau - ratio * rest * over_tau)
            top_scaled = p * top_slope
            slope_e = (entropy - ratio * by_top * top_scaled - tau * through_tau) * p
            # What remains of the sums is reused for the second sweep.
            total[r], mean[r], factor[r], sum_rest[r] = ratio, ratio * center, slope_e, -spread
            dot_rest[r], at_top[r] = top_scaled, half - spread
            both = TWO * half if e_second[r] == ONE else half * e_second[r]
            at_second[r] = both / seconds[r] - spread
            tops[r] = ratio * at_label[r] * (top_scaled if is_top else label_scaled) - entropy * (ONE - smoothing)
        for j in range(d):
            row, slope = x[j], by_predicted[j]
            if shares.size > 0:
                slopes_of_shares(row, part[j], by_tp[j], scale, a, b, cut, total, dot_rest, tops)
            for r in range(ROWS):
                e, top_scaled = row[r], dot_rest[r]
                over = e * scale[r]
                scaled = b * over if over >= cut else a * over
                scaled = top_scaled if e == ONE else scaled
                dot_scaled[r] = (slope * total[r] - mean[r]) * scaled + e * factor[r]
            for r in range(ROWS):
                e, first, second, offset = row[r], at_top[r], at_second[r], sum_rest[r]
                offset = first if e == ONE else offset
                offset = second if e == e_second[r] else offset
                row[r] = dot_scaled[r] + offset
        if shares.size == 0:
            for r in range(count):
                x[label[r], r] += tops[r]
        else:
            for j in range(d):
                row, own = x[j], part[j]
                for r in range(ROWS):
                    row[r] += own[r]
        store_block(x, image, place, count, weight, out)
