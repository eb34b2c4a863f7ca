"""Many independent trials trained as one stacked network: on a GPU, ten cost about as much as one.

A trial has its own seed, rows, learning rates, dropout and cooling, its own temperature and early stopping.
Parameters carry a leading dimension S; `torch.func.vmap` runs any `nn.Module` over it. A trial that has
finished is carried along with learning rate 0. The result equals training the trials one by one.
"""

import contextlib
import copy
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap

from evalign.confusion import Task
from evalign.objective import Objective, cross_entropy
from evalign.steps import StepChoice
from evalign.training.average import weight_of_newest
from evalign.training.batches import Batches
from evalign.training.loop import Rows, Score, rows_at_once
from evalign.training.outputs import Term, Watch, flat, probabilities_of
from evalign.training.progress import Controller, Epoch
from evalign.training.recipes import Recipe
from evalign.training.replay import RECORDING, Replay
from evalign.training.stacking import FlatParameters, StackedAdamW, dropout_widths, padded, with_shared_dropout


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
    return [TrialResult(stack.weights_of(s), stack.histories[s]) for s in range(len(trials))]


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
        self.term = _term(objective, trials)
        if rows.y.dim() > 1 and (stratified or oversample):
            raise ValueError("rows of many labels, such as graphs, have no class to be drawn by; leave that option off")
        self.rows, self.trials, self.score, self.task, self.watch = rows, trials, score, task, watch
        self.device, count = rows.x.device, len(trials)
        # A GPU has time left for all trials at once. A CPU has none, and one after the other takes a share of the room.
        self.groups = [slice(None)] if self.device.type != "cpu" else [slice(s, s + 1) for s in range(count)]
        networks = []
        for trial in trials:
            with RECORDING, torch.random.fork_rng([]):
                torch.default_generator.manual_seed(trial.seed)  # not the GPU's, which a recording may hold
                network = with_shared_dropout(make_network(), trial.dropout)
            networks.append(network.to(self.device))
        params, buffers = stack_module_state(networks)
        self.parameters = FlatParameters(params)
        # What is judged and kept: an average of the weights, or the weights themselves where no stage averages.
        self.averages = any(stage.average for trial in trials for stage in trial.recipe.stages)
        self.judged = self.parameters.flat.clone() if self.averages else self.parameters.flat
        self.judged_views = self.parameters.views_of(self.judged)
        self.buffers: dict[str, Tensor] = {k: v.detach() for k, v in buffers.items() if not k.endswith("noise")}
        self.skeleton = copy.deepcopy(networks[0]).to("meta")
        self.widths = dropout_widths(networks[0], rows.x[:2])
        self.best = {name: kept.clone() for name, kept in self._kept().items()}
        self.adam = StackedAdamW(self.parameters)
        labels = [rows.y[t.train.to(self.device)] if stratified or oversample else None for t in trials]
        self.batches = [
            Batches(len(t.train), batch_size, seed=t.seed, labels=own, oversample=oversample, device=self.device)
            for t, own in zip(trials, labels, strict=True)
        ]
        if len({batches.count for batches in self.batches}) > 1:
            sizes = sorted({len(trial.train) for trial in trials})
            raise ValueError(f"all trials must have as many batches an epoch, got {sizes} rows; train them apart")
        short = torch.long if self.device.type != "cpu" or len(rows) >= 2**31 else torch.int32  # half the room
        self.train_index = [t.train.to(self.device, short) for t in trials]
        self.valid = padded([t.valid for t in trials], self.device)
        watched = [t.watch for t in trials if t.watch is not None]
        self.watched = padded(watched, self.device) if watch is not None and len(watched) == count else None
        places = [batches.places() for batches in self.batches]
        self.longest = [place.shape[1] for place in places]
        fill = max(self.longest)
        places = [nn.functional.pad(p, (0, fill - p.shape[1]), value=-1) for p in places]
        self.masks = torch.stack([place >= 0 for place in places], 1).to(self.device, rows.x.dtype)
        self.places = [place.clamp_min(0).to(self.device, short) for place in places]
        self.index = torch.zeros(count, fill, dtype=torch.long, device=self.device)
        shared = self.device.type == "cuda" and count > 1
        self.noises = [torch.Generator(self.device).manual_seed(t.seed) for t in trials[: 1 if shared else count]]
        # Everything a step reads or writes stays where it is, so that a recorded step finds it again.
        zeros = torch.zeros(count, dtype=rows.x.dtype, device=self.device)
        self.temperature, self.metric, self.anchor = zeros.clone(), zeros.clone(), zeros.clone()
        self.rate, self.decay, self.share = zeros[:, None].clone(), zeros[:, None].clone(), zeros[:, None].clone()
        self.loss_sum = zeros.clone()
        self.mask = self.masks[0].clone()
        self.values = zeros.new_zeros(count, 4 if self.watched is None else 4 + self._watch_width())
        self.uses_metric = False
        changed = [*self.adam.state, self.judged, *self.buffers.values(), self.loss_sum, self.values]
        self.steps, self.checks = (
            {m: Replay(step, changed, self.device, own) for m in (False, True)}
            for step, own in ((self._step, self.noises), (self._validate, []))
        )
        self.stages = [0] * count
        self.controllers = [Controller(t.recipe.stages[0]) for t in trials]
        self.done = [False] * count
        self.histories: list[list[Epoch]] = [[] for _ in trials]

    def epoch(self) -> list[tuple[int, Epoch]]:
        """One epoch of every trial that is not done; its seconds are those of all of them."""
        started = time.perf_counter()
        stages = [c.stage for c in self.controllers]
        rates = [0.0 if done else c.learning_rate for c, done in zip(self.controllers, self.done, strict=True)]
        self.uses_metric = any(stage.metric and not done for stage, done in zip(stages, self.done, strict=True))
        for tensor, numbers in (
            (self.temperature, [c.temperature for c in self.controllers]),
            (self.metric, [float(stage.metric) for stage in stages]),
            (self.anchor, [stage.anchor for stage in stages]),
            (self.rate, rates),
            (self.decay, [stage.weight_decay for stage in stages]),
            (self.share, [stage.average for stage in stages]),
        ):
            tensor.copy_(torch.tensor(numbers, dtype=tensor.dtype).view_as(tensor))
        self.loss_sum.zero_()
        for index, mask in zip(self._epoch_rows(), self.masks, strict=True):
            self.index.copy_(index)
            self.mask.copy_(mask)
            self.steps[self.uses_metric]()
        self.checks[self.uses_metric]()
        values: list[list[float]] = self.values.tolist()
        open_trials = [s for s, done in enumerate(self.done) if not done]
        seconds = time.perf_counter() - started
        records = [self._record(s, seconds, rates[s], *values[s]) for s in open_trials]
        self._keep([s for s, epoch in records if epoch.best])
        for s in open_trials:
            if self.controllers[s].finished:
                self._next_stage(s)
        return records

    def _epoch_rows(self) -> Iterable[Tensor]:
        """Rows (S, longest batch) of every batch of one epoch; on a CPU one batch after the other, for want of room."""
        orders = [train[batches.order()] for train, batches in zip(self.train_index, self.batches, strict=True)]
        if self.device.type != "cpu":
            own = [order[place] for order, place in zip(orders, self.places, strict=True)]
            return torch.stack(own, 1)
        return (
            torch.stack([order[place] for order, place in zip(orders, places, strict=True)])
            for places in zip(*self.places, strict=True)
        )

    def _step(self) -> None:
        found = [self._loss_and_gradient(own) for own in self.groups]
        loss, gradient = (torch.cat(parts) for parts in zip(*found, strict=True))
        self.adam.step(gradient, self.rate, self.decay)
        if self.averages:
            with torch.no_grad():
                newest = weight_of_newest(self.adam.steps, self.share)
                self.judged.lerp_(self.parameters.flat, newest.to(self.judged.dtype))
        self.loss_sum += loss

    def _loss_and_gradient(self, own: slice) -> tuple[Tensor, Tensor]:
        leaves = self.parameters.leaves(own)
        loss = self._losses(own, self.index[own], self.mask[own], leaves)[0]
        return loss.detach(), self.parameters.gradient(loss.sum(), leaves)

    @torch.no_grad()
    def _validate(self) -> None:
        index, mask = self.valid
        found = [self._losses(own, index[own], mask[own], None) for own in self.groups]
        columns = [self.loss_sum / len(self.masks), *(torch.cat(parts) for parts in zip(*found, strict=True))]
        self.values[:, :4] = torch.stack(columns, 1)
        if self.watched is not None:
            self.values[:, 4:] = self._look()

    def _losses(
        self, own: slice, index: Tensor, mask: Tensor, training: dict[str, Tensor] | None
    ) -> tuple[Tensor, ...]:
        """Loss, cross-entropy and, without parameters in `training`, hard score of these trials on their own rows."""

        def one(logits, y, weight, temperature, metric, anchor):  # type: ignore[no-untyped-def]
            logits, y, weight = flat(logits, y, weight, self.task)
            if self.task == "multiclass" and logits.dim() == 3:  # an ensemble in training
                members = vmap(one, in_dims=(0, None, None, None, None, None))
                return tuple(v.mean() for v in members(logits, y, weight, temperature, metric, anchor))
            entropy = cross_entropy(logits, y, weight, self.task)
            loss = anchor * entropy
            if self.uses_metric:
                loss = loss + metric * self.term(logits, y, weight, temperature)
            if training is not None:
                return loss, entropy
            return loss, entropy, self.score(probabilities_of(logits, self.task), y, weight).to(loss.dtype)

        y, weight, logits = self.rows.y[index], self.rows.weight[index] * mask, self._logits(own, index, training)
        return vmap(one)(logits, y, weight, self.temperature[own], self.metric[own], self.anchor[own])  # type: ignore[no-any-return]

    def _logits(self, own: slice, index: Tensor, training: dict[str, Tensor] | None) -> Tensor:
        """By the parameters in `training`, or by those that are judged, in pieces then on a CPU."""
        self.skeleton.train(training is not None)
        noise = self._no_noise if training is None else self._noise(own, index)
        buffers = {name: buffer[own] for name, buffer in self.buffers.items()} | noise
        params = {name: view[own] for name, view in self.judged_views.items()} if training is None else training

        def one(params, buffers, x):  # type: ignore[no-untyped-def]
            return functional_call(self.skeleton, (params, buffers), (x,))

        def of(places: Tensor) -> Tensor:
            return vmap(one, randomness="different")(params, buffers, self.rows.x[places])  # type: ignore[no-any-return]

        if training is not None or self.device.type != "cpu":
            return of(index)
        return torch.cat([of(places) for places in torch.split(index, rows_at_once(self.device), 1)], 1)

    def _look(self) -> Tensor:
        """What `watch` says of the rows that are watched, (S, k)."""
        assert self.watched is not None
        watch, (index, mask) = self.watch, self.watched
        assert watch is not None

        def one(logits: Tensor, y: Tensor, weight: Tensor) -> Tensor:
            return watch(*flat(logits, y, weight, self.task))

        def of(own: slice) -> Tensor:
            logits, y, weight = (
                self._logits(own, index[own], None),
                self.rows.y[index[own]],
                self.rows.weight[index[own]],
            )
            return vmap(one)(logits, y, weight * mask[own])

        return torch.cat([of(own) for own in self.groups])

    @torch.no_grad()
    def _watch_width(self) -> int:
        return self._look().shape[1]

    def _noise(self, own: slice, index: Tensor) -> dict[str, Tensor]:
        """Uniform numbers for every dropout layer; on a CPU from each trial's own generator, for its own rows only."""
        sizes = [math.prod(shape) for shape in self.widths.values()]
        if not sizes:
            return {}
        noise = self.rows.x.new_empty(*index.shape, sum(sizes))
        if len(self.noises) < len(self.trials):
            noise.uniform_(generator=self.noises[0])
        else:
            for rows, count, generator in zip(noise, self.longest[own], self.noises[own], strict=True):
                rows[:count].uniform_(generator=generator)
        return {
            f"{name}.noise": layer.reshape(*index.shape, *shape)
            for (name, shape), layer in zip(self.widths.items(), torch.split(noise, sizes, -1), strict=True)
        }

    @property
    def _no_noise(self) -> dict[str, Tensor]:
        width = 1 if len(self.groups) > 1 else len(self.trials)
        return {f"{name}.noise": self.rows.x.new_empty(width, 0) for name in self.widths}

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

    @torch.no_grad()
    def _keep(self, better: list[int]) -> None:
        """The weights of the trials that are better than ever, all at once: a copy for each would be many kernels."""
        if better:
            chosen = torch.zeros(len(self.trials), dtype=torch.bool)
            chosen[better] = True
            chosen = chosen.to(self.device)
            for name, current in self._kept().items():
                shape = (-1, *([1] * (current.dim() - 1)))
                self.best[name].copy_(torch.where(chosen.view(shape), current, self.best[name]))

    def _next_stage(self, s: int) -> None:
        with torch.no_grad():
            for name, current in {**self._kept(), "": self.parameters.flat}.items():
                current[s] = self.best[name][s]
        self.adam.restart(s)
        self.stages[s] += 1
        stages = self.trials[s].recipe.stages
        self.done[s] = self.stages[s] == len(stages)
        if not self.done[s]:
            self.controllers[s] = Controller(stages[self.stages[s]])

    def _kept(self) -> dict[str, Tensor]:
        return {"": self.judged, **self.buffers}

    def weights_of(self, s: int) -> dict[str, Tensor]:
        """Trial s as a state dict of the network that `make_network` makes."""
        kept = {**self.parameters.views_of(self.best[""]), **{name: best for name, best in self.best.items() if name}}
        own = {name: best[s].detach().clone() for name, best in kept.items()}
        return {name: value for name, value in own.items() if name.rsplit(".", 1)[0] not in self.widths}
