"""Tests of differences against scipy's, a slow definition, and simulated noise."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from statsmodels.stats.multitest import multipletests

from evalign_papers.analysis.hypothesis_tests import holm, over_splits


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), min_size=2, max_size=12))
def test_without_shared_rows_it_is_the_paired_t_test(pairs: list[tuple[int, int]]) -> None:
    a, b = ({i: pair[side] / 50 for i, pair in enumerate(pairs)} for side in (0, 1))
    found = over_splits(a, b, test_to_train=0.0)
    assert found is not None
    gaps = np.array([a[i] - b[i] for i in a])
    if np.ptp(gaps) < 1e-12:  # scipy gives nan or warns there
        assert found.p == pytest.approx(1.0 if abs(gaps[0]) < 1e-12 else 0.0, abs=1e-9)
    else:
        assert found.p == pytest.approx(stats.ttest_rel(list(a.values()), list(b.values())).pvalue, abs=1e-9)


def test_correction_for_shared_rows_by_hand() -> None:
    """Nadeau and Bengio 2003, Eq. 9: the variance is (1/J + n2/n1) times the sample's."""
    gaps = np.array([0.03, 0.01, 0.04, -0.01, 0.02])
    found = over_splits(dict(enumerate(gaps)), dict.fromkeys(range(5), 0.0), test_to_train=0.25)
    assert found is not None
    t = gaps.mean() / np.sqrt((1 / 5 + 0.25) * gaps.var(ddof=1))
    assert found.p == pytest.approx(2 * (1 - stats.t.cdf(t, 4)))
    assert found.error == pytest.approx(gaps.mean() / t)


def test_only_splits_in_common_are_compared() -> None:
    found = over_splits({0: 0.5, 1: 0.6, 2: 0.9}, {1: 0.5, 2: 0.7, 3: 0.0})
    assert found is not None
    assert found.difference == pytest.approx(0.15)
    assert over_splits({0: 0.5, 1: 0.6}, {1: 0.5, 2: 0.7}) is None


def test_random_splits_of_equal_methods_are_called_different_as_often_as_said() -> None:
    """Two rules that guess alike, scored on random fifths of the same rows: the usual test is wrong far too often."""
    rng = np.random.default_rng(0)
    wrong = {0.25: 0, 0.0: 0}
    for _ in range(400):
        gap = rng.integers(0, 2, 500) - rng.integers(0, 2, 500)
        # Training on the other rows moves both alike; what differs is which rows are tested.
        trained = [rng.permutation(500)[:100] for _ in range(10)]
        gaps = {i: float(gap[rows].mean()) for i, rows in enumerate(trained)}
        for ratio in wrong:
            found = over_splits(gaps, dict.fromkeys(gaps, 0.0), test_to_train=ratio)
            assert found is not None
            wrong[ratio] += found.clear
    assert wrong[0.25] / 400 < 0.08
    assert wrong[0.0] / 400 > 0.10


def rejected(p_values: list[float], level: float) -> set[int]:
    """Holm's step-down procedure, word for word: go on from the smallest until one is above level / (those left)."""
    out: set[int] = set()
    for place in sorted(range(len(p_values)), key=lambda i: p_values[i]):
        if p_values[place] > level / (len(p_values) - len(out)):
            break
        out.add(place)
    return out


@given(
    st.lists(st.integers(0, 200).map(lambda n: n / 200), max_size=8), st.integers(1, 99).map(lambda n: n / 100 + 1e-6)
)
def test_holm_rejects_where_the_procedure_does(p_values: list[float], level: float) -> None:
    adjusted = holm(p_values)
    assert {i for i, p in enumerate(adjusted) if p <= level} == rejected(p_values, level)
    assert all(p <= a <= 1 for p, a in zip(p_values, adjusted, strict=True))


def test_holm_is_that_of_statsmodels() -> None:
    rng = np.random.default_rng(0)
    for count in (1, 2, 7, 60):
        p_values = np.round(rng.random(count) ** 3, 2).tolist()  # rounded, so that some are tied
        assert holm(p_values) == pytest.approx(multipletests(p_values, method="holm")[1].tolist())
    assert holm([]) == []
