"""Significance tests: two methods over the same splits, Holm's correction."""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import NamedTuple

import numpy as np

from evalign.comparison.significance import corrected_error, two_sided_p

PRINTED_TRIALS = 10  # trials of every printed mean with a deviation (BtG Sec. 5, EAST Sec. E.1)
TEST_TO_TRAIN = 0.20 / 0.64  # test share of an honest split; without the validation rows, which is conservative
LEVEL = 0.05


class Comparison(NamedTuple):
    """A difference, its standard error, and the two-sided p value."""

    difference: float
    error: float
    p: float

    @property
    def clear(self) -> bool:
        return self.p < LEVEL


def over_splits(
    ours: Mapping[int, float], theirs: Mapping[int, float], *, test_to_train: float = TEST_TO_TRAIN
) -> Comparison | None:
    """Paired test of two methods on the same splits, ours minus theirs; None for fewer than two common splits.

    Nadeau and Bengio's test, for splits that share rows: see `evalign.comparison.significance`.

    >>> over_splits({0: 0.7, 1: 0.8, 2: 0.9}, {0: 0.7, 1: 0.8, 2: 0.9}).p
    1.0
    """
    gaps = [ours[split] - theirs[split] for split in sorted(ours.keys() & theirs.keys())]
    if len(gaps) < 2:
        return None
    error = corrected_error(gaps, test_to_train)
    return Comparison(fmean(gaps), error, two_sided_p(fmean(gaps), error, len(gaps) - 1))


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjusted p values (Holm 1979): below a level exactly where the step-down procedure rejects at that level.

    >>> [round(p, 6) for p in holm([0.01, 0.04, 0.03])]
    [0.03, 0.06, 0.06]
    """
    # By hand, since `multipletests` of statsmodels runs a full garbage collection (50 to 400 ms) in every call.
    order = np.argsort(p_values, kind="stable")
    raised = np.asarray(p_values, np.float64)[order] * np.arange(len(p_values), 0, -1)
    adjusted = np.empty(len(p_values))
    adjusted[order] = np.minimum(np.maximum.accumulate(raised), 1.0)
    return [float(p) for p in adjusted]
