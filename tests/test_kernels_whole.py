"""A whole loss by two Triton kernels, run by the interpreter where there is no GPU, is the eager loss in float64."""

import types

import pytest
import torch

pytest.importorskip("triton")

from evalign import MetricLoss
from evalign.kernels import triton_columns, triton_launch, triton_tiles, triton_whole
from evalign.kernels.interface import Plan
from evalign.kernels.points import FivePoints
from evalign.kernels.quotients import quotient

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The interpreter computes masked entries too, and says so where they are nan.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def batch(n, d, task="multiclass", seed=0):
    generator = torch.Generator().manual_seed(seed)
    shape = {"multiclass": (n, d), "binary": (n,), "multilabel": (n, d)}[task]
    labels = (n,) if task == "multiclass" else shape
    z = 3 * torch.randn(shape, generator=generator)
    y = torch.randint(0, d if task == "multiclass" else 2, labels, generator=generator)
    y[torch.rand(labels, generator=generator) < 0.2] = -7
    return z, y, torch.rand(labels, generator=generator)


def by_triton(z, y, weight, task="multiclass", metric="f1", average="macro", anchor=0.0, smoothing=0.0, scale=-1.7):
    """Loss and gradient from labels as they come, -7 for those that do not count, or from valid ones with weights."""
    points = FivePoints(0, 0, torch.tensor(0.2, dtype=torch.float64, device=DEVICE))
    form = quotient(metric, z.shape[1] if task == "multiclass" else 2, label_smoothing=smoothing)
    thresholds = () if task == "multiclass" else (0.3,)
    plan = Plan(form, average, anchor, smoothing, thresholds, task == "binary", ignored=-7)
    if weight is not None:
        y, weight = torch.where(y == -7, 0, y), torch.where(y == -7, 0.0, weight)
    given = [None if x is None else x.to(DEVICE) for x in (z, y, weight)]
    if task == "binary":
        given = [None if x is None else x[:, None] for x in given]
    loss, kept, ready = triton_whole.forward(*given, points, plan)
    gradient = triton_whole.backward(kept, ready, points, plan, torch.tensor(scale, device=DEVICE))
    return loss.cpu(), gradient.cpu().reshape(z.shape)


def by_autograd(z, y, weight, task="multiclass", metric="f1", scale=-1.7, smoothing=0.0, **options):
    x = z.double().requires_grad_()
    threshold = None if task == "multiclass" else 0.3
    loss = MetricLoss(
        metric, task=task, backend="eager", ignore_index=-7, threshold=threshold, label_smoothing=smoothing, **options
    )
    value = loss(x, y, weight)
    (gradient,) = torch.autograd.grad(scale * value, x)
    return value.detach(), gradient


def assert_equal(given, rtol=3e-5, **options):
    (loss, gradient), (value, slope) = by_triton(*given, **options), by_autograd(*given, **options)
    torch.testing.assert_close(loss.double(), value, rtol=rtol, atol=rtol)
    torch.testing.assert_close(gradient.double(), slope, rtol=10 * rtol, atol=rtol * slope.abs().max().item())


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(("n", "d"), [(1, 2), (5, 3), (300, 10), (4500, 10), (40, 257), (21, 1000), (5, 1271)])
def test_labels_as_they_come(n, d, weighted):
    z, y, weight = batch(n, d, seed=n)
    assert_equal((z, y, weight if weighted else None), anchor=0.7 if weighted else 0.0)


@pytest.mark.parametrize("average", ["macro", "micro", "weighted"])
@pytest.mark.parametrize("d", [5, 1100])
def test_averages_anchor_and_smoothing(average, d):
    z, y, weight = batch(30, d)
    assert_equal((z, y, None), average=average, anchor=1.5, smoothing=0.1)
    assert_equal((z, y, weight), metric="specificity", average=average)


@pytest.mark.parametrize("task", ["binary", "multilabel"])
@pytest.mark.parametrize("n", [1, 40, 20_000])
def test_yes_no_problems(task, n):
    z, y, weight = batch(n, 3, task)
    average = "binary" if task == "binary" else "macro"
    assert_equal((z, y, None), task=task, average=average, anchor=0.5)
    assert_equal((z, y.float(), weight), task=task, average="weighted", smoothing=0.1)


@pytest.mark.parametrize("task", ["multiclass", "binary", "multilabel"])
@pytest.mark.parametrize("n", [0, 3])
def test_a_batch_without_a_counted_label_gives_nothing(task, n):
    z, y, _ = batch(n, 4, task)
    loss, gradient = by_triton(z, torch.full_like(y, -7), None, task, anchor=1.0)
    assert loss == 0
    assert gradient.shape == z.shape
    assert (gradient == 0).all()


def test_many_classes_are_more_than_one_block_of_the_metric(monkeypatch):
    monkeypatch.setattr(triton_whole.triton_metric, "block", lambda d: 256)
    for average in ("macro", "micro", "weighted"):
        assert_equal(batch(6, 1300), average=average, anchor=0.5)


@pytest.mark.parametrize("d", [4, 1100])
def test_ties_infinities_and_nan(d):
    z, y, _ = batch(12, d)
    y = y.clamp_min(0)
    z[0] = 0.0
    z[1, 2:] = float("-inf")
    z[2] = 1e4
    z[3, 0], z[3, 1] = 3e38, -3e38
    z[4, :2] = 9.0
    y[1] = 0
    found, wanted = by_triton(z, y, None), by_autograd(z, y, None)
    torch.testing.assert_close(found[0].double(), wanted[0], rtol=0, atol=1e-5)
    unique = [1, *range(4, 12)]  # a tie for second place, or of all, may choose any of the tied
    torch.testing.assert_close(found[1][unique].double(), wanted[1][unique], rtol=1e-3, atol=1e-6)
    assert found[1].isfinite().all()
    # A tie of all for both places: each place is taken once, so that a row's gradient still adds up to nothing.
    assert found[1][0].sum().abs() < 1e-6
    z[5, 3] = float("nan")
    assert by_triton(z, y, None)[0].isnan()
    y[5] = -7
    loss, gradient = by_triton(z, y, None)
    assert loss.isfinite()
    assert gradient.isfinite().all()


def test_counters_are_0_again_for_the_next_batch(monkeypatch):
    counters, room = torch.zeros(32, dtype=torch.int32, device=DEVICE), torch.empty(100_000, device=DEVICE)
    for module in (triton_tiles, triton_columns):
        monkeypatch.setattr(module, "scratch", lambda z, count, size: (counters, room.fill_(float("nan"))))
    for n, d in ((4500, 10), (3, 41), (5000, 2), (4500, 10)):
        assert_equal(batch(n, d))
        assert (counters == 0).all()
    assert_equal(batch(20_000, 2, "multilabel"), task="multilabel")
    assert (counters == 0).all()


def test_from_the_second_launch_on_a_program_is_started_at_once(monkeypatch):
    launched = []

    class Kernel:
        def __getitem__(self, grid):
            def run(*arguments, num_warps):
                launched.append(("found", grid, arguments, num_warps))
                return types.SimpleNamespace(
                    packed_metadata="metadata", function="function", run=lambda *all_: launched.append(all_)
                )

            return run

    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 99, raising=False)
    launch = triton_launch.Launcher(Kernel())
    for key in ("a", "a", "b"):
        launch(0, key, (3, 1, 1), ("z", 5), (True,), 8)
    assert launched == [
        ("found", (3, 1, 1), ("z", 5, True), 8),
        (3, 1, 1, 99, "function", "metadata", None, None, None, "z", 5, True),
        ("found", (3, 1, 1), ("z", 5, True), 8),
    ]
