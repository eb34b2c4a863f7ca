"""Distance of a measured number from the printed one, by an equivalence test that includes the variance over splits.

"No clear difference" does not mean "reached": with ten noisy trials hardly any difference is clear. A number is near or
far only if the data show it, and undecided otherwise.
"""

from collections.abc import Sequence
from math import sqrt
from statistics import fmean, variance
from typing import Literal, NamedTuple

from scipy.stats import t as student_t

from evalign_papers.analysis.hypothesis_tests import PRINTED_TRIALS

NEAR, NOT_FAR = 0.02, 0.05
LEVEL = 0.05  # of each one-sided test: the interval below is one of 90 %
Verdict = Literal["within .02", "within .05", "undecided", "off", "far off"]
VERDICTS: tuple[Verdict, ...] = ("within .02", "within .05", "undecided", "off", "far off")


class Distance(NamedTuple):
    """Absolute difference of measured and printed, with the bounds of its 90 % interval, and its class."""

    difference: float
    low: float
    high: float
    verdict: Verdict


def distance(
    printed: tuple[float, float | None],
    ours: Sequence[float],
    decimals: tuple[int, int] = (2, 2),
    *,
    one_split: bool = False,
    over_splits: Sequence[float] = (),
) -> Distance | None:
    """Classify a printed mean and deviation (of ten trials) against our trials; None for fewer than two.

    Two one-sided tests (Schuirmann 1987): within a margin if the whole 90 % interval of the difference is inside it,
    beyond it if the whole interval is outside. The standard error is that of two independent means. If the trials
    of both share one split and differ only in initial weights (`one_split`), the mean of either still has the variance
    of one split, estimated from `over_splits`, trials on fresh splits. Half a unit of the printed mean's last place is
    rounding: it is added to the upper bound and subtracted from the lower one.

    >>> distance((0.70, 0.01), [0.701, 0.702, 0.699, 0.70, 0.698, 0.70]).verdict
    'within .02'
    >>> distance((0.70, 0.01), [0.5, 0.9, 0.7]).verdict
    'undecided'
    >>> distance((0.70, 0.01), [0.5, 0.51, 0.49]).verdict
    'far off'
    """
    n = len(ours)
    if n < 2:
        return None
    mean, deviation = printed
    own = variance(ours)
    parts = [(own / n, n - 1)]
    if deviation is None:  # a single run: one more draw like ours
        parts.append((own, n - 1))
    else:
        parts.append((max(deviation, 0.5 * 10.0 ** -decimals[1]) ** 2 / PRINTED_TRIALS, PRINTED_TRIALS - 1))
    if one_split and len(over_splits) > 1:
        parts.append((2 * max(0.0, variance(over_splits) - own), len(over_splits) - 1))
    total = sum(part for part, _ in parts)
    if total > 0:
        freedom = total**2 / sum(part**2 / degrees for part, degrees in parts)
        reach = float(student_t.ppf(1 - LEVEL, freedom)) * sqrt(total)
    else:
        reach = 0.0
    difference, rounding = fmean(ours) - mean, 0.5 * 10.0 ** -decimals[0]
    low, high = max(0.0, abs(difference) - rounding - reach), abs(difference) + rounding + reach
    return Distance(difference, low, high, _verdict(low, high))


def _verdict(low: float, high: float) -> Verdict:
    if high <= NEAR + 1e-9:
        return "within .02"
    if high <= NOT_FAR + 1e-9:
        return "within .05"
    if low > NOT_FAR:
        return "far off"
    return "off" if low > NEAR else "undecided"
