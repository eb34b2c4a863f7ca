"""The papers' tables as data: `<paper>/<table>/table.json` holds the printed numbers and the cells of each row."""

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

PROTOCOLS = ("paper", "honest")
FILE = "table.json"
PACKAGED = Path(__file__).resolve().parents[1] / "tables"
OWN_COPY = Path("evalign-papers")
ORDER = ("btg", "east", "mf", "checks")
Kind = Literal["runs", "facts"]


class Printed(NamedTuple):
    """A mean and its standard deviation as printed; `std` is None if none is printed."""

    mean: float
    std: float | None


@dataclass(frozen=True)
class Row:
    """One line of a table: its cell, and the printed numbers by data set and metric.

    `folder` holds the cell's reports; it is another table's if the row repeats its training. `extra` rows are ours,
    not the paper's. `incomparable` lists metrics by data set ("*" is all) that the paper prints as another quantity
    than the honest protocol measures: macro F1, the F1 of the other class, balanced accuracy called AUROC. `decision`
    overrides the table's.
    """

    label: str
    cell: str
    folder: str
    printed: Mapping[str, Mapping[str, Printed]] = field(default_factory=dict)
    extra: bool = False
    incomparable: Mapping[str, Sequence[str]] = field(default_factory=dict)
    decision: str | None = None


@dataclass(frozen=True)
class Table:
    """`decimals` of printed means and deviations; tables of kind "facts" are counted, not trained."""

    name: str
    title: str
    source: str
    note: str
    decision: Mapping[str, str]
    decimals: tuple[int, int]
    metrics: Mapping[str, str]
    datasets: tuple[str, ...]
    rows: tuple[Row, ...]
    incomparable: Mapping[str, Sequence[str]] = field(default_factory=dict)
    kind: Kind = "runs"
    protocols: tuple[str, ...] = PROTOCOLS

    @property
    def folder(self) -> str:
        return self.name.replace("-", "/", 1)

    @property
    def is_check(self) -> bool:
        """Whether the table is ours; its printed numbers repeat those of a paper's table."""
        return self.name.startswith("checks-")

    def comparable(self, row: Row, dataset: str, metric: str, protocol: str) -> bool:
        """Whether a protocol measures the printed quantity."""
        listed = [names.get(place, ()) for names in (self.incomparable, row.incomparable) for place in ("*", dataset)]
        return protocol == "paper" or not any(metric in names for names in listed)

    @property
    def command(self) -> str:
        return f"evalign reproduce {self.name}"


def find_papers(papers: str | Path | None = None) -> Path:
    """Folder of tables to read: the one given, else `./evalign-papers` if there is one, else the package's own."""
    if papers is None:
        return OWN_COPY if not _is_checkout() and _has_tables(OWN_COPY) else PACKAGED
    if not _has_tables(Path(papers)):
        raise ValueError(f"expected a folder with <paper>/<table>/{FILE}, found none in {papers}")
    return Path(papers)


def writable_papers(papers: str | Path | None = None) -> Path:
    """Folder of tables to write reports to; an installed package is not written to, but copied.

    The folder given, or `./evalign-papers`, gets the tables, configs and reports of the package that it lacks. In a
    checkout the folder of the package itself is the default.
    """
    if papers is None and _is_checkout():
        return PACKAGED
    place = OWN_COPY if papers is None else Path(papers)
    if place.is_dir() and any(place.iterdir()):
        find_papers(place)
        if papers is not None:  # a user's folder is not changed
            return place
    for source in PACKAGED.rglob("*.json"):
        target = place / source.relative_to(PACKAGED)
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
    return place


def _is_checkout() -> bool:
    return (PACKAGED.parents[2] / "pyproject.toml").is_file() and os.access(PACKAGED, os.W_OK)


def _has_tables(place: Path) -> bool:
    return next(place.glob(f"*/*/{FILE}"), None) is not None


def table_names(papers: Path) -> list[str]:
    """Every table's name, in the order of the papers: numbered ones first, then the supplement's."""
    names = [f"{path.parent.parent.name}-{path.parent.name}" for path in papers.glob(f"*/*/{FILE}")]
    return sorted(names, key=_order)


def load_table(papers: Path, name: str) -> Table:
    path = papers / name.replace("-", "/", 1) / FILE
    if not path.is_file():
        raise ValueError(f"no table is called {name!r}; there are {', '.join(table_names(papers))}")
    return parse_table(json.loads(path.read_text(encoding="utf-8")), name)


def all_tables(papers: Path) -> Iterator[Table]:
    for name in table_names(papers):
        yield load_table(papers, name)


def parse_table(content: dict[str, Any], name: str) -> Table:
    """Parse a table; unknown keys, data sets, metrics and protocols are refused."""
    _check_keys(content, Table, f"table {name}", left_out=())
    if content["name"] != name:
        raise ValueError(f"table {name} calls itself {content['name']!r}; its name must be that of its folder")
    table = Table(
        **content
        | {
            "decimals": tuple(content["decimals"]),
            "datasets": tuple(content["datasets"]),
            "protocols": tuple(content.get("protocols", PROTOCOLS)),
            "rows": tuple(_row(row, name) for row in content["rows"]),
        }
    )
    for row in table.rows:
        for dataset, scores in row.printed.items():
            if dataset not in table.datasets or not set(scores) <= set(table.metrics):
                raise ValueError(f"row {row.label!r} of {name} has numbers of {dataset} that are in no column")
    if not set(table.protocols) <= set(PROTOCOLS):
        raise ValueError(f"protocols of {name} must be of {', '.join(PROTOCOLS)}, got {', '.join(table.protocols)}")
    return table


def _row(content: dict[str, Any], name: str) -> Row:
    given = {("folder" if key == "from" else key): value for key, value in content.items()}
    _check_keys(given, Row, f"a row of {name}", left_out=("folder",))
    printed = {
        dataset: {metric: Printed(*values) for metric, values in scores.items()}
        for dataset, scores in given["printed"].items()
    }
    return Row(**{"folder": name.replace("-", "/", 1)} | given | {"printed": printed})


def _check_keys(content: dict[str, Any], kind: type, where: str, left_out: tuple[str, ...]) -> None:
    fields = kind.__dataclass_fields__  # type: ignore[attr-defined]
    optional = {"kind", "protocols", "extra", "incomparable", *left_out}
    optional |= {"decision"} if kind is Row else set()
    if unknown := set(content) - set(fields):
        raise ValueError(f"{where} has the unknown key {min(unknown)!r}; known are {', '.join(fields)}")
    if missing := set(fields) - set(content) - optional:
        raise ValueError(f"{where} lacks {min(missing)!r}; add it")


def _order(name: str) -> tuple[int, int, int, str]:
    paper, number = name.split("-", 1)
    digits = "".join(filter(str.isdigit, number))
    return ORDER.index(paper) if paper in ORDER else len(ORDER), number.startswith("s"), int(digits or 0), number
