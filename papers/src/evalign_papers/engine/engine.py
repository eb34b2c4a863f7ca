"""Many cells: here, in processes (joblib; they may share a GPU), or on a Ray cluster."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import joblib

from evalign_papers.engine.report import Report, report_path, save_report
from evalign_papers.engine.run import missing_trials, run, trained_one_by_one
from evalign_papers.engine.store import Cell, held

Engine = Literal["joblib", "ray"]
ENGINES: tuple[Engine, ...] = ("joblib", "ray")
WAVE = 4
IN_OTHER_HANDS = "another process is running it"
ERRORS = (ValueError, OSError, RuntimeError, FloatingPointError)  # the last: it diverged


@dataclass(frozen=True)
class Done:
    """What became of a cell. A cell that another process has in hand is left to it."""

    cell: str
    trials: int
    seconds: float
    error: str | None = None


class Piece(NamedTuple):
    """What one process does at a time: a cell, or one trial of a cell whose trials are trained one by one."""

    cell: Cell
    trial: int | None = None


def run_cell(path: Path, data_dir: str | None, device: str, trials: int | None) -> Done:
    """Run one cell, its report written after every step. An error is told, so that the others go on.

    Trials that another table has of the very same config are taken over, not run again.
    """
    cell, where = Cell(path), report_path(path)
    with held(path) as free:
        if not free:
            return Done(cell.name, 0, 0.0, IN_OTHER_HANDS)
        try:
            before = _taken_over(cell)
            known = 0.0 if before is None else before.seconds
            report = run(
                cell.config, report=before, data_dir=data_dir, device=device, trials=trials,
                checkpoints=cell.path.parent, save=lambda report: save_report(report, where),
            )  # fmt: skip
        except ERRORS as error:
            return Done(cell.name, 0, 0.0, f"{type(error).__name__}: {error}")
    return Done(cell.name, len(report.trials), report.seconds - known)


def run_trial(path: Path, data_dir: str | None, device: str, trial: int) -> Done:
    """Run one trial of a cell, and add it to the cell's report; others may be run at the same time elsewhere."""
    cell = Cell(path)
    with held(path, shared=True) as open_to_all, held(path.with_name(f"{path.name}.{trial}")) as free:
        if not (open_to_all and free):
            return Done(cell.name, 0, 0.0, IN_OTHER_HANDS)
        try:
            alone = run(cell.config, data_dir=data_dir, device=device, only=trial)
            with held(report_path(path), wait=True):
                report = cell.report or Report(cell.config)
                if trial not in report.done:
                    report.trials += alone.trials
                    report.environment, report.seconds = alone.environment, report.seconds + alone.seconds
                    save_report(report, report_path(path))
        except ERRORS as error:
            return Done(cell.name, 0, 0.0, f"{type(error).__name__}: {error}")
    return Done(cell.name, len(report.trials), alone.seconds)


def _taken_over(cell: Cell) -> Report | None:
    """The report of a cell, with the trials of its twin in another table if that has more."""
    before, twin = cell.report, cell.twin_report()
    if twin is not None and (before is None or len(before.trials) < len(twin.trials)):
        save_report(twin, report_path(cell.path))
        return twin
    return before


def is_open(cell: Cell, trials: int | None = None) -> bool:
    """Whether a cell lacks trials; a report that does not match its config is an error, not a reason to run."""
    return bool(missing_trials(cell.config, cell.report, trials))


def pieces_of(cells: Sequence[Cell], trials: int | None = None) -> list[Piece]:
    """What many processes can do at once for the cells: single trials, which are slow ones, before whole cells."""
    single, whole = list[Piece](), list[Piece]()
    for cell in cells:
        config = cell.config
        if not trained_one_by_one(config):
            whole.append(Piece(cell))
            continue
        with held(cell.path) as free:
            report = _taken_over(cell) if free else cell.report
        # Where the twin has all of them, the cell itself is what is left to tell of.
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
    """Run the cells that are not complete, and tell of each when it is done, in whatever order."""
    todo = [cell for cell in cells if is_open(cell, trials)]
    if jobs == 1 and engine == "joblib":
        for cell in todo:
            yield run_cell(cell.path, data_dir, device, trials)
        return
    pieces = pieces_of(todo, trials)
    left = Counter(piece.cell.name for piece in pieces)
    told: dict[str, list[Done]] = {name: [] for name in left}
    for done in _run_pieces(pieces, data_dir, device, jobs, engine, trials):
        told[done.cell].append(done)
        if len(told[done.cell]) == left[done.cell]:
            yield _summed(told.pop(done.cell))


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
        # Ray's backend tells of a whole call at once, so a call has few pieces.
        for start in range(0, len(tasks), WAVE * jobs):
            yield from joblib.Parallel(n_jobs=jobs, batch_size=1)(tasks[start : start + WAVE * jobs])


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
