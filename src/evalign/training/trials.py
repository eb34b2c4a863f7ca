"""Many independent trials trained as one stacked network: on a GPU, ten cost about as much as one.

A trial has its own seed, rows, learning rates, dropout and cooling, its own temperature and early stopping.
Parameters carry a leading dimension S; `torch.func.vmap` runs any `nn.Module` over it. A trial that has
finished is carried along with learning rate 0. The result equals training the trials one by one.
"""

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap

from evalign.objective import Objective, cross_entropy
from evalign.steps import StepChoice
from evalign.training.batches import Batches
from evalign.training.loop import Rows, Score
from evalign.training.progress import Controller, Epoch
from evalign.training.recipes import Recipe


@dataclass(frozen=True)
class Trial:
    """What is a trial's own: rows of the table, recipe (learning rates, cooling), seed and dropout."""

    train: Tensor
    valid: Tensor
    recipe: Recipe
    seed: int = 0
    dropout: float | None = None  # None keeps the network's


@dataclass
class TrialResult:
    state: dict[str, Tensor]
    history: list[Epoch] = field(default_factory=list)


def train_trials(
    make_network: Callable[[], nn.Module],
    rows: Rows,
    trials: Sequence[Trial],
    objective: Objective,
    score: Score,
    *,
    batch_size: int,
    stratified: bool = False,
    on_epoch: Callable[[int, Epoch], None] | None = None,
) -> list[TrialResult]:
    """Train every trial by its recipe; returns the best weights and the history of each.

    `make_network` is called once per trial after seeding with the trial's seed, as for a network of its own.
    """
    stack = _Stack(make_network, rows, trials, objective, score, batch_size, stratified)
    while not all(stack.done):
        for s, epoch in stack.epoch():
            if on_epoch is not None:
                on_epoch(s, epoch)
    return [TrialResult(stack.weights_of(s), stack.histories[s]) for s in range(len(trials))]


class SharedDropout(nn.Module):
    """Dropout whose rate and noise come from outside, so that each trial has its own of both."""

    noise: Tensor
    rate: Tensor

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.register_buffer("rate", torch.tensor(rate))
        self.register_buffer("noise", torch.empty(0))

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        return torch.where(self.noise < self.rate, 0.0, x / (1 - self.rate))


class _Stack:
    def __init__(
        self,
        make_network: Callable[[], nn.Module],
        rows: Rows,
        trials: Sequence[Trial],
        objective: Objective,
        score: Score,
        batch_size: int,
        stratified: bool,
    ) -> None:
        trials = [replace(trial, recipe=trial.recipe.for_rows(len(trial.train), batch_size)) for trial in trials]
        steps = {stage.step for trial in trials for stage in trial.recipe.stages if stage.metric}
        if not trials or len(steps) > 1:
            raise ValueError(
                f"at least one trial is needed, and one step for all, got {len(trials)} with {sorted(steps)}"
            )
        self.rows, self.trials, self.score = rows, trials, score
        self.objective = replace(objective, anchor=0.0, step=StepChoice(next(iter(steps))) if steps else objective.step)
        self.device, count = rows.x.device, len(trials)
        networks = []
        for trial in trials:
            with torch.random.fork_rng([]):
                torch.manual_seed(trial.seed)
                network = _with_shared_dropout(make_network(), trial.dropout)
            networks.append(network.to(self.device))
        params, buffers = stack_module_state(networks)
        self.params: dict[str, Tensor] = {k: v.detach().requires_grad_() for k, v in params.items()}
        self.buffers: dict[str, Tensor] = {k: v.detach() for k, v in buffers.items() if not k.endswith("noise")}
        self.skeleton = copy.deepcopy(networks[0]).to("meta")
        self.best = {k: v.detach().clone() for k, v in {**self.params, **self.buffers}.items()}
        self.adam = _StackedAdamW(self.params, count)
        self.noises = [torch.Generator(self.device).manual_seed(trial.seed) for trial in trials]
        self.widths = _dropout_widths(networks[0], rows.x[:2])
        self.batches = [
            Batches(len(t.train), batch_size, seed=t.seed, labels=rows.y[t.train] if stratified else None)
            for t in trials
        ]
        if len({batches.count for batches in self.batches}) > 1:
            sizes = sorted({len(trial.train) for trial in trials})
            raise ValueError(f"all trials must have as many batches an epoch, got {sizes} rows; train them apart")
        self.train_index = [t.train.to(self.device) for t in trials]
        self.valid = _padded([t.valid for t in trials], self.device)
        self.stages = [0] * count
        self.controllers = [Controller(t.recipe.stages[0]) for t in trials]
        self.done = [False] * count
        self.histories: list[list[Epoch]] = [[] for _ in trials]

    def epoch(self) -> list[tuple[int, Epoch]]:
        """One epoch of every trial that is not done."""
        stages = [c.stage for c in self.controllers]
        rates = [0.0 if done else c.learning_rate for c, done in zip(self.controllers, self.done, strict=True)]
        self.temperature = self._vector([c.temperature for c in self.controllers])
        self.uses_metric = any(stage.metric and not done for stage, done in zip(stages, self.done, strict=True))
        self.metric = self._vector([float(stage.metric) for stage in stages])
        self.anchor = self._vector([stage.anchor for stage in stages])
        learning_rate, decay = self._vector(rates), self._vector([stage.weight_decay for stage in stages])
        losses = []
        for indices in zip(*(batches.epoch() for batches in self.batches), strict=True):
            own = [train[i.to(self.device)] for train, i in zip(self.train_index, indices, strict=True)]
            self.counts = [len(rows) for rows in own]
            loss = self._losses(self.params, *_padded(own, self.device), training=True)
            gradients = torch.autograd.grad(loss[0].sum(), list(self.params.values()))
            self.adam.step(gradients, learning_rate, decay)
            losses.append(loss[0].detach())
        with torch.no_grad():
            values = torch.stack([torch.stack(losses).mean(0), *self._losses(self.params, *self.valid, training=False)])
        return [self._record(s, rates[s], *values[:, s].tolist()) for s in range(len(stages)) if not self.done[s]]

    def _losses(self, params: dict[str, Tensor], index: Tensor, mask: Tensor, *, training: bool) -> tuple[Tensor, ...]:
        """Loss, cross-entropy and, outside of training, hard score of every trial on its own rows."""
        self.skeleton.train(training)
        buffers = {**self.buffers, **(self._noise(mask) if training else self._no_noise)}

        def one(params, buffers, x, y, weight, temperature, metric, anchor):  # type: ignore[no-untyped-def]
            logits = functional_call(self.skeleton, (params, buffers), (x,))
            entropy = cross_entropy(logits, y, weight, self.objective.task)
            loss = anchor * entropy
            if self.uses_metric:
                counts = self.objective.confusion(logits, y, weight, temperature)
                loss = loss + metric * self.objective.metric_term(counts)
            if training:
                return loss, entropy
            return loss, entropy, self.score(logits.softmax(1), y, weight)

        rows = self.rows[index]
        return vmap(one, randomness="different")(  # type: ignore[no-any-return]
            params, buffers, rows.x, rows.y, rows.weight * mask, self.temperature, self.metric, self.anchor
        )

    def _noise(self, mask: Tensor) -> dict[str, Tensor]:
        """Uniform numbers for every dropout layer, drawn by each trial's own generator for its own rows only."""
        sizes = [math.prod(shape) for shape in self.widths.values()]
        if not sizes:
            return {}
        noise = self.rows.x.new_empty(*mask.shape, sum(sizes))
        for rows, count, generator in zip(noise, self.counts, self.noises, strict=True):
            rows[:count].uniform_(generator=generator)
        return {
            f"{name}.noise": layer.reshape(*mask.shape, *shape)
            for (name, shape), layer in zip(self.widths.items(), torch.split(noise, sizes, -1), strict=True)
        }

    @property
    def _no_noise(self) -> dict[str, Tensor]:
        return {f"{name}.noise": self.rows.x.new_empty(len(self.trials), 0) for name in self.widths}

    def _record(
        self, s: int, rate: float, train_loss: float, loss: float, entropy: float, score: float
    ) -> tuple[int, Epoch]:
        controller, history = self.controllers[s], self.histories[s]
        temperature = controller.temperature
        best = controller.step(loss=loss, entropy=entropy, score=score)
        if best:
            for name, kept in self.best.items():
                kept[s] = self._current(name)[s]
        epoch = Epoch(
            len(history) + 1, controller.stage.name, temperature, rate, train_loss, loss, entropy, score, best
        )
        history.append(epoch)
        if controller.finished:
            self._next_stage(s)
        return s, epoch

    def _next_stage(self, s: int) -> None:
        with torch.no_grad():
            for name, kept in self.best.items():
                self._current(name)[s] = kept[s]
        self.adam.restart(s)
        self.stages[s] += 1
        stages = self.trials[s].recipe.stages
        self.done[s] = self.stages[s] == len(stages)
        if not self.done[s]:
            self.controllers[s] = Controller(stages[self.stages[s]])

    def _current(self, name: str) -> Tensor:
        return self.params[name] if name in self.params else self.buffers[name]

    def _vector(self, numbers: list[float]) -> Tensor:
        return torch.tensor(numbers, dtype=self.rows.x.dtype, device=self.device)

    def weights_of(self, s: int) -> dict[str, Tensor]:
        """Trial s as a state dict of the network that `make_network` makes."""
        own = {name: kept[s].detach().clone() for name, kept in self.best.items()}
        return {name: value for name, value in own.items() if name.rsplit(".", 1)[0] not in self.widths}


class _StackedAdamW:
    """AdamW with one learning rate, weight decay and step count per trial (Loshchilov and Hutter 2019)."""

    def __init__(self, params: dict[str, Tensor], count: int) -> None:
        self.params = list(params.values())
        self.first = [torch.zeros_like(p) for p in self.params]
        self.second = [torch.zeros_like(p) for p in self.params]
        self.steps = torch.zeros(count, dtype=torch.float64, device=self.params[0].device)

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor], learning_rate: Tensor, decay: Tensor) -> None:
        self.steps += 1
        size = learning_rate / (1 - 0.9**self.steps)
        scale = (1 - 0.999**self.steps).sqrt()
        torch._foreach_lerp_(self.first, list(gradients), 0.1)
        torch._foreach_mul_(self.second, 0.999)
        torch._foreach_addcmul_(self.second, list(gradients), list(gradients), 0.001)
        for p, first, second in zip(self.params, self.first, self.second, strict=True):
            shape = (-1, *([1] * (p.dim() - 1)))
            p.mul_((1 - learning_rate * decay).reshape(shape))
            bottom = (second.sqrt() / scale.to(p.dtype).reshape(shape)).add_(1e-8)
            p.sub_(size.to(p.dtype).reshape(shape) * first / bottom)

    def restart(self, s: int) -> None:
        self.steps[s] = 0
        for moment in (*self.first, *self.second):
            moment[s] = 0


def _with_shared_dropout(network: nn.Module, rate: float | None) -> nn.Module:
    for name, module in list(network.named_modules()):
        if type(module) is nn.Dropout:
            network.set_submodule(name, SharedDropout(module.p if rate is None else rate))
    return network


def _dropout_widths(network: nn.Module, x: Tensor) -> dict[str, tuple[int, ...]]:
    """The shape of one sample at every dropout layer, found by sending two rows through."""
    widths: dict[str, tuple[int, ...]] = {}
    hooks = []
    for name, module in network.named_modules():
        if isinstance(module, SharedDropout):

            def note(_module: nn.Module, args: tuple[Tensor, ...], name: str = name) -> None:
                widths[name] = tuple(args[0].shape[1:])

            hooks.append(module.register_forward_pre_hook(note))
    network.eval()
    with torch.no_grad():
        network(x)
    for hook in hooks:
        hook.remove()
    return widths


def _padded(indices: Sequence[Tensor], device: torch.device) -> tuple[Tensor, Tensor]:
    """Index vectors as one matrix, and a mask that is 0 where a shorter one was filled up."""
    longest = max(len(i) for i in indices)
    matrix = torch.zeros(len(indices), longest, dtype=torch.long, device=device)
    mask = torch.zeros(len(indices), longest, device=device)
    for row, i in enumerate(indices):
        matrix[row, : len(i)] = i.to(device)
        mask[row, : len(i)] = 1
    return matrix, mask
