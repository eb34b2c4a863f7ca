"""Costs of decisions in every classifier: a matrix, pairs of labels, columns of the data, rejection."""

import numpy as np
import pandas as pd
import pytest
from sklearn.datasets import make_classification
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import confusion_matrix
from sklearn.naive_bayes import GaussianNB

from evalign import EASTBlend, EASTBooster, EASTClassifier, MetricDecision
from evalign.estimators.blend import load_model
from evalign.estimators.forest import EASTForest
from evalign.estimators.linear import EASTLinear


@pytest.fixture(scope="module")
def table():
    X, y = make_classification(400, 4, n_redundant=0, weights=[0.8], flip_y=0.1, random_state=0)
    frame = pd.DataFrame(X, columns=list("abcd"))
    frame["amount"] = np.random.default_rng(0).exponential(5, 400)
    return frame, np.where(y == 1, "fraud", "fine")


MODELS = {
    "linear": EASTLinear,
    "forest": lambda *a, **k: EASTForest(*a, trees=20, **k),
    "boost": lambda *a, **k: EASTBooster(*a, rounds=15, **k),
    "network": lambda *a, **k: EASTClassifier(*a, hidden=(8,), epochs=60, **k),
    "blend": lambda *a, **k: EASTBlend(*a, members=("linear", "network"), network={"hidden": (8,), "epochs": 3}, **k),
}


@pytest.mark.parametrize("name", MODELS)
def test_held_out_rows_are_decided_by_least_expected_cost(table, name, tmp_path):
    X, y = table
    model = MODELS[name]("cost", costs=[[0, 1], [5, 0]], random_state=0).fit(X, y)
    q = model.decision_.calibrate(model.predict_proba(X))
    expected = np.where(q[:, 1] * 5 > q[:, 0] * 1, "fraud", "fine")
    assert (model.predict(X) == expected).mean() == 1
    counts = confusion_matrix(y, model.predict(X), labels=["fine", "fraud"])
    assert model.score(X, y) == pytest.approx(-(counts * [[0, 1], [5, 0]]).sum() / len(y))
    again = load_model(model.save(tmp_path / "model"))
    assert (again.predict(X) == model.predict(X)).all()
    assert (model.adapt(prevalence={"fraud": 0.6}).predict(X) == "fraud").sum() > (expected == "fraud").sum()


def test_a_network_is_trained_for_costs_on_every_fold(table):
    X, y = table
    costs = {"fp": 1, "fn": "amount"}
    model = EASTClassifier("cost", costs=costs, hidden=(8,), epochs=5, random_state=0).fit(X, y)
    assert model.folds_ == 5
    assert sorted(model.held_out_predictions_.rows) == list(range(len(y)))


def test_columns_and_rejection(table, tmp_path):
    X, y = table
    costs = {"fp": 1, "fn": "amount", "reject": 0.4}
    model = EASTLinear("cost", costs=costs, random_state=0).fit(X, y)
    q = model.decision_.calibrate(model.predict_proba(X))
    paid = np.stack([q[:, 1] * X["amount"], q[:, 0]], axis=1)  # of calling it fine, and fraud
    expected = np.where(paid.min(1) > 0.4, None, np.where(paid[:, 1] < paid[:, 0], "fraud", "fine"))
    assert model.predict(X).tolist() == expected.tolist()
    assert 0.2 < model.decision_.coverage < 1
    actual = np.where(expected == y, 0, np.where(y == "fraud", X["amount"], 1.0))
    actual = np.where([label is None for label in expected], 0.4, actual)
    assert model.score(X, y) == pytest.approx(-actual.mean())
    again = load_model(model.save(tmp_path / "model"))
    assert again.predict(X).tolist() == expected.tolist()
    assert list(model.class_scores().index) == ["fine", "fraud"]
    assert len(model.importance(X, repeats=1)) == 5


def test_pairs_of_labels_and_the_positive_one_name_the_same_costs(table):
    X, y = table
    by_order = EASTLinear("cost", costs=[[0, 1], [5, 0]], random_state=0).fit(X, y)
    by_label = EASTLinear("cost", costs={("fine", "fraud"): 1, ("fraud", "fine"): 5}, random_state=0).fit(X, y)
    swapped = EASTLinear("cost", costs=[[0, 1], [5, 0]], pos_label="fine", random_state=0).fit(X, y)
    assert (by_order.predict(X) == by_label.predict(X)).all()
    assert swapped.score(X, y) == pytest.approx(by_order.score(X, y), abs=0.05)  # folds are dealt in another order


def test_a_matrix_is_in_the_order_of_the_classes_whatever_the_positive_one_is(table):
    X, y = table[0][list("abcd")], table[1]
    models = [
        MetricDecision(GaussianNB(), "cost", costs=[[0, 1], [5, 0]], pos_label=label).fit(X, y)
        for label in ("fraud", "fine")
    ]
    assert (models[0].predict(X) == models[1].predict(X)).all()
    assert models[0].score(X, y) == pytest.approx(models[1].score(X, y))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"metric": "cost"}, "metric 'cost' and costs require each other"),
        ({"costs": [[0, 1], [1, 0]]}, "metric 'cost' and costs require each other"),
        ({"metric": "cost", "costs": {"fn": "price"}}, "pass a data frame that has it"),
        ({"metric": "cost", "costs": [[0, 1, 2]] * 3}, "finite numbers of shape"),
        (
            {"metric": "cost", "costs": {"fn": "amount"}, "subject_to": "recall >= 0.5"},
            "costs that are equal for all rows",
        ),
    ],
)
def test_errors(table, options, message):
    with pytest.raises(ValueError, match=message):
        EASTLinear(**options).fit(*table)


def test_value_of_a_rule_is_the_mean_cost_with_constraints_too():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(800, 3))
    y = (X[:, 0] + rng.normal(size=800) > 1).astype(int)
    free = MetricDecision(LogisticRegression(), "cost", costs=[[0, 1], [5, 0]]).fit(X, y).decision_
    limited = MetricDecision(LogisticRegression(), "cost", costs=[[0, 1], [5, 0]], subject_to="recall >= 0.5")
    assert 0 < free.value <= limited.fit(X, y).decision_.value + 0.01


def test_report_counts_rejected_rows_at_their_cost(table):
    X, y = table
    costs = {"fp": 1, "fn": 5, "reject": 0.3}
    model = EASTLinear("cost", costs=costs, random_state=0).fit(X, y)
    worth, predicted = model.report(X, y), model.predict(X)
    paid = [0.3 if d is None else 0 if d == t else 5 if t == "fraud" else 1 for d, t in zip(predicted, y, strict=True)]
    assert worth.value.value == pytest.approx(np.mean(paid))
    assert worth.value.low < worth.value.value < worth.value.high
    assert worth.coverage.value == pytest.approx(np.mean([d is not None for d in predicted]))
    plain = np.where(model.predict_proba(X)[:, 1] > 0.5, "fraud", "fine")
    without = confusion_matrix(y, plain, labels=["fine", "fraud"])
    assert worth.argmax.value == pytest.approx((without[0, 1] + 5 * without[1, 0]) / len(y))
    assert worth.gain.value == pytest.approx(worth.argmax.value - worth.value.value)
    assert "share of rows decided" in str(worth)


@pytest.mark.parametrize("reject", [None, 0.3])
def test_report_of_costs_in_columns(table, reject):
    X, y = table
    costs = {"fp": 1, "fn": "amount"} | ({} if reject is None else {"reject": reject})
    model = EASTLinear("cost", costs=costs, random_state=0).fit(X, y)

    def cost(labels):
        each = np.where(labels == y, 0, np.where(y == "fraud", X["amount"], 1.0))
        return np.where([label is None for label in labels], reject or 0.0, each)

    worth = model.report(X, y)
    paid, plain = cost(model.predict(X)), cost(np.where(model.predict_proba(X)[:, 1] > 0.5, "fraud", "fine"))
    assert worth.value.value == pytest.approx(paid.mean())
    assert worth.argmax.value == pytest.approx(plain.mean())
    assert worth.gain.value == pytest.approx((plain - paid).mean())
    error = paid.std() / np.sqrt(len(y))
    assert worth.value.high - worth.value.low == pytest.approx(2 * 1.96 * error, rel=0.2)
    assert (worth.coverage is None) == (reject is None)
    if reject is not None:
        assert worth.coverage.value == pytest.approx(np.mean([label is not None for label in model.predict(X)]))
    assert "cost" in worth.html()


def test_a_rejected_row_differs_from_the_class_minus_one(table):
    X, y = table
    costs = {"fp": 1, "fn": 1, "reject": 0.2}
    names = MetricDecision(LogisticRegression(), "cost", costs=costs).fit(X, y)
    signs = MetricDecision(LogisticRegression(), "cost", costs=costs).fit(X, np.where(y == "fraud", 1, -1))
    expected = [{"fine": -1, "fraud": 1}.get(label) for label in names.predict(X)]
    assert signs.predict(X).tolist() == expected
    assert None in expected
    assert signs.score(X, np.where(y == "fraud", 1, -1)) == names.score(X, y)
