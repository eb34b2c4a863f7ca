"""A progress bar with the metric, the temperature and the time left."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from evalign.training.progress import Epoch
from evalign.training.recipes import Recipe


def describe(epoch: Epoch, metric: str) -> str:
    """One epoch in a few words.

    >>> describe(Epoch(3, "metric", 0.16, 3e-4, 0.4, 0.5, 0.3, 0.81), "f1")
    'metric  f1 0.8100  T 0.160'
    """
    return f"{epoch.stage}  {metric} {epoch.score:.4f}  T {epoch.temperature:.3f}"


@contextlib.contextmanager
def epoch_bar(recipe: Recipe, metric: str, *, enabled: bool, console: Any = None) -> Iterator[Callable[[Epoch], None]]:
    """Shows every epoch given to it; the time left is an upper bound, since stages may stop early."""
    if not enabled:
        yield lambda epoch: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, transient=True, console=console) as progress:
        task = progress.add_task("training", total=recipe.epochs)
        ends, seen = [sum(s.epochs for s in recipe.stages[: i + 1]) for i in range(len(recipe.stages))], [0]

        def show(epoch: Epoch) -> None:
            # A stage that stopped early has no epochs left: jump to where the next one begins.
            stage = next(i for i, s in enumerate(recipe.stages) if s.name == epoch.stage)
            start = ends[stage] - recipe.stages[stage].epochs
            seen[0] = max(seen[0] + 1, start + 1)
            progress.update(task, completed=seen[0], description=describe(epoch, metric))

        yield show
