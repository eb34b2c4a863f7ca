"""Grow boosted trees on all folds in parallel, with early stopping on all held-out rows together.

Each fold grows in one thread: on tables of usual size, threads within one tree mostly wait at barriers.
"""

import copy
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import repeat
from typing import Literal, NamedTuple, Protocol

import numpy as np
from scipy.special import expit, softmax

from evalign import checks
from evalign.boosting.score_objective import Array, ScoreObjective, TextTrees
from evalign.tables.split import Division
from evalign.training.loop import Epoch

Gradient = Callable[[Array], tuple[Array, Array]]  # scores -> first and second derivative


@dataclass(frozen=True)
class TreeOptions:
    """Options for growing an ensemble of trees.

    `threads` is the total for all folds, `patience` the successive rounds without improvement that end growing, and
    `categorical` the positions of columns that hold codes.
    """

    learning_rate: float
    leaves: int
    min_rows: int
    l2: float
    columns: float
    rows: float
    threads: int
    seed: int
    classes: int
    rounds: int = 1000
    patience: int = 30
    library: str = "lightgbm"
    categorical: Sequence[int] = ()

    @property
    def outputs(self) -> int:
        """Number of scores per row: one for two classes."""
        return 1 if self.classes == 2 else self.classes


@dataclass(frozen=True)
class TreeRows:
    """Encoded rows with labels and weights."""

    x: Array
    y: Array
    weight: Array


class Grower(Protocol):
    """An ensemble under construction: each call of `grow` adds one tree for every score.

    Without `start` the caller gives the gradients. With `start`, the scores before the first tree, `grow` is called
    with None, and the library computes the gradients of cross-entropy.
    """

    trees: type[TextTrees]

    def __init__(self, train: TreeRows, valid: TreeRows, options: TreeOptions, start: Array | None = None) -> None: ...

    @staticmethod
    def prepare_thread() -> None:
        """Call once in every thread that grows trees."""

    def grow(self, gradient: Gradient | None) -> None: ...

    def validation_scores(self) -> Array:
        """Scores of the validation rows so far, without `start` unless the grower was given one."""

    def finished(self, rounds: int) -> TextTrees: ...


Monitor = Literal["score", "loss", "entropy"]


@dataclass(frozen=True)
class Grown:
    """Boosted trees per fold, truncated at the best round, and probabilities (n, C) of held-out rows, fold after fold.

    `value` is the monitor at the best round, lower is better; `interrupted` is True after Ctrl-C.
    """

    trees: list[TextTrees]
    start: Array
    held_out: Array
    rounds: int
    history: list[Epoch]
    value: tuple[float, float] = (0.0, 0.0)
    interrupted: bool = False


LIBRARIES = ("lightgbm", "xgboost")


def find_library(name: str) -> type[Grower]:
    """The `Grower` of a library, imported on first use.

    >>> find_library("lightgbm").__name__
    'LightGBMGrower'
    """
    checks.check_choice("library", name, LIBRARIES)
    try:
        if name == "lightgbm":
            from evalign.boosting.lightgbm import LightGBMGrower

            return LightGBMGrower
        from evalign.boosting.xgboost import XGBoostGrower

        return XGBoostGrower
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise ImportError(
            f"library={name!r} needs the package {name}; install it with pip install 'evalign[boost]'"
        ) from None


def is_installed(name: str) -> bool:
    """Whether a library can be imported, without importing it."""
    return find_spec(name) is not None


class _HeldOut(NamedTuple):
    """Log-loss summed over a fold's held-out rows, their weight, and their confusion matrix."""

    loss: float
    weight: float
    matrix: Array


_one_at_a_time = threading.Lock()  # numba's default threading layer does not allow parallel loops in several threads


@dataclass(frozen=True)
class _Fold:
    grower: Grower
    train: TreeRows
    valid: TreeRows
    classes: int

    def grow(self, rounds: int) -> list[_HeldOut]:
        """Grow `rounds` trees with the library's own objective."""
        return [self._grow_once() for _ in range(rounds)]

    def _grow_once(self) -> _HeldOut:
        self.grower.grow(None)
        y, weight, classes = self.valid.y, self.valid.weight, self.classes
        p = as_probabilities(self.grower.validation_scores())
        losses = -np.log(np.maximum(p[np.arange(len(y)), y], np.finfo(np.float64).tiny))
        matrix = np.bincount(y * classes + p.argmax(1), weight, minlength=classes**2).reshape(classes, classes)
        return _HeldOut(float(losses @ weight), float(weight.sum()), matrix)

    def grow_on(self, objective: ScoreObjective, start: Array, number: int) -> float:
        """Grow one tree with the gradients of an objective; return the loss before it."""
        loss = [0.0]

        def gradient(scores: Array) -> tuple[Array, Array]:
            at = scores + start.astype(scores.dtype)
            with _one_at_a_time:
                loss[0], first, second = objective.value_and_gradient(at, self.train.y, self.train.weight, round=number)
            return first, second

        self.grower.grow(gradient)
        return loss[0]


@contextmanager
def _growing(
    x: Array, codes: Array, divisions: Sequence[Division], options: TreeOptions, start: Array | None
) -> Iterator[tuple[ThreadPoolExecutor, list[_Fold]]]:
    """The folds with a grower each, and threads for growing."""
    grower = find_library(options.library)
    workers = max(1, min(options.threads, len(divisions)))
    each = replace(options, threads=max(1, options.threads // workers))

    def rows(places: Array, weight: Array) -> TreeRows:
        return TreeRows(x[places], codes[places], weight)

    def made(number: int) -> _Fold:
        d, own = divisions[number], replace(each, seed=(options.seed + number) % 2**31)
        train, valid = rows(d.train, d.train_weight), rows(d.valid, d.valid_weight)
        return _Fold(grower(train, valid, own, start), train, valid, options.classes)

    with ThreadPoolExecutor(workers, initializer=grower.prepare_thread) as pool:
        yield pool, list(pool.map(made, range(len(divisions))))


def grow_on_metric(
    x: Array,
    codes: Array,
    divisions: Sequence[Division],
    options: TreeOptions,
    objective: ScoreObjective,
    start: Array,
    *,
    monitor: Monitor = "loss",
    on_round: Callable[[Epoch], None] = lambda epoch: None,
) -> Grown:
    """Grow with an objective for all rounds, or until `patience` successive ones did not improve the `monitor`.

    Trees add to the scores `start`, which are the same for every row. One fold's hard score on few rows is noise, so
    the held-out rows of all folds are scored together; the lower loss breaks ties. Ctrl-C, or an `on_round` that raises
    KeyboardInterrupt, ends growing.
    """
    entropy_only = ScoreObjective("accuracy", task=objective.task, anchor=1.0, metric_weight=0.0)
    stage = "metric" if objective.metric_weight else "cross-entropy"
    history: list[Epoch] = []
    best, kept, scores, interrupted = (math.inf, math.inf), 0, np.empty(0), False
    with _growing(x, codes, divisions, options, None) as (pool, folds):
        y = np.concatenate([fold.valid.y for fold in folds])
        weight = np.concatenate([fold.valid.weight for fold in folds])
        # A copy for each fold: an objective caches the labels that it has checked.
        own = [copy.copy(objective) for _ in folds]
        try:
            for number in range(options.rounds):
                started = time.perf_counter()
                losses = list(pool.map(_Fold.grow_on, folds, own, repeat(start), repeat(number)))
                held_out = np.concatenate([fold.grower.validation_scores() for fold in folds]) + start
                score = objective.score(held_out, y, weight)
                loss = objective.loss(held_out, y, weight, round=number)
                entropy = entropy_only.loss(held_out, y, weight)
                value = {"score": (-score, loss), "loss": (loss, -score), "entropy": (entropy, -score)}[monitor]
                better = value < best
                if better:
                    best, kept, scores = value, number + 1, held_out
                epoch = Epoch(
                    number + 1, stage, objective.temperature_at(number), options.learning_rate,
                    float(np.mean(losses)), loss, entropy, score, better, time.perf_counter() - started,
                )  # fmt: skip
                history.append(epoch)
                on_round(epoch)
                if number + 1 - kept >= options.patience:
                    break
        except KeyboardInterrupt:
            if not kept:
                raise
            interrupted = True
        trees = [fold.grower.finished(kept) for fold in folds]
    return Grown(trees, start, as_probabilities(scores), kept, history, best, interrupted)


def cross_fit(
    x: Array,
    codes: Array,
    divisions: Sequence[Division],
    options: TreeOptions,
    *,
    tolerance: float = 2e-3,
    score: Callable[[Array], float] | None = None,
    on_round: Callable[[Epoch], None] = lambda epoch: None,
) -> Grown:
    """Boosted trees on cross-entropy for every fold, with the library's own objective, stopped by held-out log-loss.

    All folds have the same number of rounds, the best by the log-loss of all held-out rows together. Growing ends when
    `patience` rounds have not lowered that loss by a share of `tolerance`, or by Ctrl-C as in `grow_on_metric`. `score`
    maps the confusion matrix (C, C) of these rows to a number for the history, whose training loss is the held-out one.

    >>> from evalign.tables.split import fold_rows
    >>> x, codes = np.arange(60.0)[:, None], np.repeat([0, 1], 30)
    >>> folds = fold_rows(codes, np.ones(60), 3, seed=0)
    >>> options = TreeOptions(0.1, 7, 2, 1.0, 1.0, 1.0, threads=1, seed=0, classes=2, rounds=20)
    >>> fitted = cross_fit(x, codes, folds, options)
    >>> fitted.held_out.shape, len(fitted.trees)
    ((60, 2), 3)
    """
    total = np.bincount(codes, np.sum([_spread(d, len(codes)) for d in divisions], axis=0), minlength=options.classes)
    start = prior_scores(total)
    history: list[Epoch] = []
    best, kept, chunk = math.inf, 0, 1
    mark, marked = math.inf, 0  # loss and number of the last round that improved clearly
    with _growing(x, codes, divisions, options, start) as (pool, folds):
        try:
            while len(history) < options.rounds and len(history) - marked < options.patience:
                started = time.perf_counter()
                chunk = min(chunk, options.rounds - len(history))
                grown = list(pool.map(_Fold.grow, folds, repeat(chunk)))
                seconds = (time.perf_counter() - started) / chunk
                for losses in zip(*grown, strict=True):
                    mass = sum(found.weight for found in losses)
                    loss = sum(found.loss for found in losses) / mass
                    value = 0.0 if score is None else score(np.sum([found.matrix for found in losses], axis=0))
                    better = loss < best
                    best, kept = (loss, len(history) + 1) if better else (best, kept)
                    epoch = Epoch(
                        len(history) + 1, "cross-entropy", 0.0, options.learning_rate, loss, loss, loss, value, better,
                        seconds,
                    )  # fmt: skip
                    history.append(epoch)
                    on_round(epoch)
                    if loss < mark * (1 - tolerance):
                        mark, marked = loss, len(history)
                    if len(history) - marked >= options.patience:
                        break  # ignore the rest of the chunk, whose length depends on timing
                chunk = max(1, min(10, int(0.2 / max(seconds, 1e-9))))
        except KeyboardInterrupt:
            if not kept:
                raise
        trees = list(pool.map(lambda fold: fold.grower.finished(kept), folds))
        scores = list(pool.map(lambda fold, own: own.scores(fold.valid.x) + start, folds, trees))
    return Grown(trees, start, as_probabilities(np.concatenate(scores)), kept, history)


def _spread(division: Division, rows: int) -> Array:
    """The validation weight of every row, 0 outside of the fold."""
    weight = np.zeros(rows)
    weight[division.valid] = division.valid_weight
    return weight


def prior_scores(totals: Array) -> Array:
    """Scores at which every row has the class shares as probabilities: one for two classes, else C.

    >>> prior_scores(np.array([3.0, 1.0])).round(3)
    np.float64(-1.099)
    """
    logs = np.log(np.maximum(totals / totals.sum(), np.finfo(np.float64).tiny))
    return np.asarray(logs[1] - logs[0]) if len(totals) == 2 else logs - logs.mean()


def as_probabilities(scores: Array) -> Array:
    """Scores (n,) of two classes or (n, C) of more as probabilities (n, C), in float64.

    >>> as_probabilities(np.zeros(1)), as_probabilities(np.zeros((1, 4)))
    (array([[0.5, 0.5]]), array([[0.25, 0.25, 0.25, 0.25]]))
    """
    scores = np.asarray(scores, dtype=np.float64)
    return np.stack([expit(-scores), expit(scores)], axis=1) if scores.ndim == 1 else softmax(scores, axis=1)
