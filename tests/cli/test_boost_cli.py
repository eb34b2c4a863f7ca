"""`evalign fit --model`, `predict` and `compare` with boosted trees."""

import json

import numpy as np
import pandas as pd
import pytest
from scipy.stats import ttest_1samp
from sklearn.datasets import make_classification
from sklearn.metrics import f1_score
from typer.testing import CliRunner

from evalign import EASTBlend, EASTBooster, EASTClassifier
from evalign.cli.app import app, main
from evalign.comparison.contenders import StockBooster
from evalign.comparison.significance import paired_p
from evalign.estimators.blend import load_model

TREES = ["--epochs", "8", "--quiet", "--json"]
FAST = [*TREES, "--hidden", "16"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    X, y = make_classification(500, 6, n_informative=4, weights=[0.8], random_state=0)
    frame = pd.DataFrame(X, columns=[f"c{j}" for j in range(6)]).assign(
        town=np.where(X[:, 0] > 0, "A", "B"), label=np.where(y == 1, "yes", "no")
    )
    path = tmp_path_factory.mktemp("data") / "table.csv"
    frame.to_csv(path, index=False)
    return path


def call(*words):
    said = CliRunner().invoke(app, [str(word) for word in words])
    assert said.exit_code == 0, said.output
    return json.loads(said.stdout)


def test_fit_with_boosted_trees_saves_what_it_tested(data, tmp_path):
    out = tmp_path / "run"
    result = call("fit", data, "-t", "label", "-o", out, "--model", "boost", *TREES)
    assert result["reference"] == ["ours", "auto"]
    assert result["model"]["kind"] == "boost"
    assert {(row["contender"], row["decision"]) for row in result["table"]} == {
        ("ours", "auto"), ("cross_entropy", "argmax"), ("cross_entropy", "plug_in"), ("cross_entropy", "auto"),
        ("majority", "argmax"),
    }  # fmt: skip
    model = load_model(out / "model.safetensors")
    assert isinstance(model, EASTBooster)
    predicted = tmp_path / "p.csv"
    call("predict", out, data, "-o", predicted, "--target", "label", "--json")
    labels = pd.read_csv(data)["label"]
    score = f1_score(labels, pd.read_csv(predicted)["prediction"], pos_label="yes")
    assert score == pytest.approx(model.score(pd.read_csv(data).drop(columns="label"), labels))


@pytest.mark.slow
def test_fit_with_a_blend_saves_what_it_tested(data, tmp_path):
    out = tmp_path / "run"
    result = call("fit", data, "-t", "label", "-o", out, "--model", "blend", *FAST)
    assert (result["reference"], result["model"]["kind"]) == (["ours", "auto"], "blend")
    model = load_model(out / "model.safetensors")
    assert isinstance(model, EASTBlend)
    call("predict", out, data, "-o", tmp_path / "p.csv", "--target", "label", "--device", "cpu", "--json")
    frame = pd.read_csv(data)
    assert pd.read_csv(tmp_path / "p.csv")["prediction"].tolist() == model.predict(frame.drop(columns="label")).tolist()


@pytest.mark.slow
def test_compare_shows_both_of_ours_beside_the_libraries(data, tmp_path):
    result = call("compare", data, "-t", "label", "-o", tmp_path / "run", "--splits", "2", "--model", "network", *FAST)
    pairs = {(row["contender"], row["decision"]) for row in result["table"]}
    names = (
        "ours",
        "ours_boosted",
        "ours_blended",
        "cross_entropy",
        "lightgbm",
        "xgboost",
        "random_forest",
        "gradient_boosting",
    )
    assert {(name, rule) for name in names for rule in ("argmax", "tuned", "plug_in", "auto")} <= pairs
    assert result["reference"] == ["ours", "auto"]
    for row in result["table"]:
        own = [row["contender"], row["decision"]] == result["reference"]
        assert row["p"] is None  # two splits cannot show a difference
        assert own or row["difference_error"] >= 0
    assert ">p</abbr>" not in (tmp_path / "run" / "report.html").read_text()


def test_stock_boosters_are_the_libraries_own_models(data):
    frame = pd.read_csv(data)
    X, y = frame.drop(columns=["label", "town"]), (frame["label"] == "yes").astype(int).to_numpy()
    import lightgbm

    model = StockBooster(library="lightgbm", random_state=0).fit(X, y)
    assert model.estimator_.n_jobs == 1  # of a small table
    network = EASTClassifier(hidden=(4,), epochs=1, folds=1, random_state=0).fit(X, y)
    valid = network.held_out_predictions_.rows  # the same rows are held out
    train = np.setdiff1d(np.arange(len(y)), valid)
    assert sorted(model.held_out_predictions_.labels) == sorted(y[valid])
    own = lightgbm.LGBMClassifier(
        n_estimators=model.estimator_.best_iteration_, random_state=0, n_jobs=1, verbose=-1
    ).fit(X.iloc[train].to_numpy(), y[train])  # fmt: skip
    np.testing.assert_allclose(model.predict_proba(X), own.predict_proba(X.to_numpy()), atol=1e-9)
    boosted = StockBooster(library="xgboost", random_state=0, n_jobs=1).fit(X, y)
    assert f1_score(y, boosted.predict(X)) > 0.8
    with pytest.raises(ValueError, match="did you mean 'xgboost'"):
        StockBooster(library="xgb").fit(X, y)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model", "trees"], "model must be one of blend, network, boost"),
        (["--decision", "plugin"], "did you mean 'plug_in'"),
    ],
)
def test_wrong_options_end_in_one_line(data, tmp_path, capsys, words, message):
    with pytest.raises(SystemExit) as ended:
        main(["fit", str(data), "-t", "label", "-o", str(tmp_path / "x"), *words])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_without_the_extra_the_error_says_what_to_install(monkeypatch):
    import builtins

    real = builtins.__import__

    def without(name, *rest, **more):
        if name == "lightgbm":
            raise ModuleNotFoundError("No module named 'lightgbm'", name="lightgbm")
        return real(name, *rest, **more)

    import sys

    monkeypatch.delitem(sys.modules, "evalign.boosting.lightgbm", raising=False)
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match=r"pip install 'evalign\[boost\]'"):
        EASTBooster().fit(np.arange(8.0).reshape(-1, 1), np.arange(8) % 2)


def test_paired_p_values_are_students_where_splits_share_nothing():
    gaps = np.random.default_rng(0).normal(0.5, 1.0, 12)
    assert paired_p(gaps, 0.0) == pytest.approx(ttest_1samp(gaps, 0.0).pvalue)
    assert paired_p(gaps, 0.25) > paired_p(gaps, 0.0)  # splits that overlap say less
    assert (paired_p([0.1], 0.2), paired_p([0.0, 0.0], 0.2), paired_p([0.1, 0.1], 0.2)) == (None, 1.0, 0.0)
