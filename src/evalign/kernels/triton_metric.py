"""1 - metric and its slopes by the counts in one launch, for metrics that are quotients: a dozen tiny kernels less."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from evalign.confusion import Confusion
from evalign.kernels.interface import once
from evalign.kernels.quotients import Quotient
from evalign.numerics import safe_divide

AVERAGES = ("macro", "micro", "weighted", "binary")


@triton.jit
def _linear(t0, t1, t2, t3, tp, actual, predicted, total):
    return t0 * tp + t1 * actual + t2 * predicted + t3 * total


@triton.jit
def quotient_kernel(
    tp, actual, predicted, total, present, loss, slopes, d,
    t0, t1, t2, t3, b0, b1, b2, b3, w0, w1, w2, w3,
    AVERAGE: tl.constexpr, MASKED: tl.constexpr, PER_LABEL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """1 - mean of top / bottom to `loss`, its derivatives by tp and predicted to `slopes` (2, d)."""
    k = tl.arange(0, BLOCK)
    inside = k < d
    hit, label = tl.load(tp + k, mask=inside, other=0.0), tl.load(actual + k, mask=inside, other=0.0)
    guess = tl.load(predicted + k, mask=inside, other=0.0)
    if PER_LABEL:
        count = tl.load(total + k, mask=inside, other=0.0)
        everything = tl.sum(count, 0)
    else:
        everything = tl.load(total)
        count = tl.where(inside, everything, 0.0)
    top = _linear(t0, t1, t2, t3, hit, label, guess, count)
    bottom = _linear(b0, b1, b2, b3, hit, label, guess, count)
    if AVERAGE == 1:
        top, bottom = tl.sum(top, 0) + 0.0 * top, tl.sum(bottom, 0) + 0.0 * bottom
    empty = bottom == 0.0
    safe = tl.where(empty, 1.0, bottom)
    score = tl.where(empty, 0.0, top / safe)
    if AVERAGE == 1:
        share = tl.where(k == 0, 1.0, 0.0)
    elif AVERAGE == 3:
        share = tl.where(k == 1, 1.0, 0.0)
    else:
        share = tl.where(inside, 1.0, 0.0)
        if AVERAGE == 2:
            weight = tl.where(inside, _linear(w0, w1, w2, w3, hit, label, guess, count), 0.0)
            share = tl.where(tl.sum(weight, 0) == 0.0, share, weight)
        elif MASKED:
            share = tl.load(present + k, mask=inside, other=0).to(tl.float32)
        else:
            share = tl.where(label > 0.0, 1.0, 0.0)
        added = tl.sum(share, 0)
        share = tl.where(added == 0.0, 0.0, share / tl.where(added == 0.0, 1.0, added))
    value = tl.sum(tl.where(share == 0.0, 0.0, share * score), 0)
    if AVERAGE == 1:
        share = tl.where(inside, 1.0, 0.0)
    share = tl.where(everything == 0.0, 0.0, tl.where(empty, 0.0, share))
    tl.store(loss, tl.where(everything == 0.0, 0.0, 1.0 - value))
    tl.store(slopes + k, -share * (t0 - score * b0) / safe, mask=inside)
    tl.store(slopes + d + k, -share * (t2 - score * b2) / safe, mask=inside)


def value_and_slopes(
    tp: Tensor,
    predicted: Tensor,
    actual: Tensor,
    total: Tensor,
    quotient: Quotient,
    average: str,
    *,
    per_label: bool,
    present: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """1 - the averaged metric of soft counts (0 for counts of nothing), and its derivatives by tp and predicted.

    A macro mean is over the classes that are `present`, by default those with a label.
    """
    d = tp.shape[0]
    both = tp.new_empty(2 * d + 1)
    tp, predicted, actual, total = (x.contiguous() for x in (tp, predicted, actual, total))
    quotient_kernel[(1,)](
        tp, actual, predicted, total, tp if present is None else present, both[2 * d :], both, d,
        *quotient.top, *quotient.bottom, *quotient.weight, AVERAGE=AVERAGES.index(average),
        MASKED=present is not None, PER_LABEL=per_label, BLOCK=triton.next_power_of_2(max(d, 2)),
        num_warps=4 if d <= 2048 else 16,
    )  # fmt: skip
    return both[2 * d], both[:d], both[d : 2 * d]


def anchored(loss: Tensor, losses: Tensor, total: Tensor, anchor: float) -> tuple[Tensor, Tensor]:
    """loss + anchor * losses / total, and its derivative by `losses`."""
    mass = total.sum()
    slope = safe_divide(torch.full_like(mass, anchor), mass)
    return loss + slope * losses, slope


class QuotientLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tp: Tensor, predicted: Tensor, c: Confusion, quotient: Quotient, average: str) -> Tensor:
        loss, by_tp, by_predicted = value_and_slopes(
            tp, predicted, c.actual, c.total, quotient, average, per_label=c.multilabel, present=c.present
        )
        ctx.save_for_backward(by_tp, by_predicted)
        return loss

    @staticmethod
    def backward(ctx: Any, by_loss: Tensor) -> tuple[Tensor | None, ...]:
        by_tp, by_predicted = ctx.saved_tensors
        with torch.no_grad():
            by_tp, by_predicted = by_loss * by_tp, by_loss * by_predicted
        return once(by_tp), once(by_predicted), None, None, None


def quotient_loss(c: Confusion, quotient: Quotient, average: str) -> Tensor:
    """1 - the averaged metric, 0 for counts of nothing; `c` before its labels are smoothed."""
    return QuotientLoss.apply(c.tp, c.predicted, c, quotient, average)  # type: ignore[no-any-return]
