"""Growing boosted trees on folds with early stopping, by LightGBM or XGBoost.

Folds grow side by side, in one thread each: at the sizes of most tables a library that splits one tree over several
threads spends its time at barriers, and on busy cores most of it spinning.
"""

import copy
import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import repeat
from typing import Any, Literal, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from evalign.boosting.objective import ScoreObjective
from evalign.training.history import Epoch

Array = NDArray[Any]
Gradient = Callable[[Array], tuple[Array, Array]]  # scores -> first and second derivative


@dataclass(frozen=True)
class TreeOptions:
    """How an ensemble of trees is grown; `threads` are those of all folds together."""

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
    """Encoded rows with labels and weights; `categorical` are the positions of columns that hold codes."""

    x: Array
    y: Array
    weight: Array
    categorical: list[int]


class Grower(Protocol):
    """An ensemble that grows: one more tree for every score with each call of `grow`.

    Without `start` gradients come from the caller. With `start`, the scores before the first tree, the library computes
    those of cross-entropy by itself, and `grow` is called with None.
    """

    def __init__(self, train: Rows, valid: Rows, options: TreeOptions, start: Array | None = None) -> None: ...

    @staticmethod
    def prepare_thread() -> None:
        """To be called once by every thread that grows trees."""

    def grow(self, gradient: Gradient | None) -> None: ...

    def validation_scores(self) -> Array:
        """Scores of the validation rows so far, without `start` unless the grower was given one."""

    def finished(self, rounds: int) -> "Trees": ...


class Trees(Protocol):
    """A grown ensemble: scores (n,) of two classes, (n, C) of more; text in the library's own format."""

    def scores(self, x: Array) -> Array: ...

    def to_text(self) -> str: ...

    @classmethod
    def from_text(cls, text: str) -> Self: ...


Monitor = Literal["score", "loss", "entropy"]


@dataclass(frozen=True)
class Trained:
    """The best round, its held-out scores (fold after fold), and a row of history for every round.

    `value` is that of the monitor at the best round, lower is better; `interrupted` tells of Ctrl-C or the deadline.
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
    threads: int = 1,
    deadline: float | None = None,
) -> Trained:
    """Grow until `patience` rounds in a row were no better by the `monitor`, or `rounds` are over.

    Trees add to the scores `start`, which are the same for every row and part of the scores returned. The hard score of
    one fold on few rows is noise, so the held-out rows of all folds give one score; of equal scores the one with the
    lower loss is better. Ctrl-C, or the `deadline` in seconds of `time.perf_counter`, ends growing.
    """
    y = np.concatenate([valid.y for _, valid in folds])
    weight = np.concatenate([valid.weight for _, valid in folds])
    entropy_only = entropy_of(objective)
    # Each fold has its own: an objective remembers the labels that it has checked.
    own = [copy.copy(objective) for _ in folds]
    trained_on = [train for train, _ in folds]
    stage = "metric" if objective.metric_weight else "cross-entropy"
    history: list[Epoch] = []
    best, kept, scores, interrupted = (math.inf, math.inf), 0, np.empty(0), False
    with ThreadPoolExecutor(min(threads, len(folds)), initializer=growers[0].prepare_thread) as pool:
        try:
            for number in range(rounds):
                started = time.perf_counter()
                losses = list(pool.map(_grow, growers, trained_on, own, repeat(start), repeat(number)))
                held_out = np.concatenate([grower.validation_scores() for grower in growers]) + start
                score = objective.score(held_out, y, weight)
                loss = objective.loss(held_out, y, weight, round=number)
                entropy = entropy_only.loss(held_out, y, weight)
                value = {"score": (-score, loss), "loss": (loss, -score), "entropy": (entropy, -score)}[monitor]
                better = value < best
                if better:
                    best, kept, scores = value, number + 1, held_out
                epoch = Epoch(
                    number + 1, stage, objective.temperature_at(number), learning_rate, float(np.mean(losses)), loss,
                    entropy, score, better, time.perf_counter() - started,
                )  # fmt: skip
                history.append(epoch)
                on_round(epoch)
                if number + 1 - kept >= patience:
                    break
                if deadline is not None and time.perf_counter() >= deadline:
                    interrupted = True
                    break
        except KeyboardInterrupt:
            if not kept:
                raise
            interrupted = True
    return Trained(kept, scores, history, best, interrupted)


def entropy_of(objective: ScoreObjective) -> ScoreObjective:
    """The same task with cross-entropy alone."""
    return ScoreObjective("accuracy", task=objective.task, anchor=1.0, metric_weight=0.0)


_one_at_a_time = threading.Lock()  # numba's default threading layer does not allow parallel loops in several threads


def _grow(grower: Grower, rows: Rows, objective: ScoreObjective, start: Array, number: int) -> float:
    loss = [0.0]

    def gradient(scores: Array) -> tuple[Array, Array]:
        at = scores + start.astype(scores.dtype)
        with _one_at_a_time:
            loss[0], first, second = objective.value_and_gradient(at, rows.y, rows.weight, round=number)
        return first, second

    grower.grow(gradient)
    return loss[0]
