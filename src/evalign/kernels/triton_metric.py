"""1 - metric and its slopes by the counts in one launch, for metrics of a closed form: dozens of tiny kernels less."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from evalign.confusion import Confusion
from evalign.kernels.closed_forms import AGREEMENTS, FORMS, ClosedForm
from evalign.kernels.interface import once
from evalign.kernels.triton_agreement import agreement
from evalign.kernels.triton_launch import next_power_of_2
from evalign.kernels.triton_quotients import mean_of_quotients

AVERAGES = tl.constexpr(len(FORMS) - len(AGREEMENTS))


@triton.jit
def value_of_counts(
    tp, predicted, actual, total, losses, present, loss, slopes, d, anchor,
    t0, t1, t2, t3, b0, b1, b2, b3, w0, w1, w2, w3,
    FORM: tl.constexpr, LOSSES: tl.constexpr, MASKED: tl.constexpr, PER_LABEL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """1 - metric + anchor * losses / total to `loss`; derivatives by tp, predicted and losses to `slopes` (2 d + 1).

    FORM is the metric's place in `closed_forms.FORMS`. One program streams the classes twice, so that there may be any
    number of them.
    """
    if FORM < AVERAGES:
        result, everything = mean_of_quotients(
            tp, predicted, actual, total, present, slopes, d, t0, t1, t2, t3, b0, b1, b2, b3, w0, w1, w2, w3,
            FORM, MASKED, PER_LABEL, BLOCK,
        )  # fmt: skip
    else:
        result, everything = agreement(
            tp, predicted, actual, total, slopes, d, t0, t1, t2, t3, b0, b1, b2, b3, w0, w1, w2, w3, FORM, BLOCK
        )
    if LOSSES:
        nothing = everything == 0.0
        by_losses = tl.where(nothing, 0.0, anchor / tl.where(nothing, 1.0, everything))
        result += tl.where(nothing, 0.0, by_losses * tl.load(losses))
        tl.store(slopes + 2 * d, by_losses)
    tl.store(loss, result)


@triton.jit
def metric_kernel(
    tp, predicted, actual, total, losses, present, loss, slopes, d, anchor,
    t0, t1, t2, t3, b0, b1, b2, b3, w0, w1, w2, w3,
    FORM: tl.constexpr, LOSSES: tl.constexpr, MASKED: tl.constexpr, PER_LABEL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    value_of_counts(
        tp, predicted, actual, total, losses, present, loss, slopes, d, anchor,
        t0, t1, t2, t3, b0, b1, b2, b3, w0, w1, w2, w3, FORM, LOSSES, MASKED, PER_LABEL, BLOCK,
    )  # fmt: skip


def loss_and_slopes(
    tp: Tensor,
    predicted: Tensor,
    actual: Tensor,
    total: Tensor,
    metric: ClosedForm,
    *,
    per_label: bool,
    present: Tensor | None = None,
    losses: Tensor | None = None,
    anchor: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """1 - metric + anchor * losses / total (0 for counts of nothing), and its derivatives.

    These are by tp (d), by predicted (d) and, with losses, by them (1), in one vector. A macro mean is over the classes
    that are `present`, by default those with a label.
    """
    d = tp.shape[0]
    tp, predicted, actual, total = (x.contiguous() for x in (tp, predicted, actual, total))
    loss, slopes = tp.new_empty(()), tp.new_empty(2 * d + 1)
    metric_kernel[(1,)](
        tp, predicted, actual, total, tp if losses is None else losses, tp if present is None else present, loss,
        slopes, d, float(anchor), *metric.numbers, FORM=metric.code, LOSSES=losses is not None,
        MASKED=present is not None, PER_LABEL=per_label, BLOCK=block(d, metric), num_warps=4 if d <= 2048 else 16,
    )  # fmt: skip
    return loss, slopes


def block(d: int, metric: ClosedForm) -> int:
    """Classes at a time: as many as there are registers for, of which a float64 takes two."""
    return min(4096 if metric.name in AGREEMENTS else 8192, next_power_of_2(max(d, 2)))


class LossOfCounts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tp: Tensor, predicted: Tensor, c: Confusion, metric: ClosedForm) -> Tensor:
        loss, slopes = loss_and_slopes(
            tp, predicted, c.actual, c.total, metric, per_label=c.multilabel, present=c.present
        )
        ctx.save_for_backward(slopes)
        return loss

    @staticmethod
    def backward(ctx: Any, by_loss: Tensor) -> tuple[Tensor | None, ...]:
        (slopes,) = ctx.saved_tensors
        with torch.no_grad():
            by_tp, by_predicted = (by_loss * slopes[:-1]).chunk(2)
        return once(by_tp), once(by_predicted), None, None


def loss_of_counts(c: Confusion, metric: ClosedForm) -> Tensor:
    """1 - metric, 0 for counts of nothing; `c` before its labels are smoothed."""
    return LossOfCounts.apply(c.tp, c.predicted, c, metric)  # type: ignore[no-any-return]
