"""Multilabel y (n, L): a model per label on the same folds, and thresholds chosen jointly."""

import numpy as np
import pytest
from scipy.sparse import csr_array
from sklearn.datasets import make_multilabel_classification
from sklearn.ensemble import RandomForestClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import f1_score

from evalign import EASTBlend, EASTBooster, EASTClassifier, MetricDecision, decision
from evalign.estimators.blend import load_model
from evalign.estimators.forest import EASTForest
from evalign.estimators.linear import BOUND, EASTLinear


@pytest.fixture(scope="module")
def table():
    return make_multilabel_classification(300, 6, n_classes=3, n_labels=1, random_state=1)


@pytest.fixture(scope="module")
def linear(table):
    return EASTLinear("f1", strength=0.2, folds=3, random_state=0).fit(*table)


def test_probabilities_are_those_of_a_loop_over_labels_and_folds(table, linear):
    X, Y = table
    held_out = linear.held_out_predictions_
    x = np.clip(linear.label_models_[0].encoder_.transform(X), -BOUND, BOUND)
    expected, out_of_fold = np.zeros(Y.shape), np.zeros(held_out.probabilities.shape)
    for k in range(Y.shape[1]):
        for fold in range(3):
            rest = held_out.rows[held_out.fold != fold]
            model = LogisticRegression(C=0.2, max_iter=200, tol=1e-3).fit(x[rest], Y[rest, k])
            expected[:, k] += model.predict_proba(x)[:, 1] / 3
            here = held_out.fold == fold
            out_of_fold[here, k] = model.predict_proba(x[held_out.rows[here]])[:, 1]
    np.testing.assert_allclose(linear.predict_proba(X), expected, atol=2e-3)
    np.testing.assert_allclose(held_out.probabilities, out_of_fold, atol=2e-3)


@pytest.mark.parametrize("average", ["macro", "micro"])
def test_the_rule_is_that_of_all_labels_together(table, linear, average):
    held_out = linear.held_out_predictions_
    model = EASTLinear("f1", average=average, strength=0.2, folds=3, random_state=0).fit(*table)
    rule = decision.calibrated(held_out.probabilities, held_out.labels, "f1", task="multilabel", average=average)
    np.testing.assert_allclose(model.decision_.thresholds, rule.thresholds)
    X, Y = table
    assert model.score(X, Y) == pytest.approx(f1_score(Y, model.predict(X), average=average))
    assert ((model.decision_function(X) >= 0) == model.predict(X)).all()
    assert set(np.unique(model.predict_jointly(X))) == {0, 1}


MODELS = {
    "forest": EASTForest("f1", trees=10, random_state=0),
    "boost": EASTBooster("f1", rounds=10, random_state=0),
    "network": EASTClassifier("f1", hidden=(8,), epochs=5, random_state=0),
    "blend": EASTBlend("f1", members=("linear", "forest"), forest={"trees": 10}, random_state=0),
}


@pytest.mark.parametrize("name", MODELS)
def test_every_classifier_takes_it_and_is_saved(table, name, tmp_path):
    X, Y = table
    model = MODELS[name].fit(X, csr_array(Y) if name == "forest" else Y)
    p = model.predict_proba(X)
    assert p.shape == model.predict(X).shape == Y.shape
    always = f1_score(Y, np.ones_like(Y), average="macro")
    assert model.score(X, Y) > always or name == "network"  # five epochs of eight units
    again = load_model(model.save(tmp_path / "model"))
    np.testing.assert_array_equal(again.predict_proba(X), p)
    np.testing.assert_array_equal(again.predict(X), model.predict(X))
    known = [one.adapt(X, prevalence={0: 0.9}).predict(X) for one in (model, again)]
    np.testing.assert_array_equal(*known)
    assert known[0][:, 0].sum() >= model.predict(X)[:, 0].sum()
    assert len(model.class_scores()) == 3
    assert len(model.calibration(1)) > 2


def test_every_label_has_a_leaderboard_of_the_blend(table, tmp_path):
    X, Y = table
    options = {"members": ["linear", "forest"], "forest": {"trees": 5}, "folds": 3, "random_state": 0}
    model = EASTBlend("f1", **options).fit(X, np.column_stack([Y, np.ones(len(Y), int)]))  # the last has no models
    board = model.leaderboard()
    assert board.groupby("label").size().to_dict() == {0: 3, 1: 3, 2: 3}
    assert board[board.member != "blend"].groupby("label").weight.sum().to_numpy() == pytest.approx(1)
    assert load_model(str(model.save(tmp_path / "m"))).leaderboard().equals(board)


def test_labels_that_all_rows_or_one_row_have(table):
    X, Y = table
    odd = np.column_stack([Y[:, 0], np.ones(len(Y), int), np.arange(len(Y)) == 7])
    model = EASTForest("f1", trees=10, folds=3, random_state=0).fit(X, odd)
    p = model.predict_proba(X)
    assert (p[:, 1] == 1).all()
    assert p[:, 2].argmax() == 7  # the row stays in every training part


def test_constraints_and_importance(table):
    X, Y = table
    model = EASTLinear("precision", subject_to="recall >= 0.8", folds=3, random_state=0).fit(X, Y)
    held_out = model.held_out_predictions_
    decided = model.decision_.predict(held_out.probabilities)
    assert (held_out.labels * decided).sum(0).astype(float) @ (1 / held_out.labels.sum(0)) / 3 >= 0.8
    assert model.importance(X, repeats=1).importance.max() > 0


def test_metric_decision_agrees_with_a_loop_of_per_label_forests(table):
    X, Y = table
    joint = MetricDecision(RandomForestClassifier(30, random_state=0), "f1", folds=0.3, random_state=0).fit(X, Y)
    assert joint.predict(X).shape == Y.shape
    p = np.stack([own[:, 1] for own in joint.estimator_.predict_proba(X)], axis=1)
    np.testing.assert_array_equal(joint.predict(X), joint.decision_.predict(p))
    rule = decision.Rule.from_json(joint.decision_.to_json())
    np.testing.assert_array_equal(rule.predict(p), joint.predict(X))
    assert joint.adapt(X).shift_.classes == (0, 1, 2)


@pytest.mark.parametrize(
    ("options", "Y", "message"),
    [
        ({"costs": [[0, 1], [1, 0]], "metric": "cost"}, [[0, 1], [1, 0]] * 10, "do not support multilabel y"),
        ({}, [[0, 2], [1, 0]] * 10, "0/1 of shape"),
        ({"average": "binary"}, [[0, 1], [1, 0]] * 10, "average='binary'"),
    ],
)
def test_errors(options, Y, message):
    with pytest.raises(ValueError, match=message):
        EASTLinear(**options).fit(np.arange(40.0).reshape(20, 2), np.array(Y))
