"""How trees are grown, in words that mean the same to both libraries, and what a library must offer."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from evalign.boosting.objective import ScoreObjective
from evalign.training.history import Epoch

Array = NDArray[Any]
Gradient = Callable[[Array], tuple[Array, Array]]  # scores -> first and second derivative


@dataclass(frozen=True)
class TreeOptions:
    """Of one ensemble of trees."""

    learning_rate: float
    leaves: int
    min_rows: int
    l2: float
    columns: float
    rows: float
    threads: int
    seed: int
    classes: int

    @property
    def outputs(self) -> int:
        """Scores of a row: two classes need one."""
        return 1 if self.classes == 2 else self.classes


@dataclass(frozen=True)
class Rows:
    """Encoded rows with their labels and weights; `categorical` are positions of columns that hold codes."""

    x: Array
    y: Array
    weight: Array
    categorical: list[int]


class Grower(Protocol):
    """An ensemble that grows: one more tree for every score with each call of `grow`."""

    def __init__(self, train: Rows, valid: Rows, options: TreeOptions) -> None: ...

    def grow(self, gradient: Gradient) -> None: ...

    def validation_scores(self) -> Array: ...

    def finished(self, rounds: int) -> "Trees": ...


class Trees(Protocol):
    """An ensemble that is done: scores (n,) of two classes, (n, C) of more; text in the library's own format."""

    def scores(self, x: Array) -> Array: ...

    def to_text(self) -> str: ...

    @classmethod
    def from_text(cls, text: str) -> Self: ...


Monitor = Literal["score", "loss", "entropy"]


@dataclass(frozen=True)
class Trained:
    """The best round, the held-out scores it had (fold after fold), and a row of history for every round.

    `value` is what the monitor gave it, the lower the better; `interrupted` tells of Ctrl-C.
    """

    rounds: int
    scores: Array
    history: list[Epoch]
    value: tuple[float, float]
    interrupted: bool


def train_folds(
    growers: Sequence[Grower],
    folds: Sequence[tuple[Rows, Rows]],
    objective: ScoreObjective,
    start: Array,
    *,
    rounds: int,
    patience: int,
    monitor: Monitor,
    learning_rate: float,
    on_round: Callable[[Epoch], None] = lambda epoch: None,
) -> Trained:
    """Grow until `patience` rounds in a row were no better by the `monitor`, or `rounds` are over.

    Trees grow on from the scores `start`, which are the same for every row and part of the scores returned.

    One fold's hard score on few rows is noise, and the round that is best by it is picked by luck; so the held-out
    rows of all folds give one score, and of equal scores the one with the lower loss is better. Ctrl-C ends growing.
    """
    y = np.concatenate([valid.y for _, valid in folds])
    weight = np.concatenate([valid.weight for _, valid in folds])
    plain = entropy_of(objective)
    history: list[Epoch] = []
    best, kept, scores, interrupted = (math.inf, math.inf), 0, np.empty(0), False
    try:
        for number in range(rounds):
            started = time.perf_counter()
            losses = [
                _grow(grower, train, objective, start, number)
                for grower, (train, _) in zip(growers, folds, strict=True)
            ]
            held_out = np.concatenate([grower.validation_scores() for grower in growers]) + start
            score = objective.score(held_out, y, weight)
            loss, entropy = objective.loss(held_out, y, weight, round=number), plain.loss(held_out, y, weight)
            value = {"score": (-score, loss), "loss": (loss, -score), "entropy": (entropy, -score)}[monitor]
            better = value < best
            if better:
                best, kept, scores = value, number + 1, held_out
            epoch = Epoch(
                number + 1, "metric" if objective.metric_weight else "cross-entropy", objective.temperature_at(number),
                learning_rate, float(np.mean(losses)), loss, entropy, score, better, time.perf_counter() - started,
            )  # fmt: skip
            history.append(epoch)
            on_round(epoch)
            if number + 1 - kept >= patience:
                break
    except KeyboardInterrupt:
        if not kept:
            raise
        interrupted = True
    return Trained(kept, scores, history, best, interrupted)


def entropy_of(objective: ScoreObjective) -> ScoreObjective:
    """The same task with cross-entropy alone, for watching it."""
    return ScoreObjective("accuracy", task=objective.task, anchor=1.0, metric_weight=0.0)


def _grow(grower: Grower, rows: Rows, objective: ScoreObjective, start: Array, number: int) -> float:
    loss = [0.0]

    def gradient(scores: Array) -> tuple[Array, Array]:
        at = scores + start.astype(scores.dtype)
        loss[0], first, second = objective.value_and_gradient(at, rows.y, rows.weight, round=number)
        return first, second

    grower.grow(gradient)
    return loss[0]
