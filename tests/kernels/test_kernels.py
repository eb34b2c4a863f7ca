"""The fused counts are the eager ones: values, gradients, edges."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from evalign import MetricLoss, metric_loss
from evalign.kernels import reference as torch_rows


def both(logits, target, metric="f1", weight=None, scale=1.0, **options):
    """(loss, gradient) by the fused and by the eager form."""
    found = []
    for backend in ("auto", "eager"):
        x = logits.clone().requires_grad_()
        value = MetricLoss(metric, backend=backend, **options)(x, target, weight)
        (scale * value).backward()
        found.append((value.detach(), x.grad))
    return found


def assert_equal(found, atol=1e-9) -> None:
    (fused, fused_grad), (eager, eager_grad) = found
    torch.testing.assert_close(fused, eager, rtol=0, atol=atol)
    torch.testing.assert_close(fused_grad, eager_grad, rtol=0, atol=atol)


@given(
    st.integers(1, 40),
    st.sampled_from([2, 3, 5, 41]),
    st.sampled_from([0.001, 0.05, 0.2, 2 / 9, 0.3, 0.4]),
    st.sampled_from([0.1, 1.0, 8.0, 60.0]),
    st.sampled_from(["f1", "mcc", "balanced_accuracy", "cohen_kappa"]),
    st.integers(0, 10**6),
)
def test_fused_equals_eager(n, d, temperature, spread, metric, seed):
    generator = torch.Generator().manual_seed(seed)
    logits = spread * torch.randn(n, d, dtype=torch.float64, generator=generator)
    target = torch.randint(0, d, (n,), generator=generator)
    target[torch.rand(n, generator=generator) < 0.2] = -100
    weight = torch.rand(n, generator=generator)
    anchor = float(torch.randint(0, 3, (), generator=generator))
    found = both(logits, target, metric, weight, scale=-2.5, temperature=temperature, anchor=anchor)
    assert_equal(found, atol=1e-8)


@pytest.mark.parametrize(
    "options", [{"step": "linear", "delta": 0.0}, {"step": "linear", "delta": 0.5}, {"anchor": 0.3}]
)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_other_steps_and_smoothing(options, smoothing):
    torch.manual_seed(0)
    logits, target = torch.randn(50, 7, dtype=torch.float64), torch.randint(0, 7, (50,))
    assert_equal(both(logits, target, label_smoothing=smoothing, **options))


@pytest.mark.parametrize("d", [2, 3, 257, 1271])
def test_rows_in_many_parts_equal_rows_at_once(d, monkeypatch):
    torch.manual_seed(0)
    logits, target = 3 * torch.randn(37, d, dtype=torch.float64), torch.randint(0, d, (37,))
    whole = both(logits, target, "mcc", anchor=1.0)
    monkeypatch.setattr(torch_rows, "CHUNK", 5 * d)
    parts = both(logits, target, "mcc", anchor=1.0)
    torch.testing.assert_close(parts[0][1], whole[0][1])
    assert_equal(parts)


def test_entries_that_tie_get_the_eager_forms_values():
    logits = torch.tensor([[1.0, 1.0, 0.0], [0.0, 0.0, 0.0], [2.0, 0.0, 0.0]], dtype=torch.float64)
    (fused, fused_grad), (eager, _) = both(logits, torch.tensor([0, 1, 2]))
    assert float(fused) == pytest.approx(float(eager), abs=1e-12)
    assert fused_grad.isfinite().all()


@pytest.mark.parametrize("temperature", [0.01, 0.2, 0.4])
def test_impossible_classes_and_huge_logits_stay_finite(temperature):
    logits = torch.tensor([[5.0, float("-inf"), 1.0], [1e4, -1e4, 0.0], [3e38, 0.0, -3e38]])
    found = both(logits, torch.tensor([0, 2, 1]), temperature=temperature)
    assert all(value.isfinite() and grad.isfinite().all() for value, grad in found)
    assert_equal(found, atol=1e-6)


def test_the_anchor_is_cross_entropy_even_where_the_label_underflows():
    logits = torch.tensor([[200.0, 0.0, 1.0], [0.0, 3.0, 1.0]], requires_grad=True)
    target = torch.tensor([1, 1])
    alone = MetricLoss("f1")(logits, target)
    anchored = MetricLoss("f1", anchor=1.0)(logits, target)
    assert (anchored - alone).item() == pytest.approx(F.cross_entropy(logits, target).item(), rel=1e-6)


def test_gradients_are_right_by_finite_differences():
    torch.manual_seed(1)
    logits = torch.randn(9, 4, dtype=torch.float64, requires_grad=True)
    target = torch.randint(0, 4, (9,))
    for temperature in (0.05, 0.2, 0.35):
        loss = MetricLoss("f1", temperature=temperature, anchor=0.5)
        assert torch.autograd.gradcheck(lambda x: loss(x, target), logits)


def test_a_second_derivative_is_given_by_the_eager_form():
    logits, target = torch.randn(6, 3, dtype=torch.float64, requires_grad=True), torch.tensor([0, 1, 2, 0, 1, 2])
    seconds = []
    for backend in ("auto", "eager"):
        (gradient,) = torch.autograd.grad(MetricLoss("f1", backend=backend)(logits, target), logits, create_graph=True)
        seconds += torch.autograd.grad(gradient.square().sum(), logits)
    torch.testing.assert_close(*seconds)


def test_nothing_of_the_batchs_size_is_kept_but_the_probabilities():
    logits, target = torch.randn(300, 50, requires_grad=True), torch.randint(0, 50, (300,))
    sizes: dict[int, int] = {}

    def note(x):
        sizes[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        MetricLoss("f1", anchor=1.0)(logits, target)
    assert sum(size >= 300 * 50 * 4 for size in sizes.values()) == 1


def test_a_matrix_metric_still_sees_a_matrix():
    torch.manual_seed(0)
    logits, target = torch.randn(40, 4, dtype=torch.float64), torch.randint(0, 4, (40,))
    assert_equal(both(logits, target, "quadratic_kappa"))
    assert_equal(both(logits, target, lambda c: c.matrix[0, 0] / c.matrix[0].sum()))


def test_a_temperature_that_is_learned_gets_its_gradient():
    torch.manual_seed(0)
    logits, target = torch.randn(30, 4, dtype=torch.float64), torch.randint(0, 4, (30,))
    slopes = []
    for backend in ("auto", "eager"):
        temperature = torch.tensor(0.2, dtype=torch.float64, requires_grad=True)
        loss = metric_loss(logits, target, "f1", temperature=temperature, backend=backend)
        slopes.append(torch.autograd.grad(loss, temperature)[0])
    torch.testing.assert_close(slopes[0], slopes[1])
    assert slopes[0] != 0
