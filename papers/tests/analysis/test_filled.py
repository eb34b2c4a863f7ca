"""The papers' tables as data, filled with reports and shown on the terminal."""

import io
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from made_up_reports import PAPERS, copy_tables, write_report
from rich.console import Console

from evalign_papers.analysis.facts import count_facts, facts_of
from evalign_papers.analysis.filled import fill, read_report
from evalign_papers.datasets import load, names
from evalign_papers.engine.printed import all_tables, find_papers, load_table, parse_table, table_names
from evalign_papers.render.terminal import show
from evalign_papers.render.wording import mark, not_run, state_of

MAMMOGRAPHY = {"f1": [0.62, 0.66, 0.60], "accuracy": [0.98, 0.98, 0.98], "auroc": [0.9, 0.9, 0.9]}


def test_every_printed_table_is_there() -> None:
    expected = [*(f"btg-{n}" for n in (1, 2, 3, 4)), *(f"btg-s{n}" for n in range(4, 13))]
    expected += [*(f"east-{n}" for n in range(1, 8)), "mf-1", "mf-2"]
    checks = ("ablation", "cooling", "imbalance", "longtail", "points", "text", "scratch", "slope")
    expected += [f"checks-{name}" for name in checks]
    assert table_names(PAPERS) == expected


@pytest.mark.parametrize("table", list(all_tables(PAPERS)), ids=lambda table: table.name)
def test_tables_are_whole(table) -> None:
    assert len({row.label for row in table.rows}) == len(table.rows)
    known = {f"{other.folder}/{row.cell}" for other in all_tables(PAPERS) for row in other.rows
             if row.folder == other.folder}  # fmt: skip
    for row in table.rows:
        assert f"{row.folder}/{row.cell}" in known  # a row that repeats another table's is trained there
        assert row.extra != bool(row.printed)
        for dataset, scores in row.printed.items():
            for metric, (mean, std) in scores.items():
                if table.kind == "runs":
                    assert (-1 if metric == "mcc" else 0) <= mean <= 1, (row.label, dataset, metric)
                    assert std is None or 0 <= std <= 0.5
                    assert round(mean, table.decimals[0]) == mean
    if table.name != "checks-imbalance":  # which has generated data of its own
        assert {name.split("-")[0] for name in table.datasets} <= set(names())


@pytest.mark.parametrize("table", list(all_tables(PAPERS)), ids=lambda table: table.name)
def test_printed_numbers_agree_with_each_other(table) -> None:
    """F_beta of the printed precision and recall, up to rounding and the mean over trials; a swapped column is seen."""
    for row in table.rows:
        for scores in row.printed.values():
            if {"precision", "recall"} <= set(scores):
                p, r = scores["precision"].mean, scores["recall"].mean
                for name, beta in (("f1", 1), ("f2", 2), ("f3", 3)):
                    expected = (1 + beta**2) * p * r / (beta**2 * p + r)
                    assert scores[name].mean == pytest.approx(expected, abs=0.02)


def test_rows_that_repeat_another_table_were_printed_alike() -> None:
    """Supplement Table 4 repeats three rows of Table 1; EAST's Tables 2 and 3 two of its Table 1."""
    for name, origin in (("btg-s4", "btg-1"), ("east-2", "east-1"), ("east-3", "east-1")):
        first = {row.cell: row for row in load_table(PAPERS, origin).rows}
        repeated = [row for row in load_table(PAPERS, name).rows if row.folder != name.replace("-", "/", 1)]
        for row in repeated:
            if first[row.cell].extra:
                continue
            for dataset, scores in row.printed.items():
                assert scores.items() <= first[row.cell].printed[dataset].items()
        assert len(repeated) >= 2


def test_wrong_tables_are_refused(tmp_path: Path) -> None:
    good = json.loads((PAPERS / "btg/4/table.json").read_text())
    assert parse_table(good, "btg-4") == load_table(PAPERS, "btg-4")
    with pytest.raises(ValueError, match="unknown key 'metrix'"):
        parse_table(good | {"metrix": {}}, "btg-4")
    with pytest.raises(ValueError, match="lacks 'title'"):
        parse_table({key: value for key, value in good.items() if key != "title"}, "btg-4")
    with pytest.raises(ValueError, match="calls itself"):
        parse_table(good, "btg-5")
    with pytest.raises(ValueError, match="unknown key 'form'"):
        parse_table(good | {"rows": [good["rows"][0] | {"form": "btg/1"}]}, "btg-4")
    with pytest.raises(ValueError, match="in no column"):
        parse_table(good | {"datasets": ["adult"]}, "btg-4")
    with pytest.raises(ValueError, match="no table is called 'btg-99'; there are btg-1"):
        load_table(PAPERS, "btg-99")
    with pytest.raises(ValueError, match="found none in"):
        find_papers(tmp_path)
    assert find_papers(PAPERS) == PAPERS


def test_cells_have_what_reports_say(tmp_path: Path) -> None:
    papers = copy_tables(tmp_path, "btg-1", "btg-4")
    table = load_table(papers, "btg-1")
    [row, *_] = table.rows
    assert state_of(fill(papers, table)) == "paper: not run; honest: not run"
    write_report(papers, "btg/1/paper/mammography.f1", {"paper": MAMMOGRAPHY})
    write_report(papers, "btg/1/honest/mammography.f1", {"argmax": MAMMOGRAPHY, "tuned": {}}, planned=10)
    filled = fill(papers, table)
    cell = filled.cell(row, "mammography", "f1")
    assert cell.printed == (0.63, 0.04)
    assert cell.measured["paper"].mean == pytest.approx(np.mean(MAMMOGRAPHY["f1"]))
    assert cell.measured["paper"].std == pytest.approx(np.std(MAMMOGRAPHY["f1"], ddof=1))
    assert [cell.measured[p].state for p in ("paper", "honest")] == ["complete", "partial"]
    assert filled.cell(row, "adult", "f1").measured["paper"].state == "no config"
    assert state_of(filled) == "paper: 1 of 24 runs; honest: 0 of 40 runs, 1 partly"
    assert mark(cell, "paper") == "?"  # three noisy trials decide nothing
    assert mark(cell, "honest") == ""
    # 0.9 is far from a printed 0.78, and without spread among our trials.
    assert mark(filled.cell(row, "mammography", "auroc"), "paper") == "✗"
    assert [(one.protocol, one.state, len(one.runs)) for one in not_run(filled)] == [
        ("paper", "no config", 23),
        ("honest", "no config", 39),
    ]
    # A row of another table reads that table's report.
    other = load_table(papers, "btg-4")
    again = fill(papers, other).cell(other.rows[0], "mammography", "f1")
    assert again.measured["paper"].values == MAMMOGRAPHY["f1"]


def test_two_quantities_are_not_compared(tmp_path: Path) -> None:
    papers = copy_tables(tmp_path, "btg-1", "east-3")
    for dataset in ("cocktailparty", "mammography"):
        write_report(papers, f"btg/1/honest/{dataset}.f1", {"argmax": MAMMOGRAPHY})
        write_report(papers, f"btg/1/paper/{dataset}.f1", {"paper": MAMMOGRAPHY})
    filled = fill(papers, table := load_table(papers, "btg-1"))
    cells = {(d, m): filled.cell(table.rows[0], d, m) for d in ("cocktailparty", "mammography") for m in table.metrics}
    assert [place for place, cell in cells.items() if mark(cell, "honest") == "≠"] == [
        ("cocktailparty", "f1"),
        ("cocktailparty", "auroc"),
        ("mammography", "auroc"),
    ]
    assert all(cell.distance is not None for cell in cells.values())
    assert mark(cells["mammography", "f1"], "honest") == ""
    forest = next(row for row in load_table(papers, "east-3").rows if row.cell == "forest")
    assert not load_table(papers, "east-3").comparable(forest, "adult", "f1", "honest")
    assert load_table(papers, "east-3").comparable(forest, "adult", "accuracy", "honest")


def test_rows_of_ours_need_no_plan_of_the_paper(tmp_path: Path) -> None:
    papers = copy_tables(tmp_path, "btg-1")
    table = load_table(papers, "btg-1")
    extra = sum(row.extra for row in table.rows) * len(table.datasets)
    states = fill(papers, table).states("paper")
    assert len(states) == len(table.rows) * len(table.datasets) - extra
    assert set(states.values()) == {"no config"}
    (papers / "btg/1/paper").mkdir()
    (papers / "btg/1/paper/adult.forest.json").write_text("{}")
    again = fill(papers, table).states("paper")
    assert len(again) == len(states) + 1
    assert again["random forest", "adult"] == "not run"


def test_numbers_drawn_from_print_are_never_off(tmp_path: Path) -> None:
    papers = copy_tables(tmp_path, "btg-1")
    table = load_table(papers, "btg-1")
    rng = np.random.default_rng(0)
    for row in table.rows[:6]:
        for dataset, scores in row.printed.items():
            drawn = {name: list(rng.normal(mean, max(std or 0, 0.005), 10)) for name, (mean, std) in scores.items()}
            write_report(papers, f"btg/1/paper/{dataset}.{row.cell}", {"paper": drawn})
    filled = fill(papers, table)
    found = Counter(cell.distance.verdict for cell in filled.cells if cell.distance is not None)
    assert found.total() == 72
    assert found["off"] == found["far off"] == 0
    assert found["within .02"] > 20


def test_a_report_of_another_config_is_refused(tmp_path: Path) -> None:
    papers = copy_tables(tmp_path, "btg-1")
    report = write_report(papers, "btg/1/paper/adult.f1", {"paper": MAMMOGRAPHY})
    table = load_table(papers, "btg-1")
    assert fill(papers, table).states("paper")["F1*", "adult"] == "complete"
    content = json.loads(report.read_text())["config"]
    beside = papers / "btg/1/paper/adult.f1.json"
    beside.write_text(json.dumps(content))
    assert fill(papers, table).states("paper")["F1*", "adult"] == "complete"
    beside.write_text(json.dumps(content | {"seed": 1}))
    with pytest.raises(ValueError, match="made with a config other"):
        fill(papers, table)
    report.write_text("{")
    with pytest.raises(ValueError, match="is not a report"):
        read_report(report)
    assert read_report(tmp_path / "none") is None


@pytest.mark.parametrize("width", [100, 250])
def test_terminal_shows_all_three_numbers(tmp_path: Path, width: int) -> None:
    papers = copy_tables(tmp_path, "btg-1")
    write_report(papers, "btg/1/paper/mammography.f1", {"paper": MAMMOGRAPHY})
    write_report(papers, "btg/1/honest/mammography.f1", {"argmax": MAMMOGRAPHY | {"f1": [0.2, 0.21, 0.22]}})
    (papers / "btg/1/paper/adult.f1.json").write_text("{}")
    written = io.StringIO()
    show(fill(papers, load_table(papers, "btg-1")), Console(file=written, width=width))
    text = written.getvalue()
    assert "0.63 ± 0.04  0.627 ± 0.031 (n = 3) ?  0.210 ± 0.010 (n = 3)" in text
    assert "run it with: evalign reproduce btg-1" in text  # for one cell that has a config
    assert "random forest" in text


def test_facts_are_counted() -> None:
    """Weights by scikit-learn's rule for balanced classes, on a set that needs no file."""
    from sklearn.utils.class_weight import compute_class_weight

    blobs = load("synthetic_5")
    facts = facts_of(blobs)
    weights = compute_class_weight("balanced", classes=np.array([0, 1]), y=blobs.y)
    assert [facts["negative_weight"], facts["positive_weight"]] == pytest.approx(weights)
    assert (facts["total"], facts["positive"], facts["train_total"]) == (5250, 250, 6400)
    table = load_table(PAPERS, "btg-s10")
    found = count_facts(table, loader=lambda *_, **__: blobs)
    assert [fact.counted for fact in found][:3] == [5250, 250, 4.76]
    assert [fact.printed for fact in found][:3] == [4800, 1454, 30.29]
    assert count_facts(table, Path("/nowhere"))[0].counted is None
    written = io.StringIO()
    show(fill(PAPERS, table), Console(file=written, width=120), found)
    assert "30.29" in written.getvalue()
