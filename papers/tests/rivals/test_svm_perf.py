"""SVM-perf against brute force over all label vectors, scipy's SLSQP and scikit-learn's hinge SVM."""

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import minimize
from sklearn.datasets import make_blobs, make_classification
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import f1_score, fbeta_score, roc_auc_score, zero_one_loss
from sklearn.model_selection import TunedThresholdClassifierCV
from sklearn.preprocessing import StandardScaler
from sklearn.svm import LinearSVC
from sklearn.utils.estimator_checks import parametrize_with_checks

from evalign_papers.rivals.cutting_planes import simplex_maximum
from evalign_papers.rivals.svm_perf import SVMPerfClassifier, most_violated

LOSSES = [("f1", 1.0), ("fbeta", 0.5), ("fbeta", 2.0), ("error", 1.0), ("roc", 1.0)]
every_loss = pytest.mark.parametrize(("loss", "beta"), LOSSES)


@parametrize_with_checks([SVMPerfClassifier(loss=loss, beta=beta) for loss, beta in LOSSES if beta != 0.5])
@pytest.mark.filterwarnings("ignore:Estimator's parameters changed after set_params raised")
def test_scikit_learns_checks(estimator: Any, check: Any) -> None:
    assert check(estimator) is None


def all_planes(positive: np.ndarray, loss: str, beta: float) -> tuple[np.ndarray, np.ndarray]:
    """Delta (m,) and the weights of the scores (m, n) for every y', straight from the definition."""
    n, p, q = len(positive), np.flatnonzero(positive), np.flatnonzero(~positive)
    deltas, turns = [], []
    if loss == "roc":
        pairs = list(itertools.product(p, q))
        for swapped in itertools.product([False, True], repeat=len(pairs)):
            turn = np.zeros(n)
            for (i, j), is_swapped in zip(pairs, swapped, strict=True):
                turn[i] += is_swapped / len(pairs)
                turn[j] -= is_swapped / len(pairs)
            deltas.append(sum(swapped) / len(pairs))
            turns.append(turn)
    else:
        y = np.where(positive, 1, -1)
        for guess in itertools.product([-1, 1], repeat=n):
            tp, fp = sum(np.array(guess)[p] == 1), sum(np.array(guess)[q] == 1)
            fn = len(p) - tp
            f = (1 + beta**2) * tp / ((1 + beta**2) * tp + beta**2 * fn + fp)
            deltas.append((fn + fp) / n if loss == "error" else 1 - f)
            turns.append((y - np.array(guess)) / (2 * n))
    return np.array(deltas), np.array(turns)


@st.composite
def scored_labels(draw: st.DrawFn, limit: int) -> tuple[np.ndarray, np.ndarray]:
    """Scores on a coarse grid, so that ties and margins of exactly 1 happen, with both labels."""
    n = draw(st.integers(2, limit))
    positive = draw(st.lists(st.booleans(), min_size=n, max_size=n).filter(lambda y: 0 < sum(y) < len(y)))
    scores = draw(st.lists(st.integers(-8, 8), min_size=n, max_size=n))
    return np.array(scores) / 4 * draw(st.sampled_from([0.1, 1.0, 3.0])), np.array(positive)


PLANES: dict[Any, tuple[np.ndarray, np.ndarray]] = {}


@every_loss
@given(data=st.data())
def test_most_violated_is_the_maximum_over_all_label_vectors(loss: Any, beta: float, data: st.DataObject) -> None:
    scores, positive = data.draw(scored_labels(6 if loss == "roc" else 8))
    key = (tuple(positive), loss, beta)
    if key not in PLANES:
        PLANES[key] = all_planes(positive, loss, beta)
    deltas, turns = PLANES[key]
    delta, turn = most_violated(scores, positive, loss, beta=beta)
    assert delta - turn @ scores == pytest.approx((deltas - turns @ scores).max(), abs=1e-12)
    if loss != "roc":  # it is a label vector, and scikit-learn gives it that loss
        guess = np.where(turn != 0, ~positive, positive)
        np.testing.assert_allclose(turn * len(turn), positive.astype(int) - guess, atol=1e-12)
        expected = (
            zero_one_loss(positive, guess)
            if loss == "error"
            else 1 - fbeta_score(positive, guess, beta=beta, zero_division=0)
        )
        assert delta == pytest.approx(expected, abs=1e-12)


@every_loss
def test_most_violated_on_many_rows(loss: Any, beta: float) -> None:
    rng = np.random.default_rng(1)
    for share in (0.02, 0.3, 0.9):
        positive = rng.random(150) < share
        scores = rng.normal(size=150) * 3 + positive
        s, t = scores[positive], scores[~positive]
        if loss == "roc":
            expected = np.maximum(0, 1 - (s[:, None] - t)).mean()
        else:  # every contingency table
            fn, fp = np.arange(len(s) + 1)[:, None], np.arange(len(t) + 1)
            tp, b2 = len(s) - fn, beta**2
            losses = (fn + fp) / 150 if loss == "error" else 1 - (1 + b2) * tp / ((1 + b2) * tp + b2 * fn + fp)
            lowest, highest = np.cumsum(np.r_[0, np.sort(s)]), np.cumsum(np.r_[0, np.sort(t)[::-1]])
            expected = (losses - lowest[:, None] / 150 + highest / 150).max()
        delta, turn = most_violated(scores, positive, loss, beta=beta)
        assert delta - turn @ scores == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("seed", range(6))
def test_simplex_maximum_is_slsqps(seed: int) -> None:
    rng = np.random.default_rng(seed)
    size, rank = int(rng.integers(2, 12)), int(rng.integers(1, 4))
    factor = rng.normal(size=(size, rank)) * 10 ** rng.uniform(-1, 1)  # most are singular
    q, gain = factor @ factor.T, rng.random(size)
    start = np.eye(size)[0]
    theirs = minimize(
        lambda a: 0.5 * a @ q @ a - gain @ a, np.full(size, 1 / size), jac=lambda a: q @ a - gain, method="SLSQP",
        bounds=[(0, 1)] * size, constraints={"type": "eq", "fun": lambda a: a.sum() - 1},
        options={"ftol": 1e-14, "maxiter": 500},
    )  # fmt: skip
    ours = simplex_maximum(q, gain, start)
    assert ours.min() >= 0
    assert ours.sum() == pytest.approx(1)
    assert gain @ ours - 0.5 * ours @ q @ ours == pytest.approx(-theirs.fun, abs=1e-8)
    slope = gain - q @ ours  # no coordinate promises more than the mixture: optimal
    assert slope.max() - slope @ ours <= 1e-9


def whole_program(planes: np.ndarray, deltas: np.ndarray, total: float) -> tuple[np.ndarray, float]:
    """The minimum over (w, xi) of 1/2 |w|^2 + total xi with every constraint, by SLSQP."""
    d = planes.shape[1]
    found = minimize(
        lambda v: 0.5 / total * v[:d] @ v[:d] + v[d], np.append(np.zeros(d), 1.0), method="SLSQP",
        jac=lambda v: np.append(v[:d] / total, 1.0),
        constraints={
            "type": "ineq", "fun": lambda v: v[d] - deltas + planes @ v[:d],
            "jac": lambda v: np.column_stack([planes, np.ones(len(planes))]),
        },
        options={"ftol": 1e-12, "maxiter": 1000},
    )  # fmt: skip
    assert found.success
    return found.x[:d], total * found.fun


@every_loss
@pytest.mark.parametrize("seed", range(3))
def test_objective_is_that_of_the_whole_quadratic_program(loss: Any, beta: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    positive = np.array([True, True, False, False, False, False][: 6 if loss != "roc" else 5])
    X, C = rng.normal(size=(len(positive), 2)) + positive[:, None], [0.1, 1.0, 5.0][seed]
    rows = X if loss == "roc" else np.column_stack([X, np.ones(len(X))])
    deltas, turns = all_planes(positive, loss, beta)
    w, objective = whole_program(turns @ rows, deltas, C * len(X))
    ours = SVMPerfClassifier(C, loss=loss, beta=beta, tolerance=1e-9).fit(X, positive)
    assert ours.objective_ == pytest.approx(objective, rel=1e-6)
    np.testing.assert_allclose(np.append(ours.coef_, ours.intercept_)[: len(w)], w, atol=1e-3)


@pytest.mark.parametrize(("loss", "scale", "factor"), [("error", 2 * 6, 1 / 2), ("f1", 100, 25 / 6)])
def test_c_of_the_paper(loss: Any, scale: float, factor: float) -> None:
    """Joachims' program: Delta up to 100 or 2 n, sum_i (y_i - y'_i) w.x_i, and C xi."""
    positive = np.arange(6) < 2
    rows = np.column_stack([np.random.default_rng(0).normal(size=(6, 2)) + positive[:, None], np.ones(6)])
    deltas, turns = all_planes(positive, loss, 1.0)
    w, _ = whole_program(2 * 6 * turns @ rows, scale * deltas, 0.4 * factor)
    ours = SVMPerfClassifier(0.4, loss=loss, tolerance=1e-9).fit(rows[:, :2], positive)
    np.testing.assert_allclose(w * 2 * 6 / scale, np.append(ours.coef_, ours.intercept_), atol=1e-3)


def table(n: int = 200, d: int = 5) -> tuple[np.ndarray, np.ndarray]:
    X, y = make_classification(n, d, n_redundant=0, weights=[0.7], flip_y=0.1, random_state=0)
    return StandardScaler().fit_transform(X), y


@pytest.mark.parametrize("C", [0.01, 0.5])
@pytest.mark.parametrize("fit_intercept", [True, False])
def test_error_rate_is_linear_svc(C: float, fit_intercept: bool) -> None:
    X, y = table()
    ours = SVMPerfClassifier(C, loss="error", tolerance=1e-7, fit_intercept=fit_intercept).fit(X, y)
    theirs = LinearSVC(C=C, loss="hinge", tol=1e-10, max_iter=1_000_000, fit_intercept=fit_intercept).fit(X, y)

    def objective(model: Any) -> float:
        b = float(np.ravel(model.intercept_)[0])
        margins = np.where(y == 1, 1, -1) * (X @ model.coef_[0] + b)
        return float(0.5 * (model.coef_**2).sum() + 0.5 * b**2 + C * np.maximum(0, 1 - margins).sum())

    assert ours.objective_ == pytest.approx(objective(ours), rel=1e-9)
    assert ours.objective_ == pytest.approx(objective(theirs), rel=1e-5)
    np.testing.assert_allclose(ours.coef_, theirs.coef_, atol=3e-3)


def test_roc_area_is_linear_svc_on_pairs() -> None:
    X, y = table(60, 3)
    ours = SVMPerfClassifier(0.5, loss="roc", tolerance=1e-7).fit(X, y)
    pairs = (X[y == 1][:, None] - X[y == 0]).reshape(-1, 3)
    sign = np.where(np.arange(len(pairs)) % 2, 1, -1)  # LinearSVC wants two classes; a pair turned around is the same
    theirs = LinearSVC(
        C=0.5 * len(y) / len(pairs), loss="hinge", tol=1e-10, max_iter=1_000_000, fit_intercept=False
    ).fit(pairs * sign[:, None], sign)
    hinge = np.maximum(0, 1 - pairs @ theirs.coef_[0]).mean()
    assert ours.objective_ == pytest.approx(0.5 * (theirs.coef_**2).sum() + 0.5 * len(y) * hinge, rel=1e-5)
    np.testing.assert_allclose(ours.coef_, theirs.coef_, atol=3e-3)
    assert ours.intercept_ == 0


@every_loss
@pytest.mark.parametrize("C", [0.01, 1.0, 100.0])
def test_the_gap_is_within_the_tolerance_and_true(loss: Any, beta: float, C: float) -> None:
    X, y = table()
    fine = SVMPerfClassifier(C, loss=loss, beta=beta, tolerance=1e-6).fit(X, y)
    for tolerance in (0.1, 1e-3):
        coarse = SVMPerfClassifier(C, loss=loss, beta=beta, tolerance=tolerance).fit(X, y)
        assert 0 <= coarse.dual_gap_ <= tolerance
        assert coarse.n_iter_ <= fine.n_iter_
        above = (coarse.objective_ - fine.objective_) / (C * len(y))
        assert -1e-6 <= above <= coarse.dual_gap_ + 1e-12


@every_loss
def test_constant_repeated_and_huge_features(loss: Any, beta: float) -> None:
    X, y = table()
    X = np.column_stack([X, X[:, 0], np.zeros(len(X)), np.full(len(X), 7.0), 1e4 * X[:, 1]])
    model = SVMPerfClassifier(loss=loss, beta=beta).fit(X, y)
    assert np.isfinite(model.decision_function(X)).all()
    assert model.dual_gap_ <= 1e-3
    constant = SVMPerfClassifier(loss=loss, beta=beta).fit(np.ones((20, 2)), np.arange(20) % 2)
    assert np.isfinite(constant.decision_function(np.ones((3, 2)))).all()


def synthetic_33(n: int) -> tuple[np.ndarray, np.ndarray]:
    X, y = make_blobs(10000, centers=2, n_features=3, cluster_std=10, random_state=42)
    rows = np.concatenate([np.flatnonzero(y == 0), np.flatnonzero(y == 1)[:2500]])
    rows = np.random.default_rng(0).permutation(rows)
    assert len(rows) == 7500
    return StandardScaler().fit(X[rows[:n]]).transform(X[rows]), y[rows]


def test_synthetic_33_percent() -> None:
    X, y = synthetic_33(1500)
    (X, y), (X_test, y_test) = (X[:1500], y[:1500]), (X[1500:], y[1500:])
    logistic = LogisticRegression().fit(X, y)
    p, p_test = logistic.predict_proba(X)[:, 1], logistic.predict_proba(X_test)[:, 1]
    cut = max(np.linspace(0.05, 0.95, 91), key=lambda t: f1_score(y, p >= t))
    tuned = f1_score(y_test, p_test >= cut)
    f1, error = (f1_score(y_test, SVMPerfClassifier(loss=loss).fit(X, y).predict(X_test)) for loss in ("f1", "error"))
    assert f1 > tuned - 0.02
    assert f1 > error
    recall, precision = (
        SVMPerfClassifier(loss="fbeta", beta=beta).fit(X, y).predict(X_test).mean() for beta in (4.0, 0.25)
    )
    assert recall > 1.3 * precision  # a larger beta says positive more often
    roc = SVMPerfClassifier(loss="roc").fit(X, y)
    assert roc_auc_score(y_test, roc.decision_function(X_test)) > roc_auc_score(y_test, p_test) - 0.005


def test_roc_scores_take_a_cut_from_scikit_learn() -> None:
    X, y = table()
    X = X + 5  # the cut at 0 is arbitrary: here it is far off
    plain = SVMPerfClassifier(loss="roc")
    tuned = TunedThresholdClassifierCV(plain, scoring="f1", cv=3).fit(X, y)
    assert f1_score(y, tuned.predict(X)) > f1_score(y, plain.fit(X, y).predict(X)) + 0.1


def test_labels_and_ties() -> None:
    X, y = table()
    names = np.array(["no", "yes"])[y]
    model = SVMPerfClassifier().fit(X, names)
    assert model.classes_.tolist() == ["no", "yes"]
    assert ((model.predict(X) == "yes") == (model.decision_function(X) >= 0)).all()
    flat = SVMPerfClassifier().fit(np.zeros((4, 1)), [0, 1, 0, 1])
    flat.coef_, flat.intercept_ = np.zeros((1, 1)), np.zeros(1)
    assert flat.predict([[3.0]]).tolist() == [1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss": "auc"}, "loss must be one of f1, fbeta, error, roc, got 'auc'"),
        ({"C": 0.0}, "C must lie in"),
        ({"C": float("inf")}, "C must lie in"),
        ({"beta": -1.0}, "beta must lie in"),
        ({"tolerance": 0.0}, "tolerance must lie in"),
        ({"max_iter": 0}, "max_iter must lie in"),
    ],
)
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SVMPerfClassifier(**options).fit([[0.0], [1.0]], [0, 1])


def test_wrong_labels() -> None:
    for y, got in (([0, 1, 2], "3 classes"), ([1, 1, 1], "one class")):
        with pytest.raises(ValueError, match=f"Only binary classification is supported, got {got}"):
            SVMPerfClassifier().fit([[0.0], [1.0], [2.0]], y)


def test_too_few_iterations_warn() -> None:
    X, y = table()
    with pytest.warns(ConvergenceWarning, match="max_iter=2 with a gap of"):
        model = SVMPerfClassifier(max_iter=2).fit(X, y)
    assert model.n_iter_ == 2
    assert model.dual_gap_ > 1e-3
