"""Ends from outside: Ctrl-C, which training takes as its end while it keeps its best weights, and a closed pipe."""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

EXIT_INTERRUPTED, EXIT_PIPE_CLOSED = 130, 141


@dataclass
class Interrupt:
    """Whether Ctrl-C was pressed since watching began."""

    pressed: bool = False


@contextmanager
def watch_interrupt() -> Iterator[Interrupt]:
    """Note Ctrl-C on its way to becoming a KeyboardInterrupt, as usual."""
    seen = Interrupt()

    def handler(number: int, frame: FrameType | None) -> None:
        seen.pressed = True
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, handler)
    try:
        yield seen
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def until_pipe_closes() -> Iterator[None]:
    """Stop quietly where nobody reads on, as in `evalign predict ... | head`."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else the flush at exit complains again
        raise SystemExit(EXIT_PIPE_CLOSED) from None
