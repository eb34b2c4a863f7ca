"""Where the papers' tables are: papers/<paper>/<table>/<protocol>/<dataset>.<cell>.json, its report beside it."""

import contextlib
import hashlib
import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evalign.checks import check_choice
from evalign.experiments.config import Config, read_config
from evalign.experiments.report import Report, load_report, report_path


@dataclass(frozen=True)
class Cell:
    """A config on disk, what is known of it without running, and the report beside it if there is one."""

    path: Path

    @property
    def name(self) -> str:
        return "/".join(self.path.parts[-4:]).removesuffix(".json")

    @property
    def config(self) -> Config:
        return read_config(self.path)

    @property
    def report(self) -> Report | None:
        where = report_path(self.path)
        return load_report(where, self.config) if where.exists() else None


class Papers:
    """The folder of tables. `table("btg-1")` is papers/btg/1."""

    def __init__(self, folder: str | Path = "papers") -> None:
        self.folder = Path(folder)
        if not any(self.folder.glob("*/*/table.json")):
            raise ValueError(
                f"{self.folder} must hold the papers' tables, it has none; run in a checkout, or give --papers"
            )

    @property
    def names(self) -> list[str]:
        return sorted("-".join(path.parts[-3:-1]) for path in self.folder.glob("*/*/table.json"))

    def folder_of(self, name: str) -> Path:
        check_choice("table", name, self.names)
        return self.folder.joinpath(*name.split("-", 1))

    def content(self, name: str) -> dict[str, Any]:
        """What table.json says."""
        return dict(json.loads((self.folder_of(name) / "table.json").read_text(encoding="utf-8")))

    def cells(self, name: str, protocols: tuple[str, ...] = ("honest", "paper"), used: bool = True) -> list[Cell]:
        """The cells that make a table, those it borrows from another table too (unless `used` is False).

        Data set by data set, so that one is loaded once.
        """
        content, found = self.content(name), []
        for dataset in content.get("datasets", []):
            for row in content["rows"]:
                if "from" in row and not used:
                    continue
                home = self.folder / row["from"] if "from" in row else self.folder_of(name)
                for protocol in protocols:
                    path = home / protocol / f"{dataset}.{row['cell']}.json"
                    if path.exists():
                        found.append(Cell(path))
        return found


@contextlib.contextmanager
def held(path: Path) -> Iterator[bool]:
    """True while nobody else runs this cell; the system lets go of it when a process dies, however it dies."""
    try:
        import fcntl
    except ImportError:  # no such lock on Windows: two runs of one cell cost time, not correctness
        yield True
        return
    name = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:16]
    with (Path(tempfile.gettempdir()) / f"evalign-{name}.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
            return
        yield True
