"""A whole loss by two Triton kernels, run by the interpreter where there is no GPU, is the eager loss in float64."""

import copy
import types

import pytest
import torch

pytest.importorskip("triton")

from evalign import MetricLoss, losses
from evalign.kernels import dispatch, private_apis
from evalign.kernels.gpu import gpu_loss, loss_plans
from evalign.kernels.gpu import launch as triton_launch
from evalign.kernels.plan import FivePoints, KernelSettings, Plan, closed_form

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The interpreter computes masked entries too, and says so where they are nan.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::RuntimeWarning")]


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
    form = closed_form(metric, average, z.shape[1] if task == "multiclass" else 2, label_smoothing=smoothing)
    thresholds = () if task == "multiclass" else (0.3,)
    settings, plan = (
        KernelSettings(points, smoothing, bool(anchor), thresholds),
        Plan(form, anchor, task == "binary", -7),
    )
    if weight is not None:
        y, weight = torch.where(y == -7, 0, y), torch.where(y == -7, 0.0, weight)
    given = [None if x is None else x.to(DEVICE) for x in (z, y, weight)]
    if task == "binary":
        given = [None if x is None else x[:, None] for x in given]
    logits = given[0].detach().requires_grad_()
    loss = gpu_loss.fused_loss(logits, *given[1:], settings, plan)
    (gradient,) = torch.autograd.grad(loss, logits, torch.tensor(scale, device=DEVICE))
    return loss.detach().cpu(), gradient.cpu().reshape(z.shape)


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
    y[1::2] = z[1::2].argmax(1)  # of many classes, the label would hardly ever be the first one
    assert_equal((z, y, weight if weighted else None), anchor=0.7 if weighted else 0.0)


@pytest.mark.parametrize("average", ["macro", "micro", "weighted"])
@pytest.mark.parametrize("d", [5, 600, 1100])
def test_averages_anchor_and_smoothing(average, d):
    z, y, weight = batch(30, d)
    assert_equal((z, y, None), average=average, anchor=1.5, smoothing=0.1)
    assert_equal((z, y, weight), metric="specificity", average=average)


@pytest.mark.parametrize("metric", ["mcc", "cohen_kappa", "accuracy", "balanced_accuracy"])
def test_metrics_of_all_classes_at_once(metric):
    for d in (3, 257, 600, 1100):
        assert_equal((*batch(40, d)[:2], None), metric=metric, anchor=1.5, smoothing=0.1)
        assert_equal(batch(40, d), metric=metric)
    assert_equal((*batch(40, 2, "binary")[:2], None), task="binary", metric=metric, anchor=0.5, smoothing=0.1)
    assert_equal(batch(2000, 2, "binary"), task="binary", metric=metric)


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
    monkeypatch.setattr(gpu_loss, "block", lambda d, metric: 256)
    for average in ("macro", "micro", "weighted"):
        assert_equal(batch(6, 1300), average=average, anchor=0.5)
    for metric in ("mcc", "cohen_kappa"):
        assert_equal(batch(6, 1300), metric=metric, anchor=0.5)


@pytest.mark.parametrize("d", [4, 600, 1100])
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
    counters, floats = torch.zeros(2000, dtype=torch.int64, device=DEVICE), torch.empty(100_000, device=DEVICE)

    def given(z, count, size):
        return triton_launch.Workspace(counters, floats.fill_(float("nan")), counters.data_ptr(), floats.data_ptr(), -1)

    monkeypatch.setattr(loss_plans, "workspace", given)
    for n, d in ((4500, 10), (3, 41), (5000, 2), (4500, 10)):
        assert_equal(batch(n, d))
        assert (counters == 0).all()
    for n in (70, 3, 70):
        assert_equal((*batch(n, 600)[:2], None), anchor=0.5)
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
    launched.clear()
    again, tensors = triton_launch.Launch(launch, 0, "a", (4, 1, 1), (5,), (True,), 8), (torch.ones(1), torch.ones(2))
    again(*tensors)  # by the launcher, which knows the program
    again(*tensors)
    addresses = [x.data_ptr() for x in tensors]
    before = (4, 1, 1, 99, "function", "metadata", None, None, None)
    assert launched == [(*before, *tensors, 5, True), (*before, *addresses, 5, True)]


class TritonsLauncher:
    """As Triton writes them: the function in C is told the same every time, but for the stream and the arguments."""

    def __init__(self, launch, packed=False, memory=None):
        self.launch, self.packed, self.memory = launch, packed, memory

    def __call__(self, x, y, z, stream, function, metadata, launch_metadata, enter, leave, *arguments):
        first = (x, y, z, stream, function, False, metadata, enter, leave, self.memory)
        self.launch(*first, arguments) if self.packed else self.launch(*first, *arguments)


@pytest.mark.parametrize("packed", [False, True])
def test_a_launch_goes_past_triton_s_launcher_and_says_the_same(monkeypatch, packed):
    launched, asked = [], []
    launcher = TritonsLauncher(lambda *words: launched.append(words), packed)
    program = types.SimpleNamespace(packed_metadata="metadata", function="function", run=launcher)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 99, raising=False)
    kernel = triton_launch.Launcher({(4, 1, 1): lambda *arguments, num_warps: program})
    launch, tensors = triton_launch.Launch(kernel, 0, "a", (4, 1, 1), (5,), (True,), 8), (torch.ones(1), torch.ones(2))
    launch(*tensors)  # finds the program
    assert launched == []
    monkeypatch.setattr(TritonsLauncher, "__call__", lambda *words: asked.append(words))
    launch(*tensors)
    monkeypatch.undo()
    launcher(4, 1, 1, 99, "function", "metadata", None, None, None, *[x.data_ptr() for x in tensors], 5, True)
    assert asked == []
    assert launched[:1] == launched[1:]


@pytest.mark.parametrize("run", [print, TritonsLauncher(print, memory=torch.ones(1))])
def test_a_launcher_that_is_not_to_be_repeated_is_called_every_time(run):
    program = types.SimpleNamespace(packed_metadata="metadata", function="function", run=run)
    start = private_apis.raw_launch(program, (4, 1, 1))
    assert start == (run, (4, 1, 1), ("function", "metadata", None, None, None), False)


@pytest.fixture
def on_a_gpu(monkeypatch):
    """Let interpreted kernels take tensors that pretend to be on a GPU."""
    if DEVICE == "cpu":
        monkeypatch.setattr(torch.Tensor, "is_cuda", True)


def value_and_slope(loss, z, y, weight=None):
    x = z.to(DEVICE).detach().requires_grad_()
    value = loss(x, y.to(DEVICE), weight)
    (slope,) = torch.autograd.grad(2.0 * value, x)
    return value.detach().cpu().double(), slope.cpu().double()


@pytest.mark.parametrize("options", [{}, {"anchor": 0.5, "step": "linear"}, {"average": "micro"}])
def test_a_batch_like_one_before_takes_the_short_way(on_a_gpu, options):
    batches = [batch(20, 7, seed=seed)[:2] for seed in range(3)]
    eager, loss = (MetricLoss("f1", ignore_index=-7, backend=name, **options) for name in ("eager", "auto"))
    loss = loss.to(DEVICE)
    for temperature in (0.2, 0.1):  # is read when a kernel runs, not when it is made ready
        eager.temperature = loss.temperature = temperature
        for z, y in batches:
            wanted, found = value_and_slope(eager, z.double(), y), value_and_slope(loss, z, y)
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
            loss.__dict__["_flat"] = None  # without which there is no other way
    assert len(loss._launch_plans) == 1


def test_another_kind_of_batch_is_looked_at_anew(on_a_gpu):
    loss = MetricLoss("f1", ignore_index=-7).to(DEVICE)
    z, y, weight = batch(20, 7)
    value_and_slope(loss, z, y)
    for change in ("labels", "rows", "strides", "option", "weights", "device"):
        given, labels, weights = z, y, None
        if change == "labels":
            labels = y.int()
        elif change == "rows":
            given, labels = z[:9], y[:9]
        elif change == "strides":
            given = torch.cat([z, z], 1)[:, :7]
        elif change == "option":
            loss.ignore_index = 3
            labels = torch.where(y == -7, 3, y)
        elif change == "weights":
            weights = weight.to(DEVICE)
        else:
            loss = loss.to(torch.float16)
            assert not loss._launch_plans
        eager = MetricLoss("f1", ignore_index=loss.ignore_index, backend="eager")
        wanted = value_and_slope(eager, given.double(), labels, None if weights is None else weights.double())
        found = value_and_slope(loss, given, labels, weights)
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6, msg=change)
        loss.ignore_index = -7
    with pytest.raises(ValueError, match="target must have shape"):
        loss(z.to(DEVICE), y[:9].to(DEVICE))


@pytest.mark.parametrize("name", ["offset", "weight", "ignore_index"])
def test_an_option_that_is_set_later_is_honoured(on_a_gpu, name):
    loss, (z, y, _) = MetricLoss("f1", ignore_index=-7).to(DEVICE), batch(20, 3)
    value_and_slope(loss, z, y)
    value = 1 if name == "ignore_index" else torch.tensor([0.5, 1.0, 2.0], device=DEVICE)
    setattr(loss, name, value)
    y = y.clamp_min(0)
    eager = MetricLoss("f1", **({"ignore_index": -7} | {name: value}), backend="eager").to(DEVICE)
    for _ in range(2):
        torch.testing.assert_close(
            value_and_slope(loss, z, y), value_and_slope(eager, z.double(), y), rtol=1e-5, atol=1e-6
        )


def test_what_training_alone_does_is_not_forgotten_by_a_validation_before_it(on_a_gpu):
    z, y, _ = batch(20, 3)
    for options in ({"offset": [1.0, 0.0, 0.0]}, {"memory": 0.9}, {"sync": True}):
        loss = MetricLoss("f1", ignore_index=-7, **options).to(DEVICE).eval()
        value_and_slope(loss, z, y)
        assert not loss._launch_plans
        loss.train()
        if "sync" in options:
            with pytest.raises(RuntimeError, match="needs a process group"):
                value_and_slope(loss, z, y)
    loss = MetricLoss("f1", ignore_index=-7).to(DEVICE)
    value_and_slope(loss, z, y)
    loss.eval().temperature = 0.1
    assert loss._launch_plans


def test_a_process_group_that_comes_up_later_is_seen(on_a_gpu, monkeypatch):
    loss, (z, y, _) = MetricLoss("f1", ignore_index=-7).to(DEVICE), batch(20, 3)
    before, summed = value_and_slope(loss, z, y), []
    monkeypatch.setattr(losses, "is_up", lambda: True)
    monkeypatch.setattr(MetricLoss, "_counts_alone_matter", lambda *_: False)  # or it is the CPU's loops that sum
    for ranks in (None, lambda sums: summed.append(sums) or sums):  # one rank, and as if there were more
        monkeypatch.setattr(MetricLoss, "_ranks", lambda self, ranks=ranks: ranks)
        torch.testing.assert_close(value_and_slope(loss, z, y), before, rtol=1e-5, atol=1e-6)
        assert len(summed) == (ranks is not None)


def test_what_is_ready_is_not_copied_or_saved(on_a_gpu, tmp_path):
    loss = MetricLoss("f1", ignore_index=-7).to(DEVICE)
    z, y, _ = batch(20, 7)
    before = value_and_slope(loss, z, y)
    assert loss._launch_plans
    torch.save(loss, tmp_path / "loss.pt")
    for other in (copy.deepcopy(loss), torch.load(tmp_path / "loss.pt", weights_only=False)):
        assert not other._launch_plans
        torch.testing.assert_close(value_and_slope(other, z, y), before, rtol=0, atol=0)


def test_no_more_kinds_are_known_than_there_is_room_for(on_a_gpu, monkeypatch):
    monkeypatch.setattr(dispatch, "CACHED_PLANS", 2)
    loss = MetricLoss("f1", ignore_index=-7).to(DEVICE)
    for n in (3, 4, 5, 6):
        value_and_slope(loss, *batch(n, 3)[:2])
        assert 1 <= len(loss._launch_plans) <= 2


SOFT = [
    ((1, 2), {}),
    ((300, 10), {"anchor": 0.7, "label_smoothing": 0.1}),
    ((9, 257), {"metric": "mcc", "anchor": 1.0}),
    ((5, 1000), {"average": "weighted", "step": "linear"}),
    ((40, 3), {"average": "micro", "weight": [0.5, 0.0, 2.0], "anchor": 1.0}),
    ((2, 6, 5, 7), {"anchor": 0.5}),
]


@pytest.mark.parametrize(("shape", "options"), SOFT)
def test_class_probabilities_are_fused(on_a_gpu, shape, options):
    generator = torch.Generator().manual_seed(0)
    z, y = (3 * torch.randn(shape, generator=generator) for _ in range(2))
    weight = torch.rand(shape[:1] + shape[2:], generator=generator)
    weight[shape[0] // 2 :: 3] = 0
    y = y.softmax(1)
    y[0] = torch.eye(shape[1])[1].reshape(-1, *[1] * (len(shape) - 2))  # one class alone
    options = {"metric": "f1"} | options
    found, eager = MetricLoss(**options).to(DEVICE), MetricLoss(**options, backend="eager").double()
    for weights in (None, weight):
        x = z.to(DEVICE).requires_grad_()
        given = None if weights is None else weights.to(DEVICE)
        assert type(found(x, y.to(DEVICE), given).grad_fn).__name__ == "FusedNodeBackward"
        wanted = value_and_slope(eager, z.double(), y.double(), None if weights is None else weights.double())
        value, slope = value_and_slope(found, z, y, given)
        torch.testing.assert_close(value, wanted[0], rtol=3e-5, atol=3e-5)
        torch.testing.assert_close(slope, wanted[1], rtol=3e-4, atol=3e-5 * wanted[1].abs().max().item())


def test_class_probabilities_of_ignored_rows_and_of_many_classes(on_a_gpu):
    generator = torch.Generator().manual_seed(0)
    loss = MetricLoss("f1", anchor=1.0).to(DEVICE)
    z, y, weight = (
        torch.randn(6, 5, generator=generator),
        torch.rand(6, 5, generator=generator).softmax(1),
        torch.ones(6),
    )
    weight[2] = 0
    clean = value_and_slope(loss, z, y, weight.to(DEVICE))
    z[2] = float("nan")
    torch.testing.assert_close(value_and_slope(loss, z, y, weight.to(DEVICE)), clean, rtol=0, atol=0)
    z[3, 1] = float("nan")
    assert value_and_slope(loss, z, y, weight.to(DEVICE))[0].isnan()
    x = torch.randn(2, 1100, device=DEVICE, requires_grad=True)  # too long for a tile
    assert "FusedNode" not in type(loss(x, torch.rand(2, 1100, device=DEVICE).softmax(1)).grad_fn).__name__
