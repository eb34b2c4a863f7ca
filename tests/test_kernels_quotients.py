"""Value and slopes of quotient metrics, by a compiled loop and by Triton, are those of the metrics by autograd."""

import itertools

import numpy as np
import pytest
import torch

from evalign import metrics
from evalign.confusion import Confusion
from evalign.kernels.quotients import quotient
from evalign.objective import Objective
from evalign.steps import StepChoice

AVERAGED = [name for name in metrics.METRICS if metrics.is_averaged(name)]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CASES = {  # classes, every label a problem of its own, absent classes
    "two classes": (2, False, ()),
    "absent classes": (5, False, (1, 3)),
    "labels": (5, True, (0,)),
    "labels that never come": (3, True, range(3)),
    "nothing": (40, False, range(40)),
}


def counts(d, multilabel, absent):
    generator = torch.Generator().manual_seed(d)
    actual = 10 * torch.rand(d, generator=generator) + 1
    actual[list(absent)] = 0
    tp = actual * torch.rand(d, generator=generator)
    predicted = tp + 5 * torch.rand(d, generator=generator)
    total = 2 * (actual + predicted) if multilabel else actual.sum()
    if len(absent) == d:
        predicted, tp = 0 * predicted, 0 * tp
    return tp, predicted, actual, total


def by_autograd(metric, average, smoothing, multilabel, tp, predicted, actual, total):
    """The loss of `Objective` and its slopes, by torch's operations on the CPU."""
    task = "multilabel" if multilabel else "multiclass"
    objective = Objective(metric, task, StepChoice("linear"), average=average, label_smoothing=smoothing)
    x, q = tp.clone().requires_grad_(), predicted.clone().requires_grad_()
    loss = objective.metric_term(Confusion(x, actual, q, total, present=actual > 0, multilabel=multilabel))
    return [loss.detach(), *torch.autograd.grad(loss, [x, q], materialize_grads=True)]


def compiled(form, average, tp, predicted, actual, total):
    metric_loops = pytest.importorskip("evalign.kernels.metric_loops", exc_type=ImportError)
    sums, totals = (x.double().numpy() for x in (torch.stack([tp, actual, predicted]), torch.atleast_1d(total)))
    slopes = np.empty((2, len(tp)))
    value = metric_loops.value_and_slopes(sums, totals, np.array(form), metric_loops.AVERAGE[average], slopes)
    return [torch.tensor(value, dtype=tp.dtype), *torch.from_numpy(slopes).float()]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize(("metric", "average"), [*itertools.product(AVERAGED, metrics.AVERAGES)])
def test_quotients_are_the_metrics(metric, average, smoothing, case):
    d, multilabel, absent = CASES[case]
    if average == "binary" and case != "two classes":
        return  # refused: test_errors
    given = counts(d, multilabel, absent)
    expected = by_autograd(metric, average, smoothing, multilabel, *given)
    form = quotient(metric, 2 if multilabel else d, label_smoothing=smoothing)
    found = compiled(form, average, *given)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    triton_metric = pytest.importorskip("evalign.kernels.triton_metric", exc_type=ImportError)
    present = (given[2] > 0).to(DEVICE)
    for mask in (None, present):
        there = (x.to(DEVICE) for x in given)
        loss, slopes = triton_metric.loss_and_slopes(*there, form, average, per_label=multilabel, present=mask)
        for ours, theirs in zip((loss, slopes[:d], slopes[d : 2 * d]), expected, strict=True):
            torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("beta", [0.5, 2.0])
def test_beta_is_part_of_the_quotient(beta):
    form = quotient("fbeta", 4, beta=beta)
    assert form.top == pytest.approx((1 + beta**2, 0, 0, 0))
    assert form.bottom == pytest.approx((0, beta**2, 1, 0))
