"""The page: self-contained, escaped, and looked at in a real browser where there is one."""

import html
import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.datasets import load_breast_cancer, load_iris
from sklearn.metrics import precision_recall_curve, precision_score, recall_score
from sklearn.naive_bayes import GaussianNB

from browser import PROBE, browse, needs_browser
from evalign.comparison import contenders as c
from evalign.comparison.goals import Aim, Judge
from evalign.comparison.run import Comparison, Table, compare, evaluate, split
from evalign.comparison.significance import paired_p
from evalign.report import plots
from evalign.report.page import build_result, render, verdict, versions

SMALL: dict[str, Any] = {"hidden": (16,), "epochs": 6, "device": "cpu"}
ROOT = Path(__file__).parents[2]
HOSTILE = "<script>alert(1)</script> & $x_1$"


def complete(result: dict[str, Any]) -> dict[str, Any]:
    """What a command adds to a comparison's result."""
    return result | {
        "command": "fit",
        "command_line": f"evalign fit 'a b.csv' --target {HOSTILE}",
        "created": "2026-01-01 00:00 UTC",
        "versions": versions(),
        "settings": {"seed": 0, "metric": "f1", "hidden": [16]},
        "data": {"file": "/somewhere/a b.csv", "rows": 1, "features": 2, "target": HOSTILE},
        "split": {"test_rows": 3},
        "protocol": "Test rows were read once.",
        "notes": ["a note"],
    }


@pytest.fixture(scope="module")
def binary() -> tuple[Comparison, dict[str, Any]]:
    """One split, two classes, constraints: what `fit` makes."""
    X, y = load_breast_cancer(return_X_y=True)
    table = Table(X[:, :5], np.array(["benign", HOSTILE], dtype=object)[y])
    limits = ("precision >= 0.2", "recall >= 1", "specificity >= 1")
    judge = Judge(Aim("f1", positive=HOSTILE, subject_to=limits), table.y)
    parts = split(table, 0.3, seed=0)
    comparison = Comparison(judge)
    listed = [c.ours(judge, **SMALL), c.cross_entropy(judge, **SMALL), c.MAJORITY]
    with pytest.warns(UserWarning, match="no decision meets"):
        comparison.add([evaluate(contender, *parts, judge, seed=0) for contender in listed])
    return comparison, complete(build_result(comparison, ("ours", "plug_in"), repeats=200))


@pytest.fixture(scope="module")
def multiclass() -> dict[str, Any]:
    """Two splits, three classes: what `compare` makes."""
    X, y = load_iris(return_X_y=True)
    comparison = compare(
        X, y, lambda judge: [c.ours(judge, **SMALL), c.cross_entropy(judge, **SMALL), c.MAJORITY], Aim("f1"),
        splits=2,
    )  # fmt: skip
    return complete(build_result(comparison, ("ours", "plug_in"), repeats=200))


def test_result_is_plain_json(binary: tuple[Comparison, dict[str, Any]], multiclass: dict[str, Any]) -> None:
    for result in (binary[1], multiclass):
        again = json.loads(json.dumps(result, allow_nan=False))
        assert render(again) == render(result)


def test_curve_and_points_are_scikit_learns(binary: tuple[Comparison, dict[str, Any]]) -> None:
    comparison, result = binary
    [curve] = [curve for curve in result["curves"] if curve["contender"] == "ours"]
    [trial] = [trial for trial in comparison.trials if trial.contender.name == "ours"]
    precision, recall, _ = precision_recall_curve(trial.truth, trial.probabilities[:, 1])
    points = {(round(r, 5), round(p, 5)) for r, p in zip(recall, precision, strict=True)}
    assert set(zip(curve["recall"], curve["precision"], strict=True)) <= points
    assert len(curve["recall"]) <= 200
    for name, (at_recall, at_precision) in curve["points"].items():
        assert at_recall == pytest.approx(recall_score(trial.truth, trial.predictions[name]), abs=1e-12)
        assert at_precision == pytest.approx(precision_score(trial.truth, trial.predictions[name]), abs=1e-12)


def test_every_part_is_on_the_page(binary: tuple[Comparison, dict[str, Any]], multiclass: dict[str, Any]) -> None:
    for result, own in ((binary[1], "Precision against recall"), (multiclass, "The trade-off, class by class")):
        page = render(result)
        for heading in ("Comparison", own, "Training", "Confusion matrices", "Class by class", "Reproduce"):
            assert heading in page
        for row in result["table"]:
            assert re.search(rf"<td>{re.escape(html.escape(row['title']))}</td>\s*<td>{row['score']:.3f}<small>", page)
        assert page.count("<svg") == (4 if result is binary[1] else 3)  # calibration is drawn for two classes
        assert html.escape(result["command_line"], quote=False).split(" --target")[0] in html.unescape(page)
    assert "0.2" in render(binary[1])
    assert " missed</td>" in render(binary[1])


def test_page_needs_nothing_from_outside(binary: tuple[Comparison, dict[str, Any]], multiclass: dict[str, Any]) -> None:
    for page in (render(binary[1]), render(multiclass)):
        ours = page.count('<script type="application/json"') + page.count("<script>// Moves")
        assert page.count("<script") == ours  # none from a label
        assert "default-src 'none'" in page
        links = re.findall(r"""(?:src|href|xlink:href)\s*=\s*["']([^"']*)""", page)
        assert [link for link in links if not link.startswith(("#", "data:"))] == []
        assert not re.search(r"url\((?!#)", page)
        assert "@import" not in page
        assert not re.search(r"#0[1-3]0[2-4]0\d", page)  # every stand-in colour was replaced


SHIFT = {
    "kind": "shares", "classes": ["benign", HOSTILE], "before": [0.37, 0.63], "shares": [0.8, 0.2], "low": [0.7, 0.1],
    "high": [0.9, 0.3], "p_shares": 0.0025, "p_fit": 0.4, "rows": 70, "reason": "Class shares changed.",
    "file": "new.csv", "decided": {"benign": [30, 55], HOSTILE: [40, 15]},
}  # fmt: skip


def test_shift_is_shown_as_it_was_found(binary: tuple[Comparison, dict[str, Any]]) -> None:
    assert "Class shares of" not in render(binary[1])
    page = render(binary[1] | {"shift": SHIFT})
    for text in ("Class shares of new.csv", "Decisions were adapted", "Class shares changed.", "p = 0.0025", "30 → 55"):
        assert text in page
    assert "<td>37.0 %</td><td>80.0 %<small>70.0 % to 90.0 %</small></td>" in page
    assert HOSTILE not in page
    refused = {**SHIFT, "kind": "other", "reason": "Something else changed."}
    page = render(binary[1] | {"shift": refused})
    assert "Decisions stay the same" in page
    assert "which was refuted" in page
    assert "30 → 55" not in page
    unchanged = {name: value for name, value in SHIFT.items() if name not in ("low", "high")} | {"kind": "none"}
    assert "Decisions stay the same" in render(binary[1] | {"shift": unchanged})


def test_ids_of_drawings_do_not_meet(binary: tuple[Comparison, dict[str, Any]]) -> None:
    page = render(binary[1] | {"shift": SHIFT})
    clips = re.findall(r'<clipPath id="([^"]+)"', page)
    assert clips
    assert len(clips) == len(set(clips))


def test_labels_are_shown_as_they_are(binary: tuple[Comparison, dict[str, Any]]) -> None:
    page = render(binary[1])
    assert html.escape(HOSTILE) in page
    assert HOSTILE not in page


def test_verdict_does_not_flatter() -> None:
    def row(contender: str, score: float, low: float, high: float, missed: tuple[str, ...] = ()) -> dict[str, Any]:
        return {
            "contender": contender, "decision": "plug_in" if contender == "ours" else "argmax", "title": contender,
            "score": score, "difference": 0.8 - score, "difference_interval": [low, high], "limits": {},
            "missed": list(missed),
        }  # fmt: skip

    result: dict[str, Any] = {"metric": {"title": "F1"}, "reference": ["ours", "plug_in"]}
    ours = row("ours", 0.8, 0, 0)
    assert "+0.100 (95 % interval +0.050 to +0.150), better" in verdict(
        result | {"table": [ours, row("cross_entropy", 0.7, 0.05, 0.15)]}
    )
    assert "no clear difference" in verdict(result | {"table": [ours, row("cross_entropy", 0.7, -0.05, 0.15)]})
    assert "−0.100 (95 % interval −0.150 to −0.050), worse" in verdict(
        result | {"table": [row("cross_entropy", 0.9, -0.15, -0.05), ours]}
    )
    assert "no rival was trained" in verdict(result | {"table": [ours, row("majority", 0.1, 0.5, 0.9)]})
    # Over splits the p value of the table decides, which knows of their overlap.
    for p, words in ((None, "), too few"), (0.06, ", p = 0.06), no clear difference"), (0.01, ", p = 0.01), better")):
        over = row("cross_entropy", 0.7, 0, 0) | {"difference_error": 0.01, "p": p}
        del over["difference_interval"]
        assert f"+0.100 (standard error 0.010{words}" in verdict(result | {"table": [ours, over]})
    # The strongest rival is one that keeps to the constraints.
    both = [row("cross_entropy", 0.9, -0.2, -0.1, ("precision >= 0.9",)), row("forest", 0.7, 0.05, 0.15), ours]
    assert "strongest rival (forest)" in verdict(result | {"table": both})
    assert verdict(result | {"table": both}).endswith("Cross-entropy + argmax, the usual choice, misses them.")
    # More recall without the precision that was asked for is not better.
    for own, end in (((), "; no rival meets them."), (("precision >= 0.9",), "; so does every rival.")):
        limited = row("ours", 0.8, 0, 0, own) | {"limits": {"precision >= 0.9": 0.95}}
        assert verdict(result | {"table": [limited, both[0]]}).endswith(end)


def test_many_classes_are_kept_readable() -> None:
    rng = np.random.default_rng(0)
    y = np.repeat([f"class {k:02d}" for k in range(40)], 10)
    X = rng.normal(size=(400, 3))
    comparison = compare(X, y, [c.MAJORITY], Aim("f1"), splits=1)
    result = complete(build_result(comparison, ("majority", "argmax"), repeats=20))
    assert max(sum(line) for line in result["table"][0]["confusion"]) == 2
    page = render(result | {"reference": ["majority", "argmax"]})
    assert "predicted as" in page  # a list of confusions instead of 1600 cells
    assert page.count("<svg") == 2


def test_what_scrolls_is_reached_by_keyboard(binary: tuple[Comparison, dict[str, Any]]) -> None:
    page = render(binary[1] | {"shift": SHIFT})
    labels = re.findall(r'class="scroll" tabindex="0" role="region" aria-label="([^"]+)"', page)
    assert page.count('class="scroll"') == len(labels) == len(set(labels)) >= 4


def test_names_stay_apart_where_they_are_shortened() -> None:
    names = [f"a very long name, as some people give them, of {k}" for k in ("dogs", "cats", "emus")]
    found = [{"column": name, "mean": 0.1, "error": 0.01} for name in names]
    y = np.repeat(names, 10)
    comparison = compare(np.ones((30, 1)), y, [c.MAJORITY], Aim("f1"), splits=1)
    result = complete(build_result(comparison, ("majority", "argmax"), repeats=20)) | {"importance": found}
    for svg in (plots.importance(result), plots.class_scores(result)):
        assert all(re.search(f"…[^<]*{name[-4:]}[ <]", svg) for name in names)
    assert plots.importance(result).count('style="fill: var(--c1)') == 3  # a bar for each


def test_the_chosen_point_has_its_interval(binary: tuple[Comparison, dict[str, Any]]) -> None:
    result = binary[1]
    assert "The cross is our 95 % interval." in render(result)
    crosses = [plots.precision_recall(result | {"splits": splits}).count("LineCollection") for splits in (1, 2)]
    assert crosses == [2, 0]


def test_p_values_know_the_share_of_test_rows() -> None:
    listed = [c.Contender("bayes", "bayes", lambda seed: GaussianNB(), ("argmax",))]
    comparison = compare(
        *load_iris(return_X_y=True), lambda judge: [*listed, c.MAJORITY], Aim("f1"), splits=5, test_size=0.5
    )
    [row] = [r for r in build_result(comparison, ("bayes", "argmax"))["table"] if r["contender"] == "majority"]
    ours = [r.score for r in comparison.rows if r.contender == "bayes"]
    assert row["p"] == paired_p(np.subtract(ours, row["scores"]), test_to_train=1.0)


# -- in a browser -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@needs_browser
def test_browser_shows_the_table_and_no_error(binary: tuple[Comparison, dict[str, Any]], tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    page.write_text(render(binary[1] | {"shift": SHIFT}))
    document, console = browse(page, tmp_path / "profile")
    assert console == ""
    [table] = re.findall(r'<table id="scores">.*?</table>', document, re.DOTALL)
    assert table.count("<tr") == 1 + len(binary[1]["table"])
    assert "ours (anchored) + plug-in" in table
    assert document.count("<svg") == 5


@needs_browser
@pytest.mark.parametrize(("width", "scheme"), [(390, "light"), (1200, "dark")])
def test_page_fits_a_phone_and_is_readable_in_the_dark(
    multiclass: dict[str, Any], tmp_path: Path, width: int, scheme: str
) -> None:
    around = tmp_path / "around.html"
    around.write_text(
        PROBE.replace("WIDTH", str(width)).replace("PAGE", html.escape(render(multiclass | {"shift": SHIFT})))
    )
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


AXE = Path(os.environ.get("EVALIGN_AXE", ROOT / ".cache/axe/node_modules/axe-core/axe.min.js"))


@pytest.mark.slow
@needs_browser
@pytest.mark.skipif(not AXE.is_file(), reason="axe-core is not installed: npm install --prefix .cache/axe axe-core")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_page_has_no_accessibility_violations(
    binary: tuple[Comparison, dict[str, Any]], multiclass: dict[str, Any], tmp_path: Path, scheme: str
) -> None:
    listed = "r.violations.map(v => [v.id, v.nodes.map(n => n.html)])"
    check = f"axe.run().then(r => {{ document.body.dataset.axe = JSON.stringify({listed}); }});"
    for name, result in (("binary", binary[1] | {"shift": SHIFT}), ("multiclass", multiclass)):
        page = tmp_path / f"{name}.html"
        page.write_text(render(result).replace("</body>", f"<script>{AXE.read_text()}\n{check}</script></body>"))
        flags = (f"--blink-settings=preferredColorScheme={int(scheme == 'light')}", "--virtual-time-budget=20000")
        document, _ = browse(page, tmp_path / "profile", *flags)
        found = re.search(r'data-axe="([^"]*)"', document)
        assert found is not None
        assert json.loads(html.unescape(found[1])) == []


# Turns the knobs as a reader would, and writes down what the page says.
KNOBS = """<script>(function () {
  const say = () => document.getElementById("operating-shown").textContent, heard = [say()];
  const cut = document.getElementById("cut");
  cut.value = cut.max; cut.dispatchEvent(new Event("input")); heard.push(say());
  document.getElementById("miss").value = 0; document.getElementById("to-cheapest").click(); heard.push(say());
  document.body.dataset.heard = JSON.stringify(heard);
})();</script></body>"""


@needs_browser
def test_threshold_slider_counts_as_scikit_learn_does(
    binary: tuple[Comparison, dict[str, Any]], tmp_path: Path
) -> None:
    comparison, result = binary
    page = tmp_path / "report.html"
    page.write_text(render(result).replace("</body>", KNOBS))
    document, console = browse(page, tmp_path / "profile")
    assert console == ""
    found = re.search(r'data-heard="([^"]*)"', document)
    assert found is not None
    chosen, lowest, free = json.loads(html.unescape(found[1]))
    [trial] = [trial for trial in comparison.trials if trial.contender.name == "ours"]
    held_out = trial.estimator.held_out_predictions_
    y, w = held_out.labels, held_out.weight
    predicted = trial.rules["plug_in"].predict(held_out.probabilities)
    assert f"recall {100 * recall_score(y, predicted, sample_weight=w):.1f} %" in chosen
    assert f"precision {100 * precision_score(y, predicted, sample_weight=w):.1f} %" in chosen
    assert "recall 100.0 %" in lowest
    assert "flags 100.0 %" in lowest
    assert free.endswith("cost 0.")  # misses cost nothing: no false alarm is worth it, or none is made


def test_plots_without_meaning_are_left_out(binary: tuple[Comparison, dict[str, Any]]) -> None:
    result = binary[1]
    missed = [bool(row["missed"]) for row in result["table"]]
    assert missed == sorted(missed)  # what meets the constraints comes first
    rejecting = result | {"settings": result["settings"] | {"costs": {"fn": 5, "fp": 1, "reject": 1}}}
    assert "Precision against recall" not in render(rejecting)  # left-out rows stand on no curve
    assert "the cost of rejection is left out" in render(rejecting)
    assert "the cost of rejection" not in render(result)
    assert "temperature" in plots.training(result)
    constant = {name: [row | {"temperature": 0.2} for row in rows] for name, rows in result["history"].items()}
    assert "temperature" not in plots.training(result | {"history": constant})  # boosted trees keep one
    long = [row | {"title": f"ours (boosted trees, anchored) + {i}"} for i, row in enumerate(result["table"])]
    assert "…" not in plots.scores(result | {"table": long})


def test_options_of_other_models_are_not_listed(binary: tuple[Comparison, dict[str, Any]]) -> None:
    options = {"seed": 0, "hidden": [16], "network": "mlp", "preset": "quick", "epochs": 7}
    for model, listed in {
        "boost": {"epochs"}, "network": {"epochs", "hidden", "network"}, "blend": {*options} - {"seed"},
    }.items():  # fmt: skip
        page = render(binary[1] | {"settings": options | {"model": model}})
        assert {name for name in options if f"<dt>{name}</dt>" in page} == listed | {"seed"}
