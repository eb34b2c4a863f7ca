"""Ranks: 2 and 4 real gloo processes give the gradient, the loss and the memory of one process with all rows."""

import os
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from evalign import MetricLoss, metric_loss
from evalign.accumulation import accumulate
from evalign.distributed import Sync, resolve
from ranks import on_ranks

pytestmark = pytest.mark.slow

ROWS, CLASSES, FEATURES = 24, 4, 5
CASES = {
    "f1": {"metric": "f1"},
    "f1 and cross-entropy": {"metric": "f1", "anchor": 1.0},
    "mcc": {"metric": "mcc", "weight": [1.0, 2.0, 0.5, 3.0]},
    "binary": {"metric": "f1", "task": "binary", "anchor": 0.5, "label_smoothing": 0.1},
    "multilabel": {"metric": "jaccard", "task": "multilabel", "anchor": 0.5},
    "auroc": {"metric": "auroc", "task": "binary"},
    "kappa": {"metric": "quadratic_kappa"},
}
SHARDS = {
    "equal": {2: [12, 12], 4: [6, 6, 6, 6]},
    "unequal": {2: [17, 7], 4: [11, 2, 1, 10]},
    "empty": {2: [0, 24], 4: [9, 0, 15, 0]},
}
BATCHES = 3
KINDS = ("ddp", "summed", "remembered", "accumulated", "fsdp", "function", "compiled")
# "compiled" is "remembered" in float32, where a CPU counts, sums over ranks, remembers and divides in one node.
COMPARED = dict.fromkeys(KINDS, ("mcc", "multilabel")) | {
    "ddp": tuple(CASES),
    "compiled": ("f1 and cross-entropy", "binary"),
}


def data(task, index):
    generator = torch.Generator().manual_seed(index)
    x = torch.randn(ROWS, FEATURES, dtype=torch.float64, generator=generator)
    if task == "multilabel":
        return x, torch.randint(2, (ROWS, CLASSES), generator=generator)
    y = torch.randint(6, (ROWS,), generator=generator).clamp(max=CLASSES - 1)  # skewed towards the last
    return x, (y == 0).long() if task == "binary" else y


def network(task):
    torch.manual_seed(0)
    outputs = 1 if task == "binary" else CLASSES
    return nn.Sequential(nn.Linear(FEATURES, 6), nn.Tanh(), nn.Linear(6, outputs)).double()


def gradients(model):
    grads = [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in model.parameters()]
    return torch.cat([g.reshape(-1) for g in grads])


def one_step(kind, options, parts):
    """Values, gradient and memory of one rank (or of a single process) after BATCHES batches without an update."""
    task = options.get("task", "multiclass")
    model = network(task)
    sync = Sync(gradients="summed") if kind == "summed" else "auto"
    loss = MetricLoss(**options, sync=sync, memory=0.5 if kind in ("remembered", "accumulated", "compiled") else None)
    spread = dist.is_initialized()
    if kind == "compiled":
        model, parts = model.float(), [(x.float(), y) for x, y in parts]
    forward = model
    if spread and kind == "fsdp":
        forward = fully_shard(model)
    elif spread and kind != "summed":
        forward = DistributedDataParallel(model)
    values = []
    for x, y in parts:
        model.zero_grad()
        if kind == "accumulated":
            values.append(accumulate(loss, forward, [(x[0::3], y[0::3]), (x[1::3], y[1::3]), (x[2::3], y[2::3])]))
        else:
            value = metric_loss(forward(x), y, **options) if kind == "function" else loss(forward(x), y)
            value.backward()
            values.append(value.detach())
    if spread and kind == "summed":
        for p in model.parameters():
            dist.all_reduce(p.grad)
    return {"values": torch.stack(values), "gradient": gradients(model), "state": loss.state_dict()}


def all_cases(rank, ranks):
    results = {}
    for kind in KINDS:
        for shard, sizes in SHARDS.items():
            for name, options in CASES.items():
                if name not in COMPARED[kind]:
                    continue
                task = options.get("task", "multiclass")
                parts = [tuple(t.split(sizes[ranks])[rank] for t in data(task, i)) for i in range(BATCHES)]
                results[kind, shard, name] = one_step(kind, options, parts)
    return results


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return {ranks: on_ranks(all_cases, ranks, tmp_path_factory.mktemp(f"ranks{ranks}")) for ranks in (2, 4)}


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("shard", SHARDS)
@pytest.mark.parametrize("kind", KINDS)
def test_ranks_have_the_gradient_of_a_single_process(results, kind, shard, ranks):
    compared = 0
    for name, options in CASES.items():
        if (kind, shard, name) not in results[ranks][0]:
            continue
        whole = [data(options.get("task", "multiclass"), i) for i in range(BATCHES)]
        expected = one_step("remembered" if kind == "compiled" else kind, options, whole)
        close = {"rtol": 1e-5, "atol": 1e-6} if kind == "compiled" else {"rtol": 1e-9, "atol": 1e-12}
        for result in results[ranks]:
            got = result[kind, shard, name]
            torch.testing.assert_close(got["values"].double(), expected["values"], **close)
            torch.testing.assert_close(got["gradient"].double(), expected["gradient"], **close)
            torch.testing.assert_close(got["state"], expected["state"], **close)
        compared += 1
    assert compared >= 2


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_memory_is_the_same_on_all_ranks_to_the_last_bit(results, ranks):
    kinds = ("remembered", "compiled")
    states = [{k: v["state"] for k, v in result.items() if k[0] in kinds} for result in results[ranks]]
    assert len(states[0]) == 4 * len(SHARDS)
    for state in states[1:]:
        torch.testing.assert_close(state, states[0], rtol=0, atol=0)


def special_cases(rank, ranks):
    """What needs ranks, but no network."""
    x, y = data("multiclass", 0)
    z = network("multiclass")(x).detach().split([17, 7])[rank].requires_grad_()
    y = y.split([17, 7])[rank]
    loss = MetricLoss("f1", memory="auto")
    found = {"alone": MetricLoss("f1", sync=False)(z, y).detach(), "trained": loss(z, y).detach()}
    with torch.no_grad():
        found["validated"] = loss(z, y)
        found["validated together"] = MetricLoss("f1", sync=True)(z, y)
        found["function"] = metric_loss(z, y, "f1")
    found["evaluated"] = loss.eval()(z, y).detach()
    group = dist.new_group([0])  # every rank takes part in making a group
    if rank == 0:
        found["group of one"] = MetricLoss("f1", sync=Sync(group))(z, y).detach()
    compiled = torch.compile(MetricLoss("f1", anchor=1.0), fullgraph=True, backend="aot_eager")
    for name, each in (("compiled", compiled), ("eager", MetricLoss("f1", anchor=1.0))):
        value = each(z, y)
        (gradient,) = torch.autograd.grad(value, z)
        found[name], found[f"{name} gradient"] = value.detach(), gradient
    return found


@pytest.fixture(scope="module")
def special(tmp_path_factory):
    return on_ranks(special_cases, 2, tmp_path_factory.mktemp("special"))


def test_only_training_sums_over_ranks_unless_told_to_always(special):
    x, y = data("multiclass", 0)
    whole = MetricLoss("f1")(network("multiclass")(x), y).detach()
    for found in special:
        for name in ("trained", "validated together"):
            torch.testing.assert_close(found[name], whole)
        for name in ("validated", "function", "evaluated"):
            assert torch.equal(found[name], found["alone"])
    assert special[0]["alone"] != special[1]["alone"]
    assert torch.equal(special[0]["group of one"], special[0]["alone"])


def test_a_compiled_loss_sums_over_ranks(special):
    for found in special:
        torch.testing.assert_close(found["compiled"], found["eager"])
        torch.testing.assert_close(found["compiled gradient"], found["eager gradient"])


def one_dies(rank, ranks):
    x, y = data("multiclass", 0)
    z, loss = network("multiclass")(x), MetricLoss("f1")
    loss(z, y)
    if rank == 1:
        os._exit(0)
    started = time.monotonic()
    try:
        loss(z, y)
    except RuntimeError as error:
        return str(error), time.monotonic() - started
    return "no error", 0.0


def test_a_rank_that_dies_gives_an_error_not_a_hang(tmp_path):
    ((message, seconds),) = on_ranks(one_dies, 2, tmp_path, returning=1)
    assert "rank 0 could not sum its counts with the other ranks: one has ended" in message
    assert seconds < 60  # half the timeout of the process group


def test_eight_shards_of_a_skewed_batch_have_the_direction_of_the_whole():
    generator = torch.Generator().manual_seed(0)
    y = torch.multinomial(0.6 ** torch.arange(10.0), 256, replacement=True, generator=generator)
    z = torch.randn(256, 10, dtype=torch.float64, generator=generator) + 2 * nn.functional.one_hot(y, 10)
    x = torch.randn(256, 16, dtype=torch.float64, generator=generator)
    weights = torch.zeros(16, 10, dtype=torch.float64, requires_grad=True)
    loss = MetricLoss("f1")
    whole = torch.autograd.grad(loss(z + x @ weights, y), weights)[0].reshape(-1)
    shards = [slice(i, None, 8) for i in range(8)]
    apart = sum(torch.autograd.grad(loss((z + x @ weights)[i], y[i]), weights)[0] for i in shards).reshape(-1)
    model = nn.Linear(16, 10, bias=False).double()
    nn.init.zeros_(model.weight)
    accumulate(loss, lambda part: part[0] + model(part[1]), [((z[i], x[i]), y[i]) for i in shards])
    together = model.weight.grad.T.reshape(-1)
    assert torch.cosine_similarity(whole, together, dim=0).item() == pytest.approx(1.0, abs=1e-12)
    assert torch.cosine_similarity(whole, apart, dim=0) < 0.99  # what losses do that do not share counts


def test_wrong_options_are_told_at_once():
    with pytest.raises(ValueError, match="sync must be one of auto, got 'always'"):
        MetricLoss("f1", sync="always")
    with pytest.raises(ValueError, match="gradients must be one of averaged, summed"):
        Sync(gradients="added")
    loss = MetricLoss("f1", sync=True)
    with pytest.raises(RuntimeError, match="sync=True needs a process group, got none"):
        loss(torch.zeros(3, 3, requires_grad=True), torch.arange(3))
    assert resolve(Sync(), training=True) is None


def joined(rank, ranks, steps_before):
    model, loss = DistributedDataParallel(nn.Linear(FEATURES, CLASSES)), MetricLoss("f1")

    def step():
        loss(model(torch.randn(ROWS, FEATURES)), torch.arange(ROWS) % CLASSES).backward()

    for _ in range(steps_before):
        step()
    try:
        with model.join():
            for _ in range(1 + rank):
                step()
    except RuntimeError as error:
        return str(error)


@pytest.mark.parametrize("steps_before", [0, 3])
def test_a_join_of_ranks_with_different_numbers_of_batches_is_refused(tmp_path, steps_before):
    for message in on_ranks(joined, 2, tmp_path, steps_before):
        assert "inside DistributedDataParallel.join()" in message
