"""Changed class shares: detected if present, not detected if absent, and refused if something else changed."""

import numpy as np
import pytest
from scipy.special import expit
from scipy.stats import ks_2samp, kstest, wasserstein_distance

from evalign.decision import shift
from evalign.decision.shift import Reference, class_shares, find_shift, given_shares, reweighted

MEANS = np.array([[0.0, 0.0], [2.0, 0.0], [0.0, 2.0]])


def sample(rng, n, shares, moved=0.0):
    """Two normal features of three (or two) classes, with the true posterior under equal shares of training."""
    shares = np.asarray(shares, dtype=float)
    y = rng.choice(len(shares), n, p=shares / shares.sum())
    X = rng.normal(size=(n, 2)) + MEANS[y] + [moved, 0.0]
    return X, y


def posterior(X, shares):
    shares = np.asarray(shares, dtype=float)
    density = np.exp(-0.5 * ((X[:, None] - MEANS[: len(shares)]) ** 2).sum(-1)) * shares
    return density / density.sum(1, keepdims=True)


OLD = (0.6, 0.3, 0.1)


def reference(rng, n=1500, shares=OLD, features=True):
    X, y = sample(rng, n, shares)
    return Reference.of(posterior(X, shares), y, features=X if features else None)


def test_em_reaches_the_maximum_of_the_likelihood(monkeypatch):
    from scipy.optimize import minimize_scalar

    monkeypatch.setattr(shift, "PRIOR", 0.0)
    rng = np.random.default_rng(0)
    X, _ = sample(rng, 400, (0.2, 0.8))
    q, before = posterior(X, (0.9, 0.1)), np.array([0.9, 0.1])
    likelihood = lambda s: -np.log(q / before @ np.array([1 - s, s])).sum()  # noqa: E731
    best = minimize_scalar(likelihood, bounds=(1e-6, 1 - 1e-6), method="bounded", options={"xatol": 1e-9}).x
    assert class_shares(q, before, rounds=5000)[0, 1] == pytest.approx(best, abs=1e-4)


def test_em_of_several_samples_at_once_is_em_of_each():
    rng = np.random.default_rng(1)
    q, before = posterior(sample(rng, 60, (0.2, 0.3, 0.5))[0], OLD), np.array(OLD)
    times = rng.integers(0, 3, size=(3, 60)).astype(float)
    together = class_shares(q, before, times)
    for row, counts in zip(together, times, strict=True):
        alone = class_shares(np.repeat(q, counts.astype(int), axis=0), before)[0]
        np.testing.assert_allclose(row, alone, atol=1e-4)


def test_reweighted_is_the_posterior_of_the_new_shares():
    X, _ = sample(np.random.default_rng(2), 50, OLD)
    new = np.array([0.1, 0.1, 0.8])
    np.testing.assert_allclose(reweighted(posterior(X, OLD), new / OLD), posterior(X, new), atol=1e-12)


def test_distances_are_scipys():
    rng = np.random.default_rng(3)
    a, b = rng.normal(size=40).round(1), rng.normal(0.5, size=70).round(1)
    column, signed = np.append(a, b), np.append(np.full(40, 1 / 40), np.full(70, -1 / 70))[None]
    assert shift._height(column, signed)[0] == pytest.approx(ks_2samp(a, b).statistic)
    assert shift._area(column, signed)[0] == pytest.approx(wasserstein_distance(a, b))


@pytest.mark.parametrize("features", [True, False])
def test_finds_changed_shares_and_covers_them(features):
    rng = np.random.default_rng(4)
    known, new = reference(rng, features=features), (0.15, 0.25, 0.6)
    X, _ = sample(rng, 800, new)
    found = find_shift(known, posterior(X, OLD), X if features else None, classes=["a", "b", "c"])
    assert found.kind == "shares"
    assert found.adapts
    assert found.p_shares < 0.01
    np.testing.assert_allclose(found.shares, new, atol=0.06)
    np.testing.assert_allclose(found.cross_check, new, atol=0.1)
    assert all(low < share < high for low, share, high in zip(found.low, new, found.high, strict=True))
    assert "c: 10." in str(found)
    assert "Class shares changed" in str(found)
    assert found.to_json()["kind"] == "shares"


@pytest.mark.slow
@pytest.mark.parametrize("features", [True, False])
def test_level_of_both_tests_where_nothing_changed(features):
    kinds = []
    for seed in range(40):
        rng = np.random.default_rng(seed)
        known = reference(rng, 400, features=features)
        X, _ = sample(rng, 200, OLD)
        kinds.append(find_shift(known, posterior(X, OLD), X if features else None, intervals=False).kind)
    assert kinds.count("none") >= 36, kinds  # 5 % of 40 is 2


@pytest.mark.slow
def test_refuses_moved_features():
    refused = 0
    for seed in range(20):
        rng = np.random.default_rng(seed)
        known = reference(rng, 600)
        X, _ = sample(rng, 400, (0.3, 0.3, 0.4), moved=-1.0)
        found = find_shift(known, posterior(X, OLD), X, intervals=False)
        refused += found.kind == "other"
        assert found.kind != "other" or "decisions stay" in found.reason
    assert refused >= 18


@pytest.mark.slow
def test_p_values_of_features_are_uniform_unless_shares_changed():
    found: dict[float, list[float]] = {0.3: [], 0.5: []}
    for seed in range(40):
        rng = np.random.default_rng(seed)
        X, y = sample(rng, 600, (0.7, 0.3))
        known = Reference.of(np.tile([0.7, 0.3], (600, 1)), y, features=X)  # a model that knows nothing
        for share, values in found.items():
            X_new, _ = sample(rng, 300, (1 - share, share))
            values.append(find_shift(known, known.p[:300], X_new, intervals=False, explain=False).p_shares)
    assert kstest(found[0.3], "uniform").pvalue > 0.01
    assert np.mean(np.array(found[0.5]) < shift.LEVEL) > 0.9


def test_the_forest_makes_estimates_of_poor_probabilities_better():
    errors = []
    for seed in range(4):
        rng = np.random.default_rng(seed)
        X, y = sample(rng, 1000, (0.9, 0.1))
        X_new, _ = sample(rng, 300, (0.6, 0.4))
        noisy = [posterior(Z + rng.normal(scale=3.0, size=Z.shape), (0.9, 0.1)) for Z in (X, X_new)]
        known = Reference.of(noisy[0], y, features=X)
        found = find_shift(known, noisy[1], X_new, intervals=False)
        alone = class_shares(shift.fit_calibration(known.p, known.y, np.ones(1000))(noisy[1]), known.shares)[0]
        errors.append([abs(found.shares[1] - 0.4), abs(alone[1] - 0.4)])
        assert found.kind == "shares"
    with_forest, without = np.mean(errors, axis=0)
    assert with_forest < 0.06 < without


def test_labels_share_a_forest_that_knows_each_of_them():
    rng = np.random.default_rng(3)

    def draw(n, shares):
        labels = (rng.random((n, 2)) < shares).astype(int)
        X = rng.normal(size=(n, 2)) + 2.0 * labels
        return X, labels, expit(2 * X - 2 + np.log([0.3 / 0.7, 0.2 / 0.8]))

    X, labels, p = draw(1200, (0.3, 0.2))
    X_new, _, p_new = draw(500, (0.3, 0.6))
    found = shift.find_label_shifts(Reference(p, labels, X), p_new, X_new, intervals=False)
    assert found.kind == "shares"
    assert found.shares[0] == found.before[0]
    assert found.shares[1] == pytest.approx(0.6, abs=0.06)


def test_shares_without_a_change_are_those_of_before():
    rng = np.random.default_rng(5)
    known = reference(rng)
    X, _ = sample(rng, 500, OLD)
    found = find_shift(known, posterior(X, OLD), X)
    assert found.shares == found.before
    assert found.low is None


def test_reference_draws_by_weight():
    p, y = np.full((1000, 2), 0.5), np.arange(1000) % 2
    drawn = Reference.of(p, y, np.where(y == 1, 3.0, 1.0))
    assert drawn.y.mean() == pytest.approx(0.75, abs=0.05)


def test_many_rows_are_sampled():
    rng = np.random.default_rng(6)
    y = (rng.random(30_000) < 0.2).astype(int)
    p = expit(rng.normal(2 * y - 1, 1.0) * 2 + np.log(0.25))
    known = Reference.of(p, y)
    assert len(known.y) == shift.ROWS
    assert find_shift(known, p[::-1], intervals=False).kind == "none"


def test_given_shares_and_errors():
    known = reference(np.random.default_rng(7))
    assert given_shares(known, np.array([0.2, 0.3, 0.5])).adapts
    with pytest.raises(ValueError, match="3 columns"):
        find_shift(known, [0.1, 0.9])
    with pytest.raises(ValueError, match="at least one new row"):
        find_shift(known, np.zeros((0, 3)))


def test_refuses_shares_that_rest_on_a_few_held_out_rows():
    rng = np.random.default_rng(8)
    X, y = sample(rng, 1000, (0.99, 0.01))
    known = Reference.of(posterior(X, (0.99, 0.01)), y, features=X)
    rare, common = known.y == 1, known.y == 0
    new = np.concatenate([rng.choice(np.flatnonzero(rare), 300), rng.choice(np.flatnonzero(common), 100)])
    found = find_shift(known, known.p[new], known.features[new], intervals=False)
    assert found.kind == "other"
    assert "rests on" in found.reason
    assert find_shift(known, known.p[common][:400], known.features[common][:400], intervals=False).kind == "none"


def test_features_veto_shares_that_only_another_model_suggests():
    rng = np.random.default_rng(9)
    X, y = sample(rng, 1500, (0.7, 0.3))
    known = Reference.of(posterior(X, (0.7, 0.3)), y, features=X)
    X_new, _ = sample(rng, 500, (0.7, 0.3))
    biased = posterior(X_new, (0.5, 0.5))  # a model that gives the second class more
    assert find_shift(known, biased, intervals=False).kind == "shares"  # probabilities alone cannot tell
    found = find_shift(known, biased, X_new, intervals=False)
    assert found.kind == "none"
    assert "features do not confirm" in found.reason
    assert found.shares == found.before
