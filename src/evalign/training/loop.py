"""The training loop: epochs, stages, cooling, early stopping, best weights; sources supply batches and steps.

On a GPU a step is recorded once as a CUDA graph and replayed, which saves the launches that dominate small networks.
"""

import contextlib
import gc
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from evalign.annealing import Geometric
from evalign.training.recipes import Stage


@dataclass
class Epoch:
    """Results of one epoch; a row of `history_`."""

    epoch: int
    stage: str
    temperature: float
    learning_rate: float
    train_loss: float
    loss: float  # on validation data, at this temperature
    entropy: float  # cross-entropy on validation data
    score: float  # the hard metric on validation data
    best: bool = False
    seconds: float = 0.0
    watched: tuple[float, ...] = ()  # values recorded on other rows, which influence no choice


class Values(NamedTuple):
    """Values of an epoch of one network: its mean training loss, then validation values, then watched ones."""

    train_loss: float
    loss: float
    entropy: float
    score: float
    watched: tuple[float, ...] = ()


class Controller:
    """State of one stage of one trial: `step` takes an epoch's validation values and tells whether they are the best.

    The stage's `monitor` names the value that selects the weights to keep and, as in the paper, tells when a
    temperature stops improving.
    """

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.heat = SimpleNamespace(temperature=stage.temperature)  # what a schedule sets
        self.cooling = (
            Geometric(self.heat, stage.temperature, stage.rate, stage.patience, stage.max_stale)
            if stage.rate is not None
            else None
        )
        self.epochs = 0
        self.waited = 0
        self.finished = False
        self.best = math.inf

    @property
    def temperature(self) -> float:
        start: float = self.heat.temperature
        end = self.stage.cool_to
        if end is None:
            return start
        passed = self.epochs / max(1, self.stage.epochs - 1)
        if self.stage.cooling == "geometric":
            return float(start * (end / start) ** passed)
        left = 1 - passed if self.stage.cooling == "linear" else (1 + math.cos(math.pi * passed)) / 2
        return end + (start - end) * left

    @property
    def learning_rate(self) -> float:
        if self.stage.decay == "none":
            return self.stage.learning_rate
        return self.stage.learning_rate * (1 + math.cos(math.pi * self.epochs / self.stage.epochs)) / 2

    def step(self, *, loss: float, entropy: float, score: float) -> bool:
        """Take one epoch's validation values; True if its weights are the ones to keep."""
        value = {"loss": loss, "entropy": entropy, "score": -score, "last": -self.epochs}[self.stage.monitor]
        self.epochs += 1
        best = value < self.best
        self.best = min(self.best, value)
        self.waited = 0 if best else self.waited + 1
        if self.cooling is None:
            self.finished = self.waited >= self.stage.patience
        else:
            self.cooling.step(value)
            self.finished = self.cooling.finished
        self.finished = self.finished or self.epochs >= self.stage.epochs
        return best


class Run:
    """Progress of one network through the stages of its recipe: controller of the current stage and history."""

    def __init__(self, stages: tuple[Stage, ...]) -> None:
        self.stages = stages
        self.history: list[Epoch] = []
        self.begin(0)

    def begin(self, number: int) -> None:
        self.number = number
        if not self.finished:
            self.controller = Controller(self.stages[number])

    @property
    def finished(self) -> bool:
        return self.number >= len(self.stages)

    @property
    def stage(self) -> Stage:
        """The current stage, or the last one of a finished run."""
        return self.controller.stage

    def record(self, values: Values, seconds: float) -> Epoch:
        """Record the values of one epoch; `best` of the result tells whether to keep its weights."""
        controller = self.controller
        temperature, learning_rate = controller.temperature, controller.learning_rate
        best = controller.step(loss=values.loss, entropy=values.entropy, score=values.score)
        number, stage = len(self.history) + 1, self.stage.name
        epoch = Epoch(number, stage, temperature, learning_rate, *values[:4], best, seconds, values.watched)
        self.history.append(epoch)
        return epoch


OnEpoch = Callable[[Epoch], None]


class Source(Protocol):
    """One or several networks with their training data: rows in memory, stacked folds, a stream."""

    def begin_stage(self, number: int, run: Run) -> None:
        """Prepare a new optimiser for network `number`, which continues from its best weights."""

    def epoch(self, runs: Sequence[Run]) -> list[Values]:
        """Train the unfinished networks for an epoch and validate them; values of finished ones are ignored."""

    def keep(self, numbers: Sequence[int]) -> None:
        """Remember the current weights of these networks as their best."""

    def restore(self, number: int) -> None:
        """Give a network its best weights."""


def run_stages(
    source: Source,
    runs: Sequence[Run],
    *,
    on_epoch: Callable[[int, Epoch], None] | None = None,
    save: Callable[[], None] | None = None,
    may_diverge: bool = False,
    catch_interrupt: bool = True,
) -> None:
    """Train every network through its stages, each from the best weights of the one before, and end with the best.

    `save` writes a checkpoint after every epoch. A loss that is not finite raises unless `may_diverge`. Ctrl-C, or an
    `on_epoch` that raises KeyboardInterrupt, ends training early if `catch_interrupt`.
    """
    for number in range(len(runs)):
        _advance(source, runs, number)  # a checkpoint may have been written at the end of a stage
    try:
        with contextlib.suppress(*([KeyboardInterrupt] if catch_interrupt else [])):
            while unfinished := [number for number, run in enumerate(runs) if not run.finished]:
                _run_epoch(source, runs, unfinished, on_epoch, save, may_diverge)
    finally:
        for number, run in enumerate(runs):
            if not run.finished:
                source.restore(number)


def _run_epoch(
    source: Source,
    runs: Sequence[Run],
    unfinished: list[int],
    on_epoch: Callable[[int, Epoch], None] | None,
    save: Callable[[], None] | None,
    may_diverge: bool,
) -> None:
    started = time.perf_counter()
    values = source.epoch(runs)
    if not may_diverge:
        for number in unfinished:
            run = runs[number]
            if not math.isfinite(loss := values[number].train_loss):
                raise FloatingPointError(
                    f"the training loss became {loss} in epoch {run.controller.epochs + 1} of stage "
                    f"{run.stage.name!r}; lower the learning rate or look for extreme values in the features"
                )
    seconds = time.perf_counter() - started
    epochs = [runs[number].record(values[number], seconds) for number in unfinished]
    source.keep([number for number, epoch in zip(unfinished, epochs, strict=True) if epoch.best])
    if save is not None:
        save()
    if on_epoch is not None:
        for number, epoch in zip(unfinished, epochs, strict=True):
            on_epoch(number, epoch)
    for number in unfinished:
        _advance(source, runs, number)


def _advance(source: Source, runs: Sequence[Run], number: int) -> None:
    """Begin a network's next stage if its current one is over."""
    run = runs[number]
    if run.controller.finished:
        source.restore(number)
        run.begin(run.number + 1)
        if not run.finished:
            source.begin_stage(number, run)


# A recording fails if another thread seeds or allocates meanwhile, so only one runs at a time.
RECORDING = threading.Lock()


class Replay:
    """Calls a step on a CPU; on a GPU, records it once as a CUDA graph and replays it.

    A step must read its inputs from, and write its outputs to, tensors that stay in place. `state` are the
    tensors it changes: recording runs the step a few times and restores them. `generators` draw its random numbers.
    """

    def __init__(
        self, state: Sequence[Tensor], device: torch.device, generators: Sequence[torch.Generator] = ()
    ) -> None:
        self.state, self.generators = state, generators
        self.records = device.type == "cuda"
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, step: Callable[[], None]) -> None:
        if not self.records:
            step()
            return
        if self.graph is None:
            with RECORDING:
                self.graph = self._record(step)
        self.graph.replay()

    def _record(self, step: Callable[[], None]) -> torch.cuda.CUDAGraph:
        saved = [tensor.detach().clone() for tensor in self.state]
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):  # lets libraries choose algorithms and workspaces before recording
                step()
        torch.cuda.current_stream().wait_stream(stream)
        with torch.no_grad():
            for tensor, old in zip(self.state, saved, strict=True):
                tensor.copy_(old)
        graph = torch.cuda.CUDAGraph()
        for generator in self.generators:
            graph.register_generator_state(generator)
        with _nothing_collected(), torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            step()
        return graph


@contextlib.contextmanager
def _nothing_collected() -> Iterator[None]:
    """Suspend garbage collection: destroying an earlier graph would abort the recording."""
    collects = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
