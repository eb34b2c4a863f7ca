"""A table on the terminal: for every data set a block, each metric printed, under the paper's protocol and honest."""

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text

from evalign_papers.analysis.facts import Fact
from evalign_papers.analysis.filled import FilledTable, Number
from evalign_papers.render.wording import (
    LEGEND,
    NONE,
    columns,
    mark,
    measured_number,
    not_run,
    printed_number,
    reduced_notes,
    state_of,
)

LABEL, NUMBER = 32, 20  # columns that a row's name and a number take
COLOURS = {"●": "green", "◐": "green", "?": "dim", "○": "yellow", "✗": "red", "≠": "dim"}


def show(filled: FilledTable, console: Console, facts: Sequence[Fact] = ()) -> None:
    table = filled.table
    console.print(f"\n[bold]{table.name}[/bold]  {table.title}", highlight=False)
    console.print(f"[dim]{table.source} · {state_of(filled)}[/dim]", highlight=False)
    for grid in [fact_grid(facts)] if table.kind == "facts" else grids(filled, console.width):
        console.print(grid)
    if any(cell.distance for cell in filled.cells):
        console.print(f"[dim]{LEGEND}[/dim]", highlight=False)
    for line in reduced_notes(filled):
        console.print(f"[dim]{line}[/dim]", highlight=False)
    if any(lacking.state == "not run" for lacking in not_run(filled)):
        console.print(f"{NONE} is not run yet; run it with: {table.command}", highlight=False)


def grids(filled: FilledTable, width: int) -> Iterator[Grid]:
    """A block for each data set, or for each metric if the window is too narrow."""
    metrics = list(filled.table.metrics)
    needed = LABEL + len(metrics) * len(columns(filled.table)) * NUMBER
    for dataset in filled.table.datasets:
        for shown in [metrics] if needed <= width else [[metric] for metric in metrics]:
            yield _grid(filled, dataset, shown)


def _grid(filled: FilledTable, dataset: str, metrics: Sequence[str]) -> Grid:
    table = filled.table
    grid = Grid(title=dataset, title_justify="left", title_style="bold", box=None, padding=(0, 2, 0, 0))
    grid.add_column("")
    for metric in metrics:
        for name in columns(table):
            grid.add_column(f"{table.metrics[metric]}\n{name}", justify="right", no_wrap=True)
    for row in table.rows:
        cells = [filled.cell(row, dataset, metric) for metric in metrics]
        grid.add_row(row.label, *(_text(cell, name) for cell in cells for name in columns(table)))
    return grid


def _text(cell: Number, name: str) -> Text:
    if name == "printed":
        return Text(printed_number(cell.printed, cell.decimals))
    sign = mark(cell, name)
    text = Text(measured_number(cell.measured[name]))
    return text.append(f" {sign}", style=COLOURS[sign]) if sign else text


def fact_grid(facts: Sequence[Fact]) -> Grid:
    grid = Grid(box=None, padding=(0, 2, 0, 0))
    for name in ("data set", "what", "printed", "counted"):
        grid.add_column(name, justify="left" if name in ("data set", "what") else "right")
    for fact in facts:
        grid.add_row(fact.dataset, fact.title, str(fact.printed), NONE if fact.counted is None else str(fact.counted))
    return grid
