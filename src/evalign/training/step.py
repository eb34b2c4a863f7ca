"""An average of the weights along the way: steadier than the last update, which still jumps with every batch."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from evalign._objective import Objective, cross_entropy
from evalign.confusion import Task
from evalign.training.batches import Rows
from evalign.training.cuda_graph import Replay
from evalign.training.evaluation import Term, flat, mean_over_members, with_offset
from evalign.training.recipes import Stage


def weight_of_newest(updates: Tensor, share: float | Tensor) -> Tensor:
    """What the newest of `updates` weighs in an average over about the last `share` of them: 1 / max(1, share x t).

    The horizon grows with the updates, so that the start is forgotten at any time and no length need be known
    beforehand: (k / t)^(1 / share - 1), nearly, is what update k still counts after t of them (polynomial decay,
    Shamir and Zhang 2013). Share 1 is the plain mean, share 0 the last update alone.

    >>> weight_of_newest(torch.tensor([1.0, 10.0, 40.0]), 0.1)
    tensor([1.0000, 1.0000, 0.2500])
    """
    return (updates * share).clamp_min(1).reciprocal()


class WeightAverage:
    """The average of a network's parameters over about the last `share` of a stage's updates so far.

    a <- a + (w - a) / max(1, share x t) after update t. Buffers are not averaged: those of batch norm are averages
    already, and stay those that training has. Everything is on the device, so that a recorded step can hold it.
    """

    def __init__(self, network: nn.Module, share: float) -> None:
        self.share = share
        self.parameters = [parameter.detach() for parameter in network.parameters()]
        self.values = [parameter.clone() for parameter in self.parameters]
        first = self.values[0]
        self.updates = torch.zeros((), dtype=torch.promote_types(first.dtype, torch.float32), device=first.device)

    @torch.no_grad()
    def update(self) -> None:
        """To be called after every update of the parameters."""
        self.updates += 1
        newest = weight_of_newest(self.updates, self.share).to(self.values[0].dtype)
        torch._foreach_lerp_(self.values, self.parameters, [newest] * len(self.values))

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """The network has the averaged parameters inside, and its own again afterwards."""
        own = [parameter.clone() for parameter in self.parameters]
        torch._foreach_copy_(self.parameters, self.values)
        try:
            yield
        finally:
            torch._foreach_copy_(self.parameters, own)

    @property
    def state(self) -> list[Tensor]:
        """All that an update changes."""
        return [self.updates, *self.values]


def adamw(network: nn.Module, stage: Stage, *, recorded: bool = False) -> torch.optim.AdamW:
    """A stage's optimiser; one that can be recorded keeps its learning rate on the device."""
    parameters = list(network.parameters())
    device = parameters[0].device
    captured = recorded and device.type == "cuda"
    rate: float | Tensor = stage.learning_rate
    if captured:
        rate = torch.tensor(stage.learning_rate, device=device)
    # Fused: one pass over the weights, a third of the default's time on a CPU.
    return torch.optim.AdamW(parameters, lr=rate, weight_decay=stage.weight_decay, fused=True, capturable=captured)


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

    def loss_of(z: Tensor) -> Tensor:
        if not stage.metric:
            return stage.anchor * cross_entropy(z, y, weight, task)
        if isinstance(objective, Objective):
            return objective(z, y, weight, temperature)
        loss = objective(z, y, weight, temperature if isinstance(temperature, Tensor) else z.new_full((), temperature))
        return loss + stage.anchor * cross_entropy(z, y, weight, task) if stage.anchor else loss

    return mean_over_members(loss_of, with_offset(z, offset, task), task)


def plain_step(
    network: nn.Module, rows: Rows, stage: Stage, objective: Objective | Term, batch_size: int, *, amp: bool = False
) -> Callable[[Tensor], None]:
    """The step of `training.loop` as it is, for the rows of an index: what a recorded one is held against."""
    optimiser = adamw(network, stage)
    network.train()

    def step(index: Tensor) -> None:
        loss = batch_loss(network, rows[index], stage, objective, stage.temperature, amp)
        optimiser.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()

    return step


class RecordedStep:
    """Called with the rows of a batch, always as many; recorded on a GPU at the first call, run as it is on a CPU.

    `temperature` and `learning_rate` are tensors to be written to; `total` adds up the losses of all steps. `average`
    is one that the optimiser's steps update.
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
