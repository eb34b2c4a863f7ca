"""Decision rules against brute force over all decisions, closed forms, scikit-learn's scores and simulations."""

import itertools
import json
import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog
from sklearn.metrics import f1_score, matthews_corrcoef, precision_score, recall_score

from evalign import metrics
from evalign.confusion import Confusion
from evalign.decision import Constraint, Rule, calibrated, expected_confusion, parse_constraint, plug_in, tuned

RATIOS = ["f1", "fbeta", "jaccard", "mcc", "cohen_kappa", "balanced_accuracy", "gmean", "accuracy"]


def expected(metric, p, decisions, **options):
    c = expected_confusion(p, decisions, task=options.pop("task", "multiclass"))
    return float(metrics.resolve(metric, **options)(c))


def draw_labels(p, rng):
    return (p.cumsum(axis=1) > rng.random((len(p), 1))).argmax(axis=1)


def softmax(z):
    e = np.exp(z - z.max(axis=1, keepdims=True))
    return e / e.sum(axis=1, keepdims=True)


# plug_in: two classes


@pytest.mark.parametrize("metric", RATIOS)
@pytest.mark.parametrize("seed", range(4))
def test_two_classes_reach_the_best_of_all_decisions(metric, seed):
    p = np.random.default_rng(seed).beta(0.7, 1.5, size=8)
    options = {"average": "binary", "beta": 2.0 if metric == "fbeta" else None}
    best = max(expected(metric, p, np.array(d), **options) for d in itertools.product((0, 1), repeat=8))
    rule = plug_in(p, metric, beta=options["beta"])
    assert rule.value == pytest.approx(best, abs=1e-12)
    assert expected(metric, p, rule.predict(p), **options) == pytest.approx(best, abs=1e-12)


@given(st.integers(0, 10**6), st.floats(0.2, 3.0), st.floats(0.5, 8.0))
@settings(max_examples=25, deadline=None)
def test_f1_threshold_is_half_the_best_f1(seed, a, b):
    p = np.random.default_rng(seed).beta(a, b, size=3000)
    rule = plug_in(p, "f1")
    assert rule.threshold == pytest.approx(rule.value / 2, abs=1e-12)


def test_f1_threshold_is_half_the_best_f1_of_drawn_labels():
    rng = np.random.default_rng(0)
    p = rng.beta(0.5, 3.0, size=200_000)
    y = (rng.random(len(p)) < p).astype(int)
    rule = plug_in(p, "f1")
    best = tuned(p, y, "f1", guard=False)
    assert rule.threshold == pytest.approx(best.value / 2, abs=2e-3)
    assert f1_score(y, rule.predict(p)) == pytest.approx(best.value, abs=1e-3)


def test_threshold_of_accuracy_is_one_half():
    assert plug_in([0.1, 0.2, 0.4], "accuracy").threshold == pytest.approx(0.5)
    assert plug_in([0.1, 0.6, 0.9], "accuracy").threshold == pytest.approx(0.5)


def test_threshold_of_balanced_accuracy_is_the_prior():
    p = np.random.default_rng(1).beta(1.0, 6.0, size=5000)
    assert plug_in(p, "balanced_accuracy").threshold == pytest.approx(p.mean(), abs=1e-9)


# plug_in: several classes


def is_linear(p, decisions):
    """Whether some gain matrix makes these decisions: a linear programme with margin 1."""
    n, size = p.shape
    rows = []
    for i, k in itertools.product(range(n), range(size)):
        if k != decisions[i]:
            row = np.zeros((size, size))
            row[:, k], row[:, decisions[i]] = p[i], -p[i]
            rows.append(row.ravel())
    return linprog(np.zeros(size**2), A_ub=np.array(rows), b_ub=-np.ones(len(rows)), bounds=(None, None)).status == 0


@pytest.mark.parametrize(
    "metric", ["f1", "jaccard", "mcc", "gmean", "balanced_accuracy", "cohen_kappa", "quadratic_kappa"]
)
@pytest.mark.parametrize("seed", range(3, 9))
def test_three_classes_reach_the_best_gain_matrix(metric, seed):
    rng = np.random.default_rng(seed)
    p = rng.dirichlet(np.full(3, rng.choice([0.3, 1.0, 3.0])), size=5)
    decisions = np.array(list(itertools.product(range(3), repeat=5)))
    values = np.array([expected(metric, p, d, average="macro") for d in decisions])
    best = next(values[k] for k in np.argsort(-values, kind="stable") if is_linear(p, decisions[k]))
    rule = plug_in(p, metric)
    assert rule.value >= best - 1e-9
    assert expected(metric, p, rule.predict(p), average="macro") == pytest.approx(rule.value, abs=1e-12)


def test_accuracy_is_argmax():
    p = np.random.default_rng(0).dirichlet(np.ones(4), size=200)
    assert (plug_in(p, "accuracy").predict(p) == p.argmax(axis=1)).all()


def test_balanced_accuracy_divides_by_the_prior():
    p = np.random.default_rng(0).dirichlet([5.0, 2.0, 0.5], size=400)
    assert (plug_in(p, "balanced_accuracy").predict(p) == (p / p.mean(axis=0)).argmax(axis=1)).all()


def test_cost_matrix_minimises_expected_cost():
    cost = np.array([[0.0, 1.0, 4.0], [2.0, 0.0, 1.0], [9.0, 3.0, 0.0]])
    p = np.random.default_rng(0).dirichlet(np.ones(3), size=300)
    rule = plug_in(p, lambda c: -(torch.as_tensor(cost) * c.matrix).sum((-2, -1)) / c.total)
    assert rule.kind == "gain"
    assert (rule.predict(p) == (p @ cost).argmin(axis=1)).all()


def test_function_of_one_class():
    p = np.random.default_rng(0).dirichlet(np.ones(3), size=50)
    assert (plug_in(p, lambda c: c.tp[2] / c.actual[2]).predict(p) == 2).all()


def test_function_with_branches_falls_back_to_a_loop():
    def f1(c):
        return 2 * c.tp[1] / (c.actual[1] + c.predicted[1]) if c.predicted[1].item() > 0 else c.tp[1] * 0

    p = np.random.default_rng(0).beta(0.5, 2.0, size=4000)
    assert plug_in(p, f1).value == pytest.approx(plug_in(p, "f1").value, abs=1e-4)


def test_gmean_escapes_from_classes_that_argmax_never_decides():
    rng = np.random.default_rng(0)
    p = np.column_stack([rng.dirichlet([2.0, 1.0], size=500) * 0.6, rng.dirichlet([1.0, 1.0], size=500) * 0.4])
    p = 0.5 * p + 0.5 * np.eye(4)[(p[:, 1] > p[:, 0]).astype(int)]
    assert set(p.argmax(axis=1)) == {0, 1}
    assert expected("gmean", p, p.argmax(axis=1)) == 0
    assert plug_in(p, "gmean").value > 0.3


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_never_worse_than_argmax(data):
    size = data.draw(st.integers(2, 4))
    n = data.draw(st.integers(1, 12))
    grid = st.lists(st.integers(0, 4), min_size=size, max_size=size).filter(any)  # a grid, so that ties happen
    p = np.array([data.draw(grid) for _ in range(n)], dtype=float)
    p /= p.sum(axis=1, keepdims=True)
    metric = data.draw(st.sampled_from(sorted(set(metrics.METRICS) - {"fbeta"})))
    average = data.draw(st.sampled_from(["macro", "micro", "weighted"]))
    rule = plug_in(p, metric, average=average)
    reached = expected(metric, p, rule.predict(p), average=average)
    assert reached == pytest.approx(rule.value, abs=1e-9)
    assert reached >= expected(metric, p, p.argmax(axis=1), average=average) - 1e-9


@pytest.mark.parametrize("weight", [None, np.full(100, 1e-3), np.full(100, 5.0)])
def test_class_expected_in_hardly_a_row_is_left_out(weight):
    rng = np.random.default_rng(0)
    p = rng.dirichlet([5.0, 2.0], size=100)
    spread = rng.exponential(size=100) ** 2
    for rows, kept in ((0.0, False), (0.005, False), (0.4, True)):
        third = spread / spread.sum() * rows
        q = np.column_stack([p * (1 - third[:, None]), third])
        decided = plug_in(q, "balanced_accuracy", sample_weight=weight).predict(q)
        assert (decided == 2).any() == kept
        if not kept:
            assert (decided == (p / p.mean(axis=0)).argmax(axis=1)).mean() > 0.98


@pytest.mark.parametrize("p", [[[0.2, 0.5, 0.3]], [[0.25, 0.25, 0.5]] * 5, np.eye(3), [[1.0, 0.0, 0.0]] * 4])
@pytest.mark.parametrize("metric", ["f1", "mcc", "gmean", "quadratic_kappa"])
def test_degenerate_probabilities(p, metric):
    decided = plug_in(p, metric).predict(p)
    assert ((decided >= 0) & (decided < 3)).all()


def test_weights_are_repeated_rows():
    rng = np.random.default_rng(0)
    for size in (2, 4):
        p, times = rng.dirichlet(np.ones(size), size=60), rng.integers(0, 4, size=60)
        weighted, repeated = plug_in(p, "f1", sample_weight=times), plug_in(p.repeat(times, axis=0), "f1")
        assert (weighted.predict(p) == repeated.predict(p)).all()
        assert weighted.value == pytest.approx(repeated.value, abs=1e-12)


def test_margin_keeps_argmax():
    p = np.random.default_rng(0).dirichlet(np.ones(3), size=300)
    assert plug_in(p, "f1").kind == "affine"
    assert plug_in(p, "f1", margin=0.5).kind == "argmax"
    assert plug_in(p[:, :2] / p[:, :2].sum(axis=1, keepdims=True), "f1", margin=0.5).kind == "argmax"


# tuned


@pytest.mark.parametrize("score", [f1_score, matthews_corrcoef])
@pytest.mark.parametrize("seed", range(5))
def test_unguarded_threshold_is_the_best_of_all_cut_points(score, seed):
    rng = np.random.default_rng(seed)
    p = rng.integers(0, 21, size=80) / 20  # a grid, so that ties happen
    y = (rng.random(80) < p).astype(int)
    best = max(score(y, (p >= t).astype(int)) for t in [*np.unique(p), 2.0])
    rule = tuned(p, y, {"f1_score": "f1", "matthews_corrcoef": "mcc"}[score.__name__], guard=False)
    assert rule.value == pytest.approx(best, abs=1e-12)
    assert score(y, rule.predict(p)) == pytest.approx(best, abs=1e-12)
    assert not np.isin(rule.threshold, p)  # halfway between neighbours


def test_unguarded_offsets_cannot_be_bettered_one_at_a_time():
    rng = np.random.default_rng(0)
    p = rng.dirichlet([4.0, 2.0, 1.0], size=150)
    y = draw_labels(p, rng)
    rule = tuned(p, y, "f1", guard=False)
    assert rule.kind == "offsets"
    assert f1_score(y, rule.predict(p), average="macro") == pytest.approx(rule.value)
    assert rule.value > f1_score(y, p.argmax(axis=1), average="macro")
    z = np.log(p) + np.array(rule.offsets)
    for j, shift in itertools.product(range(3), np.linspace(-3, 3, 121)):
        moved = z + shift * np.eye(3)[j]
        assert f1_score(y, moved.argmax(axis=1), average="macro") <= rule.value + 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("distort", ["calibrated", "overconfident", "reweighted"])
def test_guard_on_small_binary_sets_beats_the_raw_optimum_and_argmax(distort):
    """60 labels, 60 draws: on average the guarded rule is not worse than argmax, and better than the best cut."""
    scores = {"argmax": [], "raw": [], "guarded": []}
    for seed in range(60):
        rng = np.random.default_rng(seed)
        z = rng.normal(-2.0, 2.0, size=6060)
        y = (rng.random(len(z)) < 1 / (1 + np.exp(-z))).astype(int)
        p = 1 / (1 + np.exp(-{"calibrated": z, "overconfident": 3 * z, "reweighted": z + 2}[distort]))
        rules = {
            "argmax": Rule("threshold", 2, threshold=0.5),
            "raw": tuned(p[:60], y[:60], "f1", guard=False),
            "guarded": tuned(p[:60], y[:60], "f1"),
        }
        for name, rule in rules.items():
            scores[name].append(f1_score(y[60:], rule.predict(p[60:])))
    mean = {name: np.mean(values) for name, values in scores.items()}
    assert mean["guarded"] > mean["raw"] + 0.003
    assert mean["guarded"] > mean["argmax"] - 0.002


@pytest.mark.slow
@pytest.mark.parametrize("distort", ["calibrated", "reweighted"])
def test_guard_on_small_multiclass_sets_beats_the_raw_optimum_and_argmax(distort):
    scores = {"argmax": [], "raw": [], "guarded": []}
    shift = np.array([3.0, 2.0, 1.0, 0.0])
    for seed in range(15):
        rng = np.random.default_rng(seed)
        z = rng.normal(size=(3120, 4)) * 1.5 + shift
        y = draw_labels(softmax(z), rng)
        p = softmax(z if distort == "calibrated" else z - shift)
        rules = {
            "argmax": Rule("argmax", 4),
            "raw": tuned(p[:120], y[:120], "f1", guard=False),
            "guarded": tuned(p[:120], y[:120], "f1"),
        }
        for name, rule in rules.items():
            scores[name].append(f1_score(y[120:], rule.predict(p[120:]), average="macro"))
    mean = {name: np.mean(values) for name, values in scores.items()}
    assert mean["guarded"] > mean["raw"] + 0.003
    assert mean["guarded"] > mean["argmax"] - 0.002


def test_many_labels_overrule_a_calibration_that_does_not_fit():
    """Probabilities that no slope and offset can correct."""
    rng = np.random.default_rng(0)
    truth = rng.beta(0.5, 3.0, size=20_000)
    y = (rng.random(len(truth)) < truth).astype(int)
    p = np.where(truth > 0.35, 0.9 + truth / 20, truth / 40)  # a step that a logistic curve cannot follow
    best, guarded = tuned(p, y, "f1", guard=False), tuned(p, y, "f1")
    assert guarded.value > best.value - 0.01

    z = rng.normal(size=(6000, 3)) * 2
    target = softmax(z).argmax(axis=1)
    q = softmax(z + np.array([0.0, 0.0, 2.5]) * (z[:, 2:] > 0))  # overstated where it is high, honest elsewhere
    raw, guarded = tuned(q, target, "f1", guard=False), tuned(q, target, "f1")
    assert raw.value > f1_score(target, q.argmax(axis=1), average="macro") + 0.02
    assert guarded.value > raw.value - 0.01


def test_row_order_does_not_matter():
    rng = np.random.default_rng(0)
    for size in (2, 3):
        p = rng.dirichlet(np.ones(size), size=90)
        y, order = draw_labels(p, rng), rng.permutation(90)
        for learn in (lambda p, y: plug_in(p, "f1"), lambda p, y: tuned(p, y, "f1")):
            assert (learn(p, y).predict(p) == learn(p[order], y[order]).predict(p)).all()
    p = rng.integers(1, 8, size=90) / 8  # ties
    y = (rng.random(90) < p).astype(int)
    assert tuned(p, y, "f1").threshold == tuned(p[order], y[order], "f1").threshold


# Constraints


@pytest.mark.parametrize(("metric", "other"), [("recall", "precision"), ("precision", "recall")])
@pytest.mark.parametrize("floor", [0.3, 0.6, 0.9])
def test_constraints_of_two_classes_against_all_cuts(metric, other, floor):
    rng = np.random.default_rng(0)
    p = rng.beta(0.4, 1.2, size=150)
    y = (rng.random(150) < p).astype(int)
    score = {"recall": recall_score, "precision": precision_score}
    cuts = [(p >= t).astype(int) for t in np.unique(p)]

    best = max(expected(metric, p, d, average="binary") for d in cuts if score[other](y, d) >= floor)
    rule = plug_in(p, metric, subject_to=f"{other} >= {floor}", target=y)
    assert rule.feasible
    assert rule.value == pytest.approx(best, abs=1e-12)
    assert rule.reached[0] == pytest.approx(score[other](y, rule.predict(p)))
    assert rule.reached[0] >= floor - 1e-9

    best = max(score[metric](y, d) for d in cuts if score[other](y, d) >= floor)
    raw = tuned(p, y, metric, subject_to=f"{other}>={floor}", guard=False)
    assert raw.value == pytest.approx(best, abs=1e-12)
    for rule in (raw, tuned(p, y, metric, subject_to=f"{other}>={floor}")):
        assert rule.feasible
        assert score[other](y, rule.predict(p)) >= floor - 1e-9
        assert rule.value > best - 0.1


@pytest.mark.parametrize(
    ("metric", "subject_to", "check"),
    [
        ("precision", "recall >= 0.6", lambda y, d: recall_score(y, d, average="macro") >= 0.6 - 1e-9),
        ("recall", "precision >= 0.75", lambda y, d: precision_score(y, d, average="macro") >= 0.75 - 1e-9),
        ("f1", ["recall[2] >= 0.8", "recall[0] >= 0.5"],
         lambda y, d: (recall_score(y, d, average=None)[[2, 0]] >= [0.8 - 1e-9, 0.5 - 1e-9]).all()),
        ("f1", ("recall", "<=", 0.5), lambda y, d: recall_score(y, d, average="macro") <= 0.5 + 1e-9),
        ("accuracy", (lambda c: c.predicted[2] / c.total, ">=", 0.3), lambda y, d: np.mean(d == 2) >= 0.3 - 1e-9),
    ],
)  # fmt: skip
@pytest.mark.parametrize("form", ["plug_in", "tuned", "unguarded"])
def test_constraints_of_three_classes(metric, subject_to, check, form):
    rng = np.random.default_rng(3)
    p = softmax(rng.normal(size=(400, 3)) * 2 + np.array([1.5, 0.5, 0.0]))
    y = draw_labels(p, rng)
    if form == "plug_in":
        rule = plug_in(p, metric, subject_to=subject_to, target=y)
    else:
        rule = tuned(p, y, metric, subject_to=subject_to, guard=form == "tuned")
    assert check(y, rule.predict(p))
    assert rule.feasible


@pytest.mark.parametrize(
    ("metric", "subject_to"),
    [
        ("precision", "recall >= 0.6"),
        ("f1", ["recall[1] >= 0.8", "recall[2] >= 0.8"]),
        ("recall", [("precision", ">=", 0.5), (lambda c: c.predicted[0] / c.total, "<=", 0.1)]),
    ],
)
def test_constrained_value_is_near_the_best_found_by_chance(metric, subject_to):
    rng = np.random.default_rng(19)
    p = softmax(rng.normal(size=(300, 4)) * 2 + np.array([1.0, 0.5, 0.0, 0.0]))
    y = draw_labels(p, rng)
    rule = plug_in(p, metric, subject_to=subject_to, target=y)
    limits = [parse_constraint(c) for c in (subject_to if isinstance(subject_to, list) else [subject_to])]
    best = 0.0
    for _ in range(4000):
        decided = (p * np.exp(rng.normal(size=4)) + rng.normal(size=4) * 0.2).argmax(axis=1)
        c = Confusion.hard(torch.from_numpy(decided), torch.from_numpy(y), 4)
        reached = [float(limit.resolve(average="macro", beta=None)(c)) for limit in limits]
        if all(r >= x.value if x.op == ">=" else r <= x.value for r, x in zip(reached, limits, strict=True)):
            best = max(best, float(metrics.resolve(metric)(expected_confusion(p, decided))))
    assert rule.feasible
    assert best > 0
    assert rule.value > best - 0.005


def test_constraints_count_ties_as_one():
    rule = tuned([0.5] * 10, [0, 1] * 5, "precision", subject_to="recall <= 0.5", guard=False)
    assert rule.feasible
    assert rule.predict([0.5]).tolist() == [0]


def test_infeasible_constraints_warn_and_come_closest():
    p = np.random.default_rng(0).uniform(0.1, 0.3, size=50)
    y = np.arange(50) % 5 == 0
    best = max(precision_score(y, p >= t) for t in p)
    with pytest.warns(
        UserWarning, match=rf"meets precision >= 0.9; nearest feasible: precision >= {best:.4g} \(feasib"
    ):
        rule = plug_in(p, "recall", subject_to="precision >= 0.9", target=y)
    assert not rule.feasible
    assert precision_score(y, rule.predict(p)) == best
    with pytest.warns(UserWarning, match="no decision meets"):
        assert not tuned(p, y, "recall", subject_to=("precision", ">=", 0.99)).feasible
    q = np.random.default_rng(0).dirichlet(np.ones(3), size=60)
    with pytest.warns(UserWarning, match="no decision meets"):
        assert not tuned(q, np.arange(60) % 3, "f1", subject_to="accuracy >= 0.95").feasible


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("recal >= 0.9", ValueError, "did you mean 'recall'"),
        ("sensitivity >= 0.9", ValueError, "did you mean 'recall'"),
        ("recall > 0.9", ValueError, "did you mean '>='"),
        ("recall < 0.9", ValueError, "did you mean '<='"),
        ("recall == 0.9", ValueError, "compares with >= or <="),
        ("recall >= high", ValueError, "must end in a number"),
        ("0.9 <= recall", ValueError, "must look like"),
        ("recall", ValueError, "must look like"),
        ("mcc[1] >= 0.5", ValueError, "no score per class"),
        ("precision >= 2", ValueError, "lies between 0 and 1"),
        (("recall", ">=", 90), ValueError, "write 90 % as 0.9 or 90%"),
        ("flagged >= 200", ValueError, "'flagged <= 200'"),
        ("flagged <= 2.5", ValueError, "'flagged <= 200'"),
        (("recall", ">="), TypeError, "a string like"),
        (0.9, TypeError, "a string like"),
    ],
)
def test_constraint_errors(text, error, message):
    with pytest.raises(error, match=message):
        parse_constraint(text)
    with pytest.raises((ValueError, TypeError)):
        tuned([0.1, 0.9], [0, 1], "f1", subject_to=text)


def test_constraints_parse():
    assert parse_constraint(" recall>=0.9 ") == Constraint("recall", ">=", 0.9)
    assert parse_constraint("recall [ 2 ] <= 1e-1") == Constraint("recall", "<=", 0.1, 2)
    assert parse_constraint("recall['two\nlines'] >= 0.9") == Constraint("recall", ">=", 0.9, "two\nlines")
    for wrong in ({"recall": 0.9}, b"recall >= 0.9"):
        with pytest.raises(TypeError, match="subject_to must be a constraint"):
            tuned([0.1, 0.9], [0, 1], "f1", subject_to=wrong)
    with pytest.raises(ValueError, match="names class 7, but the classes are 0 to 1"):
        plug_in([0.1, 0.9], "f1", subject_to="recall[7] >= 0.5")


# Multilabel


def test_multilabel_mean_is_one_threshold_a_label():
    rng = np.random.default_rng(0)
    p = rng.beta(0.5, 2.0, size=(300, 4)) * np.array([1.0, 0.8, 0.6, 0.3])
    y = (rng.random(p.shape) < p).astype(int)
    rule = plug_in(p, "f1", task="multilabel")
    assert rule.thresholds == tuple(plug_in(p[:, k], "f1").threshold for k in range(4))
    raw = tuned(p, y, "f1", task="multilabel", guard=False)
    assert raw.value == pytest.approx(f1_score(y, raw.predict(p), average="macro"))
    assert raw.thresholds == tuple(tuned(p[:, k], y[:, k], "f1", guard=False).threshold for k in range(4))
    per_label = plug_in(p, "fbeta", beta=[0.5, 1.0, 2.0, 4.0], task="multilabel")
    assert per_label.thresholds[1] == rule.thresholds[1]
    assert per_label.thresholds[3] < rule.thresholds[3]


@pytest.mark.parametrize("metric", ["f1", "mcc", lambda c: c.tp.sum() / (c.actual + c.predicted).sum()])
def test_multilabel_reaches_the_best_of_all_thresholds(metric):
    p = np.random.default_rng(1).beta(0.8, 1.5, size=(6, 3))
    cuts = [[*column, 2.0] for column in p.T]
    average = "micro" if metric == "f1" else "macro"
    best = max(
        expected(metric, p, (p >= np.array(t)).astype(int), task="multilabel", average=average)
        for t in itertools.product(*cuts)
    )
    rule = plug_in(p, metric, task="multilabel", average=average)
    assert rule.value == pytest.approx(best, abs=1e-12)


def test_multilabel_micro_f1_cuts_all_labels_at_half_the_best_f1():
    p = np.random.default_rng(0).beta(0.5, 2.0, size=(500, 5)) * np.linspace(0.3, 1.0, 5)
    rule = plug_in(p, "f1", task="multilabel", average="micro")
    assert (rule.predict(p) == (p >= rule.value / 2)).all()


@pytest.mark.parametrize("form", ["plug_in", "tuned", "unguarded"])
def test_multilabel_constraints(form):
    rng = np.random.default_rng(0)
    p = rng.beta(0.5, 1.0, size=(400, 3))
    y = (rng.random(p.shape) < p).astype(int)
    if form == "plug_in":
        rule = plug_in(p, "recall", task="multilabel", subject_to="precision >= 0.8", target=y)
    else:
        rule = tuned(p, y, "recall", task="multilabel", subject_to="precision >= 0.8", guard=form == "tuned")
    reached = precision_score(y, rule.predict(p), average="macro")
    assert rule.feasible
    assert reached >= 0.8 - 1e-9
    assert rule.value > 0.5


def test_multilabel_guard():
    raw, guarded = [], []
    for seed in range(30):
        rng = np.random.default_rng(seed)
        p = rng.beta(0.5, 3.0, size=(2060, 3))
        y = (rng.random(p.shape) < p).astype(int)
        for scores, guard in ((raw, False), (guarded, True)):
            rule = tuned(p[:60], y[:60], "f1", task="multilabel", guard=guard)
            scores.append(f1_score(y[60:], rule.predict(p[60:]), average="macro"))
    assert np.mean(guarded) > np.mean(raw) + 0.003


# Rules

RULES = [
    Rule("argmax", 3),
    Rule("threshold", 2, threshold=0.25, temperature=1.5, metric="f1", value=0.5),
    Rule("thresholds", 2, thresholds=(0.25, 0.75), temperature=2.0),
    Rule("offsets", 3, offsets=(0.0, 0.5, 1.0)),
    Rule("affine", 3, weights=(1.0, 2.0, 3.0), biases=(0.0, 0.1, -0.1), offsets=(0.1, 0.0, 0.0), feasible=False),
    Rule("gain", 3, gain=((1.0, 0.0, 0.0), (0.0, 2.0, 0.0), (0.0, 0.0, 3.0)), temperature=0.7, floor=0.01),
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.kind)
def test_json_round_trip(rule):
    back = Rule.from_json(json.loads(json.dumps(rule.to_json())))
    assert back == rule
    assert hash(back) == hash(rule)
    p = np.random.default_rng(0).dirichlet(np.ones(rule.columns), size=50)
    assert (back.predict(p) == rule.predict(p)).all()
    assert repr(rule).startswith(f"Rule('{rule.kind}', {rule.columns}")


def test_learned_rules_survive_json():
    rng = np.random.default_rng(0)
    p = rng.dirichlet(np.ones(3), size=80)
    y = draw_labels(p, rng)
    for rule in (plug_in(p, "f1"), plug_in(p, "quadratic_kappa"), tuned(p, y, "f1"), tuned(p, y, "f1", guard=False)):
        assert Rule.from_json(json.loads(json.dumps(rule.to_json()))) == rule


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 1}, "version 2 was expected, got 1"),
        ({"kind": "eval"}, "kind of a rule must be one of"),
        ({"kind": 3}, "kind of a rule must be a str"),
        ({"columns": 3}, "needs 2 columns"),
        ({"columns": "2"}, "whole number"),
        ({"columns": -1}, "whole number"),
        ({"threshold": None}, "finite numbers"),
        ({"threshold": [0.1, 0.2]}, "finite numbers of shape"),
        ({"threshold": float("nan")}, "finite numbers"),
        ({"threshold": "__import__('os')"}, "finite numbers"),
        ({"weights": [0.0, 1.0]}, "has no weights"),
        ({"temperature": 0}, "number above 0"),
        ({"floor": 0.7}, "between 0 and 1/2"),
        ({"feasible": "yes"}, "feasible of a rule must be a bool"),
        ({"surprise": 1}, "unknown entry 'surprise'"),
        ({"at_most": -1}, "at_most"),
    ],
)
def test_json_errors(change, message):
    data = Rule("threshold", 2, threshold=0.3).to_json() | change
    with pytest.raises(ValueError, match=message):
        Rule.from_json(data)


def test_json_of_the_wrong_type():
    with pytest.raises(ValueError, match=r"use json\.loads"):
        Rule.from_json("{}")
    with pytest.raises(ValueError, match="lacks 'kind'"):
        Rule.from_json({"version": 2, "columns": 2})


def test_ties_go_to_the_larger_probability_then_the_lower_index():
    rule = Rule("affine", 3, weights=(0.0, 0.0, 0.0), biases=(0.0, 0.0, 0.0))
    assert rule.predict([[0.2, 0.5, 0.3], [0.4, 0.2, 0.4]]).tolist() == [1, 0]
    assert Rule("threshold", 2, threshold=0.5).predict([0.5]).tolist() == [1]


def test_temperature_of_a_rule():
    p = np.array([[0.6, 0.3, 0.1], [0.2, 0.3, 0.5]])
    rule = Rule("affine", 3, weights=(1.0, 1.0, 1.0), biases=(0.0, 0.2, 0.0), temperature=2.0)
    q = np.sqrt(p) / np.sqrt(p).sum(axis=1, keepdims=True)
    assert (rule.predict(p) == (q + np.array([0.0, 0.2, 0.0])).argmax(axis=1)).all()


def test_inputs_of_other_libraries():
    p = torch.tensor([0.1, 0.4, 0.9], requires_grad=True)
    assert plug_in(p, "f1").predict(p.detach().bfloat16()).tolist() == [0, 1, 1]
    assert tuned(p, torch.tensor([0, 1, 1]), "f1", guard=False).predict([[0.9, 0.1], [0.1, 0.9]]).tolist() == [0, 1]
    assert Rule("argmax", 3).predict(np.zeros((0, 3))).shape == (0,)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: Rule("argmax", 3).predict([[0.5, 0.5]]), ValueError, "needs 3 columns of probabilities, got 2"),
        (lambda: Rule("argmax", 2).predict([[np.nan, 0.5]]), ValueError, r"must lie in \[0, 1\], got nan"),
        (lambda: plug_in([[2.0, -1.0]], "f1"), ValueError, "apply softmax or sigmoid first"),
        (lambda: plug_in([[0.9, 0.9]], "f1"), ValueError, "add up to 1"),
        (lambda: plug_in([["a", "b"]], "f1"), TypeError, "must be numbers"),
        (lambda: plug_in([[0.5], [0.5]], "f1"), ValueError, "C >= 2"),
        (lambda: plug_in(np.zeros((0, 2)), "f1"), ValueError, "at least one row"),
        (lambda: plug_in([[0.2, 0.3, 0.5]], "f1", task="binary"), ValueError, "binary task"),
        (lambda: plug_in([[0.2, 0.3, 0.5]], "f1", average="binary"), ValueError, "needs two classes"),
        (lambda: plug_in([0.5], "f2"), ValueError, "did you mean 'fbeta'"),
        (lambda: plug_in([0.5], "f1", task="multi"), ValueError, "task must be one of"),
        (lambda: plug_in([0.5], "f1", beta=2.0), ValueError, "beta requires metric 'fbeta'"),
        (lambda: plug_in([0.5], "f1", sample_weight=[-1.0]), ValueError, "at least 0"),
        (lambda: plug_in([0.5], "f1", sample_weight=[1.0, 1.0]), ValueError, "sample_weight must have shape"),
        (lambda: plug_in([[0.5, 0.5]], "quadratic_kappa", task="multilabel"), ValueError, "ordered classes"),
        (lambda: plug_in([0.5], lambda c: c.tp), ValueError, "must return one number"),
        (lambda: plug_in(np.eye(3), lambda c: c.tp.detach().sum()), ValueError, "has no gradient"),
        (lambda: tuned([0.5], ["yes"], "f1"), TypeError, "class indices 0 to 1"),
        (lambda: tuned([0.5], [2], "f1"), ValueError, "class indices 0 to 1, got 2"),
        (lambda: tuned([0.5], [1, 0], "f1"), ValueError, "target must have shape"),
        (lambda: calibrated([0.5], [0.5], "f1"), TypeError, "class indices"),
    ],
)
def test_errors_are_one_clear_sentence(call, error, message):
    with pytest.raises(error, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_labels_of_one_class_only():
    for p in (np.array([0.1, 0.4, 0.7]), np.random.default_rng(0).dirichlet(np.ones(3), size=12)):
        y = np.zeros(len(p), dtype=int)
        for guard in (True, False):
            assert len(tuned(p, y, "f1", guard=guard).predict(p)) == len(p)


def test_expected_confusion_is_the_mean_over_drawn_labels():
    rng = np.random.default_rng(0)
    p = rng.dirichlet(np.ones(3), size=40)
    d = p.argmax(axis=1)
    drawn = [Confusion.hard(torch.from_numpy(d), torch.from_numpy(draw_labels(p, rng)), 3).matrix for _ in range(4000)]
    assert torch.allclose(torch.stack(drawn).mean(0), expected_confusion(p, d).matrix, atol=0.25)


def test_import_needs_neither_scikit_learn_nor_pandas():
    code = "import sys, evalign.decision; print([m for m in ('sklearn', 'pandas') if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_no_warning_on_feasible_constraints():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert plug_in([0.1, 0.5, 0.9], "precision", subject_to="recall >= 0.5", target=[0, 1, 1]).feasible
    with pytest.raises(ValueError, match="cannot be checked on probabilities alone"):
        plug_in([0.1, 0.5, 0.9], "precision", subject_to="recall >= 0.5")


@pytest.mark.parametrize("metric", ["f1", "mcc"])
def test_large_arrays_are_searched_from_the_best_rule_of_a_sample(metric, monkeypatch):
    from evalign.decision.search import frank_wolfe

    monkeypatch.setattr(frank_wolfe, "POLISH", 0)
    p = np.random.default_rng(0).dirichlet([6.0, 2.0, 1.0, 0.5, 0.3], size=8000)
    whole = plug_in(p, metric)
    monkeypatch.setattr(frank_wolfe, "LARGE", 2**12)
    monkeypatch.setattr(frank_wolfe, "SAMPLED", 2**12)
    found = plug_in(p, metric)
    assert found != whole  # another path
    assert found.value > whole.value - 2e-4
    assert found.value == pytest.approx(expected(metric, p, found.predict(p), average="macro"))


def test_decisions_do_not_depend_on_the_size_of_blocks(monkeypatch):
    from evalign.decision import rule as module

    rng = np.random.default_rng(1)
    p = rng.multinomial(5, np.ones(4) / 4, size=300) / 5  # with ties
    rules = [Rule("offsets", 4, offsets=(0.0, 0.5, 0.0, -0.5), temperature=1.5, floor=0.01), Rule("argmax", 4)]
    rules.append(Rule("affine", 4, weights=(1.0, 1.0, 2.0, 1.0), biases=(0.0, 0.2, 0.0, 0.0)))
    whole = [rule.predict(p) for rule in rules]
    monkeypatch.setattr(module, "BLOCK", 28)
    for rule, expected_decisions in zip(rules, whole, strict=True):
        np.testing.assert_array_equal(rule.predict(p), expected_decisions)
        scores = rule.scores(p)
        np.testing.assert_array_equal(scores.argmax(axis=1), expected_decisions)
