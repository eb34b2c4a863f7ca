"""The training loop: epochs, stages, cooling, early stopping, checkpoints. Sources supply batches and steps."""

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from evalign._objective import Objective
from evalign.confusion import Task
from evalign.training.batches import Batches, Rows
from evalign.training.checkpoint import Checkpoint
from evalign.training.evaluation import Score, Term, Watch
from evalign.training.history import Epoch, Run, Values, check_finite
from evalign.training.recipes import Recipe
from evalign.training.step import InMemory

OnEpoch = Callable[[Epoch], None]


class Source(Protocol):
    """One network or several with the data they learn from: rows in memory, stacked folds, a stream."""

    def begin_stage(self, number: int, run: Run) -> None:
        """Prepare a fresh optimiser for network `number`, which goes on from its best weights."""

    def epoch(self, runs: Sequence[Run]) -> list[Values]:
        """Train the unfinished networks for an epoch and validate them; values of finished ones are ignored."""

    def keep(self, numbers: Sequence[int]) -> None:
        """Remember the current weights of these networks as their best."""

    def restore(self, number: int) -> None:
        """Give a network its best weights."""


def run_stages(
    source: Source,
    runs: Sequence[Run],
    *,
    on_epoch: Callable[[int, Epoch], None] | None = None,
    save: Callable[[], None] | None = None,
    may_diverge: bool = False,
    catch_interrupt: bool = True,
    deadline: float | None = None,
) -> None:
    """Take every network through its stages, each from the best weights of the one before, and leave it with its best.

    `save` writes a checkpoint after every epoch. A loss that is not finite raises unless `may_diverge`. Ctrl-C ends
    training early if `catch_interrupt`, and so does `deadline` (seconds of `time.perf_counter`), after the epoch in
    which it passes and at least one epoch.
    """
    for number in range(len(runs)):
        _advance(source, runs, number)  # a checkpoint may have been written at the end of a stage
    try:
        with contextlib.suppress(*([KeyboardInterrupt] if catch_interrupt else [])):
            while unfinished := [number for number, run in enumerate(runs) if not run.finished]:
                _run_epoch(source, runs, unfinished, on_epoch, save, may_diverge)
                if deadline is not None and time.perf_counter() >= deadline:
                    break
    finally:
        for number, run in enumerate(runs):
            if not run.finished:
                source.restore(number)


def _run_epoch(
    source: Source,
    runs: Sequence[Run],
    unfinished: list[int],
    on_epoch: Callable[[int, Epoch], None] | None,
    save: Callable[[], None] | None,
    may_diverge: bool,
) -> None:
    started = time.perf_counter()
    values = source.epoch(runs)
    if not may_diverge:
        for number in unfinished:
            run = runs[number]
            check_finite(values[number].train_loss, run.controller.epochs + 1, run.stage.name)
    seconds = time.perf_counter() - started
    epochs = [runs[number].record(values[number], seconds) for number in unfinished]
    source.keep([number for number, epoch in zip(unfinished, epochs, strict=True) if epoch.best])
    if save is not None:
        save()
    if on_epoch is not None:
        for number, epoch in zip(unfinished, epochs, strict=True):
            on_epoch(number, epoch)
    for number in unfinished:
        _advance(source, runs, number)


def _advance(source: Source, runs: Sequence[Run], number: int) -> None:
    """Begin a network's next stage if its current one is over."""
    run = runs[number]
    if run.controller.finished:
        source.restore(number)
        run.begin(run.number + 1)
        if not run.finished:
            source.begin_stage(number, run)


def train(
    network: nn.Module,
    train_rows: Rows,
    valid_rows: Rows,
    recipe: Recipe,
    objective: Objective | Term,
    score: Score,
    *,
    batch_size: int,
    task: Task = "multiclass",
    seed: int = 0,
    stratified: bool = False,
    amp: bool = False,
    recorded: bool = False,
    watch: Watch | None = None,
    watch_rows: Rows | None = None,
    checkpoint: Path | None = None,
    checkpoint_every: int = 1,
    on_epoch: OnEpoch | None = None,
    catch_interrupt: bool = True,
    deadline: float | None = None,
) -> list[Epoch]:
    """Train `network` on rows in memory by the stages of `recipe` and leave it with its best weights.

    `objective` has the metric; a stage sets its anchor and step. Any other loss term needs its `task`. `score` is the
    hard metric on validation rows; `watch` records numbers of other rows, by which no choice is made. Binary tasks have
    logits (M,), (M, 1) or (F, E), one for each label. With `recorded` a step is recorded on a GPU as a CUDA graph and
    replayed; its batches have one size, and a few rows, others each time, are left out of an epoch.

    With `checkpoint` everything is written there after every `checkpoint_every` epochs, and training resumes from a
    file of its own. A seed decides everything on a CPU, interrupted or not. For `catch_interrupt` and `deadline` see
    `run_stages`.
    """
    stages = recipe.for_rows(len(train_rows), batch_size).stages
    run = Run(stages)
    source = InMemory(
        network, train_rows, valid_rows, objective, objective.task if isinstance(objective, Objective) else task, score,
        Batches(len(train_rows), batch_size, seed=seed, labels=train_rows.y if stratified else None),
        amp=amp, recorded=recorded, watch=watch, watch_rows=watch_rows,
    )  # fmt: skip
    file = None
    if checkpoint is not None:
        identity = {
            **identify(stages, seed, batch_size, network), "rows": [len(train_rows), len(valid_rows)],
            "stratified": stratified, "recorded": recorded,
        }  # fmt: skip
        file = Checkpoint(checkpoint, identity, checkpoint_every)
    with torch.random.fork_rng([train_rows.x.device] if train_rows.x.is_cuda else []):
        torch.manual_seed(seed)  # for dropout; the caller's random numbers are left as they were
        source.begin_stage(0, run)
        if file is not None:
            file.restore(source, run)
        run_stages(
            source, [run], catch_interrupt=catch_interrupt, deadline=deadline,
            save=None if file is None else lambda: file.save(source, run),
            on_epoch=None if on_epoch is None else lambda _, epoch: on_epoch(epoch),
        )  # fmt: skip
    return run.history


def identify(stages: Sequence[Any], seed: int, batch_size: int, network: nn.Module) -> dict[str, Any]:
    """What a checkpoint must have in common with the training that resumes from it."""
    return {
        "stages": [asdict(stage) for stage in stages],
        "seed": seed,
        "batch_size": batch_size,
        "network": {name: list(value.shape) for name, value in network.state_dict().items()},
    }
