"""Train one network by a recipe: a loop one can read."""

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from evalign.confusion import Confusion, Task
from evalign.objective import Objective, cross_entropy
from evalign.offsets import metric_offset
from evalign.training.batches import Batches
from evalign.training.checkpoint import Checkpoint, Progress
from evalign.training.outputs import Term, Watch, flat, probabilities_of, with_offset
from evalign.training.progress import Epoch
from evalign.training.recipes import Recipe, Stage

Score = Callable[[Tensor, Tensor, Tensor], Tensor]  # probabilities (n, C), labels (n,), weights (n,) -> hard metric
OnEpoch = Callable[[Epoch], None]
PICTURES_AT_ONCE = 2048


@dataclass(frozen=True)
class Rows:
    """Features, labels and weights on one device."""

    x: Tensor
    y: Tensor
    weight: Tensor

    @classmethod
    def of(cls, x: Tensor, y: Tensor, weight: Tensor | None = None) -> "Rows":
        dtype = x.dtype if x.is_floating_point() else torch.float32
        return cls(x, y, torch.ones(len(y), dtype=dtype, device=x.device) if weight is None else weight)

    def __getitem__(self, index: Tensor) -> "Rows":
        return Rows(self.x[index], self.y[index], self.weight[index])

    def joined(self, other: "Rows") -> "Rows":
        return Rows(*(torch.cat(pair) for pair in zip(vars(self).values(), vars(other).values(), strict=True)))

    def __len__(self) -> int:
        return len(self.y)


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
    them. Binary tasks have logits (M,), (M, 1) or (F, E), one for each label.

    Ctrl-C ends training and keeps the best weights so far, unless `catch_interrupt` is False. With `checkpoint`
    everything is written there after every `checkpoint_every` epochs, and a training that finds its own file goes on
    from it. A seed decides everything on a CPU, interrupted or not.
    """
    stages = recipe.for_rows(len(train_rows), batch_size).stages
    batches = Batches(len(train_rows), batch_size, seed=seed, labels=train_rows.y if stratified else None)
    job = _Job(
        network, train_rows, valid_rows, objective, objective.task if isinstance(objective, Objective) else task,
        score, amp, watch, watch_rows,
    )  # fmt: skip
    devices = [train_rows.x.device] if train_rows.x.is_cuda else []
    progress = Progress(network, stages, batches)
    file = None
    if checkpoint is not None:
        run = {
            "stages": [asdict(stage) for stage in stages], "seed": seed, "batch_size": batch_size,
            "rows": [len(train_rows), len(valid_rows)], "stratified": stratified,
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


def _run_stage(job: _Job, progress: Progress) -> Iterator[Epoch]:
    """The epochs that are left of a stage. Nothing inside of one looks at a value: a GPU is never waited for."""
    controller, optimiser, stage = progress.controller, progress.optimiser, progress.stages[progress.stage]
    objective = at_stage(job.objective, stage)
    if stage.offset and not controller.epochs:
        progress.offset = estimate_offset(job.network, job.valid, job.objective, stage, progress.offset, job.amp)
    offset = progress.offset if stage.offset else None
    while not controller.finished:
        started = time.perf_counter()
        temperature, learning_rate = controller.temperature, controller.learning_rate
        for group in optimiser.param_groups:
            group["lr"] = learning_rate
        job.network.train()
        losses = []
        for index in progress.batches.order().to(job.train.y.device).tensor_split(progress.batches.count):
            loss = batch_loss(
                job.network, job.train[index], stage, objective, temperature, job.amp, task=job.task, offset=offset
            )
            optimiser.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
            losses.append(loss.detach())
        values = validate(
            job.network, job.valid, stage, objective, job.score, temperature, job.amp, task=job.task, offset=offset
        )
        train_loss = float(torch.stack(losses).mean())
        if not math.isfinite(train_loss):
            raise FloatingPointError(
                f"the training loss became {train_loss} in epoch {controller.epochs + 1} of stage {stage.name!r}; "
                "lower the learning rate or look for extreme values in the features"
            )
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


def estimate_offset(
    network: nn.Module, rows: Rows, objective: Objective | Term, stage: Stage, before: Tensor | None, amp: bool = False
) -> Tensor:
    """The class offsets that the metric asks for at the confusion matrix of `rows`, by the strength of the stage.

    After the first time, half way between what was and what is asked for now: the matrix answers to the offset.
    """
    if not isinstance(objective, Objective) or objective.task == "multilabel" or objective.metric == "auroc":
        raise ValueError("class offsets need a metric of one confusion matrix; train without offset")
    logits, y, weight = flat(predict_logits(network, rows.x, amp=amp), rows.y, rows.weight, objective.task)
    p = probabilities_of(logits, objective.task)
    matrix = Confusion.hard(p.argmax(1), y, p.shape[1], sample_weight=weight).matrix
    # On the CPU: a few numbers, once a stage, and float64, which not every device has.
    offset = metric_offset(matrix.cpu(), objective.score, stage.offset).float().to(rows.x.device)
    return offset if before is None else (offset + before) / 2


def at_stage(objective: Objective | Term, stage: Stage) -> Objective | Term:
    if not isinstance(objective, Objective):
        return objective
    own = objective.step.step  # a function is the objective's own
    return replace(
        objective, anchor=stage.anchor, step=replace(objective.step, step=own if callable(own) else stage.step)
    )


def batch_loss(
    network: nn.Module,
    batch: Rows,
    stage: Stage,
    objective: Objective | Term,
    temperature: float | Tensor,
    amp: bool = False,
    *,
    task: Task = "multiclass",
    offset: Tensor | None = None,
) -> Tensor:
    """1 - soft metric + anchor x cross-entropy of one batch, in float32 whatever the network runs in."""
    with torch.autocast(batch.x.device.type, dtype=torch.bfloat16, enabled=amp):
        logits = network(batch.x)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    task = objective.task if isinstance(objective, Objective) else task
    z, y, weight = flat(logits, batch.y, batch.weight, task)
    z = with_offset(z, offset, task)
    if not stage.metric:
        return stage.anchor * cross_entropy(z, y, weight, task)
    if isinstance(objective, Objective):
        return objective(z, y, weight, temperature)
    loss = objective(z, y, weight, temperature if isinstance(temperature, Tensor) else z.new_full((), temperature))
    return loss + stage.anchor * cross_entropy(z, y, weight, task) if stage.anchor else loss


@torch.no_grad()
def predict_logits(network: nn.Module, x: Tensor, rows_at_once: int = 16384, *, amp: bool = False) -> Tensor:
    """Logits in evaluation mode, in pieces so that hidden layers never hold a whole table; bytes give float32."""
    network.eval()
    pieces = torch.split(x, rows_at_once if x.dim() <= 2 else PICTURES_AT_ONCE)
    with torch.autocast(x.device.type, dtype=torch.bfloat16, enabled=amp):
        return torch.cat([network(part).to(x.dtype if x.is_floating_point() else torch.float32) for part in pieces])


@torch.no_grad()
def validate(
    network: nn.Module,
    rows: Rows,
    stage: Stage,
    objective: Objective | Term,
    score: Score,
    temperature: float,
    amp: bool = False,
    *,
    task: Task = "multiclass",
    offset: Tensor | None = None,
) -> dict[str, float]:
    """Validation loss at this temperature (with the offsets that training has), cross-entropy and hard score."""
    task = objective.task if isinstance(objective, Objective) else task
    logits, y, weight = flat(predict_logits(network, rows.x, amp=amp), rows.y, rows.weight, task)
    entropy = cross_entropy(logits, y, weight, task)
    z = with_offset(logits, offset, task)
    anchor = entropy if offset is None else cross_entropy(z, y, weight, task)
    metric_term = 0.0
    if stage.metric and isinstance(objective, Objective):
        metric_term = float(objective.metric_term(objective.counts(z, y, weight, temperature)[0]))
    elif stage.metric and not isinstance(objective, Objective):
        metric_term = float(objective(z, y, weight, z.new_full((), temperature)))
    return {
        "loss": metric_term + stage.anchor * float(anchor),
        "entropy": float(entropy),
        "score": float(score(probabilities_of(logits, task), y, weight)),
    }


@torch.no_grad()
def _look(job: _Job) -> tuple[float, ...]:
    """What `watch` says of the rows that are watched."""
    if job.watch is None or job.watch_rows is None:
        return ()
    rows = job.watch_rows
    logits = predict_logits(job.network, rows.x, amp=job.amp)
    return tuple(job.watch(*flat(logits, rows.y, rows.weight, job.task)).tolist())
