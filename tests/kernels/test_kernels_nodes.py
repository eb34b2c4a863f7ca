"""The host side of two Triton kernels: their arguments, and the requests of autograd to their node."""

import types

import pytest
import torch
from torch.utils.checkpoint import checkpoint

pytest.importorskip("triton")

from evalign import MetricLoss
from evalign.kernels import dispatch, private_apis
from evalign.kernels.gpu import launch as triton_launch
from evalign.kernels.gpu import loss_plans

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The interpreter computes masked entries too, and says so where they are nan.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
BEFORE = 9  # words that a launcher is told before the arguments
FRONT = ("z", "y", "w", "temperature", "workspace", "counters", "counts", "loss", "saved")
BACK = ("z", "y", "w", "temperature", "saved", "by_loss", "by_tp", "by_predicted", "by_losses", "out")


def batch(n=20, d=7, seed=0):
    generator = torch.Generator().manual_seed(seed)
    z, y = 3 * torch.randn(n, d, generator=generator), torch.randint(0, d, (n,), generator=generator)
    return z.to(DEVICE).requires_grad_(), y.to(DEVICE)


@pytest.fixture
def fused(monkeypatch):
    """A loss by kernels, which are interpreted where there is no GPU, that goes the short way from now on."""
    if DEVICE == "cpu":
        monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    loss = MetricLoss("f1").to(DEVICE)
    loss(*batch())
    loss.__dict__["_flat"] = None  # without which there is no other way
    return loss


def eager_gradient(z, y, scale=1.0):
    x = z.detach().double().requires_grad_()
    return scale * torch.autograd.grad(MetricLoss("f1", backend="eager").to(DEVICE)(x, y), x)[0]


def assert_close(found, wanted):
    torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-6 * wanted.abs().max().item())


def test_two_batches_forward_before_any_goes_back(fused):
    batches = [batch(seed=seed) for seed in range(2)]
    losses = [fused(*given) for given in batches]
    for loss, (z, y), scale in zip(reversed(losses), reversed(batches), (-1.7, 0.0), strict=True):
        loss.backward(torch.tensor(scale, device=DEVICE))
        assert_close(z.grad, eager_gradient(z, y, scale))


def test_twice_back_gives_the_same_if_the_graph_is_retained_and_else_is_refused(fused):
    z, y = batch()
    loss = fused(z, y)
    (first,) = torch.autograd.grad(loss, z, retain_graph=True)
    first.zero_()  # the next one's is another tensor
    (second,) = torch.autograd.grad(loss, z)
    assert_close(second, eager_gradient(z, y))
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(loss, z)


@pytest.mark.parametrize("changed", ["logits", "labels"])
def test_a_batch_that_is_changed_before_the_way_back_is_refused(fused, changed):
    z, y = batch()
    loss = fused(z, y)
    with torch.no_grad():
        (z if changed == "logits" else y).add_(1).clamp_(0, 6)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


KINDS = [((20, 7), {}), ((6, 1100), {"anchor": 1.0}), ((2, 3, 4, 4), {}), ((30,), {"task": "binary", "anchor": 1.0}),
         ((12, 5), {"task": "multilabel"}), ((20, 7), {"memory": 0.5})]  # fmt: skip


@pytest.mark.parametrize(("shape", "options"), KINDS)
def test_a_second_derivative_is_that_of_the_eager_form(shape, options, monkeypatch):
    if DEVICE == "cpu":
        monkeypatch.setattr(torch.Tensor, "is_cuda", True)
        monkeypatch.setattr(MetricLoss, "_counts_alone_matter", lambda *_: False)  # or it is the CPU's loops that sum
    task = options.get("task", "multiclass")
    generator = torch.Generator().manual_seed(0)
    z = (2 * torch.randn(shape, generator=generator)).to(DEVICE)
    labels = (shape[0], *shape[2:]) if task == "multiclass" else shape
    y = torch.randint(0, shape[1] if task == "multiclass" else 2, labels, generator=generator).to(DEVICE)
    y.reshape(-1)[0] = -100
    found = []
    for backend in ("auto", "eager"):
        loss = MetricLoss("f1", backend=backend, **options).to(DEVICE)
        for _ in range(2):  # by a launch plan, the second time
            w = torch.ones((), device=DEVICE, requires_grad=True)
            (first,) = torch.autograd.grad(loss(w * z, y), w, create_graph=True)
            (second,) = torch.autograd.grad(first, w)
        found.append((first.detach(), second))
    assert found[1][1].abs() > 1e-6
    torch.testing.assert_close(found[0], found[1], rtol=2e-3, atol=1e-6)


@pytest.mark.parametrize(("shape", "options"), KINDS[:5])
@pytest.mark.parametrize("weighted", [False, True])
def test_the_operator_of_compiled_graphs_gives_value_gradient_and_shapes(shape, options, weighted, monkeypatch):
    if DEVICE == "cpu":
        monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    options = {"anchor": 1.0, "label_smoothing": 0.1, **options}
    loss = MetricLoss("f1", **options).to(DEVICE)
    generator = torch.Generator().manual_seed(0)
    z = (2 * torch.randn(shape, generator=generator)).to(DEVICE).requires_grad_()
    labels = (shape[0], *shape[2:]) if loss.task == "multiclass" else shape
    y = torch.randint(0, shape[1] if loss.task == "multiclass" else 2, labels, generator=generator).to(DEVICE)
    y.reshape(-1)[0] = -100
    weight = torch.rand(labels, generator=generator).to(DEVICE) if weighted else None
    asked, graph = [], dispatch.loss_in_graph

    def record(*given):
        asked.append(given)
        return graph(*given)

    with monkeypatch.context() as patch:  # the way that dynamo goes, without it
        patch.setattr(dispatch, "loss_in_graph", record)
        patch.setattr(dispatch, "is_fused_whole", lambda z: True)
        patch.setattr("evalign.objective.is_compiling", lambda: True)
        value = loss.objective(*loss.flat(z, y, weight)[:3], loss._temperature)
    (gradient,) = torch.autograd.grad(-1.7 * value, z)
    eager = MetricLoss("f1", backend="eager", **options).to(DEVICE)
    expected = eager(z, y, weight)
    torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-6)
    (slope,) = torch.autograd.grad(-1.7 * expected, z)
    torch.testing.assert_close(gradient, slope, rtol=1e-4, atol=1e-5 * slope.abs().max().item())
    (*batch, temperature, question), module = asked[0], dispatch.backend(z)
    arranged = module.arranged(*batch, bool(question.thresholds))
    found = torch.ops.evalign.fused_loss(*arranged, temperature, *question)
    told = module.saved_like(arranged[0], columns=bool(question.thresholds), two_classes=question.two_classes)
    assert [(x.shape, x.dtype) for x in found[1:]] == [(x.shape, x.dtype) for x in told]


def test_what_is_saved_may_be_moved(fused):
    z, y = batch()
    wanted, moved = eager_gradient(z, y), []

    def away(x):
        moved.append(x.shape)
        return x.detach().clone()

    x = z.detach().clone().requires_grad_()
    logits = 1 * x
    with torch.autograd.graph.saved_tensors_hooks(away, lambda x: x.clone()):
        loss = fused(logits, y)
    assert moved == [z.shape, y.shape]  # and nothing else of the batch is kept
    logits.detach().fill_(float("nan"))  # nor looked at again
    loss.backward()
    assert_close(x.grad, wanted)


def test_a_part_that_is_computed_again_on_the_way_back(fused):
    z, y = batch()
    checkpoint(lambda x: fused(2 * x, y), z, use_reentrant=False).backward()
    assert_close(z.grad, 2 * eager_gradient(2 * z, y))


@pytest.fixture
def told(monkeypatch):
    """Arguments of programs at the time of their launch, on a simulated device 0."""
    all_told, stands = [], types.SimpleNamespace(device=0, stream=99, recording=False)

    class Kernel:
        def __init__(self, names):
            self.names = names

        def __getitem__(self, grid):
            def start(*words):
                assert stands.device == 0
                all_told.append((words[3], dict(zip(self.names, words[BEFORE:], strict=False)), words[BEFORE:]))

            return lambda *arguments, num_warps: types.SimpleNamespace(packed_metadata=1, function=2, run=start)

    class OnDevice:
        def __init__(self, device):
            self.device = device

        def __enter__(self):
            self.before, stands.device = stands.device, self.device

        def __exit__(self, *_):
            stands.device = self.before

    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.Tensor, "get_device", lambda _: 0)
    monkeypatch.setattr(torch.cuda, "device", OnDevice)
    for name, answer in (
        ("getDevice", lambda: stands.device),
        ("getCurrentRawStream", lambda _: stands.stream),
        ("isCurrentStreamCapturing", lambda: stands.recording),
    ):
        monkeypatch.setattr(torch._C, f"_cuda_{name}", answer, raising=False)
    monkeypatch.setattr(private_apis, "_empty_cuda", torch._C._dynamo.guards._empty_strided_cpu)
    monkeypatch.setattr(triton_launch, "_workspaces", {})
    for launcher, names in ((loss_plans.launch_loss, FRONT), (loss_plans.launch_gradient, BACK)):
        monkeypatch.setattr(launcher, "kernel", Kernel(names))
        monkeypatch.setattr(launcher, "programs", {})
    loss_plans.cached_rows.cache_clear()
    yield all_told, stands
    loss_plans.cached_rows.cache_clear()


@pytest.mark.skipif(DEVICE != "cpu", reason="the device is made up")
@pytest.mark.parametrize("step", ["annealed", "linear"])
def test_kernels_are_told_where_the_tensors_are(told, step):
    (all_told, stands), loss = told, MetricLoss("f1", step=step)
    z, y = batch()
    loss(z, y).backward()  # finds the programs
    assert all_told == []
    for stands.stream in (99, 99, 98, 98, 99):  # on each the long way first, and then the short one
        all_told.clear()
        z.grad, one = None, torch.ones(())
        value = loss(z, y)
        value.backward(one)
        (at, front, all_front), (back_at, back, all_back) = all_told
        assert at == back_at == stands.stream
        temperature = loss._temperature if step == "annealed" else z
        for found in (front, back):
            assert [found[name] for name in FRONT[:4]] == [x.data_ptr() for x in (z, y, y, temperature)]
        assert front["loss"] == value.data_ptr()
        assert front["counts"] == front["workspace"] != front["counters"]
        assert {back[name] for name in ("saved", "by_tp", "by_predicted", "by_losses")} == {front["saved"]}
        assert (back["by_loss"], back["out"]) == (one.data_ptr(), z.grad.data_ptr())
        ready = next(iter(loss._launch_plans.values()))
        assert all_front[len(FRONT) :] == ready.front.numbers + ready.front.constants
        assert all_back[len(BACK) :] == ready.back.numbers + ready.back.constants
    assert set(ready.front.starts) == set(ready.back.starts) == {98, 99}


@pytest.mark.skipif(DEVICE != "cpu", reason="the device is made up")
def test_streams_and_recordings_have_counters_of_their_own(told):
    (all_told, stands), loss = told, MetricLoss("f1")
    z, y = batch()
    counters, kept = {}, []
    for stands.stream, stands.recording in ((1, False), (1, False), (2, False), (1, True), (2, False), (1, False)):
        all_told.clear()
        kept.append(loss(z, y))
        if all_told:  # but for the first, which finds the program
            counters.setdefault((stands.stream, stands.recording), set()).add(all_told[0][1]["counters"])
    assert all(len(found) == 1 for found in counters.values())
    eager = counters[1, False] | counters[2, False]
    assert len(eager) == 2
    assert not counters[1, True] & eager
    assert {found[0].counters_at for found in triton_launch._workspaces.values()} == eager


@pytest.mark.skipif(DEVICE != "cpu", reason="the device is made up")
def test_a_device_that_is_not_the_current_one_is_made_so_for_the_time(told):
    (all_told, stands), loss = told, MetricLoss("f1")
    z, y = batch()
    for stands.device in (1, 1, 1, 0):
        value = loss(z, y)
        with torch.no_grad():
            value.grad_fn.apply(torch.ones(()))  # by hand: autograd goes to the device by itself
    assert stands.device == 0
    assert len(all_told) == 6
