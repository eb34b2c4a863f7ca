"""The folder of a run: what may be written over, and how."""

import json
from pathlib import Path
from typing import Any

from evalign.files import write_atomically
from evalign.tables.columns import TableError, quoted

RESULT, REPORT, MODEL = "result.json", "report.html", "model.safetensors"
FORMAT, VERSION = "evalign.result", 1


class RunFolder:
    """A folder that holds one run and nothing else; a later run may replace an earlier one."""

    def __init__(self, path: Path, *, also: tuple[str, ...] = ()) -> None:
        self.path, self.known = path, (RESULT, REPORT, MODEL, *also)

    def check(self) -> None:
        """Refuse a folder that holds anything but an earlier run, before any work is done."""
        if not self.path.exists():
            return
        if not self.path.is_dir():
            raise TableError(f"--out must be a folder, {self.path} is a file; choose another name")
        names = sorted(entry.name for entry in self.path.iterdir())
        # What an atomic write leaves behind when its process is killed starts with a dot and the name.
        foreign = [name for name in names if not name.removeprefix(".").startswith(self.known)]
        if foreign:
            raise TableError(
                f"--out must be a new folder or one of an earlier run, {self.path} also holds "
                f"{quoted(foreign, most=3)}; choose another one"
            )
        if {RESULT, REPORT, MODEL} & set(names) and read_result(self.path) is None:
            raise TableError(
                f"--out must be a new folder or one of an earlier run, {self.path} has no {RESULT} of one; "
                "choose another one, or empty it"
            )

    def write(self, result: dict[str, Any], report: str) -> None:
        """The report, then the result, which marks the run as complete."""
        write_atomically(self.path / REPORT, report)
        write_atomically(self.path / RESULT, json.dumps(result, indent=2, allow_nan=False) + "\n")


def read_result(folder: Path) -> dict[str, Any] | None:
    """The result in a run's folder; None if there is none, or it is not one of ours."""
    try:
        result = json.loads((folder / RESULT).read_text())
    except (OSError, ValueError):
        return None
    return result if isinstance(result, dict) and result.get("format") == FORMAT else None
