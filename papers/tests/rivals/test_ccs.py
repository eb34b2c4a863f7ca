"""CCS against brute force over all label sets, known distributions and scikit-learn's one-versus-rest."""

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.sparse import csr_array
from sklearn.datasets import load_breast_cancer, load_iris, make_blobs, make_multilabel_classification
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import accuracy_score, f1_score, fbeta_score
from sklearn.multiclass import OneVsRestClassifier
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

from evalign_papers.rivals.ccs import CCSClassifier, decode, set_fbeta


@parametrize_with_checks([CCSClassifier()])
@pytest.mark.filterwarnings("ignore:Estimator's parameters changed after set_params raised")
def test_scikit_learns_checks(estimator: Any, check: Any) -> None:
    assert check(estimator) is None


def subsets(s: int) -> list[tuple[int, ...]]:
    return list(itertools.product([0, 1], repeat=s))


def earned(y: tuple[int, ...], h: tuple[int, ...], beta: float) -> float:
    """F_beta of one set, from precision and recall; the empty set for the empty set is right."""
    if sum(y) == sum(h) == 0:
        return 1.0
    hit = sum(a * b for a, b in zip(y, h, strict=True))
    if hit == 0:
        return 0.0
    precision, recall = hit / sum(h), hit / sum(y)
    return (1 + beta**2) * precision * recall / (beta**2 * precision + recall)


def expectations(p: Any, s: int, beta: float) -> np.ndarray:
    """What every h earns under the probabilities p of `subsets(s)`."""
    return np.array([sum(q * earned(y, h, beta) for q, y in zip(p, subsets(s), strict=True)) for h in subsets(s)])


def events(p: Any, s: int) -> tuple[np.ndarray, np.ndarray]:
    """P(y_j = 1, |y| = k) (1, s, s) and P(y = 0) (1,)."""
    joint = np.zeros((1, s, s))
    for q, y in zip(p, subsets(s), strict=True):
        for j in np.flatnonzero(y):
            joint[0, j, sum(y) - 1] += q
    return joint, np.array([p[0]])


def test_two_labels_by_hand() -> None:
    # {}: .1, {2}: .25, {1}: .35, {1, 2}: .3. By hand the empty set earns .1, {2} .25 + 2/3 .3, {1} .35 + 2/3 .3, and
    # {1, 2} 2/3 (.25 + .35) + .3 = .7, though the likeliest set is {1}.
    p = [0.1, 0.25, 0.35, 0.3]
    np.testing.assert_allclose(expectations(p, 2, 1.0), [0.1, 0.45, 0.55, 0.7])
    joint = np.array([[[0.35, 0.3], [0.25, 0.3]]])
    np.testing.assert_allclose(events(p, 2)[0], joint)
    assert decode(joint, np.array([0.1])).tolist() == [[1, 1]]
    # A small beta asks for precision: F_0.1 is 1.01 hit / (.01 |y| + |h|), {1} earns .35 + 1.01/1.02 .3 = .647 and
    # {1, 2} 1.01/2.01 .6 + .3 = .601.
    np.testing.assert_allclose(expectations(p, 2, 0.1)[2:], [0.35 + 1.01 / 1.02 * 0.3, 1.01 / 2.01 * 0.6 + 0.3])
    assert decode(joint, np.array([0.1]), beta=0.1).tolist() == [[1, 0]]
    assert decode(joint * 0.3, np.array([0.73])).tolist() == [[0, 0]]


def test_three_labels_that_no_cut_of_marginals_finds() -> None:
    # {1}, {2}, {3} and the empty set, a quarter each: marginals of 1/4, yet all three earn 3/4 * 2/4 = .375 > .25.
    p = np.zeros(8)
    p[[0, 1, 2, 4]] = 0.25
    joint, empty = events(p, 3)
    assert decode(joint, empty).tolist() == [[1, 1, 1]]
    assert expectations(p, 3, 1.0).max() == pytest.approx(0.375)


@given(
    weights=st.integers(1, 4).flatmap(lambda s: st.lists(st.integers(0, 9), min_size=2**s, max_size=2**s)),
    beta=st.sampled_from([0.25, 1.0, 2.0]),
)
def test_decoder_earns_the_maximum_over_all_sets(weights: list[int], beta: float) -> None:
    s = len(weights).bit_length() - 1
    p = np.array(weights, dtype=float)
    p = p / p.sum() if p.sum() else np.full(len(p), 1 / len(p))
    values = expectations(p, s, beta)
    chosen = tuple(decode(*events(p, s), beta=beta)[0].tolist())
    assert values[subsets(s).index(chosen)] == pytest.approx(values.max(), abs=1e-12)


def test_larger_sets_need_not_hold_the_smaller_ones() -> None:
    # {1}: .225, {2, ..., 7}: .75. One label: {1} earns .225 and {2} 2/7 .75 = .214; seven labels earn
    # 2/8 .225 + 12/13 .75 = .7486, less than the .75 of {2, ..., 7}, which has to let go of label 1.
    p = np.zeros(128)
    p[[0, 64, 63]] = 0.025, 0.225, 0.75
    assert decode(*events(p, 7)).tolist() == [[0, 1, 1, 1, 1, 1, 1]]
    assert expectations(p, 7, 1.0).argmax() == 63


def test_decoder_takes_rows_and_sizes() -> None:
    rng = np.random.default_rng(0)
    p = rng.dirichlet(np.full(8, 0.3), size=50)
    p[:, 7] = 0  # no set of three
    p /= p.sum(axis=1, keepdims=True)
    joint, empty = (np.concatenate(parts) for parts in zip(*(events(q, 3) for q in p), strict=True))
    together = decode(joint, empty)
    assert len(np.unique(together, axis=0)) > 4
    np.testing.assert_array_equal(together, [decode(*events(q, 3))[0] for q in p])
    np.testing.assert_array_equal(together, decode(joint[:, :, :2], empty, sizes=[1, 2]))
    with pytest.raises(ValueError, match="one last entry per size, expected 3, got 2"):
        decode(joint[:, :, :2], empty)


# Four cells of x with their distributions of sets; in each the best set beats the next by more than 0.02.
CELLS = np.array(
    [
        [0.25, 0.25, 0.25, 0.00, 0.25, 0.00, 0.00, 0.00],
        [0.02, 0.05, 0.05, 0.38, 0.05, 0.05, 0.05, 0.35],
        [0.60, 0.10, 0.10, 0.00, 0.10, 0.00, 0.00, 0.10],
        [0.05, 0.10, 0.15, 0.00, 0.60, 0.05, 0.05, 0.00],
    ]
)


@pytest.mark.parametrize("beta", [1.0, 3.0])
@pytest.mark.parametrize("sampled", [True, False])
def test_learns_the_bayes_optimal_sets(beta: float, sampled: bool) -> None:
    best = [subsets(3)[expectations(p, 3, beta).argmax()] for p in CELLS]
    margins = [np.diff(np.sort(expectations(p, 3, beta)))[-1] for p in CELLS]
    assert min(margins) > 0.02
    if sampled:
        rng = np.random.default_rng(0)
        cell = np.repeat(np.arange(4), 5000)
        drawn = np.concatenate([rng.choice(8, size=5000, p=p) for p in CELLS])
        weight = None
    else:  # the distribution itself, as weights
        cell, drawn = np.repeat(np.arange(4), 8), np.tile(np.arange(8), 4)
        weight = 1000 * CELLS.ravel()
    Y = np.array(subsets(3))[drawn]
    model = CCSClassifier(beta, C=1e4).fit(np.eye(4)[cell], Y, sample_weight=weight)
    assert [tuple(row) for row in model.predict(np.eye(4)).tolist()] == best
    marginal = CELLS @ np.array(subsets(3))
    assert (np.array(best) != (marginal > 0.5)).any()  # cutting the marginals at 1/2 would not do
    np.testing.assert_allclose(model.predict_proba(np.eye(4)), marginal, atol=0.02 if sampled else 2e-3)
    if not sampled:
        score = model.score(np.eye(4)[cell], Y, sample_weight=weight)
        assert score == pytest.approx(np.mean([expectations(p, 3, beta).max() for p in CELLS]))


def test_class_labels_are_one_versus_rest() -> None:
    X, y = load_iris(return_X_y=True)
    X = StandardScaler().fit_transform(X)
    names = np.array(["a", "b", "c"])[y]
    ours = CCSClassifier(tolerance=1e-8).fit(X, names)
    theirs = OneVsRestClassifier(LogisticRegression(tol=1e-8)).fit(X, names)
    assert ours.sizes_.tolist() == [1]
    assert len(ours.coef_) == 1 + 3
    np.testing.assert_allclose(ours.predict_proba(X), theirs.predict_proba(X), atol=1e-6)
    assert (ours.predict(X) == theirs.predict(X)).all()
    assert ours.score(X, names) == accuracy_score(names, theirs.predict(X))
    p = np.column_stack([part.predict_proba(X)[:, 1] for part in theirs.estimators_])  # not yet divided by their sum
    top = -np.sort(-p, axis=1)
    size = np.argmax([top[:, 0], 2 / 3 * top[:, :2].sum(1), 2 / 4 * top.sum(1)], axis=0) + 1
    np.testing.assert_array_equal(ours.predict_sets(X).sum(1), size)
    assert (ours.predict(X) == CCSClassifier(5.0, tolerance=1e-8).fit(X, names).predict(X)).all()


def test_two_classes_are_logistic_regression_cut_at_one_half() -> None:
    X, y = load_breast_cancer(return_X_y=True)
    X = StandardScaler().fit_transform(X)
    ours, theirs = CCSClassifier(tolerance=1e-8).fit(X, y), LogisticRegression(tol=1e-8, max_iter=1000).fit(X, y)
    np.testing.assert_allclose(ours.predict_proba(X), theirs.predict_proba(X), atol=1e-5)
    assert (ours.predict(X) == theirs.predict(X)).all()


def test_synthetic_33_percent() -> None:
    X, y = make_blobs(10000, centers=2, n_features=3, cluster_std=10, random_state=42)
    rows = np.concatenate([np.flatnonzero(y == 0), np.flatnonzero(y == 1)[:2500]])
    rows = np.random.default_rng(0).permutation(rows)
    train, test = rows[:1500], rows[1500:]
    X = StandardScaler().fit(X[train]).transform(X)
    logistic = LogisticRegression().fit(X[train], y[train])
    p = logistic.predict_proba(X)[:, 1]
    cut = max(np.linspace(0.05, 0.95, 91), key=lambda t: f1_score(y[train], p[train] >= t))
    ours = f1_score(y[test], CCSClassifier().fit(X[train], y[train]).predict(X[test]))
    assert ours == pytest.approx(f1_score(y[test], p[test] >= 0.5), abs=1e-3)
    assert ours > f1_score(y[test], p[test] >= cut) - 0.03


@pytest.mark.parametrize("beta", [0.5, 1.0, 2.0])
def test_score_is_scikit_learns_over_rows(beta: float) -> None:
    X, Y = make_multilabel_classification(200, n_classes=4, n_labels=2, random_state=0)
    model = CCSClassifier(beta).fit(X, Y)
    h = model.predict(X)
    expected = fbeta_score(Y, h, beta=beta, average="samples", zero_division=1)
    assert set_fbeta(Y, h, beta=beta).mean() == pytest.approx(expected)
    assert model.score(X, Y) == pytest.approx(expected)
    assert model.score(X, csr_array(Y)) == pytest.approx(expected)
    weight = np.arange(200) % 3
    kept = np.repeat(np.arange(200), weight)
    assert model.score(X, Y, sample_weight=weight) == pytest.approx(model.score(X[kept], Y[kept]))


def test_beats_cutting_each_label_at_one_half() -> None:
    rng = np.random.default_rng(0)
    X = rng.normal(size=(1500, 6))
    Y = (X @ rng.normal(size=(6, 5)) + rng.logistic(size=(1500, 5)) * 2 > 2).astype(int)
    ours = CCSClassifier().fit(X[:750], Y[:750]).predict(X[750:])
    theirs = OneVsRestClassifier(LogisticRegression()).fit(X[:750], Y[:750]).predict(X[750:])
    assert set_fbeta(Y[750:], ours).mean() > set_fbeta(Y[750:], theirs).mean() + 0.02


def test_sets_that_never_occur_and_far_rows() -> None:
    X, Y = make_multilabel_classification(100, n_classes=3, random_state=0)
    Y = np.column_stack([Y, np.zeros(100, dtype=int), np.ones(100, dtype=int)])
    model = CCSClassifier().fit(X, Y)
    h, p = model.predict(1e6 * X), model.predict_proba(1e6 * X)
    assert np.isfinite(p).all()
    assert not h[:, 3].any()
    assert (p[:, 3] == 0).all()
    assert model.predict(X)[:, 4].all()
    nothing = CCSClassifier().fit(X, np.zeros_like(Y))
    assert not nothing.predict(X).any()
    assert (nothing.predict_proba(X) == 0).all()
    X, y = load_iris(return_X_y=True)
    far = CCSClassifier().fit(X, y)
    far.intercept_ -= 1e4  # every event improbable, as it can be far away
    np.testing.assert_allclose(far.predict_proba(X).sum(axis=1), 1)


def test_sparse_indicators_and_rows_without_weight() -> None:
    X, Y = make_multilabel_classification(100, n_classes=3, random_state=0)
    plain = CCSClassifier().fit(X, Y)
    np.testing.assert_allclose(CCSClassifier().fit(X, csr_array(Y)).coef_, plain.coef_)
    X, y = load_iris(return_X_y=True)
    weighted = CCSClassifier().fit(X, y, sample_weight=(y != 2).astype(float))
    assert weighted.classes_.tolist() == [0, 1]
    np.testing.assert_allclose(weighted.coef_, CCSClassifier().fit(X[y != 2], y[y != 2]).coef_)


@pytest.mark.parametrize(
    ("options", "y", "message"),
    [
        ({"beta": 0.0}, [0, 1], "beta must lie in"),
        ({"C": 0.0}, [0, 1], "C must lie in"),
        ({}, [1, 1], "at least two classes with a positive weight, got one class"),
        ({}, [[0, 2], [1, 0]], "y should be a 1d array"),
    ],
)
def test_wrong_input(options: dict[str, Any], y: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CCSClassifier(**options).fit([[0.0], [1.0]], y)
