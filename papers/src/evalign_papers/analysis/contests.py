"""Paired comparisons of metric training with its rivals on the same splits."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from evalign_papers.analysis.filled import Measured, measure, read_report, report_path
from evalign_papers.analysis.hypothesis_tests import Comparison, holm, over_splits
from evalign_papers.engine.printed import Row, Table, load_table

DECISIONS = ("argmax", "tuned", "plug_in")


class Contender(NamedTuple):
    """A trained cell and how its probabilities become labels."""

    cell: str
    decision: str
    title: str


@dataclass(frozen=True)
class Field:
    """A table with both contenders, and its cross-entropy cell with the same recipe and number of epochs."""

    table: str
    cross_entropy: str


PAPER_FIELDS = (Field("btg-1", "bce"), Field("btg-2", "bce"), Field("btg-3", "bce"), Field("east-1", "ce"))
ANCHORED_FIELDS = (Field("btg-1", "ce"), Field("checks-ablation", "ce"))
TREES = (("forest", "forest"), ("boosting", "boosting"))
ANCHORED = "anchored"


class Duel(NamedTuple):
    """Ours minus the rival's over the splits both have; `p` is corrected for all duels of one family."""

    field: Field
    dataset: str
    rival: Contender
    ours: Measured
    comparison: Comparison
    p: float

    @property
    def outcome(self) -> str:
        if self.p >= 0.05:
            return "no clear difference"
        return "better" if self.comparison.difference > 0 else "worse"


def duels(papers: Path, ours: Contender, metric: str) -> list[Duel]:
    """Every duel of one contender under the honest protocol, corrected (Holm) as one family."""
    if ours.cell != ANCHORED:
        found = [duel for field in PAPER_FIELDS for duel in _met(papers, field, ours, metric)]
    else:
        found = []
        for field in ANCHORED_FIELDS:  # our recipe is the same in every table, so a data set counts once
            met = {duel.dataset for duel in found}
            found += [duel for duel in _met(papers, field, ours, metric) if duel.dataset not in met]
    corrected = holm([duel.p for duel in found])
    return [duel._replace(p=p) for duel, p in zip(found, corrected, strict=True)]


def rivals(field: Field) -> list[Contender]:
    """Cross-entropy, forest and boosting, each with every decision."""
    return [
        Contender(cell, decision, f"{title} {decision.replace('_', '-')}")
        for cell, title in ((field.cross_entropy, "CE"), *TREES)
        for decision in DECISIONS
    ]


def scores(papers: Path, table: Table, dataset: str, contender: Contender, metric: str) -> Measured:
    """Scores of one contender; none if its decision rule was learned for another metric."""
    row = _row(table, contender.cell)
    report = None if row is None else read_report(report_path(papers, row, "honest", dataset))
    if report is not None and contender.decision != "argmax" and report.config.decide_for != metric:
        return Measured({})
    return measure(report, contender.decision, metric)


def _met(papers: Path, field: Field, ours: Contender, metric: str) -> Iterator[Duel]:
    table = load_table(papers, field.table)
    for dataset in table.datasets:
        own = scores(papers, table, dataset, ours, metric)
        for rival in rivals(field):
            comparison = over_splits(own.scores, scores(papers, table, dataset, rival, metric).scores)
            if comparison is not None:
                yield Duel(field, dataset, rival, own, comparison, comparison.p)


def _row(table: Table, cell: str) -> Row | None:
    """The table's row of a cell; its own training comes before one borrowed from another table."""
    rows = [row for row in table.rows if row.cell == cell]
    return min(rows, key=lambda row: row.folder != table.folder, default=None)


def tally(found: Sequence[Duel]) -> dict[str, dict[str, list[str]]]:
    """Data sets on which ours is better, worse or neither, by rival.

    >>> tally([])
    {}
    """
    out: dict[str, dict[str, list[str]]] = {}
    for duel in found:
        of_rival = out.setdefault(duel.rival.title, {"better": [], "worse": [], "no clear difference": []})
        of_rival[duel.outcome].append(f"{duel.dataset} ({duel.field.table})")
    return out
