"""Terminal output of commands: notes, tables, progress; and the handling of Ctrl-C and closed pipes."""

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
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from evalign.training.history import Epoch

EXIT_INTERRUPTED, EXIT_PIPE_CLOSED = 130, 141


@dataclass
class Interrupt:
    """Whether Ctrl-C was pressed inside `watch_interrupt`."""

    pressed: bool = False


@contextmanager
def watch_interrupt() -> Iterator[Interrupt]:
    """Record Ctrl-C, and raise KeyboardInterrupt as usual."""
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
    """Exit silently when the reader of a pipe closes it, as in `evalign predict ... | head`."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # otherwise the flush at exit raises again
        raise SystemExit(EXIT_PIPE_CLOSED) from None


Step = Callable[[str, int], "Callable[[Epoch], None] | None"]


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
        """Print a note and keep it for the report."""
        self.notes.append(text)
        self.say(f"note: {text}")

    def say(self, text: str) -> None:
        """Print a message that is not kept for the report."""
        if not self.quiet:
            self.stderr.print(text, style="dim", markup=False)

    def show(self, shown: Any) -> None:
        """Print a table or a line of the result."""
        if not self.as_json:
            self.console.print(shown, soft_wrap=isinstance(shown, str), markup=False)

    def json(self, result: dict[str, Any]) -> None:
        if self.as_json:
            sys.stdout.write(json.dumps(result, indent=2, allow_nan=False) + "\n")

    @contextmanager
    def warnings_as_notes(self) -> Iterator[None]:
        """Turn warnings into notes, each once; an infeasible constraint arrives as a warning."""
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

            def step(title: str, split: int) -> "Callable[[Epoch], None]":
                bar.update(whole, completed=begun[0], description=f"{title}, split {split + 1}")
                bar.update(inner, completed=0, visible=False)
                begun[0] += 1

                def on_epoch(epoch: "Epoch") -> None:
                    known = math.isfinite(epoch.score)  # trees that are not boosted do not look at it
                    seen = f"  validation {epoch.score:.4f}  T {epoch.temperature:.3f}" if known else ""
                    words = f"  {epoch.stage}{seen}"
                    bar.update(inner, completed=epoch.epoch, description=words, visible=True)

                return on_epoch

            yield step
