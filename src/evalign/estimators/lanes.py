"""Training in threads beside each other: a clock that ends it, and libraries that do not fight over cores."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager

import torch
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

from evalign.training.loop import Epoch

OnEpoch = Callable[[Epoch], None]


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
    """Run every lane in a thread of its own; Ctrl-C asks all of them to stop, an error of one ends the others.

    This thread only waits: Python raises KeyboardInterrupt in the main thread alone, wherever it is.
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
    """So many threads a library call, so that lanes side by side do not fight over cores."""
    before = torch.get_num_threads()
    with threadpool_limits(max(1, count)):
        torch.set_num_threads(max(1, count))
        try:
            yield
        finally:
            torch.set_num_threads(before)
