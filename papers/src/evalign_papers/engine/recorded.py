"""Updates of one network recorded as a CUDA graph and replayed: no launch waits for Python."""

import torch
from torch import Tensor, nn

from evalign.confusion import Task
from evalign.objective import Objective
from evalign.training.batches import Rows, Term
from evalign.training.in_memory import InMemory, Phase, adamw, batch_loss
from evalign.training.loop import Replay, Run
from evalign.training.recipes import Stage


def recordable(network: nn.Module, stage: Stage) -> torch.optim.AdamW:
    """An optimiser that can be recorded: on a GPU its learning rate is there too."""
    device = next(network.parameters()).device
    if device.type != "cuda":
        return adamw(network, stage)
    return adamw(network, stage, lr=torch.tensor(stage.learning_rate, device=device), capturable=True)


class RecordedStep:
    """An update on the rows of an index of fixed length: recorded on a GPU at the first call, run directly on a CPU.

    `temperature` and `learning_rate` are tensors to write to; `total` adds up the losses of all steps.
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
    ) -> None:
        device = rows.x.device
        self.network, self.rows, self.stage, self.objective = network, rows, stage, objective
        self.amp, self.task, self.offset = amp, task, offset
        self.optimiser = recordable(network, stage) if optimiser is None else optimiser
        self.index = torch.zeros(batch_size, dtype=torch.long, device=device)
        self.captured = device.type == "cuda"
        exact = torch.float32 if self.captured else torch.float64  # kernels read float32, Python double
        self.temperature = torch.tensor(stage.temperature, dtype=exact, device=device)
        self.learning_rate = torch.tensor(stage.learning_rate, dtype=exact, device=device)
        if self.captured:
            self.learning_rate = self.optimiser.param_groups[0]["lr"]
        self.total = torch.zeros((), dtype=torch.float64, device=device)
        changed: list[Tensor] = [self.total, *network.parameters(), *network.buffers()]
        for parameter in network.parameters():  # created now: recording must find and restore them
            state = self.optimiser.state[parameter]
            if not state:
                averages = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
                state |= {"step": torch.zeros((), device=device), **averages}
            changed += state.values()
        network.train()
        # torch registers the device's own generator, which shifts and mirrors images, with every recording.
        self.replay = Replay(changed, device)

    def __call__(self, index: Tensor) -> None:
        if len(index) != len(self.index):
            raise ValueError(f"a recorded step takes {len(self.index)} rows each time, got {len(index)}")
        self.index.copy_(index)
        self.replay(self._step)

    def _step(self) -> None:
        temperature: float | Tensor = self.temperature
        if not self.captured:
            temperature = float(self.temperature)
            for group in self.optimiser.param_groups:
                group["lr"] = float(self.learning_rate)
        phase = Phase(self.stage, self.objective, temperature, self.offset)
        loss = batch_loss(self.network, self.rows[self.index], phase, self.amp, task=self.task)
        self.optimiser.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimiser.step()
        self.total += loss.detach()


class RecordedRows(InMemory):
    """`InMemory` with recorded steps of one batch size, so that each epoch leaves out a few, different rows."""

    step: RecordedStep | None

    def begin_stage(self, number: int, run: Run) -> None:
        self.optimiser, self.step = recordable(self.network, run.stage), None

    def run_updates(self, run: Run, phase: Phase) -> Tensor:
        size = len(self.train) // self.batches.count
        if self.step is None:
            self.step = RecordedStep(
                self.network, self.train, run.stage, phase.objective, size, amp=self.amp, task=self.task,
                offset=phase.offset, optimiser=self.optimiser,
            )  # fmt: skip
        step = self.step
        step.temperature.fill_(run.controller.temperature)
        step.learning_rate.fill_(run.controller.learning_rate)
        step.total.zero_()
        order = self.batches.order()[: size * self.batches.count].to(self.train.y.device)
        for index in torch.split(order, size):
            step(index)
        return step.total / self.batches.count
