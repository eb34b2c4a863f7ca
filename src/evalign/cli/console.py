"""Terminal output of commands: notes, tables, progress; and the handling of Ctrl-C and closed pipes."""

import json
import math
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from evalign.training.history import Epoch

EXIT_INFEASIBLE, EXIT_INTERRUPTED, EXIT_PIPE_CLOSED = 3, 130, 141
SECONDS = 5.0  # between lines of progress where there is no terminal
KNOWN = 0.05  # share of the work after which the time left can be estimated


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
    """`quiet` prints nothing but errors, `as_json` nothing but the JSON result."""

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
        if not self.quiet:
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
    def progress(self, steps: int, epochs: int, splits: int = 1) -> Iterator[Step]:
        """Show progress over `steps` models of at most `epochs` epochs each, with the time left.

        A bar on a terminal; elsewhere a line to standard error every few seconds.
        """
        if self.quiet:
            yield lambda title, split: None
            return
        if not (sys.stdout.isatty() and sys.stderr.isatty()):
            yield Lines(self.say, steps, epochs, splits).step
            return
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
        with Progress(*columns, console=self.stderr, transient=True) as bar:
            task = bar.add_task("", total=steps)
            begun = [0]

            def step(title: str, split: int) -> "Callable[[Epoch], None]":
                name, place = step_name(title, split, splits), begun[0]
                bar.update(task, completed=place, description=name)
                begun[0] += 1

                def on_epoch(epoch: "Epoch") -> None:
                    done = place + min(epoch.epoch / epochs, 1.0)
                    bar.update(task, completed=done, description=f"{name}{score_of(epoch)}")

                return on_epoch

            yield step


class Lines:
    """Progress as lines of text, one every `SECONDS` at most."""

    def __init__(self, say: Callable[[str], None], steps: int, epochs: int, splits: int) -> None:
        self.say, self.steps, self.epochs, self.splits = say, steps, epochs, splits
        self.begun, self.started, self.said = 0, time.monotonic(), time.monotonic()

    def step(self, title: str, split: int) -> "Callable[[Epoch], None]":
        place, name = self.begun, step_name(title, split, self.splits)
        self.begun += 1

        def on_epoch(epoch: "Epoch") -> None:
            now = time.monotonic()
            if now - self.said >= SECONDS:
                self.said = now
                done = (place + min(epoch.epoch / self.epochs, 1.0)) / self.steps
                spent = now - self.started
                left = f", {duration(spent * (1 - done) / done)} left at most" if done >= KNOWN else ""
                self.say(f"{name}, epoch {epoch.epoch}{score_of(epoch)}; {duration(spent)} so far{left}")

        return on_epoch


def step_name(title: str, split: int, splits: int) -> str:
    return f"{title}, split {split + 1} of {splits}" if splits > 1 else title


def score_of(epoch: "Epoch") -> str:
    """The validation score of an epoch; models that are not trained in epochs have none."""
    return f", validation score {epoch.score:.4f}" if math.isfinite(epoch.score) else ""


def duration(seconds: float) -> str:
    """A duration to read.

    >>> duration(42.3), duration(200), duration(8000)
    ('42 s', '3 min', '2.2 h')
    """
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
