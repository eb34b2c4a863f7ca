"""The end of a comparing command: one result, its table on the screen, its page in the folder."""

import math
import shlex
from datetime import UTC, datetime
from typing import Any

from evalign.cli.folder import FORMAT, REPORT, VERSION, RunFolder
from evalign.cli.options import Settings
from evalign.cli.output import Output
from evalign.comparison.run import Comparison
from evalign.report import build_result, render
from evalign.report.page import score, signed, verdict
from evalign.report.result import versions


def finish(
    command: str,
    comparison: Comparison,
    settings: Settings,
    data: dict[str, Any],
    split: dict[str, Any],
    protocol: str,
    folder: RunFolder,
    output: Output,
    *,
    decision: str,
    **more: Any,
) -> dict[str, Any]:
    """Write result and report, show the table; returns the result. `decision` is that of our reference."""
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
    folder.write(result, render(result))
    output.show(as_table(result))
    output.show(verdict(result))
    output.show(f"Report: {folder.path / REPORT}")
    output.json(result)
    return result


def as_table(result: dict[str, Any]) -> Any:
    """The table of a result for a terminal."""
    from rich import box
    from rich.table import Table

    several = result["splits"] > 1
    spread = "std. error" if several else "95 % interval"
    limits = list(result["table"][0]["limits"])
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("training + decision", no_wrap=True)
    columns = [result["metric"]["title"], spread, "ours minus it", spread, *(["p"] if several else [])]
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
        if several:
            gap.append("–" if own or row["p"] is None else f"{row['p']:.2g}")
        table.add_row(
            row["title"], score(row["score"]), spreads[0], *gap, *held,
            style="bold" if own else None,
        )  # fmt: skip
    return table


def _finite(value: Any) -> Any:
    """Plain JSON has no nan: what is not a number becomes null."""
    if isinstance(value, dict):
        return {key: _finite(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
