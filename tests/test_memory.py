"""Counts remembered across batches: values and gradients from the definition, the decay, and the state."""

import copy
import io

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

from evalign import MetricLoss
from evalign._options import LossOptions
from evalign.memory import Memory
from evalign.objective import Objective
from test_loss_module import run, torch_own_warnings
from test_losses import TASKS, batch

KINDS = [("f1", t, {}) for t in TASKS]
KINDS += [
    ("mcc", "multiclass", {}),
    ("auroc", "binary", {"threshold": [0.25, 0.5, 0.75]}),
    ("auroc", "multiclass", {"threshold": [0.25, 0.5, 0.75]}),
    ("jaccard", "multilabel", {}),
]
KINDS += [("quadratic_kappa", "multiclass", {}), ("fbeta", "multiclass", {"beta": [1.0, 2.0, 0.5, 1.0]})]
KINDS += [(lambda c: c.matrix[0, 0] / c.matrix[0].sum(), "multiclass", {})]
ids = [f"{m if isinstance(m, str) else 'function'}-{t}" for m, t, _ in KINDS]


def remembered_loss(metric, task, batches, decay, temperature=0.2, **options):
    """The definition, with `Confusion.__add__` and no memory: counts of the last batch + decayed earlier ones."""
    beta = options.pop("beta", None)
    objective = Objective.of(LossOptions(metric, task=task, beta=beta, **options))
    parts = []
    for z, y in batches:
        c = objective.confusion(z, y, torch.ones(y.shape, dtype=z.dtype), temperature)
        if not c.multilabel and c.tp.dim() == 1:
            _ = c.matrix
        parts.append(c)
    total, scale = parts[-1], 1.0
    for age, c in enumerate(reversed(parts[:-1]), start=1):
        for name in ("tp", "actual", "predicted", "total"):
            setattr(c, name, decay**age * getattr(c, name).detach())
        if isinstance(c._matrix, torch.Tensor):
            c._matrix = decay**age * c._matrix.detach()
        total, scale = total + c, scale + decay**age
    return objective.metric_term(total, beta), scale


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])  # operation by operation, and compiled
@pytest.mark.parametrize(("metric", "task", "options"), KINDS, ids=ids)
def test_value_and_gradient_are_those_of_the_definition(metric, task, options, dtype):
    batches = [(z.to(dtype), y) for z, y in (batch(task, seed=seed) for seed in range(3))]
    loss = MetricLoss(metric, task=task, memory=0.7, **options)
    for z, y in batches[:-1]:
        loss(z.requires_grad_(), y)
    z, y = batches[-1]
    value, gradient = run(loss, z, y)
    z = z.clone().requires_grad_()
    expected, scale = remembered_loss(metric, task, [*batches[:-1], (z, y)], 0.7, **options)
    expected.backward()
    close = {} if dtype == torch.float64 else {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(value, expected.detach(), **close)
    torch.testing.assert_close(gradient, scale * z.grad, **close)  # equal batches, of which this one stands for all


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(
        [("multiclass", "macro"), ("multiclass", "weighted"), ("multiclass", "micro"), ("binary", "binary")]
    ),
    st.sampled_from(["auto", 0.0, 0.6]),
    st.lists(st.integers(0, 30), min_size=1, max_size=6),
    st.integers(0, 1000),
)
def test_the_compiled_memory_is_that_of_torch(kind, decay, sizes, seed):
    (task, average), generator = kind, torch.Generator().manual_seed(seed)
    losses = [
        MetricLoss("jaccard", task=task, average=average, anchor=0.5, memory=Memory(decay, rows_of_rarest=8),
                   backend=backend)
        for backend in ("auto", "eager")
    ]  # fmt: skip
    for size in sizes:
        z = torch.randn(size, *([4] if task == "multiclass" else []), generator=generator)
        y = torch.randint(2 if task == "binary" else 3, (size,), generator=generator)  # class 3 never comes
        (value, gradient), (expected, slope) = (run(loss, z, y) for loss in losses)
        torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(gradient, slope, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(losses[0].state_dict(), losses[1].state_dict(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("task", TASKS)
def test_the_anchor_is_that_of_the_batch_alone(task):
    first, second = batch(task, seed=1), batch(task, seed=2)
    anchored, plain = (MetricLoss("f1", task=task, memory=0.5, anchor=a) for a in (3.0, 0.0))
    for loss in (anchored, plain):
        loss(first[0].requires_grad_(), first[1])
    extra = MetricLoss("f1", task=task, anchor=3.0)(*second) - MetricLoss("f1", task=task)(*second)
    z, y = second[0].requires_grad_(), second[1]
    torch.testing.assert_close(anchored(z, y) - plain(z, y), extra)


def skewed(n, share=0.02, seed=0):
    generator = torch.Generator().manual_seed(seed)
    y = (torch.rand(n, generator=generator) < share).long()
    return 1.5 * torch.randn(n, generator=generator) - 2.0 + 1.6 * y, y


def test_small_batches_of_a_rare_class_have_the_loss_of_the_whole():
    z, y = skewed(16_000)
    whole = 1 - MetricLoss("f1", task="binary")(z, y).item()
    means = {}
    for memory in (None, "auto"):
        loss = MetricLoss("f1", task="binary", memory=memory)
        for _ in range(2):  # the second time around no row is new, and all have come equally often
            parts = zip(z.requires_grad_().split(16), y.split(16), strict=True)
            means[memory] = torch.stack([1 - loss(*part).detach() for part in parts]).mean().item()
    assert means["auto"] == pytest.approx(whole, rel=0.01)
    assert means[None] > 4 * whole  # 72 % of batches have no positive: their loss is only the share of flagged rows


def test_a_batch_with_enough_of_every_class_is_not_mixed_with_others():
    loss, plain = MetricLoss("f1", memory="auto", anchor=1.0), MetricLoss("f1", anchor=1.0)
    for seed in range(3):
        z, y = batch("multiclass", n=1200, seed=seed)
        for got, expected in zip(run(loss, z, y), run(plain, z, y), strict=True):
            torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("weight", [None, [1.0, 49.0]])
def test_the_decay_follows_from_the_batch_and_its_rarest_class_whatever_its_weight(weight, dtype):
    memory = Memory(rows_of_rarest=20)
    loss = MetricLoss("f1", memory=memory, weight=weight)
    y = torch.tensor([1] * 2 + [0] * 98)
    z = torch.zeros(100, 2, dtype=dtype, requires_grad=True)
    loss(z, y)
    first = memory.state[-1].item()
    loss(z, y)
    assert memory.state[-1].item() == pytest.approx(first * (1 + 1 - 2 / 20))
    loss(z[:10], y[-10:])  # a tenth of the rows, the rarest class now 4 in 210
    assert memory.state[-1].item() == pytest.approx(first * (2 - 2 / 20) * (1 - 10 * 4 / 210 / 20) + 10)


def test_known_labels_decide_the_decay_and_the_label_counts():
    memory = Memory(labels=[900, 100], rows_of_rarest=50)
    loss = MetricLoss(lambda c: c.actual[1] / c.total, memory=memory)
    z, y = torch.zeros(20, 2, dtype=torch.float64, requires_grad=True), torch.tensor([1] * 8 + [0] * 12)
    assert loss(z, y).item() == pytest.approx(1 - 0.1)
    loss(z, y)
    assert memory.state[-1].item() == pytest.approx(20 + 20 * (1 - 20 * 0.1 / 50))


@pytest.mark.parametrize("task", TASKS)
def test_labels_of_a_sample_in_proportion_change_nothing(task):
    z, y = batch(task)
    labels = torch.bincount(y.reshape(-1), minlength=2) if task != "multilabel" else y.sum(0)
    options = {"rows": 5 * len(y)} if task == "multilabel" else {}
    for metric in ("f1", "mcc"):
        loss = MetricLoss(metric, task=task, memory=Memory(0.0, labels=5 * labels, **options))
        plain = MetricLoss(metric, task=task)
        for got, expected in zip(run(loss, z, y), run(plain, z, y), strict=True):
            torch.testing.assert_close(got, expected)


def test_known_labels_give_the_loss_of_all_rows_to_a_sample_that_is_out_of_proportion():
    z, y = skewed(4000, share=0.1)
    z, labels = z.double(), torch.bincount(y)
    kept = (y == 1) | (torch.arange(4000) % 7 == 0)  # all positives, a seventh of the negatives
    whole = MetricLoss("f1", task="binary")(z, y)
    loss = MetricLoss("f1", task="binary", memory=Memory(0.0, labels=labels))
    assert loss(z[kept].requires_grad_(), y[kept]).item() == pytest.approx(whole.item(), abs=0.01)
    assert MetricLoss("f1", task="binary")(z[kept], y[kept]).item() < whole.item() - 0.1


def test_kappa_with_known_labels_keeps_rows_and_columns_of_its_matrix():
    z, y = batch("multiclass")
    loss = MetricLoss(lambda c: (c.matrix.sum(1) * c.predicted).sum() / c.total**2, memory=Memory(labels=[4, 3, 2, 1]))
    share = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)
    c = Objective.of(LossOptions("f1")).confusion(z, y, torch.ones(24, dtype=z.dtype))
    tp = c.tp / c.actual * share * 24
    predicted = tp + c.fp / (24 - c.actual) * (1 - share) * 24
    assert loss(z.requires_grad_(), y).item() == pytest.approx(1 - (share * predicted / 24).sum().item())


def test_a_class_is_left_out_only_if_neither_batch_nor_memory_has_it():
    z, y = batch("multiclass", n=12)
    loss = MetricLoss("recall", memory=0.5)
    perfect = 50.0 * torch.nn.functional.one_hot(y, 4).double()
    two = y < 2
    assert loss(perfect[two].requires_grad_(), y[two]).item() == pytest.approx(0.0)  # 2 and 3 are unheard of
    loss(z.requires_grad_(), y)
    z = z[two].detach().requires_grad_()
    MetricLoss("f1", memory=loss.memory)(z, y[two]).backward()
    assert (z.grad[:, 2:] != 0).any(1).all()  # a false positive of an absent class costs


def test_validation_neither_sees_nor_changes_the_memory():
    first, second = batch("multiclass", seed=1), batch("multiclass", seed=2)
    loss, plain = MetricLoss("f1", memory="auto"), MetricLoss("f1")
    loss(first[0].requires_grad_(), first[1])
    state = copy.deepcopy(loss.state_dict())
    with torch.no_grad():
        assert torch.equal(loss(*second), plain(*second))
    loss.eval()
    assert torch.equal(loss(second[0].requires_grad_(), second[1]), plain(*second))
    torch.testing.assert_close(loss.state_dict(), state, rtol=0, atol=0)
    loss.train()
    assert loss(*second) != plain(*second)


def test_a_checkpoint_continues_where_the_memory_was():
    batches = [batch("multiclass", seed=seed) for seed in range(4)]
    loss = MetricLoss("f1", memory="auto")
    for z, y in batches[:2]:
        loss(z.requires_grad_(), y)
    file = io.BytesIO()
    torch.save(loss.state_dict(), file)
    file.seek(0)
    resumed = MetricLoss("f1", memory="auto")
    resumed.load_state_dict(torch.load(file, weights_only=True))
    for z, y in batches[2:]:
        assert torch.equal(loss(z.requires_grad_(), y), resumed(z, y))
    copied = copy.deepcopy(loss)
    copied.memory.reset()
    assert loss.memory.state[-1] > copied.memory.state[-1] == 0
    assert torch.equal(copied(*batches[0]), MetricLoss("f1")(*batches[0]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_narrow_numbers_leave_the_memory_exact(dtype):
    loss = MetricLoss("f1", memory=0.9)
    for seed in range(50):
        z, y = batch("multiclass", seed=seed)
        loss.to(dtype)
        value, gradient = run(loss, z.to(dtype), y)
        assert value.isfinite()
        assert gradient.isfinite().all()
    assert loss.memory.state[-1].item() == pytest.approx(24 * (1 - 0.9**50) / 0.1, rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_batch_that_is_not_finite_is_not_remembered(dtype):
    z, y = batch("multiclass")
    z = z.to(dtype)
    loss = MetricLoss("f1", memory=0.5)
    loss(z.requires_grad_(), y)
    state = copy.deepcopy(loss.state_dict())
    assert loss(z * float("nan"), y).isnan()
    torch.testing.assert_close(loss.state_dict(), state, rtol=0, atol=0)


@pytest.mark.parametrize(("temperature", "forgotten"), [(0.18, False), (0.15, True), (0.4, True)])
def test_counts_of_a_far_temperature_are_forgotten(temperature, forgotten):
    first, second = batch("multiclass", seed=1), batch("multiclass", seed=2)
    loss = MetricLoss("f1", memory=0.5, temperature=0.2)
    loss(first[0].requires_grad_(), first[1])
    loss.temperature = temperature
    value, alone = loss(second[0].requires_grad_(), second[1]), MetricLoss("f1", temperature=temperature)(*second)
    assert torch.allclose(value, alone, atol=1e-9, rtol=0) == forgotten


@pytest.mark.slow
@torch_own_warnings
@pytest.mark.parametrize("task", TASKS)
def test_a_compiled_loss_remembers_the_same_without_being_compiled_anew(task):
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    loss = MetricLoss("f1", task=task, memory="auto", anchor=1.0)
    twin = copy.deepcopy(loss)
    compiled = torch.compile(twin, fullgraph=True, backend=counter)
    frames = []
    for seed in range(4):
        z, y = batch(task, seed=seed)
        twin.temperature = loss.temperature = 0.2 - 0.01 * seed
        for got, expected in zip(run(compiled, z, y), run(loss, z, y), strict=True):
            torch.testing.assert_close(got, expected)
        frames.append(counter.frame_count)
    assert frames[0] < frames[1] == frames[-1]  # once more when the first batch has told the number of classes
    torch.testing.assert_close(twin.state_dict(), loss.state_dict())


@torch_own_warnings
@pytest.mark.parametrize("task", TASKS)
def test_a_compiled_loss_remembers_float32_batches(task):
    torch._dynamo.reset()
    loss = MetricLoss("f1", task=task, memory=0.5)
    twin = copy.deepcopy(loss)
    compiled = torch.compile(twin, backend="eager")
    for seed in range(2):
        z, y = batch(task, seed=seed)
        torch.testing.assert_close(run(compiled, z.float(), y), run(loss, z.float(), y))
    torch.testing.assert_close(twin.memory.state, loss.memory.state, rtol=1e-5, atol=1e-5)


@settings(max_examples=30)
@given(st.floats(0.01, 100.0), st.permutations(range(24)))
def test_neither_the_scale_of_weights_nor_the_order_of_rows_matters(scale, order):
    first, (z, y) = batch("multiclass", seed=1), batch("multiclass", seed=2)
    weight = torch.arange(1, 25).double()
    values = []
    for factor, index in ((1.0, torch.arange(24)), (scale, torch.tensor(order))):
        loss = MetricLoss("mcc", memory="auto")
        loss(first[0].requires_grad_(), first[1], factor * weight)
        values.append(loss(z[index], y[index], factor * weight[index]))
    torch.testing.assert_close(*values)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_an_empty_batch_has_the_remembered_value_and_no_gradient(dtype):
    z, y = batch("multiclass")
    z = z.to(dtype)
    loss = MetricLoss("f1", memory="auto")
    before = loss(z.requires_grad_(), y)
    empty = z[:0].detach().requires_grad_()
    value = loss(empty, y[:0])
    value.backward()
    torch.testing.assert_close(value, before)
    assert torch.equal(empty.grad, torch.zeros(0, 4, dtype=dtype))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: MetricLoss("f1", memory=1.0), "decay of a memory must lie in"),
        (lambda: MetricLoss("f1", memory="always"), "must be one of auto, got 'always'"),
        (lambda: Memory(rows_of_rarest=0), "rows_of_rarest must lie in"),
        (lambda: Memory(labels=[1, -1]), "one count per class, all >= 0"),
        (lambda: Memory(labels=[0, 0]), "one count per class, all >= 0"),
    ],
)
def test_wrong_options_are_told_at_once(wrong, message):
    with pytest.raises(ValueError, match=message):
        wrong()


def test_a_memory_belongs_to_one_problem():
    loss = MetricLoss("f1", memory="auto")
    loss(torch.zeros(4, 3, requires_grad=True), torch.tensor([0, 1, 2, 0]))
    with pytest.raises(ValueError, match="a separate memory"):
        loss(torch.zeros(4, 5, requires_grad=True), torch.tensor([0, 1, 2, 0]))
    wide = MetricLoss("f1", memory=Memory(labels=[1, 2]))
    with pytest.raises(ValueError, match="expected 3, got 2"):
        wide(torch.zeros(4, 3, requires_grad=True), torch.tensor([0, 1, 2, 0]))
    several = MetricLoss("f1", task="multilabel", memory=Memory(labels=[1, 2]))
    with pytest.raises(ValueError, match="need the number of rows"):
        several(torch.zeros(4, 2, requires_grad=True), torch.zeros(4, 2).long())


def test_the_memory_is_shown():
    assert "memory='auto'" in repr(MetricLoss("f1", memory="auto"))
    assert "labels=[1.0, 2.0]" in repr(Memory(labels=[1, 2]))
    assert set(MetricLoss("f1", memory=0.5).state_dict()) >= {"memory.state", "memory.seen"}


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_batch_that_checkpoint_recomputes_is_remembered_once(dtype, reentrant):
    def trained(forward):
        loss = MetricLoss("f1", memory=0.5)
        weights = torch.eye(4, dtype=dtype, requires_grad=True)
        for seed in range(3):
            z, y = batch("multiclass", seed=seed)
            forward(lambda w: loss(z.to(dtype) @ w, y), weights).backward()
        return loss.memory.state, loss.memory.seen, weights.grad

    plain = trained(lambda function, w: function(w))
    recomputed = trained(lambda function, w: checkpoint(function, w, use_reentrant=reentrant))
    for got, expected in zip(recomputed, plain, strict=True):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("count", [3, 16])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_batches_that_one_backward_pass_recomputes_are_remembered_once_each(dtype, count):
    def trained(forward):
        loss = MetricLoss("f1", memory=0.5)
        weights = torch.eye(4, dtype=dtype, requires_grad=True)
        batches = [batch("multiclass", seed=seed) for seed in range(count)]
        whole = sum(forward(lambda w, z=z, y=y: loss(z.to(dtype) @ w, y), weights) for z, y in batches)
        whole.backward()
        return loss.memory.state, loss.memory.seen, weights.grad, whole.detach()

    plain = trained(lambda function, w: function(w))
    recomputed = trained(lambda function, w: checkpoint(function, w, use_reentrant=False))
    for got, expected in zip(recomputed, plain, strict=True):
        torch.testing.assert_close(got, expected)


@torch_own_warnings
@pytest.mark.parametrize("transform", [
    lambda loss, z, y: torch.func.grad(loss)(z[0], y[0]),
    lambda loss, z, y: torch.func.vmap(loss)(z, y),
    lambda loss, z, y: torch.func.jvp(lambda x: loss(x, y[0]), (z[0],), (z[1],)),
], ids=["grad", "vmap", "jvp"])  # fmt: skip
@pytest.mark.parametrize("warm", [False, True])
def test_a_memory_refuses_transforms_of_torch_func_and_stays_as_it_was(transform, warm):
    z, y = torch.randn(3, 8, 3), torch.randint(3, (3, 8))
    loss, fresh = (MetricLoss("f1", memory=0.5) for _ in range(2))
    for each in (loss, fresh) if warm else ():
        each(z[2], y[2])
    with pytest.raises(RuntimeError, match=r"a memory cannot be written inside a transform of torch\.func"):
        transform(loss, z, y)
    torch.testing.assert_close(loss(z[1], y[1]), fresh(z[1], y[1]))
