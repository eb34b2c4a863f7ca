"""Exact accumulation: micro-batches of any sizes give the gradient, the loss and the memory of the whole batch."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from evalign import MetricLoss
from evalign.accumulation import Accumulation, accumulate
from test_losses import TASKS

ROWS, FEATURES, CLASSES = 24, 5, 3
OPTIONS = [
    {"metric": "f1"},
    {"metric": "mcc", "anchor": 1.0, "label_smoothing": 0.1},
    {"metric": "auroc", "threshold": [0.25, 0.5, 0.75]},
    {"metric": "fbeta", "beta": 2.0, "memory": "auto"},
    {"metric": lambda c: (c.tp / c.actual).mean(), "anchor": 0.5},
]


def problem(task, seed=0):
    torch.manual_seed(seed)
    x = torch.randn(ROWS, FEATURES, dtype=torch.float64)
    y = torch.randint(2, (ROWS, CLASSES)) if task == "multilabel" else torch.arange(ROWS) % CLASSES
    network = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, 1 if task == "binary" else CLASSES))
    return network.double(), x, (y == 0).long() if task == "binary" else y


def gradient(network):
    return torch.cat([p.grad.reshape(-1) for p in network.parameters()])


def in_parts(sizes, *tensors):
    return list(zip(*(t.split(sizes) for t in tensors), strict=True))


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: str(o["metric"])[:10])
def test_parts_have_the_gradient_of_the_whole(options, task):
    network, x, y = problem(task)
    weight = torch.rand(ROWS, dtype=torch.float64)
    loss = MetricLoss(task=task, **options)
    twin, whole = copy.deepcopy(network), copy.deepcopy(loss)
    for _ in range(2):
        network.zero_grad()
        twin.zero_grad()
        value = accumulate(loss, network, in_parts([10, 1, 0, 13], x, y, weight))
        expected = whole(twin(x), y, weight)
        expected.backward()
        torch.testing.assert_close(value, expected.detach())
        torch.testing.assert_close(gradient(network), gradient(twin), rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(loss.state_dict(), whole.state_dict())


@settings(max_examples=25)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=5), st.sampled_from(["f1", "mcc", "gmean", "quadratic_kappa"]))
def test_any_sizes_of_parts_do(sizes, metric):
    network, x, y = problem("multiclass")
    sizes = [*sizes, max(0, ROWS - sum(sizes))]
    x, y = x.repeat(2, 1)[: sum(sizes)], y.repeat(2)[: sum(sizes)]
    loss = MetricLoss(metric, anchor=1.0)
    accumulate(loss, network, in_parts(sizes, x, y))
    expected = torch.autograd.grad(loss(network(x), y), list(network.parameters()))
    torch.testing.assert_close(gradient(network), torch.cat([g.reshape(-1) for g in expected]), rtol=1e-9, atol=1e-12)


def test_dropout_is_the_same_in_both_passes_and_goes_on_after_them():
    network, x, y = problem("multiclass")
    network = nn.Sequential(nn.Dropout(0.5), network)
    parts, loss = in_parts([10, 14], x, y), MetricLoss("f1")
    torch.manual_seed(3)
    loss(torch.cat([network(part) for part, _ in parts]), y).backward()
    expected, next_number = gradient(network), torch.rand(())
    network.zero_grad()
    torch.manual_seed(3)
    accumulate(loss, network, parts)
    torch.testing.assert_close(gradient(network), expected)
    assert torch.rand(()) == next_number


def test_inputs_may_be_dictionaries_and_backward_may_scale():
    network, x, y = problem("multiclass")
    loss, seen = MetricLoss("f1"), []

    def scaled(value):
        seen.append(value.detach())
        (8 * value).backward()

    batches = [({"pixels": part}, labels) for part, labels in in_parts([10, 14], x, y)]
    value = accumulate(loss, lambda batch: network(batch["pixels"]), batches, backward=scaled)
    expected = torch.autograd.grad(loss(network(x), y), network[0].weight)[0]
    torch.testing.assert_close(network[0].weight.grad, 8 * expected)
    torch.testing.assert_close(sum(seen), value)


def test_bfloat16_parts_are_finite():
    network, x, y = problem("multiclass")
    network = network.bfloat16()
    assert accumulate(MetricLoss("f1"), network, in_parts([10, 14], x.bfloat16(), y)).isfinite()
    assert gradient(network).isfinite().all()


def test_the_order_of_the_passes_is_told():
    network, x, y = problem("multiclass")
    parts = Accumulation(MetricLoss("f1"))
    with pytest.raises(RuntimeError, match="no part was added"):
        parts.loss(network(x), y)
    parts.add(network(x), y)
    parts.loss(network(x), y)
    with pytest.raises(RuntimeError, match="use a new Accumulation"):
        parts.add(network(x), y)
