"""Layers in room of their own: values and gradients are autograd's, whatever ran in that room before."""

import copy

import pytest
import torch
from torch import Tensor, nn

from evalign._objective import Objective
from evalign.networks import mlp
from evalign.steps import StepChoice
from evalign.training import plain_layers
from evalign.training.batches import Rows
from evalign.training.plain_layers import PlainLayers
from evalign.training.recipes import find_recipe
from evalign.training.stacked import Trial, train_trials
from evalign.training.stacked_networks import StackedNetworks, with_shared_dropout

RATES = (0.5, 0.0, 0.25)


def made() -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    network = with_shared_dropout(mlp(5, 3, (7, 6, 4), 0.3).double(), None)
    return network, {name: p.detach().clone().requires_grad_() for name, p in network.named_parameters()}


def by_autograd(x: Tensor, parameters: dict[str, Tensor], keeps: list[Tensor]) -> Tensor:
    for i, (keep, rate) in enumerate(zip(keeps, RATES, strict=True)):
        z = nn.functional.linear(x, parameters[f"{3 * i}.weight"], parameters[f"{3 * i}.bias"])
        x = z.relu() * keep / (1 - rate)
    return nn.functional.linear(x, parameters["9.weight"], parameters["9.bias"])


@pytest.mark.parametrize("some", [2, 256])  # rows at a time: several pieces, the last one shorter, and one
def test_values_and_gradients_are_autograds(some: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(plain_layers, "SOME", some)
    network, parameters = made()
    layers = PlainLayers.of(network, 11)
    assert layers is not None
    for rows in (11, 4, 11):  # a room that was filled by others, and one that is not filled
        x = torch.randn(rows, 5, dtype=torch.float64)
        keeps = [torch.rand(rows, width) >= rate for width, rate in zip((7, 6, 4), RATES, strict=True)]
        towards = torch.randn(rows, 3, dtype=torch.float64)
        ours = layers.logits(x, parameters, keeps, [1 / (1 - rate) for rate in RATES])
        theirs = by_autograd(x, parameters, keeps)
        torch.testing.assert_close(ours, theirs)
        found = torch.autograd.grad((ours.square() * towards).sum(), list(parameters.values()))
        expected = torch.autograd.grad((theirs.square() * towards).sum(), list(parameters.values()))
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other)
        torch.testing.assert_close(layers.judged(x, parameters).detach(), network.eval()(x).detach())


def test_a_gradient_of_overwritten_outputs_is_refused():
    network, parameters = made()
    layers = PlainLayers.of(network, 2)
    assert layers is not None
    x, keeps = torch.ones(2, 5, dtype=torch.float64), [torch.ones(2, width, dtype=torch.bool) for width in (7, 6, 4)]
    first, second = (layers.logits(x, parameters, keeps, [1.0] * 3).sum() for _ in range(2))
    with pytest.raises(RuntimeError, match="overwritten"):
        first.backward()
    second.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="overwritten"):
        second.backward()


@pytest.mark.parametrize(
    "network",
    [
        nn.Linear(2, 2),
        nn.Sequential(nn.Linear(2, 2)),
        nn.Sequential(nn.Linear(2, 2, bias=False), nn.ReLU(), nn.Dropout(), nn.Linear(2, 2)),
        nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Dropout(), nn.Linear(2, 2)),
        nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)),
    ],
)
def test_other_networks_are_left_to_autograd(network: nn.Module):
    assert PlainLayers.of(with_shared_dropout(network, None), 4) is None


def test_a_stack_trains_alike_with_and_without_them(monkeypatch: pytest.MonkeyPatch):
    torch.manual_seed(1)
    x = torch.randn(700, 5, dtype=torch.float64)
    rows = Rows.of(x, (x[:, 0] + 0.3 * torch.randn(700) > 1).long())
    order = torch.randperm(700)
    trials = [Trial(order[100 * s :], order[: 100 + s], find_recipe("anchored").limited(3), seed=s) for s in range(2)]
    objective = Objective("f1", "multiclass", StepChoice("annealed"), average="binary")

    def trained() -> list[dict[str, Tensor]]:
        results = train_trials(
            lambda: mlp(5, 2, (9, 4), 0.4).double(), rows, trials, objective, lambda p, y, w: p[:, 1].mean(),
            batch_size=350,
        )  # fmt: skip
        return [copy.deepcopy(result.state) for result in results]

    ours, uses = [], []
    of = PlainLayers.of
    monkeypatch.setattr(PlainLayers, "of", classmethod(lambda cls, *given: uses.append(of(*given)) or uses[-1]))
    ours = trained()
    monkeypatch.setattr(PlainLayers, "of", classmethod(lambda cls, *given: None))
    theirs = trained()
    assert uses
    assert uses[0] is not None
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other)


def test_a_step_asks_for_no_tensor_of_a_batchs_size():
    """Beside the table, the room and the weights a step takes a few copies of the weights, however long the batch."""
    rows, width = 4096, 64
    networks = StackedNetworks(
        lambda: mlp(8, 2, (width, width), 0.2), torch.randn(rows, 8), seeds=[0], dropouts=[None],
        batch_lengths=[rows], averages=False,
    )  # fmt: skip
    leaves, index = networks.parameters.leaves(slice(0, 1)), torch.arange(rows)[None]

    def step() -> None:
        loss = networks.logits(slice(0, 1), index, leaves).square().sum()
        networks.parameters.gradient(loss, leaves)

    step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    sizes = [event.self_cpu_memory_usage for event in profile.events()]
    assert 0 < max(sizes) < 4 * rows * width
