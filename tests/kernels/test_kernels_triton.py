"""The Triton kernels, run by Triton's interpreter where there is no GPU, give what torch's operations give."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from evalign import MetricLoss, membership
from evalign.kernels import reference
from evalign.kernels.cpu import cpu_loss
from evalign.kernels.gpu import gpu_loss
from evalign.kernels.plan import FivePoints, KernelSettings, Slopes

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The interpreter computes masked entries too, and says so where they are nan.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def rows(n, d, seed=0, spread=3.0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    z = (spread * torch.randn(n, d, generator=generator)).to(dtype)
    y, weight = torch.randint(0, d, (n,), generator=generator), torch.rand(n, generator=generator)
    weight[torch.rand(n, generator=generator) < 0.2] = 0
    slopes = Slopes(torch.randn(d, generator=generator), torch.randn(d, generator=generator), torch.tensor(-0.6))
    return z, y, weight, slopes


def on_device(x):
    return None if x is None else x.to(DEVICE)


def both_row_forms(z, y, weight, slopes, temperature=0.2, smoothing=0.0, linear=False):
    """Counts and gradient by Triton, and by torch's operations in float64."""
    points = FivePoints(temperature, 0.5 if linear else 2.5 * temperature)
    there = points if linear else FivePoints(0, 0, torch.tensor(temperature, dtype=torch.float64, device=DEVICE))
    losses = slopes.losses is not None
    settings = KernelSettings(there, smoothing, losses)
    counts, kept = gpu_loss.row_forward(on_device(z), on_device(y), on_device(weight), settings)
    gradient = gpu_loss.row_backward(kept, settings, Slopes(*map(on_device, slopes)))
    settings = KernelSettings(points, smoothing, losses)
    expected, kept = reference.row_forward(z.double(), y, weight.double(), settings)
    given = Slopes(*(None if x is None else x.double() for x in slopes))
    slope = reference.row_backward(kept, settings, given)
    found = [*(x.cpu() for x in (counts.tp, counts.predicted, counts.actual)), gradient.cpu()]
    wanted = [expected.tp, expected.predicted, expected.actual, slope]
    if losses:
        found.append(counts.losses.cpu())
        wanted.append(expected.losses)
    return found, wanted


def assert_close(found, wanted, rtol=2e-5):
    for ours, theirs in zip(found, wanted, strict=True):
        size = theirs.abs().max().item() if theirs.numel() else 0.0
        torch.testing.assert_close(ours.double(), theirs, rtol=rtol, atol=rtol * size)


@pytest.mark.slow
@pytest.mark.parametrize("d", [2, 3, 16, 41, 257, 1271, 5000])
@pytest.mark.parametrize("n", [1, 5, 130])
def test_rows_of_any_shape(n, d):
    n = min(n, 30_000 // d + 1)
    assert_close(*both_row_forms(*rows(n, d, seed=n + d), smoothing=0.1 if n == 5 else 0.0))


def test_rows_of_very_many_classes():
    assert_close(*both_row_forms(*rows(2, 50257)))


@pytest.mark.parametrize("temperature", [0.01, 0.2, 0.3, 0.4])
@pytest.mark.parametrize("d", [7, 1100])
def test_temperatures_and_no_losses(temperature, d):
    z, y, weight, slopes = rows(9, d)
    assert_close(*both_row_forms(z, y, weight, slopes._replace(losses=None), temperature=temperature), rtol=2e-4)
    assert_close(*both_row_forms(z, y, weight, slopes, temperature=0.1, linear=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_read_and_written_as_it_is(dtype):
    z, y, weight, slopes = rows(20, 9, dtype=dtype)
    found, wanted = both_row_forms(z, y, weight, slopes)
    assert found[3].dtype == dtype
    assert_close([*found[:3], found[4]], [*wanted[:3], wanted[4]])
    torch.testing.assert_close(found[3].double(), wanted[3], rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("d", [4, 1100])
def test_strides_ties_and_infinities(d):
    z, y, weight, slopes = rows(12, d)
    weight[:] = 1
    z[0] = 0.0
    z[1, 2:] = float("-inf")
    z[2, 1:] = z[2, 0] = 1e4
    z[3, 0], z[3, 1] = 3e38, -3e38
    z[4, :2] = 9.0
    y[1] = 0
    wide = torch.cat([z, z], 1)[:, :d]
    for logits in (wide, z.t().contiguous().t()):
        found, wanted = both_row_forms(logits, y, weight, slopes)
        assert_close(found[:3], wanted[:3])
        unique = [1, *range(4, 12)]  # a tie for second place, or of all, may choose any of the tied
        assert_close([found[3][unique]], [wanted[3][unique]])
        assert found[3].isfinite().all()


def test_a_nan_stays_unless_it_is_ignored():
    z, y, weight, slopes = rows(6, 5)
    weight[:] = 1
    z[2, 3] = float("nan")
    found, _ = both_row_forms(z, y, weight, slopes)
    assert found[1].isnan().any()
    weight[2] = 0
    found, _ = both_row_forms(z, y, weight, slopes)
    assert all(x.isfinite().all() for x in found)


def test_the_same_batch_gives_the_same_bits():
    z, y, weight, slopes = rows(500, 12)
    once, _ = both_row_forms(z, y, weight, slopes)
    again, _ = both_row_forms(z, y, weight, slopes)
    assert all(torch.equal(a, b) for a, b in zip(once, again, strict=True))


@pytest.mark.parametrize("shape", [(1, 1), (7, 3), (1500, 2)])
@pytest.mark.parametrize("thresholds", [(0.5,), (0.3,), membership.BTG_GRID])
def test_columns(shape, thresholds):
    generator = torch.Generator().manual_seed(0)
    z, y = 3 * torch.randn(shape, generator=generator), torch.randint(0, 2, shape, generator=generator)
    weight = torch.rand(shape, generator=generator).round(decimals=1)
    weight[0] = 1
    slopes = [torch.randn(len(thresholds), shape[1], generator=generator) for _ in range(2)]
    points = FivePoints(0.15, 0.375)
    for losses, smoothing in ((True, 0.1), (False, 0.0)):
        by_losses = torch.tensor(0.7) if losses else None
        settings = KernelSettings(points, smoothing, losses, thresholds)
        wanted = [*cpu_loss.column_forward((z, y, weight), settings)]
        wanted.append(cpu_loss.column_backward((z, y, weight), settings, *slopes, by_losses))
        there = KernelSettings(FivePoints(0, 0, torch.tensor(0.15, device=DEVICE)), smoothing, losses, thresholds)
        kept = tuple(map(on_device, (z, y, weight)))
        found = [*gpu_loss.column_forward(kept, there)]
        found.append(gpu_loss.column_backward(kept, there, *map(on_device, slopes), on_device(by_losses)))
        assert_close([x.cpu() for x in found], [x.double() for x in wanted])


@pytest.mark.slow
def test_every_kernel_compiles_for_a_gpu():
    # The interpreter takes programs that the compiler refuses, such as a name that changes its shape in a loop.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = Path(__file__).parents[1] / "reference" / "compile_kernels.py"
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("True") == 46


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
@pytest.mark.parametrize("task", ["multiclass", "binary", "multilabel"])
def test_the_loss_on_a_gpu_is_the_eager_one(task):
    torch.manual_seed(0)
    logits = torch.randn((300,) if task == "binary" else (300, 7), device=DEVICE)
    target = torch.randint(0, 7 if task == "multiclass" else 2, (300, 7) if task == "multilabel" else (300,))
    found = []
    for backend in ("auto", "eager"):
        x = logits.clone().requires_grad_()
        loss = MetricLoss("f1", task=task, backend=backend, anchor=0.5).to(DEVICE)(x, target.to(DEVICE))
        loss.backward()
        found.append((loss.detach(), x.grad))
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-6)
