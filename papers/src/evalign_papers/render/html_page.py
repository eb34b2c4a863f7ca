"""All tables on one self-contained HTML page: printed, the paper's protocol and honest, side by side."""

from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from evalign.storage.atomic import write_atomically
from evalign_papers.analysis.distance import VERDICTS
from evalign_papers.analysis.facts import Fact, count_facts
from evalign_papers.analysis.filled import FilledTable, Number, distinct_numbers, fill
from evalign_papers.engine.printed import all_tables
from evalign_papers.render.figure_parts import Drawn
from evalign_papers.render.figures import imbalance, trade_off
from evalign_papers.render.step_figures import STEP_FIGURES
from evalign_papers.render.wording import (
    LEGEND,
    columns,
    mark,
    measured_number,
    not_run,
    printed_number,
    reduced_notes,
    state_of,
)

TRADE_OFFS = ("btg-4", "btg-s6")


def write_page(papers: Path, out: Path, data_dir: str | Path | None = None) -> Path:
    """The page of all tables, from the reports that exist; `data_dir` is for the printed facts about data."""
    filled = [fill(papers, table) for table in all_tables(papers)]
    facts = {one.table.name: count_facts(one.table, data_dir) for one in filled if one.table.kind == "facts"}
    return write_atomically(out, render_page(filled, facts))


def render_page(
    filled: Sequence[FilledTable], facts: Mapping[str, Sequence[Fact]] | None = None, created: str | None = None
) -> str:
    environment = Environment(
        loader=PackageLoader("evalign_papers.render"), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    return environment.get_template("page.html.j2").render(
        tables=[_table(one, (facts or {}).get(one.table.name, ())) for one in filled],
        figures=[drawn._replace(svg=Markup(drawn.svg)) for drawn in _figures(filled)],
        legend=LEGEND,
        summary=summary(filled),
        created=created or datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    )


def summary(filled: Sequence[FilledTable]) -> str:
    """Summary of the page in one sentence."""
    runs = [state for one in filled for protocol in one.table.protocols for state in one.states(protocol).values()]
    begin = f"{runs.count('complete')} of {len(runs)} runs are complete."
    counts = Counter(found.verdict for *_, found in distinct_numbers(one for one in filled if not one.table.is_check))
    if not counts:
        return f"{begin} No printed number has been measured under the paper's protocol yet."
    listed = ", ".join(f"{counts[name]} {name}" for name in VERDICTS)
    return f"{begin} Of {counts.total()} printed numbers measured under the paper's protocol: {listed}."


def distance_counts(filled: FilledTable) -> dict[str, int]:
    """How many printed numbers of a table are in each class of distance; empty where none was measured."""
    found = Counter(cell.distance.verdict for cell in filled.cells if cell.distance is not None)
    return {name: found[name] for name in VERDICTS} if found else {}


def _figures(filled: Sequence[FilledTable]) -> list[Drawn]:
    named = {one.table.name: one for one in filled}
    drawn: list[Drawn | None] = [figure() for figure in STEP_FIGURES]
    drawn.append(trade_off([named[name] for name in TRADE_OFFS if name in named]))
    if "checks-imbalance" in named:
        drawn.append(imbalance(named["checks-imbalance"]))
    return [one for one in drawn if one is not None]


def _table(filled: FilledTable, facts: Sequence[Fact]) -> dict[str, Any]:
    table = filled.table
    return {
        "name": table.name,
        "title": table.title,
        "source": table.source,
        "note": table.note,
        "state": state_of(filled),
        "command": table.command,
        "columns": columns(table),
        "metrics": list(table.metrics.values()),
        "blocks": [] if table.kind == "facts" else [_block(filled, dataset) for dataset in table.datasets],
        "facts": facts,
        "not_run": not_run(filled),
        "reduced": reduced_notes(filled),
        "distances": distance_counts(filled),
    }


def _block(filled: FilledTable, dataset: str) -> dict[str, Any]:
    """The numbers of one data set: for each row and metric one text for every column, with its mark."""
    rows = []
    for row in filled.table.rows:
        numbers = []
        for metric in filled.table.metrics:
            cell = filled.cell(row, dataset, metric)
            for name in columns(filled.table):
                if name == "printed":
                    numbers.append({"text": printed_number(cell.printed, cell.decimals), "mark": "", "title": ""})
                else:
                    numbers.append(
                        {
                            "text": measured_number(cell.measured[name]),
                            "mark": mark(cell, name),
                            "title": _title(cell, name),
                        }
                    )
        rows.append({"label": row.label, "extra": row.extra, "numbers": numbers})
    return {"dataset": dataset, "rows": rows}


def _title(cell: Number, protocol: str) -> str:
    """Tooltip of a mark: the difference, the interval of its size, and its class."""
    found = cell.distance
    if found is None or protocol != "paper":
        return ""
    return f"{found.difference:+.3f}; distance {found.low:.3f} to {found.high:.3f} (90 %): {found.verdict}"
