"""When to cool, when to stop and which weights are best: the bookkeeping of one network in training."""

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from evalign.annealing import Geometric
from evalign.training.recipes import Recipe, Stage


@dataclass
class Epoch:
    """What one epoch left behind; a row of `history_`."""

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
    watched: tuple[float, ...] = ()  # what was asked to be kept of other rows; no choice is made by it


def check_finite(train_loss: float, epoch: int, stage: str) -> None:
    """Raise FloatingPointError for a training loss that is not a finite number."""
    if not math.isfinite(train_loss):
        raise FloatingPointError(
            f"the training loss became {train_loss} in epoch {epoch} of stage {stage!r}; "
            "lower the learning rate or look for extreme values in the features"
        )


class Values(NamedTuple):
    """What an epoch of one network measured: its mean training loss, then validation values, then watched ones."""

    train_loss: float
    loss: float
    entropy: float
    score: float
    watched: tuple[float, ...] = ()


class Temperature:
    """A temperature for a schedule to set where there is no loss module."""

    def __init__(self, temperature: float) -> None:
        self.temperature = temperature


class Controller:
    """Follows one stage of one trial: `step` takes an epoch's validation values and says if they are the best.

    The stage's `monitor` names the value that picks the weights to keep; the same value, as the paper has it,
    tells when a temperature has nothing more to give.
    """

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.heat = Temperature(stage.temperature)
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
        start, end = self.heat.temperature, self.stage.cool_to
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
        if self.stage.stop_at is not None:
            self.finished = self.epochs >= self.stage.stop_at
            return True
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
        """The current stage; of a finished run the last."""
        return self.controller.stage

    def record(self, values: Values, seconds: float) -> Epoch:
        """Take the values of one epoch; the result's `best` says whether its weights are the ones to keep."""
        controller = self.controller
        temperature, learning_rate = controller.temperature, controller.learning_rate
        best = controller.step(loss=values.loss, entropy=values.entropy, score=values.score)
        epoch = Epoch(
            len(self.history) + 1, self.stage.name, temperature, learning_rate, values.train_loss, values.loss,
            values.entropy, values.score, best, seconds, values.watched,
        )  # fmt: skip
        self.history.append(epoch)
        return epoch


def describe(epoch: Epoch, metric: str) -> str:
    """One epoch in a few words.

    >>> describe(Epoch(3, "metric", 0.16, 3e-4, 0.4, 0.5, 0.3, 0.81), "f1")
    'metric  f1 0.8100  T 0.160'
    """
    return f"{epoch.stage}  {metric} {epoch.score:.4f}  T {epoch.temperature:.3f}"


@contextlib.contextmanager
def epoch_bar(recipe: Recipe, metric: str, *, enabled: bool, console: Any = None) -> Iterator[Callable[[Epoch], None]]:
    """Shows every epoch given to it; the time left is an upper bound, since stages may stop early."""
    if not enabled:
        yield lambda epoch: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, transient=True, console=console) as progress:
        task = progress.add_task("training", total=recipe.epochs)
        ends, seen = [sum(s.epochs for s in recipe.stages[: i + 1]) for i in range(len(recipe.stages))], [0]

        def show(epoch: Epoch) -> None:
            # A stage that stopped early has no epochs left: jump to where the next one begins.
            stage = next(i for i, s in enumerate(recipe.stages) if s.name == epoch.stage)
            start = ends[stage] - recipe.stages[stage].epochs
            seen[0] = max(seen[0] + 1, start + 1)
            progress.update(task, completed=seen[0], description=describe(epoch, metric))

        yield show
