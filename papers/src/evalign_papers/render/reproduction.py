"""docs/research/reproduction.md: printed numbers beside ours by the paper's protocol, and the quirks that move them."""

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

import pandas as pd

from evalign_papers.analysis.distance import VERDICTS, Distance
from evalign_papers.analysis.filled import (
    FilledTable,
    Measured,
    Number,
    distinct_numbers,
    fill,
    measure,
    read_report,
    report_path,
)
from evalign_papers.engine.config import QUIRKS
from evalign_papers.engine.printed import Table, all_tables
from evalign_papers.engine.settings import PRINTED
from evalign_papers.render.documents import CIFAR10_ROWS, CLAIMS, literal, markdown_table
from evalign_papers.render.wording import NONE, mark, measured_number, not_run, printed_number, signed

WITHOUT = "-without-"
SHOWN = ("f1", "accuracy", "mcc")
CURVE_EPOCHS = (1, 10, 40, 100, 300)
MISSED = ("off", "far off")
LEAST = 0.0005  # an effect below this is 0 at three decimals
PAPERS = {"btg": "BtG", "east": "EAST", "mf": "MF"}
KINDS = {"table": "tables", "ap_perf": "tables, AP-Perf", "batches": "synthetic tables by batch size"}
BUDGET_COLUMNS = ("patience", "most epochs", "grid", "trials")
NOTHING = "No table has been run under the paper's protocol yet."


class Effect(NamedTuple):
    """How much one quirk of evaluation adds to one number: with it minus without it, mean over trials."""

    quirk: str
    cell: Number
    table: str
    value: float
    without: Measured


def reproduction_blocks(papers: Path, benchmarks: Path | None = None) -> dict[str, str]:
    everything = [fill(papers, table) for table in all_tables(papers)]
    filled = [one for one in everything if any(cell.distance for cell in one.cells)]
    moved = [effect for one in filled for effect in effects(papers, one)]
    return {
        "headline": headline_block(filled),
        "nearness": nearness_block(filled),
        "summary": summary_block(filled),
        "reached": reached_block(filled),
        "settings": settings_block(),
        **budgets_blocks(filled),
        "cifar10": cifar10_block(benchmarks),
        "cifar10-curves": curves_block(benchmarks),
        **adult_blocks(filled),
        "time": time_block(benchmarks),
        "quirk-list": markdown_table(["quirk", "meaning"], [[f"`{name}`", text] for name, text in QUIRKS.items()]),
        "fit": fit_block(moved),
        "quirks": quirks_block(moved),
        "missed": missed_block(filled, moved),
        "numbers": numbers_block(filled),
        "not-run": not_run_block(everything),
    }


def effects(papers: Path, filled: FilledTable) -> Iterator[Effect]:
    """Effects of all quirks that the reports have scores without."""
    decision = filled.table.decision["paper"]
    for cell in filled.cells:
        report = read_report(report_path(papers, cell.row, "paper", cell.dataset))
        if report is None or cell.printed is None or not report.trials:
            continue
        with_it = measure(report, decision, cell.metric).scores
        for variant in report.trials[0].scores:
            if variant.startswith(decision + WITHOUT):
                without = measure(report, variant, cell.metric)
                common = with_it.keys() & without.scores.keys()
                if common:
                    value = fmean(with_it[trial] - without.scores[trial] for trial in common)
                    yield Effect(variant.removeprefix(decision + WITHOUT), cell, filled.table.name, value, without)


def reached_block(filled: Sequence[FilledTable]) -> str:
    """A line for each table: how many printed numbers are in each class of distance, and the median distance."""
    found = {one.table.name: [cell.distance for cell in one.cells if cell.distance is not None] for one in filled}
    distinct = _of_papers(filled)
    everything = [distance for *_, distance in distinct]
    fair = [cell.distance_without_test for _, cell, _ in distinct if cell.distance_without_test]
    if not found:
        return NOTHING
    rows = []
    for one in filled:
        if own := found[one.table.name]:
            printed = sum(cell.printed is not None for cell in one.cells)
            rows.append([one.table.name, f"{len(own)} of {printed}", *_classes(own), f"`{one.table.command}`"])
    if everything:
        rows.append(["papers, no number twice", str(len(everything)), *_classes(everything), ""])
        rows.append(["the same without `test_chooses`", str(len(fair)), *_classes(fair), ""])
    head = ["table", "numbers measured", *VERDICTS, "median distance", "largest", "command"]
    return markdown_table(head, rows)


def _classes(found: Sequence[Distance]) -> list[str]:
    """Numbers in each class of distance, the median distance and the largest."""
    counts, gaps = Counter(one.verdict for one in found), [abs(one.difference) for one in found]
    return [*(str(counts[name]) for name in VERDICTS), f"{median(gaps):.3f}", f"{max(gaps):.3f}"]


def headline_block(filled: Sequence[FilledTable]) -> str:
    """How many numbers that the papers print are near, undecided and off, in a sentence."""
    counts = Counter(found.verdict for *_, found in _of_papers(filled))
    if not counts:
        return NOTHING
    near, off = counts["within .02"] + counts["within .05"], counts["off"] + counts["far off"]
    return (
        f"Of {counts.total()} printed numbers measured here, **{near} are within .05** ({counts['within .02']} of them "
        f"within .02), **{counts['undecided']} are undecided**, and **{off} are off** by more than .02 "
        f"({counts['far off']} of them by more than .05)."
    )


def nearness_block(filled: Sequence[FilledTable]) -> str:
    """The shares of near and of missed numbers, at the printed budget and below it, in a sentence."""
    parts = []
    for reduced, name in ((False, "at the printed budget"), (True, "below it")):
        own = [found.verdict for _, cell, found in _of_papers(filled) if cell.reduced == reduced]
        if own:
            near, off = (100 * sum(verdict in kind for verdict in own) / len(own) for kind in (VERDICTS[:2], MISSED))
            parts.append(f"of {len(own)} numbers {name} {near:.0f} % are within .05 and {off:.0f} % off")
    return f"{'; '.join(parts)}.".capitalize() if parts else NOTHING


def summary_block(filled: Sequence[FilledTable]) -> str:
    """Numbers in each class of distance by paper, for runs at and below the printed budget."""
    verdicts: dict[tuple[str, str], Counter[str]] = {}
    for table, cell, found in _of_papers(filled):
        budget = "below it†" if cell.reduced else "as printed"
        verdicts.setdefault((table.name.partition("-")[0], budget), Counter())[found.verdict] += 1
    if not verdicts:
        return NOTHING
    rows = [
        [PAPERS[paper], budget, str(own.total()), *(str(own[name]) for name in VERDICTS)]
        for (paper, budget), own in sorted(verdicts.items())
    ]
    return markdown_table(["paper", "budget", "numbers", *VERDICTS], rows)


def _of_papers(filled: Sequence[FilledTable]) -> list[tuple[Table, Number, Distance]]:
    """Distinct numbers of the papers' own tables; our checks repeat some."""
    return distinct_numbers(one for one in filled if not one.table.is_check)


def settings_block() -> str:
    """The training settings that the papers print, from `evalign_papers.engine.settings`."""
    rows = [
        [PAPERS[paper], KINDS.get(kind, kind), str(own.patience), _listed(own.learning_rate), _listed(own.batch_size),
         _listed(own.dropout), _listed(own.rate), str(own.trials)]
        for (paper, kind), own in PRINTED.items()
    ]  # fmt: skip
    head = ["paper", "data", "patience", "learning rates", "batch sizes", "dropout", "cooling rates", "trials"]
    return markdown_table(head, rows)


def _listed(values: Sequence[float]) -> str:
    return ", ".join(f"{value:g}" for value in values) or NONE


def budgets_blocks(filled: Sequence[FilledTable]) -> dict[str, str]:
    """How many rows ran at the printed budget, and a line for each data set and kind of reduction of the others."""
    groups: dict[tuple[str, tuple[str, ...]], dict[str, list[str]]] = {}
    full = 0
    for one in filled:
        for place in dict.fromkeys((cell.row.label, cell.dataset) for cell in one.cells if not cell.row.extra):
            own = [cell for cell in one.cells if (cell.row.label, cell.dataset) == place and "paper" in cell.measured]
            found = next((cell.measured["paper"] for cell in own if cell.measured["paper"].scores), None)
            if found is None:
                continue
            full += not found.reduced
            if found.reduced:
                runs = groups.setdefault((place[1], _budget_cells(found.reduced)), {})
                runs.setdefault(one.table.name, []).append(place[0])
    if not groups:
        return {"budget-counts": f"All {full} rows ran at the printed budget." if full else NOTHING, "budgets": NOTHING}
    lines = [
        [dataset, *cells, "<br>".join(literal(f"{table}: {'; '.join(labels)}") for table, labels in runs.items())]
        for (dataset, cells), runs in sorted(groups.items())
    ]
    below = sum(len(labels) for runs in groups.values() for labels in runs.values())
    note = f"Of the rows of all tables, one per data set, {full} ran at the printed budget and {below} below it (†)."
    return {"budget-counts": note, "budgets": markdown_table(["data", *BUDGET_COLUMNS, "tables and rows"], lines)}


def _budget_cells(reduced: Sequence[str]) -> tuple[str, ...]:
    """What `reductions` says, in the columns of the table; empty where a setting is as printed.

    >>> _budget_cells(["patience 5 of 50", "at most 40 epochs, reached by 2 of 3 trials", "batch size 256, not 32, 64"])
    ('5 of 50', '40', 'batch size 256', '')
    """
    patterns = (r"patience (\d+ of \d+)", r"at most (\d+) epochs.*|.*(stopped by time)",
                r"((?:learning rate|batch size|dropout|cooling rate) [\d., ]+?)(?: of|, not).*",
                r"(\d+ of \d+) trials")  # fmt: skip
    matches = [[match for one in reduced if (match := re.fullmatch(pattern, one))] for pattern in patterns]
    return tuple("; ".join(filter(None, (text for match in found for text in match.groups()))) for found in matches)


def cifar10_block(benchmarks: Path | None) -> str:
    """Darknet-19 trained by EAST at the printed patience: rows of `benchmarks/printed_budget.py`."""
    path = None if benchmarks is None else benchmarks / CIFAR10_ROWS
    if path is None or not path.exists():
        return "Nothing has been run yet: `python benchmarks/printed_budget.py cifar10`."
    found = _cifar10_runs(path)
    titles = {"f1": "F1*", "accuracy": "Acc*", "mcc": "MCC*", "ce": "cross-entropy"}
    rows = [
        [_table_of(run), literal(titles.get(run["loss"], run["loss"])),
         f"{run['learning_rate']:g}", str(run["trial"]), str(run["epochs"]),
         run["stopped_by"], f"{run['seconds']:.0f}", f"{run['validation_loss']:.3f}",
         *(f"{run['test'][name]:.3f}" for name in SHOWN)]
        for run in found
    ]  # fmt: skip
    head = ["table", "trained on", "learning rate", "trial", "epochs", "stopped by", "seconds", "validation loss",
            "F1", "accuracy", "MCC"]  # fmt: skip
    device, sizes = found[0]["environment"]["device"], sorted({run["batch_size"] for run in found})
    note = (
        f"Darknet-19, batches of {', '.join(map(str, sizes))}, patience 50 a temperature, "
        f"cooling by 0.9, no augmentation; scores of the epoch of lowest validation loss, on {device}. Where time "
        "stopped a run, it is still below the printed budget. `python benchmarks/printed_budget.py cifar10`"
    )
    return f"{markdown_table(head, rows)}\n\n{note}"


def _cifar10_runs(path: Path) -> list[dict[str, Any]]:
    runs = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return sorted(runs, key=lambda run: (_table_of(run), run["loss"], -run["learning_rate"], run["trial"]))


def _table_of(run: dict[str, Any]) -> str:
    """
    >>> _table_of({"cell": "east/1/paper/cifar10.f1@longer"})
    'east-1'
    """
    return "-".join(run["cell"].split("/")[:2])


def curves_block(benchmarks: Path | None) -> str:
    """Soft metric on training and validation rows and hard metric on validation rows, along training on CIFAR-10.

    Cross-entropy minimises no soft metric; its hard one is F1.
    """
    path = None if benchmarks is None else benchmarks / CIFAR10_ROWS
    if path is None or not path.exists():
        return "Nothing has been run yet: `python benchmarks/printed_budget.py cifar10`."
    rows = []
    for run in (run for run in _cifar10_runs(path) if run["trial"] == 0 and _table_of(run) == "east-1"):
        for epoch in sorted({*(e for e in CURVE_EPOCHS if e <= run["epochs"]), run["epochs"]}):
            temperature, train_loss, valid_loss, score = run["curve"][epoch - 1]
            soft_train, soft_valid = 1 - train_loss, 1 - valid_loss
            line = [f"{temperature:g}", f"{soft_train:.3f}", f"{soft_valid:.3f}", f"{score:.3f}",
                    signed(soft_train - soft_valid), signed(score - soft_valid)]  # fmt: skip
            if run["loss"] == "ce":
                line = [NONE, NONE, NONE, f"{score:.3f}", NONE, NONE]
            rows.append([run["loss"], f"{run['learning_rate']:g}", str(epoch), *line])
    head = ["trained on", "learning rate", "epoch", "temperature", "soft, training", "soft, validation",
            "hard, validation", "training minus validation", "hard minus soft"]  # fmt: skip
    return markdown_table(head, rows)


def time_block(benchmarks: Path | None) -> str:
    """Times of `benchmarks/bench_btg_claims.py`, as multiples of the soft-set F1 loss and of the linear step."""
    path = None if benchmarks is None else benchmarks / CLAIMS
    if path is None or not path.exists():
        return "Nothing has been measured yet: `python benchmarks/bench_btg_claims.py`."
    rows, first = [], dict[str, float]()
    for task, value in pd.read_csv(path)[["task", "seconds"]].to_numpy().tolist():
        kind, _, what = str(task).partition(": ")
        how, _, rest = what.partition(", ")
        group = "an epoch on one core" if kind == "epoch" else rest
        base = first.setdefault(group, float(value))
        rows.append([group, how, f"{1000 * value:.3g} ms", f"{value / base:.2f}"])
    note = "The last column is the multiple of the first row of its group. `python benchmarks/bench_btg_claims.py`"
    return f"{markdown_table(['what', 'how', 'time', 'ratio'], rows)}\n\n{note}"


def adult_blocks(filled: Sequence[FilledTable]) -> dict[str, str]:
    """Printed numbers on Adult beside runs with the quirk of its loader, with and without `test_chooses`; counts."""
    rows = []
    for table, cell, found in distinct_numbers(filled):
        own = cell.measured["paper"]
        if "adult_first_line" in own.quirks:
            fair = cell.distance_without_test
            rows.append([table.name, literal(cell.row.label), table.metrics[cell.metric],
                         printed_number(cell.printed, cell.decimals), measured_number(own),
                         f"{fmean(own.without_test.values()):.3f}" if own.without_test else NONE,
                         found.verdict, fair.verdict if fair else NONE,
                         measured_number(cell.measured["honest"]) if "honest" in cell.measured else NONE])  # fmt: skip
    if not rows:
        nothing = "Nothing has been run with this quirk yet."
        return {"adult-counts": nothing, "adult": nothing}
    head = ["table", "row", "metric", "printed", "with the quirk", "and without test_chooses", "class",
            "class without", "honest"]  # fmt: skip
    listed = [
        ", ".join(f"{Counter(row[column] for row in rows)[name]} {name}" for name in VERDICTS) for column in (6, 7)
    ]
    note = f"Of {len(rows)} printed numbers on Adult: {listed[0]}; without `test_chooses` {listed[1]}."
    return {"adult-counts": note, "adult": markdown_table(head, rows)}


def fit_block(moved: Sequence[Effect]) -> str:
    """Whether printed numbers that a quirk changes are nearer with or without it."""
    rows = []
    for quirk in sorted({effect.quirk for effect in moved}):
        numbers = {
            _run(effect.cell): effect for effect in moved if effect.quirk == quirk and abs(effect.value) >= LEAST
        }
        pairs = [(effect.cell.distance, effect.cell.distance_of(effect.without.values)) for effect in numbers.values()]
        both = [(one, other) for one, other in pairs if one is not None and other is not None]
        if both:
            sides = [[pair[side] for pair in both] for side in (0, 1)]
            off = [str(sum(one.verdict in MISSED for one in side)) for side in sides]
            gaps = [f"{median(abs(one.difference) for one in side):.3f}" for side in sides]
            rows.append([quirk, str(len(both)), *off, *gaps])
    if not rows:
        return "No report has a variant without a quirk yet."
    head = ["quirk", "numbers it moves", "off or far off with it", "without it", "median distance with it",
            "without it"]  # fmt: skip
    return markdown_table(head, rows)


def quirks_block(moved: Sequence[Effect]) -> str:
    """Every quirk by metric and training: how many numbers, the mean effect, and the largest with its place."""
    groups: Mapping[tuple[str, str, str], dict[tuple[str, ...], Effect]] = defaultdict(dict)
    for effect in moved:
        # Batch sizes are one training; a run that several tables show counts once.
        group = groups[effect.quirk, effect.cell.metric, re.sub(r"-b\d+$", "", effect.cell.row.cell)]
        group.setdefault(_run(effect.cell), effect)
    rows = []
    for (quirk, metric, trained), group in sorted(groups.items()):
        found = list(group.values())
        top = max(found, key=lambda effect: abs(effect.value))
        if abs(top.value) >= LEAST:
            rows.append([quirk, metric, trained, str(len(found)), signed(fmean(effect.value for effect in found)),
                         f"{signed(top.value)} ({top.cell.dataset}, {top.table})"])  # fmt: skip
    if not rows:
        return "No report has a variant without a quirk yet."
    head = ["quirk", "metric", "trained on", "numbers", "mean effect", "largest effect"]
    return markdown_table(head, rows)


def missed_block(filled: Sequence[FilledTable], moved: Sequence[Effect]) -> str:
    """Every printed number that is off under the paper's protocol, largest distance first."""
    largest: dict[tuple[str, str, str, str], Effect] = {}
    for effect in moved:
        place = (effect.table, effect.cell.row.label, effect.cell.dataset, effect.cell.metric)
        if place not in largest or abs(effect.value) > abs(largest[place].value):
            largest[place] = effect
    rows = []
    for table, cell, test in distinct_numbers(filled):
        if test.verdict in MISSED:
            moving = largest.get((table.name, cell.row.label, cell.dataset, cell.metric))
            mover = NONE if moving is None or abs(moving.value) < LEAST else f"{moving.quirk} {signed(moving.value)}"
            line = [table.name, literal(cell.row.label), cell.dataset, table.metrics[cell.metric],
                    printed_number(cell.printed, cell.decimals), measured_number(cell.measured["paper"]),
                    signed(test.difference), test.verdict, mover, measured_number(cell.measured["honest"])]  # fmt: skip
            rows.append((abs(test.difference), line))
    if not rows:
        return "No measured number is off."
    head = ["table", "row", "data", "metric", "printed", "paper protocol", "difference", "class",
            "quirk that moves it most", "honest"]  # fmt: skip
    return markdown_table(head, [line for _, line in sorted(rows, key=lambda row: -row[0])])


def numbers_block(filled: Sequence[FilledTable]) -> str:
    """Every printed number beside ours by both protocols: a section for each table, a line for each run."""
    sections = []
    for one in filled:
        names, rows = one.table.metrics, []
        for dataset, row in product(one.table.datasets, one.table.rows):
            cells = [one.cell(row, dataset, metric) for metric in names]
            if any(cell.distance for cell in cells):
                rows.append([dataset, literal(row.label), *map(_three, cells)])
        head = f"### {one.table.name}: {one.table.title}\n\n{one.table.source}. {literal(one.table.note)}"
        sections.append(f"{head}\n\n{markdown_table(['data', 'row', *names.values()], rows)}")
    return "\n\n".join(sections) or NOTHING


def _three(cell: Number) -> str:
    """Printed, by the paper's protocol with the sign of its class, honest; on a line each."""
    if cell.printed is None:
        return NONE
    both = [f"{measured_number(cell.measured[name])} {mark(cell, name)}".strip() for name in cell.measured]
    return "<br>".join([printed_number(cell.printed, cell.decimals), *both])


def not_run_block(filled: Sequence[FilledTable]) -> str:
    """Every run that has no report, by table and protocol, with the command that makes it."""
    rows = []
    for one in filled:
        for protocol, state, runs, total in not_run(one):
            counts = Counter(run.split(":")[0] for run in runs)
            what = "all" if len(runs) == total else ", ".join(f"{name} ({n} rows)" for name, n in counts.items())
            how = f"`{one.table.command}`" if state == "not run" else "no config yet"
            rows.append([one.table.name, protocol, f"{len(runs)} of {total}", what, how])
    if not rows:
        return "Everything has been run."
    return markdown_table(["table", "protocol", "runs", "which", "command"], rows)


def _run(cell: Number) -> tuple[str, ...]:
    """Identity of a measured number across tables."""
    return cell.row.folder, cell.row.cell, cell.dataset, cell.metric
