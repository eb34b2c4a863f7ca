"""Losses on odd batches: nothing counted, nan and infinite logits, half precision, many pixels, users' functions."""

import math

import pytest
import torch

from evalign import MetricLoss, metric_loss, metrics
from test_losses import BACKENDS, TASKS, WITH_AUROC, batch, loss_and_gradient


def recall_of_2(c):
    return c.tp[2] / c.actual[2]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("metric", "task"), [*WITH_AUROC, *((lambda c: c.tp[1] / c.actual[1], t) for t in TASKS)])
def test_a_batch_without_a_counted_label_gives_0_and_no_gradient(metric, task, backend):
    z, y = batch(task)
    for anchor in (0.0, 1.0):
        options = {"task": task, "anchor": anchor, "backend": backend}
        ignored = loss_and_gradient(z, torch.full_like(y, -100), metric, **options)
        unweighted = loss_and_gradient(z, y, metric, sample_weight=torch.zeros(len(y)), **options)
        for loss, gradient in (ignored, unweighted):
            assert loss == 0
            assert (gradient == 0).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("metric", "task"), WITH_AUROC)
def test_an_empty_batch_gives_0_and_an_empty_gradient(metric, task, backend):
    z, y = batch(task)
    for options in ({}, {"anchor": 1.0}, {"per_image": True}):
        loss, gradient = loss_and_gradient(z[:0], y[:0], metric, task=task, backend=backend, **options)
        assert loss == 0
        assert gradient.shape == z[:0].shape


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("metric", "task"), WITH_AUROC)
def test_ignored_rows_are_dropped_rows(metric, task, backend):
    z, y = batch(task)
    kept = torch.arange(len(y)) % 3 > 0
    marked = torch.where(kept.reshape(-1, *[1] * (y.dim() - 1)), y, 255)
    options = {"task": task, "anchor": 0.5, "backend": backend}
    loss, gradient = loss_and_gradient(z, marked, metric, ignore_index=255, **options)
    expected, expected_gradient = loss_and_gradient(z[kept], y[kept], metric, **options)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradient[kept], expected_gradient)
    assert (gradient[~kept] == 0).all()
    as_bytes = metric_loss(z, marked.to(torch.uint8), metric, ignore_index=255, **options)
    torch.testing.assert_close(as_bytes, expected)


def test_class_156_of_unsigned_bytes_is_not_ignored():
    z, y = torch.randn(3, 200, generator=torch.Generator().manual_seed(10)), torch.tensor([156, 3, 156])
    assert torch.equal(metric_loss(z, y.to(torch.uint8), "accuracy"), metric_loss(z, y, "accuracy"))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_function_that_divides_by_an_absent_class_is_finite(backend):
    z, y = batch("multiclass")
    expected = 1 - metric_loss(z, y, "recall", average="macro", backend=backend)
    got = metric_loss(z, y, lambda c: (c.tp / c.actual).mean(), backend=backend)
    torch.testing.assert_close(1 - got, expected)
    y = torch.where(y == 2, 1, y)
    for anchor in (0.0, 1.0):
        loss, gradient = loss_and_gradient(z, y, recall_of_2, anchor=anchor, backend=backend)
        assert loss.isfinite()
        assert gradient.isfinite().all()
    for function in (
        lambda c: (recall_of_2(c) + c.tp[0] / c.actual[0]) / 2,
        lambda c: c.matrix[2, 2] / c.matrix[2].sum(),
        lambda c: (c.tp / c.actual).max(),
    ):
        loss, gradient = loss_and_gradient(z, y, function, backend=backend)
        assert loss.isfinite()
        assert gradient.isfinite().all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("metric", "task"), [*WITH_AUROC, (recall_of_2, "multiclass")])
@pytest.mark.parametrize("step", ["annealed", "linear", "sigmoid", "identity"])
def test_a_nan_is_not_hidden(metric, task, step, backend):
    z, y = batch(task)
    z[0] = math.nan
    assert metric_loss(z, y, metric, task=task, step=step, backend=backend).isnan()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("metric", "task"), WITH_AUROC)
def test_infinite_logits_are_certainty(metric, task, backend):
    z, y = batch(task)
    far = z.clone()
    far[2:5] = -50
    far[5] = torch.tensor([50.0, -50, -50, -50]) if task == "multiclass" else 50
    infinite = far.masked_fill(far == -50, -math.inf)
    if task == "multiclass":  # a row needs one class that is possible
        far[2:5, 1], infinite[2:5, 1] = 0, 0
    options = {"task": task, "backend": backend}
    if metric == "auroc" and task == "multiclass":
        options["threshold"] = [0.25, 0.5, 0.75]  # by ranks, -100 is less than -50
    expected, _ = loss_and_gradient(far, y, metric, **options)
    loss, gradient = loss_and_gradient(infinite, y, metric, **options)
    torch.testing.assert_close(loss, expected)
    assert gradient.isfinite().all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("anchor", [0.0, 1.0])
@pytest.mark.parametrize(("metric", "task"), WITH_AUROC)
def test_certain_predictions_of_one_class_have_a_finite_gradient(metric, task, anchor, backend):
    z, y = batch(task)
    z = torch.full_like(z, 1e4)
    if task == "multiclass":
        z[:, 1:] = -1e4
    loss, gradient = loss_and_gradient(z, y, metric, task=task, anchor=anchor, backend=backend)
    assert loss.isfinite()
    assert gradient.isfinite().all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_class_that_is_ruled_out_in_an_ignored_row_does_not_reach_the_anchor(backend):
    z, y = batch("multiclass")
    z[0, 0], y[0] = -math.inf, -100
    loss, gradient = loss_and_gradient(z, y, "f1", anchor=1.0, backend=backend)
    expected, _ = loss_and_gradient(z[1:], y[1:], "f1", anchor=1.0, backend=backend)
    torch.testing.assert_close(loss, expected)
    assert gradient.isfinite().all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("metric", "task"), WITH_AUROC)
def test_half_precision_is_finite_and_close_to_float32(metric, task, dtype, backend):
    z, y = batch(task)
    z = z.to(dtype)
    loss, gradient = loss_and_gradient(z, y, metric, task=task, anchor=1.0, backend=backend)
    expected, expected_gradient = loss_and_gradient(z.float(), y, metric, task=task, anchor=1.0, backend=backend)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected)
    assert gradient.dtype == dtype
    torch.testing.assert_close(gradient.float(), expected_gradient, atol=1e-3, rtol=2e-2)


@pytest.mark.parametrize(
    ("task", "backend"),
    [("multiclass", "auto"), *((task, "eager") for task in TASKS)],
)
def test_autocast_does_not_round_the_counts(task, backend):
    def precision_of_0(c):
        return c.tp[0] / c.predicted[0]

    z, y = batch(task, n=300)
    z, options = z.float(), {"task": task, "backend": backend}
    expected, expected_gradient = loss_and_gradient(z, y, precision_of_0, **options)
    z.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        loss = metric_loss(z, y, precision_of_0, **options)
    (gradient,) = torch.autograd.grad(loss, z)
    torch.testing.assert_close(loss.detach(), expected)
    torch.testing.assert_close(gradient, expected_gradient)


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_million_float16_pixels_are_counted_to_float_precision(backend):
    generator = torch.Generator().manual_seed(6)
    y = torch.randint(19, (4, 512, 512), generator=generator)
    y[torch.rand(y.shape, generator=generator) < 0.1] = 255
    z = torch.zeros(4, 19, 512, 512, dtype=torch.float16)  # equal terms are where running sums drift
    z[:, 3] = 1
    z[:, :, :8] = torch.randn(4, 19, 8, 512, generator=generator).half()
    z.requires_grad_()
    exact = {}

    def all_three(c):
        exact.update({name: 1 - metrics.METRICS[name](c).item() for name in ("f1", "mcc", "gmean")})
        return c.tp.sum()

    with torch.no_grad():
        metric_loss(z.double(), y, all_three, ignore_index=255)
    for metric in exact if backend == "auto" else ("f1",):
        loss = metric_loss(z, y, metric, ignore_index=255, backend=backend)
        (gradient,) = torch.autograd.grad(loss, z)
        assert loss.item() == pytest.approx(exact[metric], abs=1e-5)
        assert gradient.isfinite().all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("task", TASKS)
def test_further_dimensions_are_flattened(task, backend):
    generator = torch.Generator().manual_seed(7)
    z = torch.randn(3, 4, 5, 2, dtype=torch.float64, generator=generator)
    y = torch.randint(2, z.shape, generator=generator)
    w = torch.rand(3, dtype=torch.float64, generator=generator)
    flat_z, flat_y, flat_w = z.movedim(1, -1).reshape(-1, 4), y.movedim(1, -1).reshape(-1, 4), w.repeat_interleave(10)
    if task == "multiclass":
        y, flat_y = y.sum(1).clamp(max=3), flat_y.sum(1).clamp(max=3)
    if task == "binary":
        flat_z, flat_y, flat_w = z.reshape(-1), y.reshape(-1), w.repeat_interleave(40)
    options = {"task": task, "anchor": 1.0, "backend": backend}
    expected = metric_loss(flat_z, flat_y, "f1", sample_weight=flat_w, **options)
    torch.testing.assert_close(metric_loss(z, y, "f1", sample_weight=w, **options), expected)


def test_binary_input_may_have_a_last_dimension_of_1_and_targets_any_dtype():
    z, y = batch("binary")
    expected = metric_loss(z, y, "f1", task="binary")
    assert torch.equal(metric_loss(z[:, None], y, "f1", task="binary"), expected)
    assert torch.equal(metric_loss(z[:, None], y[:, None], "f1", task="binary"), expected)
    for dtype in (torch.bool, torch.uint8, torch.int32, torch.float32):
        assert torch.equal(metric_loss(z, y.to(dtype), "f1", task="binary"), expected)


def test_a_step_may_be_a_function():
    z, y = batch("binary")
    loss = MetricLoss("f1", task="binary", step=lambda p, threshold: torch.sigmoid(7 * (p - threshold)))
    torch.testing.assert_close(loss(z, y), metric_loss(z, y, "f1", task="binary", step="sigmoid", k=7.0))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("gap", [85.0, 90.0, 95.0, 100.0, 120.0])
@pytest.mark.parametrize("average", ["macro", "weighted"])
def test_a_class_that_is_all_but_ruled_out_has_a_finite_gradient(average, gap, backend):
    z = torch.tensor([[0.0, 0.0, -gap]]).repeat(4, 1).requires_grad_()
    MetricLoss("precision", average=average, backend=backend)(z, torch.tensor([0, 1, 2, 0])).backward()
    assert z.grad.isfinite().all()
