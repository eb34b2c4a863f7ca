"""Laws of decision rules: monotone transforms, permuted classes, copied rows; brute force over all decisions."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from evalign import metrics
from evalign.confusion import Confusion
from evalign.decision import calibrated, parse_constraint, plug_in, tuned

seeds = st.integers(0, 10**6)


def two_classes(seed, n=60):
    rng = np.random.default_rng(seed)
    p = rng.integers(1, 20, size=n) / 20
    y = (rng.random(n) < p).astype(int)
    y[:2] = 0, 1
    return p, y


def three_classes(seed, n=60):
    rng = np.random.default_rng(seed)
    p = rng.dirichlet([1.0, 0.7, 0.5], size=n)
    return p, np.array([rng.choice(3, p=row) for row in p])


@settings(max_examples=15, deadline=None)
@given(seeds, st.sampled_from(["f1", "mcc", "recall"]))
def test_tuning_two_classes_is_unchanged_by_monotone_transforms(seed, metric):
    p, y = two_classes(seed)
    plain, moved = tuned(p, y, metric, guard=False), tuned(p**3, y, metric, guard=False)
    assert plain.value == moved.value
    a, b = plain.predict(p), moved.predict(p**3)
    assert (a == b).all() or plain.value == pytest.approx(moved.value)  # ties go to the cut nearest to 1/2


@settings(max_examples=4, deadline=None)
@given(seeds, st.sampled_from(["f1", "mcc", "balanced_accuracy"]), st.permutations(range(3)))
def test_permuted_classes_permute_the_decisions(seed, metric, order):
    p, y = three_classes(seed)
    place = np.argsort(order)
    for learn in (lambda p, y: plug_in(p, metric), lambda p, y: calibrated(p, y, metric)):
        value, permuted = learn(p, y), learn(p[:, order], place[y])
        assert value.value == pytest.approx(permuted.value, abs=0.02)
        assert np.mean(place[value.predict(p)] == permuted.predict(p[:, order])) > 0.9


@settings(max_examples=8, deadline=None)
@given(seeds, st.booleans())
def test_copied_rows_are_weights(seed, many):
    p, y = three_classes(seed) if many else two_classes(seed)
    times = np.random.default_rng(seed).integers(1, 4, size=len(y))
    copies, labels = np.repeat(p, times, axis=0), np.repeat(y, times)
    assert plug_in(p, "f1", sample_weight=times).value == pytest.approx(plug_in(copies, "f1").value, abs=1e-9)
    one, two = (
        tuned(*rows, "f1", guard=False, sample_weight=w) for rows, w in (((p, y), times), ((copies, labels), None))
    )
    assert one.value == pytest.approx(two.value, abs=1e-9)
    floor = "recall >= 0.6"
    one = calibrated(p, y, "precision", subject_to=floor, sample_weight=times)
    two = calibrated(copies, labels, "precision", subject_to=floor)
    assert one.reached == pytest.approx(two.reached, abs=1e-6)


CONSTRAINTS = ["recall >= 0.6", "precision >= 0.6", "specificity >= 0.5", "flagged <= 50%", "recall[0] >= 0.4",
               "accuracy >= 0.5", ["recall >= 0.4", "precision >= 0.4"]]  # fmt: skip


def meets(c, limits, average):
    reached = [float(limit.resolve(average=average, beta=None)(c)) for limit in limits]
    return all(
        r >= x.value - 1e-9 if x.op == ">=" else r <= x.value + 1e-9 for r, x in zip(reached, limits, strict=True)
    )


@pytest.mark.parametrize("metric", [m for m in metrics.METRICS if m != "fbeta"])
@pytest.mark.parametrize("subject_to", CONSTRAINTS, ids=str)
def test_two_classes_with_constraints_against_all_decisions(metric, subject_to):
    """On 9 rows the tuned rule is the best of all threshold decisions, and meets the constraints if one does."""
    rng = np.random.default_rng(5)
    p = np.round(rng.random(9), 2)
    y = (rng.random(9) < p).astype(int)
    limits = [parse_constraint(text) for text in (subject_to if isinstance(subject_to, list) else [subject_to])]
    best = -np.inf
    for d in itertools.product((0, 1), repeat=9):
        d = np.array(d)
        if d.any() and not d.all() and p[d == 1].min() <= p[d == 0].max():
            continue  # no threshold decides so
        c = Confusion.hard(torch.from_numpy(d), torch.from_numpy(y), 2)
        if meets(c, limits, "binary"):
            best = max(best, float(metrics.resolve(metric, average="binary")(c)))
    rule = tuned(p, y, metric, subject_to=subject_to, guard=False)
    assert rule.feasible
    assert rule.value == pytest.approx(best, abs=1e-9)


@pytest.mark.parametrize("average", ["macro", "micro"])
def test_two_labels_with_constraints_against_all_thresholds(average):
    """On 8 rows constraints are met wherever some pair of thresholds does, and hardly a pair is better."""
    gaps = []
    forms = ["recall >= 0.6", "precision >= 0.6", "flagged <= 40%", "accuracy >= 0.6", "f1 >= 0.5",
             ["recall[1] >= 0.9", "precision[0] >= 0.6"]]  # fmt: skip
    for seed, subject_to, metric in itertools.product(
        range(4), forms, ("f1", "precision", "recall", "accuracy", "mcc")
    ):
        rng = np.random.default_rng(seed)
        p = np.round(rng.random((8, 2)), 2)
        y = (rng.random((8, 2)) < p).astype(int)
        limits = [parse_constraint(text) for text in (subject_to if isinstance(subject_to, list) else [subject_to])]
        score = metrics.resolve(metric, average=average)
        pairs = ((p >= t).astype(int) for t in itertools.product([*p[:, 0], 2.0], [*p[:, 1], 2.0]))
        counts = [Confusion.hard(torch.from_numpy(d), torch.from_numpy(y), 2, multilabel=True) for d in pairs]
        values = [float(score(c)) for c in counts if meets(c, limits, average)]
        rule = tuned(p, y, metric, task="multilabel", average=average, subject_to=subject_to, guard=False)
        assert rule.feasible
        gaps.append(max(values) - rule.value)
    assert min(gaps) > -1e-9
    assert np.mean(gaps) < 0.001


def all_by_offsets(p):
    """All decisions argmax_j (log p_ij + offset_j) of three classes: one point in each cell of the arrangement."""
    z = np.log(p)
    first, second, between = z[:, 0] - z[:, 1], z[:, 0] - z[:, 2], z[:, 1] - z[:, 2]

    def between_values(v):
        v = np.unique(v)
        return np.concatenate([[v[0] - 1], (v[1:] + v[:-1]) / 2, [v[-1] + 1]])

    found = set()
    for a in between_values(np.concatenate([first, (second[:, None] - between).ravel()])):
        for b in between_values(np.concatenate([second, a + between])):
            found.add(tuple((z + [0, a, b]).argmax(axis=1)))
    return np.array(sorted(found))


def of_matrix(matrix):
    m = torch.from_numpy(matrix)
    return Confusion(m.diagonal(), m.sum(1), m.sum(0), m.sum(), matrix=m)


def weighted_matrix(target, decisions):
    """Confusion matrix of decisions (n,) for class probabilities (n, 3), or labels as one-hot rows."""
    return target.T @ np.eye(3)[decisions]


THREE_CLASSES = ["recall >= 0.6", "precision >= 0.6", "specificity >= 0.7", "flagged[2] <= 30%", "recall[0] >= 0.6",
                 "accuracy >= 0.6", "f1 >= 0.5", "mcc >= 0.3", "precision[1] >= 0.6",
                 ["recall[2] >= 0.5", "precision[0] >= 0.5"], ["recall >= 0.5", "flagged[1] <= 30%"]]  # fmt: skip


def test_all_by_offsets_are_all():
    p = np.random.default_rng(0).dirichlet([1.0, 0.8, 0.6], size=7)
    drawn = np.random.default_rng(1).normal(scale=3.0, size=(20_000, 3))
    by_chance = {tuple((np.log(p) + o).argmax(axis=1)) for o in drawn}
    everything = {tuple(row) for row in all_by_offsets(p).tolist()}
    assert by_chance <= everything
    assert len(everything) == math.comb(7 + 2, 2)  # regions of seven tropical lines in general position


@pytest.mark.slow
@pytest.mark.parametrize("metric", [m for m in metrics.METRICS if m != "fbeta"])
def test_three_classes_with_constraints_against_all_offsets(metric):
    """On 7 rows constraints are met wherever some offsets meet them, and rules are mostly the best of all offsets."""
    gaps: dict[str, list[float]] = {"unguarded": [], "plug-in": []}
    score = metrics.resolve(metric, average="macro")
    for seed, subject_to in itertools.product(range(4), THREE_CLASSES):
        rng = np.random.default_rng(seed)
        p = rng.dirichlet([1.0, 0.8, 0.6], size=7)
        y = np.array([rng.choice(3, p=row) for row in p])
        y[:3] = 0, 1, 2
        limits = [parse_constraint(text) for text in (subject_to if isinstance(subject_to, list) else [subject_to])]
        decisions = all_by_offsets(p)
        observed = [of_matrix(weighted_matrix(np.eye(3)[y], d)) for d in decisions]
        allowed = [meets(c, limits, "macro") for c in observed]
        if not any(allowed):
            continue
        expected = [of_matrix(weighted_matrix(p, d)) for d in decisions]
        for name, counts in (("unguarded", observed), ("plug-in", expected)):
            if name == "unguarded":
                rule = tuned(p, y, metric, subject_to=subject_to, guard=False)
            else:
                rule = plug_in(p, metric, target=y, subject_to=subject_to)
            assert rule.feasible, (seed, subject_to, name)
            assert meets(of_matrix(weighted_matrix(np.eye(3)[y], rule.predict(p))), limits, "macro")
            best = max(float(score(c)) for c, ok in zip(counts, allowed, strict=True) if ok)
            gaps[name].append(best - rule.value)
    assert min(gaps["unguarded"]) > -1e-9  # offsets cannot do better than all offsets
    for found in gaps.values():
        assert np.mean(np.abs(found) < 1e-9) > 0.75
        assert np.mean(found) < (0.07 if metric == "quadratic_kappa" else 0.03)


@pytest.mark.slow
@pytest.mark.parametrize("metric", [m for m in metrics.METRICS if m != "fbeta"])
@pytest.mark.parametrize("subject_to", [None, "flagged[2] <= 20%", ["flagged[0] <= 40%", "flagged[1] >= 20%"]], ids=str)
def test_three_classes_against_all_joint_decisions(metric, subject_to):
    """The plug-in rule of 6 rows is close to the best expected metric of all 729 decisions that meet the budget."""
    limits = [parse_constraint(text) for text in ([subject_to] if isinstance(subject_to, str) else subject_to or [])]
    score = metrics.resolve(metric, average="macro")
    for seed in range(3):
        p, _ = three_classes(seed, 6)
        matrices = (weighted_matrix(p, np.array(d)) for d in itertools.product(range(3), repeat=6))
        values = [float(score(c)) for c in map(of_matrix, matrices) if meets(c, limits, "macro")]
        rule = plug_in(p, metric, subject_to=subject_to)
        assert rule.feasible
        assert max(values) + 1e-9 >= rule.value >= max(values) - 0.06


@pytest.mark.parametrize("metric", ["f1", "mcc", "balanced_accuracy", "accuracy"])
def test_three_classes_against_all_decisions(metric):
    """On 6 rows the plug-in rule is close to the best of all 729 decisions, gain matrix or not, and above argmax."""
    for seed in range(3):
        p, _ = three_classes(seed, 6)
        scores = []
        for d in itertools.product(range(3), repeat=6):
            matrix = torch.zeros(3, 3, dtype=torch.float64)
            for row, j in zip(p, d, strict=True):
                matrix[:, j] += torch.from_numpy(row)
            c = Confusion(matrix.diagonal(), matrix.sum(1), matrix.sum(0), matrix.sum(), matrix=matrix)
            scores.append(float(metrics.resolve(metric)(c)))
        assert plug_in(p, metric).value >= max(scores) - 0.03


def test_never_worse_than_argmax_beyond_noise():
    """Ten small samples with calibrated probabilities: the default rule loses nothing on average."""
    gain = []
    for seed in range(10):
        p, y = two_classes(seed, 150)
        new, truth = two_classes(seed + 1000, 4000)
        rule = calibrated(p, y, "accuracy")
        gain.append(np.mean(rule.predict(new) == truth) - np.mean((new >= 0.5) == truth))
    assert np.mean(gain) > -0.01
