"""Several networks trained as one: folds of a table, repeated trials, points of a grid.

Every tensor that a step reads or writes stays in place, so that a CUDA graph of it can be replayed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vmap

from evalign._checks import safe_divide
from evalign._objective import Objective, cross_entropy
from evalign.confusion import Task
from evalign.steps import StepChoice
from evalign.tables.packed import release_memory
from evalign.training.batches import Rows, StackedBatches
from evalign.training.evaluation import Score, Term, Watch, flat, probabilities_of
from evalign.training.in_memory import weight_of_newest
from evalign.training.loop import Epoch, Replay, Run, Values, run_stages
from evalign.training.recipes import Recipe
from evalign.training.stacked_networks import StackedAdamW, StackedNetworks, padded


class StackedSteps:
    """Loss and update of every network on its own rows: metric * term + anchor * cross-entropy, at its temperature.

    `index` and `mask` (S, width) are the batch of the next step; `rate`, `decay` and `share` (of the updates to average
    over) the optimiser's settings. `validate` fills `values` with the epoch of each network: mean training loss of
    `updates` steps, then loss, cross-entropy and hard score of its validation rows, then the watched values.
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
        # On a CPU a fused loss of each network is faster than the eager loss of all; a GPU waits for launches.
        self.fused: dict[float, Objective] = {}
        self.fusible = isinstance(term, Objective) and device.type == "cpu" and task == term.task == "multiclass"
        self.adam = StackedAdamW(networks.parameters)
        self.valid = padded(valid, device)
        self.watched = None if watched is None else padded(watched, device)
        zeros = torch.zeros(count, dtype=rows.x.dtype, device=device)
        self.temperature, self.metric, self.anchor = zeros.clone(), zeros.clone(), zeros.clone()
        self.rate, self.decay, self.share = zeros[:, None].clone(), zeros[:, None].clone(), zeros[:, None].clone()
        self.index = torch.zeros(count, width, dtype=torch.long, device=device)
        self.mask = zeros.new_ones(count, width)
        self.loss_sum = zeros.clone()
        self.values = zeros.new_zeros(count, 4 if self.watched is None else 4 + self._watched_values().shape[1])
        self.uses_metric = False

    @property
    def changed(self) -> list[Tensor]:
        """The tensors that a step or a validation writes to."""
        networks = self.networks
        return [*self.adam.state, networks.evaluated, *networks.buffers.values(), self.loss_sum, self.values]

    def step(self) -> None:
        for own in self.networks.groups:
            self._step(own)

    @torch.no_grad()
    def validate(self) -> None:
        self.values[:, 0] = self.loss_sum / self.updates
        index, mask = self.valid
        for own in self.networks.groups:
            y, weight = self.rows.y[index[own]], self.rows.weight[index[own]] * mask[own]
            found = self._vmapped_losses(self.networks.logits(own, index[own]), y, weight, own, scored=True)
            self.values[own, 1:4] = torch.stack(found, 1)
        if self.watched is not None:
            self.values[:, 4:] = self._watched_values()

    def _step(self, own: slice) -> None:
        networks, index = self.networks, self.index[own]
        logits, gradient = networks.training_logits(own, index)
        loss, slope = self._loss_and_slope(logits, self.rows.y[index], self.rows.weight[index] * self.mask[own], own)
        self.adam.step(own, gradient(slope), self.rate[own], self.decay[own])
        with torch.no_grad():
            self.loss_sum[own].add_(loss)
            if self.averages:
                newest = weight_of_newest(self.adam.steps[own], self.share[own])
                networks.evaluated[own].lerp_(networks.parameters.flat[own], newest.to(networks.evaluated.dtype))

    def _loss_and_slope(self, logits: Tensor, y: Tensor, weight: Tensor, own: slice) -> tuple[Tensor, Tensor]:
        """Losses (s,) of these networks, and the gradient of each by its logits."""
        if not self.uses_metric and self.task == "multiclass" and logits.dim() == 3:
            loss, slope = cross_entropy_and_slope(logits, y, weight)
            return loss * self.anchor[own], slope.mul_(self.anchor[own, None, None])
        with torch.enable_grad():
            z = logits.detach().requires_grad_()
            if self.fusible and logits.dim() == 3:
                loss = self._fused_losses(z, y, weight, own)
            else:
                loss = self._vmapped_losses(z, y, weight, own, scored=False)[0]
            (slope,) = torch.autograd.grad(loss.sum(), z)
        return loss.detach(), slope

    def _fused_losses(self, logits: Tensor, y: Tensor, weight: Tensor, own: slice) -> Tensor:
        """Losses by the fused kernels, one network after the other."""
        settings = zip(*(x[own].tolist() for x in (self.temperature, self.metric, self.anchor)), strict=True)
        losses = []
        for number, (temperature, metric, anchor) in enumerate(settings):
            z, labels, weights = logits[number], y[number], weight[number]
            if metric:
                losses.append(self._at_anchor(anchor)(z, labels, weights, temperature))
            else:
                losses.append(anchor * cross_entropy(z, labels, weights, self.task))
        return torch.stack(losses)

    def _at_anchor(self, anchor: float) -> Objective:
        if anchor not in self.fused:
            assert isinstance(self.term, Objective)
            self.fused[anchor] = replace(self.term, anchor=anchor, backend="auto")
        return self.fused[anchor]

    def _vmapped_losses(
        self, logits: Tensor, y: Tensor, weight: Tensor, own: slice, *, scored: bool
    ) -> tuple[Tensor, ...]:
        """Loss, cross-entropy and, if `scored`, hard score of these networks."""
        of_one = partial(self._losses_of_one, scored=scored)
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
        scored: bool,
    ) -> tuple[Tensor, ...]:
        logits, y, weight = flat(logits, y, weight, self.task)
        if self.task == "multiclass" and logits.dim() == 3:  # an ensemble in training
            members = vmap(partial(self._losses_of_one, scored=scored), in_dims=(0, None, None, None, None, None))
            return tuple(v.mean() for v in members(logits, y, weight, temperature, metric, anchor))
        entropy = cross_entropy(logits, y, weight, self.task)
        loss = anchor * entropy
        if self.uses_metric:
            loss = loss + metric * self.term(logits, y, weight, temperature)
        if not scored:
            return loss, entropy
        return loss, entropy, self.score(probabilities_of(logits, self.task), y, weight).to(loss.dtype)

    @torch.no_grad()
    def _watched_values(self) -> Tensor:
        """Values (S, k) of the watched rows."""
        assert self.watched is not None
        watch, (index, mask) = self.watch, self.watched
        assert watch is not None

        def one(logits: Tensor, y: Tensor, weight: Tensor) -> Tensor:
            return watch(*flat(logits, y, weight, self.task))

        def of(own: slice) -> Tensor:
            places = index[own]
            logits = self.networks.logits(own, places)
            return vmap(one)(logits, self.rows.y[places], self.rows.weight[places] * mask[own])

        return torch.cat([of(own) for own in self.networks.all_groups])


def cross_entropy_and_slope(logits: Tensor, y: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Weighted mean cross-entropy of each network and its gradient by the logits, without autograd.

    Logits (s, n, C), labels and weights (s, n); the gradient is w_i (p_i - onehot y_i) / sum w. A row of weight 0
    counts for nothing, even where its loss is infinite.

    >>> loss, slope = cross_entropy_and_slope(torch.zeros(1, 2, 2), torch.tensor([[0, 1]]), torch.tensor([[3.0, 1.0]]))
    >>> loss, slope
    (tensor([0.6931]), tensor([[[-0.3750,  0.3750],
             [ 0.1250, -0.1250]]]))
    """
    log_p = logits.log_softmax(2)
    labels = y.long()[..., None]
    each = log_p.gather(2, labels).squeeze(2)
    total = weight.sum(1)
    loss = -safe_divide(torch.where(weight == 0, 0.0, each * weight).sum(1), total)
    share = safe_divide(weight, total[:, None])[..., None]
    slope = log_p.exp_().mul_(share)
    slope.scatter_add_(2, labels, -share)
    return loss, torch.where(weight[..., None] == 0, 0.0, slope)


@dataclass(frozen=True)
class Trial:
    """Rows, recipe (learning rates, cooling), seed and dropout of one trial."""

    train: Tensor
    valid: Tensor
    recipe: Recipe
    seed: int = 0
    dropout: float | None = None  # None keeps the network's
    watch: Tensor | None = None  # rows whose values are recorded every epoch; no choice is made by them


@dataclass
class TrialResult:
    """Best weights as a state dict, and history."""

    state: dict[str, Tensor]
    history: list[Epoch] = field(default_factory=list)


def train_trials(
    make_network: Callable[[], nn.Module],
    rows: Rows,
    trials: Sequence[Trial],
    objective: Objective | Term,
    score: Score,
    *,
    on_epoch: Callable[[int, Epoch], None] | None = None,
    catch_interrupt: bool = False,
    may_diverge: bool = True,
    deadline: float | None = None,
    **options: Any,
) -> list[TrialResult]:
    """Train every trial by its recipe; returns the best weights and the history of each.

    `make_network` is called once per trial after seeding with the trial's seed; with `task` "binary" it has one output
    for every label of a row, which may have several, as the pairs of a graph. `objective` may be any other loss of the
    same form. On a GPU a step is recorded once and replayed, and one generator draws the dropout of all trials. For
    `catch_interrupt`, `may_diverge` and `deadline` see `training.loop.run_stages`; `options` are those of `Stack`.
    """
    stack = Stack(make_network, rows, trials, objective, score, **options)
    run_stages(
        stack, stack.runs, on_epoch=on_epoch, may_diverge=may_diverge, catch_interrupt=catch_interrupt,
        deadline=deadline,
    )  # fmt: skip
    return [TrialResult(stack.networks.best_of(s), run.history) for s, run in enumerate(stack.runs)]


def _term(objective: Objective | Term, trials: Sequence[Trial]) -> Term:
    """The objective without anchor, which differs by trial, and with the step that all trials share."""
    steps = {stage.step for trial in trials for stage in trial.recipe.stages if stage.metric}
    if not trials or len(steps) > 1:
        raise ValueError(f"at least one trial is needed, and one step for all, got {len(trials)} with {sorted(steps)}")
    if any(stage.offset for trial in trials for stage in trial.recipe.stages):
        raise ValueError("stacked trials have no class offsets; train them one by one, or without offset")
    if not isinstance(objective, Objective):
        return objective
    step = next(iter(steps), objective.step.step)
    if step != objective.step.step and not callable(
        objective.step.step
    ):  # a stage does not replace a function given by the user
        objective = replace(objective, step=StepChoice(step))
    return replace(objective, anchor=0.0, backend="eager")  # the fused form does not vmap


class Stack:
    """A `training.loop.Source` of stacked trials; `runs` holds the progress of each."""

    def __init__(
        self,
        make_network: Callable[[], nn.Module], rows: Rows, trials: Sequence[Trial], objective: Objective | Term,
        score: Score,
        *,
        batch_size: int,
        task: Task = "multiclass",
        stratified: bool = False,
        oversample: bool = False,
        watch: Watch | None = None,
    ) -> None:  # fmt: skip
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
        release_memory()  # what the networks took that the stack was made from
        watched = [trial.watch for trial in trials if trial.watch is not None]
        self.steps = StackedSteps(
            self.networks, rows, [trial.valid for trial in trials], term=term, score=score, task=task,
            width=self.batches.width, updates=self.batches.count, averages=averages, watch=watch,
            watched=watched if watch is not None and len(watched) == len(trials) else None,
        )  # fmt: skip
        changed = self.steps.changed
        self.run_step, self.run_validation = (
            {uses_metric: Replay(run, changed, device, generators) for uses_metric in (False, True)}
            for run, generators in ((self.steps.step, self.networks.generators), (self.steps.validate, []))
        )
        self.runs = [Run(trial.recipe.stages) for trial in trials]

    def begin_stage(self, number: int, run: Run) -> None:
        self.steps.adam.restart(number)

    def epoch(self, runs: Sequence[Run]) -> list[Values]:
        """One epoch of every unfinished trial."""
        steps = self.steps
        stages = [run.stage for run in runs]
        for tensor, numbers in (
            (steps.temperature, [run.controller.temperature for run in runs]),
            (steps.metric, [float(stage.metric) for stage in stages]),
            (steps.anchor, [stage.anchor for stage in stages]),
            (steps.rate, [0.0 if run.finished else run.controller.learning_rate for run in runs]),
            (steps.decay, [stage.weight_decay for stage in stages]),
            (steps.share, [stage.average for stage in stages]),
        ):
            tensor.copy_(torch.tensor(numbers, dtype=tensor.dtype).view_as(tensor))
        steps.uses_metric = any(run.stage.metric and not run.finished for run in runs)
        self.networks.open_groups([not run.finished for run in runs])
        steps.loss_sum.zero_()
        for index, mask in self.batches.epoch():
            steps.index.copy_(index)
            steps.mask.copy_(mask)
            self.run_step[steps.uses_metric]()
        self.run_validation[steps.uses_metric]()
        found: list[list[float]] = steps.values.tolist()
        return [Values(a, b, c, d, tuple(watched)) for a, b, c, d, *watched in found]

    def keep(self, numbers: Sequence[int]) -> None:
        self.networks.keep(list(numbers))

    def restore(self, number: int) -> None:
        self.networks.restore(number)
