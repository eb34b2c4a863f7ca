"""Batches without end: pass after pass over the rows, shuffled within a buffer, the same ones for a seed."""

import contextlib
import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from evalign._batch import standing_for
from evalign._numerics import safe_divide
from evalign._objective import Objective, cross_entropy
from evalign.confusion import Confusion
from evalign.distributed import Sync, all_summed, resolve
from evalign.streaming.source import Chunk, ParquetRows, Parts, RowGroup, own_rank, rank_count
from evalign.tables.columns import TableError
from evalign.training.batches import Batches, Rows
from evalign.training.checkpoint import Checkpoint, Progress
from evalign.training.evaluation import mean_over_members, predict_logits, with_offset
from evalign.training.history import Epoch
from evalign.training.loop import OnEpoch
from evalign.training.offsets import metric_offset, of_matrix
from evalign.training.recipes import UPDATES, Recipe, Stage
from evalign.training.step import at_stage, batch_loss

BUFFER = 65_536  # rows that are shuffled together
LANES = 8  # row groups that are read at a time: neighbours in a file are often alike

Encode = Callable[[pd.DataFrame], Rows]


@dataclass(frozen=True)
class StreamBatches:
    """Batches of about `size` rows. Every training row is in one batch of a pass.

    A pass takes the row groups in an order of its own, reads `LANES` of them by turns and shuffles what is in the
    buffer. All of it follows from seed, pass and place, so that a place is a single number: `start_at` reads up to
    it, without encoding, and goes on with the batches that would have come.
    """

    source: ParquetRows
    groups: Sequence[RowGroup]
    parts: Parts
    encode: Encode
    size: int
    buffer: int = BUFFER

    def start_at(self, place: int) -> Iterator[Rows]:
        """The batches from this place on."""
        passed = 0
        for number in itertools.count():
            before = passed
            for block, chunks in enumerate(self._blocks(number)):
                marks = [self.parts.train_rows(chunk.numbers) for chunk in chunks]
                rows = sum(int(mark.sum()) for mark in marks)
                count = max(1, round(rows / self.size)) if rows else 0
                if passed + count > place:
                    yield from self._batches((number, block), chunks, marks, count, skip=max(0, place - passed))
                passed += count
            if passed == before:
                raise TableError(f"{self.source.path} has no training rows among the row groups of this rank")

    def _blocks(self, number: int) -> Iterator[list[Chunk]]:
        """What is in the buffer at a time, of one pass."""
        order = np.random.default_rng([self.parts.seed, number]).permutation(len(self.groups))
        held: list[Chunk] = []
        rows = 0
        for chunk in self.source.chunks([self.groups[i] for i in order], LANES):
            held.append(chunk)
            rows += chunk.batch.num_rows
            if rows >= self.buffer:
                yield held
                held, rows = [], 0
        if held:
            yield held

    def _batches(
        self, place: tuple[int, int], chunks: list[Chunk], marks: list[np.ndarray], count: int, skip: int
    ) -> Iterator[Rows]:
        parts = [self.encode(chunk.frame(mark)) for chunk, mark in zip(chunks, marks, strict=True) if mark.any()]
        rows = Rows(*(torch.cat([getattr(part, name) for part in parts]) for name in ("x", "y", "weight")))
        order = torch.from_numpy(np.random.default_rng([self.parts.seed, *place]).permutation(len(rows)))
        for index in order.tensor_split(count)[skip:]:
            yield rows[index.to(rows.y.device)]


def step_loss(
    network: nn.Module, batch: Rows, stage: Stage, objective: Objective, temperature: float, offset: Tensor | None
) -> Tensor:
    """The loss of all ranks' batches; averaged over the ranks, its gradients are those of one process with all rows."""
    sync = resolve("auto", training=True)
    if sync is None:
        return batch_loss(network, batch, stage, objective, temperature, offset=offset)
    z = with_offset(network(batch.x), offset, "multiclass")

    def loss_of(z: Tensor) -> Tensor:
        if stage.metric:
            return objective.of_sums(sync(objective.sums(z, batch.y, batch.weight, temperature)))
        return stage.anchor * _mean_entropy(z, batch, sync)

    return mean_over_members(loss_of, z, "multiclass")


def _mean_entropy(z: Tensor, batch: Rows, sync: Sync) -> Tensor:
    """Cross-entropy of all ranks' rows; batches of ranks may differ by a row, so that means must not be averaged."""
    mass = batch.weight.sum()
    own = torch.stack([cross_entropy(z, batch.y, batch.weight, "multiclass") * mass, mass])
    total = standing_for(all_summed(own.detach(), sync.group), own, sync.ranks)
    return safe_divide(total[0], total[1])


@torch.no_grad()
def validate(
    network: nn.Module, rows: Rows, stage: Stage, objective: Objective, temperature: float, offset: Tensor | None
) -> tuple[dict[str, float], Tensor]:
    """Loss at this temperature, cross-entropy and hard score of all ranks' rows, and their confusion matrix."""
    logits = predict_logits(network, rows.x)
    soft = objective.sums(with_offset(logits, offset, "multiclass"), rows.y, rows.weight, temperature)
    entropy = cross_entropy(logits, rows.y, rows.weight, "multiclass") * soft.weight
    matrix = Confusion.hard(logits.argmax(1), rows.y, logits.shape[1], sample_weight=rows.weight).matrix
    own = torch.cat([soft.vector.double(), entropy.double().reshape(1), matrix.double().reshape(-1)])
    total = all_summed(own) if rank_count() > 1 else own
    size = soft.vector.numel()
    summed = soft.with_vector(total[:size])
    matrix = total[size + 1 :].reshape(matrix.shape).cpu()
    entropy = safe_divide(total[size], summed.weight)
    loss = objective.of_sums(summed) if stage.metric else stage.anchor * safe_divide(summed.entropy, summed.weight)
    score = objective.score(of_matrix(matrix))
    return {"loss": float(loss), "entropy": float(entropy), "score": float(score)}, matrix


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
