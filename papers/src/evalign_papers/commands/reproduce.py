"""`evalign reproduce`: run the papers' tables and compare them with the printed numbers."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from evalign.cli import options as o

if TYPE_CHECKING:
    from evalign.cli.console import Output
    from evalign_papers.engine.cells import Cell
    from evalign_papers.engine.printed import Table
    from evalign_papers.engine.scheduler import Done

NAME = "reproduce"
EXAMPLE = "evalign reproduce btg-1 --data-dir ~/data"
RUN, SHOWN = "What to run", "What to show"
PROCESSES_ON_A_GPU = 8


def command(
    tables: Annotated[
        list[str] | None, typer.Argument(metavar="TABLE", help="btg-1, east-1, … or all.", show_default=False)
    ] = None,
    list_tables: Annotated[
        bool,
        typer.Option(
            "--list", help="List the tables with their state at --budget, and running time.", rich_help_panel=SHOWN
        ),
    ] = False,
    report: Annotated[
        bool,
        typer.Option(
            "--report",
            help="Write an HTML page of all tables; runs nothing unless TABLE is given.",
            rich_help_panel=SHOWN,
        ),
    ] = False,
    out: Annotated[Path, typer.Option("--out", help="File of the page.", rich_help_panel=SHOWN)] = Path(
        "reproduction.html"
    ),
    protocol: Annotated[
        str, typer.Option("--protocol", help="honest, paper (as printed) or both.", rich_help_panel=RUN)
    ] = "both",
    dataset: Annotated[
        list[str] | None, typer.Option("--dataset", help="Only these data sets; repeatable.", rich_help_panel=RUN)
    ] = None,
    row: Annotated[
        list[str] | None,
        typer.Option("--row", help="Only these rows, by cell name; repeatable.", rich_help_panel=RUN),
    ] = None,
    budget: Annotated[
        str,
        typer.Option(
            "--budget",
            help="reduced, or printed: the papers' grids and patience, BtG's epochs as released.",
            rich_help_panel=RUN,
        ),
    ] = "reduced",
    trials: Annotated[
        int | None,
        typer.Option("--trials", min=1, help="Maximum trials per cell; later runs add the rest.", rich_help_panel=RUN),
    ] = None,
    engine: Annotated[
        str, typer.Option("--engine", help="joblib: local processes; ray: a Ray cluster.", rich_help_panel=RUN)
    ] = "joblib",
    jobs: Annotated[
        int | None,
        typer.Option(
            "--jobs", min=1, help="Parallel processes. Default: one per core, eight on a GPU.", rich_help_panel=RUN
        ),
    ] = None,
    device: o.Device = "auto",
    data_dir: Annotated[
        Path | None,
        typer.Option("--data-dir", help="Folder with the files. Default: $EVALIGN_DATA.", show_default=False),
    ] = None,
    papers: Annotated[
        Path | None,
        typer.Option(
            "--papers",
            help="Folder of tables, configs and reports; by default ./evalign-papers.",
            show_default=False,
        ),
    ] = None,
    force: o.Force = False,
    quiet: o.Quiet = False,
    json: o.Json = False,
) -> None:
    """Run tables of the papers, cell by cell, and compare them with the printed numbers.

    A cell is a config; its report is written beside it after every step, so the same command resumes a killed run.
    Complete cells are not run again. Data sets found neither in --data-dir nor in $EVALIGN_DATA are downloaded from
    their source or from OpenML if possible. --list and --report download nothing.
    """
    from evalign.checks import check_choice
    from evalign.cli.console import EXIT_INTERRUPTED, Output
    from evalign_papers.engine.printed import all_tables, find_papers, load_table, writable_papers
    from evalign_papers.engine.scheduler import ENGINES

    output = Output(quiet=quiet, as_json=json)
    check_choice("protocol", protocol, ["honest", "paper", "both"])
    check_choice("budget", budget, ["reduced", "printed"])
    check_choice("engine", engine, ENGINES)
    home = writable_papers(papers) if tables else find_papers(papers)
    named = list(all_tables(home)) if tables == ["all"] else [load_table(home, name) for name in tables or ()]
    if report and out.exists() and not force:
        raise ValueError(f"--out {out} exists; choose another name, or pass --force to overwrite it")
    if not (named or list_tables or report):
        raise ValueError("expected a table to reproduce, got none; see evalign reproduce --list")
    failed: list[Done] = []
    if named:
        wanted = ("honest", "paper") if protocol == "both" else (protocol,)
        cells = select(home, named, wanted, dataset, row)
        if budget == "printed":
            from evalign_papers.engine.cells import at_printed_budget

            cells = [at_printed_budget(cell) for cell in cells]
        try:
            failed = work(
                home, cells, output, data_dir=None if data_dir is None else str(data_dir),
                device=o.resolve_device(device), jobs=jobs, engine=engine, trials=trials,
            )  # fmt: skip
        except KeyboardInterrupt:
            text = f"evalign: interrupted; finished trials are kept in {home}, the same command runs the rest"
            output.stderr.print(text, markup=False, soft_wrap=True)
            raise SystemExit(EXIT_INTERRUPTED) from None
    _show(output, home, named, list_tables, data_dir, budget)
    if report:
        from evalign_papers.render.html_page import write_page

        output.show(f"Page: {write_page(home, out, data_dir)}")
    for error, cells_of_it in _by_error(failed).items():
        first, more = cells_of_it[0], len(cells_of_it) - 1
        what = f"{first} and {more} more were" if more else f"{first} was"
        output.stderr.print(f"evalign: {what} not run: {error}", markup=False, soft_wrap=True)
    if failed:
        raise typer.Exit(2)


def select(
    papers: Path, tables: "list[Table]", protocols: tuple[str, ...], datasets: list[str] | None, rows: list[str] | None
) -> "list[Cell]":
    """Select the requested cells of tables, each once; an unknown name is an error."""
    from evalign.checks import check_choice
    from evalign_papers.engine.cells import cells_of

    for name in datasets or ():
        check_choice("dataset", name, sorted({dataset for table in tables for dataset in table.datasets}))
    for name in rows or ():
        check_choice("row", name, sorted({row.cell for table in tables for row in table.rows}))
    found = {cell.path: cell for table in tables for cell in cells_of(papers, table, protocols)}
    return [
        cell for cell in found.values()
        if (not datasets or cell.dataset in datasets) and (not rows or cell.row in rows)
    ]  # fmt: skip


def work(
    home: Path, cells: "list[Cell]", output: "Output", *, data_dir: str | None, device: str, jobs: int | None,
    engine: Any, trials: int | None,
) -> "list[Done]":  # fmt: skip
    """Run incomplete cells with a progress bar; returns those that failed."""
    from evalign_papers.engine.scheduler import Done, is_open, pieces_of, run_cells
    from evalign_papers.engine.trial_data import absent_data

    todo = [cell for cell in cells if is_open(cell, trials)]
    absent = absent_data((cell.config for cell in todo), data_dir)
    failed = [Done(cell.name, 0, 0.0, absent[name]) for cell in todo if (name := cell.config.data.name) in absent]
    todo = [cell for cell in todo if cell.config.data.name not in absent]
    if not todo:
        return failed
    jobs = jobs or (PROCESSES_ON_A_GPU if device.startswith("cuda") else os.cpu_count() or 1)
    jobs = min(jobs, len(pieces_of(todo, trials)))
    output.say(f"{len(todo)} of {len(cells)} cells to run, {jobs} at once on {device}; reports go to {home}")
    with _bar(output, len(todo)) as advance:
        for done in run_cells(todo, data_dir=data_dir, device=device, jobs=jobs, engine=engine, trials=trials):
            advance(done)
            if done.error is not None:
                failed.append(done)
    return failed


def _by_error(failed: "list[Done]") -> dict[str | None, list[str]]:
    """Failed cells by error, so that a missing data set is reported once."""
    found: dict[str | None, list[str]] = {}
    for one in failed:
        found.setdefault(one.error, []).append(one.cell)
    return found


@contextmanager
def _bar(output: "Output", total: int) -> Iterator[Any]:
    """Cells done and time left on a terminal, a line for each cell elsewhere."""
    if output.quiet or not sys.stderr.isatty():
        count = iter(range(1, total + 1))
        yield lambda done: output.say(f"{next(count)}/{total} {done.cell}: {done.error or f'{done.seconds:.0f} s'}")
        return
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn(), TextColumn("{task.description}"),
    )  # fmt: skip
    with Progress(*columns, console=output.stderr, transient=True) as bar:
        task = bar.add_task("", total=total)
        yield lambda done: bar.update(task, advance=1, description=done.cell)


def _show(
    output: "Output", papers: Path, named: "list[Table]", list_tables: bool, data_dir: Path | None, budget: str
) -> None:
    from evalign_papers.analysis.facts import count_facts
    from evalign_papers.analysis.filled import fill
    from evalign_papers.engine.printed import all_tables
    from evalign_papers.render.terminal import show

    rows = [
        state(papers, table, printed=budget == "printed") for table in (all_tables(papers) if list_tables else named)
    ]
    output.json({"tables": rows})
    if list_tables:
        output.show(_overview(rows))
    for table in named if not output.as_json else ():
        show(fill(papers, table), output.console, count_facts(table, data_dir) if table.kind == "facts" else ())


def state(papers: Path, table: "Table", *, printed: bool = False) -> dict[str, Any]:
    """Number of complete cells of a table, and the seconds they took; with `printed` at the printed budget."""
    from evalign_papers.engine.cells import at_printed_budget, cells_of

    cells = [at_printed_budget(cell) if printed else cell for cell in cells_of(papers, table)]
    reports = [report for report in (cell.report for cell in cells) if report is not None]
    planned = len({(row.cell, dataset) for row in table.rows for dataset in table.datasets})
    complete = sum(report.complete for report in reports)
    if table.kind == "facts":
        word = "counted, not trained"
    elif not cells:
        word = "no plan yet"
    else:
        word = "complete" if complete == len(cells) else "not run" if not reports else "partly run"
    return {
        "table": table.name, "title": table.title, "source": table.source, "state": word, "cells": len(cells),
        "complete": complete, "seconds": round(sum(report.seconds for report in reports), 1), "rows_by_data": planned,
        "command": table.command,
    }  # fmt: skip


def _overview(rows: list[dict[str, Any]]) -> Any:
    from rich.table import Table as Grid

    grid = Grid(box=None, padding=(0, 2, 0, 0))
    for name in ("table", "what it is"):
        grid.add_column(name)
    for name in ("cells done", "seconds so far"):
        grid.add_column(name, justify="right")
    grid.add_column("state")
    for one in rows:
        cells = f"{one['complete']}/{one['cells']}" if one["cells"] else ""
        grid.add_row(one["table"], one["title"], cells, f"{one['seconds']:.0f}" if one["cells"] else "", one["state"])
    return grid
