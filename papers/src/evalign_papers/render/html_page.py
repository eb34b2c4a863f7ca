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
from evalign_papers.analysis.filled import FilledTable, fill
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
    counts: Counter[str] = Counter(dict.fromkeys(map(str, VERDICTS), 0))
    for one in filled:
        counts.update(distance_counts(one))
    total = counts.total()
    if not total:
        return f"{begin} No printed number has been measured under the paper's protocol yet."
    listed = ", ".join(f"{count} {name}" for name, count in counts.items())
    return f"{begin} Of {total} printed numbers measured under the paper's protocol: {listed}."


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
                            "mark": mark(filled, cell, name),
                            "title": _title(filled, row.label, dataset, metric, name),
                        }
                    )
        rows.append({"label": row.label, "extra": row.extra, "numbers": numbers})
    return {"dataset": dataset, "rows": rows}


def _title(filled: FilledTable, label: str, dataset: str, metric: str, protocol: str) -> str:
    """Tooltip of a mark: difference, standard error and p."""
    p = filled.adjusted.get((label, dataset, metric, protocol))
    row = next(row for row in filled.table.rows if row.label == label)
    test = filled.cell(row, dataset, metric).tests[protocol]
    if p is None or test is None:
        return ""
    return f"{test.difference:+.3f} (standard error {test.error:.3f}), corrected p = {p:.2g}"
