"""Cells on disk: <paper>/<table>/<protocol>/<dataset>.<cell>.json with the report next to it."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from filelock import FileLock, Timeout

from evalign_papers.engine.config import Config, read_config
from evalign_papers.engine.printed import Table
from evalign_papers.engine.reports import Report, load_report, report_path
from evalign_papers.engine.settings import PRINTED_BUDGET, RELEASED_BUDGET


@dataclass(frozen=True)
class Cell:
    """A config on disk and the report next to it, if any."""

    path: Path

    @property
    def name(self) -> str:
        return "/".join(self.path.parts[-4:]).removesuffix(".json")

    @property
    def dataset(self) -> str:
        return self.path.name.split(".")[0]

    @property
    def row(self) -> str:
        """The name of a cell in the rows of its table, without the mark of a budget."""
        return self.path.name.split(".")[1].partition("@")[0]

    @property
    def config(self) -> Config:
        return read_config(self.path)

    @property
    def report(self) -> Report | None:
        where = report_path(self.path)
        return load_report(where, self.config) if where.exists() else None

    def twin_report(self) -> Report | None:
        """The report of another table's cell with the same config: equal seeds give equal trials, so they run once.

        Among several, the one with the most trials; the environment names its cell.
        """
        own = self.config
        found: list[Report] = []
        for path in sorted(self.path.parents[3].glob(f"*/*/{own.protocol}/{self.dataset}.*.json")):
            if path == self.path or not report_path(path).exists() or path.name.endswith(".report.json"):
                continue
            if replace(read_config(path), cell=own.cell) == own:
                found.append(load_report(report_path(path)))
        if not found:
            return None
        best = max(found, key=lambda report: len(report.trials))
        environment = {**best.environment, "trials_of": best.environment.get("trials_of", best.config.cell)}
        return replace(best, config=own, environment=environment)


def cells_of(papers: Path, table: Table, protocols: Sequence[str] = ("honest", "paper")) -> list[Cell]:
    """Cells of a table that have a config, including those borrowed from other tables.

    Grouped by data set, so that each is loaded once.
    """
    paths = [
        papers / row.folder / protocol / f"{dataset}.{row.cell}.json"
        for dataset in table.datasets
        for row in table.rows
        for protocol in protocols
    ]
    return [Cell(path) for path in dict.fromkeys(paths) if path.exists()]


def at_printed_budget(cell: Cell) -> Cell:
    """The same cell at the printed (BtG: released) budget, or itself if there is none."""
    for budget in (PRINTED_BUDGET, RELEASED_BUDGET):
        beside = Cell(cell.path.with_name(cell.path.name.removesuffix(".json") + f"{budget}.json"))
        if beside.path.exists():
            return beside
    return cell


@contextlib.contextmanager
def held(path: Path, *, wait: bool = False) -> Iterator[bool]:
    """Hold the lock of a file: yields True, or False if another process has it and `wait` is not set.

    The operating system releases the lock of a process that dies. The lock file is next to the file and is removed
    while the lock is held; filelock retries a lock whose file is gone, so no process holds a stale one.
    """
    lock = FileLock(path.with_name(f".{path.name}.lock"))
    try:
        lock.acquire(timeout=-1 if wait else 0)
    except Timeout:
        yield False
        return
    try:
        yield True
    finally:
        Path(lock.lock_file).unlink(missing_ok=True)
        lock.release()
