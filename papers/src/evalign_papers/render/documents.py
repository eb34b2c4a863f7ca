"""Documents written from reports: Jinja templates in which every measured or printed number is looked up.

Sentences take their numbers from the same reports as the tables, so both change together.
"""

import json
import textwrap
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from statistics import correlation
from typing import Any

import pandas as pd
from jinja2 import Environment, PackageLoader, StrictUndefined

from evalign.storage.atomic import write_atomically
from evalign_papers.analysis.filled import SUFFIX, Measured, fill, largest_budget, measure, read_report
from evalign_papers.analysis.hypothesis_tests import over_splits
from evalign_papers.engine.printed import load_table
from evalign_papers.engine.reports import Report, TrialReport
from evalign_papers.render.wording import NOT_RUN, REDUCED, signed

CIFAR10_ROWS, CLAIMS = "printed_budget_cifar10.jsonl", "bench_btg_claims.csv"
ANY_BUDGET = "@*"


class Numbers:
    """Look-ups of a template. A cell is named by its path, as `btg/1/honest/adult.f1`; "not run" if it has no report.

    A path that ends with `@*` names the cell at the largest budget that it was run at.
    """

    def __init__(self, papers: Path, benchmarks: Path | None = None) -> None:
        self.papers, self.benchmarks = papers, benchmarks
        rows = None if benchmarks is None else benchmarks / CIFAR10_ROWS
        self.cifar10_rows: list[dict[str, Any]] = (
            [json.loads(line) for line in rows.read_text().splitlines()] if rows is not None and rows.exists() else []
        )

    def score(self, cell: str, metric: str = "f1", decision: str | None = None, digits: int = 2) -> str:
        """Mean over trials, marked where the run is below the printed budget."""
        found = self._measured(cell, metric, decision)
        return NOT_RUN if found.mean is None else f"{found.mean:.{digits}f}{REDUCED if found.reduced else ''}"

    def range(self, cell: str, metric: str = "f1", decision: str | None = None, digits: int = 2) -> str:
        """Smallest and largest score of a trial."""
        return _span(self._measured(cell, metric, decision).values, digits)

    def correlations(self, *cells: str, metric: str = "f1") -> str:
        """Smallest and largest correlation of two cells' scores over the splits that they share."""
        scores = [self._measured(cell, metric, None).scores for cell in cells]
        found = [
            correlation([one[split] for split in shared], [other[split] for split in shared])
            for one, other in combinations(scores, 2)
            if len(shared := sorted(one.keys() & other.keys())) > 2
        ]
        return _span(found, 2)

    def printed(self, table: str, label: str, dataset: str, metric: str = "f1") -> str:
        content = load_table(self.papers, table)
        (row,) = (row for row in content.rows if row.label == label)
        return f"{row.printed[dataset][metric].mean:.{content.decimals[0]}f}"

    def versus(self, cell: str, rival: str, decisions: Sequence[str] = ("argmax", "argmax"), metric: str = "f1") -> str:
        """Mean difference over the splits both have, its corrected standard error, and p."""
        scores = [
            self._measured(one, metric, decision).scores
            for one, decision in zip((cell, rival), decisions, strict=True)
        ]  # fmt: skip
        found = over_splits(*scores)
        return NOT_RUN if found is None else f"{signed(found.difference, found.error)}, {_p(found.p)}"

    def cifar10_kept(self, loss: str) -> str:
        """The epoch of lowest validation loss."""
        best = self._cifar10(loss)
        return NOT_RUN if best is None else str(best["best_epoch"])

    def cifar10_validation(self, loss: str, *, last: bool = False) -> str:
        """The hard score on validation rows at the kept or the last epoch."""
        best = self._cifar10(loss)
        return NOT_RUN if best is None else f"{best['curve'][-1 if last else best['best_epoch'] - 1][3]:.3f}"

    def _cifar10(self, loss: str) -> dict[str, Any] | None:
        own = [row for row in self.cifar10_rows if row["loss"] == loss]
        return min(own, key=lambda row: row["validation_loss"], default=None)

    def grid_best(self, cell: str) -> str:
        """The best validation score of a grid."""
        report = self._report(cell)
        return NOT_RUN if report is None or not report.grid else f"{max(one['score'] for one in report.grid):.3f}"

    def trials(self, cell: str) -> str:
        return str(len(self._trials(cell)) or NOT_RUN)

    def minutes(self, cell: str) -> str:
        """Fewest and most minutes of a trial."""
        return _span([trial.seconds / 60 for trial in self._trials(cell)], 1)

    def epochs(self, cell: str) -> str:
        """Fewest and most epochs of a trial."""
        return _span([trial.epochs for trial in self._trials(cell)], 0)

    def patience(self, cell: str) -> str:
        report = self._report(cell)
        if report is None or report.config.training is None:
            return NOT_RUN
        return str(min(stage.patience for stage in report.config.training.stages))

    def verdict(self, table: str, label: str, dataset: str, metric: str = "f1") -> str:
        """The class of distance of a measured number from the printed one."""
        filled = fill(self.papers, load_table(self.papers, table))
        (row,) = (row for row in filled.table.rows if row.label == label)
        found = filled.cell(row, dataset, metric).distance
        return NOT_RUN if found is None else found.verdict

    def times(self, task: str, base: str) -> str:
        """How many times as long one task of `bench_btg_claims.py` takes as another."""
        path = None if self.benchmarks is None else self.benchmarks / CLAIMS
        if path is None or not path.exists():
            return NOT_RUN
        seconds = pd.read_csv(path, index_col="task")["seconds"]
        ratio = float(seconds[task] / seconds[base])
        return f"{ratio:.0f}" if ratio >= 10 else f"{ratio:.2g}"

    def _report(self, cell: str) -> Report | None:
        path = self.papers / cell.removesuffix(ANY_BUDGET)
        return read_report(largest_budget(path) if cell.endswith(ANY_BUDGET) else Path(f"{path}{SUFFIX}"))

    def _trials(self, cell: str) -> list[TrialReport]:
        report = self._report(cell)
        return [] if report is None else report.trials

    def _measured(self, cell: str, metric: str, decision: str | None) -> Measured:
        rule = decision or ("paper" if "/paper/" in cell else "argmax")
        return measure(self._report(cell), rule, metric)


def _span(values: Sequence[float], digits: int) -> str:
    """
    >>> _span([3, 1, 2], 0), _span([0.5, 0.5], 2), _span([], 1)
    ('1 to 3', '0.50', 'not run')
    """
    if not values:
        return NOT_RUN
    low, high = f"{min(values):.{digits}f}", f"{max(values):.{digits}f}"
    return low if low == high else f"{low} to {high}"


def _p(value: float) -> str:
    """
    >>> _p(0.14), _p(0.004), _p(2e-5)
    ('p = 0.14', 'p = 0.004', 'p < 0.001')
    """
    if value < 0.001:
        return "p < 0.001"
    return f"p = {value:.3f}" if value < 0.01 else f"p = {value:.2f}"


def render_document(name: str, papers: Path, blocks: Mapping[str, str], benchmarks: Path | None = None) -> str:
    """A document from its template, with blocks of tables in it."""
    environment = Environment(
        loader=PackageLoader("evalign_papers.render"), undefined=StrictUndefined, keep_trailing_newline=True
    )
    return wrapped(environment.get_template(f"{name}.j2").render(blocks=blocks, n=Numbers(papers, benchmarks)))


def wrapped(text: str, width: int = 120) -> str:
    """Re-wrap paragraphs and list items of Markdown; everything else is kept.

    >>> print(wrapped("- one\\n  two\\n- three\\n\\n| a\\n| b\\n\\nA\\nB"))
    - one two
    - three
    <BLANKLINE>
    | a
    | b
    <BLANKLINE>
    A B
    """
    lines = list[str]()
    paragraph = list[str]()

    def flush() -> None:
        if paragraph:
            indent = "  " if paragraph[0].startswith("- ") else ""
            words = " ".join(line.strip() for line in paragraph)
            lines.extend(
                textwrap.wrap(
                    words, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
                )
            )  # fmt: skip
            paragraph.clear()

    for line in text.split("\n"):
        if not line or line.startswith(("|", "#", "    ", "```", "<")):
            flush()
            lines.append(line)
            continue
        if line.startswith("- "):
            flush()
        paragraph.append(line)
    flush()
    return "\n".join(lines)


def write_document(path: Path, text: str, *, check: bool = False) -> bool:
    """Write a document, or only compare it (`check`); whether it was up to date."""
    current = path.exists() and path.read_text(encoding="utf-8") == text
    if not check and not current:
        write_atomically(path, text)
    return current


def literal(text: str) -> str:
    """Escape the asterisks of a text for Markdown."""
    return text.replace("*", "\\*")


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """
    >>> print(markdown_table(["a", "b"], [["1", "2"]]))
    | a | b |
    |---|---|
    | 1 | 2 |
    """
    lines = [head, *rows]
    text = [f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines]
    return "\n".join([text[0], "|---" * len(head) + "|", *text[1:]])
