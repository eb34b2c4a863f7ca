"""Terminal output of commands: notes, tables, progress; and the handling of Ctrl-C and closed pipes."""

import json
import math
import os
import shutil
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
    from evalign.training.loop import Epoch

EXIT_INFEASIBLE, EXIT_INTERRUPTED, EXIT_PIPE_CLOSED = 3, 130, 141
WIDTH = 140  # maximum width of a table
SECONDS = 5.0  # seconds between progress lines without a terminal
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
    """Terminal output; `quiet` prints only errors, `as_json` only the JSON result."""

    def __init__(self, *, quiet: bool, as_json: bool, words: list[str] | None = None) -> None:
        from rich.console import Console

        self.words = words  # of the command line
        self.quiet, self.as_json = quiet or as_json, as_json
        self.notes: list[str] = []
        # A table keeps its width: on a narrow terminal its lines wrap, where rich would truncate its numbers.
        width = max(WIDTH, shutil.get_terminal_size().columns)
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
        """Turn warnings into notes, without duplicates; an infeasible constraint is a warning."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield
        for text in dict.fromkeys(str(one.message) for one in caught if issubclass(one.category, UserWarning)):
            self.note(" ".join(text.split()))

    @contextmanager
    def progress(self, steps: int, epochs: int, splits: int = 1) -> Iterator[Step]:
        """Show progress over `steps` models of at most `epochs` epochs each, with the time left.

        Shows a bar on a terminal, and elsewhere prints a line to standard error every few seconds. A model that
        estimates its time itself, such as a blend, is not measured by epochs.
        """
        if self.quiet:
            yield lambda title, split: None
            return
        if not (sys.stdout.isatty() and sys.stderr.isatty()):
            said = [time.monotonic()]

            def say(text: str, left: str, done: float, spent: float) -> None:
                if time.monotonic() - said[0] >= SECONDS and spent:
                    said[0] = time.monotonic()
                    self.say(f"{text}; {duration(spent)} so far{left}")

            yield Progress(steps, epochs, splits, say).step
            return
        from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bar

        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        with Bar(*columns, console=self.stderr, transient=True) as bar:
            task = bar.add_task("", total=1.0)

            def draw(text: str, left: str, done: float, spent: float) -> None:
                bar.update(task, completed=done, description=text + left)

            yield Progress(steps, epochs, splits, draw).step


class Progress:
    """Progress of the run; `show` gets a text, the time left in words, the share done and the seconds so far."""

    def __init__(self, steps: int, epochs: int, splits: int, show: Callable[[str, str, float, float], None]) -> None:
        self.steps, self.epochs, self.splits, self.show = steps, epochs, splits, show
        self.begun, self.started = 0, time.monotonic()

    def step(self, title: str, split: int) -> "Listener":
        name = f"{title}, split {split + 1} of {self.splits}" if self.splits > 1 else title
        listener = Listener(self, name, self.begun)
        self.show(listener.name, "", self.begun / self.steps, 0.0)
        self.begun += 1
        return listener


class Listener:
    """Callback of a model, called with each epoch, and first with an estimate of its seconds if it has one."""

    def __init__(self, progress: Progress, name: str, place: int) -> None:
        self.progress, self.name, self.place = progress, name, place
        self.started, self.expected = time.monotonic(), 0.0
        self.patience: int | None = None  # epochs without improvement before the model stops; None if unknown
        self.epochs = progress.epochs
        self.best = 0

    def follow(self, model: Any) -> None:
        """Count the rounds of boosted trees, which may exceed the epochs of other models."""
        self.patience, self.epochs = getattr(model, "patience", None), getattr(model, "rounds", None) or self.epochs

    def expect(self, seconds: float) -> None:
        self.started, self.expected = time.monotonic(), seconds

    def __call__(self, epoch: "Epoch") -> None:
        progress, now = self.progress, time.monotonic()
        spent, own = now - progress.started, now - self.started
        # Epochs of a blend are those of its members, trained in parallel, and say little about the time.
        share = own / self.expected if self.expected else epoch.epoch / self.epochs
        done = (self.place + min(share, 1.0)) / progress.steps
        left, self.best = "", epoch.epoch if epoch.best else self.best
        if self.expected and progress.splits == 1:
            left = f", about {duration(self.expected - own)} left for this model" if own < self.expected else ""
        elif self.patience is not None:  # boosted trees rarely use all their rounds
            rounds = min(self.best + self.patience, self.epochs) - epoch.epoch
            left = f", {duration(own * rounds / epoch.epoch)} left for this model unless it improves"
        elif done >= KNOWN:
            left = f", {duration(spent * (1 - done) / done)} left at most"
        unit = "epoch" if self.patience is None else "round"
        score = f", validation score {epoch.score:.4f}" if math.isfinite(epoch.score) else ""
        what = "" if self.expected else f", {unit} {epoch.epoch}{score}"
        progress.show(self.name + what, left, done, spent)


def duration(seconds: float) -> str:
    """Format a duration in words.

    >>> duration(42.3), duration(200), duration(8000)
    ('42 s', '3 min', '2.2 h')
    """
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def as_table(result: dict[str, Any]) -> Any:
    """Format the scores of a result as a table for the terminal."""
    from rich import box
    from rich.table import Table

    from evalign.report.page import score, signed

    several = result["splits"] > 1
    tested = any(row["p"] is not None for row in result["table"])
    spread = "std. error" if several else "95 % interval"
    limits = list(result["table"][0]["limits"])
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("training + decision", no_wrap=True)
    columns = [result["metric"]["title"], spread, "ours − row", spread, *(["p"] if tested else [])]
    for name in (*columns, *limits):
        table.add_column(name, justify="right", no_wrap=not limits)
    for row in result["table"]:
        own = [row["contender"], row["decision"]] == result["reference"]
        if several:
            spreads = score(row["error"]), score(row["difference_error"])
        else:
            low, high = row["interval"]
            spreads = f"{score(low)} to {score(high)}", " to ".join(map(signed, row["difference_interval"]))
        held = [score(row["limits"][name]) + " missed" * (name in row["missed"]) for name in limits]
        gap = ["–", "–"] if own else [signed(row["difference"]), spreads[1]]
        if tested:
            gap.append("–" if own or row["p"] is None else f"{row['p']:.2g}")
        table.add_row(
            row["title"], score(row["score"]), spreads[0], *gap, *held,
            style="bold" if own else None,
        )  # fmt: skip
    return table
