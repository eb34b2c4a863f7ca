"""The page of all tables: from reports alone, self-contained, and looked at in a real browser where there is one."""

import html
import json
import re
from pathlib import Path

import numpy as np
import pytest
from made_up_reports import copy_tables, write_report

from browser import PROBE, browse, needs_browser
from evalign import steps
from evalign_papers.analysis.facts import Fact
from evalign_papers.analysis.filled import FilledTable, fill
from evalign_papers.engine.printed import all_tables, load_table
from evalign_papers.render.figures import imbalance, trade_off
from evalign_papers.render.html_page import render_page, summary, write_page
from evalign_papers.render.step_figures import (
    STEP_FIGURES,
    TEMPERATURES,
    hard_score,
    made_up_predictions,
    slope,
    soft_scores,
)

SIGNS = {"within .02": "●", "within .05": "◐", "undecided": "?", "off": "○", "far off": "✗"}
METRICS = ("f1", "f2", "f3", "precision", "recall", "accuracy", "auroc")


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> list[FilledTable]:
    """All tables; a few cells have made-up reports."""
    papers = copy_tables(tmp_path_factory.mktemp("papers"))
    rng = np.random.default_rng(0)

    def draw(centre: float) -> dict[str, list[float]]:
        return {name: (centre + 0.02 * rng.standard_normal(10)).tolist() for name in METRICS}

    for cell, centre in (("1/{}/mammography.f1", 0.6), ("4/{}/mammography.f2", 0.65), ("4/{}/mammography.f3", 0.7)):
        write_report(papers, f"btg/{cell.format('paper')}", {"paper": draw(centre)})
        write_report(papers, f"btg/{cell.format('honest')}", {"argmax": draw(centre - 0.1)})
    for ratio in (10, 100, 1000):
        for method in ("f1", "ce"):
            scores = {"argmax": draw(0.8 - ratio / 2000)}
            write_report(papers, f"checks/imbalance/honest/creditcard-{ratio}.{method}", scores)
    return [fill(papers, table) for table in all_tables(papers)]


@pytest.fixture(scope="module")
def page(filled: list[FilledTable]) -> str:
    return render_page(filled, {"btg-s8": [Fact("adult", "<Positive>", 2.07, None)]}, created="2026-01-01")


def test_every_table_with_its_three_numbers(filled: list[FilledTable], page: str) -> None:
    for one in filled:
        assert f'<section id="{one.table.name}">' in page
        assert f"<code>{one.table.command}</code>" in page
        for row in one.table.rows:
            if one.table.kind == "runs":
                assert f"<td>{html.escape(row.label)}</td>" in page
    [section] = re.findall(r'<section id="btg-1">.*?</section>', page, re.DOTALL)
    [block] = re.findall(r"<h3>mammography</h3>.*?</table>", section, re.DOTALL)
    [line] = re.findall(r"<tr><td>F1\*</td>.*?</tr>", block, re.DOTALL)
    cells = [re.sub(r"<[^>]*>|\s+", " ", cell).strip() for cell in re.findall(r"<td.*?</td>", line, re.DOTALL)][1:]
    cell = filled[0].cell(filled[0].table.rows[0], "mammography", "f1")
    paper, honest = cell.measured["paper"].values, cell.measured["honest"].values
    assert cells[0] == "0.63 ± 0.04"
    assert cells[1].startswith(f"{np.mean(paper):.3f} ± {np.std(paper, ddof=1):.3f}")
    assert cells[2].startswith(f"{np.mean(honest):.3f} ± {np.std(honest, ddof=1):.3f}")
    assert cell.distance is not None
    assert cells[1].endswith(f" {SIGNS[cell.distance.verdict]}")
    assert f"{cell.distance.difference:+.3f}; distance" in line
    assert cells[2].endswith(f"± {np.std(honest, ddof=1):.3f}")  # other rows than the printed number: no class
    assert "no config (paper): 23 of 24" in section


def test_facts_are_escaped(page: str) -> None:
    assert "<td>&lt;Positive&gt;</td><td>2.07</td><td>–</td>" in page


def test_summary_counts(filled: list[FilledTable]) -> None:
    cells = [cell for one in filled for cell in one.cells if cell.printed and cell.measured["paper"].scores]
    # Two tables may print the same number of the same run; it counts once.
    numbers = {(cell.row.folder, cell.row.cell, cell.dataset, cell.metric, cell.printed): cell for cell in cells}
    assert len(numbers) < len(cells)
    assert f"Of {len(numbers)} printed numbers" in summary(filled)
    counts = [int(count) for count in re.findall(r"(\d+) (?:within|undecided|off|far off)", summary(filled))]
    verdicts = [cell.distance.verdict for cell in numbers.values() if cell.distance is not None]
    assert counts == [verdicts.count(name) for name in ("within .02", "within .05", "undecided", "off", "far off")]
    assert sum(counts) == len(numbers)
    empty = [FilledTable(one.table, ()) for one in filled]
    assert "No printed number has been measured" in summary(empty)


def test_our_checks_do_not_count_a_printed_number_again(tmp_path: Path) -> None:
    papers = copy_tables(tmp_path, "checks-text")
    write_report(papers, "checks/text/paper/mammography.f1-text", {"paper": {"f1": [0.6, 0.6]}})
    [filled] = [fill(papers, table) for table in all_tables(papers)]
    assert [cell.metric for cell in filled.cells if cell.distance is not None] == ["f1"]
    assert "No printed number has been measured" in summary([filled])


def test_page_needs_nothing_from_outside(page: str) -> None:
    assert "<script" not in page
    links = re.findall(r"""(?:src|href|xlink:href)\s*=\s*["']([^"']*)""", page)
    assert [link for link in links if not link.startswith(("#", "data:"))] == []
    assert not re.search(r"url\((?!#)", page)
    assert not re.search(r"#0[1-3]0[2-4]0\d", page)  # every stand-in colour was replaced
    clips = re.findall(r'<clipPath id="([^"]+)"', page)
    assert len(clips) == len(set(clips)) > 0


def test_figures_are_drawn_from_what_there_is(filled: list[FilledTable], page: str) -> None:
    assert page.count("<svg") == len(STEP_FIGURES) + 2
    named = {one.table.name: one for one in filled}
    drawn = trade_off([named["btg-4"], named["btg-s6"]])
    assert drawn is not None
    for text in ("printed", "honest", "creditcard"):
        assert text in drawn.svg
    found = imbalance(named["checks-imbalance"])
    assert found is not None
    assert "cross-entropy" in found.svg
    assert "anchored" not in found.svg  # it has no report
    assert imbalance(FilledTable(named["checks-imbalance"].table, ())) is None
    assert trade_off([]) is None


def test_slopes_are_difference_quotients() -> None:
    import torch

    p = torch.linspace(0.03, 0.97, 40, dtype=torch.float64)
    for step in (steps.linear, steps.sigmoid):
        quotient = (step(p + 1e-6, 0.3) - step(p - 1e-6, 0.3)) / 2e-6
        torch.testing.assert_close(slope(step, p, 0.3), quotient, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("metric", ["f1", "accuracy", "mcc"])
def test_soft_metric_tends_to_scikit_learns(metric: str) -> None:
    from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef

    p, y = made_up_predictions()
    predicted = p.argmax(1)
    expected = {
        "f1": f1_score(y, predicted, average="macro"),
        "accuracy": accuracy_score(y, predicted),
        "mcc": matthews_corrcoef(y, predicted),
    }[metric]
    assert hard_score(p, y, metric) == pytest.approx(expected)
    soft = soft_scores(p, y, metric)
    assert len(soft) == len(TEMPERATURES)
    assert abs(soft[-1] - expected) < 0.01 < abs(soft[0] - expected)


def test_page_is_written(tmp_path: Path) -> None:
    papers = copy_tables(tmp_path / "papers", "btg-4", "btg-s8")
    out = write_page(papers, tmp_path / "page.html", data_dir=tmp_path)
    assert "0 of 6 runs are complete" in out.read_text()
    assert load_table(papers, "btg-4").title in out.read_text()


@needs_browser
@pytest.mark.parametrize(("width", "scheme"), [(390, "light"), (1200, "dark")])
def test_page_fits_a_phone_and_is_readable_in_the_dark(page: str, tmp_path: Path, width: int, scheme: str) -> None:
    around = tmp_path / "around.html"
    around.write_text(PROBE.replace("WIDTH", str(width)).replace("PAGE", html.escape(page)))
    scheme_flag = f"--blink-settings=preferredColorScheme={0 if scheme == 'dark' else 1}"
    document, console = browse(around, tmp_path / "profile", scheme_flag)
    assert console == ""
    match = re.search(r'data-probe="([^"]*)"', document)
    assert match is not None
    seen = json.loads(html.unescape(match[1]))
    assert seen["window"] == width
    assert seen["width"] <= width  # wide tables scroll inside of their own box
    assert (seen["paper"] < 0.1) == (scheme == "dark")
    assert min(seen["text"], seen["drawn"]) >= 4.5  # WCAG's AA
