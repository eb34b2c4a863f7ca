"""Second derivatives: of fused losses by the eager form, or an error; never a first-order answer."""

import pytest
import torch
from torch.autograd import forward_ad
from torch.autograd.functional import hessian, hvp

from evalign import MetricLoss
from evalign._options import LossOptions
from evalign.checks import represents
from evalign.kernels.cpu import compilation
from evalign.objective import Objective
from test_loss_module import torch_own_warnings
from test_losses import batch

KINDS = [
    ("f1", "multiclass", {"anchor": 1.0}),
    ("mcc", "multiclass", {"temperature": 0.3}),
    ("gmean", "multiclass", {"anchor": 0.5}),  # counts are fused, the metric is not
    ("f1", "binary", {"anchor": 1.0}),
    ("f1", "binary", {"threshold": [0.3, 0.6], "anchor": 1.0}),
    ("jaccard", "multilabel", {"anchor": 1.0}),
    ("mcc", "multilabel", {"label_smoothing": 0.1}),
]
DTYPES = [torch.float32, torch.float64]  # compiled, and by torch's operations


def losses(metric, task, options, dtype):
    z, y = batch(task)
    fused, eager = (MetricLoss(metric, task=task, backend=b, **options) for b in ("auto", "eager"))
    return z.to(dtype), y, fused, eager


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("metric", "task", "options"), KINDS)
def test_hessian_and_hvp_are_those_of_the_eager_form(metric, task, options, dtype):
    z, y, fused, eager = losses(metric, task, options, dtype)
    w = torch.ones((), dtype=dtype)
    direction = torch.ones_like(w)
    of = {name: lambda w, loss=loss: loss(w * z, y) for name, loss in (("fused", fused), ("eager", eager))}
    expected = hessian(of["eager"], w)
    assert expected.abs() > 1e-4
    tolerance = {"rtol": 1e-3, "atol": 1e-5}
    torch.testing.assert_close(hessian(of["fused"], w), expected, **tolerance)
    torch.testing.assert_close(hvp(of["fused"], w, direction)[1], expected, **tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_step_of_maml_has_the_gradient_of_the_eager_form(dtype):
    z, y, fused, eager = losses("f1", "multiclass", {"anchor": 1.0}, dtype)
    gradients = []
    for loss in (fused, eager):
        w = torch.eye(4, dtype=dtype, requires_grad=True)
        (inner,) = torch.autograd.grad(loss(z @ w, y), w, create_graph=True)
        outer = loss(z @ (w - 0.5 * inner), y)
        outer.backward(inputs=[w])
        gradients.append(w.grad)
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("task", ["multiclass", "binary", "multilabel"])
def test_gradgradcheck_of_the_default_backend(task):
    z, y = batch(task, n=6, classes=3)
    loss = MetricLoss("f1", task=task, anchor=0.5)
    assert torch.autograd.gradgradcheck(lambda z: loss(z, y), z.requires_grad_())


@torch_own_warnings
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("metric", "task", "options"), [*KINDS, ("auroc", "binary", {}), ("f1", "multiclass", {})])
def test_forward_mode_gives_the_derivative_of_reverse_mode(metric, task, options, dtype):
    z, y, loss, _ = losses(metric, task, options, dtype)
    direction = torch.sin(torch.arange(float(z.numel()), dtype=dtype)).reshape(z.shape)
    x = z.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(x, y), x)
    expected = (gradient * direction).sum()
    with forward_ad.dual_level():
        dual = forward_ad.unpack_dual(loss(forward_ad.make_dual(z, direction), y))
    torch.testing.assert_close(dual.tangent.to(dtype), expected, rtol=1e-3, atol=1e-6)
    _, tangent = torch.func.jvp(lambda z: loss(z, y), (z,), (direction,))
    torch.testing.assert_close(tangent.to(dtype), expected, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("task", ["multiclass", "binary"])
@pytest.mark.parametrize("options", [{}, {"anchor": 1.0, "label_smoothing": 0.1}])
def test_a_remembered_batch_has_the_second_derivative_of_the_eager_form(task, options):
    z, y = batch(task)
    seconds = []
    for backend in ("auto", "eager"):
        loss = MetricLoss("f1", task=task, memory=0.5, backend=backend, **options)
        loss(-0.5 * z.float(), y)  # to be remembered
        w = torch.ones((), requires_grad=True)
        (first,) = torch.autograd.grad(loss(w * z.float(), y), w, create_graph=True)
        seconds.append(torch.autograd.grad(first, w)[0])
    assert seconds[1].abs() > 1e-4
    torch.testing.assert_close(seconds[0], seconds[1], rtol=1e-3, atol=1e-5)


def test_counts_that_were_summed_over_ranks_have_the_second_derivative_of_the_eager_form():
    """Two ranks with the same rows: counts are doubled, and so is their gradient, of which DDP takes the mean."""
    if not compilation.available():
        pytest.skip("needs numba")
    z, y = batch("multiclass")
    fused, eager = (Objective.of(LossOptions("f1", anchor=1.0, backend=b)) for b in ("auto", "eager"))

    def doubled(vector):
        vector *= 2
        return 2.0, 2.0

    def of_both(w):
        sums = eager.sums(w * z.float(), y, torch.ones(len(y)))
        return eager.of_sums(sums.with_vector(represents(2 * sums.vector.detach(), sums.vector, 2.0)))

    w = torch.ones(())
    expected = hessian(of_both, w)
    found = hessian(lambda w: fused.whole(w * z.float(), y, torch.ones(len(y)), 0.2, None, doubled), w)
    assert expected.abs() > 1e-4
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)
