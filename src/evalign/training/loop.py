"""Train one network by a recipe: a loop one can read."""

import contextlib
import copy
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from evalign.objective import Objective, cross_entropy
from evalign.steps import StepChoice
from evalign.training.batches import Batches
from evalign.training.progress import Controller, Epoch
from evalign.training.recipes import Recipe, Stage

Score = Callable[[Tensor, Tensor, Tensor], Tensor]  # probabilities (n, C), labels (n,), weights (n,) -> hard metric
OnEpoch = Callable[[Epoch], None]


@dataclass(frozen=True)
class Rows:
    """Features, labels and weights on one device."""

    x: Tensor
    y: Tensor
    weight: Tensor

    @classmethod
    def of(cls, x: Tensor, y: Tensor, weight: Tensor | None = None) -> "Rows":
        return cls(x, y, torch.ones(len(y), dtype=x.dtype, device=x.device) if weight is None else weight)

    def __getitem__(self, index: Tensor) -> "Rows":
        return Rows(self.x[index], self.y[index], self.weight[index])

    def joined(self, other: "Rows") -> "Rows":
        return Rows(*(torch.cat(pair) for pair in zip(vars(self).values(), vars(other).values(), strict=True)))

    def __len__(self) -> int:
        return len(self.y)


def train(
    network: nn.Module,
    train_rows: Rows,
    valid_rows: Rows,
    recipe: Recipe,
    objective: Objective,
    score: Score,
    *,
    batch_size: int,
    seed: int = 0,
    stratified: bool = False,
    amp: bool = False,
    on_epoch: OnEpoch | None = None,
) -> list[Epoch]:
    """Take `network` through the stages of `recipe` and leave it with its best weights.

    `objective` has the metric; a stage sets its anchor and step. `score` is the hard metric that validation data
    are judged by. Ctrl-C ends training and keeps the best weights so far. A seed decides everything on a CPU.
    """
    history: list[Epoch] = []
    batches = Batches(len(train_rows), batch_size, seed=seed, labels=train_rows.y if stratified else None)
    devices = [train_rows.x.device] if train_rows.x.is_cuda else []
    with torch.random.fork_rng(devices), contextlib.suppress(KeyboardInterrupt):
        torch.manual_seed(seed)  # for dropout; the caller's random numbers are left as they were
        for stage in recipe.for_rows(len(train_rows), batch_size).stages:
            best = copy.deepcopy(network.state_dict())
            try:
                for epoch, improved in _run_stage(
                    network, train_rows, valid_rows, stage, at_stage(objective, stage), score, batches, amp
                ):
                    if improved:
                        best = copy.deepcopy(network.state_dict())
                    epoch.epoch = len(history) + 1
                    history.append(epoch)
                    if on_epoch is not None:
                        on_epoch(epoch)
            finally:
                network.load_state_dict(best)
    return history


def _run_stage(
    network: nn.Module,
    train_rows: Rows,
    valid_rows: Rows,
    stage: Stage,
    objective: Objective,
    score: Score,
    batches: Batches,
    amp: bool,
) -> Iterator[tuple[Epoch, bool]]:
    controller = Controller(stage)
    # Fused: one pass over the weights, a third of the default's time on a CPU.
    optimiser = torch.optim.AdamW(
        network.parameters(), lr=stage.learning_rate, weight_decay=stage.weight_decay, fused=True
    )
    while not controller.finished:
        started = time.perf_counter()
        temperature, learning_rate = controller.temperature, controller.learning_rate
        for group in optimiser.param_groups:
            group["lr"] = learning_rate
        network.train()
        losses = []
        for index in batches.epoch():
            batch = train_rows[index.to(train_rows.y.device)]
            loss = batch_loss(network, batch, stage, objective, temperature, amp)
            optimiser.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
            losses.append(loss.detach())
        values = validate(network, valid_rows, stage, objective, score, temperature)
        train_loss = float(torch.stack(losses).mean())
        if not math.isfinite(train_loss):
            raise FloatingPointError(
                f"the training loss became {train_loss} in epoch {controller.epochs + 1} of stage {stage.name!r}; "
                "lower the learning rate or look for extreme values in the features"
            )
        improved = controller.step(**values)
        yield (
            Epoch(
                0, stage.name, temperature, learning_rate, train_loss, values["loss"], values["entropy"],
                values["score"], best=improved,
                seconds=time.perf_counter() - started,
            ),
            improved,
        )  # fmt: skip


def at_stage(objective: Objective, stage: Stage) -> Objective:
    return replace(objective, anchor=stage.anchor, step=StepChoice(stage.step))


def batch_loss(
    network: nn.Module, batch: Rows, stage: Stage, objective: Objective, temperature: float, amp: bool = False
) -> Tensor:
    """1 - soft metric + anchor x cross-entropy of one batch, in float32 whatever the network runs in."""
    device = batch.x.device.type
    with torch.autocast(device, dtype=torch.bfloat16, enabled=amp):
        logits = network(batch.x)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if not stage.metric:
        return stage.anchor * cross_entropy(logits, batch.y, batch.weight, objective.task)
    return objective(logits, batch.y, batch.weight, temperature)


@torch.no_grad()
def predict_logits(network: nn.Module, x: Tensor, rows_at_once: int = 16384) -> Tensor:
    """Logits in evaluation mode, in pieces so that hidden layers never hold a whole table."""
    network.eval()
    return torch.cat([network(part).to(x.dtype) for part in torch.split(x, rows_at_once)])


@torch.no_grad()
def validate(
    network: nn.Module, rows: Rows, stage: Stage, objective: Objective, score: Score, temperature: float
) -> dict[str, float]:
    """Validation loss at this temperature, cross-entropy and hard score."""
    logits = predict_logits(network, rows.x)
    entropy = float(cross_entropy(logits, rows.y, rows.weight, objective.task))
    metric_term = 0.0
    if stage.metric:
        metric_term = float(objective.metric_term(objective.counts(logits, rows.y, rows.weight, temperature)[0]))
    return {
        "loss": metric_term + stage.anchor * entropy,
        "entropy": entropy,
        "score": float(score(logits.softmax(1), rows.y, rows.weight)),
    }
