"""Train several networks as one: folds of a table, repeated trials, points of a grid.

With folds every row is held out by one network, so that every label is used for training and validation, and the mean
of the networks predicts. Every tensor that a step reads or writes stays in place: a CUDA graph of it can be replayed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import vmap

from evalign.checks import safe_divide
from evalign.confusion import Task
from evalign.networks.mlp import MeanOfNetworks
from evalign.objective import Objective, cross_entropy
from evalign.steps import StepChoice
from evalign.tables.packed import EncodedTable, release_memory
from evalign.tables.split import Codes, Division, Floats
from evalign.training.batches import (
    Batches,
    MakeBatches,
    Rows,
    Score,
    StackedBatches,
    Term,
    flat,
    plain_batches,
    predict_logits,
    probabilities_of,
)
from evalign.training.loop import Epoch, OnEpoch, Replay, Run, Values, run_stages
from evalign.training.recipes import Recipe
from evalign.training.stacked_networks import StackedAdamW, StackedNetworks, padded


def cross_entropy_and_slope(logits: Tensor, y: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Weighted mean cross-entropy of each network and its gradient with respect to the logits, without autograd.

    Logits (s, n, C), labels and weights (s, n); the gradient is w_i (p_i - onehot y_i) / sum w. A row of weight 0
    is ignored, even where its loss is infinite.

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


@dataclass(frozen=True)
class TrialResult:
    """Best weights as a state dict, and history."""

    state: dict[str, Tensor]
    history: list[Epoch]


def train_trials(
    make_network: Callable[[], nn.Module],
    rows: Rows,
    trials: Sequence[Trial],
    objective: Objective | Term,
    score: Score,
    *,
    kind: "Callable[..., Stack] | None" = None,
    on_epoch: Callable[[int, Epoch], None] | None = None,
    catch_interrupt: bool = False,
    may_diverge: bool = True,
    **options: Any,
) -> list[TrialResult]:
    """Train every trial by its recipe; returns the best weights and the history of each.

    `make_network` is called once per trial after seeding with the trial's seed; with `task` "binary" it has one output
    for every label of a row, which may have several, as the pairs of a graph. `objective` may be any loss of the same
    signature. On a GPU a step is recorded once and replayed, and one generator draws the dropout of all trials.
    `options` are those of `Stack`, or of another `kind` of it; the others those of `training.loop.run_stages`.
    """
    stack = (kind or Stack)(make_network, rows, trials, objective, score, **options)
    run_stages(stack, stack.runs, on_epoch=on_epoch, may_diverge=may_diverge, catch_interrupt=catch_interrupt)
    return [TrialResult(stack.networks.best_of(s), run.history) for s, run in enumerate(stack.runs)]


def _term(objective: Objective | Term, trials: Sequence[Trial]) -> Term:
    """The objective without the anchor, which differs by trial, and with the step that all trials share."""
    steps = {stage.step for trial in trials for stage in trial.recipe.stages if stage.metric}
    if not trials or len(steps) > 1:
        raise ValueError(
            f"stacked trials must not be empty and must share one step, got {len(trials)} with {sorted(steps)}"
        )
    if any(trial.recipe.has_offsets for trial in trials):
        raise ValueError("stacked trials do not support class offsets; train them one by one, or without offset")
    if not isinstance(objective, Objective):
        return objective
    step = next(iter(steps), objective.step.step)
    # A stage does not replace a user's function.
    if step != objective.step.step and not callable(objective.step.step):
        objective = replace(objective, step=StepChoice(step))
    return replace(objective, anchor=0.0, backend="eager")  # the fused form does not vmap


class Stack:
    """A `training.loop.Source` of stacked trials; `runs` holds the progress of each.

    A network's loss is metric * term + anchor * cross-entropy of its own rows, at its temperature. `index` and `mask`
    (S, width) are the batch of the next `step`, `rate` and `decay` the optimiser's settings. `validate` fills `values`
    with the epoch of each network: mean training loss, then loss, cross-entropy and hard score of its validation rows.
    """

    def __init__(
        self,
        make_network: Callable[[], nn.Module], rows: Rows, trials: Sequence[Trial], objective: Objective | Term,
        score: Score,
        *,
        batch_size: int,
        task: Task = "multiclass",
        make_batches: MakeBatches = plain_batches,
    ) -> None:  # fmt: skip
        trials = [replace(trial, recipe=trial.recipe.for_rows(len(trial.train), batch_size)) for trial in trials]
        self.term, self.rows, self.score, self.task = _term(objective, trials), rows, score, task
        device, seeds = rows.x.device, [trial.seed for trial in trials]
        self.batches = StackedBatches(
            [trial.train for trial in trials], batch_size, seeds=seeds, dtype=rows.x.dtype, make=make_batches,
            device=device,
        )  # fmt: skip
        self.networks = StackedNetworks(
            make_network, rows.x, seeds=seeds, dropouts=[trial.dropout for trial in trials],
            batch_lengths=self.batches.longest,
        )  # fmt: skip
        release_memory()  # input of the networks that the stack was made from
        # On a CPU a fused loss per network is faster than one eager loss of all; on a GPU launches dominate.
        self.fused: dict[float, Objective] = {}
        own = self.term.task if isinstance(self.term, Objective) else None
        self.fusible = device.type == "cpu" and task == own == "multiclass"
        self.adam = StackedAdamW(self.networks.parameters)
        self.valid = padded([trial.valid for trial in trials], device)
        zeros = torch.zeros(len(trials), dtype=rows.x.dtype, device=device)
        self.temperature, self.metric, self.anchor = zeros.clone(), zeros.clone(), zeros.clone()
        self.rate, self.decay = zeros[:, None].clone(), zeros[:, None].clone()
        self.index = torch.zeros(len(trials), self.batches.width, dtype=torch.long, device=device)
        self.mask = zeros.new_ones(len(trials), self.batches.width)
        self.loss_sum = zeros.clone()
        self.values = zeros.new_zeros(len(trials), 4)
        self.uses_metric = False
        changed = [*self.adam.state, *self.networks.buffers.values(), self.loss_sum, self.values]
        # Steps with and without a metric differ.
        self.run_step = [Replay(changed, device, self.networks.generators) for _ in range(2)]
        self.run_validation = [Replay(changed, device) for _ in range(2)]
        self.runs = [Run(trial.recipe.stages) for trial in trials]

    def begin_stage(self, number: int, run: Run) -> None:
        self.adam.restart(number)

    def epoch(self, runs: Sequence[Run]) -> list[Values]:
        stages = [run.stage for run in runs]
        for tensor, numbers in (
            (self.temperature, [run.controller.temperature for run in runs]),
            (self.metric, [float(stage.metric) for stage in stages]),
            (self.anchor, [stage.anchor for stage in stages]),
            (self.rate, [0.0 if run.finished else run.controller.learning_rate for run in runs]),
            (self.decay, [stage.weight_decay for stage in stages]),
        ):
            tensor.copy_(torch.tensor(numbers, dtype=tensor.dtype).view_as(tensor))
        self.uses_metric = any(run.stage.metric and not run.finished for run in runs)
        self.networks.open_groups([not run.finished for run in runs])
        self.loss_sum.zero_()
        for index, mask in self.batches.epoch():
            self.index.copy_(index)
            self.mask.copy_(mask)
            self.run_step[self.uses_metric](self.step)
        self.run_validation[self.uses_metric](self.validate)
        return [Values(*own) for own in self.values.tolist()]

    def keep(self, numbers: Sequence[int]) -> None:
        self.networks.keep(list(numbers))

    def restore(self, number: int) -> None:
        self.networks.restore(number)

    def step(self) -> None:
        for own in self.networks.groups:
            index = self.index[own]
            logits, gradient = self.networks.training_logits(own, index)
            weight = self.rows.weight[index] * self.mask[own]
            loss, slope = self._loss_and_slope(logits, self.rows.y[index], weight, own)
            self.adam.step(own, gradient(slope), self.rate[own], self.decay[own])
            self.loss_sum[own].add_(loss)

    @torch.no_grad()
    def validate(self) -> None:
        self.values[:, 0] = self.loss_sum / self.batches.count
        index, mask = self.valid
        for own in self.networks.groups:
            y, weight = self.rows.y[index[own]], self.rows.weight[index[own]] * mask[own]
            logits = self.networks.logits(own, index[own])
            found = (self._losses(logits, y, weight, own), *vmap(self._entropy_and_score)(logits, y, weight))
            self.values[own, 1:] = torch.stack(found, 1)

    def _loss_and_slope(self, logits: Tensor, y: Tensor, weight: Tensor, own: slice) -> tuple[Tensor, Tensor]:
        """Losses (s,) of these networks, and the gradient of each with respect to its logits."""
        if not self.uses_metric and self.task == "multiclass" and logits.dim() == 3:
            loss, slope = cross_entropy_and_slope(logits, y, weight)
            return loss * self.anchor[own], slope.mul_(self.anchor[own, None, None])
        with torch.enable_grad():
            z = logits.detach().requires_grad_()
            loss = self._losses(z, y, weight, own)
            (slope,) = torch.autograd.grad(loss.sum(), z)
        return loss.detach(), slope

    def _losses(self, logits: Tensor, y: Tensor, weight: Tensor, own: slice) -> Tensor:
        """Losses (s,) of these networks."""
        if self.fusible and self.uses_metric and logits.dim() == 3:
            return self._fused_losses(logits, y, weight, own)
        settings = self.temperature[own], self.metric[own], self.anchor[own]
        losses: Tensor = vmap(self._loss_of_one)(logits, y, weight, *settings)
        return losses

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

    def _loss_of_one(
        self, logits: Tensor, y: Tensor, weight: Tensor, temperature: Tensor, metric: Tensor, anchor: Tensor
    ) -> Tensor:
        logits, y, weight = flat(logits, y, weight, self.task)
        if self.task == "multiclass" and logits.dim() == 3:  # an ensemble in training
            losses: Tensor = vmap(self._loss_of_one, (0, *[None] * 5))(logits, y, weight, temperature, metric, anchor)
            return losses.mean()
        loss = anchor * cross_entropy(logits, y, weight, self.task)
        return loss + metric * self.term(logits, y, weight, temperature) if self.uses_metric else loss

    def _entropy_and_score(self, logits: Tensor, y: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        logits, y, weight = flat(logits, y, weight, self.task)
        score = self.score(probabilities_of(logits, self.task), y, weight)
        return cross_entropy(logits, y, weight, self.task), score.to(logits.dtype)


@dataclass(frozen=True)
class FoldedRows:
    """Rows on a device, and the positions of the training and validation rows of every fold.

    All folds share one encoded table, whose encoder has seen the features of every row but no label. A table per fold
    would take k times the time and memory.
    """

    rows: Rows
    train: list[Tensor]
    valid: list[Tensor]

    @classmethod
    def of(
        cls, encode: Callable[[Codes], EncodedTable], labels: Codes, divisions: Sequence[Division], device: torch.device
    ) -> "FoldedRows":
        """Encode the rows; `encode` maps positions to columns on the device.

        A row whose weights in training and validation differ, as those of heavy rows do, is stored once for each.
        """
        trained, held_out = np.zeros(len(labels)), np.zeros(len(labels))
        for division in divisions:
            trained[division.train] = division.train_weight
            held_out[division.valid] = division.valid_weight
        both = np.flatnonzero((trained != held_out) & (trained > 0) & (held_out > 0))
        place = np.arange(len(labels))
        place[both] = len(labels) + np.arange(len(both))
        source = np.concatenate([np.arange(len(labels)), both])
        weight = np.concatenate([np.where(trained > 0, trained, held_out), held_out[both]])
        y = torch.from_numpy(labels[source] if len(both) else labels).to(device)
        rows = Rows(encode(source), y, torch.from_numpy(weight.astype(np.float32)).to(device))

        def numbers(places: Codes) -> Tensor:
            # k folds hold k - 1 row numbers per row; 32-bit numbers halve that memory on a CPU.
            short = torch.int32 if device.type == "cpu" and len(rows) < 2**31 else torch.int64
            return torch.from_numpy(places).to(device, short)

        return cls(rows, [numbers(d.train) for d in divisions], [numbers(place[d.valid]) for d in divisions])

    def batch_size(self, size: int) -> int:
        """The smallest batch size from `size` on with equally many batches in every fold, as stacking requires.

        >>> labels = np.zeros(3, dtype=np.int64)
        >>> halves = [Division(np.arange(n), np.ones(n), np.arange(n, 3), np.ones(3 - n)) for n in (1, 2)]
        >>> columns = torch.zeros(3, 1)
        >>> FoldedRows.of(columns.__getitem__, labels, halves, torch.device("cpu")).batch_size(1)
        2
        """
        while len({Batches(len(train), size, seed=0).count for train in self.train}) > 1:
            size += 1
        return size


@dataclass(frozen=True)
class TrainedFolds:
    """Mean of the networks, their histories, and probabilities of the held-out rows, fold after fold."""

    network: MeanOfNetworks
    histories: list[list[Epoch]]
    held_out: Floats


def train_folds(
    make_network: Callable[[], nn.Module],
    folded: FoldedRows,
    recipe: Recipe,
    objective: Objective,
    score: Score,
    *,
    batch_size: int,
    seed: int,
    on_epoch: OnEpoch | None = None,
) -> TrainedFolds:
    """Train a network per fold as one stack, fold i with the seed `seed` + i; each stops by its own fold.

    `on_epoch` receives the epochs of the first network that still trains; Ctrl-C ends training and keeps the best
    weights.
    """
    shown = 0

    def listen(member: int, epoch: Epoch) -> None:
        nonlocal shown
        if on_epoch is not None and epoch.epoch > shown:  # all started together, so their epochs agree
            shown = epoch.epoch
            on_epoch(epoch)

    trials = [
        Trial(train, valid, recipe, seed=seed + i)
        for i, (train, valid) in enumerate(zip(folded.train, folded.valid, strict=True))
    ]
    results = train_trials(
        make_network, folded.rows, trials, objective, score, batch_size=batch_size, on_epoch=listen,
        catch_interrupt=True, may_diverge=False,
    )  # fmt: skip
    with torch.random.fork_rng([]):  # the caller's random state is unchanged
        members = [make_network() for _ in results]
    held_out = []
    for member, trial, result in zip(members, trials, results, strict=True):
        member.load_state_dict(result.state)
        member.to(folded.rows.x.device)
        held_out.append(predict_logits(member, folded.rows.x, trial.valid).double().softmax(1).cpu().numpy())
    return TrainedFolds(MeanOfNetworks(members), [result.history for result in results], np.concatenate(held_out))
