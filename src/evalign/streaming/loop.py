"""Train a network by a recipe on batches that are never all in memory; an epoch is a number of updates."""

import contextlib
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from evalign.objective import Objective
from evalign.offsets import metric_offset
from evalign.streaming.batches import StreamBatches
from evalign.streaming.ranks import own_rank, rank_count
from evalign.streaming.step import step_loss, validate
from evalign.training.batches import Batches
from evalign.training.checkpoint import Checkpoint, Progress
from evalign.training.loop import OnEpoch
from evalign.training.progress import Epoch
from evalign.training.recipes import UPDATES, Recipe, Stage
from evalign.training.rows import Rows
from evalign.training.step import at_stage

EPOCHS = 40  # at least, so that there is something to choose from, and to go on from


def epoch_updates(rows: int, batch_size: int) -> int:
    """Updates that make an epoch: a pass over `rows` training rows, or less where a pass is long.

    A stream may be so long that one pass has more updates than training takes. It is then trained for one pass, in
    forty epochs.

    >>> [epoch_updates(n, 4096) for n in (10_000, 1_000_000, 20_000_000, 1_000_000_000)]
    [2, 100, 123, 6104]
    """
    whole = max(1, round(rows / batch_size))
    return min(whole, math.ceil(max(UPDATES, whole) / EPOCHS))


def train_stream(
    network: nn.Module,
    batches: StreamBatches,
    valid: Rows,
    recipe: Recipe,
    objective: Objective,
    *,
    updates: int,
    seed: int,
    checkpoint: Path | None = None,
    on_epoch: OnEpoch | None = None,
) -> list[Epoch]:
    """Take `network` through the stages of `recipe`, epochs of `updates` batches, and leave it with its best weights.

    With `checkpoint` everything is written there after every epoch, by the first rank, and a training that finds its
    own file goes on from it: the place in the stream follows from the number of epochs. Several ranks take each batch
    together, each its own rows. Ctrl-C ends training and keeps the best weights so far.
    """
    # The generator is not used: batches follow from seed and place.
    progress = Progress(network, recipe.stages, Batches(1, 1, seed=seed))
    run = {
        "stages": [asdict(stage) for stage in recipe.stages], "seed": seed, "batch_size": batches.size,
        "rows": [batches.source.rows, updates], "ranks": rank_count(),
        "network": {name: list(value.shape) for name, value in network.state_dict().items()},
    }  # fmt: skip
    file = None if checkpoint is None else Checkpoint(checkpoint, run)
    # DDP averages the gradients; the network itself keeps its names, and is what is saved.
    model = DistributedDataParallel(network) if rank_count() > 1 else network
    with torch.random.fork_rng(), contextlib.suppress(*([KeyboardInterrupt] if rank_count() == 1 else [])):
        if file is not None:
            file.restore(progress)
        job = _Job(model, batches.start_at(len(progress.history) * updates), valid, objective, updates, seed)
        while not progress.finished:
            try:
                for epoch in _run_stage(job, progress):
                    if file is not None and own_rank() == 0:
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

    model: nn.Module
    batches: Iterator[Rows]
    valid: Rows
    objective: Objective
    updates: int
    seed: int


def _run_stage(job: _Job, progress: Progress) -> Iterator[Epoch]:
    """The epochs that are left of a stage."""
    controller, optimiser, stage = progress.controller, progress.optimiser, progress.stages[progress.stage]
    objective = at_stage(job.objective, stage)
    assert isinstance(objective, Objective)
    if stage.offset and not controller.epochs:
        progress.offset = _offset(job, progress, stage, objective)
    offset = progress.offset if stage.offset else None
    while not controller.finished:
        started = time.perf_counter()
        temperature, learning_rate = controller.temperature, controller.learning_rate
        for group in optimiser.param_groups:
            group["lr"] = learning_rate
        # Of the epoch, so that a resumed one drops out what it would have; of the rank, which has other rows.
        torch.manual_seed((job.seed * 1_000_003 + len(progress.history)) * 1009 + own_rank())
        job.model.train()
        losses = []
        for _ in range(job.updates):
            loss = step_loss(job.model, next(job.batches), stage, objective, temperature, offset)
            optimiser.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
            losses.append(loss.detach())
        train_loss = float(torch.stack(losses).mean())
        if not math.isfinite(train_loss):
            raise FloatingPointError(
                f"the training loss became {train_loss} in epoch {controller.epochs + 1} of stage {stage.name!r}; "
                "lower the learning rate or look for extreme values in the features"
            )
        with progress.averaged():
            values, _ = validate(progress.network, job.valid, stage, objective, temperature, offset)
            improved = controller.step(**values)
            if improved:
                progress.keep()
        epoch = Epoch(
            len(progress.history) + 1, stage.name, temperature, learning_rate, train_loss, values["loss"],
            values["entropy"], values["score"], best=improved, seconds=time.perf_counter() - started,
        )  # fmt: skip
        progress.history.append(epoch)
        yield epoch


def _offset(job: _Job, progress: Progress, stage: Stage, objective: Objective) -> Tensor:
    """The class offsets that the metric asks for; after the first time half way to what is asked for now."""
    matrix = validate(progress.network, job.valid, stage, objective, stage.temperature, None)[1]
    offset = metric_offset(matrix, objective.score, stage.offset).float().to(job.valid.x.device)
    return offset if progress.offset is None else (offset + progress.offset) / 2
