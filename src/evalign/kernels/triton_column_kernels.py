"""Triton kernels of the counts of yes/no problems; formulas and names are those of `column_loops`."""

import triton
import triton.language as tl


@triton.jit
def _lines(temperature, low, reach, tau, ANNEALED: tl.constexpr):
    """left, room, and the slopes below, in and above the middle; see `points.Lines`."""
    if ANNEALED:
        low = tl.load(temperature).to(tl.float32)
        reach = 2.5 * low
    half = reach * tl.minimum(tau, 1.0 - tau)
    left, room = tau - half, 1.0 - tau - half
    below = tl.where(left > 0.0, low / tl.where(left > 0.0, left, 1.0), 0.0)
    above = tl.where(room > 0.0, low / tl.where(room > 0.0, room, 1.0), 0.0)
    return left, room, below, (1.0 - 2.0 * low) / (2.0 * half), above


@triton.jit
def _sigmoid(z):
    """p, 1 - p and exp(-|z|), none of them a difference."""
    e = tl.exp(-tl.abs(z))
    large = 1.0 / (1.0 + e)
    return tl.where(z >= 0.0, large, e * large), tl.where(z >= 0.0, e * large, large), e


@triton.jit
def counts_kernel(
    z, y, w, taus, temperature, low, reach, smoothing, partial, n, columns, chunk, row_stride, column_stride,
    ANNEALED: tl.constexpr, LOSSES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """tp, predicted, actual, total and losses of `chunk` entries of one column at one threshold.

    They go to `partial` (chunks, thresholds, 5, columns).
    """
    column, g = tl.program_id(1), tl.program_id(2)
    tau = tl.load(taus + g)
    left, room, below, middle, above = _lines(temperature, low, reach, tau, ANNEALED)
    tp, predicted = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    actual, total = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    losses = tl.zeros([BLOCK], tl.float32)
    begin = tl.program_id(0).to(tl.int64) * chunk
    for offset in range(0, chunk, BLOCK):
        i = begin + offset + tl.arange(0, BLOCK)
        at = i * row_stride + column * column_stride
        weight = tl.load(w + at, mask=i < n, other=0.0)
        counts = (i < n) & (weight != 0.0)
        x = tl.load(z + at, mask=counts, other=0.0).to(tl.float32)
        yes = tl.load(y + at, mask=counts, other=0).to(tl.float32)
        p, q, e = _sigmoid(x)
        h = tl.where(q < room, 1.0 - above * q, 0.5 + middle * (p - tau))
        h = tl.where(p < left, below * p, h)
        tp += h * weight * yes
        predicted += h * weight
        actual += weight * yes
        total += weight
        if LOSSES:
            soft = (1.0 - smoothing) * yes + 0.5 * smoothing
            each = tl.where(x > 0.0, x, 0.0) - x * soft + tl.log(1.0 + e)
            losses += tl.where(counts, weight * each, 0.0)
    out = partial + ((tl.program_id(0) * tl.num_programs(2) + g) * 5) * columns + column
    tl.store(out, tl.sum(tp, 0))
    tl.store(out + columns, tl.sum(predicted, 0))
    tl.store(out + 2 * columns, tl.sum(actual, 0))
    tl.store(out + 3 * columns, tl.sum(total, 0))
    tl.store(out + 4 * columns, tl.sum(losses, 0))


@triton.jit
def gradient_kernel(
    z, y, w, taus, temperature, low, reach, smoothing, by_tp, by_predicted, by_losses, out, n, columns, thresholds,
    ANNEALED: tl.constexpr, LOSSES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """dL/dz of n entries, of which the k-th belongs to column k mod `columns`."""
    k = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    column = k % columns
    weight = tl.load(w + k, mask=k < n, other=0.0)
    counts = (k < n) & (weight != 0.0)
    yes = tl.load(y + k, mask=counts, other=0).to(tl.float32)
    p, q, _ = _sigmoid(tl.load(z + k, mask=counts, other=0.0).to(tl.float32))
    slope = tl.zeros([BLOCK], tl.float32)
    for g in range(0, thresholds):
        tau = tl.load(taus + g)
        left, room, below, middle, above = _lines(temperature, low, reach, tau, ANNEALED)
        rise = tl.where(p < left, below, tl.where(q < room, above, middle))
        a = tl.load(by_predicted + g * columns + column, mask=counts, other=0.0)
        b = tl.load(by_tp + g * columns + column, mask=counts, other=0.0)
        slope += rise * (a + b * yes)
    found = p * q * slope
    if LOSSES:
        soft = (1.0 - smoothing) * yes + 0.5 * smoothing
        found += tl.load(by_losses) * (p - soft)
    tl.store(out + k, tl.where(counts, weight * found, 0.0), mask=k < n)
