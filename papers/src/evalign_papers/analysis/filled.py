"""Tables filled from reports: each number as printed, as measured by the paper's protocol, and by the honest one."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from math import isnan, nan
from pathlib import Path
from statistics import fmean, stdev
from typing import Literal

from evalign_papers.analysis.distance import Distance, distance
from evalign_papers.engine.printed import Printed, Row, Table
from evalign_papers.engine.reports import Report, load_report
from evalign_papers.engine.settings import (
    LONGER_BUDGET,
    POSITIVE_BUDGET,
    PRINTED_BUDGET,
    RELEASED_BUDGET,
    reductions,
)

State = Literal["not planned", "no config", "not run", "partial", "complete"]
STATES: tuple[State, ...] = ("not planned", "no config", "not run", "partial", "complete")
SUFFIX = ".report.json"
BUDGETS = (
    POSITIVE_BUDGET,
    PRINTED_BUDGET,
    RELEASED_BUDGET,
    LONGER_BUDGET,
    "@larger-positive",
    "@short-positive",
    "@larger",
)
FEWEST_TRIALS = 3


@dataclass(frozen=True)
class Measured:
    """The scores of one cell under one protocol, trial by trial; empty if it was not run.

    `reduced` lists the respects in which the run is below the printed budget.
    """

    scores: Mapping[int, float]
    state: State = "no config"
    planned: int | None = None
    reduced: tuple[str, ...] = ()
    quirks: tuple[str, ...] = ()
    without_test: Mapping[int, float] = field(default_factory=dict)  # the scores without `test_chooses`

    @property
    def one_split(self) -> bool:
        return "one_split" in self.quirks

    @property
    def values(self) -> list[float]:
        return list(self.scores.values())

    @property
    def mean(self) -> float | None:
        return fmean(self.values) if self.scores else None

    @property
    def std(self) -> float | None:
        """The sample standard deviation, None for fewer than two trials."""
        return stdev(self.values) if len(self.scores) > 1 else None


@dataclass(frozen=True)
class Number:
    """A number of a table: printed, measured under the paper's protocol, measured honestly."""

    row: Row
    dataset: str
    metric: str
    decimals: tuple[int, int]
    printed: Printed | None
    measured: Mapping[str, Measured]
    incomparable: tuple[str, ...] = ()  # protocols that measure something other than what was printed

    @property
    def reduced(self) -> bool:
        """Whether the paper's protocol ran below the printed budget."""
        return "paper" in self.measured and bool(self.measured["paper"].reduced)

    @cached_property
    def distance(self) -> Distance | None:
        """Distance of the paper's protocol from the printed number; None if there is nothing to compare."""
        return self.distance_of(self.measured["paper"].values) if "paper" in self.measured else None

    @cached_property
    def distance_without_test(self) -> Distance | None:
        """The same without the quirk `test_chooses`, if the report has it."""
        found = self.measured.get("paper")
        return None if found is None else self.distance_of(list(found.without_test.values()) or found.values)

    def distance_of(self, values: Sequence[float]) -> Distance | None:
        """Distance of trials of the paper's protocol from the printed number."""
        if self.printed is None or "paper" in self.incomparable:
            return None
        fresh = self.measured["honest"].values if "honest" in self.measured else ()
        one_split = self.measured["paper"].one_split
        return distance(self.printed, values, self.decimals, one_split=one_split, over_splits=fresh)


@dataclass(frozen=True)
class FilledTable:
    table: Table
    cells: tuple[Number, ...]

    def cell(self, row: Row, dataset: str, metric: str) -> Number:
        return self._by_place[row.label, dataset, metric]

    @cached_property
    def _by_place(self) -> dict[tuple[str, str, str], Number]:
        return {(cell.row.label, cell.dataset, cell.metric): cell for cell in self.cells}

    def states(self, protocol: str) -> dict[tuple[str, str], State]:
        """State of every run of the table, by row and data set: the best state of its metrics."""
        best: dict[tuple[str, str], State] = {}
        for cell in self.cells:
            state, place = cell.measured[protocol].state, (cell.row.label, cell.dataset)
            best[place] = max(best.get(place, state), state, key=STATES.index)
        return {place: state for place, state in best.items() if state != "not planned"}


def distinct_numbers(filled: Iterable[FilledTable]) -> list[tuple[Table, Number, Distance]]:
    """Printed numbers with their distances; a number of one run that several tables print counts once."""
    found: dict[tuple[object, ...], tuple[Table, Number, Distance]] = {}
    for one in filled:
        for cell in one.cells:
            if cell.distance is not None:
                number = (cell.row.folder, cell.row.cell, cell.dataset, cell.metric, cell.printed)
                found.setdefault(number, (one.table, cell, cell.distance))
    return list(found.values())


def fill(papers: Path, table: Table) -> FilledTable:
    """Every row, data set and metric of a table, with the scores of existing reports."""
    return FilledTable(table, tuple(_cells(papers, table)) if table.kind == "runs" else ())


def _cells(papers: Path, table: Table) -> Iterator[Number]:
    for row in table.rows:
        for dataset in table.datasets:
            paths = {name: report_path(papers, row, name, dataset) for name in table.protocols}
            for metric in table.metrics:
                measured = {
                    name: measure(
                        read_report(path), row.decision or table.decision[name], metric, empty=_empty(row, name, path)
                    )
                    for name, path in paths.items()
                }
                printed = row.printed.get(dataset, {}).get(metric)
                other = tuple(name for name in paths if not table.comparable(row, dataset, metric, name))
                yield Number(row, dataset, metric, table.decimals, printed, measured, other)


def report_path(papers: Path, row: Row, protocol: str, dataset: str) -> Path:
    """The report of a row at its largest budget."""
    return largest_budget(papers / row.folder / protocol / f"{dataset}.{row.cell}")


def largest_budget(cell: Path) -> Path:
    """The report of a cell's largest budget among those with at least three trials, else of the cell itself.

    The F1 of the positive class (`-positive`) comes before macro F1: only it meets the printed numbers of EAST on
    two classes.
    """
    for budget in BUDGETS:
        path = cell.with_name(f"{cell.name}{budget}{SUFFIX}")
        report = read_report(path)
        if report is not None and len(report.trials) >= FEWEST_TRIALS:
            return path
    return cell.with_name(f"{cell.name}{SUFFIX}")


def read_report(path: Path) -> Report | None:
    """Read a report, or return None; reports are shared by tables, and cached until they change."""
    if not path.is_file():
        return None
    beside = [file.stat() for file in (path, _config_path(path)) if file.is_file()]
    return _parsed(path, tuple((status.st_mtime_ns, status.st_size) for status in beside))


@lru_cache(maxsize=4096)
def _parsed(path: Path, changed: tuple[tuple[int, int], ...]) -> Report:
    return load_report(path)  # refuses a report of a config other than the one next to it


def _config_path(report: Path) -> Path:
    return report.with_name(f"{report.name.removesuffix(SUFFIX)}.json")


def _empty(row: Row, protocol: str, path: Path) -> State:
    """State of a cell without a report: not run, or no config; our own rows have no config of the paper's protocol."""
    if _config_path(path).is_file():
        return "not run"
    return "not planned" if row.extra and protocol == "paper" else "no config"


def measure(report: Report | None, decision: str, score: str, *, empty: State = "no config") -> Measured:
    """One score of every trial that has it; if none has, the cell is `empty`."""
    if report is None:
        return Measured({}, empty)
    scores = {
        trial.trial: trial.scores[decision][score]
        for trial in report.trials
        if not isnan(trial.scores.get(decision, {}).get(score, nan))  # AUROC of a single class is nan
    }
    if not scores:
        return Measured({}, empty)
    reduced = tuple(reductions(report.config, report))
    state: State = "complete" if report.complete else "partial"
    variant = f"{decision}-without-test_chooses"
    fair = {t.trial: t.scores[variant][score] for t in report.trials if score in t.scores.get(variant, {})}
    return Measured(scores, state, report.config.trials, reduced, report.config.quirks, fair)
