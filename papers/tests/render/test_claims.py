"""Claims of the research pages that are not look-ups: each is on its page, and the reports still support it."""

import re
from functools import cache
from pathlib import Path

import pandas as pd
import pytest

from evalign_papers.analysis.contests import Duel, duels
from evalign_papers.analysis.filled import fill
from evalign_papers.engine.printed import PACKAGED, load_table
from evalign_papers.render.along_training import SCORES
from evalign_papers.render.benchmarks import metric_block, read_results
from evalign_papers.render.documents import Numbers
from evalign_papers.render.reproduction import curves_block, effects, fit_block, summary_block
from evalign_papers.render.results import CONTESTS, check_block, decided_block, points_block

ROOT = Path(__file__).parents[3]
BENCHMARKS = ROOT / "benchmarks/results"
LEARNED = ("tuned", "plug-in")


@cache
def page(name: str) -> str:
    return " ".join((ROOT / "docs/research" / name).read_text(encoding="utf-8").split())


@cache
def contest(name: str) -> tuple[Duel, ...]:
    [found] = [tuple(duels(PACKAGED, ours, metric)) for block, metric, ours in CONTESTS if block == name]
    return found


def rows_of(block: str) -> list[list[str]]:
    """Cells of the table of a block, without its head."""
    lines = [line for line in block.splitlines() if line.startswith("| ")]
    return [line.removeprefix("| ").removesuffix(" |").split(" | ") for line in lines[1:]]


def value(cell: str) -> float:
    """The number that a cell begins with, without stars, error and typographic minus."""
    return float(re.sub(r"[*\\]", "", cell.split(" ±")[0]).replace("−", "-"))


def outcomes(name: str, rival: str, table: str = "", dataset: str = "") -> dict[str, set[str]]:
    """Data sets by outcome, of rivals whose title begins with `rival`."""
    found: dict[str, set[str]] = {"better": set(), "worse": set(), "no clear difference": set()}
    for duel in contest(name):
        if duel.rival.title.startswith(rival) and table in duel.field.table and dataset in duel.dataset:
            found[duel.outcome].add(duel.dataset)
    return found


def test_f1_by_the_papers_methods() -> None:
    assert "clearly better than cross-entropy with a tuned threshold or the plug-in rule nowhere" in page("results.md")
    assert outcomes("f1-paper", "CE argmax")["better"] == {"adult"}
    for table in ("btg-1", "east-1"):
        assert outcomes("f1-paper", "CE argmax", table, "adult")["better"]
    assert not any(outcomes("f1-paper", f"CE {rule}")["better"] for rule in LEARNED)
    assert "clearly worse than every rival" in page("results.md")
    lost = outcomes("f1-paper", "", "east-1", "cocktailparty")
    assert not lost["better"] | lost["no clear difference"]
    assert "is clearly worse than cross-entropy with argmax on CIFAR-10" in page("results.md")
    assert {"cifar10", "caltech101"} <= outcomes("f1-paper", "CE argmax", "east-1")["worse"]
    assert "clearly worse on CocktailParty, CIFAR-10 and Caltech-101" in page("results.md")
    worse = outcomes("f1-paper", "CE argmax")["worse"]
    assert worse == {"cocktailparty", "cocktailparty_graph", "cifar10", "caltech101"}
    assert "is clearly better than cross-entropy with argmax on one table" in page("results.md")


def test_other_metrics() -> None:
    assert "**Trained on accuracy**, it is nowhere clearly better than cross-entropy" in page("results.md")
    assert not outcomes("accuracy-paper", "CE")["better"]
    assert "**Trained on MCC or AUROC**, no difference from cross-entropy is clear" in page("results.md")
    for name in ("mcc-paper", "auroc-paper"):
        found = outcomes(name, "CE")
        assert found["no clear difference"]
        assert not found["better"] | found["worse"]


def test_anchored() -> None:
    assert "It is never clearly worse than cross-entropy." in page("results.md")
    assert "on any of seven tables with argmax for both, nor with the plug-in rule for both" in page("results.md")
    for name in ("f1-anchored", "f1-anchored-plug-in"):
        assert not outcomes(name, "CE")["worse"]
        assert len(set.union(*outcomes(name, "CE argmax").values())) == 7
    assert "no difference from cross-entropy is clear, whatever rule cross-entropy decides by" in page("results.md")
    assert not outcomes("f1-anchored", "CE")["better"]
    assert "metric training is clearly better on no data set" in page("results.md")
    assert not any(outcomes(name, f"CE {rule}")["better"] for name, *_ in CONTESTS for rule in LEARNED)
    assert not outcomes("f1-anchored-plug-in", "CE plug-in")["better"]
    assert outcomes("f1-anchored-plug-in", "CE argmax")["better"] == {"adult"}


def test_trees() -> None:
    assert "on Adult is clearly better than EAST by F1, accuracy and MCC" in page("results.md")
    for metric in ("f1", "accuracy", "mcc"):
        assert outcomes(f"{metric}-paper", "boosting argmax", "east-1", "adult")["worse"], metric
    assert "than BtG by accuracy, AUROC and, with a learned decision, F1" in page("results.md")
    for metric in ("accuracy", "auroc"):
        assert outcomes(f"{metric}-paper", "boosting argmax", "btg-1", "adult")["worse"], metric
    for rule in LEARNED:
        assert outcomes("f1-paper", f"boosting {rule}", "btg-1", "adult")["worse"], rule
    assert "it is clearly worse than both by F1, unless its threshold is tuned" in page("results.md")
    for table in ("btg-1", "east-1"):
        for rule in ("argmax", "plug-in"):
            assert outcomes("f1-paper", f"boosting {rule}", table, "creditcard")["better"], rule
        assert not outcomes("f1-paper", "boosting tuned", table, "creditcard")["better"]
        found = outcomes("f1-paper", "forest", table, "creditcard")
        assert not found["better"] | found["worse"]


def test_the_metric_in_trees() -> None:
    assert "with argmax on Adult, and with no other decision or set" in page("results.md")
    rows = rows_of(metric_block(read_results(BENCHMARKS)))
    assert [(row[0], row[2]) for row in rows if "**" in row[-1]] == [("adult", "argmax")]


def test_imbalance_by_argmax() -> None:
    assert "With argmax the anchored recipe is clearly ahead on the synthetic set up to 1:1000" in page("results.md")
    block = check_block(fill(PACKAGED, load_table(PACKAGED, "checks-imbalance")), "cross-entropy")
    head = [cell.strip() for cell in block.splitlines()[0].strip("|").split("|")]
    [anchored] = [row for row in rows_of(block) if row[0] == "anchored (ours)"]
    clear = [name for name, cell in zip(head, anchored, strict=True) if "(**+" in cell]
    assert clear == ["synthetic-10", "synthetic-100", "synthetic-1000"]


@pytest.mark.parametrize(
    ("name", "reference", "rows", "sentence"),
    [
        ("cooling", "none", "", "**Cooling** makes no clear difference"),
        ("ablation", "full", "without", "nor annealing moves F1 clearly on any table"),
        ("scratch", "EAST as printed (geometric, rate 0.9)", "",
         "On Yeast no part and no schedule makes a clear difference, and neither does cross-entropy"),
        ("slope", "linear, delta = 0.1", "linear", "No delta from 0 to 0.5 makes a clear difference"),
    ],
)  # fmt: skip
def test_checks_without_a_clear_difference(name: str, reference: str, rows: str, sentence: str) -> None:
    assert sentence in page("results.md")
    block = check_block(fill(PACKAGED, load_table(PACKAGED, f"checks-{name}")), reference)
    shown = [row for row in rows_of(block) if row[0].startswith(rows)]
    assert len(shown) > 3
    assert not any("**" in cell for row in shown for cell in row)


def test_a_small_slope_is_clearly_worse() -> None:
    assert "A sigmoid with k = 1 is clearly worse there" in page("results.md")
    block = check_block(fill(PACKAGED, load_table(PACKAGED, "checks-slope")), "linear, delta = 0.1")
    clear = [(row[0], "(**−" in row[1], "**" in row[2]) for row in rows_of(block) if "**" in "".join(row)]
    assert clear == [("sigmoid, k = 1", True, False)]


def test_three_points_are_as_good_as_five() -> None:
    assert "No difference is clear at any of the three thresholds" in page("results.md")
    rows = rows_of(points_block(fill(PACKAGED, load_table(PACKAGED, "checks-points"))))
    assert len(rows) == 6
    assert not any("**" in row[-1] for row in rows)


def test_a_learned_decision_takes_the_gain_of_rare_positives() -> None:
    assert "a learned decision gives cross-entropy most of what training gains over argmax" in page("results.md")
    rows = rows_of(decided_block(PACKAGED))
    gains = [[value(cell) for cell in row[1:]] for row in rows]
    large = [gain for gain in gains if gain[3] > 0.05]  # anchored minus cross-entropy, both argmax
    assert len(large) == 3
    assert all(max(tuned, plug_in) < 0.5 * argmax for *_, argmax, tuned, plug_in in large)
    assert not any("**" in cell for row in rows for cell in (row[2], row[3], row[5], row[6]))


def test_along_training() -> None:
    scores = pd.read_csv(BENCHMARKS / SCORES)
    means = scores.groupby(["set", "share", "method"])[["f1_argmax", "average_precision"]].mean()
    yeast = means.loc["yeast"]["f1_argmax"].unstack()
    assert "With the fewest rows of Yeast, EAST's mean is above that of cross-entropy with argmax" in page("results.md")
    assert (yeast["EAST"] - yeast["cross-entropy"]).iloc[[0, -1]].gt(0).tolist() == [True, False]
    assert "EAST ranks worse than cross-entropy wherever there are many rows" in page("results.md")
    ranking = means["average_precision"].unstack()
    many = ranking[scores.groupby(["set", "share"])["rows"].min() > 200]
    assert (many["EAST"] < many["cross-entropy"]).all()
    assert "soft F1 is that of the hard decisions at every temperature but the highest" in page("results.md")
    trained = scores[(scores.method == "EAST") & (scores.share == 1)].groupby("set").mean(numeric_only=True)
    soft = trained.filter(regex="^soft_")
    assert (soft.drop(columns="soft_0.4").sub(trained["f1_argmax"], axis=0).abs() < 0.01).all().all()
    assert (soft["soft_0.4"] < 0.5 * trained["f1_argmax"]).all()


def test_quirks_and_print() -> None:
    assert "the median distance is several times smaller than without" in page("reproduction.md")
    filled = [fill(PACKAGED, load_table(PACKAGED, name)) for name in ("btg-1", "btg-s4", "btg-s7", "btg-s9", "east-3")]
    rows = rows_of(fit_block([effect for one in filled for effect in effects(PACKAGED, one)]))
    assert {row[0] for row in rows} == {"cut_logits", "auroc_of_cuts", "macro_f1", "test_chooses"}
    for name, *_, with_it, without in rows:
        nearer_without = float(with_it) > float(without)
        assert nearer_without if name == "test_chooses" else 3 * float(with_it) < float(without), name


def test_cross_entropy_on_cifar10_is_below_print() -> None:
    assert "Cross-entropy is below print at both learning rates tried" in page("reproduction.md")
    numbers = Numbers(PACKAGED)
    for cell in ("ce", "ce@longer"):
        for metric in ("f1", "accuracy", "mcc"):
            ours = numbers.score(f"east/1/paper/cifar10.{cell}", metric, digits=3).rstrip("†")
            assert float(ours) < float(numbers.printed("east-1", "CE", "cifar10", metric))


def test_east_prints_the_numbers_of_dogs_twice() -> None:
    assert "All means that Table 5 has for dogs are those of MF's Table 1" in page("reproduction.md")
    tables = [load_table(PACKAGED, name) for name in ("east-5", "mf-1", "east-4")]
    means = [
        [
            row.printed[dataset][metric].mean
            for row in table.rows
            if row.label.endswith("of dog")
            for dataset in ("cifar10", "caltech256")
            for metric in ("precision_dog", "recall_dog")
        ]
        for table in tables
    ]
    assert means[0] == means[1]
    assert not set(means[0]) & set(means[2])


def test_metric_losses_are_hard_after_ten_epochs() -> None:
    assert "soft and hard metric on validation rows differ by a few thousandths at most" in page("reproduction.md")
    every = rows_of(curves_block(BENCHMARKS))
    rows = [row for row in every if row[0] != "ce"]
    assert {row[0] for row in rows} == {"f1", "accuracy", "mcc"}
    assert {cell for row in every if row[0] == "ce" for cell in (*row[3:6], *row[7:])} == {"–"}  # no soft metric
    hard = {(row[0], int(row[2])): float(row[6]) for row in every if row[1] == "0.0001"}
    assert "Cross-entropy has the higher validation F1 at ten epochs, EAST at forty" in page("reproduction.md")
    assert hard["ce", 10] > hard["f1", 10]
    assert hard["ce", 40] < hard["f1", 40]
    assert all(abs(value(row[-1])) < 0.004 for row in rows if int(row[2]) >= 10)


def test_accuracy_on_credit_card_is_the_larger_class() -> None:
    assert "all twelve points of the grid have the validation accuracy of predicting the larger class" in page(
        "reproduction.md"
    )
    report = Numbers(PACKAGED)._report("east/1/paper/creditcard.accuracy@larger")
    assert report is not None
    assert len(report.grid) == 12
    assert len({point["score"] for point in report.grid}) == 1
    assert {trial.scores["paper"]["f1"] for trial in report.trials} == {0.0}


def test_dice_and_the_graph_network_end_at_one_class() -> None:
    assert "every one of our trials on two classes ends at calling all rows positive" in page("reproduction.md")
    numbers = Numbers(PACKAGED)
    for dataset in ("mammography", "cocktailparty", "adult", "creditcard"):
        assert numbers.range(f"east/1/paper/{dataset}.dice@*", "recall") == "1.00", dataset
    assert "On CocktailParty so does every point of the printed grid" in page("reproduction.md")
    report = numbers._report("east/1/paper/cocktailparty.dice@printed")
    assert report is not None
    assert len(report.grid) == 30
    assert len({point["loss"] for point in report.grid}) == 1  # the trials, at one of the points, are all positive
    assert "Trained on F1 it calls every pair positive" in page("reproduction.md")
    assert numbers.range("btg/3/paper/cocktailparty_graph.f1", "recall") == "1.00"


def test_numbers_add_up() -> None:
    """The classes of all numbers of a paper are those of its tables."""
    filled = [fill(PACKAGED, load_table(PACKAGED, name)) for name in ("mf-1", "mf-2")]
    rows = rows_of(summary_block(filled))
    assert sum(int(row[2]) for row in rows) == sum(cell.distance is not None for one in filled for cell in one.cells)
    assert all(int(row[2]) == sum(map(int, row[3:])) for row in rows)
