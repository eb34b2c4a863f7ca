"""Compiled loops over binary entries, read in place, and the functions that run them over a batch.

`column_*` take one contiguous column at any number of thresholds, `entry_*` take (M, L) row by row at one. Labels are
0, 1 or shares of a yes. A step is a line of numbers, see `plan.Lines`: left, gap, tau, and the slopes below, in and
above the middle.
"""

from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evalign.kernels.cpu.block_loops import HALF, ONE, ZERO, By, Doubles, F, Floats, exp
from evalign.kernels.cpu.compilation import in_threads, loop, parts, summed
from evalign.kernels.plan import FivePoints, KernelSettings, Lines

ENTRIES = 1024  # entries of a block, summed in float32
BLOCK = 512  # entries summed in float32 before the sum is added to a float64 one
Batch = tuple[Floats, NDArray[Any], Floats]  # logits, labels, weights

# log(1 + e) = 2 artanh(e / (2 + e)): a series in at most (1/3)^2, of e = a / b by one division
S1, S3, S5, S7, S9, S11, S13 = (F(2 / k) for k in (1, 3, 5, 7, 9, 11, 13))
S15 = F(2 / 15)


@loop()
def log1p(a: F, b: F) -> F:
    """log(1 + a / b) for 0 <= a <= b."""
    s = a / (b + b + a)
    q = s * s
    return s * (S1 + q * (S3 + q * (S5 + q * (S7 + q * (S9 + q * (S11 + q * (S13 + q * S15)))))))


@loop()
def sigmoid(z: F) -> tuple[F, F]:
    """p and 1 - p, neither computed as a difference."""
    e = exp(-abs(z))
    large = ONE / (ONE + e)
    small = e * large
    return (large if z >= ZERO else small), (small if z >= ZERO else large)


@loop()
def probabilities(logits: Floats, weight: Floats, p: Floats, q: Floats) -> None:
    """p and 1 - p of logits; 1/2 for ignored ones, which may be nan."""
    for i in range(logits.shape[0]):
        x = logits[i]
        p[i], q[i] = sigmoid(x if weight[i] != ZERO else ZERO)


@loop()
def entropies(logits: Floats, yes: NDArray[Any], weight: Floats, p: Floats, q: Floats, smoothing: F) -> float:
    total = ZERO
    for i in range(logits.shape[0]):
        soft = (ONE - smoothing) * F(yes[i]) + HALF * smoothing
        x, yes_p, no_p = logits[i], p[i], q[i]
        small, large = min(yes_p, no_p), max(yes_p, no_p)
        each = weight[i] * (max(x, ZERO) - x * soft + log1p(small, large))
        # An ignored entry counts for nothing, even if its loss is infinite.
        total += each if weight[i] != ZERO else ZERO
    return float(total)


@loop()
def membership(p: Floats, q: Floats, weight: Floats, line: Floats, h: Floats) -> None:
    """w H(p), written to an array other than p or q: loops over overlapping arrays are not vectorised."""
    left, gap, tau, below, middle, above = line[0], line[1], line[2], line[3], line[4], line[5]
    for i in range(weight.shape[0]):
        value = HALF + middle * (p[i] - tau)
        value = ONE - above * q[i] if q[i] < gap else value
        h[i] = weight[i] * (below * p[i] if p[i] < left else value)


@loop()
def rises(p: Floats, q: Floats, line: Floats, slope: Floats, out: Floats) -> None:
    """Add `slope` times h'(p) to `out`."""
    left, gap, below, middle, above = line[0], line[1], line[3], line[4], line[5]
    for i in range(slope.shape[0]):
        rise = above if q[i] < gap else middle
        out[i] += slope[i] * (below if p[i] < left else rise)


@loop()
def finish(yes: NDArray[Any], weight: Floats, p: Floats, q: Floats, smoothing: F, by_losses: F, slope: Floats) -> None:
    """dL/dz = w p (1 - p) dL/dp of the metric + dL/dlosses w (p - y), in place of the metric's dL/dp."""
    for i in range(weight.shape[0]):
        soft = (ONE - smoothing) * F(yes[i]) + HALF * smoothing
        each = weight[i] * (p[i] * q[i] * slope[i] + by_losses * (p[i] - soft))
        slope[i] = each if weight[i] != ZERO else ZERO


@loop()
def column_forward(
    batch: Batch, lines: Floats, smoothing: F, with_losses: bool, start: int, stop: int, sums: Doubles
) -> float:
    """Adds of entries start to stop of one column: tp of every threshold to sums[0], predicted to sums[1], and
    actual and total to sums[2, :2]; returns the sum of their cross-entropies."""
    z, y, w = batch
    p, q, h = np.empty(BLOCK, np.float32), np.empty(BLOCK, np.float32), np.empty(BLOCK, np.float32)
    losses = 0.0
    for begin in range(start, stop, BLOCK):
        end = min(begin + BLOCK, stop)
        # Slices, since an index that might be negative prevents vectorisation.
        logits, yes, weight = z[begin:end], y[begin:end], w[begin:end]
        probabilities(logits, weight, p, q)
        if with_losses:
            losses += entropies(logits, yes, weight, p, q, smoothing)
        actual, total = ZERO, ZERO
        for i in range(end - begin):
            actual += weight[i] * F(yes[i])
            total += weight[i]
        sums[2, 0] += actual
        sums[2, 1] += total
        for g in range(lines.shape[0]):
            membership(p, q, weight, lines[g], h)
            tp, predicted = ZERO, ZERO
            for i in range(end - begin):
                tp += h[i] * F(yes[i])
                predicted += h[i]
            sums[0, g] += tp
            sums[1, g] += predicted
    return losses


@loop()
def column_backward(batch: Batch, lines: Floats, smoothing: F, by: By, start: int, stop: int, out: Floats) -> None:
    """dL/dz of entries start to stop; dL/dp = sum_g h'(p, tau_g) (dL/dpredicted_g + y dL/dtp_g)."""
    z, y, w = batch
    by_tp, by_predicted, by_losses = by
    p, q, slope = np.empty(BLOCK, np.float32), np.empty(BLOCK, np.float32), np.empty(BLOCK, np.float32)
    for begin in range(start, stop, BLOCK):
        end = min(begin + BLOCK, stop)
        logits, yes, weight, gradient = z[begin:end], y[begin:end], w[begin:end], out[begin:end]
        probabilities(logits, weight, p, q)
        gradient[:] = ZERO
        for g in range(lines.shape[0]):
            a, b = by_predicted[g], by_tp[g]
            for i in range(end - begin):
                slope[i] = a + b * F(yes[i])
            rises(p, q, lines[g], slope[: end - begin], gradient)
        finish(yes, weight, p, q, smoothing, by_losses, gradient)


@loop()
def add_rows(values: Floats, yes: NDArray[Any], of_yes: Floats, of_all: Floats) -> None:
    """Add two sums at a time: LLVM does not vectorise loops over more pointers."""
    for r in range(values.shape[0]):
        row, labels = values[r], yes[r]
        for k in range(row.shape[0]):
            of_yes[k] += row[k] * F(labels[k])
            of_all[k] += row[k]


@loop()
def entry_forward(
    batch: Batch, line: Floats, smoothing: F, with_losses: bool, start: int, stop: int, sums: Doubles
) -> float:
    """Add tp, predicted, actual and total of rows start to stop to `sums` (4, L); return their cross-entropies' sum."""
    z, y, w = batch[0].reshape(-1), batch[1].reshape(-1), batch[2].reshape(-1)
    d = sums.shape[1]
    rows = max(1, ENTRIES // d)
    p, q, h = np.empty(rows * d, np.float32), np.empty(rows * d, np.float32), np.empty(rows * d, np.float32)
    added = np.empty((4, d), np.float32)
    losses = 0.0
    for begin in range(start, stop, rows):
        count = min(rows, stop - begin)
        a, b = begin * d, (begin + count) * d
        logits, yes, weight = z[a:b], y[a:b], w[a:b]
        probabilities(logits, weight, p, q)
        if with_losses:
            losses += entropies(logits, yes, weight, p, q, smoothing)
        membership(p, q, weight, line, h)
        added[:] = ZERO
        labels = yes.reshape(count, d)
        add_rows(h[: b - a].reshape(count, d), labels, added[0], added[1])
        add_rows(weight.reshape(count, d), labels, added[2], added[3])
        sums += added
    return losses


@loop()
def entry_backward(batch: Batch, line: Floats, smoothing: F, by: By, start: int, stop: int, out: Floats) -> None:
    """dL/dz of rows start to stop, to `out` (M, L); dL/dp = h'(p) (dL/dpredicted + y dL/dtp)."""
    z, y, w, gradient = batch[0].reshape(-1), batch[1].reshape(-1), batch[2].reshape(-1), out.reshape(-1)
    by_tp, by_predicted, by_losses = by
    d = out.shape[1]
    rows = max(1, ENTRIES // d)
    p, q, slope = np.empty(rows * d, np.float32), np.empty(rows * d, np.float32), np.empty(rows * d, np.float32)
    for begin in range(start, stop, rows):
        count = min(rows, stop - begin)
        a, b = begin * d, (begin + count) * d
        logits, yes, weight, into = z[a:b], y[a:b], w[a:b], gradient[a:b]
        probabilities(logits, weight, p, q)
        for r in range(count):
            slopes, y_row = slope[r * d : (r + 1) * d], yes[r * d : (r + 1) * d]
            for k in range(d):
                slopes[k] = by_predicted[k] + by_tp[k] * F(y_row[k])
        into[:] = ZERO
        rises(p, q, line, slope[: b - a], into)
        finish(yes, weight, p, q, smoothing, by_losses, into)


@loop()
def derivatives(batch: Batch, line: Floats, pull: Floats, options: Floats, gradient: Floats, hessian: Floats) -> None:
    """Both derivatives of a boosted objective: anchor w (p - y) + m, and w max(anchor curvature p (1 - p), floor) +
    damping |m|, m the metric's part, in a fifth of the time of torch operations.

    m = w p (1 - p) h'(p) pull[y]; `options` are anchor, the anchor by curvature, floor, damping and label smoothing. A
    row of weight 0 gets 0, whatever its score.
    """
    z, y, w = batch
    left, gap, below, middle, above = line[0], line[1], line[3], line[4], line[5]
    anchor, curved, floor, damping, smoothing = options[0], options[1], options[2], options[3], options[4]
    at_no, at_yes = pull[0], pull[1]
    for i in range(z.shape[0]):
        p, q = sigmoid(ZERO if w[i] == ZERO else z[i])
        yes = F(y[i])
        spread = p * q
        rise = above if q < gap else middle
        rise = below if p < left else rise
        by_metric = w[i] * spread * rise * (at_no + yes * (at_yes - at_no))
        soft = (ONE - smoothing) * yes + HALF * smoothing
        bend = curved * spread
        gradient[i] = anchor * w[i] * (p - soft) + by_metric
        hessian[i] = w[i] * (bend if bend > floor else floor) + damping * abs(by_metric)


@lru_cache
def _lines_table(points: FivePoints, thresholds: tuple[float, ...]) -> Floats:
    return np.array([Lines.at(tau, points) for tau in thresholds], np.float32)


def _planes(x: Tensor) -> NDArray[Any]:
    """Entries as (N, L, S), each column of an image contiguous: a view, except for (M, L) of several columns."""
    x = x.detach()
    if x.dim() == 2:
        return (x if x.shape[1] == 1 else x.t()).contiguous().view(1, x.shape[1], -1).numpy()
    return x.contiguous().numpy()


def _column(batch: tuple[Tensor, ...]) -> Batch | None:
    """The entries of a single column, (M,) or (M, 1); None for several columns."""
    z, y, w = batch
    if z.dim() == 1:
        return z.numpy(), y.numpy(), w.numpy()
    if z.dim() == 2 and z.shape[1] == 1:
        return z.numpy().reshape(-1), y.numpy().reshape(-1), w.numpy().reshape(-1)
    return None


def column_sums(batch: tuple[Tensor, ...], settings: KernelSettings) -> tuple[Doubles, float]:
    """tp of every threshold, predicted of every threshold, (actual, total) of each column, and all cross-entropies."""
    table, e = _lines_table(settings.points, settings.thresholds), np.float32(settings.smoothing)
    only = _column(batch)
    if only is not None:  # as few calls as possible: there may be few entries
        sums = np.zeros((1, 3, max(2, len(table))))
        run_column = partial(column_forward, only, table, e, settings.losses)
        return sums, summed(run_column, len(only[0]), len(only[0]) * len(table), sums[0])
    z, y, w = (_planes(x) for x in batch)
    images, columns, size = z.shape
    sums = np.zeros((columns, 3, max(2, len(table))))

    def run(start: int, stop: int, own: Doubles) -> float:
        total = 0.0
        for image in range(images):
            for k in range(columns):
                column = z[image, k], y[image, k], w[image, k]
                total += column_forward(column, table, e, settings.losses, start, stop, own[k])
        return total

    return sums, summed(run, size, z.size * len(table), sums)


def column_gradient(batch: tuple[Tensor, ...], settings: KernelSettings, by: By) -> Tensor:
    """dL/dlogits, shaped like the logits, from dL by the counts (L, G)."""
    table, e = _lines_table(settings.points, settings.thresholds), np.float32(settings.smoothing)
    only = _column(batch)
    if only is not None:
        found = torch.empty_like(batch[0])
        run_column = partial(column_backward, only, table, e, (by[0][0], by[1][0], by[2]))
        into = found.numpy().reshape(-1)
        in_threads([partial(run_column, *part, into) for part in parts(len(into), len(into) * len(table))])
        return found
    z, y, w = (_planes(x) for x in batch)
    images, columns, size = z.shape
    found = torch.empty(z.shape, dtype=batch[0].dtype)
    out = found.numpy()

    def run(start: int, stop: int) -> None:
        for image in range(images):
            for k in range(columns):
                column, slopes = (z[image, k], y[image, k], w[image, k]), (by[0][k], by[1][k], by[2])
                column_backward(column, table, e, slopes, start, stop, out[image, k])

    in_threads([partial(run, *part) for part in parts(size, out.size * len(table))])
    return found if batch[0].dim() == 3 else found[0].t()


def entry_sums(batch: tuple[Tensor, ...], settings: KernelSettings) -> tuple[Doubles, float]:
    """tp, predicted, actual and total (4, L) of entries (M, L) at the one threshold, and all cross-entropies."""
    z, y, w = (x.numpy() for x in batch)
    line, e = _lines_table(settings.points, settings.thresholds)[0], np.float32(settings.smoothing)
    sums = np.zeros((4, z.shape[1]))
    run = partial(entry_forward, (z, y, w), line, e, settings.losses)
    return sums, summed(run, z.shape[0], z.size, sums)


def entry_gradient(batch: tuple[Tensor, ...], settings: KernelSettings, by: By) -> Tensor:
    """dL/dlogits (M, L) at the one threshold from dL by the counts (L,)."""
    z, y, w = (x.numpy() for x in batch)
    found = torch.empty_like(batch[0])
    line, e = _lines_table(settings.points, settings.thresholds)[0], np.float32(settings.smoothing)
    run, out = partial(entry_backward, (z, y, w), line, e, by), found.numpy()
    in_threads([partial(run, *part, out) for part in parts(z.shape[0], z.size)])
    return found
