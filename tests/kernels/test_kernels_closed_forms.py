"""Value and slopes of metrics of a closed form, by compiled loops and by Triton, are those of autograd."""

import numpy as np
import pytest
import torch

from evalign import metrics
from evalign.confusion import Confusion
from evalign.kernels.plan import AGREEMENTS, CLOSED_FORMS, Plan, closed_form
from evalign.objective import Objective
from evalign.steps import StepChoice

AVERAGED = [(name, average) for name in metrics.METRICS for average in metrics.AVERAGES if metrics.is_averaged(name)]
OTHERS = [(name, "macro") for name in ("accuracy", "balanced_accuracy", "mcc", "cohen_kappa")]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CASES = {  # classes, every label a problem of its own, absent classes
    "two classes": (2, False, ()),
    "absent classes": (5, False, (1, 3)),
    "one class has a label": (3, False, (0, 2)),
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
    if not multilabel:
        predicted = tp + (total - tp.sum()) * torch.rand(d, generator=generator).softmax(0)
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


def compiled(form, tp, predicted, actual, total):
    compiled_whole = pytest.importorskip("evalign.kernels.cpu.cpu_loss", exc_type=ImportError)
    sums, totals = (x.double().numpy() for x in (torch.stack([tp, actual, predicted]), torch.atleast_1d(total)))
    slopes = np.empty((2, sums.shape[1]))
    value = compiled_whole.metric_of(sums, totals, Plan(form), slopes)
    return [torch.tensor(value, dtype=tp.dtype), *torch.from_numpy(slopes).to(tp.dtype)]


def by_triton(form, tp, predicted, actual, total, present=None):
    triton_metric = pytest.importorskip("evalign.kernels.gpu.gpu_loss", exc_type=ImportError)
    d, there = len(tp), (x.to(DEVICE) for x in (tp, predicted, actual, total))
    mask = None if present is None else present.to(DEVICE)
    loss, slopes = triton_metric.loss_and_slopes(*there, form, per_label=total.dim() == 1, present=mask)
    return [loss.cpu(), slopes[:d].cpu(), slopes[d : 2 * d].cpu()]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize(("metric", "average"), AVERAGED + OTHERS)
def test_closed_forms_are_the_metrics(metric, average, smoothing, case):
    d, multilabel, absent = CASES[case]
    if metric not in CLOSED_FORMS["multilabel" if multilabel else "multiclass"]:
        assert multilabel
        assert not metrics.is_averaged(metric)
        return
    if average == "binary" and case != "two classes":
        return  # refused: test_errors
    given = counts(d, multilabel, absent)
    expected = by_autograd(metric, average, smoothing, multilabel, *given)
    form = closed_form(metric, average, 2 if multilabel else d, label_smoothing=smoothing)
    for found in (compiled(form, *given), by_triton(form, *given), by_triton(form, *given, present=given[2] > 0)):
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def of_a_batch(n, shares, right):
    """Whole labels of n rows; of each class the share `right` is found, the rest is taken for all others alike."""
    actual = (n * shares).round()
    actual[0] += n - actual.sum()
    tp = right * actual
    missed = actual - tp
    return tp, tp + (missed.sum() - missed) / (len(shares) - 1), actual, actual.sum()


@pytest.mark.parametrize("metric", AGREEMENTS)
@pytest.mark.parametrize("right", [0.0, 0.3, 0.999])
@pytest.mark.parametrize(
    ("n", "d", "rare"), [(70_000, 10, 0.1), (70_000, 10, 1e-4), (65_536, 2, 1e-4), (8192, 1000, 1e-3)]
)
def test_agreements_of_many_rows_in_float32(metric, n, d, rare, right):
    """However much larger one class is than all others: squares of counts and differences near 1 lose digits."""
    shares = torch.full((d,), rare, dtype=torch.float64)
    shares[0] = 1 - rare * (d - 1)
    given = tuple(x.float() for x in of_a_batch(n, shares, right))
    expected = by_autograd(metric, "macro", 0.0, False, *(x.double() for x in given))
    largest = max(x.abs().max() for x in expected[1:])
    form = closed_form(metric, "macro", d)
    for found in (compiled(form, *given), by_triton(form, *given)):
        assert abs(found[0].double() - expected[0]) < 3e-7
        for ours, theirs in zip(found[1:], expected[1:], strict=True):
            assert (ours.double() - theirs).abs().max() < 3e-7 * largest


@pytest.mark.parametrize("metric", AGREEMENTS)
def test_agreement_where_it_is_not_defined(metric):
    both, one, nan = torch.tensor([3.0, 5.0]), torch.tensor([8.0, 0.0]), torch.tensor([torch.nan, 5.0])
    total, form = both.sum(), closed_form(metric, "macro", 2)
    cases = {"labels": (torch.tensor([3.0, 0.0]), both, one), "predictions": (torch.tensor([3.0, 0.0]), one, both)}
    cases |= {"all": (one, one, one), "never": (torch.zeros(2), one, one.flip(0))}
    if metric == "mcc":  # the root of what rounding left below 0
        more = torch.tensor([8.00001, -1e-5])
        cases |= {"more labels": (one, both, more), "more predictions": (one, more, both)}
    for name, (tp, predicted, actual) in cases.items():
        expected = by_autograd(metric, "macro", 0.0, False, tp, predicted, actual, total)
        single = name in ("labels", "all", "never")  # labels of one class: accuracy, which has a gradient
        assert expected[0] == (1 - tp.sum() / total if single else 1), name  # else a score of 0, as scikit-learn's
        for found in (compiled(form, tp, predicted, actual, total), by_triton(form, tp, predicted, actual, total)):
            torch.testing.assert_close(found, expected, msg=name)
    for counted in ((nan, both, both), (both, nan, both)):
        for found in (compiled(form, *counted, total), by_triton(form, *counted, total)):
            assert found[0].isnan()


@pytest.mark.parametrize("beta", [0.5, 2.0])
def test_beta_is_part_of_the_form(beta):
    form = closed_form("fbeta", "macro", 4, beta=beta)
    assert form.top == pytest.approx((1 + beta**2, 0, 0, 0))
    assert form.bottom == pytest.approx((0, beta**2, 1, 0))
