"""Reports of rules: intervals against repeated samples, scores against scikit-learn's, and the pages."""

import json
import re

import numpy as np
import pytest
from scipy.special import expit
from sklearn.metrics import f1_score, matthews_corrcoef, recall_score

from evalign import decision
from evalign.decision.rule import Rule
from evalign.decision.rule_report import evaluate_rule, raw_threshold


def rows(seed, n=600, share=0.2):
    rng = np.random.default_rng(seed)
    y = (rng.random(n) < share).astype(int)
    return expit(rng.normal(2.0 * y - 2.0, 1.0)), y


def test_values_are_scikit_learns():
    p, y = rows(0)
    rule = decision.calibrated(p, y, "f1")
    worth = evaluate_rule(rule, p, y, subject_to="recall >= 0.5")
    assert worth.value.value == pytest.approx(f1_score(y, rule.predict(p)))
    assert worth.argmax.value == pytest.approx(f1_score(y, p >= 0.5))
    assert worth.gain.value == pytest.approx(worth.value.value - worth.argmax.value)
    (limit,) = worth.constraints.values()
    assert limit[0].value == pytest.approx(recall_score(y, rule.predict(p)))
    at_half = worth.curve[np.abs(worth.curve[:, 0] - 0.5).argmin()]
    assert at_half[1] == pytest.approx(f1_score(y, p >= 0.5))


@pytest.mark.slow
def test_intervals_cover_the_value_of_the_population():
    many_p, many_y = rows(1, n=200_000)
    rule = Rule("threshold", 2, threshold=0.3, metric="f1")
    truth = f1_score(many_y, rule.predict(many_p))
    inside = 0
    for seed in range(40):
        p, y = rows(seed + 2, n=300)
        value = evaluate_rule(rule, p, y, learn=lambda a, b: rule).value
        inside += value.low <= truth <= value.high
    assert inside >= 34  # 38 of 40 expected


@pytest.mark.slow
def test_interval_of_the_threshold_covers_that_of_other_samples():
    p, y = rows(50)
    worth = evaluate_rule(decision.calibrated(p, y, "f1"), p, y)
    others = [raw_threshold(decision.calibrated(*rows(seed), "f1")) for seed in range(51, 71)]
    assert np.mean([worth.threshold.low <= t <= worth.threshold.high for t in others]) >= 0.7


def test_raw_threshold_is_where_decisions_turn():
    rule = Rule("threshold", 2, threshold=0.4, temperature=1.5, offsets=(0.3, -0.2))
    t = raw_threshold(rule)
    np.testing.assert_array_equal(rule.predict([t - 1e-6, t + 1e-6]), [0, 1])


def test_more_classes_have_no_threshold():
    rng = np.random.default_rng(0)
    p = rng.dirichlet([2.0, 1.0, 0.5], size=300)
    y = (p.cumsum(axis=1) < rng.random((300, 1))).sum(axis=1)
    rule = decision.plug_in(p, "mcc")
    worth = rule.report(p, y)
    assert worth.threshold is None
    assert worth.value.value == pytest.approx(matthews_corrcoef(y, rule.predict(p)))
    with pytest.raises(ValueError, match="two classes"):
        worth.svg()
    assert "<svg" not in worth.html()


def test_text_json_and_page():
    p, y = rows(3)
    rule = decision.calibrated(p, y, "precision", subject_to="recall >= 0.8")
    worth = rule.report(p, y)
    text = str(worth)
    assert "threshold on the probability of class 1" in text
    assert re.search(r"recall >= 0.8: 0\.\d+ \(95 % interval .*; missed in \d+% of resamples", text)
    assert json.loads(json.dumps(worth.to_json()))["constraints"]["recall >= 0.8"]["missed"] <= 1
    from xml.etree import ElementTree

    picture = ElementTree.fromstring(worth.svg())
    assert len(picture.findall("polygon")) == len(picture.findall("polyline")) == 1
    assert "recall &gt;= 0.8" in worth.html()


@pytest.mark.slow
def test_interval_of_a_constrained_threshold_is_that_of_constrained_rules():
    """The threshold of recall >= 0.95 lies far below that of precision alone, and so does its interval."""
    p, y = rows(3)
    worth = decision.calibrated(p, y, "precision", subject_to="recall >= 0.95").report(p, y)
    assert worth.threshold.low <= worth.threshold.value <= worth.threshold.high
    free = decision.calibrated(p, y, "precision").report(p, y)
    assert worth.threshold.high < free.threshold.low


def test_errors():
    with pytest.raises(ValueError, match="pass metric="):
        Rule("threshold", 2, threshold=0.5).report([0.2, 0.7], [0, 1])
    with pytest.raises(ValueError, match="this rule needs 2 columns of probabilities, got 3"):
        Rule("threshold", 2, threshold=0.5, metric="f1").report([[0.2, 0.3, 0.5]], [2])


@pytest.mark.parametrize("average", ["macro", "micro"])
def test_several_labels(average):
    """Values are scikit-learn's, and the interval is that of a loop over resamples of rows."""
    rng = np.random.default_rng(2)
    y = (rng.random((400, 3)) < [0.1, 0.3, 0.5]).astype(int)
    p = 1 / (1 + np.exp(-rng.normal(2.0 * y - 1.5, 1.0)))
    rule = decision.tuned(p, y, "f1", task="multilabel", average=average, subject_to="recall >= 0.5")
    worth = rule.report(p, y, average=average)
    decided = rule.predict(p)
    assert worth.value.value == pytest.approx(f1_score(y, decided, average=average))
    assert worth.argmax.value == pytest.approx(f1_score(y, p >= 0.5, average=average))
    draws = [f1_score(y[rows], decided[rows], average=average) for rows in rng.integers(400, size=(1000, 400))]
    low, high = np.quantile(draws, [0.025, 0.975])
    assert (worth.value.low, worth.value.high) == pytest.approx((low, high), abs=0.01)
    ((text, (recall, missed)),) = worth.constraints.items()
    assert text == "recall >= 0.5"
    assert recall.value == pytest.approx(recall_score(y, decided, average=average))
    assert 0 <= missed <= 1
    assert worth.threshold is None
    assert worth.curve is None
    assert "probability of 1/2 or more" in str(worth)
    assert json.loads(json.dumps(worth.to_json()))["rows"] == 400
    assert "<svg" not in worth.html()


def test_rows_and_columns_are_counted():
    rule = decision.Rule("threshold", 2, threshold=0.3)
    with pytest.raises(ValueError, match="at least one labelled row"):
        rule.report(np.zeros(0), np.zeros(0), "f1")
    with pytest.raises(ValueError, match="needs 2 columns of probabilities, got 3"):
        decision.joint_rule(rule, np.full((4, 3), 1 / 3), "f1")
