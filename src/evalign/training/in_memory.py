"""Train one network on rows in memory: optimiser, loss of a batch, validation, `train`."""

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from evalign.confusion import Task
from evalign.objective import Objective, cross_entropy
from evalign.training.batches import Batches, Rows, Score, Term, Watch, flat, predict_logits, probabilities_of
from evalign.training.checkpoint import Checkpoint, identify
from evalign.training.loop import Epoch, OnEpoch, Run, Values, run_stages
from evalign.training.offsets import estimate_offset, with_offset
from evalign.training.recipes import Recipe, Stage


def adamw(network: nn.Module, stage: Stage, **options: Any) -> torch.optim.AdamW:
    """The optimiser of a stage; `options` are AdamW's."""
    # Fused: one pass over the weights, a third of the default's time on a CPU.
    options = {"lr": stage.learning_rate, "weight_decay": stage.weight_decay, "fused": True, **options}
    return torch.optim.AdamW(network.parameters(), **options)


def at_stage(objective: Objective | Term, stage: Stage) -> Objective | Term:
    """The objective with the anchor and the step of a stage; any other loss term unchanged."""
    if not isinstance(objective, Objective):
        return objective
    own = objective.step.step  # a stage does not replace a user's function
    return replace(
        objective, anchor=stage.anchor, step=replace(objective.step, step=own if callable(own) else stage.step)
    )


class Phase(NamedTuple):
    """What an epoch trains on: its stage, the objective at that stage, the temperature, and class offsets."""

    stage: Stage
    objective: Objective | Term
    temperature: float | Tensor
    offset: Tensor | None = None

    def task(self, otherwise: Task) -> Task:
        return self.objective.task if isinstance(self.objective, Objective) else otherwise


def batch_loss(
    network: nn.Module, batch: Rows, phase: Phase, amp: bool = False, *, task: Task = "multiclass"
) -> Tensor:
    """1 - soft metric + anchor x cross-entropy of one batch, in float32 for any dtype of the network."""
    stage, objective, temperature, offset = phase
    with torch.autocast(batch.x.device.type, dtype=torch.bfloat16, enabled=amp):
        logits = network(batch.x)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    task = phase.task(task)
    z, y, weight = flat(logits, batch.y, batch.weight, task)

    def loss_of(z: Tensor) -> Tensor:
        if not stage.metric:
            return stage.anchor * cross_entropy(z, y, weight, task)
        if isinstance(objective, Objective):
            return objective(z, y, weight, temperature)
        loss = objective(z, y, weight, temperature if isinstance(temperature, Tensor) else z.new_full((), temperature))
        return loss + stage.anchor * cross_entropy(z, y, weight, task) if stage.anchor else loss

    return mean_over_members(loss_of, with_offset(z, offset, task), task)


@torch.no_grad()
def validate(
    network: nn.Module, rows: Rows, phase: Phase, score: Score, amp: bool = False, *, task: Task = "multiclass"
) -> dict[str, float]:
    """Validation loss at this temperature (with the offsets of training), cross-entropy and hard score."""
    stage, objective, temperature, offset = phase
    task = phase.task(task)
    logits, y, weight = flat(predict_logits(network, rows.x, amp=amp), rows.y, rows.weight, task)
    entropy = cross_entropy(logits, y, weight, task)
    z = with_offset(logits, offset, task)
    anchor = entropy if offset is None else cross_entropy(z, y, weight, task)
    metric_term = 0.0
    if stage.metric and isinstance(objective, Objective):
        metric_term = float(objective.metric_term(objective.counts(z, y, weight, temperature)[0]))
    elif stage.metric and not isinstance(objective, Objective):
        metric_term = float(objective(z, y, weight, z.new_full((), float(temperature))))
    return {
        "loss": metric_term + stage.anchor * float(anchor),
        "entropy": float(entropy),
        "score": float(score(probabilities_of(logits, task), y, weight)),
    }


def mean_over_members(loss: Callable[[Tensor], Tensor], logits: Tensor, task: Task) -> Tensor:
    """The loss of logits; for an ensemble (members, n, C), the mean of its members' losses.

    >>> mean_over_members(lambda z: z.sum(), torch.ones(3, 2, 5), "multiclass")
    tensor(10.)
    """
    if task != "multiclass" or logits.dim() < 3:
        return loss(logits)
    return torch.stack([loss(own) for own in logits]).mean()


class InMemory:
    """A `training.loop.Source` of one network on rows in memory: batches, optimiser, best weights."""

    def __init__(
        self,
        network: nn.Module,
        train: Rows,
        valid: Rows,
        objective: Objective | Term,
        task: Task,
        score: Score,
        batches: Batches,
        *,
        amp: bool = False,
        watch: Watch | None = None,
        watch_rows: Rows | None = None,
    ) -> None:
        self.network, self.train, self.valid, self.objective, self.task = network, train, valid, objective, task
        self.score, self.batches, self.amp = score, batches, amp
        self.watch, self.watch_rows = watch, watch_rows
        self.offset: Tensor | None = None
        self.keep([0])

    def run(
        self,
        stages: tuple[Stage, ...],
        *,
        checkpoint: Checkpoint | None = None,
        saves: bool = True,
        on_epoch: OnEpoch | None = None,
        catch_interrupt: bool = True,
    ) -> list[Epoch]:
        """Train by the stages, resuming from a checkpoint if there is one; the network ends with its best weights."""
        run = Run(stages)
        self.begin_stage(0, run)
        if checkpoint is not None:
            checkpoint.restore(self, run)
        run_stages(
            self, [run], catch_interrupt=catch_interrupt,
            save=None if checkpoint is None or not saves else lambda: checkpoint.save(self, run),
            on_epoch=None if on_epoch is None else lambda _, epoch: on_epoch(epoch),
        )  # fmt: skip
        return run.history

    def begin_stage(self, number: int, run: Run) -> None:
        self.optimiser = adamw(self.network, run.stage)

    def epoch(self, runs: Sequence[Run]) -> list[Values]:
        (run,) = runs
        stage, objective = run.stage, at_stage(self.objective, run.stage)
        if stage.offset and not run.controller.epochs:
            self.offset = self.estimate_offset(objective, stage)
        phase = Phase(stage, objective, run.controller.temperature, self.offset if stage.offset else None)
        self.network.train()
        train_loss = float(self.run_updates(run, phase))
        values = self.validate(phase)
        return [Values(train_loss, **values, watched=self._watched())]

    def keep(self, numbers: Sequence[int]) -> None:
        if numbers:
            self.best = copy.deepcopy(self.network.state_dict())

    def restore(self, number: int) -> None:
        self.network.load_state_dict(self.best)

    # -- overridden by sources of other data ---------------------------------------------------------------------

    def run_updates(self, run: Run, phase: Phase) -> Tensor:
        """Updates of one epoch; returns the mean loss. It reads no values, so it never waits for a GPU."""
        order = self.batches.order().to(self.train.y.device)
        return self.update_on((self.train[index] for index in order.tensor_split(self.batches.count)), run, phase)

    def loss(self, batch: Rows, phase: Phase) -> Tensor:
        return batch_loss(self.network, batch, phase, self.amp, task=self.task)

    def validate(self, phase: Phase) -> dict[str, float]:
        return validate(self.network, self.valid, phase, self.score, self.amp, task=self.task)

    def estimate_offset(self, objective: Objective | Term, stage: Stage) -> Tensor:
        return estimate_offset(self.network, self.valid, objective, stage, self.offset, self.amp)

    def update_on(self, batches: Iterable[Rows], run: Run, phase: Phase) -> Tensor:
        """One update per batch; returns the mean loss."""
        for group in self.optimiser.param_groups:
            group["lr"] = run.controller.learning_rate
        losses = []
        for batch in batches:
            loss = self.loss(batch, phase)
            self.optimiser.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
            self.optimiser.step()
            losses.append(loss.detach())
        return torch.stack(losses).mean()

    @torch.no_grad()
    def _watched(self) -> tuple[float, ...]:
        if self.watch is None or self.watch_rows is None:
            return ()
        rows = self.watch_rows
        logits = predict_logits(self.network, rows.x, amp=self.amp)
        return tuple(self.watch(*flat(logits, rows.y, rows.weight, self.task)).tolist())


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
    amp: bool = False,
    source: type[InMemory] = InMemory,
    watch: Watch | None = None,
    watch_rows: Rows | None = None,
    checkpoint: Path | None = None,
    checkpoint_every: int = 1,
    on_epoch: OnEpoch | None = None,
    catch_interrupt: bool = True,
) -> list[Epoch]:
    """Train `network` on rows in memory by the stages of `recipe` and leave it with its best weights.

    `objective` has the metric; a stage sets its anchor and step. Any other loss term needs its `task`. `score` is the
    hard metric on validation rows; `watch` records numbers on other rows, which influence no choice. Binary tasks have
    logits (M,), (M, 1) or (F, E), one for each label. `source` is the kind of updates, plain ones by default.

    With `checkpoint` everything is written there after every `checkpoint_every` epochs, and training resumes
    from it if it exists. On a CPU the result depends only on the seed, interrupted or not.
    """
    stages = recipe.for_rows(len(train_rows), batch_size).stages
    trained = source(
        network, train_rows, valid_rows, objective, objective.task if isinstance(objective, Objective) else task, score,
        Batches(len(train_rows), batch_size, seed=seed),
        amp=amp, watch=watch, watch_rows=watch_rows,
    )  # fmt: skip
    file = None
    if checkpoint is not None:
        identity = {
            **identify(stages, seed, batch_size, network), "rows": [len(train_rows), len(valid_rows)],
            "source": source.__name__,
        }  # fmt: skip
        file = Checkpoint(checkpoint, identity, checkpoint_every)
    with torch.random.fork_rng([train_rows.x.device] if train_rows.x.is_cuda else []):
        torch.manual_seed(seed)  # for dropout; the caller's random state is unchanged
        return trained.run(stages, checkpoint=file, on_epoch=on_epoch, catch_interrupt=catch_interrupt)
