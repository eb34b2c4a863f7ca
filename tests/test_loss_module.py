"""MetricLoss as a module: state, copies, dtypes, torch.compile, and vmap over the objective beneath it."""

import copy
import io
import pickle
import shutil
from functools import partial

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from evalign import MetricLoss, metric_loss
from evalign._options import LossOptions
from evalign.kernels.cpu import compilation
from evalign.objective import Objective
from test_losses import BACKENDS, TASKS, WITH_AUROC, batch

OPTIONS = [
    {"metric": "f1"},
    {"metric": "mcc", "temperature": 0.07, "anchor": 1.0},
    {"metric": "fbeta", "beta": [1.0, 0.5, 2.0, 4.0], "label_smoothing": 0.1},
    {"metric": "recall", "weight": [1.0, 2.0, 3.0, 0.5], "offset": [0.5, 0.0, -1.0, 0.25]},
    {"metric": "accuracy", "step": "linear", "delta": 0.25, "threshold": 0.25},
    {"metric": "jaccard", "step": "sigmoid", "k": 5.0, "average": "micro"},
    {"metric": "auroc", "threshold": [0.25, 0.5]},
    {"metric": "f1", "step": "identity"},
]
torch_own_warnings = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of its own parts, while it compiles
ids = [" ".join(map(str, options.values())) for options in OPTIONS]


@pytest.mark.parametrize("task", ["multiclass", "multilabel"])
@pytest.mark.parametrize("options", OPTIONS, ids=ids)
def test_the_module_is_the_function(options, task):
    z, y = batch(task)
    torch.testing.assert_close(MetricLoss(task=task, **options)(z, y), metric_loss(z, y, task=task, **options))


@pytest.mark.parametrize("options", OPTIONS, ids=ids)
def test_copies_pickles_and_checkpoints_give_the_same_loss(options):
    z, y = batch("multiclass")
    loss = MetricLoss(**options)
    loss.temperature = 0.11
    expected = loss(z, y)
    restored = MetricLoss(**options)
    assert "_temperature" in loss.state_dict()
    file = io.BytesIO()
    torch.save(loss.state_dict(), file)
    file.seek(0)
    restored.load_state_dict(torch.load(file, weights_only=True))
    for twin in (restored, copy.deepcopy(loss), pickle.loads(pickle.dumps(loss))):
        assert twin.temperature == 0.11
        assert torch.equal(twin(z, y), expected)
    copied = copy.deepcopy(loss)
    copied.temperature = 0.3
    assert loss.temperature == 0.11


@pytest.mark.parametrize(
    "move", [torch.nn.Module.half, torch.nn.Module.bfloat16, torch.nn.Module.float, torch.nn.Module.double]
)
def test_a_change_of_dtype_keeps_the_temperature_exact(move):
    loss = MetricLoss("f1", temperature=0.123456789)
    assert move(torch.nn.Sequential(loss))[0].temperature == 0.123456789
    z, y = batch("multiclass")
    torch.testing.assert_close(loss(z, y), metric_loss(z, y, "f1", temperature=0.123456789))


def test_repr_shows_what_differs_from_the_defaults():
    assert repr(MetricLoss("f1")) == "MetricLoss('f1')"
    loss = MetricLoss("fbeta", beta=[1.0, 2.0], temperature=0.1, weight=torch.tensor([1.0, 2.0]), task="binary")
    for part in ("'fbeta'", "task='binary'", "beta=[1.0, 2.0]", "weight=[1.0, 2.0]", "temperature=0.1"):
        assert part in repr(loss)
    assert "step" not in repr(loss)
    assert eval(repr(loss)).temperature == 0.1
    assert "recall_of_2" in repr(MetricLoss(recall_of_2))


def recall_of_2(c):
    return c.tp[2] / c.actual[2]


def run(loss, z, y):
    z = z.detach().clone().requires_grad_()
    value = loss(z, y)
    value.backward()
    return value.detach(), z.grad


COMPILED = [("f1", t) for t in TASKS] + [("auroc", "binary"), ("mcc", "multilabel")]
COMPILED += [(m, "multiclass") for m in ("mcc", "gmean", recall_of_2)]
COMPILED += [pytest.param("quadratic_kappa", "multiclass", marks=pytest.mark.slow)]


@torch_own_warnings
@pytest.mark.parametrize(("metric", "task"), COMPILED)
def test_a_compiled_loss_equals_the_eager_one(metric, task):
    torch._dynamo.reset()
    z, y = batch(task)
    loss = MetricLoss(metric, task=task, anchor=1.0, label_smoothing=0.1)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for got, expected in zip(run(compiled, z, y), run(loss, z, y), strict=True):
        torch.testing.assert_close(got, expected)


SHAPES = [("multiclass", (30, 4)), ("multiclass", (9, 120)), ("multiclass", (2, 3, 5, 5)), ("binary", (30,)),
          ("multilabel", (30, 4)), ("multilabel", (2, 3, 50, 50)), ("shares", (30, 4))]  # fmt: skip


@pytest.mark.slow
@torch_own_warnings
@pytest.mark.parametrize(("task", "shape"), SHAPES)
def test_a_compiled_graph_holds_the_fused_loss_as_one_operator(task, shape):
    if not compilation.available():
        pytest.skip("needs numba")
    torch._dynamo.reset()
    generator, graphs = torch.Generator().manual_seed(0), []
    loss = MetricLoss("f1", task="multiclass" if task == "shares" else task, anchor=1.0)

    def backend(graph, example):
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, example)

    compiled = torch.compile(loss, fullgraph=True, dynamic=True, backend=backend)
    for n in (shape[0], shape[0] + 1):  # a batch of another size is the same graph
        z = torch.randn(n, *shape[1:], generator=generator)
        y = torch.randint(0, 2 if task != "multiclass" else shape[1], z.shape, generator=generator)
        y = z.roll(1, 0).softmax(1) if task == "shares" else y[:, 0] if task == "multiclass" else y
        torch.testing.assert_close(run(compiled, z, y), run(loss, z, y), rtol=1e-5, atol=1e-7)
    named = [str(node.target) for node in graphs[-1].graph.nodes if "evalign" in str(node.target)]
    assert named == ["evalign.fused_loss"]
    with torch.no_grad():
        torch.testing.assert_close(compiled(z, y), loss(z, y))


@pytest.mark.slow
@torch_own_warnings
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_inductor_gives_the_eager_loss():
    torch._dynamo.reset()
    z, y = batch("multiclass")
    loss = MetricLoss("accuracy")
    compiled = torch.compile(loss, fullgraph=True, backend="inductor")
    for got, expected in zip(run(compiled, z.float(), y), run(loss, z.float(), y), strict=True):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("task", TASKS)
def test_another_temperature_does_not_recompile(task):
    torch._dynamo.reset()
    z, y = batch(task)
    loss = MetricLoss("f1", task=task)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(loss, fullgraph=True, backend=counter)
    compiled(z, y)
    frames = counter.frame_count
    for temperature in (0.1, 0.05, 0.4):
        loss.temperature = temperature
        torch.testing.assert_close(compiled(z, y), metric_loss(z, y, "f1", task=task, temperature=temperature))
    assert counter.frame_count == frames > 0


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("metric", "task"), [*WITH_AUROC, (recall_of_2, "multiclass")])
def test_vmap_over_trials_with_their_own_temperatures_equals_a_loop(metric, task, backend):
    parts = [batch(task, seed=seed) for seed in range(3)]
    z, y = (torch.stack(x) for x in zip(*parts, strict=True))
    weight = torch.rand(y.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(8))
    temperatures = torch.tensor([0.05, 0.2, 0.4], dtype=torch.float64)
    objective = Objective.of(LossOptions(metric, task=task, anchor=1.0, backend=backend))

    def value_and_gradient(*arguments):
        return torch.func.grad_and_value(objective)(*arguments)

    gradients, values = torch.func.vmap(value_and_gradient)(z, y, weight, temperatures)
    for i, (gradient, value) in enumerate(zip(gradients, values, strict=True)):
        logits = z[i].clone().requires_grad_()
        expected = objective(logits, y[i], weight[i], temperatures[i])
        expected.backward()
        torch.testing.assert_close(value, expected.detach())
        torch.testing.assert_close(gradient, logits.grad)


@pytest.mark.parametrize("name", ["labels", "shares", "weights", "temperature", "offset", "class weights"])
def test_vmap_over_all_but_the_logits_equals_a_loop(name):
    generator = torch.Generator().manual_seed(0)
    z, y = torch.randn(12, 4, generator=generator), torch.arange(12) % 4
    given = {
        "labels": torch.stack([y, y.flip(0)]), "shares": torch.rand(2, 12, 4, generator=generator).softmax(2),
        "weights": torch.rand(2, 12, generator=generator), "temperature": torch.tensor([0.1, 0.3]),
        "offset": torch.randn(2, 4, generator=generator), "class weights": torch.rand(2, 4, generator=generator),
    }[name]  # fmt: skip
    loss = MetricLoss("f1", anchor=1.0, offset=[0.0] * 4, weight=[1.0] * 4)

    def each(value):
        if name in ("labels", "shares"):
            return loss(z, value)
        if name == "weights":
            return loss(z, y, value)
        buffer = {"temperature": "_temperature", "class weights": "weight"}.get(name, name)
        return torch.func.functional_call(loss, {buffer: value}, (z, y))

    expected = torch.stack([each(value) for value in given])
    torch.testing.assert_close(torch.func.vmap(each)(given), expected)


def test_vmap_takes_a_beta_per_trial():
    z, y = batch("multiclass")
    objective = Objective.of(LossOptions("fbeta", beta=1.0, step="sigmoid"))
    betas = torch.tensor([[1.0] * 4, [0.5, 1.0, 2.0, 4.0]], dtype=torch.float64)
    each = partial(objective, z, y, torch.ones(len(y), dtype=torch.float64), 0.2)
    torch.testing.assert_close(torch.func.vmap(each)(betas), torch.stack([each(beta) for beta in betas]))


def test_double_backward_works_with_the_eager_backend():
    z, y = torch.randn(6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(9)), torch.arange(6) % 3
    loss = partial(metric_loss, target=y, metric="f1", backend="eager", step="sigmoid")
    assert torch.autograd.gradgradcheck(loss, z.requires_grad_())


@torch_own_warnings
@pytest.mark.parametrize("metric", ["f1", "auroc", "average_precision"])
@pytest.mark.parametrize("strict", [True, False])
def test_an_exported_loss_takes_batches_of_any_size(strict, metric):
    class Step(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.loss = torch.nn.Linear(4, 3), MetricLoss(metric, anchor=1.0)

        def forward(self, x, y):
            return self.loss(self.layer(x), y)

    module, rows = Step(), torch.export.Dim("rows")
    example = torch.randn(8, 4), torch.arange(8) % 3
    exported = torch.export.export(module, example, dynamic_shapes=({0: rows}, {0: rows}), strict=strict).module()
    for n in (3, 300):
        x, y = torch.randn(n, 4), torch.arange(n) % 3
        torch.testing.assert_close(exported(x, y), module(x, y))


@torch_own_warnings
@pytest.mark.parametrize(
    "options",
    [{}, {"reduction": "none", "metric": "mcc"}, {"anchor": 1.0, "label_smoothing": 0.1, "weight": [1.0, 2.0, 0.5]},
     {"anchor": (0.5, "focal"), "metric": "quadratic_kappa"}],
)  # fmt: skip
def test_an_exported_loss_per_image_takes_any_number_of_images(options):
    class Step(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Conv2d(2, 3, 1)
            self.loss = MetricLoss(**{"metric": "f1", "per_image": True, "ignore_index": 7} | options)

        def forward(self, x, y):
            return self.loss(self.layer(x), y)

    module, images = Step(), torch.export.Dim("images")
    y = torch.randint(0, 3, (9, 4, 5), generator=torch.Generator().manual_seed(0))
    y[:, 1], y[2] = 7, 7  # a row of every image, and an image
    exported = torch.export.export(module, (torch.randn(4, 2, 4, 5), y[:4]), dynamic_shapes=({0: images}, {0: images}))
    for n in (2, 9):
        x = torch.randn(n, 2, 4, 5)
        torch.testing.assert_close(exported.module()(x, y[:n]), module(x, y[:n]))


@pytest.mark.parametrize("move", [lambda m: m.half(), lambda m: m.to_empty(device="cpu"), lambda m: m])
@pytest.mark.parametrize("meta", [False, True])
def test_numbers_of_the_user_survive_a_move_and_the_meta_device(meta, move):
    z, y = batch("multiclass")
    options = {"weight": [0.1, 0.7, 1.3, 2.1], "offset": [0.0, 0.1, 0.3, -0.7], "temperature": 0.12, "anchor": 1.0}
    with torch.device("meta" if meta else "cpu"):
        loss = move(torch.nn.Sequential(MetricLoss("f1", memory="auto", **options)))[0]
    z = z.float()
    torch.testing.assert_close(loss(z, y), metric_loss(z, y, "f1", **options), rtol=1e-6, atol=0)
    assert repr(loss) == repr(MetricLoss("f1", memory="auto", **options))
