"""The objective inside LightGBM and XGBoost: their native and scikit-learn interfaces, and their own cross-entropy."""

import inspect

import lightgbm
import numpy as np
import pytest
import xgboost
from sklearn.base import clone
from sklearn.datasets import load_iris, make_classification, make_multilabel_classification
from sklearn.metrics import f1_score

from evalign.boosting import lightgbm as with_lightgbm
from evalign.boosting import xgboost as with_xgboost
from evalign.boosting.score_objective import cooling

QUIET = {"verbose": -1, "num_threads": 1, "deterministic": True, "force_row_wise": True}
XGB = {"base_score": 0.0, "disable_default_eval_metric": True, "nthread": 1, "seed": 0}


@pytest.fixture(scope="module")
def rare():
    X, y = make_classification(900, 8, n_informative=5, weights=[0.9], flip_y=0.05, random_state=0)
    return X, y, np.random.default_rng(0).random(900) + 0.5


def softmax(z):
    e = np.exp(z - z.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


def test_anchor_alone_is_lightgbms_own_cross_entropy(rare):
    X, y, weight = rare
    own = lightgbm.train(
        {"objective": "binary", "boost_from_average": False, **QUIET}, lightgbm.Dataset(X, y, weight=weight), 20
    )
    objective = with_lightgbm.MetricObjective("f1", task="binary", metric_weight=0.0, floor=0.0)
    ours = lightgbm.train({"objective": objective, **QUIET}, lightgbm.Dataset(X, y, weight=weight), 20)
    p = objective.probabilities(ours.predict(X, raw_score=True))
    np.testing.assert_allclose(p, own.predict(X), atol=1e-5)
    X, y = load_iris(return_X_y=True)
    three = {"num_class": 3, "boost_from_average": False, **QUIET}
    own = lightgbm.train({"objective": "multiclass", **three}, lightgbm.Dataset(X, y), 15)
    # LightGBM's second derivative of C classes is C / (C - 1) p (1 - p).
    objective = with_lightgbm.MetricObjective("f1", metric_weight=0.0, curvature=1.5, floor=0.0)
    ours = lightgbm.train({"objective": objective, **three}, lightgbm.Dataset(X, y), 15)
    np.testing.assert_allclose(softmax(ours.predict(X, raw_score=True)), own.predict(X), atol=1e-5)


def test_anchor_alone_is_xgboosts_own_cross_entropy(rare):
    X, y, weight = rare
    data = xgboost.DMatrix(X, y, weight=weight)
    own = xgboost.train({"objective": "binary:logistic", "base_score": 0.5, "nthread": 1}, data, 20)
    objective = with_xgboost.MetricObjective("f1", task="binary", metric_weight=0.0, floor=1e-16)
    ours = xgboost.train(XGB, data, 20, obj=objective)
    p = objective.probabilities(ours.predict(data, output_margin=True))
    np.testing.assert_allclose(p, own.predict(data), atol=1e-5)
    X, y = load_iris(return_X_y=True)
    data = xgboost.DMatrix(X, y)
    own = xgboost.train({"objective": "multi:softprob", "num_class": 3, "base_score": 0.5, "nthread": 1}, data, 15)
    objective = with_xgboost.MetricObjective("f1", metric_weight=0.0, floor=1e-16)
    ours = xgboost.train({**XGB, "num_class": 3}, data, 15, obj=objective)
    np.testing.assert_allclose(softmax(ours.predict(data, output_margin=True)), own.predict(data), atol=1e-5)


def test_lightgbms_two_interfaces_agree_and_stop_at_the_best_metric(rare):
    X, y, weight = rare
    train, valid = slice(0, 600), slice(600, 900)
    objective = with_lightgbm.MetricObjective("f1", task="binary")
    data = lightgbm.Dataset(X[train], y[train], weight=weight[train])
    seen: dict = {}
    booster = lightgbm.train(
        {"objective": objective, "metric": "None", **QUIET}, data, 60,
        valid_sets=[data.create_valid(X[valid], y[valid], weight=weight[valid])], feval=objective.evaluate,
        callbacks=[lightgbm.early_stopping(20, verbose=False), lightgbm.record_evaluation(seen)],
    )  # fmt: skip
    scores = seen["valid_0"]["f1"]
    assert booster.best_iteration == int(np.argmax(scores)) + 1
    raw = booster.predict(X[valid], raw_score=True)
    assert max(scores) == pytest.approx(f1_score(y[valid], raw >= 0, sample_weight=weight[valid]))
    model = lightgbm.LGBMClassifier(
        objective=clone_of(objective), metric="None", n_estimators=60, verbose=-1, n_jobs=1, deterministic=True,
        force_row_wise=True,
    ).fit(
        X[train], y[train], sample_weight=weight[train], **watched(X[valid], y[valid]),
        eval_sample_weight=[weight[valid]], eval_metric=objective.evaluate,
        callbacks=[lightgbm.early_stopping(20, verbose=False)],
    )  # fmt: skip
    assert model.best_iteration_ == booster.best_iteration
    np.testing.assert_allclose(model.predict(X[valid], raw_score=True), raw, atol=1e-12)


def watched(x, y):
    """Rows to stop by, as LightGBM's `fit` takes them from 4.7 on, and before."""
    new = "eval_X" in inspect.signature(lightgbm.LGBMClassifier.fit).parameters
    return {"eval_X": x, "eval_y": y} if new else {"eval_set": [(x, y)]}


@pytest.mark.parametrize(("named", "expected"), [(None, {"f1"}), ("auc", {"f1", "auc"})])
def test_the_lightgbm_classifier_stops_by_no_metric_that_was_not_named(rare, named, expected):
    X, y, _ = rare
    objective = with_lightgbm.MetricObjective("f1", task="binary")
    model = with_lightgbm.MetricLGBMClassifier(objective=objective, n_estimators=30, verbose=-1, n_jobs=1)
    model.fit(
        X[:600], y[:600], **watched(X[600:], y[600:]), eval_metric=[objective.evaluate, *([named] if named else [])],
        callbacks=[lightgbm.early_stopping(5, verbose=False)],
    )  # fmt: skip
    scores = model.evals_result_["valid_0"]
    assert set(scores) == expected
    if named is None:
        assert model.best_iteration_ == int(np.argmax(scores["f1"])) + 1


def clone_of(objective):
    """As scikit-learn's clone copies an option."""
    return clone(objective, safe=False)


def test_xgboosts_two_interfaces_agree_and_stop_at_the_best_metric(rare):
    X, y, weight = rare
    train, valid = slice(0, 600), slice(600, 900)
    objective, seen = with_xgboost.MetricObjective("f1", task="binary"), {}
    booster = xgboost.train(
        {**XGB, "max_depth": 4}, xgboost.DMatrix(X[train], y[train], weight=weight[train]), 60, obj=objective,
        evals=[(xgboost.DMatrix(X[valid], y[valid], weight=weight[valid]), "valid")], verbose_eval=False,
        custom_metric=objective.evaluate, early_stopping_rounds=20, maximize=True, evals_result=seen,
    )  # fmt: skip
    scores = seen["valid"]["f1"]
    assert booster.best_iteration == int(np.argmax(scores))
    stop = xgboost.callback.EarlyStopping(rounds=20, maximize=True)
    model = xgboost.XGBClassifier(
        objective=clone_of(objective), eval_metric=objective.evaluation, base_score=0.5, n_estimators=60, max_depth=4,
        n_jobs=1, random_state=0, callbacks=[stop], disable_default_eval_metric=True,
    ).fit(
        X[train], y[train], sample_weight=weight[train], eval_set=[(X[valid], y[valid])],
        sample_weight_eval_set=[weight[valid]], verbose=False,
    )  # fmt: skip
    assert model.best_iteration == booster.best_iteration
    raw = booster.predict(
        xgboost.DMatrix(X[valid]), output_margin=True, iteration_range=(0, booster.best_iteration + 1)
    )
    np.testing.assert_allclose(model.predict(X[valid], output_margin=True), raw, atol=1e-6)
    assert max(scores) == pytest.approx(f1_score(y[valid], raw >= 0, sample_weight=weight[valid]))


def test_multiclass_metrics_train_in_both():
    X, y = load_iris(return_X_y=True)
    objective = with_lightgbm.MetricObjective("mcc")
    booster = lightgbm.train({"objective": objective, "num_class": 3, **QUIET}, lightgbm.Dataset(X, y), 20)
    assert objective.score(booster.predict(X, raw_score=True), y) > 0.95
    objective, data = with_xgboost.MetricObjective("mcc"), xgboost.DMatrix(X, y)
    booster = xgboost.train({**XGB, "num_class": 3}, data, 20, obj=objective)
    assert objective.score(booster.predict(data, output_margin=True), y) > 0.95


@pytest.mark.slow
def test_multilabel_metrics_train_in_xgboost():
    X, Y = make_multilabel_classification(300, 10, n_classes=3, random_state=0)
    objective, data = with_xgboost.MetricObjective("f1", task="multilabel"), xgboost.DMatrix(X, Y)
    booster = xgboost.train({**XGB, "num_target": 3}, data, 30, obj=objective)
    assert f1_score(Y, booster.predict(data, output_margin=True) >= 0, average="macro") > 0.85


def test_the_metric_moves_a_rare_class_towards_more_predictions(rare):
    X, y, _ = rare
    found = []
    for metric_weight in (0.0, 1.0):
        objective = with_lightgbm.MetricObjective("recall", task="binary", metric_weight=metric_weight)
        booster = lightgbm.train({"objective": objective, **QUIET}, lightgbm.Dataset(X, y), 10)
        found.append(int((booster.predict(X, raw_score=True) >= 0).sum()))
    assert found[1] > found[0]


def test_temperatures_fall_by_round_and_start_again_with_every_training(rare):
    X, y, _ = rare
    falls = cooling(0.2, 0.05, rounds=4)
    for module, train in (
        (with_lightgbm, lambda o: lightgbm.train({"objective": o, **QUIET}, lightgbm.Dataset(X, y), 5)),
        (with_xgboost, lambda o: xgboost.train(XGB, xgboost.DMatrix(X, y), 5, obj=o)),
    ):
        asked: list[int] = []

        def temperature(number):
            asked.append(number)
            return falls(number)

        objective = module.MetricObjective("f1", task="binary", temperature=temperature)
        for _ in range(2):
            asked.clear()
            train(objective)
            assert asked == [0, 1, 2, 3, 4]


def test_weights_of_zero_equal_dropped_rows():
    X, y = make_classification(300, 5, random_state=1)
    objective = with_xgboost.MetricObjective("f1", task="binary")
    weight = (np.arange(300) % 3 > 0).astype(float)
    # One bin per value, or the dropped rows would move the cuts.
    options = {**XGB, "tree_method": "exact", "min_child_weight": 0.0}
    with_zeros = xgboost.train(options, xgboost.DMatrix(X, y, weight=weight), 10, obj=objective)
    dropped = xgboost.train(options, xgboost.DMatrix(X[weight > 0], y[weight > 0]), 10, obj=objective)
    some = xgboost.DMatrix(X[weight > 0])
    np.testing.assert_allclose(
        with_zeros.predict(some, output_margin=True), dropped.predict(some, output_margin=True), atol=1e-4
    )


@pytest.mark.parametrize("library", ["lightgbm", "xgboost"])
@pytest.mark.parametrize("classes", [2, 3])
def test_wrapped_classifiers_predict_labels_and_probabilities(library, classes):
    generator = np.random.default_rng(0)
    x = generator.normal(size=(300, 3))
    y = (x[:, 0] + 0.1 * generator.normal(size=300) > 1).astype(int) + (classes == 3) * (x[:, 1] > 1)
    task = "binary" if classes == 2 else "multiclass"
    if library == "lightgbm":
        from evalign.boosting.lightgbm import MetricLGBMClassifier, MetricObjective

        kind, options = MetricLGBMClassifier, {"verbose": -1}
    else:
        from evalign.boosting.xgboost import MetricObjective, MetricXGBClassifier

        kind, options = MetricXGBClassifier, {"base_score": 0.5}
    model = clone(kind(objective=MetricObjective("f1", task=task), n_estimators=30, n_jobs=1, **options)).fit(x, y)
    p, labels = model.predict_proba(x), model.predict(x)
    assert p.shape == (300, classes)
    np.testing.assert_allclose(p.sum(1), 1, atol=1e-6)
    np.testing.assert_array_equal(labels, p.argmax(1))
    assert (labels == y).mean() > 0.95
    with pytest.raises(TypeError, match="MetricObjective"):
        kind(**options).fit(x, y)


def test_the_area_that_boosters_stop_by_is_that_of_the_ranks():
    from sklearn.metrics import roc_auc_score

    from evalign.boosting.score_objective import ScoreObjective

    generator = np.random.default_rng(1)
    y = generator.random(500) < 0.1
    scores = generator.normal(size=500) + 2 * y
    objective = ScoreObjective("auroc", task="binary")
    for moved in (scores, scores - 3, 0.01 * scores, scores**3):
        assert objective.score(moved, y.astype(int)) == pytest.approx(roc_auc_score(y, scores), abs=1e-6)


@pytest.mark.parametrize("classes", [2, 3])
def test_the_lightgbm_classifier_returns_leaves_and_contributions_as_lightgbm_does(classes):
    generator = np.random.default_rng(0)
    x = generator.normal(size=(200, 3))
    y = (x[:, 0] > 1).astype(int) + (classes == 3) * (x[:, 1] > 1)
    objective = with_lightgbm.MetricObjective("f1", task="binary" if classes == 2 else "multiclass")
    model = with_lightgbm.MetricLGBMClassifier(objective=objective, n_estimators=4, verbose=-1, n_jobs=1).fit(x, y)
    for options in ({"pred_leaf": True}, {"pred_contrib": True}):
        expected = model.booster_.predict(x, **options)
        np.testing.assert_array_equal(model.predict(x, **options), expected)
        np.testing.assert_array_equal(model.predict_proba(x, **options), expected)
    np.testing.assert_array_equal(model.predict(x, False, 0, None, True), model.booster_.predict(x, pred_leaf=True))
