"""Stacked trials equal trials trained one by one."""

import gc
import weakref
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import nn

from evalign import metrics
from evalign.networks.mlp import mlp
from evalign.objective import Objective
from evalign.steps import StepChoice
from evalign.training.batches import Batches, Rows, argmax_score
from evalign.training.in_memory import train
from evalign.training.loop import Controller
from evalign.training.recipes import Recipe, Stage
from evalign.training.stacked import Stack, Trial, train_trials
from evalign_papers.networks import PairNetwork

OBJECTIVE = Objective("mcc", "multiclass", StepChoice("annealed"))
SCORE = argmax_score(metrics.mcc)


def table(n: int = 300) -> Rows:
    generator = torch.Generator().manual_seed(0)
    y = torch.randint(0, 3, (n,), generator=generator)
    x = torch.randn(n, 4, generator=generator, dtype=torch.float64) + torch.eye(3, 4, dtype=torch.float64)[y]
    return Rows(x, y, torch.rand(n, generator=generator, dtype=torch.float64) + 0.5)


def trials() -> list[Trial]:
    """Three trials that share nothing: seed, rows (also their number), rates, cooling, stopping."""
    made = []
    for s, (n, patience, rate) in enumerate([(200, 2, 0.5), (200, 1, 0.8), (193, 3, 0.7)]):
        order = torch.randperm(300, generator=torch.Generator().manual_seed(s))
        stages = (
            Stage(
                "ce", metric=False, anchor=1.0, learning_rate=0.01 * (1 + s), epochs=4 + s, patience=2,
                monitor="entropy"
            ),
            Stage(
                "metric", metric=True, anchor=0.5 * s, learning_rate=0.01, epochs=9, patience=patience, rate=rate,
                max_stale=2, monitor="loss", weight_decay=0.1 * s, decay="cosine" if s == 1 else "none",
            ),
        )  # fmt: skip
        made.append(Trial(order[:n], order[n : n + 60], Recipe(f"r{s}", "", stages), seed=s))
    return made


def network(dropout: float) -> nn.Module:
    return mlp(4, 3, (8, 6), dropout).double()


def assert_same(state, history, result) -> None:
    assert len(history) == len(result.history)
    for ours, theirs in zip(history, result.history, strict=True):
        assert ours.stage == theirs.stage
        assert ours.best == theirs.best
        assert (ours.temperature, ours.loss, ours.score) == pytest.approx(
            (theirs.temperature, theirs.loss, theirs.score)
        )
    assert set(state) == set(result.state)
    for name, value in state.items():
        torch.testing.assert_close(result.state[name], value, rtol=1e-9, atol=1e-9)


def test_stacked_equals_the_plain_loop_one_by_one():
    rows, made = table(), trials()
    results = train_trials(lambda: network(0.0), rows, made, OBJECTIVE, SCORE, batch_size=40)
    for trial, result in zip(made, results, strict=True):
        torch.manual_seed(trial.seed)
        alone = network(0.0)
        history = train(
            alone, rows[trial.train], rows[trial.valid], trial.recipe, OBJECTIVE, SCORE, batch_size=40, seed=trial.seed,
        )  # fmt: skip
        assert_same(alone.state_dict(), history, result)


def test_with_dropout_a_trial_does_not_feel_its_neighbours():
    rows, all_trials = table(), [replace(trial, dropout=0.1 * (1 + s)) for s, trial in enumerate(trials())]
    results = train_trials(lambda: network(0.3), rows, all_trials, OBJECTIVE, SCORE, batch_size=40)
    for trial, result in zip(all_trials, results, strict=True):
        alone = train_trials(lambda: network(0.3), rows, [trial], OBJECTIVE, SCORE, batch_size=40)[0]
        assert_same(alone.state, alone.history, result)


def test_dropout_really_drops():
    rows = table()
    plain, dropped = (
        train_trials(lambda: network(0.0), rows, trials()[:1], OBJECTIVE, SCORE, batch_size=40)[0],
        train_trials(lambda: network(0.5), rows, trials()[:1], OBJECTIVE, SCORE, batch_size=40)[0],
    )
    assert dropped.history[0].train_loss > plain.history[0].train_loss
    assert not torch.allclose(plain.state["0.weight"], dropped.state["0.weight"])


def test_trial_weights_load_into_the_network_they_came_from():
    rows = table()
    result = train_trials(lambda: network(0.3), rows, trials()[:1], OBJECTIVE, SCORE, batch_size=40)[0]
    fresh = network(0.3)
    fresh.load_state_dict(result.state)
    valid = rows[trials()[0].valid]
    fresh.eval()
    kept = [epoch for epoch in result.history if epoch.best][-1]
    assert float(SCORE(fresh(valid.x).softmax(1), valid.y, valid.weight)) == pytest.approx(kept.score)


def test_callback_gets_every_epoch_of_every_trial():
    seen: list[tuple[int, int]] = []
    results = train_trials(
        lambda: network(0.0), table(), trials(), OBJECTIVE, SCORE, batch_size=40,
        on_epoch=lambda s, epoch: seen.append((s, epoch.epoch)),
    )  # fmt: skip
    assert sorted(seen) == [(s, e + 1) for s, result in enumerate(results) for e in range(len(result.history))]


def test_no_trial_or_two_steps_are_refused():
    with pytest.raises(ValueError, match="must not be empty"):
        train_trials(lambda: network(0.0), table(), [], OBJECTIVE, SCORE, batch_size=40)
    trial = trials()[0]
    fewer = replace(trial, train=trial.train[:40])
    with pytest.raises(ValueError, match="the same number of batches"):
        train_trials(lambda: network(0.0), table(), [trial, fewer], OBJECTIVE, SCORE, batch_size=40)
    linear = replace(trial.recipe, stages=tuple(replace(stage, step="linear") for stage in trial.recipe.stages))
    with pytest.raises(ValueError, match="must share one step"):
        train_trials(
            lambda: network(0.0), table(), [trial, replace(trial, recipe=linear)], OBJECTIVE, SCORE, batch_size=40
        )


def binary_trial(epochs: int = 3) -> Trial:
    stage = Stage("ce", metric=False, anchor=1.0, learning_rate=0.01, epochs=epochs, patience=99, monitor="entropy")
    return Trial(torch.arange(200), torch.arange(200, 260), Recipe("r", "", (stage,)), seed=5)


def test_one_output_is_trained_as_torch_trains_it():
    """The stacked step against torch's own AdamW and binary cross-entropy, on the same batches."""
    rows = table()
    rows = replace(rows, y=(rows.y > 0).long())
    make = lambda: mlp(4, 1, (8,), 0.0).double()  # noqa: E731
    stack = Stack(make, rows, [binary_trial()], OBJECTIVE, argmax_score(metrics.accuracy), batch_size=40, task="binary")
    torch.manual_seed(5)
    alone = make()
    optimiser = torch.optim.AdamW(alone.parameters(), lr=0.01, weight_decay=1e-2)
    batches = Batches(200, 40, seed=5)
    for _ in range(3):
        (values,) = stack.epoch(stack.runs)
        stack.runs[0].record(values, 0.0)
        for index in batches.epoch():
            loss = (
                nn.functional.binary_cross_entropy_with_logits(
                    alone(rows.x[index]).squeeze(1), rows.y[index].double(), rows.weight[index], reduction="sum"
                )
                / rows.weight[index].sum()
            )
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
        for name, value in alone.named_parameters():
            torch.testing.assert_close(stack.networks.parameters.views[name][0], value, rtol=1e-9, atol=1e-9)
        p = torch.sigmoid(alone(rows.x[200:260])).squeeze(1) > 0.5
        right = (p == (rows.y[200:260] == 1)).double()
        weight = rows.weight[200:260]
        assert values.score == pytest.approx(float((right * weight).sum() / weight.sum()))


@pytest.mark.parametrize("form", ["geometric", "linear", "cosine"])
def test_cooling_goes_from_the_start_to_the_end_and_only_down(form):
    stage = Stage("m", True, 1.0, 1e-3, epochs=9, patience=9, temperature=0.2, cool_to=0.05, cooling=form)
    controller, seen = Controller(stage), []
    for _ in range(9):
        seen.append(controller.temperature)
        controller.step(loss=1.0, entropy=1.0, score=0.0)
    assert (seen[0], seen[-1]) == pytest.approx((0.2, 0.05))
    assert all(a > b for a, b in pairwise(seen))
    middle = {"geometric": (0.2 * 0.05) ** 0.5, "linear": 0.125, "cosine": 0.125}[form]
    assert seen[4] == pytest.approx(middle)


def frames(n: int = 60) -> Rows:
    """Rows with three labels each, as the pairs of a graph."""
    generator = torch.Generator().manual_seed(0)
    y = torch.randint(0, 2, (n, 3), generator=generator)
    x = torch.randn(n, 9, generator=generator, dtype=torch.float64)
    x[:, 6:] += y
    return Rows(x, y, torch.rand(n, generator=generator, dtype=torch.float64) + 0.5)


def pairs() -> nn.Module:
    return PairNetwork(3, 2, 1, hidden=4, rounds=1).double()


def test_graphs_stacked_are_graphs_one_by_one():
    rows, objective = frames(), Objective("f1", "binary", StepChoice("linear"), average="binary")
    score = argmax_score(metrics.resolve("f1", average="binary"))

    made = []
    for s in range(3):
        order = torch.randperm(60, generator=torch.Generator().manual_seed(s))
        stage = Stage("m", metric=True, anchor=0.3 * s, learning_rate=0.02, epochs=4, patience=2, step="linear")
        made.append(Trial(order[:40], order[40:50], Recipe("r", "", (stage,)), seed=s))
    results = train_trials(pairs, rows, made, objective, score, batch_size=13, task="binary")
    for trial, result in zip(made, results, strict=True):
        torch.manual_seed(trial.seed)
        alone = pairs()
        history = train(
            alone, rows[trial.train], rows[trial.valid], trial.recipe, objective, score, batch_size=13, seed=trial.seed
        )
        assert_same(alone.state_dict(), history, result)


def test_a_step_that_is_a_function_is_not_replaced_by_a_stages():
    rows, own = table(), Objective("f1", "multiclass", StepChoice(lambda p, threshold: p))
    results = [
        train_trials(lambda: network(0.0), rows, trials()[:1], objective, SCORE, batch_size=40)[0].history[-1].loss
        for objective in (own, replace(own, step=StepChoice("annealed")))
    ]
    assert results[0] != pytest.approx(results[1], rel=1e-3)


def test_class_offsets_are_not_stacked():
    trial = trials()[0]
    stages = tuple(replace(stage, offset=1.0) for stage in trial.recipe.stages)
    with pytest.raises(ValueError, match="do not support class offsets"):
        train_trials(lambda: network(0.0), table(), [replace(trial, recipe=Recipe("r", "", stages))], OBJECTIVE, SCORE,
                     batch_size=40)  # fmt: skip


@pytest.mark.parametrize("dropout", [0.1, 0.6])
def test_each_layer_keeps_its_share_for_each_trial_anew(dropout):
    made = [replace(trial, dropout=dropout) for trial in trials()[:2]]
    stack = Stack(lambda: network(0.3), table(), made, OBJECTIVE, SCORE, batch_size=40)
    networks, shape = stack.networks, torch.Size([1, stack.batches.width])
    drawn = []
    for s in (0, 1, 0):
        kept = networks._masks(slice(s, s + 1), shape)
        assert {name: tuple(value.shape[2:]) for name, value in kept.items()} == {"2.keep": (8,), "5.keep": (6,)}
        assert set(torch.cat([value.flatten() for value in kept.values()]).tolist()) == {0.0, 1.0}
        drawn.append(torch.cat([value.flatten(2) for value in kept.values()], 2).float())
    share = torch.stack(drawn).mean()
    assert abs(share - (1 - dropout)) < 6 * (dropout * (1 - dropout) / torch.stack(drawn).numel()) ** 0.5
    assert not torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


def test_a_stack_is_gone_when_its_training_is_over():
    """Without the garbage collector: a cycle would keep the weights and moments of all networks alive."""
    gc.disable()
    try:
        stack = Stack(lambda: network(0.3), table(), trials(), OBJECTIVE, SCORE, batch_size=40)
        stack.epoch(stack.runs)
        weights = weakref.ref(stack.networks)
        del stack
        assert weights() is None
    finally:
        gc.enable()
