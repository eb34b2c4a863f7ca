"""Fitting a blend: held-out rows stay unseen, time limits hold, unusual tables work, seeds and weights matter."""

import math
import threading
import time

import numpy as np
import pandas as pd
import pytest
from sklearn.datasets import load_breast_cancer, load_iris, make_classification, make_multilabel_classification
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import accuracy_score
from sklearn.metrics import log_loss as sklearn_log_loss

import evalign
from evalign import EASTBlend
from evalign.estimators.linear import EASTLinear
from evalign.estimators.planning import PRESETS, Shape, TimeBudget, estimated_seconds, member_options

NETWORK = {"epochs": 3, "hidden": (16,)}
SMALL = {"network": NETWORK, "forest": {"trees": 10}, "boost": {"rounds": 20}, "random_state": 0}


def test_held_out_predictions_never_saw_their_row():
    """Labels are coin flips and one column names the row: only a model that trained on a row can know its label."""
    rng = np.random.default_rng(0)
    X, y = rng.permutation(1200).astype(float)[:, None], rng.integers(0, 2, 1200)
    forest = {"trees": 10, "min_rows": 1, "columns": 1.0}
    model = EASTBlend("accuracy", **{**SMALL, "forest": forest}, weights="equal").fit(X, y)
    held_out = model.held_out_predictions_
    assert np.array_equal(np.sort(held_out.rows), np.arange(1200))
    assert np.array_equal(held_out.labels, y[held_out.rows])
    assert abs(accuracy_score(held_out.labels, held_out.probabilities.argmax(1)) - 0.5) < 0.06  # four standard errors
    assert accuracy_score(y, model.predict_proba(X).argmax(1)) > 0.8  # four of five folds trained on each row


@pytest.mark.parametrize("fold", [0, 2])
def test_held_out_predictions_are_those_of_the_folds_own_models(fold):
    X, y = load_breast_cancer(return_X_y=True)
    model = EASTBlend("f1", folds=3, **SMALL).fit(X, y)
    own = model.held_out_predictions_
    rows = own.fold == fold
    np.testing.assert_allclose(model._probabilities(X[own.rows[rows]], fold), own.probabilities[rows], atol=1e-5)


@pytest.mark.parametrize("preset", PRESETS)
def test_seeds_repeat_and_threads_do_not_matter(preset):
    X, y = make_classification(300, 6, n_informative=4, n_classes=3, random_state=0)
    options = {**SMALL, "preset": preset, "folds": 2}
    first, again, alone = (EASTBlend("f1", n_jobs=n, **options).fit(X, y) for n in (2, 2, 1))
    np.testing.assert_array_equal(first.predict_proba(X), again.predict_proba(X))
    np.testing.assert_allclose(first.predict_proba(X), alone.predict_proba(X), atol=1e-6)
    assert first.weights_ == again.weights_


def test_weights_are_copies():
    X, y = make_classification(200, 5, random_state=1)
    copies = np.random.default_rng(0).integers(0, 4, 200)
    weighted = EASTBlend("f1", folds=2, **SMALL).fit(X, y, sample_weight=copies)
    copied = EASTBlend("f1", folds=2, **SMALL).fit(np.repeat(X, copies, axis=0), np.repeat(y, copies))
    np.testing.assert_allclose(weighted.predict_proba(X), copied.predict_proba(X), atol=1e-6)
    assert weighted.decision_ == copied.decision_


@pytest.mark.slow
@pytest.mark.parametrize("limit", [1.0, 5.0, 30.0])
def test_time_limits_are_kept(limit):
    X, y = make_classification(3000, 12, n_informative=6, n_classes=4, random_state=0)
    EASTBlend(**SMALL).fit(X[:200], y[:200])  # imports and compiles
    started = time.process_time()
    model = EASTBlend("f1", time_limit=limit, n_jobs=2, random_state=0).fit(X, y)
    # Seconds of CPU: other processes may be running beside a test. `benchmarks/bench_fit.py` looks at the clock.
    assert time.process_time() - started < 2 * (1.1 * limit + 0.3)
    assert model.score(X, y) > 0.5


@pytest.mark.slow
def test_a_time_limit_samples_rows_of_a_large_table():
    X, y = make_classification(80_000, 20, n_informative=6, n_classes=4, random_state=0)
    model = EASTBlend("f1", time_limit=3.0, n_jobs=2, random_state=0)
    model.fit(X[:500], y[:500])  # imports
    started = time.process_time()
    held_out = model.fit(X, y).held_out_predictions_
    assert time.process_time() - started < 2 * (1.1 * 3.0 + 0.3)  # of two cores
    assert len(held_out.rows) < 0.2 * 80_000
    shares = np.bincount(held_out.labels) / len(held_out.labels)
    np.testing.assert_allclose(shares, np.bincount(y) / len(y), atol=0.02)
    assert model.score(X[:5000], y[:5000]) > 0.5


@pytest.mark.slow
def test_labels_share_a_time_limit():
    X, y = make_multilabel_classification(3000, 20, n_classes=6, random_state=0)
    model = EASTBlend("f1", time_limit=2.0, n_jobs=2, random_state=0)
    model.fit(X[:300], y[:300])  # imports
    started = time.process_time()
    assert model.fit(X, y).predict(X).shape == y.shape
    assert time.process_time() - started < 2 * (1.1 * 2.0 + 0.3)


def test_a_time_budget_counts_the_clock_and_who_waits_for_the_cores(monkeypatch):
    now = {"wall": 100.0, "cpu": 5.0, "load": 1.0}
    monkeypatch.setattr("time.monotonic", lambda: now["wall"])
    monkeypatch.setattr("time.process_time", lambda: now["cpu"])
    monkeypatch.setattr("os.getloadavg", lambda: (now["load"], 0.0, 0.0))
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    budget = TimeBudget(10.0)
    budget.reserved = 0.5
    assert budget.left == pytest.approx(10 * 0.92 - 0.5)
    now["load"] = 5.0  # two and a half processes a core: half a second of CPU takes 1.25
    assert budget.left == pytest.approx(10 * 0.92 - 1.25)
    now.update(load=1.0, wall=104.0, cpu=6.0)  # four seconds for one of CPU
    assert budget.elapsed == 4.0
    assert budget.slowdown == pytest.approx(4.0, abs=0.3)
    assert budget.left == pytest.approx(10 * 0.92 - 4.0 - 2.0, abs=0.15)
    assert TimeBudget(math.inf).left == math.inf


def test_a_hopeless_time_limit_still_gives_a_model():
    X, y = load_iris(return_X_y=True)
    model = EASTBlend("f1", time_limit=1e-3, random_state=0).fit(X, y)
    assert list(model.members_) == ["linear"]
    assert model.score(X, y) > 0.8


def test_ctrl_c_keeps_the_members_that_are_done_and_ends_every_thread():
    X, y = make_classification(400, 6, random_state=0)
    before, seen = threading.active_count(), []

    def stop(epoch):
        seen.append(epoch.stage)
        if "linear" in seen:
            raise KeyboardInterrupt

    model = EASTBlend("f1", n_jobs=2, random_state=0).fit(X, y, on_epoch=stop)
    assert "linear" in model.weights_
    assert threading.active_count() == before
    assert model.predict(X).shape == y.shape


def test_an_error_in_one_member_is_raised_and_ends_the_others():
    X, y = make_classification(400, 6, random_state=0)

    def fail(epoch):
        raise RuntimeError("no")

    before = threading.active_count()
    with pytest.raises(RuntimeError, match="no"):
        EASTBlend("f1", n_jobs=2, random_state=0).fit(X, y, on_epoch=fail)
    assert threading.active_count() == before


def rare_class():
    X, y = make_classification(300, 5, random_state=0)
    y[:3] = 2
    return X, y


def constant_columns():
    X, y = make_classification(200, 5, random_state=0)
    return np.hstack([X, np.ones((200, 2)), np.full((200, 1), np.nan) * np.zeros((200, 1))])[:, :7], y


def many_classes():
    X = np.random.default_rng(0).normal(size=(600, 8))
    return X, np.arange(600) % 50


def wide():
    X = np.random.default_rng(0).normal(size=(120, 2000))
    return X, (X[:, 0] > 0).astype(int)


@pytest.mark.parametrize("make", [rare_class, constant_columns, many_classes, wide])
def test_odd_tables_work(make):
    X, y = make()
    model = EASTBlend("f1", folds=2, **SMALL).fit(X, y)
    p = model.predict_proba(X)
    assert p.shape == (len(X), len(np.unique(y)))
    np.testing.assert_allclose(p.sum(axis=1), 1.0, atol=1e-6)
    assert set(model.predict(X)) <= set(y)


def test_recipe_auto_trains_on_the_metric_where_argmax_decides():
    recipes = {d: EASTBlend("f1", decision=d)._shared(0)["recipe"] for d in ("auto", "plug_in", "tuned", "argmax")}
    assert recipes == {
        "auto": "cross_entropy",
        "plug_in": "cross_entropy",
        "tuned": "cross_entropy",
        "argmax": "anchored",
    }


def test_the_one_line_form_and_the_leaderboard():
    X, y = load_iris(return_X_y=True)
    model = evalign.fit(X, y, metric="mcc", **SMALL)
    assert isinstance(model, EASTBlend)
    board = model.leaderboard()
    assert list(board.member)[-1] == "blend"
    assert set(board.member) == {"linear", "forest", "boost", "network", "blend"}
    assert board.weight[:-1].sum() == pytest.approx(1)
    assert board.weight[:-1].is_monotonic_decreasing
    own = model.held_out_predictions_
    mixed = board.set_index("member").loc["blend"]
    assert mixed.log_loss == pytest.approx(sklearn_log_loss(own.labels, np.clip(own.probabilities, 1e-5, 1)), abs=1e-3)
    assert mixed.score > 0.8


def test_estimates_grow_with_the_table_and_settings_fit_a_budget():
    sizes = [Shape(n, 20, 40, 3, 5) for n in (500, 5000, 20_000)]
    for name in PRESETS["default"]:
        seconds = [estimated_seconds(name, member_options(name, "default", shape), shape) for shape in sizes]
        assert seconds == sorted(seconds)
    short = member_options("network", "default", sizes[2], budget=5.0)
    assert estimated_seconds("network", short, sizes[2]) < 6.0 or short["epochs"] == 8


# -- members ----------------------------------------------------------------------------------------------------


def test_the_linear_member_is_scikit_learns_logistic_regression():
    X, y = load_breast_cancer(return_X_y=True)
    model = EASTLinear("f1", strength=0.2, iterations=2000, folds=2, random_state=0).fit(X, y)
    x = np.clip(model.encoder_.transform(X), -20, 20)
    for fold in (0, 1):
        own = model.held_out_predictions_
        train = own.rows[own.fold != fold]
        expected = LogisticRegression(C=0.2, max_iter=2000, tol=1e-3).fit(x[train], y[train]).predict_proba(x)
        np.testing.assert_allclose(model._probabilities(X, fold), expected, atol=5e-3)


def test_the_linear_member_takes_text_gaps_and_a_class_without_weight(tmp_path):
    X, y = load_iris(return_X_y=True)
    table = pd.DataFrame(X, columns=list("abcd")).assign(e=np.where(y == 2, "big", "small"))
    table.loc[3, "a"] = np.nan
    model = EASTLinear("f1", folds=2, random_state=0).fit(table, y, sample_weight=(y < 2).astype(float))
    p = model.predict_proba(table)
    assert p[:, 2].max() == 0.0
    loaded = EASTLinear.load(model.save(tmp_path / "m"))
    np.testing.assert_array_equal(loaded.predict_proba(table), p)


@pytest.mark.parametrize(("installed", "library"), [(("xgboost",), "xgboost"), ((), None)])
def test_without_lightgbm_xgboost_boosts_and_without_both_nothing_does(monkeypatch, installed, library):
    monkeypatch.setattr("evalign.estimators.blend.is_installed", lambda name: name in installed)
    X, y = make_classification(200, 5, random_state=0)
    model = EASTBlend(preset="quick", weights="equal", forest={"trees": 5}, boost={"rounds": 5}, random_state=0)
    members = model.fit(X, y).members_
    assert (members["boost"].library if "boost" in members else None) == library
