"""One step of training: the loss of a batch, its gradient, an update; as it is, or recorded as a CUDA graph.

On a GPU a step of a small network is mostly launches, and a recording has none. Its batches have one size, and what
changes between steps (rows, temperature, learning rate) is written into tensors that it reads.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from evalign.confusion import Task
from evalign.objective import Objective, cross_entropy
from evalign.training.average import WeightAverage
from evalign.training.outputs import Term, flat, mean_over_members, with_offset
from evalign.training.recipes import Stage
from evalign.training.replay import Replay
from evalign.training.rows import Rows


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
