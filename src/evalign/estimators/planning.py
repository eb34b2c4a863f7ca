"""Settings of a blend's members, a cost model of their training time, and threads to train them in parallel.

Settings depend only on the size of the table, so that a seed gives the same model on any machine. The cost model is
checked by `benchmarks/bench_fit.py`.
"""

import itertools
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from evalign.training.loop import Epoch, OnEpoch

Preset = Literal["quick", "default", "best"]
PRESETS: dict[Preset, tuple[str, ...]] = {
    "quick": ("linear", "forest", "boost"),
    "default": ("linear", "forest", "boost", "network"),
    "best": ("linear", "forest", "boost", "network"),
}
TREES = {"quick": 30, "default": 60, "best": 200}
EPOCHS = {"quick": 20, "default": 60, "best": 120}
SECONDS = {"quick": 8.0, "default": 40.0, "best": 400.0}  # of one core for boosted trees, and for the network
MANY, LARGE = 20_000, 60_000  # rows above which there are three folds, and a single division if every class is frequent
RARE = 100  # held-out rows of the rarest class, below which one division is too noisy
RESERVED = 0.08  # share of a time limit reserved for a long step in progress
LAST_STEP = 0.1  # CPU seconds that a member may overrun
FLOPS = 1.2e10  # of one core in a network's products, dropout and optimiser included


@dataclass(frozen=True)
class Shape:
    """Size of a table, on which the cost of training depends; `width` counts its encoded columns."""

    rows: int
    columns: int
    width: int
    classes: int
    folds: int

    @property
    def trained(self) -> float:
        """Total training rows of all folds."""
        return self.rows * (self.folds - 1 if self.folds > 1 else 0.8)

    @property
    def outputs(self) -> int:
        return 1 if self.classes == 2 else self.classes


def automatic_folds(labels: NDArray[np.int64], fraction: float) -> int:
    """5, on large tables 3, and 1 where a single division holds out enough rows of every class.

    >>> [automatic_folds(np.repeat([0, 1], [n, rare]), 0.2) for n, rare in ((900, 90), (30_000, 90), (90_000, 900))]
    [5, 3, 1]
    """
    if len(labels) <= MANY:
        return 5
    counts = np.bincount(labels)
    return 1 if len(labels) > LARGE and fraction * counts[counts > 0].min() >= RARE else 3


def member_options(name: str, preset: Preset, shape: Shape, budget: float | None = None) -> dict[str, Any]:
    """Options of a member; `budget` is in seconds of one core, instead of the preset's.

    >>> member_options("boost", "default", Shape(1500, 9, 18, 3, 5))["leaves"]
    7
    """
    rows = shape.trained / max(1, shape.folds - 1)
    seconds = budget or SECONDS[preset] * max(1.0, shape.rows / 25_000)
    if name == "forest":
        return {"trees": TREES[preset], "columns": shape.columns**-0.5, "min_rows": 2}
    if name == "boost":
        leaves = 7 if rows < 2000 else 15 if rows < 10_000 else 31
        options = {"leaves": leaves, "columns": 0.7, "rows": 0.8, "patience": 15 if preset == "quick" else 30}
        per_round = boost_seconds(shape, leaves)
        rounds = int(min(1000.0, max(20.0, seconds / per_round)))
        # Larger steps compensate for fewer rounds than usual.
        return {**options, "rounds": rounds, "learning_rate": min(0.3, max(0.1, 0.1 * 200 / rounds))}
    if name == "network":
        hidden = (256, 128)
        epochs = int(min(EPOCHS[preset], max(8.0, seconds / network_seconds(shape, hidden))))
        ensemble = {"ensemble": 2} if preset == "best" else {}
        return {"hidden": hidden, "epochs": epochs, **ensemble}
    return {}


def estimated_seconds(name: str, options: Mapping[str, Any], shape: Shape) -> float:
    """Seconds of one core to fit a member on all folds.

    >>> round(estimated_seconds("forest", {"trees": 60}, Shape(1500, 9, 18, 3, 5)), 1)
    1.1
    """
    if name == "linear":
        return 2e-8 * shape.trained * shape.width * shape.outputs + 0.02
    if name == "forest":
        tree = 15e-9 * (shape.trained / shape.folds) * math.log2(shape.rows + 2) * math.sqrt(shape.columns) + 3e-3
        return float(shape.folds * options.get("trees", 200) * tree)
    if name == "boost":
        usual = min(options.get("rounds", 1000), 150 + options.get("patience", 30))
        return float(usual * boost_seconds(shape, options.get("leaves", 31)) + 2e-8 * shape.rows * shape.columns)
    epochs, hidden = options.get("epochs") or 200, options.get("hidden", (512, 256, 128))
    return float(epochs * options.get("ensemble", 1) * network_seconds(shape, hidden) + 0.3)


def decision_seconds(shape: Shape) -> float:
    """Seconds to learn the decision.

    >>> round(decision_seconds(Shape(1000, 6, 12, 8, 5)), 2)
    0.36
    """
    held_out = shape.rows if shape.folds > 1 else 0.2 * shape.rows
    return 0.03 * min(shape.classes, 8) + 5.5e-6 * held_out * math.sqrt(shape.classes) * shape.classes


def least_seconds(names: Sequence[str], preset: Preset, shape: Shape) -> float:
    """Seconds of one core for the encoder, the decision and the training of every member between checks of the time."""
    total = 0.1 + 5.5e-7 * shape.rows * shape.columns + decision_seconds(shape)
    for name in names:
        options = member_options(name, preset, shape, 1e-3)
        part = {"forest": 1 / 6, "network": 1 / 4}.get(name, 1.0)  # of the smallest settings
        total += part * estimated_seconds(name, options, shape)
    return total


def boost_seconds(shape: Shape, leaves: int) -> float:
    """Seconds of a boosting round on all folds."""
    cells = shape.trained * shape.columns * 8e-9 * math.log2(leaves) / 5
    return shape.outputs * (cells + shape.folds * 2e-5 * leaves)


def network_seconds(shape: Shape, hidden: tuple[int, ...]) -> float:
    """Seconds of an epoch on all folds."""
    sizes = (shape.width, *hidden, shape.classes)
    weights = sum(a * b for a, b in itertools.pairwise(sizes))
    return 6 * weights * shape.trained / FLOPS + 0.02


class TimeBudget:
    """Time left of a limit, on a machine that may be busy with other work; infinity without a limit.

    `reserved` are seconds of CPU for what follows training. Deadlines are times of `time.monotonic`.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds, self.reserved = seconds, LAST_STEP
        self._started, self._started_cpu = time.monotonic(), time.process_time()

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self._started

    @property
    def slowdown(self) -> float:
        """Wall seconds per CPU second: first estimated from the processes waiting for each core, then measured."""
        waiting = os.getloadavg()[0] / (os.cpu_count() or 1) if hasattr(os, "getloadavg") else 1.0
        guess = min(max(1.0, waiting), 3.0)  # more of them may be of low priority
        spent = time.process_time() - self._started_cpu
        return max(1.0, (self.elapsed + LAST_STEP * guess) / (spent + LAST_STEP))

    @property
    def left(self) -> float:
        return self.seconds * (1 - RESERVED) - self.elapsed - self.slowdown * self.reserved


def clock(on_epoch: OnEpoch | None, until: float, stop: threading.Event, lock: threading.Lock) -> OnEpoch:
    """A callback that ends a member's training when its time is up or all members must stop."""

    def call(epoch: Epoch) -> None:
        if on_epoch is not None:
            with lock:
                try:
                    on_epoch(epoch)
                except KeyboardInterrupt:
                    stop.set()
        if stop.is_set() or time.monotonic() >= until:
            raise KeyboardInterrupt

    return call


def loud(on_epoch: OnEpoch | None, metric: str) -> OnEpoch:
    """A callback that prints a line for every step of training, and then calls `on_epoch`."""

    def call(epoch: Epoch) -> None:
        known = {metric: epoch.score, "loss": epoch.loss}
        values = ", ".join(f"{name} {value:.4f}" for name, value in known.items() if not math.isnan(value))
        print(f"{epoch.stage} {epoch.epoch}: {values or f'{epoch.seconds:.1f} s'}")
        if on_epoch is not None:
            on_epoch(epoch)

    return call


def side_by_side(lanes: Sequence[Callable[[], None]], stop: threading.Event) -> None:
    """Run each lane in a separate thread; Ctrl-C asks all of them to stop, and an error in one ends the others.

    The calling thread only waits, because Python raises KeyboardInterrupt in the main thread.
    """
    with ThreadPoolExecutor(len(lanes)) as pool:
        futures: list[Future[None]] = [pool.submit(lane) for lane in lanes]
        try:
            wait(futures, return_when=FIRST_EXCEPTION)
        except KeyboardInterrupt:
            stop.set()
        if any(future.done() and future.exception() is not None for future in futures):
            stop.set()
    for future in futures:
        future.result()


@contextmanager
def few_threads(count: int) -> Iterator[None]:
    """Limit the threads of a library call, so that parallel lanes do not compete for cores."""
    before = torch.get_num_threads()
    with threadpool_limits(max(1, count)):
        torch.set_num_threads(max(1, count))
        try:
            yield
        finally:
            torch.set_num_threads(before)
