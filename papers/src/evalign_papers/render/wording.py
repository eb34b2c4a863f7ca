"""Numbers, states and significance as text, for the terminal, the page and the documents."""

from typing import NamedTuple

from evalign_papers.analysis.distance import Verdict
from evalign_papers.analysis.filled import FilledTable, Measured, Number
from evalign_papers.analysis.hypothesis_tests import PRINTED_TRIALS
from evalign_papers.engine.printed import Printed, Table

NONE, REDUCED, NOT_RUN = "–", "†", "not run"
STARS = ((0.001, "***"), (0.01, "**"), (0.05, "*"))
CLASSES: dict[Verdict, str] = {
    "within .02": "●", "within .05": "◐", "undecided": "?", "off": "○", "far off": "✗",
}  # fmt: skip
OTHER = "≠"
LEGEND = (
    "Distance of the paper protocol from print, by two one-sided tests at 5 %: ● within .02, ◐ within .05, ? undecided "
    "(too noisy for either), ○ off by more than .02, ✗ far off, by more than .05. ≠ print has another quantity "
    "(macro F1, F1 of the other class, balanced accuracy called AUROC). † ran below the printed budget: the notes say "
    "in which respect."
)


def reduced_notes(filled: FilledTable) -> list[str]:
    """A line for each kind of reduction in a table, with its runs."""
    groups: dict[str, list[str]] = {}
    for cell in filled.cells:
        found = cell.measured.get("paper")
        if found is not None and found.reduced:
            runs = groups.setdefault("; ".join(found.reduced), [])
            if (run := f"{cell.dataset}: {cell.row.label}") not in runs:
                runs.append(run)
    return [f"{REDUCED} {reduction} ({', '.join(runs)})" for reduction, runs in groups.items()]


def printed_number(printed: Printed | None, decimals: tuple[int, int]) -> str:
    """A printed number as the paper has it.

    >>> printed_number(Printed(0.5, 0.0), (2, 2)), printed_number(Printed(0.82, None), (2, 2))
    ('0.50 ± 0.00', '0.82')
    """
    if printed is None:
        return NONE
    mean = f"{printed.mean:.{decimals[0]}f}"
    return mean if printed.std is None else f"{mean} ± {printed.std:.{decimals[1]}f}"


def measured_number(found: Measured, *, trials: bool = True) -> str:
    """Mean and deviation over trials, the number of trials if below ten, and † for a reduced run.

    >>> measured_number(Measured({0: 0.5, 1: 0.6}, "partial", 10)), measured_number(Measured({}))
    ('0.550 ± 0.071 (2 of 10)', '–')
    >>> measured_number(Measured({0: 0.5, 1: 0.6}, "complete", 2))
    '0.550 ± 0.071 (n = 2)'
    """
    if found.mean is None:
        return NONE
    text = f"{found.mean:.3f}" if found.std is None else f"{found.mean:.3f} ± {found.std:.3f}"
    text += REDUCED if found.reduced else ""
    if found.state == "partial" and trials:
        return f"{text} ({len(found.scores)}{f' of {found.planned}' if found.planned else ' so far'})"
    if trials and len(found.scores) < PRINTED_TRIALS:
        return f"{text} (n = {len(found.scores)})"
    return text


def stars(p: float) -> str:
    """
    >>> stars(0.0005), stars(0.03), stars(0.2)
    ('***', '*', '')
    """
    return next((mark for level, mark in STARS if p < level), "")


def signed(value: float, error: float | None = None, p: float = 1.0) -> str:
    """A difference in Markdown, bold and with stars where it is significant.

    >>> signed(-0.02, 0.004, 0.2), signed(0.02, None, 0.03)
    ('−0.020 ± 0.004', '**+0.020**\\\\*')
    """
    text = f"{value:+.3f}".replace("-", "−") + ("" if error is None else f" ± {error:.3f}")
    return f"**{text}**{stars(p).replace('*', chr(92) + '*')}" if stars(p) else text


def mark(cell: Number, protocol: str) -> str:
    """Sign of the paper protocol's class of distance; ≠ where print has another quantity; else nothing.

    The honest protocol tests on other rows, so that its distance from print says nothing.
    """
    if cell.printed and protocol in cell.incomparable and cell.measured[protocol].scores:
        return OTHER
    return CLASSES[cell.distance.verdict] if protocol == "paper" and cell.distance is not None else ""


def state_of(filled: FilledTable) -> str:
    """How much of a table has been run, in words."""
    if filled.table.kind == "facts":
        return "counted from the data"
    parts = []
    for protocol in filled.table.protocols:
        states = list(filled.states(protocol).values())
        done, partial = states.count("complete"), states.count("partial")
        extra = f", {partial} partly" if partial else ""
        parts.append(f"{protocol}: {done} of {len(states)} runs{extra}" if done or partial else f"{protocol}: not run")
    return "; ".join(parts)


class Lacking(NamedTuple):
    """Runs of a table without a report: "data set: row" of each, and whether there is a config to run them by."""

    protocol: str
    state: str
    runs: list[str]
    total: int


def not_run(filled: FilledTable) -> list[Lacking]:
    """Runs missing from a table, by protocol: those not run, then those without a config."""
    found = []
    for protocol in filled.table.protocols:
        states = filled.states(protocol)
        for wanted in ("not run", "no config"):
            runs = [f"{dataset}: {label}" for (label, dataset), state in states.items() if state == wanted]
            if runs:
                found.append(Lacking(protocol, wanted, runs, len(states)))
    return found


def columns(table: Table) -> tuple[str, ...]:
    """Columns of a number, side by side."""
    return ("printed", *table.protocols) if any(row.printed for row in table.rows) else table.protocols
