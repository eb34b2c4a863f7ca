"""One update of every network of a stack, and one look at the rows that judge it.

Everything that these read or write stays where it is, so that a step that was recorded on a GPU finds it again.
"""

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.func import vmap

from evalign._objective import Objective, cross_entropy
from evalign.confusion import Task
from evalign.steps import StepChoice
from evalign.storage.heap import release_memory
from evalign.training.batches import Rows, StackedBatches
from evalign.training.cuda_graph import Replay
from evalign.training.evaluation import Score, Term, Watch, flat, probabilities_of
from evalign.training.history import Controller, Epoch
from evalign.training.recipes import Recipe
from evalign.training.stacked_networks import StackedAdamW, StackedNetworks, padded
from evalign.training.step import weight_of_newest


class StackedSteps:
    """The loss of each network on its own rows: metric * term + anchor * cross-entropy, at its own temperature.

    `index` and `mask` (S, width) are the batch of the next step, `rate`, `decay` and `share` (of the updates to average
    over) what it does with the gradient. A validation leaves in `values` what each network's epoch was like: the mean
    training loss of `updates` steps, the loss, cross-entropy and hard score of its validation rows, then what is told
    of the rows that are watched.
    """

    def __init__(
        self,
        networks: StackedNetworks,
        rows: Rows,
        valid: Sequence[Tensor],
        *,
        term: Term,
        score: Score,
        task: Task,
        width: int,
        updates: int,
        averages: bool,
        watch: Watch | None = None,
        watched: Sequence[Tensor] | None = None,
    ) -> None:
        self.networks, self.rows, self.term, self.score, self.task = networks, rows, term, score, task
        self.updates, self.averages, self.watch = updates, averages, watch
        device, count = networks.device, networks.count
        self.adam = StackedAdamW(networks.parameters)
        self.valid = padded(valid, device)
        self.watched = None if watched is None else padded(watched, device)
        zeros = torch.zeros(count, dtype=rows.x.dtype, device=device)
        self.temperature, self.metric, self.anchor = zeros.clone(), zeros.clone(), zeros.clone()
        self.rate, self.decay, self.share = zeros[:, None].clone(), zeros[:, None].clone(), zeros[:, None].clone()
        self.index = torch.zeros(count, width, dtype=torch.long, device=device)
        self.mask = zeros.new_ones(count, width)
        self.loss_sum = zeros.clone()
        self.values = zeros.new_zeros(count, 4 if self.watched is None else 4 + self._look().shape[1])
        self.uses_metric = False

    @property
    def changed(self) -> list[Tensor]:
        """The tensors that a step or a validation writes to."""
        networks = self.networks
        return [*self.adam.state, networks.judged, *networks.buffers.values(), self.loss_sum, self.values]

    def step(self) -> None:
        for own in self.networks.groups:
            self._step(own)

    @torch.no_grad()
    def validate(self) -> None:
        index, mask = self.valid
        found = [self._losses(own, index[own], mask[own], None) for own in self.networks.groups]
        columns = [self.loss_sum / self.updates, *(torch.cat(parts) for parts in zip(*found, strict=True))]
        self.values[:, :4] = torch.stack(columns, 1)
        if self.watched is not None:
            self.values[:, 4:] = self._look()

    def _step(self, own: slice) -> None:
        parameters, judged = self.networks.parameters, self.networks.judged
        leaves = parameters.leaves(own)
        loss = self._losses(own, self.index[own], self.mask[own], leaves)[0]
        self.adam.step(own, parameters.gradient(loss.sum(), leaves), self.rate[own], self.decay[own])
        with torch.no_grad():
            self.loss_sum[own].add_(loss)
            if self.averages:
                newest = weight_of_newest(self.adam.steps[own], self.share[own])
                judged[own].lerp_(parameters.flat[own], newest.to(judged.dtype))

    def _losses(
        self, own: slice, index: Tensor, mask: Tensor, training: dict[str, Tensor] | None
    ) -> tuple[Tensor, ...]:
        """Loss, cross-entropy and, without parameters in `training`, hard score of these networks on their own rows."""
        y, weight = self.rows.y[index], self.rows.weight[index] * mask
        logits = self.networks.logits(own, index, training)
        of_one = partial(self._losses_of_one, judged=training is None)
        return vmap(of_one)(logits, y, weight, self.temperature[own], self.metric[own], self.anchor[own])

    def _losses_of_one(
        self,
        logits: Tensor,
        y: Tensor,
        weight: Tensor,
        temperature: Tensor,
        metric: Tensor,
        anchor: Tensor,
        *,
        judged: bool,
    ) -> tuple[Tensor, ...]:
        logits, y, weight = flat(logits, y, weight, self.task)
        if self.task == "multiclass" and logits.dim() == 3:  # an ensemble in training
            members = vmap(partial(self._losses_of_one, judged=judged), in_dims=(0, None, None, None, None, None))
            return tuple(v.mean() for v in members(logits, y, weight, temperature, metric, anchor))
        entropy = cross_entropy(logits, y, weight, self.task)
        loss = anchor * entropy
        if self.uses_metric:
            loss = loss + metric * self.term(logits, y, weight, temperature)
        if not judged:
            return loss, entropy
        return loss, entropy, self.score(probabilities_of(logits, self.task), y, weight).to(loss.dtype)

    @torch.no_grad()
    def _look(self) -> Tensor:
        """What `watch` says of the rows that are watched, (S, k)."""
        assert self.watched is not None
        watch, (index, mask) = self.watch, self.watched
        assert watch is not None

        def one(logits: Tensor, y: Tensor, weight: Tensor) -> Tensor:
            return watch(*flat(logits, y, weight, self.task))

        def of(own: slice) -> Tensor:
            places = index[own]
            logits = self.networks.logits(own, places, None)
            return vmap(one)(logits, self.rows.y[places], self.rows.weight[places] * mask[own])

        return torch.cat([of(own) for own in self.networks.groups])


@dataclass(frozen=True)
class Trial:
    """What is a trial's own: rows of the table, recipe (learning rates, cooling), seed and dropout."""

    train: Tensor
    valid: Tensor
    recipe: Recipe
    seed: int = 0
    dropout: float | None = None  # None keeps the network's
    watch: Tensor | None = None  # rows whose numbers are kept of every epoch; no choice is made by them


@dataclass
class TrialResult:
    state: dict[str, Tensor]
    history: list[Epoch] = field(default_factory=list)


def train_trials(
    make_network: Callable[[], nn.Module],
    rows: Rows,
    trials: Sequence[Trial],
    objective: Objective | Term,
    score: Score,
    *,
    batch_size: int,
    task: Task = "multiclass",
    stratified: bool = False,
    oversample: bool = False,
    watch: Watch | None = None,
    on_epoch: Callable[[int, Epoch], None] | None = None,
    catch_interrupt: bool = False,
) -> list[TrialResult]:
    """Train every trial by its recipe; returns the best weights and the history of each.

    `make_network` is called once per trial after seeding with the trial's seed, as for a network of its own; with
    `task` "binary" it has one output for every label of a row, which may have several, as the pairs of a graph.
    `objective` may be any other loss of the same form. On a GPU a step is recorded once and replayed, and one generator
    draws the dropout of all trials. With `catch_interrupt` Ctrl-C ends training and the best so far are returned.
    """
    stack = _Stack(make_network, rows, trials, objective, score, batch_size, task, stratified, oversample, watch)
    with contextlib.suppress(*([KeyboardInterrupt] if catch_interrupt else [])):
        while not all(stack.done):
            for s, epoch in stack.epoch():
                if on_epoch is not None:
                    on_epoch(s, epoch)
    return [TrialResult(stack.networks.best_of(s), stack.histories[s]) for s in range(len(trials))]


def _term(objective: Objective | Term, trials: Sequence[Trial]) -> Term:
    """The objective without its anchor, which is a trial's own, and with the one step that all trials share."""
    steps = {stage.step for trial in trials for stage in trial.recipe.stages if stage.metric}
    if not trials or len(steps) > 1:
        raise ValueError(f"at least one trial is needed, and one step for all, got {len(trials)} with {sorted(steps)}")
    if any(stage.offset for trial in trials for stage in trial.recipe.stages):
        raise ValueError("stacked trials have no class offsets; train them one by one, or without offset")
    if not isinstance(objective, Objective):
        return objective
    step = next(iter(steps), objective.step.step)
    if step != objective.step.step and not callable(objective.step.step):  # a function is the objective's own
        objective = replace(objective, step=StepChoice(step))
    return replace(objective, anchor=0.0, backend="eager")  # the fused form does not vmap


class _Stack:
    """The trials on their way: the stage that each is in, what it has been through, and whether it is done."""

    def __init__(
        self,
        make_network: Callable[[], nn.Module],
        rows: Rows,
        trials: Sequence[Trial],
        objective: Objective | Term,
        score: Score,
        batch_size: int,
        task: Task,
        stratified: bool,
        oversample: bool,
        watch: Watch | None,
    ) -> None:
        trials = [replace(trial, recipe=trial.recipe.for_rows(len(trial.train), batch_size)) for trial in trials]
        term = _term(objective, trials)
        if rows.y.dim() > 1 and (stratified or oversample):
            raise ValueError("rows of many labels, such as graphs, have no class to be drawn by; leave that option off")
        device, seeds = rows.x.device, [trial.seed for trial in trials]
        averages = any(stage.average for trial in trials for stage in trial.recipe.stages)
        self.batches = StackedBatches(
            [trial.train for trial in trials], batch_size, seeds=seeds,
            labels=[rows.y[t.train.to(device)] if stratified or oversample else None for t in trials],
            dtype=rows.x.dtype, oversample=oversample, device=device,
        )  # fmt: skip
        self.networks = StackedNetworks(
            make_network, rows.x, seeds=seeds, dropouts=[trial.dropout for trial in trials],
            batch_lengths=self.batches.longest, averages=averages,
        )  # fmt: skip
        release_memory()  # of the networks that were made for the stack
        watched = [trial.watch for trial in trials if trial.watch is not None]
        self.steps = StackedSteps(
            self.networks, rows, [trial.valid for trial in trials], term=term, score=score, task=task,
            width=self.batches.width, updates=self.batches.count, averages=averages, watch=watch,
            watched=watched if watch is not None and len(watched) == len(trials) else None,
        )  # fmt: skip
        changed = self.steps.changed
        self.run_step, self.run_validation = (
            {uses_metric: Replay(run, changed, device, noises) for uses_metric in (False, True)}
            for run, noises in ((self.steps.step, self.networks.noises), (self.steps.validate, []))
        )
        self.trials = trials
        self.stages = [0] * len(trials)
        self.controllers = [Controller(trial.recipe.stages[0]) for trial in trials]
        self.done = [False] * len(trials)
        self.histories: list[list[Epoch]] = [[] for _ in trials]

    def epoch(self) -> list[tuple[int, Epoch]]:
        """One epoch of every trial that is not done; its seconds are those of all of them."""
        started, steps = time.perf_counter(), self.steps
        stages = [c.stage for c in self.controllers]
        rates = [0.0 if done else c.learning_rate for c, done in zip(self.controllers, self.done, strict=True)]
        uses_metric = any(stage.metric and not done for stage, done in zip(stages, self.done, strict=True))
        for tensor, numbers in (
            (steps.temperature, [c.temperature for c in self.controllers]),
            (steps.metric, [float(stage.metric) for stage in stages]),
            (steps.anchor, [stage.anchor for stage in stages]),
            (steps.rate, rates),
            (steps.decay, [stage.weight_decay for stage in stages]),
            (steps.share, [stage.average for stage in stages]),
        ):
            tensor.copy_(torch.tensor(numbers, dtype=tensor.dtype).view_as(tensor))
        steps.uses_metric = uses_metric
        steps.loss_sum.zero_()
        for index, mask in self.batches.epoch():
            steps.index.copy_(index)
            steps.mask.copy_(mask)
            self.run_step[uses_metric]()
        self.run_validation[uses_metric]()
        values: list[list[float]] = steps.values.tolist()
        open_trials = [s for s, done in enumerate(self.done) if not done]
        seconds = time.perf_counter() - started
        records = [self._record(s, seconds, rates[s], *values[s]) for s in open_trials]
        self.networks.keep([s for s, epoch in records if epoch.best])
        for s in open_trials:
            if self.controllers[s].finished:
                self._next_stage(s)
        return records

    def _record(
        self,
        s: int,
        seconds: float,
        rate: float,
        train_loss: float,
        loss: float,
        entropy: float,
        score: float,
        *watched: float,
    ) -> tuple[int, Epoch]:
        controller, history = self.controllers[s], self.histories[s]
        temperature = controller.temperature
        best = controller.step(loss=loss, entropy=entropy, score=score)
        epoch = Epoch(
            len(history) + 1, controller.stage.name, temperature, rate, train_loss, loss, entropy, score, best,
            seconds, watched,
        )  # fmt: skip
        history.append(epoch)
        return s, epoch

    def _next_stage(self, s: int) -> None:
        self.networks.restore(s)
        self.steps.adam.restart(s)
        self.stages[s] += 1
        stages = self.trials[s].recipe.stages
        self.done[s] = self.stages[s] == len(stages)
        if not self.done[s]:
            self.controllers[s] = Controller(stages[self.stages[s]])
