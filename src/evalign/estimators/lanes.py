"""Training in threads beside each other: a clock that ends it, and libraries that do not fight over cores."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import torch
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

from evalign.estimators.base import OnEpoch
from evalign.training.history import Epoch


def clock(on_epoch: OnEpoch | None, until: float | None, stop: threading.Event, lock: threading.Lock) -> OnEpoch:
    """A callback that ends a member's training when its time is over or all are to stop."""

    def call(epoch: Epoch) -> None:
        if on_epoch is not None:
            with lock:
                try:
                    on_epoch(epoch)
                except KeyboardInterrupt:
                    stop.set()
        if stop.is_set() or (until is not None and time.monotonic() >= until):
            raise KeyboardInterrupt

    return call


def side_by_side(lanes: Sequence[Callable[[], None]], stop: threading.Event) -> None:
    """Run every lane in a thread, the last one in this; Ctrl-C ends all, an error of one is raised."""
    if len(lanes) == 1:
        lanes[0]()
        return
    with ThreadPoolExecutor(len(lanes) - 1) as pool:
        others: list[Future[None]] = [pool.submit(lane) for lane in lanes[:-1]]
        try:
            lanes[-1]()
            for other in others:
                other.result()
        except KeyboardInterrupt:
            stop.set()
        except BaseException:
            stop.set()
            raise
    for other in others:
        other.result()


@contextmanager
def few_threads(count: int) -> Iterator[None]:
    """So many threads a library call, so that lanes side by side do not fight over cores."""
    before = torch.get_num_threads()
    with threadpool_limits(max(1, count)):
        try:
            yield
        finally:
            torch.set_num_threads(before)
