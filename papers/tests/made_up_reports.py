"""Made-up reports for tests of the output: a copy of the tables with made-up scores."""

import shutil
from collections.abc import Sequence
from pathlib import Path

from evalign_papers.engine.config import VERSION, Config, Data, Method
from evalign_papers.engine.printed import find_papers
from evalign_papers.engine.reports import Report, TrialReport, save_report

PAPERS = find_papers()


def copy_tables(to: Path, *names: str) -> Path:
    """The tables without the real reports."""
    for name in names or [f"{path.parent.parent.name}-{path.parent.name}" for path in PAPERS.glob("*/*/table.json")]:
        folder = to / name.replace("-", "/", 1)
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(PAPERS / name.replace("-", "/", 1) / "table.json", folder)
    return to


def write_report(
    papers: Path,
    cell: str,
    scores: dict[str, dict[str, Sequence[float]]],
    *,
    planned: int | None = None,
    decide_for: str = "f1",
) -> Path:
    """`cell` is "btg/1/honest/mammography.f1", `scores` the values of every trial by decision and metric."""
    count = len(next(iter(next(iter(scores.values())).values())))
    protocol, name = cell.split("/")[-2:]
    assert protocol in ("honest", "paper")
    config = Config(
        version=VERSION, cell=cell, protocol=protocol,
        data=Data(name.split(".")[0], protocol, {}, None, "standard"), method=Method("made_up", {}), network=None,
        training=None, grid=None, decide_for=decide_for, quirks=(), trials=planned or count, seed=0,
    )  # fmt: skip
    trials = [
        TrialReport(
            trial, trial, {}, 5, 0.1,
            {rule: {metric: values[trial] for metric, values in of.items()} for rule, of in scores.items()},
        )
        for trial in range(count)
    ]  # fmt: skip
    path = papers / f"{cell}.report.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    save_report(Report(config, trials), path)
    return path
