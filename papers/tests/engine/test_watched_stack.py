"""Rows that a stack watches: told of in every epoch, chosen by in none, and equal to those of one network alone."""

from functools import partial

import pytest
import torch
from torch import nn

from evalign import metrics
from evalign.networks.mlp import mlp
from evalign.objective import Objective
from evalign.steps import StepChoice
from evalign.training.batches import Rows, argmax_score
from evalign.training.in_memory import train
from evalign.training.recipes import Recipe, Stage
from evalign.training.stacked import Trial, train_trials
from evalign_papers.engine.stacked_trials import WatchedStack
from evalign_papers.networks.graph import PairNetwork

SCORE = argmax_score(metrics.accuracy)


def watch(logits, y, weight):
    return torch.stack([(weight * logits).sum(), (weight * y).sum()])


def table(columns: int, labels: tuple[int, ...] = ()) -> Rows:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(300, columns, generator=generator, dtype=torch.float64)
    y = torch.randint(0, 2, (300, *labels), generator=generator)
    return Rows(x, y, torch.rand(300, generator=generator, dtype=torch.float64) + 0.5)


CASES = {
    "rows": (table(4), lambda: mlp(4, 1, (8,), 0.0).double()),
    "graphs": (table(9, (3,)), lambda: PairNetwork(3, 2, 1, hidden=4, rounds=1).double()),
}


@pytest.mark.parametrize("case", CASES)
def test_watched_rows_are_told_of_every_epoch_and_choose_nothing(case):
    rows, make = CASES[case]
    objective = Objective("f1", "binary", StepChoice("annealed"), average="binary")
    stage = Stage("m", metric=True, anchor=0.3, learning_rate=0.02, epochs=4, patience=9)
    trials, others = [], []
    for seed in range(2):
        order = torch.randperm(300, generator=torch.Generator().manual_seed(seed))
        trials.append(Trial(order[:200], order[200:260], Recipe("r", "", (stage,)), seed=seed))
        others.append(order[260:])
    go = partial(train_trials, make, rows, trials, objective, SCORE, batch_size=40, task="binary")
    seen, unseen = go(kind=partial(WatchedStack, watch=watch, watched=others)), go()
    for trial, other, one, plain in zip(trials, others, seen, unseen, strict=True):
        assert all(torch.equal(one.state[name], plain.state[name]) for name in one.state)
        torch.manual_seed(trial.seed)
        alone: nn.Module = make()
        history = train(
            alone, rows[trial.train], rows[trial.valid], trial.recipe, objective, SCORE, batch_size=40, seed=trial.seed,
            watch=watch, watch_rows=rows[other],
        )  # fmt: skip
        for ours, theirs in zip(history, one.history, strict=True):
            assert ours.watched == pytest.approx(theirs.watched)
