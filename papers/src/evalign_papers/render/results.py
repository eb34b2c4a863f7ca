"""docs/research/results.md: metric training against its rivals, from honest reports and benchmark results.

python -m evalign_papers.render.results            write results.md, reproduction.md, its numbers, and figures
python -m evalign_papers.render.results --check    fail if they are not up to date
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from evalign_papers.analysis.contests import ANCHORED, Contender, Duel, duels, tally
from evalign_papers.analysis.filled import FilledTable, fill, measure, read_report
from evalign_papers.analysis.hypothesis_tests import holm, over_splits
from evalign_papers.datasets import find_card
from evalign_papers.engine.printed import all_tables, find_papers, load_table
from evalign_papers.render.along_training import east_blocks
from evalign_papers.render.benchmarks import NOTHING, judged_together, tree_blocks
from evalign_papers.render.documents import markdown_table, render_document, write_document
from evalign_papers.render.dot_figures import contest_figure, distance_figure
from evalign_papers.render.reproduction import reproduction_blocks
from evalign_papers.render.wording import NONE, NOT_RUN, measured_number, signed

# Block of the document, metric, and whose training is judged by it.
CONTESTS: tuple[tuple[str, str, Contender], ...] = (
    ("f1-paper", "f1", Contender("f1", "argmax", "F1 as in the paper, argmax")),
    ("f1-anchored", "f1", Contender(ANCHORED, "argmax", "anchored, argmax")),
    ("f1-anchored-plug-in", "f1", Contender(ANCHORED, "plug_in", "anchored, plug-in")),
    ("accuracy-paper", "accuracy", Contender("accuracy", "argmax", "accuracy as in the paper, argmax")),
    ("mcc-paper", "mcc", Contender("mcc", "argmax", "MCC as in the paper, argmax")),
    ("auroc-paper", "auroc", Contender("auroc", "argmax", "AUROC as in the paper")),
)
DRAWN = {"": CONTESTS[0][2], "anchored: ": CONTESTS[1][2]}
VACUOUS = "no-dynamic-threshold"  # a softmax of two classes is cut at one half, dynamic or not
DECIDED = {"argmax": "argmax", "tuned": "tuned", "plug_in": "plug-in"}


def results_blocks(papers: Path) -> dict[str, str]:
    contests = [(name, metric, ours, duels(papers, ours, metric)) for name, metric, ours in CONTESTS]
    blocks = {name: contest_block(found, ours) for name, _, ours, found in contests}
    blocks["glance"] = glance_block([(metric, ours, found) for _, metric, ours, found in contests])
    checks = (
        ("ablation", "full"), ("imbalance", "cross-entropy"), ("cooling", "none"), ("slope", "linear, delta = 0.1"),
        ("scratch", "EAST as printed (geometric, rate 0.9)"),
    )  # fmt: skip
    for name, reference in checks:
        blocks[name] = check_block(fill(papers, load_table(papers, f"checks-{name}")), reference)
    blocks["imbalance-decided"] = decided_block(papers)
    blocks["points"] = points_block(fill(papers, load_table(papers, "checks-points")))
    tail = fill(papers, load_table(papers, "checks-longtail"))
    blocks["longtail-balanced"] = check_block(tail, "logit-adjusted cross-entropy", "balanced_accuracy")
    blocks["longtail-rare"] = check_block(tail, "logit-adjusted cross-entropy", "rare_recall")
    blocks["longtail-f1"] = check_block(tail, "cross-entropy, offsets tuned for macro F1", "f1_train")
    return blocks


def glance_block(contests: Sequence[tuple[str, Contender, Sequence[Duel]]]) -> str:
    """A line for each contender and rival: on how many data sets it is clearly better, clearly worse, neither."""
    rows = []
    for metric, ours, found in contests:
        for rival, of_rival in tally(found).items():
            gaps = [duel.comparison.difference for duel in found if duel.rival.title == rival]
            counts = [str(len(of_rival[word])) for word in ("better", "worse", "no clear difference")]
            mean = f"{fmean(gaps):+.3f} ({min(gaps):+.3f} to {max(gaps):+.3f})".replace("-", "−")
            rows.append([metric, ours.title, rival, *counts, mean])
    if not rows:
        return NOTHING
    head = ["judged by", "trained on", "against", "better", "worse", "no clear difference", "mean difference (range)"]
    return markdown_table(head, rows)


def contest_block(found: Sequence[Duel], ours: Contender) -> str:
    """Ours minus each rival on each data set, and the clear differences in words."""
    if not found:
        return NOTHING
    titles = list(dict.fromkeys(duel.rival.title for duel in found))
    places = list(dict.fromkeys((duel.field.table, duel.dataset) for duel in found))
    by_place = {(duel.field.table, duel.dataset, duel.rival.title): duel for duel in found}
    rows = []
    for table, dataset in places:
        own = next(duel for duel in found if (duel.field.table, duel.dataset) == (table, dataset))
        cells = [by_place.get((table, dataset, title)) for title in titles]
        trials = str(len(own.ours.scores))
        rows.append([f"{dataset} ({table})", trials, measured_number(own.ours), *(difference(duel) for duel in cells)])
    head = ["data (table)", "splits", ours.title, *(f"minus {title}" for title in titles)]
    note = f"{len(found)} paired comparisons, corrected (Holm) as one family."
    return "\n\n".join([markdown_table(head, rows), note, "\n".join(verdicts(found))])


def difference(duel: Duel | None) -> str:
    """Mean difference, its corrected standard error, stars by the corrected p."""
    if duel is None:
        return NONE
    return signed(duel.comparison.difference, duel.comparison.error, duel.p)


def verdicts(found: Sequence[Duel]) -> list[str]:
    """A line for each rival: better on, worse on, and how often neither."""
    lines = []
    for rival, of_rival in tally(found).items():
        total = sum(map(len, of_rival.values()))
        parts = [f"{word} on {', '.join(of_rival[word])}" for word in ("better", "worse") if of_rival[word]]
        neither = len(of_rival["no clear difference"])
        parts += [f"no clear difference on {neither} of {total}"] if neither else []
        lines.append(f"- against {rival}: {'; '.join(parts)}")
    return lines


def check_block(filled: FilledTable, reference: str, metric: str = "f1") -> str:
    """Means of every row on every data set, and the difference from one row over the same splits."""
    table, [base] = filled.table, [row for row in filled.table.rows if row.label == reference]
    found = {}
    for row in table.rows:
        for dataset in table.datasets:
            cells = [filled.cell(one, dataset, metric).measured["honest"] for one in (row, base)]
            if row is not base and (compared := over_splits(cells[0].scores, cells[1].scores)):
                found[row.label, dataset] = compared
    corrected = dict(zip(found, holm([compared.p for compared in found.values()]), strict=True))
    rows = []
    for row in table.rows:
        line = [row.label]
        for dataset in table.datasets:
            measured = filled.cell(row, dataset, metric).measured["honest"]
            text = measured_number(measured) if measured.scores else NOT_RUN
            if row.cell == VACUOUS and _two_classes(dataset):
                text = "(two classes: nothing to remove)"
            elif compared := found.get((row.label, dataset)):
                text += f" ({signed(compared.difference, None, corrected[row.label, dataset])})"
            line.append(text)
        rows.append(line)
    if all(text == NOT_RUN for line in rows for text in line[1:]):
        return f"{NOTHING} Run it with `{table.command}`."
    note = (
        f"{table.metrics[metric]}, mean ± deviation over splits, in brackets the difference from “{reference}”; "
        f"{len(found)} paired comparisons, corrected (Holm) as one family. `{table.command}`"
    )
    return f"{markdown_table([table.metrics[metric], *table.datasets], rows)}\n\n{note}"


def points_block(filled: FilledTable) -> str:
    """Steps of three and of five points, pair by pair at the same threshold."""
    table, rows = filled.table, filled.table.rows
    pairs = {(five.label.partition(", ")[2], dataset): [filled.cell(row, dataset, "f1").measured["honest"]
             for row in (five, three)] for five, three in zip(rows[::2], rows[1::2], strict=True)
             for dataset in table.datasets}  # fmt: skip
    compared = {place: over_splits(three.scores, five.scores) for place, (five, three) in pairs.items()}
    judged = judged_together(compared)
    lines = [
        [dataset, tau, *map(measured_number, pairs[tau, dataset]), signed(one.difference, one.error, p)]
        for (tau, dataset), (one, p) in judged.items()
    ]
    if not lines:
        return f"{NOTHING} Run it with `{table.command}`."
    note = f"{len(lines)} paired comparisons, corrected (Holm) as one family. `{table.command}`"
    return f"{markdown_table(['data', 'threshold', 'five points', 'three points', 'difference'], lines)}\n\n{note}"


def _two_classes(dataset: str) -> bool:
    return find_card(dataset.partition("-")[0]).num_classes == 2


def decided_block(papers: Path) -> str:
    """Metric training minus cross-entropy at every imbalance: argmax against each rule, anchored rule by rule."""
    table = load_table(papers, "checks-imbalance")
    pairs = [("f1", "argmax", rule) for rule in DECIDED] + [("anchored", rule, rule) for rule in DECIDED]
    compared = {}
    for dataset in table.datasets:
        for cell, own, rival in pairs:
            paths = [papers / table.folder / "honest" / f"{dataset}.{one}.report.json" for one in (cell, "ce")]
            both = [
                measure(read_report(path), rule, "f1").scores for path, rule in zip(paths, (own, rival), strict=True)
            ]
            compared[dataset, cell, rival] = over_splits(*both)
    judged = judged_together(compared)
    if not judged:
        return NOTHING
    rows = []
    for dataset in dict.fromkeys(dataset for dataset, *_ in judged):
        cells = [judged.get((dataset, cell, rival)) for cell, _, rival in pairs]
        rows.append([dataset, *(NONE if one is None else signed(one[0].difference, one[0].error, one[1])
                                for one in cells)])  # fmt: skip
    head = ["F1", *(f"EAST, argmax − CE, {rule}" for rule in DECIDED.values()),
            *(f"anchored − CE, both {rule}" for rule in DECIDED.values())]  # fmt: skip
    return f"{markdown_table(head, rows)}\n\n{len(judged)} paired comparisons, corrected (Holm) as one family."


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--papers", type=Path, help="the folder of tables and reports")
    parser.add_argument(
        "--docs", type=Path, default=Path("docs/research"), help="the pages' folder; images lie in ../images"
    )
    parser.add_argument("--benchmarks", type=Path, default=Path("benchmarks/results"), help="the folder of their rows")
    parser.add_argument("--check", action="store_true", help="write nothing, fail if a document is out of date")
    args = parser.parse_args(arguments)
    papers = find_papers(args.papers)
    blocks = {
        "results.md": results_blocks(papers) | tree_blocks(args.benchmarks) | east_blocks(args.benchmarks),
        "reproduction.md": (found := reproduction_blocks(papers, args.benchmarks)),
        "reproduction_numbers.md": found,
    }
    current = [
        write_document(args.docs / name, render_document(name, papers, own, args.benchmarks), check=args.check)
        for name, own in blocks.items()
    ]
    figures = {
        "reproduction.svg": distance_figure([fill(papers, table) for table in all_tables(papers)]),
        "results.svg": contest_figure({title: duels(papers, ours, "f1") for title, ours in DRAWN.items()}),
    }
    images = args.docs.parent / "images"
    current += [write_document(images / name, figure, check=args.check) for name, figure in figures.items()]
    return int(args.check and not all(current))


if __name__ == "__main__":
    raise SystemExit(main())
