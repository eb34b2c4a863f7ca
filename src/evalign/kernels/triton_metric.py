"""1 - metric and its slopes by the counts in one launch, for metrics that are quotients: a dozen tiny kernels less."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from evalign.confusion import Confusion
from evalign.kernels.interface import once
from evalign.kernels.quotients import Quotient
from evalign.kernels.triton_launch import next_power_of_2

AVERAGES = ("macro", "micro", "weighted", "binary")


@triton.jit
def _linear(t0, t1, t2, t3, tp, actual, predicted, total):
    return t0 * tp + t1 * actual + t2 * predicted + t3 * total


@triton.jit
def _divided(top, bottom):
    """top / bottom, 0 where that is 0 / 0; whether it is, and by what may be divided."""
    empty = bottom == 0.0
    safe = tl.where(empty, 1.0, bottom)
    return tl.where(empty, 0.0, top / safe), empty, safe


@triton.jit
def _classes(
    tp, predicted, actual, total, present, k, d, everything, t0, t1, t2, t3, b0, b1, b2, b3, w0, w1, w2, w3,
    AVERAGE: tl.constexpr, MASKED: tl.constexpr, PER_LABEL: tl.constexpr,
):  # fmt: skip
    """top and bottom of classes k, their share before it is divided by the sum of shares, and the total of each."""
    inside = k < d
    hit, label = tl.load(tp + k, mask=inside, other=0.0), tl.load(actual + k, mask=inside, other=0.0)
    guess = tl.load(predicted + k, mask=inside, other=0.0)
    count = tl.load(total + k, mask=inside, other=0.0) if PER_LABEL else tl.where(inside, everything, 0.0)
    top = _linear(t0, t1, t2, t3, hit, label, guess, count)
    bottom = _linear(b0, b1, b2, b3, hit, label, guess, count)
    if AVERAGE == 3:
        share = tl.where(k == 1, 1.0, 0.0)
    elif AVERAGE == 2:
        share = tl.where(inside, _linear(w0, w1, w2, w3, hit, label, guess, count), 0.0)
    elif MASKED:
        share = tl.load(present + k, mask=inside, other=0).to(tl.float32)
    else:
        share = tl.where(label > 0.0, 1.0, 0.0)
    return top, bottom, share, count


@triton.jit
def value_of_counts(
    tp, predicted, actual, total, losses, present, loss, slopes, d, anchor,
    t0, t1, t2, t3, b0, b1, b2, b3, w0, w1, w2, w3,
    AVERAGE: tl.constexpr, LOSSES: tl.constexpr, MASKED: tl.constexpr, PER_LABEL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """1 - mean of top / bottom + anchor * losses / total to `loss`; derivatives by tp, predicted, losses to `slopes`.

    The slopes are (2 d + 1). One program streams the classes twice, so that there may be any number of them.
    """
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
        score = _divided(top, bottom)[0]
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
        value, all_empty, all_safe = _divided(tl.sum(tops, 0), tl.sum(bottoms, 0))
    else:
        value, all_empty, whole = _divided(tl.sum(scores, 0), added)
        if AVERAGE == 2:  # without a label every class weighs the same
            value = tl.where(all_empty, tl.sum(plain, 0) / d, value)
            whole = tl.where(all_empty, d, whole)
    result = tl.where(nothing, 0.0, 1.0 - value)
    if LOSSES:
        by_losses = tl.where(nothing, 0.0, anchor / tl.where(nothing, 1.0, everything))
        result += tl.where(nothing, 0.0, by_losses * tl.load(losses))
        tl.store(slopes + 2 * d, by_losses)
    tl.store(loss, result)
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
            score, empty, safe = _divided(top, bottom)
            if AVERAGE == 2:
                share = tl.where(all_empty, 1.0, share)
            share = tl.where(empty, 0.0, share / whole)
        share = tl.where(nothing, 0.0, share)
        tl.store(slopes + k, -share * (t0 - score * b0) / safe, mask=k < d)
        tl.store(slopes + d + k, -share * (t2 - score * b2) / safe, mask=k < d)


@triton.jit
def quotient_kernel(
    tp, predicted, actual, total, losses, present, loss, slopes, d, anchor,
    t0, t1, t2, t3, b0, b1, b2, b3, w0, w1, w2, w3,
    AVERAGE: tl.constexpr, LOSSES: tl.constexpr, MASKED: tl.constexpr, PER_LABEL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    value_of_counts(
        tp, predicted, actual, total, losses, present, loss, slopes, d, anchor,
        t0, t1, t2, t3, b0, b1, b2, b3, w0, w1, w2, w3, AVERAGE, LOSSES, MASKED, PER_LABEL, BLOCK,
    )  # fmt: skip


def loss_and_slopes(
    tp: Tensor,
    predicted: Tensor,
    actual: Tensor,
    total: Tensor,
    quotient: Quotient,
    average: str,
    *,
    per_label: bool,
    present: Tensor | None = None,
    losses: Tensor | None = None,
    anchor: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """1 - the averaged metric + anchor * losses / total (0 for counts of nothing), and its derivatives.

    These are by tp (d), by predicted (d) and, with losses, by them (1), in one vector. A macro mean is over the classes
    that are `present`, by default those with a label.
    """
    d = tp.shape[0]
    tp, predicted, actual, total = (x.contiguous() for x in (tp, predicted, actual, total))
    loss, slopes = tp.new_empty(()), tp.new_empty(2 * d + 1)
    quotient_kernel[(1,)](
        tp, predicted, actual, total, tp if losses is None else losses, tp if present is None else present, loss,
        slopes, d, float(anchor), *quotient.top, *quotient.bottom, *quotient.weight, AVERAGE=AVERAGES.index(average),
        LOSSES=losses is not None, MASKED=present is not None, PER_LABEL=per_label, BLOCK=block(d),
        num_warps=4 if d <= 2048 else 16,
    )  # fmt: skip
    return loss, slopes


def block(d: int) -> int:
    return min(8192, next_power_of_2(max(d, 2)))


class QuotientLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tp: Tensor, predicted: Tensor, c: Confusion, quotient: Quotient, average: str) -> Tensor:
        loss, slopes = loss_and_slopes(
            tp, predicted, c.actual, c.total, quotient, average, per_label=c.multilabel, present=c.present
        )
        ctx.save_for_backward(slopes)
        return loss

    @staticmethod
    def backward(ctx: Any, by_loss: Tensor) -> tuple[Tensor | None, ...]:
        (slopes,) = ctx.saved_tensors
        with torch.no_grad():
            by_tp, by_predicted = (by_loss * slopes[:-1]).chunk(2)
        return once(by_tp), once(by_predicted), None, None, None


def quotient_loss(c: Confusion, quotient: Quotient, average: str) -> Tensor:
    """1 - the averaged metric, 0 for counts of nothing; `c` before its labels are smoothed."""
    return QuotientLoss.apply(c.tp, c.predicted, c, quotient, average)  # type: ignore[no-any-return]
