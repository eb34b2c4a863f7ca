"""The compiled loops give the eager form's values and gradients: float32 against float64, over shapes and edges."""

import multiprocessing
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from evalign import MetricLoss, metrics
from evalign.kernels.cpu import compilation
from evalign.kernels.plan import FivePoints
from evalign.membership import BTG_GRID

pytestmark = pytest.mark.skipif(not compilation.available(), reason="needs numba")
TASKS = ("multiclass", "binary", "multilabel")


def batch(n, d, task="multiclass", spread=2.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shape = (n,) if task == "binary" else (n, d)
    logits = spread * torch.randn(shape, generator=generator)
    labels = (n,) if task == "multiclass" else shape
    return logits, torch.randint(0, d if task == "multiclass" else 2, labels, generator=generator)


def value_and_gradient(logits, target, *arguments, scale=1.0, **options):
    x = logits.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    value = MetricLoss(**options)(x, target, *arguments)
    (scale * value).backward()
    return value.detach(), x.grad


def assert_like_eager(logits, target, sample_weight=None, *, rtol=2e-5, scale=1.0, metric="f1", **options):
    """The fused loss of float32 logits is the eager one of the same numbers in float64."""
    options = {"metric": metric, "scale": scale, **options}
    value, gradient = value_and_gradient(logits, target, sample_weight, **options)
    expected, slope = value_and_gradient(logits.double(), target, sample_weight, backend="eager", **options)
    assert value.item() == pytest.approx(expected.item(), rel=rtol, abs=rtol)
    torch.testing.assert_close(gradient.double(), slope, rtol=rtol, atol=rtol * slope.abs().max().item())
    assert gradient.dtype == logits.dtype
    return gradient


def fused(loss, logits, target):
    """The backward nodes of the loss that are ours."""
    value = loss(logits.requires_grad_(), target)  # keeps the nodes alive
    names, nodes = set(), [value.grad_fn]
    while nodes:
        node = nodes.pop()
        names.add(type(node).__name__)
        nodes += [parent for parent, _ in node.next_functions if parent is not None]
    return names & {
        "RowCountsBackward",
        "_ColumnFunctionBackward",
        "LongRowNodeBackward",
        "FusedNodeBackward",
        "CompiledLossBackward",
    }


@pytest.mark.parametrize("task", TASKS)
def test_the_loss_picks_the_compiled_form_by_itself(task):
    logits, target = batch(8, 3, task)
    assert fused(MetricLoss("f1", task=task), logits, target) == {"CompiledLossBackward"}
    counts = "RowCountsBackward" if task == "multiclass" else "_ColumnFunctionBackward"
    assert fused(MetricLoss("gmean", task=task), logits, target) == {counts}
    whole = counts if task == "multilabel" else "CompiledLossBackward"
    for metric in ("mcc", "cohen_kappa", "accuracy", "balanced_accuracy"):
        assert fused(MetricLoss(metric, task=task), logits, target) == {whole}
    assert fused(MetricLoss("f1", task=task, memory=0.9), logits, target) == {whole}
    assert fused(MetricLoss("f1", task=task, memory=0.9, weight=[1.0, 2.0, 3.0][: 2 if task == "binary" else 3]),
                 logits, target) == {counts}  # fmt: skip
    assert not fused(MetricLoss("f1", task=task, backend="eager"), logits, target)


@pytest.mark.parametrize("d", [2, 3, 41, 257, 1271, 50257])
@pytest.mark.parametrize("n", [1, 2, 37, 600])
def test_any_number_of_rows_and_classes(n, d):
    n = min(n, 2_000_000 // d)
    assert_like_eager(*batch(n, d, seed=n + d), anchor=0.7, scale=-1.7)
    assert_like_eager(*batch(n, d, seed=n + d), temperature=0.4, rtol=1e-4)


@pytest.mark.parametrize("d", [4, 10, 24, 31, 32, 64, 65, 97])
@pytest.mark.parametrize("n", [127, 128, 129, 257])
def test_at_the_edges_of_blocks_of_rows(n, d):
    from evalign.kernels.cpu.block_loops import ROWS
    from evalign.kernels.cpu.cpu_loss import FEW

    assert (ROWS, FEW) == (128, 31)
    logits, target = batch(n, d, spread=3.0)
    weight = torch.rand(n, generator=torch.Generator().manual_seed(1)) + 0.5
    weight[n // 2] = 0.0
    target[n - 1] = -100
    assert_like_eager(logits, target, weight, anchor=0.3, label_smoothing=0.1)
    assert_like_eager(logits, target, weight, metric="mcc", step="linear", temperature=0.1)


@given(st.integers(2, 24), st.integers(0, 10**6))
def test_the_two_largest_are_those_of_a_sort(d, seed):
    """Whole numbers, so that many are equal."""
    from evalign.kernels.cpu.block_loops import ROWS, two_largest
    from evalign.kernels.cpu.row_loops import exponentials, second_largest

    z = np.random.default_rng(seed).integers(-2, 3, (d, ROWS)).astype(np.float32)
    largest, below = np.empty((2, ROWS), np.float32)
    two_largest(z, largest, below)
    assert np.array_equal(largest, np.sort(z, axis=0)[-1])
    assert np.array_equal(below, np.sort(z, axis=0)[-2])
    rows, found, second, x = (
        z.T.copy(),
        np.empty(ROWS, np.float32),
        np.empty(ROWS, np.float32),
        np.empty_like(z.T, order="C"),
    )
    exponentials(rows, found, x)
    assert np.array_equal(found, largest)
    np.testing.assert_allclose(x, np.exp(rows - largest[:, None]), rtol=1e-6)
    second_largest(x, second)
    np.testing.assert_allclose(second, np.exp(below - largest), rtol=1e-6)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("d", [2, 3, 4, 5])
def test_the_unrolled_backward_loop_is_the_one_for_any_number_of_classes(d, smoothing):
    """With ties for the first and the second place, and rows that do not count."""
    from evalign.kernels.cpu.block_loops import block_backward, few_backward

    generator, shape = np.random.default_rng(d), (2, d, 150)
    z = (generator.integers(-6, 7, shape) / 2).astype(np.float32)
    y, w = generator.integers(0, d, 300), generator.integers(0, 3, 300).astype(np.float32)
    points = np.array([*FivePoints(0.2, 0.5).numbers(), smoothing], np.float32)
    by_tp, by_predicted = generator.normal(size=(2, d)).astype(np.float32)
    expected, found = np.empty((2, *shape), np.float32)
    block_backward(z, y, w, points, (by_tp, by_predicted, np.float32(0.3)), 0, 300, expected)
    few_backward(z, y, w, points, tuple(by_tp), tuple(by_predicted), np.float32(0.3), 0, 300, found)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("shape", [(300, 3), (129, 24), (50, 97), (40, 300), (3, 5, 7, 9), (2, 300, 11), (1, 4, 200)])
@pytest.mark.parametrize("options", [{"anchor": 0.7}, {"metric": "mcc", "step": "linear"},
                                     {"anchor": 1.0, "label_smoothing": 0.1, "weight": True}])  # fmt: skip
def test_shares_of_classes_as_labels(shape, options):
    """With shares of 0, and rows that do not count."""
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(shape, generator=generator)
    shares = (3 * torch.randn(shape, generator=generator)).softmax(1)
    shares = torch.where(shares < 0.01, 0.0, shares)
    shares = shares / shares.sum(1, keepdim=True)
    sample_weight = torch.rand(shape[0], generator=generator)
    sample_weight[0] = 0.0
    options = {**options, "weight": torch.linspace(0.5, 2.0, shape[1])} if "weight" in options else options
    assert_like_eager(logits, shares, **options, rtol=5e-5)
    assert_like_eager(logits, shares, sample_weight, **options, rtol=5e-5, scale=-1.7)
    loss = MetricLoss(**{"metric": "f1", **options})
    assert fused(loss, logits, shares) == {"CompiledLossBackward"}


def test_one_hot_shares_give_the_loss_of_labels():
    for d in (5, 120):
        logits, target = batch(64, d)
        hard = value_and_gradient(logits, target, metric="f1", anchor=1.0)
        soft = value_and_gradient(logits, torch.eye(d)[target], metric="f1", anchor=1.0)
        torch.testing.assert_close(soft, hard, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("n", "d"), [(100_000, 2), (100_000, 3), (30_000, 41)])
def test_many_rows(n, d):
    assert_like_eager(*batch(n, d), metric="mcc", anchor=1.0)


def test_one_class_is_refused_and_one_logit_is_a_binary_problem():
    with pytest.raises(ValueError, match="task='binary'"):
        MetricLoss("f1")(torch.zeros(4, 1), torch.zeros(4, dtype=torch.long))
    logits, target = batch(50, 1, "binary")
    assert_like_eager(logits[:, None], target, task="binary")


@pytest.mark.parametrize("n", [1, 2, 511, 512, 513, 100_000])
@pytest.mark.parametrize("threshold", [None, 0.2, 0.7, BTG_GRID])
def test_binary_problems_at_any_threshold(n, threshold):
    logits, target = batch(n, 1, "binary", spread=3.0)
    assert_like_eager(logits, target, task="binary", threshold=threshold, anchor=0.5, label_smoothing=0.1)


@pytest.mark.parametrize("shape", [(1, 1), (7, 3), (300, 41), (5, 257), (6, 4, 5, 3)])
def test_multilabel_problems(shape):
    torch.manual_seed(0)
    logits, target = 2 * torch.randn(shape), torch.randint(0, 2, shape)
    target[torch.rand(shape) < 0.2] = -100
    for options in ({"threshold": 0.3, "step": "linear"}, {"threshold": BTG_GRID}, {"metric": "mcc", "anchor": 1.0}):
        assert_like_eager(logits, target, torch.rand(shape), task="multilabel", **options)


@pytest.mark.parametrize(
    ("task", "metric"),
    [(t, m) for t in TASKS for m in [*sorted(metrics.METRICS), "auroc"] if t == "multiclass" or m != "quadratic_kappa"],
)
def test_every_metric_in_every_task(task, metric):
    logits, target = batch(60, 4, task)
    averages = (None, "micro", "weighted") if metrics.is_averaged(metric) else (None,)
    for average in averages:
        assert_like_eager(logits, target, metric=metric, task=task, average=average, label_smoothing=0.05)


@pytest.mark.parametrize("task", TASKS)
def test_a_function_of_the_counts(task):
    logits, target = batch(40, 4, task)
    assert_like_eager(logits, target, metric=lambda c: c.tp[1] / (c.actual[1] + 0.5 * c.predicted[1]), task=task)
    if task != "multilabel":
        assert_like_eager(logits, target, metric=lambda c: c.matrix[0, 0] / c.matrix[0].sum(), task=task)


@given(
    st.integers(1, 300),
    st.sampled_from([2, 3, 5, 10, 41]),
    st.sampled_from([0.02, 0.1, 0.2, 2 / 9, 0.3, 0.39]),  # at 0.4 the step jumps, and rounding chooses the side
    st.sampled_from([0.1, 1.0, 8.0, 60.0]),
    st.integers(0, 10**6),
)
def test_temperatures_weights_and_ignored_rows(n, d, temperature, spread, seed):
    logits, target = batch(n, d, spread=spread, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    target[torch.rand(n, generator=generator) < 0.2] = -100
    weight = torch.rand(n, generator=generator).round(decimals=1)
    assert_like_eager(
        logits, target, weight, rtol=2e-4, temperature=temperature, anchor=0.3, label_smoothing=0.1, scale=3.0,
        weight=torch.rand(d, generator=generator) + 0.1, offset=torch.randn(d, generator=generator),
    )  # fmt: skip


@given(st.integers(1, 400), st.sampled_from([2, 7, 33]), st.integers(0, 10**6))
def test_counts_are_conserved(n, d, seed):
    logits, target = batch(n, d, seed=seed)
    counts, _ = MetricLoss("f1").objective.counts(logits, target, torch.ones(n))
    assert counts.predicted.sum().item() == pytest.approx(n, rel=1e-6)
    assert (counts.tp <= counts.actual * (1 + 1e-6)).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("task", TASKS)
def test_dtypes(task, dtype):
    logits, target = batch(90, 5, task)
    rtol = 1e-2 if dtype in (torch.float16, torch.bfloat16) else 2e-5  # the gradient is rounded to the logits' dtype
    gradient = assert_like_eager(logits.to(dtype), target, task=task, anchor=1.0, rtol=rtol)
    assert gradient.isfinite().all()


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.t().contiguous().t(),
        lambda x: torch.stack([x, x], 1)[:, 0],
        lambda x: torch.cat([x, x], 1)[:, : x.shape[1]],
        lambda x: x.flip(0)[::2],
        lambda x: x[:1].expand(5, -1),
    ],
    ids=["transposed", "between rows", "part of rows", "every second", "expanded"],
)
def test_strides(view):
    logits, target = batch(10, 6)
    strided = view(logits)
    target = target[: strided.shape[0]]
    for task in ("multiclass", "multilabel"):
        labels = target if task == "multiclass" else (torch.arange(strided.numel()) % 3 == 0).long().view(strided.shape)
        found, gradient = value_and_gradient(strided, labels, metric="f1", task=task)
        expected, slope = value_and_gradient(strided.contiguous(), labels, metric="f1", task=task)
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(gradient, slope)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_dense_predictions(layout):
    torch.manual_seed(0)
    logits = torch.randn(2, 5, 7, 9).contiguous(memory_format=layout)
    target = torch.randint(0, 5, (2, 7, 9))
    target[0, 0] = -100
    assert_like_eager(logits, target, metric="jaccard", anchor=1.0)


def test_equal_logits_and_ties_for_first_place():
    target = torch.tensor([0, 1, 2, 1])
    two = torch.tensor([[1.0, 1.0, 0.0], [0.0, 2.0, 2.0], [3.0, -1.0, 3.0], [0.5, 0.5, 0.2]])
    assert_like_eager(two, target, anchor=0.5)  # the two largest are the same whichever comes first
    value, gradient = value_and_gradient(torch.ones(4, 3), target, metric="f1")
    expected, _ = value_and_gradient(torch.ones(4, 3).double(), target, metric="f1", backend="eager")
    assert value.item() == pytest.approx(expected.item())
    assert gradient.isfinite().all()
    torch.testing.assert_close(gradient.sum(1), torch.zeros(4), atol=1e-7, rtol=0)


def test_a_tie_for_second_place_takes_the_mean_of_the_two_slopes():
    logits, target = torch.tensor([[2.0, 0.5, 0.5, -1.0], [0.0, 0.3, -2.0, 0.1]]), torch.tensor([0, 2])
    _, gradient = value_and_gradient(logits, target, metric="f1")
    nudged = []
    for which in (1, 2):
        x = logits.double()
        x[0, which] += 1e-9
        nudged.append(value_and_gradient(x, target, metric="f1", backend="eager")[1].float())
    assert not torch.allclose(nudged[0], nudged[1])
    torch.testing.assert_close(gradient, (nudged[0] + nudged[1]) / 2, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("temperature", [0.01, 0.2, 0.4])
def test_infinite_and_huge_logits(temperature):
    inf = float("inf")
    logits = torch.tensor([[5.0, -inf, 1.0], [1e4, -1e4, 0.0], [3e38, 0.0, -3e38], [-inf, 0.0, -inf], [0.5, 0.1, -inf]])
    assert_like_eager(logits, torch.tensor([0, 2, 1, 1, 0]), temperature=temperature, rtol=5e-4)
    yes = torch.tensor([inf, -inf, 3e38, -1e4, 0.5])
    assert_like_eager(yes, torch.tensor([1, 0, 0, 1, 1]), task="binary", temperature=temperature)


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("task", TASKS)
def test_a_nan_is_seen_unless_its_label_is_ignored(task, sign):
    logits, target = batch(6, 3, task)
    bad = np.copysign(np.float32("nan"), np.float32(sign))
    logits[2, ...] = float(bad)
    assert MetricLoss("f1", task=task)(logits, target).isnan()
    target[2, ...] = -100
    value, gradient = value_and_gradient(logits, target, metric="f1", task=task, anchor=1.0)
    assert value.isfinite()
    assert gradient.isfinite().all()


@pytest.mark.parametrize("task", TASKS)
def test_an_ignored_batch_has_no_gradient(task):
    logits, target = batch(9, 3, task)
    value, gradient = value_and_gradient(logits, torch.full_like(target, -100), metric="f1", task=task, anchor=1.0)
    assert value == 0
    assert not gradient.any()
    empty, none = value_and_gradient(logits[:0], target[:0], metric="f1", task=task)
    assert empty == 0
    assert none.shape == logits[:0].shape


@pytest.mark.parametrize("task", TASKS)
def test_a_second_derivative_is_given_by_the_eager_form(task):
    logits, target = batch(9, 3, task)
    seconds = []
    for backend in ("auto", "eager"):
        loss = MetricLoss("accuracy", task=task, backend=backend)(logits.requires_grad_(), target)
        (gradient,) = torch.autograd.grad(loss, logits, create_graph=True)
        seconds += torch.autograd.grad(gradient.square().sum(), logits)
    torch.testing.assert_close(*seconds, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("task", TASKS)
def test_threads_share_the_work(task, monkeypatch):
    logits, target = batch(1001, 7, task)
    alone = value_and_gradient(logits, target, metric="f1", task=task, anchor=1.0)
    monkeypatch.setattr(compilation, "SERIAL", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert len(compilation.parts(1001, 7007)) == 3
    shared = value_and_gradient(logits, target, metric="f1", task=task, anchor=1.0)
    for ours, theirs in zip(shared, alone, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-9)


def _in_child(queue) -> None:
    logits, target = batch(4000, 10)
    queue.put(MetricLoss("f1")(logits, target).item())


def test_a_forked_process_starts_threads_of_its_own(monkeypatch):
    monkeypatch.setattr(compilation, "SERIAL", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    logits, target = batch(4000, 10)
    here = MetricLoss("f1")(logits, target).item()
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # that a process with threads forks is the point
        child = context.Process(target=_in_child, args=(queue,))
        child.start()
    child.join(60)
    assert child.exitcode == 0
    assert queue.get() == pytest.approx(here)


@pytest.mark.parametrize("task", TASKS)
def test_without_numba_the_loss_is_the_same(task, monkeypatch):
    logits, target = batch(30, 4, task)
    with_numba = value_and_gradient(logits, target, metric="f1", task=task, anchor=1.0)
    monkeypatch.setattr(compilation, "ready", lambda: False)
    without = value_and_gradient(logits, target, metric="f1", task=task, anchor=1.0)
    torch.testing.assert_close(with_numba, without, rtol=2e-5, atol=1e-7)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("d", [30, 60])
def test_nothing_of_the_batchs_size_is_kept_but_the_input_and_the_memory_of_the_gradient(task, d):
    logits, target = batch(3000, d, task)
    logits.requires_grad_()
    sizes: dict[int, int] = {}

    def note(x):
        sizes[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        loss = MetricLoss("f1", task=task, anchor=1.0)(logits, target)
    if task == "multiclass":
        sizes.pop(logits.untyped_storage().data_ptr())
        kept, stats = loss.grad_fn.kept
        assert sum(sizes.values()) + stats.nbytes < 0.25 * logits.nbytes
        assert kept.shape == ((0,) if d == 30 else logits.shape)
        where = kept.data_ptr()
        del kept
        loss.backward()
        assert d == 30 or logits.grad.data_ptr() == where


@pytest.mark.parametrize("d", [5, 60])
def test_a_graph_may_be_used_twice(d):
    logits, target = batch(30, d)
    loss = MetricLoss("f1", anchor=1.0)(logits.requires_grad_(), target)
    first, second = (torch.autograd.grad(loss, logits, retain_graph=True)[0] for _ in range(2))
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    assert first.data_ptr() != second.data_ptr()


def test_the_exponential_is_right_to_two_units_of_the_last_place():
    from evalign.kernels.cpu.block_loops import exp

    t = np.concatenate([np.linspace(-87.3, 0, 20001), [-1e-8, -0.34657359, -0.3465736]]).astype(np.float32)
    found = np.array([exp(x) for x in t], np.float64)
    np.testing.assert_allclose(found, np.exp(t.astype(np.float64)), rtol=2**-21)
    assert exp(np.float32(0)) == 1
    assert exp(np.float32(-88)) == exp(np.float32("-inf")) == 0
    assert np.isnan(exp(np.float32("nan")))


def test_the_logarithm_is_right_to_two_units_of_the_last_place():
    from evalign.kernels.cpu.block_loops import log

    x = np.concatenate([np.geomspace(1e-30, 1e30, 20001), np.linspace(0.5, 3, 20001)]).astype(np.float32)
    found, expected = np.array([log(value) for value in x], np.float64), np.log(x.astype(np.float64))
    np.testing.assert_allclose(found, expected, rtol=2**-22, atol=2**-24)
    assert log(np.float32(1)) == 0
    assert np.isnan(log(np.float32("nan")))
