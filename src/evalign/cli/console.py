"""Ends from outside: Ctrl-C, which training takes as its end while it keeps its best weights, and a closed pipe."""

import json
import math
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

from evalign.training.history import Epoch

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


Step = Callable[[str, int], Callable[[Epoch], None] | None]


class Output:
    """`quiet` drops notes and progress, `as_json` also leaves stdout to the JSON result alone."""

    def __init__(self, *, quiet: bool, as_json: bool, words: list[str] | None = None) -> None:
        from rich.console import Console

        self.words = words  # of the command line
        self.quiet, self.as_json = quiet or as_json, as_json
        self.notes: list[str] = []
        # Without a window to fit into, tables must not be folded at 80 columns.
        width = None if sys.stdout.isatty() else 140
        self.console = Console(highlight=False, width=width)
        self.stderr = Console(stderr=True, highlight=False, soft_wrap=True)

    def note(self, text: str) -> None:
        """Something the user should know; also kept for the report."""
        self.notes.append(text)
        self.say(f"note: {text}")

    def say(self, text: str) -> None:
        """Something of the moment, not for the report."""
        if not self.quiet:
            self.stderr.print(text, style="dim", markup=False)

    def show(self, shown: Any) -> None:
        """A table or a line of the result."""
        if not self.as_json:
            self.console.print(shown, soft_wrap=isinstance(shown, str), markup=False)

    def json(self, result: dict[str, Any]) -> None:
        if self.as_json:
            sys.stdout.write(json.dumps(result, indent=2, allow_nan=False) + "\n")

    @contextmanager
    def warnings_as_notes(self) -> Iterator[None]:
        """A library's warnings as notes, each once: a constraint that cannot be met is told that way."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield
        for text in dict.fromkeys(str(one.message) for one in caught if issubclass(one.category, UserWarning)):
            self.note(" ".join(text.split()))

    @contextmanager
    def progress(self, steps: int, epochs: int) -> Iterator[Step]:
        """A bar over `steps` contenders, each of which moves it a little with every epoch of at most `epochs`."""
        if self.quiet or not (sys.stdout.isatty() and sys.stderr.isatty()):
            yield lambda title, split: None
            return
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=self.stderr, transient=True) as bar:
            whole = bar.add_task("comparing", total=steps)
            inner = bar.add_task("", total=epochs, visible=False)
            begun = [0]

            def step(title: str, split: int) -> Callable[[Epoch], None]:
                bar.update(whole, completed=begun[0], description=f"{title}, split {split + 1}")
                bar.update(inner, completed=0, visible=False)
                begun[0] += 1

                def on_epoch(epoch: Epoch) -> None:
                    known = math.isfinite(epoch.score)  # trees that are not boosted do not look at it
                    seen = f"  validation {epoch.score:.4f}  T {epoch.temperature:.3f}" if known else ""
                    words = f"  {epoch.stage}{seen}"
                    bar.update(inner, completed=epoch.epoch, description=words, visible=True)

                return on_epoch

            yield step
