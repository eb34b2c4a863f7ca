"""A whole training step recorded as a CUDA graph: on a GPU a small network's step is mostly launches, and they go away.

Batches of a recording have one size, and what changes between steps (rows, temperature, learning rate) is written into
tensors that it reads.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from evalign.objective import Objective
from evalign.training.loop import Rows, batch_loss
from evalign.training.outputs import Term
from evalign.training.recipes import Stage
from evalign.training.replay import Replay


def plain_step(
    network: nn.Module, rows: Rows, stage: Stage, objective: Objective | Term, batch_size: int, *, amp: bool = False
) -> Callable[[Tensor], None]:
    """The step of `training.loop` as it is, for the rows of an index: what a recorded one is held against."""
    optimiser = torch.optim.AdamW(
        network.parameters(), lr=stage.learning_rate, weight_decay=stage.weight_decay, fused=True
    )
    network.train()

    def step(index: Tensor) -> None:
        loss = batch_loss(network, rows[index], stage, objective, stage.temperature, amp)
        optimiser.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()

    return step


class RecordedStep:
    """Called with the rows of a batch, always as many; recorded on a GPU at the first call, run as it is on a CPU.

    `temperature` and `learning_rate` are tensors to be written to; `loss` holds the last step's.
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
    ) -> None:
        device = rows.x.device
        self.network, self.rows, self.stage, self.objective, self.amp = network, rows, stage, objective, amp
        self.index = torch.zeros(batch_size, dtype=torch.long, device=device)
        recorded = device.type == "cuda"
        exact = torch.float32 if recorded else torch.float64  # kernels read float32, Python double
        self.temperature = torch.tensor(stage.temperature, dtype=exact, device=device)
        self.learning_rate = torch.tensor(stage.learning_rate, dtype=exact, device=device)
        self.loss = torch.zeros((), device=device)
        self.optimiser = torch.optim.AdamW(
            network.parameters(), lr=self.learning_rate if recorded else stage.learning_rate,
            weight_decay=stage.weight_decay, fused=True, capturable=recorded,
        )  # fmt: skip
        changed: list[Tensor] = [self.loss, *network.parameters(), *network.buffers()]
        for parameter in network.parameters():  # made now: recording must find them, and put them back
            state = {"exp_avg": torch.zeros_like(parameter), "exp_avg_sq": torch.zeros_like(parameter)}
            self.optimiser.state[parameter] = {"step": torch.zeros((), device=device), **state}
            changed += self.optimiser.state[parameter].values()
        network.train()
        # torch registers the device's own generator, which shifts and mirrors pictures, with every recording.
        self.replay = Replay(self._step, changed, device, [])

    def __call__(self, index: Tensor) -> None:
        if len(index) != len(self.index):
            raise ValueError(f"a recorded step takes {len(self.index)} rows each time, got {len(index)}")
        self.index.copy_(index)
        self.replay()

    def _step(self) -> None:
        if not self.index.is_cuda:
            for group in self.optimiser.param_groups:
                group["lr"] = float(self.learning_rate)
        temperature: float | Tensor = self.temperature if self.index.is_cuda else float(self.temperature)
        loss = batch_loss(self.network, self.rows[self.index], self.stage, self.objective, temperature, self.amp)
        self.optimiser.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimiser.step()
        self.loss.copy_(loss.detach())
