"""Triton functions for the metric of counts, its slopes, and a kernel of its own for counts that are summed already."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from evalign.confusion import Confusion
from evalign.kernels.gpu.launch import next_power_of_2
from evalign.kernels.plan import AGREEMENTS, FORMS, ClosedForm, first_order_only


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
    guess = tl.load(predicted + k, mask=k < d, other=0.0)
    return top, bottom, share, count, label, guess


@triton.jit
def mean_of_quotients(
    tp, predicted, actual, total, present, slopes, d, t0, t1, t2, t3, b0, b1, b2, b3, w0, w1, w2, w3,
    AVERAGE: tl.constexpr, MASKED: tl.constexpr, PER_LABEL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """1 - mean of top / bottom, 0 for counts of nothing; and the total. The slopes by tp and predicted to `slopes`."""
    everything = tl.load(total)
    tops, bottoms = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    shares, scores, plain = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    masses, labels = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    guesses, rates = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for at in range(0, d, BLOCK):
        k = at + tl.arange(0, BLOCK)
        top, bottom, share, count, label, guess = _classes(
            tp, predicted, actual, total, present, k, d, everything, t0, t1, t2, t3, b0, b1, b2, b3, w0, w1, w2, w3,
            AVERAGE, MASKED, PER_LABEL,
        )  # fmt: skip
        score = divided(top, bottom)[0]
        tops += top
        bottoms += bottom
        masses += count
        chosen = tl.where((k == 1) | (AVERAGE != 3), 1.0, 0.0)
        labels += chosen * label
        guesses += chosen * guess
        rates += tl.where((label == 0.0) & (count > 0.0), guess / tl.where(count > 0.0, count, 1.0), 0.0)
        shares += share
        # A class that does not count does not count where its score is nan either.
        scores += tl.where(share == 0.0, 0.0, share * score)
        plain += score
    if PER_LABEL:
        everything = tl.sum(masses, 0)
    nothing = everything == 0.0
    # Yes/no problems without a positive label: the share of rows that are flagged; see `Objective.metric_term`.
    alarms = (b2 > 0.0) & (PER_LABEL | (AVERAGE == 3))
    unlabelled = alarms & (tl.sum(labels, 0) == 0.0) & (everything > 0.0)
    one_row = 1.0 / tl.where(nothing, 1.0, everything)
    flagged = tl.sum(guesses, 0) * one_row
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
            top, bottom, share, count, label, _ = _classes(
                tp, predicted, actual, total, present, k, d, everything, t0, t1, t2, t3, b0, b1, b2, b3,
                w0, w1, w2, w3, AVERAGE, MASKED, PER_LABEL,
            )  # fmt: skip
            score, empty, safe = divided(top, bottom)
            if AVERAGE == 2:
                share = tl.where(all_empty, 1.0, share)
            share = tl.where(empty, 0.0, share / whole)
        share = tl.where(nothing | unlabelled, 0.0, share)
        by_predicted = -share * (t2 - score * b2) / safe
        by_predicted = tl.where(unlabelled & ((k == 1) | (AVERAGE != 3)), one_row, by_predicted)
        if AVERAGE == 0:
            rare = alarms & (label == 0.0) & (count > 0.0) & (unlabelled == 0)
            by_predicted = tl.where(rare, 1.0 / (d * tl.where(count > 0.0, count, 1.0)), by_predicted)
        tl.store(slopes + k, -share * (t0 - score * b0) / safe, mask=k < d)
        tl.store(slopes + d + k, by_predicted, mask=k < d)
    lost = 1.0 - value
    if AVERAGE == 0:
        lost += tl.where(alarms, tl.sum(rates, 0) / d, 0.0)
    return tl.where(nothing, 0.0, tl.where(unlabelled, flagged, lost)), everything


MCC = tl.constexpr(FORMS.index("mcc"))


@triton.jit
def agreement(
    tp, predicted, actual, total, slopes, d, t0, t1, t2, t3, b0, b1, b2, b3, w0, w1, w2, w3,
    FORM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """1 - the metric, 0 for counts of nothing; and the total. The derivatives by tp and predicted go to `slopes`."""
    everything = tl.load(total)
    n = everything.to(tl.float64)
    right, chance = tl.zeros([BLOCK], tl.float64), tl.zeros([BLOCK], tl.float64)
    hit, largest = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    of_guesses, of_labels = tl.zeros([BLOCK], tl.float64), tl.zeros([BLOCK], tl.float64)
    for at in range(0, d, BLOCK):
        k = at + tl.arange(0, BLOCK)
        hits, predictions, truths, label, _ = forms_of(
            tp, predicted, actual, total, k, d, everything, t0, t1, t2, t3, b0, b1, b2, b3, w0, w1, w2, w3, False
        )
        guesses, labels = predictions.to(tl.float64), truths.to(tl.float64)
        hit += tl.load(tp + k, mask=k < d, other=0.0)
        largest = tl.maximum(largest, label)
        right += hits
        chance += guesses * labels
        if FORM == MCC:
            of_guesses += guesses * (n - guesses)
            of_labels += labels * (n - labels)
    by_chance = tl.sum(chance, 0)
    if FORM == MCC:
        spread, other = tl.sum(of_guesses, 0), tl.sum(of_labels, 0)
        flat = (spread <= 0.0) | (other <= 0.0)
        bottom = tl.where(flat, 0.0, tl.sqrt(tl.where(flat, 1.0, spread)) * tl.sqrt(tl.where(flat, 1.0, other)))
        relative = bottom / tl.where(flat, 1.0, 2.0 * spread)
    else:
        bottom = n * n - by_chance
    value, empty, safe = divided(tl.sum(right, 0) * n - by_chance, bottom)
    scale = tl.where(empty, 0.0, 1.0 / safe)
    single = (tl.max(largest, 0) == everything) & (everything > 0.0)  # labels of one class only: accuracy
    each = 1.0 / tl.where(everything == 0.0, 1.0, everything)
    for at in range(0, d, BLOCK):
        k = at + tl.arange(0, BLOCK)
        _, guesses, labels, _, _ = forms_of(
            tp, predicted, actual, total, k, d, everything, t0, t1, t2, t3, b0, b1, b2, b3, w0, w1, w2, w3, False
        )
        growth = relative * (n - 2.0 * guesses) if FORM == MCC else -labels
        by_guesses = scale * (labels + value * growth)
        tl.store(slopes + k, tl.where(single, -each, by_guesses * b0 - scale * n * t0), mask=k < d)
        tl.store(slopes + d + k, tl.where(single, 0.0, by_guesses * b2 - scale * n * t2), mask=k < d)
    lost = tl.where(single, 1.0 - tl.sum(hit, 0) * each, 1.0 - value)
    return tl.where(everything == 0.0, 0.0, lost).to(tl.float32), everything


AVERAGES = tl.constexpr(len(FORMS) - len(AGREEMENTS))


@triton.jit
def value_of_counts(
    tp, predicted, actual, total, losses, present, loss, slopes, d, anchor,
    t0, t1, t2, t3, b0, b1, b2, b3, w0, w1, w2, w3,
    FORM: tl.constexpr, LOSSES: tl.constexpr, MASKED: tl.constexpr, PER_LABEL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """1 - metric + anchor * losses / total to `loss`; derivatives by tp, predicted and losses to `slopes` (2 d + 1).

    FORM is the metric's index in `plan.FORMS`. One program streams the classes twice, so that there may be any
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
        ctx.save_for_backward(slopes, tp, predicted)
        return loss

    @staticmethod
    def backward(ctx: Any, by_loss: Tensor) -> tuple[Tensor | None, ...]:
        slopes, *counts = ctx.saved_tensors
        with torch.no_grad():
            by_tp, by_predicted = (by_loss * slopes[:-1]).chunk(2)
        sources = *counts, by_loss
        return first_order_only(by_tp, *sources), first_order_only(by_predicted, *sources), None, None


def loss_of_counts(c: Confusion, metric: ClosedForm) -> Tensor:
    """1 - metric, 0 for counts of nothing; `c` before its labels are smoothed."""
    return LossOfCounts.apply(c.tp, c.predicted, c, metric)  # type: ignore[no-any-return]
