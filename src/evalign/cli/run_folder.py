"""Output folder of a run: model, report and result."""

import json
import math
import shlex
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evalign.cli.options import Settings
from evalign.storage.atomic import check_writable, remove_staged, staged_folder, write_atomically
from evalign.tables.files import TableError, quoted

if TYPE_CHECKING:
    from evalign.cli.console import Output
    from evalign.comparison.run import Comparison

RESULT, REPORT, MODEL = "result.json", "report.html", "model.safetensors"
CHECKPOINT = "checkpoint"  # start of the names of files that a streaming run resumes from
FORMAT, VERSION = "evalign.result", 1


class RunFolder:
    """A folder that holds one run and nothing else."""

    def __init__(self, path: Path, *, also: tuple[str, ...] = (), force: bool = False) -> None:
        self.path, self.known, self.force = path, (RESULT, REPORT, MODEL, "writing-", *also), force

    def check(self) -> None:
        """Raise, before any work is done, if the folder cannot be written or holds what must not be overwritten."""
        self._check_content()
        check_writable(self.path)

    def _check_content(self) -> None:
        if not self.path.exists():
            return
        if not self.path.is_dir():
            raise TableError(f"--out must be a folder, {self.path} is a file; choose another name")
        names = sorted(entry.name for entry in self.path.iterdir())
        # A killed process may leave the temporary file of an atomic write: a dot, the name, a random suffix.
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
        if RESULT in names and not self.force:
            raise TableError(f"--out {self.path} holds an earlier run; choose another folder, or overwrite it: --force")

    def write(self, result: dict[str, Any], report: str, model: Any = None) -> None:
        """Write model, report and result together; if one fails, none is written."""
        remove_staged(self.path)
        with staged_folder(self.path, last=RESULT) as stage:
            if model is not None:
                model.save(stage / MODEL)
            write_atomically(stage / REPORT, report)
            write_atomically(stage / RESULT, json.dumps(result, indent=2, allow_nan=False) + "\n")


def read_result(folder: Path) -> dict[str, Any] | None:
    """Read the result in a folder; None if there is none of evalign's."""
    try:
        result = json.loads((folder / RESULT).read_text())
    except (OSError, ValueError):
        return None
    return result if isinstance(result, dict) and result.get("format") == FORMAT else None


def finish(
    command: str,
    comparison: "Comparison",
    settings: Settings,
    data: dict[str, Any],
    split: dict[str, Any],
    protocol: str,
    folder: RunFolder,
    output: "Output",
    *,
    decision: str,
    estimator: Any = None,
    **more: Any,
) -> dict[str, Any]:
    """Write result, report and the `estimator`, if any, print the table and return the result.

    `decision` is that of the reference row.
    """
    from evalign.report import build_result, render
    from evalign.report.page import headline, verdict
    from evalign.report.result import versions

    result: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "command": command,
        "command_line": shlex.join(["evalign", *(output.words or [command])]),
        "created": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "versions": versions(),
        "settings": settings.to_json() | {"decision": decision},
        "data": data,
        "split": split,
        "protocol": protocol,
        **build_result(comparison, ("ours", decision), seed=settings.seed),
        **more,
        "notes": output.notes,
    }
    result = {name: _finite(value) for name, value in result.items()}
    folder.write(result, render(result), estimator)
    output.show(as_table(result))
    output.show(" ".join(filter(None, [headline(result), verdict(result)])))
    output.show(f"Report: {folder.path / REPORT}")
    output.json(result)
    return result


def as_table(result: dict[str, Any]) -> Any:
    """Format the scores of a result as a table for the terminal."""
    from rich import box
    from rich.table import Table

    from evalign.report.page import score, signed

    several = result["splits"] > 1
    tested = any(row["p"] is not None for row in result["table"])
    spread = "std. error" if several else "95 % interval"
    limits = list(result["table"][0]["limits"])
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("training + decision", no_wrap=True)
    columns = [result["metric"]["title"], spread, "ours minus it", spread, *(["p"] if tested else [])]
    for name in (*columns, *limits):
        table.add_column(name, justify="right", no_wrap=not limits)
    for row in result["table"]:
        own = [row["contender"], row["decision"]] == result["reference"]
        if several:
            spreads = score(row["error"]), score(row["difference_error"])
        else:
            low, high = row["interval"]
            spreads = f"{score(low)} to {score(high)}", " to ".join(map(signed, row["difference_interval"]))
        held = [score(row["limits"][name]) + " missed" * (name in row["missed"]) for name in limits]
        gap = ["–", "–"] if own else [signed(row["difference"]), spreads[1]]
        if tested:
            gap.append("–" if own or row["p"] is None else f"{row['p']:.2g}")
        table.add_row(
            row["title"], score(row["score"]), spreads[0], *gap, *held,
            style="bold" if own else None,
        )  # fmt: skip
    return table


def _finite(value: Any) -> Any:
    """Replace nan and infinity by None: JSON has neither."""
    if isinstance(value, dict):
        return {key: _finite(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
