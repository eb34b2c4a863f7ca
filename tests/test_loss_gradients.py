"""Gradients in float64 against finite differences: of our own loss by gradcheck, and of the slow loop."""

from functools import partial

import pytest
import torch

from evalign import MetricLoss, metric_loss
from evalign.membership import BTG_GRID
from reference import loops
from test_losses import BACKENDS, SLOW_STEPS, TASKS, WITH_AUROC, batch, loss_and_gradient

STEPS = {
    **{f"annealed {t}": {"temperature": t} for t in (0.05, 0.2, 0.35)},
    "linear": {"step": "linear", "delta": 0.15},
    "sigmoid": {"step": "sigmoid", "k": 6.0},
}


def small(task):
    """Few rows with random logits: no probability comes near a kink of a step."""
    return batch(task, n=9, classes=3, seed=11)


def function_of_counts(c):
    return (c.tp[1] / (c.actual[1] + c.fp[0]) + c.tn[0] / c.total.sum()) / 2


def grid(metric):
    """Fixed thresholds for the area: by ranks it is a constant nearly everywhere, with another function's gradient."""
    return {"threshold": BTG_GRID} if metric == "auroc" else {}


def passes(loss, *inputs):
    return torch.autograd.gradcheck(loss, [x.detach().clone().requires_grad_() for x in inputs], eps=1e-7, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(("metric", "task"), [*WITH_AUROC, *((function_of_counts, t) for t in TASKS)])
def test_gradcheck_of_every_metric_task_and_step(metric, task, step, backend):
    z, y = small(task)
    assert passes(lambda z: metric_loss(z, y, metric, task=task, backend=backend, **STEPS[step], **grid(metric)), z)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize(
    "options",
    [
        {"metric": "f1", "anchor": 0.7},
        {"metric": "mcc", "anchor": 0.7, "label_smoothing": 0.1},
        {"metric": "f1", "offset": [0.3, -0.4, 0.2]},
        {"metric": "f1", "weight": [1.0, 2.0, 0.5], "anchor": 0.3},
        {"metric": "fbeta", "beta": [0.5, 2.0, 1.0]},
        {"metric": "fbeta", "beta": 3.0, "average": "micro"},
        {"metric": "recall", "average": "weighted", "label_smoothing": 0.2},
        {"metric": "precision", "threshold": 0.3},
        {"metric": "jaccard", "threshold": 0.8, "step": "linear"},
        {"metric": "auroc", "threshold": [0.2, 0.45, 0.7]},
        {"metric": "f1", "ignore_index": 0, "anchor": 1.0},
    ],
    ids=str,
)
def test_gradcheck_of_every_option(options, task, backend):
    z, y = small(task)
    classes = 2 if task == "binary" else 3
    options = {
        k: v[:classes] if k in ("offset", "weight", "beta") and isinstance(v, list) else v for k, v in options.items()
    }
    loss = MetricLoss(task=task, backend=backend, **options)
    assert passes(lambda z: loss(z, y), z)


@pytest.mark.parametrize("task", ["binary", "multilabel"])
@pytest.mark.parametrize("metric", ["f1", "mcc", "gmean"])
def test_gradcheck_of_a_grid_of_thresholds(metric, task):
    z, y = small(task)
    assert passes(lambda z: metric_loss(z, y, metric, task=task, threshold=[0.2, 0.5, 0.75]), z)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("metric", ["f1", "mcc", "auroc"])
def test_gradcheck_of_probabilities(metric, task, backend):
    z, y = small(task)
    p = z.softmax(1) if task == "multiclass" else z.sigmoid()
    options = {"task": task, "anchor": 0.5, "from_logits": False, "backend": backend, **grid(metric)}
    assert passes(lambda p: metric_loss(p, y, metric, **options), p)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("metric", "task"), WITH_AUROC)
def test_gradcheck_of_sample_weights(metric, task, backend):
    z, y = small(task)
    w = 0.5 + torch.rand(len(y), dtype=torch.float64, generator=torch.Generator().manual_seed(12))
    options = {"task": task, "anchor": 0.5, "backend": backend, **grid(metric)}
    assert passes(lambda z: metric_loss(z, y, metric, sample_weight=w, **options), z)
    assert passes(lambda z, w: metric_loss(z, y, metric, sample_weight=w, **options), z, w)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("step", SLOW_STEPS)
@pytest.mark.parametrize("metric", ["f1", "mcc", "quadratic_kappa"])
def test_the_gradient_through_the_dynamic_threshold_is_the_slow_loops(metric, step, backend):
    z, y = small("multiclass")
    slow, options = SLOW_STEPS[step]
    _, gradient = loss_and_gradient(z, y, metric, backend=backend, **options)
    value = partial(loops.loss, metric, "multiclass", labels=y.tolist(), step=slow)
    for i in range(len(y)):
        for k in range(3):
            up, down = z.tolist(), z.tolist()
            up[i][k], down[i][k] = up[i][k] + 1e-6, down[i][k] - 1e-6
            expected = (value(logits=up) - value(logits=down)) / 2e-6
            assert gradient[i, k].item() == pytest.approx(expected, abs=1e-7)


@pytest.mark.parametrize("task", TASKS)
def test_the_temperature_may_be_differentiated(task):
    z, y = small(task)
    for temperature in (0.05, 0.3):
        t = torch.tensor(temperature, dtype=torch.float64)
        assert passes(lambda t: metric_loss(z, y, "f1", task=task, temperature=t, backend="eager"), t)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("metric", "task"), WITH_AUROC)
def test_at_temperature_0_4_the_gradient_is_finite(metric, task, backend):
    z, y = batch(task)
    z[0] = 40.0 if task != "multiclass" else torch.tensor([40.0, -40, -40, -40])  # probabilities of exactly 0 and 1
    z[1] = 0.0
    loss, gradient = loss_and_gradient(z, y, metric, task=task, temperature=0.4, backend=backend)
    assert loss.isfinite()
    assert gradient.isfinite().all()
