"""What row kernels share: the five-point step, and a row's gradient; the formulas are those of `row_loops`."""

import triton
import triton.language as tl


@triton.jit
def numbers(temperature, low, reach, ANNEALED: tl.constexpr):
    """a, b, low and the ends of the middle line over tau. A temperature stays on the device, for CUDA graphs."""
    if ANNEALED:
        low = tl.load(temperature).to(tl.float32)
        reach = 2.5 * low
    a = tl.where(reach < 1.0, low / tl.where(reach < 1.0, 1.0 - reach, 1.0), 0.0)
    return a, (0.5 - low) / reach, low, tl.where(reach < 1.0, 1.0 - reach, -1.0), 1.0 + reach


@triton.jit
def step(x, a, b, cut):
    """h of entries at x = p / tau <= 1."""
    return tl.where(x >= cut, 0.5 + b * (x - 1.0), a * x)


@triton.jit
def over_tau(e, e_second):
    """p / tau, at most 1; in this order a nan stays one."""
    x = e * (2.0 / (1.0 + e_second))
    return tl.where(x > 1.0, 1.0, x)


@triton.jit
def top(total, e_second, low, b, c):
    """The step at a row's largest entry, its slope there, and its derivative by tau."""
    p, tau = 1.0 / total, (1.0 + e_second) / (2.0 * total)
    beyond = p > c * tau
    room = tl.where(beyond, 1.0 - c * tau, 1.0)
    loss = low * (1.0 - p) / room
    x = p / tau
    return (
        tl.where(beyond, 1.0 - loss, 0.5 + b * (x - 1.0)),
        tl.where(beyond, low / room, b / tau),
        tl.where(beyond, -c * loss / room, -b * x / tau),
    )


@triton.jit
def labels_and_weights(y, w, rows, inside, ignored, WEIGHTED: tl.constexpr):
    """A row's label and its weight; without weights a row counts 1, unless its label is `ignored`."""
    label = tl.load(y + rows, mask=inside, other=0)
    if WEIGHTED:
        weight = tl.load(w + rows, mask=inside, other=0.0).to(tl.float32)
    else:
        counted = inside & (label != ignored)
        weight = tl.where(counted, 1.0, 0.0)
        label = tl.where(counted, label, 0)
    return label.to(tl.int32), weight


@triton.jit
def unpacked(by_loss, by_tp, by_predicted, by_losses, d, LOSSES: tl.constexpr, PACKED: tl.constexpr):
    """Where the slopes by predicted are, the slope by the loss, 1 unless PACKED, and that by the sum of losses."""
    scale, through_losses = 1.0, 0.0
    if PACKED:
        by_predicted, by_losses = by_tp + d, by_tp + 2 * d
        scale = tl.load(by_loss).to(tl.float32)
    if LOSSES:
        through_losses = tl.load(by_losses)
    return by_predicted, scale, through_losses


@triton.jit
def row_slopes(
    weight, by_loss, by_losses, smoothing, d, total, total_h, e_second, dot_h, dot_scaled, sum_scaled, at_first,
    at_label, label_e, is_first, a, b, low, cut, c,
):  # fmt: skip
    """What the gradient of a row's entries is made of, from the row's sums and the slopes at its top and its label."""
    p, tau = 1.0 / total, (1.0 + e_second) / (2.0 * total)
    value, top_slope, by_tau = top(total, e_second, low, b, c)
    label_x = over_tau(label_e, e_second)
    label_scaled = tl.where(label_x >= cut, b, a) * label_x
    label_h = tl.where(is_first, value, step(label_x, a, b, cut))
    mean = (dot_h + value * at_first + label_h * at_label) / total_h
    share = by_loss * weight / total_h
    entropy = by_loss * by_losses * weight
    rest = dot_scaled - mean * sum_scaled + tl.where(is_first, 0.0, at_label * label_scaled)
    by_top = at_first - mean + tl.where(is_first, at_label, 0.0)
    in_top = share * by_top * p * top_slope
    through_tau = share * by_top * by_tau
    half = 0.5 * (through_tau - share * rest / tau)
    factor = (entropy - in_top - tau * through_tau) * p
    at_top = in_top + factor + half * p
    at_target = tl.where(is_first, 0.0, share * at_label * label_scaled) - entropy * (1.0 - smoothing)
    return mean, share, factor, at_top, half * e_second * p, at_target, entropy * smoothing / d


@triton.jit
def entry_slopes(
    e, scaled, slope, j, first, second, label, mean, share, factor, at_top, at_second, at_target, spread
):  # fmt: skip
    """The gradient of entries j of rows, from what `row_slopes` gives for the rows."""
    found = share[:, None] * (slope[None, :] - mean[:, None]) * scaled + e * factor[:, None]
    found = tl.where(j[None, :] == first[:, None], at_top[:, None], found)
    found += tl.where(j[None, :] == second[:, None], at_second[:, None], 0.0)
    return found + tl.where(j[None, :] == label[:, None], at_target[:, None], 0.0) - spread[:, None]
