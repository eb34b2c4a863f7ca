"""Costs, rejection and budgets against brute force."""

import itertools

import numpy as np
import pandas as pd
import pytest
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import precision_score, recall_score

from evalign import MetricDecision
from evalign.decision import Rule, calibrated, joint_rule, plug_in
from evalign.decision.costs import Costs, cheapest, cost_metric, mean_cost


def test_least_expected_cost_of_every_row():
    rng = np.random.default_rng(0)
    p = rng.dirichlet(np.ones(3), size=300)
    y = np.array([rng.choice(3, p=row) for row in p])
    costs = rng.uniform(0, 3, size=(3, 3)) * (1 - np.eye(3))
    rule = cheapest(p, y, costs, reject=0.6)
    q = rule.calibrate(p)
    for row, decided in zip(q, rule.predict(p), strict=True):
        expected = [sum(row[i] * costs[i, j] for i in range(3)) for j in range(3)]
        assert decided == (int(np.argmin(expected)) if min(expected) <= 0.6 else -1)
    d = rule.predict(p)
    paid = [0.6 if k == -1 else costs[i, k] for i, k in zip(y, d, strict=True)]
    assert rule.value == pytest.approx(np.mean(paid))
    assert rule.coverage == pytest.approx(np.mean(d != -1))
    assert Rule.from_json(rule.to_json()) == rule


def test_cost_is_a_metric_like_the_others():
    """On three rows the plug-in rule of the cost metric is the best of all 27 decisions."""
    rng = np.random.default_rng(1)
    costs = rng.uniform(0, 2, size=(3, 3))
    for _ in range(5):
        p = rng.dirichlet(np.ones(3), size=3)
        best = min(
            np.mean([p[i] @ costs[:, j] for i, j in enumerate(d)]) for d in itertools.product(range(3), repeat=3)
        )
        assert plug_in(p, cost_metric(costs)).value == pytest.approx(-best)


def test_costs_of_rows():
    rng = np.random.default_rng(0)
    X = pd.DataFrame({"x": rng.normal(size=800), "amount": rng.exponential(10, size=800)})
    y = np.where(rng.random(800) < 1 / (1 + np.exp(2 - 2 * X["x"])), "fraud", "fine")
    costs = {"fp": 5.0, "fn": "amount", "reject": 1.0}
    model = MetricDecision(LogisticRegression(), "cost", costs=costs).fit(X, y)
    q = model.decision_.calibrate(model.predict_proba(X))[:, 1]
    risk = np.stack([q * X["amount"], (1 - q) * 5.0, np.full(800, 1.0)])
    expected = np.array(["fine", "fraud", None], dtype=object)[risk.argmin(axis=0)]
    assert (model.predict(X) == expected).all()
    paid = np.select(
        [expected == None, (expected == "fraud") & (y == "fine"), (expected == "fine") & (y == "fraud")],  # noqa: E711
        [1.0, 5.0, X["amount"]], 0.0,
    )  # fmt: skip
    assert model.score(X, y) == pytest.approx(-paid.mean())
    assert 0 < model.decision_.coverage < 1
    with pytest.raises(ValueError, match="pass a data frame"):
        Costs.of(costs, ["fine", "fraud"]).rows(X[["x"]])


def test_costs_with_a_constraint():
    rng = np.random.default_rng(0)
    p = rng.beta(0.4, 1.2, size=500)
    y = (rng.random(500) < p).astype(int)
    metric = cost_metric([[0.0, 1.0], [1.0, 0.0]])
    rule = calibrated(p, y, metric, subject_to="recall >= 0.9")
    assert recall_score(y, rule.predict(p)) >= 0.9
    assert rule.value < calibrated(p, y, metric).value


@pytest.mark.parametrize(
    ("costs", "message"),
    [
        ([[0, 1]], "shape"),
        ("amount", "a matrix of numbers, or a mapping"),
        ([["a", "b"], ["c", "d"]], "a matrix of numbers, or a mapping"),
        ({"fpp": 1}, "cost must be one of"),
        ({("fine", "cow"): 1}, "class of a cost"),
        ({"reject": "amount"}, "must be a number"),
        ({1: 5.0}, "keys of costs"),
        ({("fine", "fraud", "fine"): 5.0}, "keys of costs"),
    ],
)
def test_wrong_costs(costs, message):
    with pytest.raises(ValueError, match=message):
        Costs.of(costs, ["fine", "fraud"])


def test_mean_cost_by_hand():
    assert mean_cost(
        np.array([0, 1, -1]), np.array([1, 1, 0]), np.array([[0.0, 1.0], [4.0, 0.0]]), np.ones(3), 1.0
    ) == (pytest.approx(5 / 3))


def test_budget_of_rows_is_recall_and_precision_at_k():
    rng = np.random.default_rng(0)
    p = rng.beta(0.4, 1.2, size=500)
    y = (rng.random(500) < p).astype(int)
    rule = calibrated(p, y, "recall", subject_to="flagged <= 40")
    top = np.zeros(500, dtype=int)
    top[np.argsort(-p)[:40]] = 1
    assert (rule.predict(p) == top).all()
    assert rule.value == pytest.approx(recall_score(y, top))
    assert rule.predict(p[:30]).sum() <= 40
    assert calibrated(p, y, "precision", subject_to="flagged <= 40").value >= precision_score(y, top)


@pytest.mark.parametrize("share", [0.02, 0.1])
def test_budget_of_a_share(share):
    rng = np.random.default_rng(0)
    p, new = rng.beta(0.4, 1.2, size=500), rng.beta(0.6, 1.0, size=300)
    y = (rng.random(500) < p).astype(int)
    options = {"subject_to": f"flagged <= {share:.0%}"}
    rule = calibrated(p, y, "recall", **options)
    best = max(recall_score(y, p >= t) for t in p if np.mean(p >= t) <= share)
    assert rule.value == pytest.approx(best)
    assert rule.predict(p).mean() <= share
    jointly = joint_rule(rule, new, "recall", **options)
    assert np.floor(share * 300) - 1 <= jointly.predict(new).sum() <= share * 300


def test_budgets_of_more_classes_name_one():
    p = np.random.default_rng(0).dirichlet(np.ones(3), size=200)
    with pytest.raises(ValueError, match="flagged needs a class"):
        plug_in(p, "f1", subject_to="flagged <= 2%")
    with pytest.raises(ValueError, match="positive class of two"):
        plug_in(p, "f1", subject_to="flagged[2] <= 20")
    assert np.mean(plug_in(p, "f1", subject_to="flagged[2] <= 5%").predict(p) == 2) <= 0.05
