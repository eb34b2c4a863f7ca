"""Compiled loops over multilabel entries (M, L) at one threshold, in place: row by row, as they lie in memory."""

import numpy as np
from numpy.typing import NDArray

from evalign.kernels.cpu.column_loops import entropies
from evalign.kernels.cpu.elementary import HALF, ONE, ZERO, sigmoid
from evalign.kernels.cpu.jit import loop

F = np.float32
ENTRIES = 1024  # of a block of rows, whose sums are taken in float32
Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]


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
