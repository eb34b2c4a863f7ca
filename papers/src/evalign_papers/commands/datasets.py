"""`evalign datasets`: list the data sets, where their files are, and their class imbalance."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from evalign.cli import options as o

if TYPE_CHECKING:
    from rich.table import Table

    from evalign_papers.datasets import Card
    from evalign_papers.datasets.folders import Store

NAME = "datasets"
EXAMPLE = "evalign datasets --data-dir ~/data --check"


def command(
    name: Annotated[str | None, typer.Argument(help="Show the details of this data set.", show_default=False)] = None,
    data_dir: Annotated[
        Path | None,
        typer.Option("--data-dir", help="Folder with the files. Default: $EVALIGN_DATA.", show_default=False),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Load the data sets that are present and verify checksums and counts.")
    ] = False,
    json: o.Json = False,
) -> None:
    """List the data sets with their state, rows, classes, imbalance and Shannon's equitability.

    The imbalance is that of the largest class to the smallest; an equitability of 1 means even classes. Counts are
    those of the papers, and loading a data set fails if its files have others. Nothing is downloaded.
    """
    from evalign.cli.console import Output
    from evalign_papers.datasets import find_card, names, open_store

    output = Output(quiet=False, as_json=json)
    store = open_store(data_dir, fetch=False)
    cards = [find_card(name)] if name is not None else [find_card(each) for each in names()]
    rows = [describe(card, store, check=check) for card in cards]
    places = [{"folder": str(place.folder), "named_by": place.named_by} for place in store.places]
    output.json({"places": places, "datasets": rows})
    if name is not None:
        output.show(card_text(cards[0], rows[0]))
    else:
        output.show(overview(rows))
        where = " then ".join(f"{place['folder']} ({place['named_by']})" for place in places)
        output.show(f"Looked in {where or 'no folder: neither --data-dir nor $EVALIGN_DATA names one'}.")
    failed = [row for row in rows if row["problem"]]
    for row in failed if name is None else ():
        output.show(f"{row['name']}: {row['problem']}")
    if failed:
        raise typer.Exit(2)


def describe(card: "Card", store: "Store", *, check: bool) -> dict[str, Any]:
    """One data set in plain types; `problem` is the error message of loading it."""
    from dataclasses import asdict

    from evalign_papers.datasets.dataset import DataError, check_dataset
    from evalign_papers.datasets.registry import ENTRIES

    found, problem = store.find(card), None
    state = "generated" if card.generated else "present" if found else "absent"
    if check and state != "absent":
        try:
            check_dataset(ENTRIES[card.name].load(store, "honest"))
            state = "checked"
        except DataError as error:
            state, problem = "damaged", " ".join(str(error).split())
    return {
        "name": card.name,
        "title": card.title,
        "kind": card.kind,
        "state": state,
        "present": state != "absent",
        "files": [str(path) for path in found.paths] if found else [],
        "wanted": [[asdict(file) for file in version.files] for version in card.versions],
        "openml": card.openml,
        "rows": card.rows,
        "classes": card.num_classes,
        "counts": dict(card.counts) or None,
        "imbalance": card.imbalance,
        "equitability": card.equitability,
        "source": card.source,
        "citation": card.citation,
        "licence": card.licence,
        "notes": list(card.notes),
        "problem": problem,
    }


def overview(rows: list[dict[str, Any]]) -> "Table":
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD)
    for title in ("name", "data set", "here"):
        table.add_column(title, no_wrap=title == "name")
    for title in ("rows", "classes", "imbalance", "equitability"):
        table.add_column(title, justify="right", no_wrap=True)
    for row in rows:
        state = row["state"]
        if state == "absent":
            state = "no, OpenML has it" if row["openml"] else "no"
        imbalance = "–" if row["imbalance"] is None else f"{row['imbalance']:.1f} : 1"
        equitability = "–" if row["equitability"] is None else f"{row['equitability']:.2f}"
        table.add_row(
            row["name"], row["title"], state, str(row["rows"]), str(row["classes"]), imbalance, equitability
        )  # fmt: skip
    return table


def card_text(card: "Card", row: dict[str, Any]) -> str:
    wanted = ", or ".join(" and ".join(file.name for file in version.files) for version in card.versions)
    lines = {
        "name": f"{card.name}: {card.title}",
        "here": row["problem"] or row["state"] + "".join(f"\n            {path}" for path in row["files"]),
        "rows": f"{card.rows}, {card.num_classes} classes",
        "counts": ", ".join(f"{name} {count}" for name, count in card.counts.items()) or "not known per class",
        "files": wanted or "none, it is generated",
        "source": card.source,
        "citation": card.citation,
        "licence": card.licence,
        "notes": "\n            ".join(card.notes),
    }
    return "\n".join(f"{title + ':':<12}{text}" for title, text in lines.items() if text)
