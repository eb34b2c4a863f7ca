"""1 - the average over classes of a quotient of counts, and its slopes by the counts; see `metric_loops`."""

import triton
import triton.language as tl

from evalign.kernels.triton_forms import divided, forms_of


@triton.jit
def _classes(
    tp, predicted, actual, total, present, k, d, everything, t0, t1, t2, t3, b0, b1, b2, b3, w0, w1, w2, w3,
    AVERAGE: tl.constexpr, MASKED: tl.constexpr, PER_LABEL: tl.constexpr,
):  # fmt: skip
    """top and bottom of classes k, their share before it is divided by the sum of shares, and the total of each."""
    top, bottom, share, label, count = forms_of(
        tp, predicted, actual, total, k, d, everything, t0, t1, t2, t3, b0, b1, b2, b3, w0, w1, w2, w3, PER_LABEL
    )
    if AVERAGE == 3:
        share = tl.where(k == 1, 1.0, 0.0)
    elif AVERAGE != 2:
        share = tl.load(present + k, mask=k < d, other=0).to(tl.float32) if MASKED else tl.where(label > 0.0, 1.0, 0.0)
    return top, bottom, share, count


@triton.jit
def mean_of_quotients(
    tp, predicted, actual, total, present, slopes, d, t0, t1, t2, t3, b0, b1, b2, b3, w0, w1, w2, w3,
    AVERAGE: tl.constexpr, MASKED: tl.constexpr, PER_LABEL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """1 - mean of top / bottom, 0 for counts of nothing; and the total. The slopes by tp and predicted to `slopes`."""
    everything = tl.load(total)
    tops, bottoms = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    shares, scores, plain = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    masses = tl.zeros([BLOCK], tl.float32)
    for at in range(0, d, BLOCK):
        k = at + tl.arange(0, BLOCK)
        top, bottom, share, count = _classes(
            tp, predicted, actual, total, present, k, d, everything, t0, t1, t2, t3, b0, b1, b2, b3, w0, w1, w2, w3,
            AVERAGE, MASKED, PER_LABEL,
        )  # fmt: skip
        score = divided(top, bottom)[0]
        tops += top
        bottoms += bottom
        masses += count
        shares += share
        # A class that does not count does not count where its score is nan either.
        scores += tl.where(share == 0.0, 0.0, share * score)
        plain += score
    if PER_LABEL:
        everything = tl.sum(masses, 0)
    nothing = everything == 0.0
    added = tl.sum(shares, 0)
    if AVERAGE == 1:
        value, all_empty, all_safe = divided(tl.sum(tops, 0), tl.sum(bottoms, 0))
    else:
        value, all_empty, whole = divided(tl.sum(scores, 0), added)
        if AVERAGE == 2:  # without a label every class weighs the same
            value = tl.where(all_empty, tl.sum(plain, 0) / d, value)
            whole = tl.where(all_empty, d, whole)
    for at in range(0, d, BLOCK):
        k = at + tl.arange(0, BLOCK)
        if AVERAGE == 1:
            share = tl.where(all_empty, 0.0, 1.0) + tl.zeros([BLOCK], tl.float32)
            score, safe = value, all_safe
        else:
            top, bottom, share, count = _classes(
                tp, predicted, actual, total, present, k, d, everything, t0, t1, t2, t3, b0, b1, b2, b3,
                w0, w1, w2, w3, AVERAGE, MASKED, PER_LABEL,
            )  # fmt: skip
            score, empty, safe = divided(top, bottom)
            if AVERAGE == 2:
                share = tl.where(all_empty, 1.0, share)
            share = tl.where(empty, 0.0, share / whole)
        share = tl.where(nothing, 0.0, share)
        tl.store(slopes + k, -share * (t0 - score * b0) / safe, mask=k < d)
        tl.store(slopes + d + k, -share * (t2 - score * b2) / safe, mask=k < d)
    return tl.where(nothing, 0.0, 1.0 - value), everything
