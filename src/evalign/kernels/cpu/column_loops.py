"""Compiled loops over binary entries, read in place.

`column_*` take one contiguous column at any number of thresholds; `entry_*` take (M, L) row by row at one threshold.
"""

import numpy as np
from numpy.typing import NDArray

from evalign.kernels.cpu.elementary import HALF, ONE, ZERO, log1p, sigmoid
from evalign.kernels.cpu.jit import loop

F = np.float32
ENTRIES = 1024  # of a block of rows, whose sums are taken in float32
BLOCK = 512  # entries summed in float32 before the sum is added to a float64 one
Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]


@loop()
def column_forward(
    z: Floats,
    y: NDArray[np.generic],
    w: Floats,
    lines: Floats,
    smoothing: F,
    with_losses: bool,
    start: int,
    stop: int,
    sums: Doubles,
) -> float:
    """Adds of entries start to stop of one column: tp of every threshold to sums[0], predicted to sums[1], and
    actual and total to sums[2, :2]; returns the sum of their cross-entropies."""
    p, q, label = np.empty(BLOCK, np.float32), np.empty(BLOCK, np.float32), np.empty(BLOCK, np.float32)
    losses = 0.0
    for begin in range(start, stop, BLOCK):
        end = min(begin + BLOCK, stop)
        # Slices, since an index that might be negative keeps a loop from vector instructions.
        logits, yes, weight = z[begin:end], y[begin:end], w[begin:end]
        size = end - begin
        actual, total = ZERO, ZERO
        for i in range(size):
            p[i], q[i] = sigmoid(ZERO if weight[i] == ZERO else logits[i])  # an ignored entry may be nan
            label[i] = weight[i] * F(yes[i])
            actual += label[i]
            total += weight[i]
        sums[2, 0] += actual
        sums[2, 1] += total
        if with_losses:
            losses += float(entropies(logits, yes, weight, p, q, smoothing))
        for g in range(lines.shape[0]):
            left, gap, tau = lines[g, 0], lines[g, 1], lines[g, 2]
            below, middle, above = lines[g, 3], lines[g, 4], lines[g, 5]
            tp, predicted = ZERO, ZERO
            for i in range(size):
                h = HALF + middle * (p[i] - tau)
                h = ONE - above * q[i] if q[i] < gap else h
                h = below * p[i] if p[i] < left else h
                tp += h * label[i]
                predicted += h * weight[i]
            sums[0, g] += tp
            sums[1, g] += predicted
    return losses


@loop()
def entropies(logits: Floats, yes: NDArray[np.generic], weight: Floats, p: Floats, q: Floats, smoothing: F) -> F:
    total = ZERO
    for i in range(logits.shape[0]):
        soft = (ONE - smoothing) * F(yes[i]) + HALF * smoothing
        x = logits[i]
        small, large = (q[i], p[i]) if x >= ZERO else (p[i], q[i])
        each = (x if x > ZERO else ZERO) - x * soft + log1p(small / large)
        # An ignored entry counts for nothing even where its loss is infinite.
        total += ZERO if weight[i] == ZERO else weight[i] * each
    return total


@loop()
def column_backward(
    z: Floats,
    y: NDArray[np.generic],
    w: Floats,
    lines: Floats,
    smoothing: F,
    start: int,
    stop: int,
    by_tp: Floats,
    by_predicted: Floats,
    by_losses: F,
    out: Floats,
) -> None:
    """dL/dz = w p (1 - p) sum_g h'(p, tau_g) (dL/dpredicted_g + y dL/dtp_g) + dL/dlosses w (p - y)."""
    p, q = np.empty(BLOCK, np.float32), np.empty(BLOCK, np.float32)
    label, slope = np.empty(BLOCK, np.float32), np.empty(BLOCK, np.float32)
    for begin in range(start, stop, BLOCK):
        end = min(begin + BLOCK, stop)
        logits, yes, weight, gradient = z[begin:end], y[begin:end], w[begin:end], out[begin:end]
        size = end - begin
        for i in range(size):
            p[i], q[i] = sigmoid(ZERO if weight[i] == ZERO else logits[i])  # an ignored entry may be nan
            label[i] = F(yes[i])
            slope[i] = ZERO
        for g in range(lines.shape[0]):
            left, gap, below, middle, above = lines[g, 0], lines[g, 1], lines[g, 3], lines[g, 4], lines[g, 5]
            a, b = by_predicted[g], by_tp[g]
            for i in range(size):
                rise = above if q[i] < gap else middle
                rise = below if p[i] < left else rise
                slope[i] += rise * (a + b * label[i])
        for i in range(size):
            soft = (ONE - smoothing) * label[i] + HALF * smoothing
            each = weight[i] * (p[i] * q[i] * slope[i] + by_losses * (p[i] - soft))
            gradient[i] = ZERO if weight[i] == ZERO else each


@loop()
def entry_forward(
    z: Floats,
    y: NDArray[np.generic],
    w: Floats,
    line: Floats,
    smoothing: F,
    with_losses: bool,
    start: int,
    stop: int,
    sums: Doubles,
) -> float:
    """Add tp, predicted, actual and total of rows start to stop to `sums` (4, L); return their cross-entropies' sum."""
    left, gap, tau, below, middle, above = line[0], line[1], line[2], line[3], line[4], line[5]
    d = z.shape[1]
    rows = max(1, ENTRIES // d)
    flat_z, flat_y, flat_w = z.reshape(-1), y.reshape(-1), w.reshape(-1)
    p, q = np.empty(rows * d, np.float32), np.empty(rows * d, np.float32)
    label, added = np.empty(rows * d, np.float32), np.empty((4, d), np.float32)
    losses = 0.0
    for begin in range(start, stop, rows):
        count = min(rows, stop - begin)
        a, b = begin * d, (begin + count) * d
        logits, yes, weight = flat_z[a:b], flat_y[a:b], flat_w[a:b]
        for i in range(b - a):
            x = logits[i]  # an ignored entry may be nan
            p[i], q[i] = sigmoid(x if weight[i] != ZERO else ZERO)
        if with_losses:
            losses += float(entropies(logits, yes, weight, p, q, smoothing))
        for i in range(b - a):
            h = HALF + middle * (p[i] - tau)
            h = ONE - above * q[i] if q[i] < gap else h
            h = below * p[i] if p[i] < left else h
            label[i] = F(yes[i])
            p[i] = h * weight[i]
        added[:] = ZERO
        for r in range(count):
            h, w_row, y_row = p[r * d : (r + 1) * d], weight[r * d : (r + 1) * d], label[r * d : (r + 1) * d]
            for k in range(d):
                added[0, k] += h[k] * y_row[k]
                added[1, k] += h[k]
                added[2, k] += w_row[k] * y_row[k]
                added[3, k] += w_row[k]
        for k in range(d):
            sums[0, k] += added[0, k]
            sums[1, k] += added[1, k]
            sums[2, k] += added[2, k]
            sums[3, k] += added[3, k]
    return losses


@loop()
def entry_backward(
    z: Floats,
    y: NDArray[np.generic],
    w: Floats,
    line: Floats,
    smoothing: F,
    start: int,
    stop: int,
    by_tp: Floats,
    by_predicted: Floats,
    by_losses: F,
    out: Floats,
) -> None:
    """dL/dz = w p (1 - p) h'(p) (dL/dpredicted + y dL/dtp) + dL/dlosses w (p - y), to `out` (M, L)."""
    left, gap, below, middle, above = line[0], line[1], line[3], line[4], line[5]
    d = z.shape[1]
    rows = max(1, ENTRIES // d)
    flat_z, flat_y, flat_w, flat_out = z.reshape(-1), y.reshape(-1), w.reshape(-1), out.reshape(-1)
    predicted, tp = np.empty(rows * d, np.float32), np.empty(rows * d, np.float32)
    for r in range(rows):
        for k in range(d):
            predicted[r * d + k], tp[r * d + k] = by_predicted[k], by_tp[k]
    for begin in range(start, stop, rows):
        count = min(rows, stop - begin)
        a, b = begin * d, (begin + count) * d
        logits, yes, weight, gradient = flat_z[a:b], flat_y[a:b], flat_w[a:b], flat_out[a:b]
        for i in range(b - a):
            x, label = logits[i], F(yes[i])
            p, q = sigmoid(x if weight[i] != ZERO else ZERO)
            rise = above if q < gap else middle
            rise = below if p < left else rise
            soft = (ONE - smoothing) * label + HALF * smoothing
            each = weight[i] * (p * q * rise * (predicted[i] + tp[i] * label) + by_losses * (p - soft))
            gradient[i] = each if weight[i] != ZERO else ZERO
