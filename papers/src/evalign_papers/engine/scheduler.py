"""Run many cells: sequentially, in processes (joblib; they may share a GPU), or on a Ray cluster."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import joblib

from evalign_papers.engine.cells import Cell, held
from evalign_papers.engine.reports import Report, report_path, save_report
from evalign_papers.engine.run_cell import missing_trials, run, trained_one_by_one

Engine = Literal["joblib", "ray"]
ENGINES: tuple[Engine, ...] = ("joblib", "ray")
WAVE = 4
BUSY = "another process is running it"
ERRORS = (ValueError, OSError, RuntimeError, ImportError, FloatingPointError)  # the last: the cell diverged


@dataclass(frozen=True)
class Done:
    """Outcome of a cell: trials in its report, seconds spent now, and the error if there was one."""

    cell: str
    trials: int
    seconds: float
    error: str | None = None


class Piece(NamedTuple):
    """Unit of work of one process: a cell, or one trial of a cell whose trials are trained one by one."""

    cell: Cell
    trial: int | None = None


def run_cell(path: Path, data_dir: str | None, device: str, trials: int | None) -> Done:
    """Run one cell and save its report after every step. Errors are returned, so that other cells still run.

    Trials of the same config in another table are copied, not run again.
    """
    cell, where = Cell(path), report_path(path)
    with held(path) as free:
        if not free:
            return Done(cell.name, 0, 0.0, BUSY)
        try:
            before = _with_twin_trials(cell)
            known = 0.0 if before is None else before.seconds
            if not trained_one_by_one(cell.config):
                report = run(
                    cell.config, report=before, data_dir=data_dir, device=device, trials=trials,
                    checkpoints=cell.path.parent, save=lambda report: save_report(report, where),
                )  # fmt: skip
                return Done(cell.name, len(report.trials), report.seconds - known)
            missing = missing_trials(cell.config, before, trials)
        except ERRORS as error:
            return Done(cell.name, 0, 0.0, _reason(error))
    if not missing:
        return Done(cell.name, 0 if before is None else len(before.trials), 0.0)
    return _summed([run_trial(path, data_dir, device, trial) for trial in missing])


def run_trial(path: Path, data_dir: str | None, device: str, trial: int) -> Done:
    """Run one trial of a cell and add it to the cell's report; other processes may run other trials meanwhile."""
    cell = Cell(path)
    with held(path.with_name(f"{path.name}.{trial}")) as free:
        if not free:
            return Done(cell.name, 0, 0.0, BUSY)
        try:
            alone = run(cell.config, data_dir=data_dir, device=device, only=trial)
            with held(report_path(path), wait=True):
                report = cell.report or Report(cell.config)
                if trial not in report.done:
                    report.trials += alone.trials
                    report.environment, report.seconds = alone.environment, report.seconds + alone.seconds
                    save_report(report, report_path(path))
        except ERRORS as error:
            return Done(cell.name, 0, 0.0, _reason(error))
    return Done(cell.name, len(report.trials), alone.seconds)


def _with_twin_trials(cell: Cell) -> Report | None:
    """The report of a cell, or that of the same config in another table if it has more trials."""
    before, twin = cell.report, cell.twin_report()
    if twin is not None and (before is None or len(before.trials) < len(twin.trials)):
        save_report(twin, report_path(cell.path))
        return twin
    return before


def is_open(cell: Cell, trials: int | None = None) -> bool:
    """Whether a cell lacks trials; a report that does not match its config is an error, not a reason to run."""
    return bool(missing_trials(cell.config, cell.report, trials))


def pieces_of(cells: Sequence[Cell], trials: int | None = None) -> list[Piece]:
    """Units of work that can run at once; single trials, which are the slow ones, come first."""
    single, whole = list[Piece](), list[Piece]()
    for cell in cells:
        config = cell.config
        if not trained_one_by_one(config):
            whole.append(Piece(cell))
            continue
        with held(cell.path) as free:
            report = _with_twin_trials(cell) if free else cell.report
        # A cell whose twin has all trials must still be reported as done.
        single += [Piece(cell, trial) for trial in missing_trials(config, report, trials)] or [Piece(cell)]
    return single + whole


def run_cells(
    cells: Sequence[Cell],
    *,
    data_dir: str | None = None,
    device: str = "cpu",
    jobs: int = 1,
    engine: Engine = "joblib",
    trials: int | None = None,
) -> Iterator[Done]:
    """Run the incomplete cells; yields each when done, in any order."""
    todo = [cell for cell in cells if is_open(cell, trials)]
    if jobs == 1 and engine == "joblib":
        for cell in todo:
            yield run_cell(cell.path, data_dir, device, trials)
        return
    pieces = pieces_of(todo, trials)
    remaining = Counter(piece.cell.name for piece in pieces)
    finished: dict[str, list[Done]] = {name: [] for name in remaining}
    for done in _run_pieces(pieces, data_dir, device, jobs, engine, trials):
        finished[done.cell].append(done)
        if len(finished[done.cell]) == remaining[done.cell]:
            yield _summed(finished.pop(done.cell))


def _run_pieces(
    pieces: Sequence[Piece], data_dir: str | None, device: str, jobs: int, engine: Engine, trials: int | None
) -> Iterator[Done]:
    with _backend(engine, device, jobs):
        tasks = [
            joblib.delayed(run_cell)(cell.path.resolve(), data_dir, device, trials)
            if trial is None
            else joblib.delayed(run_trial)(cell.path.resolve(), data_dir, device, trial)
            for cell, trial in pieces
        ]
        if engine == "joblib":
            yield from joblib.Parallel(n_jobs=jobs, return_as="generator_unordered", batch_size=1)(tasks)
            return
        # Ray's backend returns a whole call at once, so each call has few pieces.
        for start in range(0, len(tasks), WAVE * jobs):
            yield from joblib.Parallel(n_jobs=jobs, batch_size=1)(tasks[start : start + WAVE * jobs])


def _reason(error: Exception) -> str:
    """The message of an error; errors that are not ours need their class to be understood.

    >>> _reason(ValueError("x must be positive, got 0")), _reason(RuntimeError("-1"))
    ('x must be positive, got 0', 'RuntimeError: -1')
    """
    return str(error) if isinstance(error, ValueError | FloatingPointError) else f"{type(error).__name__}: {error}"


def _summed(parts: Sequence[Done]) -> Done:
    errors = [part.error for part in parts if part.error is not None]
    seconds = sum(part.seconds for part in parts)
    return Done(parts[0].cell, max(part.trials for part in parts), seconds, errors[0] if errors else None)


def _backend(engine: Engine, device: str, jobs: int) -> Any:
    if engine == "ray":
        try:
            from ray.util.joblib import register_ray
        except ImportError:
            raise ValueError("--engine ray needs Ray; install it with: pip install 'evalign[ray]'") from None
        register_ray()  # type: ignore[no-untyped-call]
        return joblib.parallel_config("ray")
    return joblib.parallel_config("loky", inner_max_num_threads=max(1, (joblib.cpu_count() or 1) // jobs))
