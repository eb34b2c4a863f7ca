"""Batched perceptrons in buffers: values and gradients are autograd's, whatever the buffers held before."""

import copy

import pytest
import torch
from torch import Tensor, nn

from evalign.networks.mlp import mlp
from evalign.objective import Objective
from evalign.steps import StepChoice
from evalign.training.batches import Rows
from evalign.training.recipes import find_recipe
from evalign.training.stacked import Trial, cross_entropy_and_slope, train_trials
from evalign.training.stacked_networks import BatchedMLP, StackedNetworks, with_shared_dropout

RATES = (0.5, 0.0, 0.25)
NETWORKS = 3


def stacked_parameters() -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    network = with_shared_dropout(mlp(5, 3, (7, 6, 4), 0.3).double(), None)
    shapes = {name: (NETWORKS, *p.shape) for name, p in network.named_parameters()}
    return network, {name: torch.randn(shape, dtype=torch.float64).requires_grad_() for name, shape in shapes.items()}


def by_autograd(x: Tensor, parameters: dict[str, Tensor], masks: list[Tensor]) -> Tensor:
    """The definition, one network after the other."""
    found = []
    for s in range(len(x)):
        a = x[s]
        for i, mask in enumerate(masks):
            z = nn.functional.linear(a, parameters[f"{3 * i}.weight"][s], parameters[f"{3 * i}.bias"][s])
            a = z.relu() * mask[s]
        found.append(nn.functional.linear(a, parameters["9.weight"][s], parameters["9.bias"][s]))
    return torch.stack(found)


def test_values_and_gradients_are_autograds():
    network, parameters = stacked_parameters()
    layers = BatchedMLP.of(network, NETWORKS, 11)
    assert layers is not None
    for count, rows in ((3, 11), (2, 4), (3, 11)):  # buffers filled by others, and buffers that are not filled
        own = {name: p[:count] for name, p in parameters.items()}
        x = torch.randn(count, rows, 5, dtype=torch.float64)
        scales = [torch.full((count, 1, 1), 1 / (1 - rate), dtype=torch.float64) for rate in RATES]
        masks = [
            (torch.rand(count, rows, width) >= rate).double() * scale
            for width, rate, scale in zip((7, 6, 4), RATES, scales, strict=True)
        ]
        slope = torch.randn(count, rows, 3, dtype=torch.float64)
        theirs = by_autograd(x, own, masks)
        expected = torch.autograd.grad((theirs * slope).sum(), list(own.values()))
        torch.testing.assert_close(layers.forward(x, own, masks), theirs.detach())
        found = {name: torch.empty_like(p) for name, p in own.items()}
        layers.backward(slope, own, scales, found)
        for one, other in zip(found.values(), expected, strict=True):
            torch.testing.assert_close(one, other)
        ones = [torch.ones(count, rows, width, dtype=torch.float64) for width in (7, 6, 4)]
        torch.testing.assert_close(layers.forward(x, own), by_autograd(x, own, ones).detach())


def test_the_backward_pass_agrees_with_finite_differences():
    network, parameters = stacked_parameters()
    layers = BatchedMLP.of(network, NETWORKS, 4)
    assert layers is not None
    x = torch.randn(NETWORKS, 4, 5, dtype=torch.float64)
    ones = [torch.ones(NETWORKS, 1, 1, dtype=torch.float64)] * 3

    class Loss(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *values):  # type: ignore[no-untyped-def]
            ctx.own = dict(zip(parameters, (value.detach() for value in values), strict=True))
            return layers.forward(x, ctx.own).square().sum()

        @staticmethod
        def backward(ctx, slope):  # type: ignore[no-untyped-def]
            found = {name: torch.empty_like(p) for name, p in ctx.own.items()}
            layers.backward(2 * slope * layers.forward(x, ctx.own), ctx.own, ones, found)
            return tuple(found.values())

    assert torch.autograd.gradcheck(Loss.apply, tuple(parameters.values()))


def test_a_second_backward_pass_is_refused():
    network, parameters = stacked_parameters()
    layers = BatchedMLP.of(network, NETWORKS, 2)
    assert layers is not None
    own = {name: p.detach() for name, p in parameters.items()}
    ones = [torch.ones(NETWORKS, 1, 1, dtype=torch.float64)] * 3
    found = {name: torch.empty_like(p) for name, p in own.items()}
    logits = layers.forward(torch.ones(NETWORKS, 2, 5, dtype=torch.float64), own)
    layers.backward(torch.ones_like(logits), own, ones, found)
    with pytest.raises(RuntimeError, match="overwrote"):
        layers.backward(torch.ones_like(logits), own, ones, found)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_batched_cross_entropy_is_torchs_of_each_network(dtype: torch.dtype):
    torch.manual_seed(2)
    z, y = torch.randn(3, 20, 4, dtype=dtype).requires_grad_(), torch.randint(4, (3, 20))
    weight = torch.randint(0, 3, (3, 20)).to(dtype)
    with torch.no_grad():
        z[weight == 0] = float("inf")
    loss, slope = cross_entropy_and_slope(z.detach().nan_to_num(posinf=50.0), y, weight)
    for s in range(3):
        own = weight[s] > 0
        kept = z[s][own].detach().requires_grad_()
        each = nn.functional.cross_entropy(kept, y[s][own], reduction="none")
        expected = (each * weight[s][own]).sum() / weight[s].sum()
        torch.testing.assert_close(loss[s], expected.detach())
        torch.testing.assert_close(slope[s][own], torch.autograd.grad(expected, kept)[0])
        assert not slope[s][~own].any()
    assert cross_entropy_and_slope(z.detach(), y, torch.zeros_like(weight))[0].tolist() == [0.0] * 3


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
    assert BatchedMLP.of(with_shared_dropout(network, None), 1, 4) is None


@pytest.mark.parametrize("front", [False, True])
def test_a_stack_trains_alike_with_and_without_them(front: bool, monkeypatch: pytest.MonkeyPatch):
    torch.manual_seed(1)
    x = torch.randn(700, 5, dtype=torch.float64)
    rows = Rows.of(x, (x[:, 0] + 0.3 * torch.randn(700) > 1).long())
    order = torch.randperm(700)
    trials = [Trial(order[100 * s :], order[: 100 + s], find_recipe("anchored").limited(3), seed=s) for s in range(2)]
    objective = Objective("f1", "multiclass", StepChoice("annealed"), average="binary")

    def network() -> nn.Module:
        body = mlp(6 if front else 5, 2, (9, 4), 0.4)
        return (nn.Sequential(nn.Sequential(nn.Linear(5, 6), nn.Tanh()), body) if front else body).double()

    def trained() -> list[dict[str, Tensor]]:
        results = train_trials(
            network, rows, trials, objective, lambda p, y, w: p[:, 1].mean(),
            batch_size=350,
        )  # fmt: skip
        return [copy.deepcopy(result.state) for result in results]

    ours, uses = [], []
    of = BatchedMLP.of
    monkeypatch.setattr(
        BatchedMLP, "of", classmethod(lambda cls, *given, **options: uses.append(of(*given, **options)) or uses[-1])
    )
    ours = trained()
    monkeypatch.setattr(BatchedMLP, "of", classmethod(lambda cls, *given, **options: None))
    theirs = trained()
    assert uses
    assert uses[0] is not None
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other)


def test_a_step_asks_for_no_tensor_of_a_batchs_size():
    """Besides table, buffers and weights, a step takes a few copies of the weights, whatever the batch size."""
    rows, width = 4096, 64
    networks = StackedNetworks(
        lambda: mlp(8, 2, (width, width), 0.2), torch.randn(rows, 8), seeds=[0], dropouts=[None],
        batch_lengths=[rows],
    )  # fmt: skip
    index = torch.arange(rows)[None]

    def step() -> None:
        logits, gradient = networks.training_logits(slice(0, 1), index)
        gradient(logits)

    step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    sizes = [event.self_cpu_memory_usage for event in profile.events()]
    assert 0 < max(sizes) < 4 * rows * width
