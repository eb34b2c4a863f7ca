"""Compiled loops over blocks of multiclass rows: soft counts and cross-entropy forward, dL/dz backward.

They take rows (M, C) of few classes, and images (N, C, S), which they read in place: a row of few classes does not fill
a vector register, so a block has the classes in the outer loop, the rows in the inner one, and selections in place of
branches. Labels are whole numbers (M,), or shares of every class, shaped like the logits.

With e_j = exp(z_j - max z), x_j = p_j / tau = 2 e_j / (1 + e_second): below c tau the step needs no sum of
exponentials, so one sweep gives the sum of x, which is 1 / tau, and the sum of h (formulas: `kernels.reference`).
Nothing is saved for the backward pass, which computes a row's sums again. Entries that tie for second place share the
gradient through the threshold.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from evalign.kernels.cpu.compilation import ORDERED, loop

F = np.float32
INT = np.int32
ZERO, HALF, ONE, TWO, MINUS = F(0), F(0.5), F(1), F(2), F(-np.inf)
ROWS = 128  # rows of a block: 19 classes take a third of the L1 cache
UNROLLED = 5  # maximum number of classes with a specialised backward loop for images
Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
Ints = NDArray[np.int32]
Labels = NDArray[Any]  # integers, or shares
By = tuple[Floats, Floats, F]  # dL/dtp, dL/dpredicted, dL/d(sum of cross-entropies)

# exp and log of float32 in plain arithmetic, which compiles to vector instructions, unlike libm.
LOG2_E, LN2_HIGH, LN2_LOW = F(1.4426950408889634), F(0.693359375), F(-2.12194440e-4)
SMALLEST = F(-88)  # exp of smaller arguments is 0
# Of the minimax polynomial of exp(r) for |r| <= ln 2 / 2 that begins with 1 + r: wrong by 3e-9 at most
C2, C3, C4, C5, C6 = (F(c) for c in (0.49999993, 0.1666652, 0.04166839, 0.00836875, 0.00138146))
SHIFT = F(3 << 22)  # adding it rounds to an integer, stored in the last bits
SQRT_HALF = F(0.707106781186547524)
L1, L2, L3, L4, L5, L6, L7, L8, L9 = (
    F(c)
    for c in (3.3333331174e-1, -2.4999993993e-1, 2.0000714765e-1, -1.6668057665e-1, 1.4249322787e-1,
              -1.2420140846e-1, 1.1676998740e-1, -1.1514610310e-1, 7.0376836292e-2)
)  # fmt: skip
BIAS = INT(127)


@loop(ORDERED)
def exp(t: F) -> F:
    """exp(t) for t <= 0, within 1 ulp down to the smallest normal number; nan stays nan.

    t = n ln 2 + r with |r| <= ln 2 / 2, a polynomial for exp(r), and 2^n by its bits, which are 0 for n = -127.
    """
    x = SMALLEST if t < SMALLEST else t
    shifted = x * LOG2_E + SHIFT
    n = shifted - SHIFT
    r = (x - n * LN2_HIGH) - n * LN2_LOW
    power = (((((C6 * r + C5) * r + C4) * r + C3) * r + C2) * r + ONE) * r + ONE
    scaled: np.float32 = power * np.int32((np.float32(shifted).view(np.int32) + BIAS) << np.int32(23)).view(np.float32)
    return scaled


@loop()
def log(x: F) -> F:
    """log(x) of a normal x > 0, within 2 ulp; nan stays nan.

    As in Cephes: x = 2^n m with m between sqrt(1/2) and sqrt(2), and a polynomial in m - 1.
    """
    bits = np.float32(x).view(np.int32)
    n = F((bits >> np.int32(23)) - np.int32(126))
    m = np.int32((bits & np.int32(0x007FFFFF)) | np.int32(0x3F000000)).view(np.float32)
    small = m < SQRT_HALF
    n = n - ONE if small else n
    m = (m + m if small else m) - ONE
    power = ((((((((L9 * m + L8) * m + L7) * m + L6) * m + L5) * m + L4) * m + L3) * m + L2) * m + L1) * m * m * m
    found: np.float32 = (power + n * LN2_LOW - HALF * m * m) + m + n * LN2_HIGH
    return found if x == x else x


@loop()
def load_block(z: Floats, image: int, place: int, count: int, weight: Floats, x: Floats) -> None:
    """Copy a block to x (C, ROWS). Rows of weight 0, which may hold nan, and those past the end become zeros."""
    if z.ndim == 3:
        for j in range(z.shape[1]):
            source, row = z[image, j, place : place + count], x[j]
            for r in range(count):
                value = source[r]  # load first, then select: a branch around a load is not vectorised
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
def labels_of_block(y: Labels, d: int) -> Labels:
    """A buffer: labels (ROWS,), or shares (C, ROWS)."""
    if y.ndim == 1:
        return np.zeros(ROWS, np.int32)
    return np.zeros((d, ROWS), np.float32)


@loop()
def load_labels(
    y: Labels, w: Floats, image: int, place: int, at: int, count: int, label: Labels, weight: Floats
) -> None:
    """Labels and weights of a block; of shares, their part of the row, and its mass in the weight."""
    weights = w[at : at + count]
    for r in range(count):
        weight[r] = weights[r]
    for r in range(count, ROWS):
        weight[r] = ZERO
    if y.ndim == 1:
        labels = y[at : at + count]
        for r in range(count):
            label[r] = INT(labels[r])
    else:
        load_block(y, image, place, count, weight, label)
        mass = np.zeros(ROWS, np.float32)
        for j in range(label.shape[0]):
            row = label[j]
            for r in range(ROWS):
                mass[r] += row[r]
        for r in range(ROWS):
            weight[r] *= mass[r]
            mass[r] = ONE / mass[r] if mass[r] != ZERO else ZERO
        for j in range(label.shape[0]):
            row = label[j]
            for r in range(ROWS):
                row[r] *= mass[r]


@loop()
def share_of(label: Labels, j: int, r: int) -> F:
    """Share of class j in row r of a block."""
    if label.ndim == 1:
        return ONE if label[r] == INT(j) else ZERO
    share: np.float32 = label[j, r]
    return share


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
def expected_logits(x: Floats, label: Labels, largest: Floats, smoothing: F, target: Floats) -> None:
    """Logit of the label minus the largest logit, or its mean over shares or smoothed labels."""
    for r in range(ROWS):
        target[r] = ZERO
    if label.ndim == 1:
        for r in range(ROWS):
            target[r] = (ONE - smoothing) * (x[label[r], r] - largest[r])
    else:
        for j in range(x.shape[0]):
            row, own = x[j], label[j]
            for r in range(ROWS):
                target[r] += (ONE - smoothing) * own[r] * (row[r] - largest[r])
    if smoothing != ZERO:
        for j in range(x.shape[0]):
            row = x[j]
            for r in range(ROWS):
                target[r] += smoothing / F(x.shape[0]) * (row[r] - largest[r])


@loop()
def exponentials(x: Floats, largest: Floats, second: Floats, scale: Floats, total: Floats) -> None:
    """Replace logits, and the second largest of every row, by x; write the x of the largest, and the sum."""
    for r in range(ROWS):
        second[r] = exp(second[r] - largest[r])
        scale[r] = TWO / (ONE + second[r])
        second[r] *= scale[r]
        total[r] = ZERO
    for j in range(x.shape[0]):
        row = x[j]
        for r in range(ROWS):
            over = exp(row[r] - largest[r]) * scale[r]
            total[r] += over
            row[r] = over


@loop()
def row_shares(weight: Floats, scale: Floats, total: Floats, total_h: Floats, points: Floats, at_top: Floats) -> None:
    """Replace the sum of h, which has the top on the line through tau, by w / sum; write h of the top, times that."""
    b, low, c = points[1], points[2], points[4]
    for r in range(weight.shape[0]):
        tau, over = ONE / total[r], scale[r]
        line = HALF + b * (over - ONE)
        above = ONE - low * (ONE - over * tau) / (ONE - c * tau)
        value = above if over > c else line
        share = weight[r] / (total_h[r] + value - line)
        total_h[r] = share
        at_top[r] = value * share


@loop()
def entropies(weight: Floats, scale: Floats, total: Floats, target: Floats) -> float:
    added = ZERO
    for r in range(weight.shape[0]):
        each = weight[r] * (log(total[r] / scale[r]) - target[r])
        added += each if weight[r] != ZERO else ZERO
    return float(added)


@loop()
def row_slopes(
    weight: Floats, scale: Floats, second: Floats, total: Floats, sums: Floats, points: Floats, by_losses: F, d: int
) -> None:
    """Replace sums of rows by the coefficients of their gradients.

    Sums (6, M): of x h'(x) and of h - x h'(x), the same times the slopes, the slopes at the top, entries in second
    place. Numbers (8, M): factors of the slope and of 1 times x h'(x), x h'(x) at the top, the factor of x, what is
    added at the top, and at the second place, and what is subtracted times the label's share, and everywhere.
    """
    b, low, c, smoothing = points[1], points[2], points[4], points[5]
    flat = HALF - b
    for r in range(weight.shape[0]):
        tau, over = ONE / total[r], scale[r]
        over_gap = ONE / (ONE - c * tau)
        loss = low * (ONE - over * tau) * over_gap
        line, beyond = b * over, over > c
        rise = ONE - loss - (line + flat) if beyond else ZERO  # part of the top beyond the line
        top_scaled = low * over * tau * over_gap if beyond else line
        by_tau = c * loss * over_gap * tau if beyond else line
        sum_scaled, dot_scaled, tops, tied = sums[0, r], sums[2, r], sums[4, r], second[r] == over
        over_total = ONE / (sum_scaled + sums[1, r] + rise)
        center = (dot_scaled + sums[3, r] + rise * tops) * over_total
        each, own = weight[r] * over_total, by_losses * weight[r]
        by_top = tops - center
        through_tau = each * by_top * by_tau
        half = -HALF * (through_tau + each * (dot_scaled - line * tops - center * (sum_scaled - line)))
        at_second = (half + half if tied else half) * second[r] / sums[5, r]
        sums[0, r], sums[1, r], sums[2, r] = each, each * center, top_scaled
        sums[3, r] = (own - each * by_top * top_scaled + through_tau) * tau
        sums[4, r], sums[5, r] = ZERO if tied else half * over, at_second
        sums[6, r], sums[7, r] = own * (ONE - smoothing), own * smoothing / F(d)


@loop()
def block_forward(
    z: Floats, y: Labels, w: Floats, points: Floats, with_losses: bool, start: int, stop: int, sums: Doubles
) -> float:
    """Add tp, actual, predicted of rows start to stop to `sums` (3, C); return the sum of their cross-entropies."""
    a, b, cut, smoothing = points[0], points[1], points[3], points[5]
    d, size = z.shape[1], z.size // z.shape[1] if z.ndim == 2 else z.shape[z.ndim - 1]
    x, label = np.empty((d, ROWS), np.float32), labels_of_block(y, d)
    s = np.empty((7, ROWS), np.float32)
    weight, largest, scale, second, total, share, target = s[0], s[1], s[2], s[3], s[4], s[5], s[6]
    losses = 0.0
    at = start
    while at < stop:
        image, place = at // size, at % size
        count = min(ROWS, stop - at, size - place)
        load_labels(y, w, image, place, at, count, label, weight)
        load_block(z, image, place, count, weight, x)
        at += count
        two_largest(x, largest, second)
        if with_losses:
            expected_logits(x, label, largest, smoothing, target)
        exponentials(x, largest, second, scale, total)
        for r in range(ROWS):
            share[r] = ZERO
        for j in range(d):
            row = x[j]
            for r in range(ROWS):
                over = row[r]
                share[r] += HALF + b * (over - ONE) if over >= cut else a * over
        if with_losses:
            losses += entropies(weight, scale, total, target)
        row_shares(weight, scale, total, share, points, largest)
        for j in range(d):
            row, tp, actual, predicted = x[j], ZERO, ZERO, ZERO
            for r in range(ROWS):
                over, at_top, own = row[r], largest[r], share_of(label, j, r)
                h = share[r] * (HALF + b * (over - ONE) if over >= cut else a * over)
                h = at_top if over == scale[r] else h
                predicted += h
                tp += h * own
                actual += weight[r] * own
            sums[0, j] += tp
            sums[1, j] += actual
            sums[2, j] += predicted
    return losses


@loop()
def block_backward(z: Floats, y: Labels, w: Floats, points: Floats, by: By, start: int, stop: int, out: Floats) -> None:
    """dL/dz of rows start to stop, to `out`, shaped like the logits."""
    by_tp, by_predicted, by_losses = by
    a, b, cut = points[0], points[1], points[3]
    d, size = z.shape[1], z.size // z.shape[1] if z.ndim == 2 else z.shape[z.ndim - 1]
    x, label = np.empty((d, ROWS), np.float32), labels_of_block(y, d)
    s, of = np.empty((5, ROWS), np.float32), np.empty((8, ROWS), np.float32)
    weight, scale, second, total, largest = s[0], s[1], s[2], s[3], s[4]
    sum_scaled, sum_flat, dot_scaled, dot_flat, tops, seconds = of[0], of[1], of[2], of[3], of[4], of[5]
    flat = HALF - b  # h = b x + flat on the line through tau
    at = start
    while at < stop:
        image, place = at // size, at % size
        count = min(ROWS, stop - at, size - place)
        load_labels(y, w, image, place, at, count, label, weight)
        load_block(z, image, place, count, weight, x)
        at += count
        two_largest(x, largest, second)
        exponentials(x, largest, second, scale, total)
        of[:] = ZERO
        for j in range(0, d, 2):  # two classes at a time: the loop is bound by its stores
            k = j + 1 if j + 1 < d else j
            row, of_all, of_own = x[j], by_predicted[j], by_tp[j]
            next_row, of_next, own_next, twice = x[k], by_predicted[k], by_tp[k], ZERO if k == j else ONE
            for r in range(ROWS):
                over, slope = row[r], of_all + of_own * share_of(label, j, r)
                then, next_slope = next_row[r], of_next + own_next * share_of(label, k, r)
                scaled = b * over if over >= cut else a * over
                next_scaled = twice * (b * then if then >= cut else a * then)
                beside = flat if over >= cut else ZERO
                next_beside = twice * flat if then >= cut else ZERO
                sum_scaled[r] += scaled + next_scaled
                sum_flat[r] += beside + next_beside
                dot_scaled[r] += scaled * slope + next_scaled * next_slope
                dot_flat[r] += beside * slope + next_beside * next_slope
                tops[r] += (slope if over == scale[r] else ZERO) + (twice * next_slope if then == scale[r] else ZERO)
                seconds[r] += (ONE if over == second[r] else ZERO) + (twice if then == second[r] else ZERO)
        row_slopes(weight, scale, second, total, of, points, by_losses, d)
        for j in range(d):
            row, of_all, of_own = x[j], by_predicted[j], by_tp[j]
            for r in range(ROWS):
                over, own, top_scaled, first, then = row[r], share_of(label, j, r), of[2, r], of[4, r], of[5, r]
                scaled = b * over if over >= cut else a * over
                scaled = top_scaled if over == scale[r] else scaled
                slope = ((of_all + of_own * own) * of[0, r] - of[1, r]) * scaled
                slope += first if over == scale[r] else ZERO
                slope += then if over == second[r] else ZERO
                row[r] = slope + over * of[3, r] - of[6, r] * own - of[7, r]
        store_block(x, image, place, count, weight, out)


@loop()
def few_backward(
    z: Floats, y: Labels, w: Floats, points: Floats, by_tp: tuple[F, ...], by_predicted: tuple[F, ...],
    by_losses: F, start: int, stop: int, out: Floats,
) -> None:  # fmt: skip
    """`block_backward` for images (N, C, S) with few classes, in half the time for three.

    The length of a tuple is known at compile time, so loops over classes are unrolled and a pixel's sums stay in
    registers.
    """
    d, size = len(by_tp), z.shape[2]
    a, b, low, cut, c, smoothing = points[0], points[1], points[2], points[3], points[4], points[5]
    flat = HALF - b  # h = b x + flat on the line through tau
    x, label, weight = np.empty((d, ROWS), np.float32), np.empty(ROWS, np.int32), np.empty(ROWS, np.float32)
    at = start
    while at < stop:
        image, place = at // size, at % size
        count = min(ROWS, stop - at, size - place)
        load_labels(y, w, image, place, at, count, label, weight)
        load_block(z, image, place, count, weight, x)
        at += count
        for r in range(ROWS):
            largest = x[0, r]
            for j in range(1, d):
                largest = x[j, r] if x[j, r] > largest else largest
            top, below, total = ZERO, ZERO, ZERO
            for j in range(d):
                power = exp(x[j, r] - largest)
                smaller = top if power > top else power
                below = smaller if smaller > below else below
                top = power if power > top else top
                total += power
                x[j, r] = power
            scale = TWO / (ONE + below)
            second, tau = below * scale, ONE / (total * scale)
            sum_scaled, sum_h, dot_scaled, dot_h, tops, seconds = ZERO, ZERO, ZERO, ZERO, ZERO, ZERO
            for j in range(d):
                over = x[j, r] * scale
                slope = by_predicted[j] + (by_tp[j] if label[r] == INT(j) else ZERO)
                scaled = b * over if over >= cut else a * over
                h = scaled + (flat if over >= cut else ZERO)
                sum_scaled += scaled
                sum_h += h
                dot_scaled += scaled * slope
                dot_h += h * slope
                tops += slope if over == scale else ZERO
                seconds += ONE if over == second else ZERO
            # As in `row_slopes`.
            over_gap = ONE / (ONE - c * tau)
            loss = low * (ONE - scale * tau) * over_gap
            line, beyond, tied = b * scale, scale > c, second == scale
            rise = ONE - loss - (line + flat) if beyond else ZERO
            top_scaled = low * scale * tau * over_gap if beyond else line
            by_tau = c * loss * over_gap * tau if beyond else line
            over_total = ONE / (sum_h + rise)
            center = (dot_h + rise * tops) * over_total
            each, own = weight[r] * over_total, by_losses * weight[r]
            through_tau = each * (tops - center) * by_tau
            half = -HALF * (through_tau + each * (dot_scaled - line * tops - center * (sum_scaled - line)))
            at_second = (half + half if tied else half) * second / seconds
            at_top = ZERO if tied else half * scale
            by_x = (own - each * (tops - center) * top_scaled + through_tau) * tau
            at_label, everywhere = own * (ONE - smoothing), own * smoothing / F(d)
            for j in range(d):
                over, is_label = x[j, r] * scale, label[r] == INT(j)
                scaled = b * over if over >= cut else a * over
                scaled = top_scaled if over == scale else scaled
                slope = by_predicted[j] + (by_tp[j] if is_label else ZERO)
                gradient = each * (slope - center) * scaled
                gradient += at_top if over == scale else ZERO
                gradient += at_second if over == second else ZERO
                x[j, r] = gradient + over * by_x - (at_label if is_label else ZERO) - everywhere
        store_block(x, image, place, count, weight, out)
