"""Certified constraints: bounds against scipy, coverage with known truth, messages, and every constraint form."""

import warnings
from math import floor

import numpy as np
import pytest
from scipy.stats import beta, binom, binomtest
from sklearn.metrics import f1_score, recall_score

from evalign.decision import calibrated, tuned
from evalign.decision.certified import (
    CertifiedProblem,
    binomial_bound,
    candidate_rules,
    certified_rule,
    certify_decisions,
    certify_in_turn,
)
from evalign.decision.search.problem import Problem


@pytest.mark.parametrize(("k", "n"), [(0, 10), (7, 10), (10, 10), (50, 53)])
def test_bounds_are_clopper_pearson(k, n):
    interval = binomtest(k, n).proportion_ci(0.8, method="exact")  # two-sided 80 %: one-sided 90 %
    assert binomial_bound(np.array([k]), np.array([n]), 0.1, lower=True)[0] == pytest.approx(interval.low)
    assert binomial_bound(np.array([k]), np.array([n]), 0.1, lower=False)[0] == pytest.approx(interval.high)


# Two classes with scores Beta(3, 2) of positives and Beta(1, 3) of negatives: recall and precision are known exactly.
SHARE = 0.2


def draw(rng, n):
    y = (rng.random(n) < SHARE).astype(int)
    return np.where(y == 1, rng.beta(3, 2, n), rng.beta(1, 3, n)), y


def truth(rule):
    """True recall, precision, specificity and share of flagged rows of a threshold rule."""
    grid = np.linspace(0, 1, 20001)
    flagged = rule.predict(grid)
    t = grid[flagged.argmax()] if flagged.any() else 1.0
    hit, false = beta(3, 2).sf(t), beta(1, 3).sf(t)
    share = SHARE * hit + (1 - SHARE) * false
    return {"recall": hit, "precision": SHARE * hit / max(share, 1e-300), "specificity": 1 - false, "flagged": share}


FORMS = [
    ("precision", ["recall >= 0.85"]),
    ("recall", ["precision >= 0.6"]),
    ("recall", ["specificity >= 0.9"]),
    ("recall", ["flagged <= 20%"]),
    ("f1", ["recall >= 0.5", "precision >= 0.4"]),
]


def violations(metric, subject_to, repetitions, rows=400):
    """Shares of certified rules that truly violate a constraint, of feasible ones, and of uncertified violations."""
    wrong, plain, feasible = 0, 0, 0
    for seed in range(repetitions):
        p, y = draw(np.random.default_rng(seed), rows)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            rules = [calibrated(p, y, metric, subject_to=subject_to, confidence=c) for c in (0.9, None)]
        broken = []
        for rule in rules:
            real, missed = truth(rule), False
            for text in subject_to:
                name, op, value = text.replace("%", "e-2").split()
                missed |= real[name] < float(value) - 1e-4 if op == ">=" else real[name] > float(value) + 1e-4
            broken.append(missed)
        feasible += rules[0].feasible
        wrong += broken[0] and rules[0].feasible
        plain += broken[1]
    return wrong / repetitions, feasible / repetitions, plain / repetitions


@pytest.mark.parametrize(("metric", "subject_to"), FORMS[:2])
def test_certified_constraints_hold(metric, subject_to):
    wrong, feasible, plain = violations(metric, subject_to, 40, rows=800)
    assert wrong <= binom.ppf(0.999, 40, 0.1) / 40
    assert feasible > 0.6
    assert plain > 0.25  # meeting it on the held-out rows alone is a coin toss


@pytest.mark.slow
@pytest.mark.parametrize(("metric", "subject_to"), FORMS)
def test_certified_constraints_hold_in_a_thousand_repetitions(metric, subject_to):
    wrong, feasible, _ = violations(metric, subject_to, 1000, rows=800)
    assert wrong <= 0.1 + 3 * np.sqrt(0.1 * 0.9 / 1000)
    assert feasible > 0.3


def draw_three(rng, n):
    y = rng.choice(3, size=n, p=[0.6, 0.3, 0.1])
    scores = rng.normal(size=(n, 3)) + 2.0 * np.eye(3)[y] + np.log([0.6, 0.3, 0.1])
    e = np.exp(scores)
    return e / e.sum(axis=1, keepdims=True), y


def draw_labels(rng, n):
    p = rng.beta(0.5, 1.0, size=(n, 3))
    return p, (rng.random(p.shape) < p).astype(int)


def violations_of_candidates(draw, problem, searches, tests, rows):
    """Share of tests with a wrong certificate, and of those with any, over `searches` sets of candidates.

    Candidates are learned on separate rows, so every test on new rows is a complete repetition for its
    candidates; the truth is that of 100,000 rows.
    """
    p_new, y_new = draw(np.random.default_rng(10**6), 100_000)
    wrong = certified = 0
    for seed in range(searches):
        rules = candidate_rules(*draw(np.random.default_rng(seed), rows), problem)
        weight = np.ones(len(y_new))
        true = [problem.constraint_values(problem.observed(r.decide(p_new), y_new, weight)) for r in rules]
        broken = [min(v - c.value for v, c in zip(t, problem.constraints, strict=True)) < -0.003 for t in true]
        for again in range(tests):
            found = certify_in_turn(rules, *draw(np.random.default_rng([seed, again]), rows), problem, 0.1)
            certified += any(one.holds for one in found)
            wrong += any(one.holds and missed for one, missed in zip(found, broken, strict=True))
    return wrong / searches / tests, certified / searches / tests


CANDIDATE_FORMS = [
    (draw_three, "precision", "recall >= 0.6", {}),  # macro
    (draw_three, "f1", ["recall[2] >= 0.7", "recall[0] >= 0.5"], {}),
    (draw_three, "recall", "accuracy >= 0.6", {}),
    (draw_three, "recall", "precision >= 0.65", {"average": "micro"}),
    (draw_three, "recall", "f1 >= 0.5", {}),
    (draw_labels, "precision", "recall >= 0.8", {"task": "multilabel"}),
    (draw_labels, "precision", "recall >= 0.8", {"task": "multilabel", "average": "micro"}),
    (draw_labels, "recall", ["precision[0] >= 0.6", "precision[1] >= 0.6"], {"task": "multilabel"}),
]


def problem_of(draw, metric, subject_to, options):
    task = options.get("task", "multiclass")
    return Problem.of(metric, np.full((1, 3), 1 / 3), task, options.get("average"), None, subject_to)


def test_certified_constraints_of_three_classes():
    problem = problem_of(*CANDIDATE_FORMS[0])
    wrong, certified = violations_of_candidates(draw_three, problem, 2, 50, 500)
    assert wrong <= binom.ppf(0.999, 100, 0.1) / 100
    assert certified > 0.5


@pytest.mark.slow
@pytest.mark.parametrize(("draw", "metric", "subject_to", "options"), CANDIDATE_FORMS)
def test_certified_constraints_of_candidates_in_a_thousand_repetitions(draw, metric, subject_to, options):
    wrong, certified = violations_of_candidates(
        draw, problem_of(draw, metric, subject_to, options), 10, 100, 800 if draw is draw_three else 2000
    )
    assert wrong <= 0.1 + 3 * np.sqrt(0.1 * 0.9 / 1000)
    assert certified > 0.2


@pytest.mark.parametrize("average", ["macro", "micro"])
def test_certified_constraints_of_labels(average):
    rng = np.random.default_rng(0)
    p = rng.beta(0.5, 1.0, size=(3000, 3))
    y = (rng.random(p.shape) < p).astype(int)
    options = {"task": "multilabel", "average": average}
    rule = calibrated(p, y, "precision", subject_to="recall >= 0.8", confidence=0.9, **options)
    plain = calibrated(p, y, "precision", subject_to="recall >= 0.8", **options)
    reached = recall_score(y, rule.predict(p), average=average)
    assert rule.feasible
    assert rule.reached[0] == pytest.approx(reached)
    assert reached > rule.bounds[0] >= 0.8
    assert rule.value < plain.value
    one = calibrated(p, y, "precision", subject_to="recall[2] >= 0.9", confidence=0.9, **options)
    assert recall_score(y, one.predict(p), average=None)[2] > one.bounds[0] >= 0.9


def test_constraints_of_single_labels_are_as_tight_as_those_of_two_classes():
    p, y = draw_labels(np.random.default_rng(0), 500)
    rule = calibrated(p, y, "f1", task="multilabel", subject_to="recall[1] >= 0.8", confidence=0.9)
    positives, found = y[:, 1].sum(), (rule.predict(p) * y)[:, 1].sum()
    assert rule.feasible
    assert rule.bounds[0] == pytest.approx(beta.ppf(0.1, found, positives - found + 1))  # Clopper-Pearson
    assert rule.bounds[0] >= 0.8 > beta.ppf(0.1, found - 1, positives - found + 2)
    free = calibrated(p, y, "f1", task="multilabel")
    assert (rule.predict(p) == free.predict(p))[:, [0, 2]].mean() > 0.95
    with pytest.warns(UserWarning, match="no decision meets"):
        missed = calibrated(
            p, y, "f1", task="multilabel", subject_to=["recall[0] >= 0.8", "precision[0] >= 0.9"], confidence=0.9
        )
    assert not missed.feasible
    assert missed.bounds[0] < 0.8 or missed.bounds[1] < 0.9


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:no decision meets")
@pytest.mark.parametrize(
    ("subject_to", "least"),
    [(["recall[0] >= 0.8", "flagged[1] <= 30%"], 20), (["precision[0] >= 0.6", "precision[1] >= 0.6"], 0)],
)
def test_certified_constraints_of_single_labels_in_a_thousand_repetitions(subject_to, least):
    """Of p ~ beta(1/2, 1) and y ~ p, with mean 1/3, the positives have p ~ beta(3/2, 1)."""
    problem = Problem.of("f1", np.zeros((1, 3)), "multilabel", None, None, subject_to)
    wrong = certified = 0
    for seed in range(1000):
        rule = certified_rule(*draw_labels(np.random.default_rng(seed), 200), problem, 0.9)
        t = np.array(rule.thresholds)
        recall, flagged = beta.sf(t, 1.5, 1), beta.sf(t, 0.5, 1)
        precision = recall / 3 / np.maximum(flagged, 1e-300)
        met = recall[0] >= 0.8 and flagged[1] <= 0.3 if least else precision[:2].min() >= 0.6
        certified += rule.feasible
        wrong += rule.feasible and not met
    assert certified > 700
    assert least <= wrong < 100 + 3 * np.sqrt(1000 * 0.1 * 0.9)


def test_bounds_of_means_and_f_scores_come_from_precisions_and_recalls():
    rng = np.random.default_rng(0)
    y, d = rng.integers(3, size=500), rng.integers(3, size=500)
    d = np.where(rng.random(500) < 0.7, y, d)

    def bound(text, **options):
        problem = Problem.of("f1", np.full((1, 3), 1 / 3), "multiclass", options.get("average"), None, text)
        return certify_decisions(problem, d, y, 0.1).bounds[0]

    def exact(k, n, alpha):
        return binomtest(int(k), int(n)).proportion_ci(1 - 2 * alpha, method="exact").low

    recalls = [exact(((y == k) & (d == k)).sum(), (y == k).sum(), 0.1 / 3) for k in range(3)]
    assert bound("recall >= 0.5") == pytest.approx(np.mean(recalls))
    assert bound("balanced_accuracy >= 0.5") == pytest.approx(np.mean(recalls))
    assert bound("gmean >= 0.5") == pytest.approx(np.prod(recalls) ** (1 / 3))
    assert bound("recall[1] >= 0.5") == pytest.approx(exact(((y == 1) & (d == 1)).sum(), (y == 1).sum(), 0.1))
    assert bound("accuracy >= 0.5") == pytest.approx(exact((y == d).sum(), 500, 0.1))
    assert bound("recall >= 0.5", average="micro") == pytest.approx(exact((y == d).sum(), 500, 0.1))
    hits = ((y == 2) & (d == 2)).sum()
    precision, recall = exact(hits, (d == 2).sum(), 0.05), exact(hits, (y == 2).sum(), 0.05)
    assert bound("f1[2] >= 0.5") == pytest.approx(2 * precision * recall / (precision + recall))
    assert bound("f1[2] >= 0.5") < f1_score(y, d, average=None)[2]
    two = Problem.of("f1", np.full((1, 3), 1 / 3), "multiclass", None, None, ["recall[0] >= 0.5", "recall[1] >= 0.5"])
    assert certify_decisions(two, d, y, 0.1).bounds[0] == pytest.approx(
        exact(((y == 0) & (d == 0)).sum(), (y == 0).sum(), 0.05)  # Bonferroni
    )
    assert isinstance(CertifiedProblem.at(two, 0.1).constraints, tuple)


def test_infeasible_certificates_name_the_nearest_value():
    rng = np.random.default_rng(0)
    p, y = draw(rng, 100)
    positives = int(y.sum())
    best = 0.1 ** (1 / positives)  # the bound of recall 1
    with pytest.warns(
        UserWarning,
        match=rf"recall >= 0.999 with confidence 0.9; nearest feasible: recall >= {floor(best * 1e4) / 1e4}",
    ):
        rule = tuned(p, y, "precision", subject_to="recall >= 0.999", confidence=0.9)
    assert not rule.feasible
    assert rule.bounds[0] == pytest.approx(best)
    assert rule.confidence == 0.9


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"subject_to": "mcc >= 0.5", "confidence": 0.9}, "no exact bound"),
        ({"subject_to": "recall >= 0.5", "confidence": 0.9, "average": "weighted"}, "no exact bound"),
        ({"confidence": 0.9}, "confidence requires subject_to"),
        ({"subject_to": "recall >= 0.5", "confidence": 1.5}, "confidence"),
        ({"subject_to": "recall >= 0.5", "confidence": 0.9, "sample_weight": np.arange(1, 101)}, "equal weight"),
        ({"subject_to": ["flagged <= 20", "recall >= 0.5"], "confidence": 0.9}, "holds in every call"),
    ],
)
def test_errors(options, message):
    p, y = draw(np.random.default_rng(0), 100)
    with pytest.raises(ValueError, match=message):
        calibrated(p, y, "f1", **options)


def test_precision_is_certified_from_the_first_rank_that_can():
    """The 50 highest of 800 rows are positive. At a sixteenth of the level 49 rows are the fewest that certify 0.9."""
    p = np.concatenate([np.linspace(0.9, 0.99, 50), np.linspace(0.01, 0.5, 750)])
    y = np.concatenate([np.ones(50), np.arange(750) % 40 == 0]).astype(int)
    assert (0.1 / 16) ** (1 / 48) < 0.9 < (0.1 / 16) ** (1 / 49)
    rule = calibrated(p, y, "recall", subject_to="precision >= 0.9", confidence=0.9)
    assert rule.feasible
    assert rule.predict(p).sum() == 49
    assert rule.bounds[0] == pytest.approx(0.05 ** (1 / 49))  # Clopper-Pearson of 49 in 49, at half the level
