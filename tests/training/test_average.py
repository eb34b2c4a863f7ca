"""An average of the weights: held against a slow loop over the weights that training went through."""

import contextlib
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from evalign import EASTClassifier, metrics
from evalign._objective import Objective
from evalign.networks import mlp
from evalign.steps import StepChoice
from evalign.streaming.fit_stream import Stream, fit_stream
from evalign.streaming.source import ParquetRows
from evalign.training.batches import Rows
from evalign.training.evaluation import argmax_score
from evalign.training.in_memory import train, weight_of_newest
from evalign.training.recipes import Recipe, Stage, find_recipe
from streams import people, write

OBJECTIVE = Objective("f1", "multiclass", StepChoice("annealed"))
CE = Stage(
    "ce", metric=False, anchor=1.0, learning_rate=0.05, epochs=5, patience=5, monitor="entropy", average=0.3
)  # fmt: skip
METRIC = replace(CE, name="metric", metric=True, monitor="loss", average=1.0)
BATCHES = 4


def rows(n: int, seed: int) -> Rows:
    generator = torch.Generator().manual_seed(seed)
    y = torch.arange(n) % 3
    return Rows.of(torch.randn(n, 2, generator=generator).double() + torch.eye(3, 2).double()[y], y)


def fresh() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.BatchNorm1d(2), mlp(2, 3, (8,), 0.1)).double()


class Steps:
    """Copies of all parameters before and after every update of any optimiser."""

    def __init__(self) -> None:
        self.before: list[list[np.ndarray]] = []
        self.after: list[list[np.ndarray]] = []

    @contextlib.contextmanager
    def noted(self):
        def note(into, optimiser):
            into.append([p.detach().numpy().copy() for p in optimiser.param_groups[0]["params"]])

        handles = (
            register_optimizer_step_pre_hook(lambda optimiser, *_: note(self.before, optimiser)),
            register_optimizer_step_post_hook(lambda optimiser, *_: note(self.after, optimiser)),
        )
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def slow_average(weights: list[list[np.ndarray]], share: float) -> list[np.ndarray]:
    """The definition, one update and one parameter at a time."""
    average = [np.zeros_like(w) for w in weights[0]]
    for t, now in enumerate(weights, 1):
        look_back = max(1.0, share * t)
        average = [(1 - 1 / look_back) * a + w / look_back for a, w in zip(average, now, strict=True)]
    return average


def entropy_with(network: nn.Module, parameters: list[np.ndarray], valid: Rows) -> float:
    with torch.no_grad():
        for own, value in zip(network.parameters(), parameters, strict=True):
            own.copy_(torch.from_numpy(value))
        return float(nn.functional.cross_entropy(network.eval()(valid.x), valid.y))


@pytest.mark.parametrize("recorded", [False, True])
def test_the_average_is_judged_kept_and_gone_on_from(recorded):
    network, valid, steps, buffers = fresh(), rows(30, 1), Steps(), []
    with steps.noted():
        history = train(
            network, rows(60, 0), valid, Recipe("r", "", (CE, METRIC)), OBJECTIVE, argmax_score(metrics.f1),
            batch_size=15, recorded=recorded,
            on_epoch=lambda _: buffers.append({name: value.clone() for name, value in network.named_buffers()}),
        )  # fmt: skip
    assert len(steps.after) == BATCHES * 10
    judge, kept = fresh(), {}
    for i, epoch in enumerate(history):
        first = 0 if epoch.stage == "ce" else 5 * BATCHES
        average = slow_average(steps.after[first : (i + 1) * BATCHES], 0.3 if epoch.stage == "ce" else 1.0)
        for name, own in judge.named_buffers():  # batch norm's are those that training has
            own.copy_(buffers[i][name])
        assert epoch.entropy == pytest.approx(entropy_with(judge, average, valid), rel=1e-9)
        if epoch.best:
            kept[epoch.stage] = (average, buffers[i])
    for start, value in zip(steps.before[5 * BATCHES], kept["ce"][0], strict=True):
        np.testing.assert_allclose(start, value, rtol=1e-9, atol=1e-12)
    average, own = kept["metric"]
    for parameter, value in zip(network.parameters(), average, strict=True):
        np.testing.assert_allclose(parameter.detach().numpy(), value, rtol=1e-9, atol=1e-12)
    assert all(torch.equal(value, own[name]) for name, value in network.named_buffers())


def test_training_itself_does_not_feel_it():
    """In one stage the weights that the updates go through are the same with an average and without."""
    seen = []
    for share in (0.0, 0.5):
        steps = Steps()
        with steps.noted():
            train(
                fresh(), rows(60, 0), rows(30, 1), Recipe("r", "", (replace(CE, average=share),)), OBJECTIVE,
                argmax_score(metrics.f1), batch_size=15,
            )  # fmt: skip
        seen.append(steps.after)
    assert all(np.array_equal(a, b) for one, other in zip(*seen, strict=True) for a, b in zip(one, other, strict=True))


@given(st.lists(st.floats(-10, 10), min_size=1, max_size=60))
def test_a_share_of_one_is_the_mean_and_of_none_the_last(values):
    for share, expected in ((1.0, np.mean(values)), (0.0, values[-1])):
        average = torch.tensor(99.0, dtype=torch.float64)
        for t, value in enumerate(values, 1):
            average.lerp_(
                torch.tensor(value, dtype=torch.float64),
                weight_of_newest(torch.tensor(t, dtype=torch.float64), share),
            )
        assert float(average) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("share", [-0.1, 1.5])
def test_a_share_beyond_the_whole_is_refused(share):
    with pytest.raises(ValueError, match=r"average must lie in \[0, 1\]"):
        replace(CE, average=share)


def test_a_stream_is_averaged_too(tmp_path):
    """One epoch is averaged: what is kept is the mean of its updates."""
    recipe = find_recipe("cross_entropy")
    recipe = replace(recipe, stages=(replace(recipe.stages[0], average=1.0),))
    model = EASTClassifier("f1", hidden=(8,), epochs=1, recipe=recipe, random_state=0, device="cpu")
    stream, steps = (
        Stream.open(ParquetRows(write(tmp_path / "data", people(2000), row_group=500), "sick"), seed=0),
        Steps(),
    )
    with steps.noted():
        fit_stream(model, stream)
    assert len(steps.after) > 2
    for i, parameter in enumerate(model.network_.parameters()):
        mean = np.mean([weights[i] for weights in steps.after], axis=0)
        np.testing.assert_allclose(parameter.detach().numpy(), mean, rtol=1e-4, atol=1e-6)
