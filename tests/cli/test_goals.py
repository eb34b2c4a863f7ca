"""Costs and several targets on the command line, from fit to predict, against scikit-learn and plain loops."""

import json
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from sklearn.metrics import f1_score

from commands import assert_refused, call, command
from evalign.cli.options import parse_costs

TREES = ["--model", "boost", "--epochs", "10", "--device", "cpu"]
LABELS = ["red", "blue"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Payments with amounts, and rows with two labels; training and test files of both."""
    folder, rng = tmp_path_factory.mktemp("goals"), np.random.default_rng(0)
    x = rng.normal(size=(400, 3))
    table = pd.DataFrame(x, columns=["a", "b", "c"]).round(4)
    table["shop"] = rng.choice(["north", "south"], len(table))
    payments = table.assign(
        amount=np.exp(rng.normal(2.0, 1.0, len(table))).round(2),
        outcome=np.where(x[:, 0] + x[:, 1] + rng.normal(size=len(table)) > 1.8, "fraud", "ok"),
    )
    colours = table.assign(
        red=(x[:, 0] + rng.normal(size=len(table)) > 0.5).astype(int), blue=x[:, 2] + rng.normal(size=len(table)) > 1.0
    )
    for name, frame in (("payments", payments), ("colours", colours)):
        frame[:300].to_csv(folder / f"{name}.csv", index=False)
        frame[300:].to_csv(folder / f"{name}-test.csv", index=False)
    (folder / "costs.csv").write_text(",ok,fraud\nok,,1\nfraud,20,0\n")
    (folder / "costs.json").write_text(json.dumps({"fraud": {"ok": 20}, "ok": {"fraud": 1}}))
    (folder / "cells.json").write_text(json.dumps({"fn": 20, "fp": 1}))
    return folder


def fit(folder: Path, table: str, target: str, out: Path, *options: object) -> dict:
    words = [folder / f"{table}.csv", "--target", target, "--test", folder / f"{table}-test.csv", "--out", out]
    said = call("fit", *words, *TREES, *options)
    assert said.code == 0, said.err
    return json.loads((out / "result.json").read_text())


def predict(folder: Path, run: Path, table: str, *options: object) -> tuple[pd.DataFrame, pd.DataFrame, str]:
    """Predictions of the test file, the file itself, and what was said."""
    out = run.with_suffix(".csv")
    said = call("predict", run, folder / f"{table}-test.csv", "--out", out, "--force", *options)
    assert said.code == 0, said.err
    return pd.read_csv(out), pd.read_csv(folder / f"{table}-test.csv"), said.out if "--json" in options else said.err


def ours(result: dict) -> dict:
    return next(row for row in result["table"] if [row["contender"], row["decision"]] == result["reference"])


@pytest.mark.parametrize(
    ("costs", "miss", "alarm", "reject"),
    [
        ("fraud:ok=20,ok:fraud=1", 20.0, 1.0, None),
        ("fn=amount,fp=2", "amount", 2.0, None),
        ("fn=amount, fp=2, reject=0.5", "amount", 2.0, 0.5),
    ],
)
def test_the_mean_cost_is_that_of_the_predictions(folder: Path, tmp_path: Path, costs, miss, alarm, reject) -> None:
    result = fit(folder, "payments", "outcome", tmp_path / "run", "--positive", "fraud", "--costs", costs)
    found, truth, said = predict(folder, tmp_path / "run", "payments", "--target", "outcome")
    total = 0.0
    for decided, row in zip(found["prediction"], truth.to_dict("records"), strict=True):
        if not isinstance(decided, str):
            assert reject is not None
            total += reject
        elif decided != row["outcome"]:
            total += alarm if row["outcome"] == "ok" else row.get(miss, miss)
    mean = total / len(truth)
    assert ours(result)["score"] == pytest.approx(mean, abs=1e-9)
    assert f"mean cost on these rows: {mean:.4f}" in said
    low, high = ours(result)["interval"]
    assert low <= mean <= high
    assert result["metric"] == result["metric"] | {"title": "mean cost", "lower_is_better": True}
    assert [row["score"] for row in result["table"]] == sorted(row["score"] for row in result["table"])
    for row in result["table"]:
        assert row["difference"] == pytest.approx(mean - row["score"])
    assert (found["prediction"].isna().any()) == (reject is not None)
    report = (tmp_path / "run" / "report.html").read_text()
    assert "reached mean cost" in report
    assert ("rows undecided" in report) == (reject is not None)
    assert ('id="operating"' in report) == (miss != "amount")


def test_costs_come_inline_or_from_a_file(folder: Path, tmp_path: Path) -> None:
    ways = ["fraud:ok=20,ok:fraud=1", folder / "cells.json", folder / "costs.csv"]
    assert parse_costs(str(folder / "costs.json")) == parse_costs(ways[0])
    results = [
        fit(folder, "payments", "outcome", tmp_path / str(i), "--positive", "fraud", "--costs", way)
        for i, way in enumerate(ways)
    ]
    assert all(result["table"][0]["confusion"] == results[0]["table"][0]["confusion"] for result in results)
    page = (tmp_path / "0" / "report.html").read_text()
    assert [float(v) for v in re.findall(r'id="(?:miss|alarm)" [^>]*value="([^"]*)"', page)] == [20, 1]
    assert results[2]["settings"]["costs"] == {"ok:fraud": 1.0, "fraud:ok": 20.0, "fraud:fraud": 0.0}


@pytest.mark.slow
def test_compare_by_costs_and_by_several_labels(folder: Path, tmp_path: Path) -> None:
    quick = ["--preset", "quick", "--epochs", "5", "--splits", "2", "--quiet"]
    words = ["--target", "outcome", "--positive", "fraud", "--costs", "fn=amount,fp=2", "--out", tmp_path / "costs"]
    said = call("compare", folder / "payments.csv", *words, *quick)
    assert said.code == 0, said.err
    result = json.loads((tmp_path / "costs" / "result.json").read_text())
    assert {row["decision"] for row in result["table"]} == {"argmax", "auto"}
    by_key = {(row["contender"], row["decision"]): row["score"] for row in result["table"]}
    assert by_key["logistic_regression", "auto"] < by_key["logistic_regression", "argmax"]
    said = call("compare", folder / "colours.csv", "--target", "red,blue", "--out", tmp_path / "labels", *quick)
    assert said.code == 0, said.err
    result = json.loads((tmp_path / "labels" / "result.json").read_text())
    scores = {row["contender"]: row["score"] for row in result["table"]}
    assert scores["majority"] == 0.0 < min(scores["ours"], scores["random_forest"], scores["xgboost"])


@pytest.mark.parametrize("average", ["macro", "micro"])
def test_several_targets_are_scored_as_scikit_learn_does(folder: Path, tmp_path: Path, average: str) -> None:
    result = fit(folder, "colours", "red, blue", tmp_path / "run", "--average", average)
    found, truth, said = predict(folder, tmp_path / "run", "colours", "--target", "red,blue")
    names = [f"prediction_{label}" for label in LABELS]
    assert list(found) == [*names, *(f"probability_{label}" for label in LABELS)]
    y, decided = truth[LABELS].astype(int), found[names]
    score = f1_score(y, decided, average=average)
    assert ours(result)["score"] == pytest.approx(score)
    assert f"f1 on these rows: {score:.4f}" in said
    assert result["classes"] == LABELS
    assert result["class_rows"] == y.sum().tolist()
    per_label = next(one for one in result["per_class"] if [one["contender"], one["decision"]] == result["reference"])
    assert [s[0] for s in per_label["f1"]] == pytest.approx(f1_score(y, decided, average=None).tolist())
    low, high = ours(result)["interval"]
    assert low < score < high
    report = (tmp_path / "run" / "report.html").read_text()
    assert "target red, blue" in report
    assert "2 labels" in report
    assert "Confusion matrices" not in report
    adapted, _, said = predict(folder, tmp_path / "run", "colours", "--adapt", "--json")
    counts = json.loads(said)["shift"]["decided"]
    assert [counts[label] for label in LABELS] == np.stack([decided.sum(), adapted[names].sum()], axis=1).tolist()


def test_a_constraint_names_one_of_several_targets(folder: Path, tmp_path: Path) -> None:
    limit = "recall[blue] >= 0.8"
    result = fit(folder, "colours", "red,blue", tmp_path / "run", "--subject-to", limit)
    found, truth, _ = predict(folder, tmp_path / "run", "colours", "--jointly")
    assert ours(result)["limits"] == {limit: pytest.approx(found.prediction_blue[truth.blue].mean())}


@pytest.mark.parametrize(
    ("table", "options", "words"),
    [
        ("payments", ["--costs", "fn"], "fn=100,fp=1"),
        ("payments", ["--costs", "no.csv"], "does not exist"),
        ("payments", ["--costs", "fn=nocolumn"], "no column 'nocolumn'"),
        ("payments", ["--costs", "fn=shop"], "must hold numbers"),
        ("payments", ["--costs", "frod:ok=1"], "did you mean 'fraud'"),
        ("payments", ["--costs", "fn=1", "--metric", "f1"], "remove one of them"),
        ("payments", ["--costs", "fn=nan"], "nan"),
        ("payments", ["--costs", "fn=inf"], "cost 'fn'"),
        ("payments", ["--costs", "fn=1,fp=1,fn=3"], "'fn' twice"),
        ("payments", ["--costs", "fn=1", "--decision", "tuned"], "remove --decision"),
        ("payments", ["--costs", "fn=amount", "--subject-to", "recall>=0.5"], "costs that are equal for all rows"),
        ("payments", ["--costs", "fn=amount", "--drop", "amount"], "--drop names the costs 'amount'"),
        ("payments", ["--metric", "cost"], "needs --costs"),
        ("colours", ["--target", "red,red"], "twice"),
        ("colours", ["--target", "red,shop"], "'shop' holds"),
        ("colours", ["--target", "red,purple"], "no column 'purple'"),
        ("colours", ["--target", "red,blue", "--positive", "1"], "a single target"),
        ("colours", ["--target", "red,blue", "--costs", "fn=1"], "costs require a single target"),
    ],
)
def test_wrong_goals_are_refused(folder: Path, tmp_path: Path, table: str, options: list[str], words: str) -> None:
    target = [] if "--target" in options else ["--target", "outcome"]
    out = ["--out", tmp_path / "run", "--quiet", "--model", "network"]
    assert_refused(call("fit", folder / f"{table}.csv", *target, *out, *options), words)
    assert not (tmp_path / "run").exists()


def test_streams_take_neither(folder: Path, tmp_path: Path) -> None:
    data = tmp_path / "payments.parquet"
    pd.read_csv(folder / "payments.csv").to_parquet(data)
    said = call("fit", data, "--target", "outcome", "--stream", "--costs", "fn=1", "--out", tmp_path / "run", "--quiet")
    assert_refused(said, "not support --costs")


@pytest.mark.slow
def test_the_real_command_takes_several_targets(folder: Path, tmp_path: Path) -> None:
    words = [folder / "colours.csv", "--target", "red,blue", "--out", tmp_path / "run", "--preset", "quick"]
    assert command("fit", *words).code == 0
    said = command("predict", tmp_path / "run", folder / "colours-test.csv", "--no-proba")
    assert said.code == 0
    assert said.out.splitlines()[0] == "prediction_red,prediction_blue"
    assert_refused(
        command("predict", tmp_path / "run", folder / "colours-test.csv", "--target", "red"), "--target must"
    )
