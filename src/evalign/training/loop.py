"""Train one network by a recipe: a loop one can read."""

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from evalign._objective import Objective
from evalign.confusion import Task
from evalign.training.batches import Batches, Rows
from evalign.training.checkpoint import Checkpoint, Progress
from evalign.training.evaluation import Score, Term, Watch, estimate_offset, flat, predict_logits, validate
from evalign.training.history import Epoch, check_finite
from evalign.training.recipes import Recipe, Stage
from evalign.training.step import RecordedStep, at_stage, batch_loss

OnEpoch = Callable[[Epoch], None]


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
) -> list[Epoch]:
    """Take `network` through the stages of `recipe` and leave it with its best weights.

    `objective` has the metric; a stage sets its anchor and step. Any other term needs to be told its `task`. `score` is
    the hard metric that validation data are judged by; `watch` keeps numbers of other rows, and no choice is made by
    them. Binary tasks have logits (M,), (M, 1) or (F, E), one for each label. With `recorded` a step is recorded on a
    GPU and replayed; its batches have one size, and a few rows, others each time, are left out of an epoch.

    Ctrl-C ends training and keeps the best weights so far, unless `catch_interrupt` is False. With `checkpoint`
    everything is written there after every `checkpoint_every` epochs, and a training that finds its own file goes on
    from it. A seed decides everything on a CPU, interrupted or not.
    """
    stages = recipe.for_rows(len(train_rows), batch_size).stages
    batches = Batches(len(train_rows), batch_size, seed=seed, labels=train_rows.y if stratified else None)
    job = _Job(
        network, train_rows, valid_rows, objective, objective.task if isinstance(objective, Objective) else task,
        score, amp, watch, watch_rows, recorded,
    )  # fmt: skip
    devices = [train_rows.x.device] if train_rows.x.is_cuda else []
    progress = Progress(network, stages, batches, recorded=recorded)
    file = None
    if checkpoint is not None:
        run = {
            "stages": [asdict(stage) for stage in stages], "seed": seed, "batch_size": batch_size,
            "rows": [len(train_rows), len(valid_rows)], "stratified": stratified, "recorded": recorded,
            "network": {name: list(value.shape) for name, value in network.state_dict().items()},
        }  # fmt: skip
        file = Checkpoint(checkpoint, run, checkpoint_every)
    with torch.random.fork_rng(devices), contextlib.suppress(*([KeyboardInterrupt] if catch_interrupt else [])):
        torch.manual_seed(seed)  # for dropout; the caller's random numbers are left as they were
        if file is not None:
            file.restore(progress)
        while not progress.finished:
            try:
                for epoch in _run_stage(job, progress):
                    if file is not None:
                        file.save(progress)
                    if on_epoch is not None:
                        on_epoch(epoch)
            finally:
                network.load_state_dict(progress.best)
            progress.begin(progress.stage + 1)
    return progress.history


@dataclass(frozen=True)
class _Job:
    """What training is about, and stays as it is."""

    network: nn.Module
    train: Rows
    valid: Rows
    objective: Objective | Term
    task: Task
    score: Score
    amp: bool
    watch: Watch | None
    watch_rows: Rows | None
    recorded: bool


def _run_stage(job: _Job, progress: Progress) -> Iterator[Epoch]:
    """The epochs that are left of a stage. Nothing inside of one looks at a value: a GPU is never waited for."""
    controller, stage = progress.controller, progress.stages[progress.stage]
    objective = at_stage(job.objective, stage)
    if stage.offset and not controller.epochs:
        progress.offset = estimate_offset(job.network, job.valid, job.objective, stage, progress.offset, job.amp)
    offset = progress.offset if stage.offset else None
    run_epoch = (_recorded_epochs if job.recorded else _plain_epochs)(job, progress, stage, objective, offset)
    while not controller.finished:
        started = time.perf_counter()
        temperature, learning_rate = controller.temperature, controller.learning_rate
        job.network.train()
        loss = run_epoch(temperature, learning_rate)
        with progress.averaged():
            values = validate(
                job.network, job.valid, stage, objective, job.score, temperature, job.amp, task=job.task, offset=offset
            )
            train_loss = float(loss)
            check_finite(train_loss, controller.epochs + 1, stage.name)
            watched = _look(job)
            improved = controller.step(**values)
            if improved:
                progress.keep()
        epoch = Epoch(
            len(progress.history) + 1, stage.name, temperature, learning_rate, train_loss, values["loss"],
            values["entropy"], values["score"], best=improved, seconds=time.perf_counter() - started, watched=watched,
        )  # fmt: skip
        progress.history.append(epoch)
        yield epoch


def _plain_epochs(
    job: _Job, progress: Progress, stage: Stage, objective: Objective | Term, offset: Tensor | None
) -> Callable[[float, float], Tensor]:
    """(temperature, learning rate) -> the mean loss of one epoch of updates."""
    batches, optimiser = progress.batches, progress.optimiser

    def run(temperature: float, learning_rate: float) -> Tensor:
        for group in optimiser.param_groups:
            group["lr"] = learning_rate
        losses = []
        for index in batches.order().to(job.train.y.device).tensor_split(batches.count):
            loss = batch_loss(
                job.network, job.train[index], stage, objective, temperature, job.amp, task=job.task, offset=offset
            )
            optimiser.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
            losses.append(loss.detach())
        return torch.stack(losses).mean()

    return run


def _recorded_epochs(
    job: _Job, progress: Progress, stage: Stage, objective: Objective | Term, offset: Tensor | None
) -> Callable[[float, float], Tensor]:
    """The same by a recorded step, in batches of one size."""
    batches, size = progress.batches, len(job.train) // progress.batches.count
    step = RecordedStep(
        job.network, job.train, stage, objective, size, amp=job.amp, task=job.task, offset=offset,
        optimiser=progress.optimiser, average=progress.average,
    )  # fmt: skip

    def run(temperature: float, learning_rate: float) -> Tensor:
        step.temperature.fill_(temperature)
        step.learning_rate.fill_(learning_rate)
        step.total.zero_()
        order = batches.order()[: size * batches.count].to(job.train.y.device)
        for index in torch.split(order, size):
            step(index)
        return step.total / batches.count

    return run


@torch.no_grad()
def _look(job: _Job) -> tuple[float, ...]:
    """What `watch` says of the rows that are watched."""
    if job.watch is None or job.watch_rows is None:
        return ()
    rows = job.watch_rows
    logits = predict_logits(job.network, rows.x, amp=job.amp)
    return tuple(job.watch(*flat(logits, rows.y, rows.weight, job.task)).tolist())
