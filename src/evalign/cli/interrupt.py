"""Ctrl-C: training takes it as its end and keeps its best weights; this remembers that it was pressed."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

EXIT_INTERRUPTED = 130


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
