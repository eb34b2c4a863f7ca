"""What row kernels share: the five-point step, and a row's gradient; the formulas are those of `row_loops`."""

import triton
import triton.language as tl

# Numbers that differ from batch to batch, and pointers of which only numbers are read: one program for all of them.
FREE = {
    "do_not_specialize": ["n", "chunk", "ignored"],
    "do_not_specialize_on_alignment": ["y", "w", "temperature", "by_loss", "by_losses"],
}


@triton.jit
def numbers(temperature, low, reach, ANNEALED: tl.constexpr):
    """a, b, low and the ends of the middle line over tau. A temperature stays on the device, for CUDA graphs."""
    if ANNEALED:
        low = tl.load(temperature).to(tl.float32)
        reach = 2.5 * low
    a = tl.where(reach < 1.0, low / tl.where(reach < 1.0, 1.0 - reach, 1.0), 0.0)
    return a, (0.5 - low) / reach, low, tl.where(reach < 1.0, 1.0 - reach, -1.0), 1.0 + reach


@triton.jit
def exponential(x):
    """exp(x) for x <= 0, exactly 1 at 0; what is below 2^-126 is 0, which spares three of five instructions."""
    return tl.exp2(x * 1.4426950408889634)


@triton.jit
def over_tau(e, e_second):
    """p / tau, at most 1, which the top is taken for. A nan becomes 1, but stays in the sum of e."""
    return tl.minimum(e * (2.0 / (1.0 + e_second)), 1.0)


@triton.jit
def scaled_and_step(x, a, b, cut):
    """p h'(p) and h(p) of entries at x = p / tau, with the top taken for one at tau, where h is 1/2."""
    middle = x >= cut
    scaled = tl.where(middle, b, a) * x
    return scaled, scaled + tl.where(middle, 0.5 - b, 0.0)


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
    weight, by_loss, by_losses, smoothing, d, total, total_h, e_second, seconds, dot_h, dot_scaled, sum_scaled, tops,
    at_label, label_e, a, b, low, cut, c,
):  # fmt: skip
    """What the gradient of a row's entries is made of.

    Sums are over all entries, the top one among them as if it were at tau; `tops` is the slope there, `seconds` how
    many share second place. Each of these has its part of what goes through tau. Where they tie with the top, so has
    it: all that tells the top apart is then 0, and it does not matter that `tops` is the sum of many.
    """
    p, tau = 1.0 / total, (1.0 + e_second) / (2.0 * total)
    value, top_slope, by_tau = top(total, e_second, low, b, c)
    label_x = over_tau(label_e, e_second)
    label_scaled, label_h = scaled_and_step(label_x, a, b, cut)
    is_top = label_e >= 1.0
    mean = (dot_h + (value - 0.5) * tops + tl.where(is_top, value, label_h) * at_label) / total_h
    share = by_loss * weight / total_h
    entropy = by_loss * by_losses * weight
    rest = dot_scaled - b * tops - mean * (sum_scaled - b) + tl.where(is_top, 0.0, at_label * label_scaled)
    by_top = tops - mean + tl.where(is_top, at_label, 0.0)
    through_tau = share * by_top * by_tau
    half = 0.5 * p * (through_tau - share * rest / tau)
    top_scaled = p * top_slope
    factor = (entropy - share * by_top * top_scaled - tau * through_tau) * p
    tied = e_second >= 1.0
    at_second = tl.where(tied, 2.0 * half, half * e_second) / seconds
    at_target = share * at_label * tl.where(is_top, top_scaled, label_scaled) - entropy * (1.0 - smoothing)
    return mean, share, factor, top_scaled, tl.where(tied, 0.0, half), at_second, at_target, entropy * smoothing / d


@triton.jit
def entry_slopes(
    e, e_second, scaled, slope, is_label, mean, share, factor, top_scaled, at_top, at_second, at_target, spread
):  # fmt: skip
    """The gradient of entries, from what `row_slopes` gives for their rows; all of shapes that fit together."""
    is_top = e == 1.0  # not >= as elsewhere: a compiler that sees the same question keeps all answers, at more cost
    found = share * (slope - mean) * tl.where(is_top, top_scaled, scaled) + (e * factor - spread)
    found += tl.where(is_top, at_top, 0.0)
    found += tl.where(e == e_second, at_second, 0.0)
    return found + tl.where(is_label, at_target, 0.0)
