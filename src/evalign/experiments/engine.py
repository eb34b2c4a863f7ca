"""Many cells: here, in processes (joblib; they may share a GPU), or on a Ray cluster."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import joblib

from evalign.experiments.report import report_path, save_report
from evalign.experiments.run import run
from evalign.experiments.store import Cell, held

Engine = Literal["joblib", "ray"]
ENGINES: tuple[Engine, ...] = ("joblib", "ray")
WAVE = 4


@dataclass(frozen=True)
class Done:
    """What became of a cell. A cell that another process has in hand is left to it."""

    cell: str
    trials: int
    seconds: float
    error: str | None = None


def run_cell(path: Path, data_dir: str | None, device: str, trials: int | None) -> Done:
    """Run one cell, its report written after every step. An error is told, so that the others go on.

    Trials that another table has of the very same config are taken over, not run again.
    """
    cell, where = Cell(path), report_path(path)
    with held(path) as free:
        if not free:
            return Done(cell.name, 0, 0.0, "another process is running it")
        try:
            before, twin = cell.report, cell.twin_report()
            if twin is not None and (before is None or len(before.trials) < len(twin.trials)):
                before = twin
                save_report(before, where)
            known = 0.0 if before is None else before.seconds
            report = run(
                cell.config, report=before, data_dir=data_dir, device=device, trials=trials,
                checkpoints=cell.path.parent, save=lambda report: save_report(report, where),
            )  # fmt: skip
        except (ValueError, OSError, RuntimeError, FloatingPointError) as error:  # the last: it diverged
            return Done(cell.name, 0, 0.0, f"{type(error).__name__}: {error}")
    return Done(cell.name, len(report.trials), report.seconds - known)


def is_open(cell: Cell, trials: int | None = None) -> bool:
    """Whether a cell lacks trials; a report that does not match its config is an error, not a reason to run."""
    report = cell.report
    wanted = cell.config.trials if trials is None else min(trials, cell.config.trials)
    return report is None or len(report.trials) < wanted


def run_cells(
    cells: Sequence[Cell],
    *,
    data_dir: str | None = None,
    device: str = "cpu",
    jobs: int = 1,
    engine: Engine = "joblib",
    trials: int | None = None,
) -> Iterator[Done]:
    """Run the cells that are not complete, and tell of each when it is done, in whatever order."""
    todo = [cell for cell in cells if is_open(cell, trials)]
    if jobs == 1 and engine == "joblib":
        for cell in todo:
            yield run_cell(cell.path, data_dir, device, trials)
        return
    with _backend(engine, device, jobs):
        tasks = [joblib.delayed(run_cell)(cell.path.resolve(), data_dir, device, trials) for cell in todo]
        if engine == "joblib":
            yield from joblib.Parallel(n_jobs=jobs, return_as="generator_unordered", batch_size=1)(tasks)
            return
        # Ray's backend tells of a whole call at once, so a call has few cells.
        for start in range(0, len(tasks), WAVE * jobs):
            yield from joblib.Parallel(n_jobs=jobs, batch_size=1)(tasks[start : start + WAVE * jobs])


def _backend(engine: Engine, device: str, jobs: int) -> Any:
    if engine == "ray":
        try:
            from ray.util.joblib import register_ray
        except ImportError:
            raise ValueError("--engine ray needs Ray; install it with: pip install 'evalign[ray]'") from None
        register_ray()  # type: ignore[no-untyped-call]
        return joblib.parallel_config("ray")
    return joblib.parallel_config("loky", inner_max_num_threads=max(1, (joblib.cpu_count() or 1) // jobs))
