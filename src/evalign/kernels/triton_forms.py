"""What the endings of kernels are made of: linear forms of the counts, and division by what may be 0."""

import triton
import triton.language as tl


@triton.jit
def linear(t0, t1, t2, t3, tp, actual, predicted, total):
    return t0 * tp + t1 * actual + t2 * predicted + t3 * total


@triton.jit
def divided(top, bottom):
    """top / bottom, 0 where that is 0 / 0; whether it is, and by what may be divided."""
    empty = bottom == 0.0
    safe = tl.where(empty, 1.0, bottom)
    return tl.where(empty, 0.0, top / safe), empty, safe


@triton.jit
def forms_of(
    tp, predicted, actual, total, k, d, everything, t0, t1, t2, t3, b0, b1, b2, b3, w0, w1, w2, w3,
    PER_LABEL: tl.constexpr,
):  # fmt: skip
    """The three linear forms of the counts of classes k, see `ClosedForm`; their labels and totals. 0 beyond d."""
    inside = k < d
    hit, label = tl.load(tp + k, mask=inside, other=0.0), tl.load(actual + k, mask=inside, other=0.0)
    guess = tl.load(predicted + k, mask=inside, other=0.0)
    count = tl.load(total + k, mask=inside, other=0.0) if PER_LABEL else tl.where(inside, everything, 0.0)
    top = linear(t0, t1, t2, t3, hit, label, guess, count)
    bottom = linear(b0, b1, b2, b3, hit, label, guess, count)
    weight = linear(w0, w1, w2, w3, hit, label, guess, count)
    return top, bottom, weight, label, count
