"""Images and multilabel entries, read in place by compiled loops and by Triton kernels, against the eager form."""

import pytest
import torch

from evalign import MetricLoss, _batch
from evalign.kernels import dispatch
from evalign.kernels.cpu import compilation, cpu_loss

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of masked entries that the interpreter computes
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
IMAGES = [((2, 5, 7, 11), {}), ((3, 19, 130), {"anchor": 0.5, "label_smoothing": 0.1}),
          ((1, 3, 9, 9), {"step": "linear"}), ((2, 40, 33), {"anchor": 1.0}),
          ((2, 2, 4, 3, 5), {"metric": "mcc"})]  # fmt: skip
ENTRIES = [((50,), "binary"), ((3, 20, 30), "binary"), ((300, 5), "multilabel"), ((70, 150), "multilabel"),
           ((2, 3, 50, 50), "multilabel"), ((2, 3, 4, 4), "multilabel")]  # fmt: skip


@pytest.fixture(params=["cpu", "gpu"])
def device(request, monkeypatch):
    """Where the kernels run; those of a GPU are interpreted if there is none."""
    if request.param == "cpu":
        if not compilation.available():
            pytest.skip("needs numba")
        return "cpu"
    pytest.importorskip("triton")
    if DEVICE == "cpu":
        monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    return DEVICE


def batch(shape, task="multiclass", seed=0):
    generator = torch.Generator().manual_seed(seed)
    z = 3 * torch.randn(shape, generator=generator)
    labels = (shape[0], *shape[2:]) if task == "multiclass" else shape
    y = torch.randint(0, shape[1] if task == "multiclass" else 2, labels, generator=generator)
    return z, y, torch.rand(labels, generator=generator)


def ignore(z, y, task, share=0.2):
    """Ignore some labels, and put nan where they were."""
    ignored = torch.rand(y.shape, generator=torch.Generator().manual_seed(1)) < share
    y = torch.where(ignored, -7, y)
    where = ignored.unsqueeze(1).expand_as(z) if task == "multiclass" else ignored
    return torch.where(where, torch.nan, z), y


def value_and_slope(loss, z, y, weight=None):
    x = z.detach().requires_grad_()
    value = loss(x, y, weight)
    (slope,) = torch.autograd.grad(-1.7 * value, x)
    return value.detach().cpu().double(), slope.cpu().double()


def assert_like_eager(z, y, sample_weight, device, metric="f1", rtol=3e-5, **options):
    options = {"ignore_index": -7, **options}
    eager = MetricLoss(metric, backend="eager", **options)
    clean = torch.where(z.isnan(), 0.0, z)
    value, slope = value_and_slope(eager, clean.double(), y, None if sample_weight is None else sample_weight.double())
    slope = torch.where(z.isnan(), 0.0, slope)
    loss = MetricLoss(metric, **options).to(device)
    given = [None if x is None else x.to(device) for x in (z, y, sample_weight)]
    for _ in range(2):  # by a launch plan, the second time
        found, gradient = value_and_slope(loss, *given)
        torch.testing.assert_close(found, value, rtol=rtol, atol=rtol)
        torch.testing.assert_close(gradient, slope, rtol=10 * rtol, atol=rtol * slope.abs().max().item() + 1e-12)
    return loss


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(("shape", "options"), IMAGES)
def test_images_are_read_in_place(device, shape, options, weighted, monkeypatch):
    def refuse(*_):
        raise AssertionError("a copy of the batch")

    z, y, weight = batch(shape)
    z, y = ignore(z, y, "multiclass")
    monkeypatch.setattr(_batch, "rows_of_images", lambda x: refuse() if x.dtype == torch.float32 else rows(x))
    rows = _rows
    loss = assert_like_eager(z, y, weight if weighted else None, device, **options)
    assert bool(loss._launch_plans) == (device != "cpu" or torch.Tensor.is_cuda is True) * (not weighted)


_rows = _batch.rows_of_images


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(("shape", "task"), ENTRIES)
def test_binary_and_multilabel_entries_are_read_in_place(device, shape, task, weighted):
    z, y, weight = batch(shape, task)
    z, y = ignore(z, y, task)
    options = {"task": task, "anchor": 0.5, "label_smoothing": 0.1, "threshold": 0.3}
    assert_like_eager(z, y, weight if weighted else None, device, **options)


@pytest.mark.parametrize("task", ["binary", "multilabel"])
def test_targets_between_0_and_1(device, task):
    z, _, y = batch((40,) if task == "binary" else (30, 4), task)
    assert_like_eager(z, y, None, device, task=task, anchor=0.5)


def test_images_in_other_memory_formats(device):
    z, y, weight = batch((2, 5, 6, 7))
    for given in (z.contiguous(memory_format=torch.channels_last), z.transpose(2, 3), z[:, :, ::2]):
        labels = y.transpose(1, 2) if given.shape[2] == 7 else y[:, ::2] if given.shape[2] == 3 else y
        assert_like_eager(given, labels, None, device)
    assert_like_eager(z, y, weight, device, weight=[1.0, 2.0, 0.5, 1.0, 3.0])
    assert_like_eager(z, y, None, device, offset=[1.0, 2.0, 0.5, 1.0, 3.0])


def test_metrics_without_a_closed_form_take_images(device):
    z, y, _ = batch((2, 4, 30))
    assert_like_eager(z, y, None, device, metric="gmean")
    assert_like_eager(z, y, None, device, metric=lambda c: c.tp[2] / c.actual[2])


def test_images_of_no_pixel_and_of_equal_logits(device):
    z, y, _ = batch((2, 3, 0, 4))
    for given, labels in ((z, y), (torch.zeros(2, 3, 4, 4), torch.zeros(2, 4, 4).long())):
        x = given.to(device).requires_grad_()
        value = MetricLoss("f1").to(device)(x, labels.to(device))
        value.backward()
        assert value.isfinite()
        assert x.grad.isfinite().all()
        assert x.grad.sum(1).abs().max() < 1e-6 if x.numel() else True


def test_threads_give_the_same_counts(monkeypatch):
    if not compilation.available():
        pytest.skip("needs numba")
    z, y, _ = batch((3, 6, 500))
    alone = value_and_slope(MetricLoss("f1", anchor=1.0), z, y)
    monkeypatch.setattr(compilation, "SERIAL", 1000)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    torch.testing.assert_close(value_and_slope(MetricLoss("f1", anchor=1.0), z, y), alone, rtol=1e-6, atol=1e-9)


def test_memory_takes_images_through_the_hook():
    if not compilation.available():
        pytest.skip("needs numba")
    z, y, _ = batch((2, 4, 60))
    fused, eager = MetricLoss("f1", memory=0.9), MetricLoss("f1", memory=0.9, backend="eager")
    for _ in range(3):
        torch.testing.assert_close(
            value_and_slope(fused, z, y), value_and_slope(eager, z.double(), y), rtol=1e-5, atol=1e-8
        )


def test_backends_have_the_same_interface():
    names = {"row_forward", "row_backward", "column_forward", "column_backward", "fused_loss"}
    assert names <= set(dir(cpu_loss))
    assert {"row_forward", "row_backward"} <= set(dir(dispatch.backend(torch.zeros(1, 2, dtype=torch.float64))))
