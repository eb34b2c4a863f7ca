"""Losses: 1 - metric of the slow loop's counts, the anchor, the offset, and batches that lack something."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from evalign import MetricLoss, metric_loss, metrics
from reference import loops

TASKS = ("multiclass", "binary", "multilabel")
CASES = [(m, t) for m in metrics.METRICS for t in TASKS if m != "quadratic_kappa" or t == "multiclass"]
WITH_AUROC = [*CASES, *(("auroc", t) for t in TASKS)]
BACKENDS = ("auto", "eager")
SLOW_STEPS = {
    "annealed": (partial(loops.annealed, temperature=0.15), {"temperature": 0.15}),
    "linear": (partial(loops.linear, delta=0.2), {"step": "linear", "delta": 0.2}),
    "sigmoid": (partial(loops.sigmoid_step, k=8.0), {"step": "sigmoid", "k": 8.0}),
}


def batch(task, n=24, classes=4, seed=0):
    """Logits and labels in which every class occurs."""
    generator = torch.Generator().manual_seed(seed)
    shape = (n,) if task == "binary" else (n, classes)
    logits = 2 * torch.randn(shape, dtype=torch.float64, generator=generator)
    if task == "multiclass":
        return logits, torch.arange(n)[torch.randperm(n, generator=generator)] % classes
    target = torch.randint(2, shape, generator=generator)
    target[0], target[1] = 0, 1
    return logits, target


def loss_and_gradient(logits, target, metric, sample_weight=None, **options):
    z = logits.detach().clone().requires_grad_()
    loss = metric_loss(z, target, metric, sample_weight=sample_weight, **options)
    loss.backward()
    return loss.detach(), z.grad


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("step", SLOW_STEPS)
@pytest.mark.parametrize(("metric", "task"), CASES)
def test_the_loss_is_1_minus_the_metric_of_the_slow_counts(metric, task, step, backend):
    z, y = batch(task)
    slow, options = SLOW_STEPS[step]
    weights = [(1 + i % 5) / 3 for i in range(len(y))]
    for w, smoothing in ((None, 0.0), (weights, 0.0), (weights, 0.2)):
        sample_weight = None if w is None else torch.tensor(w, dtype=torch.float64)
        expected = loops.loss(metric, task, z.tolist(), y.tolist(), slow, weights=w, smoothing=smoothing)
        options = {**options, "label_smoothing": smoothing, "backend": backend}
        got = metric_loss(z, y, metric, task=task, sample_weight=sample_weight, **options)
        assert got.item() == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("average", ["macro", "micro", "weighted"])
@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("metric", loops.CLASS_SCORES)
def test_averages_are_those_of_the_slow_counts(metric, task, average):
    z, y = batch(task, seed=1)
    slow, options = SLOW_STEPS["annealed"]
    expected = loops.loss(metric, task, z.tolist(), y.tolist(), slow, average=average)
    assert metric_loss(z, y, metric, task=task, average=average, **options).item() == pytest.approx(expected)


@pytest.mark.parametrize("task", TASKS)
def test_a_fixed_threshold_and_a_beta_per_class_are_those_of_the_slow_counts(task):
    z, y = batch(task, seed=2)
    slow, options = SLOW_STEPS["linear"]
    betas = [0.5, 1.0, 2.0, 4.0][: 2 if task == "binary" else 4]
    expected = loops.loss("fbeta", task, z.tolist(), y.tolist(), slow, tau=0.3, betas=betas)
    for beta in (betas, torch.tensor(betas)):
        got = metric_loss(z, y, "fbeta", task=task, beta=beta, threshold=0.3, **options)
        assert got.item() == pytest.approx(expected)
    assert MetricLoss("fbeta", task=task, beta=betas, threshold=0.3, **options)(z, y).item() == pytest.approx(expected)


@settings(max_examples=100)
@given(
    rows=st.lists(st.lists(st.integers(-8, 8), min_size=3, max_size=3), min_size=1, max_size=10),
    labels=st.lists(st.integers(0, 2), min_size=10, max_size=10),
    metric=st.sampled_from([m for m, t in CASES if t == "multiclass"]),
    temperature=st.sampled_from([0.02, 0.2, 0.39]),
    backend=st.sampled_from(BACKENDS),
)
def test_ties_and_absent_classes_are_those_of_the_slow_counts(rows, labels, metric, temperature, backend):
    z, y = torch.tensor(rows, dtype=torch.float64), torch.tensor(labels[: len(rows)])
    expected = loops.loss(metric, "multiclass", rows, y.tolist(), partial(loops.annealed, temperature=temperature))
    got = metric_loss(z, y, metric, temperature=temperature, backend=backend)
    assert got.item() == pytest.approx(expected, abs=1e-7)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_anchor_is_cross_entropy(smoothing, backend):
    z, y = batch("multiclass")
    options = {"label_smoothing": smoothing, "backend": backend}
    weight = torch.tensor([1.0, 2.0, 0.5, 3.0], dtype=torch.float64)

    def anchor(**more):
        return metric_loss(z, y, "f1", anchor=2.0, **options, **more) - metric_loss(z, y, "f1", **options, **more)

    assert anchor().item() == pytest.approx(2 * F.cross_entropy(z, y, label_smoothing=smoothing).item())
    each = F.cross_entropy(z, y, reduction="none", label_smoothing=smoothing)
    w = torch.rand(len(y), dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    assert anchor(sample_weight=w).item() == pytest.approx(2 * ((each * w).sum() / w.sum()).item())
    weighted = F.cross_entropy(z, y, weight, label_smoothing=smoothing)
    assert anchor(weight=weight).item() == pytest.approx(2 * weighted.item())
    y[::5] = -100
    weighted = F.cross_entropy(z, y, weight, label_smoothing=smoothing)
    assert anchor(weight=weight).item() == pytest.approx(2 * weighted.item())
    assert anchor(weight=weight, sample_weight=2 * torch.ones(len(y))).item() == pytest.approx(2 * weighted.item())


@pytest.mark.parametrize("task", ["binary", "multilabel"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_anchor_is_binary_cross_entropy(task, smoothing):
    z, y = batch(task)
    soft = y * (1 - smoothing) + smoothing / 2
    options = {"task": task, "label_smoothing": smoothing}

    def anchor(**more):
        return metric_loss(z, y, "f1", anchor=0.5, **options, **more) - metric_loss(z, y, "f1", **options, **more)

    assert anchor().item() == pytest.approx(F.binary_cross_entropy_with_logits(z, soft).item() / 2)
    each = F.binary_cross_entropy_with_logits(z, soft, reduction="none")
    w = torch.rand(len(y), dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    full = w.reshape(-1, *[1] * (z.dim() - 1)).expand_as(z)
    assert anchor(sample_weight=w).item() == pytest.approx(((each * full).sum() / full.sum()).item() / 2)
    weight = torch.tensor([1.0, 3.0] if task == "binary" else [1.0, 2.0, 0.5, 3.0], dtype=torch.float64)
    full = weight[y] if task == "binary" else weight.expand_as(z)
    assert anchor(weight=weight).item() == pytest.approx(((each * full).sum() / full.sum()).item() / 2)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("task", TASKS)
def test_class_weights_are_sample_weights(task, backend):
    z, y = batch(task)
    weight = torch.tensor([1.0, 3.0] if task == "binary" else [1.0, 2.0, 0.5, 3.0], dtype=torch.float64)
    each = weight.expand_as(z) if task == "multilabel" else weight[y]
    options = {"task": task, "anchor": 0.5, "backend": backend}
    for metric in ("f1", "accuracy", "mcc"):
        got = metric_loss(z, y, metric, weight=weight, **options)
        torch.testing.assert_close(got, metric_loss(z, y, metric, sample_weight=each, **options))


@pytest.mark.parametrize("task", TASKS)
def test_the_offset_is_added_to_the_logits_in_training_only(task):
    z, y = batch(task)
    offset = torch.tensor([0.5, -1.0] if task == "binary" else [0.5, -1.0, 0.0, 2.0])
    loss = MetricLoss("f1", task=task, offset=offset, anchor=1.0)
    shift = offset[1] - offset[0] if task == "binary" else offset
    plain = partial(metric_loss, target=y, metric="f1", task=task, anchor=1.0)
    torch.testing.assert_close(loss.train()(z, y), plain(z + shift))
    torch.testing.assert_close(loss.eval()(z, y), plain(z))


@pytest.mark.parametrize("task", TASKS)
def test_probabilities_give_the_loss_of_their_logits(task):
    z, y = batch(task)
    p = z.softmax(1) if task == "multiclass" else z.sigmoid()
    for metric in ("f1", "auroc"):
        expected = metric_loss(z, y, metric, task=task, anchor=1.0)
        got = metric_loss(p, y, metric, task=task, anchor=1.0, from_logits=False)
        assert got.item() == pytest.approx(expected.item(), abs=1e-9)
    ends = torch.zeros_like(p)
    if task == "multiclass":
        ends[:, 0] = 1
    loss, gradient = loss_and_gradient(ends, y, "f1", task=task, anchor=1.0, from_logits=False)
    assert loss.isfinite()
    assert gradient.isfinite().all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("metric", [m for m, t in WITH_AUROC if t == "multiclass"])
def test_an_absent_class_leaves_the_others_their_gradient_and_a_loss_that_reaches_0(metric, backend):
    z, y = batch("multiclass")
    y = torch.where(y == 2, 1, y)
    loss, gradient = loss_and_gradient(z, y, metric, backend=backend)
    assert loss.isfinite()
    assert gradient.isfinite().all()
    assert (gradient[:, [0, 1, 3]].abs().sum(0) > 0).all()
    perfect = 12.0 * F.one_hot(y, 4).double()
    assert metric_loss(perfect, y, metric, temperature=1e-3, backend=backend).item() == pytest.approx(0, abs=1e-2)


@pytest.mark.parametrize("metric", [m for m, t in WITH_AUROC if t == "multilabel"])
def test_an_absent_label_leaves_the_others_their_gradient_and_a_loss_that_reaches_0(metric):
    z, y = batch("multilabel")
    y[:, 2] = 0
    loss, gradient = loss_and_gradient(z, y, metric, task="multilabel")
    assert loss.isfinite()
    assert gradient.isfinite().all()
    assert (gradient[:, [0, 1, 3]].abs().sum(0) > 0).all()
    perfect = 24.0 * y.double() - 12
    assert metric_loss(perfect, y, metric, task="multilabel", temperature=1e-3).item() == pytest.approx(0, abs=1e-2)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("only", [0, 1])
@pytest.mark.parametrize(("metric", "task"), WITH_AUROC)
def test_a_batch_of_one_class_is_finite(metric, task, only, backend):
    z, y = batch(task)
    for w in (None, torch.rand(len(y), dtype=torch.float64, generator=torch.Generator().manual_seed(5))):
        loss, gradient = loss_and_gradient(
            z, torch.full_like(y, only), metric, task=task, sample_weight=w, backend=backend
        )
        assert loss.isfinite()
        assert gradient.isfinite().all()
        if metric in ("mcc", "cohen_kappa") and task != "multilabel":  # accuracy: no agreement beyond chance
            accuracy = metric_loss(z, torch.full_like(y, only), "accuracy", task=task, sample_weight=w)
            assert loss.item() == pytest.approx(accuracy.item(), abs=1e-6)
