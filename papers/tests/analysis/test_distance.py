"""Classes of distance: two one-sided tests, with the variance over splits where trials share one."""

import numpy as np
import pytest
from scipy import stats
from statsmodels.stats.weightstats import ttost_ind

from evalign_papers.analysis.distance import distance


@pytest.mark.parametrize("shift", [0.0, 0.01, 0.018, 0.03, 0.045, 0.06, 0.1])
@pytest.mark.parametrize("spread", [0.002, 0.01, 0.03])
def test_within_a_margin_is_what_statsmodels_equivalence_test_says(shift, spread):
    """Two samples of ten with exactly the printed mean and deviation; Welch's two one-sided tests at 5 %."""
    random = np.random.default_rng(0)
    theirs, ours = (random.normal(size=10) for _ in range(2))
    theirs = 0.7 + spread * (theirs - theirs.mean()) / theirs.std(ddof=1)
    ours = 0.7 + shift + spread * (ours - ours.mean()) / ours.std(ddof=1)
    found = distance((0.7, spread), ours.tolist(), decimals=(9, 9))
    assert found is not None
    for margin, verdicts in ((0.02, ("within .02",)), (0.05, ("within .02", "within .05"))):
        p = ttost_ind(ours, theirs, -margin, margin, usevar="unequal")[0]
        assert (found.verdict in verdicts) == (p < 0.05)


def test_trials_of_one_split_say_nothing_about_other_splits():
    ours, fresh = [0.70, 0.701, 0.699] * 3, [0.6, 0.65, 0.7, 0.75, 0.8] * 2
    alone = distance((0.70, 0.001), ours, (3, 3))
    shared = distance((0.70, 0.001), ours, (3, 3), one_split=True, over_splits=fresh)
    assert alone is not None
    assert shared is not None
    assert (alone.verdict, shared.verdict) == ("within .02", "undecided")
    assert shared.high > 0.1


def test_noise_proves_neither_nearness_nor_distance():
    assert distance((0.5, 0.2), [0.2, 0.8, 0.5]).verdict == "undecided"
    assert distance((0.5, 0.0), [0.7, 0.7, 0.7]).verdict == "far off"
    assert distance((0.5, 0.0), [0.548, 0.548, 0.548]).verdict == "off"
    assert distance((0.5, None), [0.5, 0.51, 0.49]).verdict == "within .05"
    assert distance((0.5, 0.0), [0.5]) is None


def test_a_number_without_deviation_is_one_more_draw():
    """Our mean and one draw: the half-width of the 90 % interval by Satterthwaite's degrees of freedom."""
    ours = np.random.default_rng(0).normal(0.6, 0.05, 10)
    parts = np.array([ours.var(ddof=1) / 10, ours.var(ddof=1)])
    half = stats.t.ppf(0.95, parts.sum() ** 2 / (parts**2 / 9).sum()) * np.sqrt(parts.sum())
    found = distance((float(ours.mean()), None), ours.tolist(), decimals=(12, 12))
    assert found is not None
    assert found.high == pytest.approx(half)


def test_rounding_of_print_is_given_to_neither_side():
    values = [0.51600, 0.51601, 0.51599] * 4
    assert distance((0.50, 0.0001), values, (3, 4)).verdict == "within .02"
    assert distance((0.50, 0.0001), values, (2, 4)).verdict == "within .05"  # 0.495 may have been printed as 0.50
