"""Where metric training helps trees: blocks of docs/research/results.md from the rows of the quality benchmarks.

The rows are those of `benchmarks/bench_trees.py` and `benchmarks/bench_recipes.py`: ten splits, default settings, test
rows read once.
"""

from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import NamedTuple, TypeVar

import pandas as pd

from evalign.comparison.significance import corrected_error
from evalign_papers.analysis.hypothesis_tests import LEVEL, TEST_TO_TRAIN, Comparison, holm, over_splits
from evalign_papers.render.documents import markdown_table
from evalign_papers.render.wording import NONE, signed

FILES = ("bench_quality.csv", "bench_quality_boost.csv")
METRIC, ENTROPY = "booster", "booster, cross-entropy"
DECISIONS = {"argmax": "argmax", "tuned": "tuned", "plug-in": "plug-in", "own": "as it decides"}
RIVALS = ("stock LightGBM", "stock XGBoost", "random forest", "histogram gradient boosting")
NETWORK = "cross-entropy"  # the network's rival, and with a comma the end of the names of others like it
NOTHING = "Nothing has been run for this comparison yet."


K = TypeVar("K")


class Entry(NamedTuple):
    """A method with one decision rule on one set: a score for every split."""

    method: str
    decision: str
    scores: Mapping[int, float]

    @property
    def mean(self) -> float:
        return fmean(self.scores.values())

    @property
    def title(self) -> str:
        return f"{self.method}, {DECISIONS[self.decision]}"


Results = dict[str, dict[tuple[str, str], Entry]]  # by set, then by method and decision


def read_results(folder: Path) -> Results:
    """All stored scores; a later file overrides an earlier one."""
    found: Results = {}
    for path in (folder / name for name in FILES):
        if not path.exists():
            continue
        rows = pd.read_csv(path)
        columns = (rows.set, rows.method, rows.decision, rows.split, rows.score)
        scores: dict[tuple[str, str, str], dict[int, float]] = {}
        for name, method, rule, split, score in zip(*columns, strict=True):
            if rule in DECISIONS:
                scores.setdefault((name, method, rule), {})[int(split)] = float(score)
        for (name, method, rule), of_splits in scores.items():
            found.setdefault(name, {})[method, rule] = Entry(method, rule, of_splits)
    return found


def tree_blocks(folder: Path) -> dict[str, str]:
    """The blocks of docs/research/results.md that are about trees."""
    results = read_results(folder)
    return {
        "trees-metric": metric_block(results),
        "trees-rivals": rivals_block(results),
        "trees-best": best_block(results),
    }


def metric_block(results: Results) -> str:
    """EASTBooster on the metric against the same trees on cross-entropy, by each decision rule."""
    pairs = {
        (name, rule): (entries[METRIC, rule], entries[ENTROPY, rule])
        for name, entries in results.items()
        for rule in DECISIONS
        if {(METRIC, rule), (ENTROPY, rule)} <= entries.keys()
    }
    compared = judged_together({key: over_splits(a.scores, b.scores) for key, (a, b) in pairs.items()})
    if not compared:
        return NOTHING
    rows = []
    for (name, rule), (judged, p) in compared.items():
        common = pairs[name, rule][0].scores.keys() & pairs[name, rule][1].scores.keys()
        both = [corrected_mean({split: one.scores[split] for split in common}) for one in pairs[name, rule]]
        rows.append([name, str(len(common)), DECISIONS[rule], *both, signed(judged.difference, judged.error, p)])
    head = ["data", "splits", "decision", "cross-entropy + metric", "cross-entropy", "difference"]
    return f"{markdown_table(head, rows)}\n\n{_family(len(compared))}"


def rivals_block(results: Results) -> str:
    """EASTBooster by default, minus each of the other trees with each decision rule."""
    pairs = {
        (name, method, rule): (entries[METRIC, "own"], entries[method, rule])
        for name, entries in results.items()
        if (METRIC, "own") in entries
        for method in RIVALS
        for rule in DECISIONS
        if (method, rule) in entries
    }
    compared = judged_together({key: over_splits(ours.scores, theirs.scores) for key, (ours, theirs) in pairs.items()})
    if not compared:
        return NOTHING
    rules = [rule for rule in DECISIONS if any(key[2] == rule for key in compared)]
    rows = []
    for name in dict.fromkeys(key[0] for key in compared):
        ours = results[name][METRIC, "own"]
        for method in dict.fromkeys(key[1] for key in compared if key[0] == name):
            cells = [compared.get((name, method, rule)) for rule in rules]
            shown = [NONE if cell is None else signed(cell[0].difference, cell[0].error, cell[1]) for cell in cells]
            rows.append([name, corrected_mean(ours.scores), method, *shown])
    head = ["data", "EASTBooster", "minus", *(DECISIONS[rule] for rule in rules)]
    return f"{markdown_table(head, rows)}\n\n{_family(len(compared))}"


def best_block(results: Results) -> str:
    """The best of ours, network or booster, against the best rival; both picked by these scores."""
    pairs = {}
    for name, entries in results.items():
        theirs = [entry for entry in entries.values() if _is_rival(entry.method)]
        ours = [entry for entry in entries.values() if _is_ours(entry)]
        if ours and theirs:
            pairs[name] = (max(ours, key=lambda entry: entry.mean), max(theirs, key=lambda entry: entry.mean))
    compared = judged_together({name: over_splits(own.scores, rival.scores) for name, (own, rival) in pairs.items()})
    if not compared:
        return NOTHING
    rows = []
    for name, (judged, p) in compared.items():
        own, rival = pairs[name]
        gap = signed(judged.difference, judged.error, p)
        rows.append(
            [
                name,
                own.title,
                corrected_mean(own.scores),
                rival.title,
                corrected_mean(rival.scores),
                gap,
                f"{judged.p:.2f}",
            ]
        )
    head = ["data", "best of ours", "F1", "best rival", "F1", "difference", "p, uncorrected"]
    ahead = [name for name, (judged, p) in compared.items() if p < LEVEL and judged.difference > 0]
    behind = [name for name, (judged, p) in compared.items() if p < LEVEL and judged.difference < 0]
    note = (
        f"Clearly ahead on {len(ahead)} of {len(rows)} sets ({', '.join(ahead) or 'none'}), clearly behind on "
        f"{len(behind)} ({', '.join(behind) or 'none'}). {_family(len(rows))}"
    )
    return f"{markdown_table(head, rows)}\n\n{note}"


def _is_rival(method: str) -> bool:
    return method in RIVALS or (method.endswith(NETWORK) and method != ENTROPY)


def _is_ours(entry: Entry) -> bool:
    """Ours with its default decision: a booster's own, a network's plug-in rule."""
    if entry.method in (METRIC, ENTROPY):
        return (entry.method, entry.decision) == (METRIC, "own")
    return not _is_rival(entry.method) and entry.decision == "plug-in" and entry.method != "EAST as printed"


def judged_together(compared: Mapping[K, Comparison | None]) -> dict[K, tuple[Comparison, float]]:
    """All comparisons that are not None, with p values corrected as one family."""
    found = {key: one for key, one in compared.items() if one is not None}
    corrected = holm([one.p for one in found.values()])
    return {key: (one, p) for (key, one), p in zip(found.items(), corrected, strict=True)}


def _family(comparisons: int) -> str:
    return f"{comparisons} paired comparisons, corrected (Holm) as one family."


def corrected_mean(scores: Mapping[int, float]) -> str:
    """Mean over splits and its standard error, corrected for splits that share rows."""
    values = list(scores.values())
    if len(values) < 2:
        return f"{fmean(values):.3f}"
    return f"{fmean(values):.3f} ± {corrected_error(values, TEST_TO_TRAIN):.3f}"
