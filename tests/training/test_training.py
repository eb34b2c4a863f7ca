"""The training loop: the weights it keeps, when it stops, and that the result depends only on the seed."""

from dataclasses import replace

import pytest
import torch
from sklearn.metrics import f1_score
from torch import nn

from evalign import metrics
from evalign.networks.mlp import mlp
from evalign.objective import Objective
from evalign.steps import StepChoice
from evalign.training.batches import Rows, argmax_score, predict_logits
from evalign.training.in_memory import Phase, at_stage, batch_loss, train, validate
from evalign.training.loop import Controller
from evalign.training.recipes import RECIPES, Recipe, Stage, find_recipe
from evalign_papers.networks import Pictures

OBJECTIVE = Objective("f1", "multiclass", StepChoice("annealed"))
SCORE = argmax_score(metrics.f1)
CE = Stage("ce", metric=False, anchor=1.0, learning_rate=0.02, epochs=6, patience=6, monitor="entropy")
METRIC = Stage("metric", metric=True, anchor=1.0, learning_rate=0.01, epochs=6, patience=2, rate=0.5, monitor="loss")
SHORT = Recipe("short", "for tests", (CE, METRIC))


def blobs(n: int = 120, seed: int = 0) -> Rows:
    generator = torch.Generator().manual_seed(seed)
    y = torch.arange(n) % 3
    return Rows.of(torch.randn(n, 2, generator=generator) + 2.0 * torch.eye(3, 2)[y], y)


def fresh(dropout: float = 0.1) -> nn.Module:
    torch.manual_seed(0)
    return mlp(2, 3, (16,), dropout)


def run(network: nn.Module, recipe: Recipe = SHORT, **options):
    return train(network, blobs(), blobs(60, 1), recipe, OBJECTIVE, SCORE, batch_size=32, **options)


def test_training_learns_and_history_tells_it():
    network = fresh()
    history = run(network)
    assert [epoch.epoch for epoch in history] == list(range(1, len(history) + 1))
    assert {epoch.stage for epoch in history} == {"ce", "metric"}
    assert history[-1].score > 0.7
    valid = blobs(60, 1)
    predicted = predict_logits(network, valid.x).argmax(1)
    kept = [epoch for epoch in history if epoch.best][-1]
    # The network is left with the weights of the last best epoch: scikit-learn sees that epoch's score.
    assert f1_score(valid.y, predicted, average="macro") == pytest.approx(kept.score)


def test_a_seed_decides_everything_on_the_cpu_and_leaves_the_callers_random_numbers_alone():
    first, second = fresh(), fresh()
    torch.manual_seed(7)
    run(first, seed=5)
    expected = torch.rand(1)
    torch.manual_seed(7)
    run(second, seed=5)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    torch.manual_seed(7)
    assert torch.equal(torch.rand(1), expected)
    third = fresh()
    run(third, seed=6)
    assert not all(torch.equal(a, b) for a, b in zip(first.parameters(), third.parameters(), strict=True))


def test_ctrl_c_keeps_the_best_so_far():
    best: dict[str, torch.Tensor] = {}
    network = fresh()

    def stop(epoch) -> None:
        if epoch.best:
            best.update({name: value.clone() for name, value in network.state_dict().items()})
        if epoch.epoch == 4:
            raise KeyboardInterrupt

    history = run(network, on_epoch=stop)
    assert len(history) == 4
    assert all(torch.equal(value, best[name]) for name, value in network.state_dict().items())


def test_a_diverging_network_is_an_error_that_says_what_to_do():
    network = fresh()
    with torch.no_grad():
        network[0].weight.fill_(float("nan"))
    with pytest.raises(FloatingPointError, match="lower the learning rate"):
        run(network)


def test_batch_loss_is_metric_plus_anchor_times_cross_entropy():
    network, rows = fresh(0.0).requires_grad_(False), blobs()
    logits = network(rows.x)
    ce = nn.functional.cross_entropy(logits, rows.y)
    assert float(batch_loss(network, rows, Phase(CE, OBJECTIVE, 0.2))) == pytest.approx(float(ce))
    alone = batch_loss(network, rows, Phase(METRIC, replace(OBJECTIVE, anchor=0.0), 0.2))
    both = batch_loss(network, rows, Phase(METRIC, replace(OBJECTIVE, anchor=2.0), 0.2))
    assert float(both) == pytest.approx(float(alone) + 2 * float(ce), rel=1e-5)


def test_bfloat16_autocast_still_gives_a_float32_loss():
    loss = batch_loss(fresh(0.0), blobs(), Phase(METRIC, OBJECTIVE, 0.2), amp=True)
    assert loss.dtype == torch.float32
    assert loss.isfinite()


def test_controller_stops_after_patience_and_marks_the_best():
    controller = Controller(replace(CE, epochs=100, patience=2))
    values = [0.9, 0.5, 0.6, 0.4, 0.45, 0.41, 0.3]
    marks = []
    for value in values:
        if controller.finished:
            break
        marks.append(controller.step(loss=9.0, entropy=value, score=0.0))
    assert marks == [True, True, False, True, False, False]
    assert controller.finished


def test_controller_watches_what_the_stage_names():
    by_score = Controller(replace(CE, monitor="score"))
    assert [by_score.step(loss=0, entropy=0, score=s) for s in (0.1, 0.3, 0.2)] == [True, True, False]
    by_loss = Controller(replace(CE, monitor="loss"))
    assert [by_loss.step(loss=x, entropy=0, score=0) for x in (0.3, 0.1, 0.2)] == [True, True, False]


def test_controller_cools_and_decays():
    controller = Controller(replace(METRIC, patience=1, epochs=50, decay="cosine"))
    assert controller.learning_rate == pytest.approx(0.01)
    controller.step(loss=1.0, entropy=0, score=0)
    controller.step(loss=2.0, entropy=0, score=0)
    assert controller.temperature == pytest.approx(0.1)
    rates = []
    while not controller.finished:
        rates.append(controller.learning_rate)
        controller.step(loss=0.9 - 0.001 * len(rates), entropy=0, score=0)
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] < 1e-4


def test_controller_cools_by_epoch_from_start_to_end():
    controller = Controller(replace(METRIC, rate=None, patience=99, epochs=5, temperature=0.2, cool_to=0.0125))
    seen = []
    while not controller.finished:
        seen.append(controller.temperature)
        controller.step(loss=0.5, entropy=0.5, score=0.5)
    assert seen == pytest.approx([0.2, 0.1, 0.05, 0.025, 0.0125])


def test_recipes_are_found_by_name_and_bounded():
    assert find_recipe(SHORT) is SHORT
    with pytest.raises(ValueError, match="did you mean 'anchored'"):
        find_recipe("anchord")
    for recipe in RECIPES.values():
        assert recipe.reason
        assert recipe.limited(10).epochs <= 10 + len(recipe.stages)
        assert recipe.scaled(2.0).stages[0].learning_rate == 2 * recipe.stages[0].learning_rate
    assert [stage.metric for stage in RECIPES["anchored"].stages] == [False, True]
    assert RECIPES["cross_entropy"].epochs >= RECIPES["anchored"].epochs
    assert not any(stage.anchor for stage in RECIPES["paper"].stages)


@pytest.mark.parametrize("shape", [(24,), (24, 1), (8, 3)])
def test_binary_logits_of_any_shape_have_the_loss_of_flat_ones(shape):
    generator = torch.Generator().manual_seed(0)
    z, y = torch.randn(shape, generator=generator), (torch.rand(shape, generator=generator) < 0.4).long()
    y = y.squeeze(1) if shape == (24, 1) else y
    objective = Objective("f1", "binary", StepChoice("linear"), average="binary")
    weight = torch.rand(len(y), generator=generator)
    rows = Rows(z, y, weight)  # the "network" hands its input on
    each = weight.repeat_interleave(y.numel() // len(y))
    expected = objective(z.flatten(), y.flatten(), each, 0.2)
    stage = replace(METRIC, anchor=0.0, step="linear")
    assert float(batch_loss(nn.Identity(), rows, Phase(stage, replace(objective, anchor=0.0), 0.2))) == pytest.approx(
        float(expected)
    )
    score = argmax_score(metrics.resolve("f1", average="binary"))
    values = validate(nn.Identity(), rows, Phase(stage, objective, 0.2), score)
    predicted = (z.flatten() > 0).long()
    assert values["score"] == pytest.approx(f1_score(y.flatten().numpy(), predicted.numpy(), sample_weight=each))
    entropy = nn.functional.binary_cross_entropy_with_logits(z.flatten(), y.flatten().float(), weight=each)
    assert values["entropy"] == pytest.approx(float(entropy) * y.numel() / float(each.sum()), rel=1e-5)


def test_one_logit_for_two_labels_is_refused():
    rows = Rows.of(torch.zeros(4, 2), torch.zeros(4, dtype=torch.long))
    with pytest.raises(ValueError, match="one logit for every label"):
        batch_loss(nn.Identity(), rows, Phase(CE, replace(OBJECTIVE, task="binary"), 0.2))


def test_any_term_is_minimised_beside_its_anchor_and_other_rows_are_watched():
    rows = Rows.of(torch.randn(30, 2, generator=torch.Generator().manual_seed(0)), torch.arange(30) % 2)

    def term(logits, y, weight, temperature):
        return (weight * (logits.sigmoid() - y) ** 2).sum() / weight.sum() + 0 * temperature

    network = nn.Linear(2, 1)
    stage = Stage("brier", metric=True, anchor=0.5, learning_rate=0.1, epochs=4, patience=4)
    history = train(
        network, rows, rows, Recipe("r", "", (stage,)), term, SCORE, task="binary", batch_size=30,
        watch=lambda z, y, w: torch.stack([z.mean(), y.sum() / w.sum()]), watch_rows=rows,
    )  # fmt: skip
    assert history[-1].loss < history[0].loss
    kept = [epoch for epoch in history if epoch.best][-1]
    with torch.no_grad():
        z = network(rows.x).squeeze(1)
        entropy = nn.functional.binary_cross_entropy_with_logits(z, rows.y.float())
    assert kept.watched == pytest.approx((float(z.mean()), 0.5), rel=1e-4)
    assert kept.loss == pytest.approx(float(((z.sigmoid() - rows.y) ** 2).mean() + 0.5 * entropy), rel=1e-4)


def test_logits_of_some_rows_in_pieces_are_those_of_the_table():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3000, 4, generator=generator)
    rows = torch.randperm(3000, generator=generator)[:2500].int()  # more than are shown to a network at once
    network = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5))
    network.eval()
    with torch.no_grad():
        whole = network(x)
    torch.testing.assert_close(predict_logits(network, x), whole)
    torch.testing.assert_close(predict_logits(network, x, rows), whole[rows.long()])
    assert predict_logits(network, x, rows[:0]).shape == (0, 3)


def test_bytes_give_float_logits_in_pieces_of_any_size():
    x = torch.randint(0, 256, (9, 4, 4, 3), dtype=torch.uint8)
    network = nn.Sequential(Pictures((0.5,) * 3, (0.2,) * 3), nn.Flatten(), nn.Linear(48, 2))
    whole = predict_logits(network, x)
    assert whole.dtype == torch.float32
    with torch.no_grad():
        torch.testing.assert_close(whole, network(x))
    assert predict_logits(network, x, amp=True).dtype == torch.float32
    assert Rows.of(x, torch.zeros(9)).weight.dtype == torch.float32


def test_the_last_epoch_is_kept_where_the_stage_says_so():
    controller = Controller(replace(CE, monitor="last"))
    assert [controller.step(loss=x, entropy=x, score=-x) for x in (0.1, 0.5, 0.3)] == [True] * 3


def test_a_step_that_is_a_function_stays():
    """A stage names a step; an objective that brings its own keeps it, here none at all."""
    own = Objective("f1", "multiclass", StepChoice(lambda p, threshold: p))
    rows, network = blobs(), fresh(0.0).requires_grad_(False)
    loss = batch_loss(network, rows, Phase(METRIC, at_stage(own, replace(METRIC, anchor=0.0)), 0.2))
    p = network(rows.x).softmax(1)
    actual, predicted = rows.y.bincount(), p.sum(0)
    tp = torch.stack([p[rows.y == k, k].sum() for k in range(3)])
    assert float(loss) == pytest.approx(float(1 - (2 * tp / (actual + predicted)).mean()), rel=1e-5)
