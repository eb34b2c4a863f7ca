"""One network in training on rows in memory: optimiser, average of the weights, loss of a batch, step, `train`."""

import contextlib
import copy
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from evalign._objective import Objective, cross_entropy
from evalign.confusion import Task
from evalign.training.batches import Batches, Rows
from evalign.training.checkpoint import Checkpoint, identify
from evalign.training.evaluation import (
    Score,
    Term,
    Watch,
    estimate_offset,
    flat,
    mean_over_members,
    predict_logits,
    validate,
    with_offset,
)
from evalign.training.loop import Epoch, OnEpoch, Replay, Run, Values, run_stages
from evalign.training.recipes import Recipe, Stage


def weight_of_newest(updates: Tensor, share: float | Tensor) -> Tensor:
    """Weight of the newest of t `updates` in an average over about the last `share` of them: 1 / max(1, share x t).

    The horizon grows with the number of updates, so that no length has to be known beforehand: after t updates, update
    k still weighs about (k / t)^(1 / share - 1) (polynomial decay, Shamir and Zhang 2013). Share 1 is the plain mean,
    share 0 the last update alone.

    >>> weight_of_newest(torch.tensor([1.0, 10.0, 40.0]), 0.1)
    tensor([1.0000, 1.0000, 0.2500])
    """
    return (updates * share).clamp_min(1).reciprocal()


class WeightAverage:
    """The average of a network's parameters over about the last `share` of a stage's updates so far.

    a <- a + (w - a) / max(1, share x t) after update t. Buffers are not averaged: those of batch norm are averages
    already. Everything stays on the device, so that a recorded step can include it.
    """

    def __init__(self, network: nn.Module, share: float) -> None:
        self.share = share
        self.parameters = [parameter.detach() for parameter in network.parameters()]
        self.values = [parameter.clone() for parameter in self.parameters]
        first = self.values[0]
        self.updates = torch.zeros((), dtype=torch.promote_types(first.dtype, torch.float32), device=first.device)

    @torch.no_grad()
    def update(self) -> None:
        """Take in the parameters after an update."""
        self.updates += 1
        newest = weight_of_newest(self.updates, self.share).to(self.values[0].dtype)
        torch._foreach_lerp_(self.values, self.parameters, [newest] * len(self.values))

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Give the network the averaged parameters inside the context, and its own again afterwards."""
        own = [parameter.clone() for parameter in self.parameters]
        torch._foreach_copy_(self.parameters, self.values)
        try:
            yield
        finally:
            torch._foreach_copy_(self.parameters, own)

    @property
    def state(self) -> list[Tensor]:
        """The tensors that an update changes."""
        return [self.updates, *self.values]


def adamw(network: nn.Module, stage: Stage, *, recorded: bool = False) -> torch.optim.AdamW:
    """The optimiser of a stage; one that can be recorded keeps its learning rate on the device."""
    parameters = list(network.parameters())
    device = parameters[0].device
    captured = recorded and device.type == "cuda"
    rate: float | Tensor = stage.learning_rate
    if captured:
        rate = torch.tensor(stage.learning_rate, device=device)
    # Fused: one pass over the weights, a third of the default's time on a CPU.
    return torch.optim.AdamW(parameters, lr=rate, weight_decay=stage.weight_decay, fused=True, capturable=captured)


def at_stage(objective: Objective | Term, stage: Stage) -> Objective | Term:
    """The objective with the anchor and the step of a stage; any other loss term as it is."""
    if not isinstance(objective, Objective):
        return objective
    own = objective.step.step  # a stage does not replace a function given by the user
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

    def loss_of(z: Tensor) -> Tensor:
        if not stage.metric:
            return stage.anchor * cross_entropy(z, y, weight, task)
        if isinstance(objective, Objective):
            return objective(z, y, weight, temperature)
        loss = objective(z, y, weight, temperature if isinstance(temperature, Tensor) else z.new_full((), temperature))
        return loss + stage.anchor * cross_entropy(z, y, weight, task) if stage.anchor else loss

    return mean_over_members(loss_of, with_offset(z, offset, task), task)


class RecordedStep:
    """An update on the rows of an index of fixed length: recorded on a GPU at the first call, run directly on a CPU.

    `temperature` and `learning_rate` are tensors to write to; `total` adds up the losses of all steps. `average` is
    updated by the optimiser's steps.
    """

    def __init__(
        self,
        network: nn.Module,
        rows: Rows,
        stage: Stage,
        objective: Objective | Term,
        batch_size: int,
        *,
        amp: bool = False,
        task: Task = "multiclass",
        offset: Tensor | None = None,
        optimiser: torch.optim.AdamW | None = None,
        average: WeightAverage | None = None,
    ) -> None:
        device = rows.x.device
        self.network, self.rows, self.stage, self.objective = network, rows, stage, objective
        self.amp, self.task, self.offset = amp, task, offset
        self.optimiser = adamw(network, stage, recorded=True) if optimiser is None else optimiser
        self.index = torch.zeros(batch_size, dtype=torch.long, device=device)
        self.captured = device.type == "cuda"
        exact = torch.float32 if self.captured else torch.float64  # kernels read float32, Python double
        self.temperature = torch.tensor(stage.temperature, dtype=exact, device=device)
        self.learning_rate = torch.tensor(stage.learning_rate, dtype=exact, device=device)
        if self.captured:
            self.learning_rate = self.optimiser.param_groups[0]["lr"]
        self.total = torch.zeros((), dtype=torch.float64, device=device)
        changed: list[Tensor] = [self.total, *network.parameters(), *network.buffers()]
        changed += average.state if average is not None else []
        for parameter in network.parameters():  # made now: recording must find them, and put them back
            state = self.optimiser.state[parameter]
            if not state:
                averages = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
                state |= {"step": torch.zeros((), device=device), **averages}
            changed += state.values()
        network.train()
        # torch registers the device's own generator, which shifts and mirrors pictures, with every recording.
        self.replay = Replay(self._step, changed, device, [])

    def __call__(self, index: Tensor) -> None:
        if len(index) != len(self.index):
            raise ValueError(f"a recorded step takes {len(self.index)} rows each time, got {len(index)}")
        self.index.copy_(index)
        self.replay()

    def _step(self) -> None:
        temperature: float | Tensor = self.temperature
        if not self.captured:
            temperature = float(self.temperature)
            for group in self.optimiser.param_groups:
                group["lr"] = float(self.learning_rate)
        loss = batch_loss(
            self.network, self.rows[self.index], self.stage, self.objective, temperature, self.amp, task=self.task,
            offset=self.offset,
        )  # fmt: skip
        self.optimiser.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimiser.step()
        self.total += loss.detach()


class InMemory:
    """A `training.loop.Source` of one network on rows in memory: batches, optimiser, averaged and best weights."""

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
        recorded: bool = False,
        watch: Watch | None = None,
        watch_rows: Rows | None = None,
    ) -> None:
        self.network, self.train, self.valid, self.objective, self.task = network, train, valid, objective, task
        self.score, self.batches, self.amp, self.recorded = score, batches, amp, recorded
        self.watch, self.watch_rows = watch, watch_rows
        self.offset: Tensor | None = None
        self.average: WeightAverage | None = None
        self.recorded_step: RecordedStep | None = None
        self.keep([0])

    def begin_stage(self, number: int, run: Run) -> None:
        stage = run.stage
        self.optimiser = adamw(self.network, stage, recorded=self.recorded)
        self.average = WeightAverage(self.network, stage.average) if stage.average else None
        self.recorded_step = None
        if self.average is not None:
            update = self.average.update
            self.optimiser.register_step_post_hook(lambda *_: update())

    def epoch(self, runs: Sequence[Run]) -> list[Values]:
        (run,) = runs
        controller, stage = run.controller, run.stage
        objective, temperature = at_stage(self.objective, stage), controller.temperature
        if stage.offset and not controller.epochs:
            self.offset = self.estimate_offset(objective, stage)
        offset = self.offset if stage.offset else None
        self.network.train()
        train_loss = float(self.run_updates(run, objective, offset))
        with self._averaged():
            values = self.validate(stage, objective, temperature, offset)
            return [Values(train_loss, values["loss"], values["entropy"], values["score"], self._watched())]

    def keep(self, numbers: Sequence[int]) -> None:
        if numbers:
            with self._averaged():
                self.best = copy.deepcopy(self.network.state_dict())

    def restore(self, number: int) -> None:
        self.network.load_state_dict(self.best)

    # -- what sources of other data replace ---------------------------------------------------------------------

    def run_updates(self, run: Run, objective: Objective | Term, offset: Tensor | None) -> Tensor:
        """Updates of one epoch; returns the mean loss. Nothing here reads a value, so a GPU is never waited for."""
        if self.recorded:
            return self._recorded_updates(run, objective, offset)
        order = self.batches.order().to(self.train.y.device)
        rows = (self.train[index] for index in order.tensor_split(self.batches.count))
        return self.update_on(rows, run, objective, offset)

    def loss(
        self, batch: Rows, stage: Stage, objective: Objective | Term, temperature: float, offset: Tensor | None
    ) -> Tensor:
        return batch_loss(self.network, batch, stage, objective, temperature, self.amp, task=self.task, offset=offset)

    def validate(
        self, stage: Stage, objective: Objective | Term, temperature: float, offset: Tensor | None
    ) -> dict[str, float]:
        return validate(
            self.network, self.valid, stage, objective, self.score, temperature, self.amp, task=self.task, offset=offset
        )

    def estimate_offset(self, objective: Objective | Term, stage: Stage) -> Tensor:
        return estimate_offset(self.network, self.valid, objective, stage, self.offset, self.amp)

    def update_on(
        self, batches: Iterable[Rows], run: Run, objective: Objective | Term, offset: Tensor | None
    ) -> Tensor:
        """One update per batch; returns the mean loss."""
        temperature = run.controller.temperature
        for group in self.optimiser.param_groups:
            group["lr"] = run.controller.learning_rate
        losses = []
        for batch in batches:
            loss = self.loss(batch, run.stage, objective, temperature, offset)
            self.optimiser.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
            self.optimiser.step()
            losses.append(loss.detach())
        return torch.stack(losses).mean()

    # -- inside -------------------------------------------------------------------------------------------------

    def _recorded_updates(self, run: Run, objective: Objective | Term, offset: Tensor | None) -> Tensor:
        batches, size = self.batches, len(self.train) // self.batches.count
        if self.recorded_step is None:
            self.recorded_step = RecordedStep(
                self.network, self.train, run.stage, objective, size, amp=self.amp, task=self.task, offset=offset,
                optimiser=self.optimiser, average=self.average,
            )  # fmt: skip
        step = self.recorded_step
        step.temperature.fill_(run.controller.temperature)
        step.learning_rate.fill_(run.controller.learning_rate)
        step.total.zero_()
        order = batches.order()[: size * batches.count].to(self.train.y.device)
        for index in torch.split(order, size):
            step(index)
        return step.total / batches.count

    def _averaged(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self.average is None else self.average.in_place()

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
