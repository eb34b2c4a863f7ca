"""The game of `ap_perf`: the adversary's best labels for given prices.

Given k predicted and l true positives, a metric of the confusion matrix that is affine in TP, M = a_kl TP + c_kl, sees
of P and Q only their marginals p_ik = P(y_hat_i = 1, k) and q_il = Q(y_check_i = 1, l) (Fathony and Kolter 2020, Sec.
3): `ap_perf_equilibrium` finds them. Of F_beta only those labels are in the game which their price does not decide
(`decided`); the value and the best q are those of the whole.
"""

from functools import lru_cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from evalign_papers.rivals.ap_perf_equilibrium import Opening, equilibrium, opening

Floats = NDArray[np.float64]
Metric = Literal["f1", "fbeta", "accuracy", "mcc"]
METRICS: tuple[Metric, ...] = ("f1", "fbeta", "accuracy", "mcc")

# A label's price beyond 2, the widest range of a metric (mcc), decides that label: no change of the others is worth it.
DECIDED = 4.0


def adversary(psi: Floats, *, metric: Metric = "f1", beta: float = 1.0) -> tuple[float, Floats]:
    """The adversary's best answer to prices psi (n,): the metric that the best predictor then gets, and q (n,).

    >>> value, q = adversary(np.array([0.0]))
    >>> value, q
    (0.5, array([0.5]))
    """
    if not np.isfinite(psi).all():
        raise ValueError("AP-Perf needs finite logits, got nan or infinity; lower the learning rate")
    q = np.full(len(psi), np.nan) if metric in ("accuracy", "mcc") else decided(psi, beta)
    rows, sure = np.isnan(q), int(np.sum(q == 1.0))
    if not rows.any():
        return 1.0, q  # the predictor names the sure ones, and no other
    # Prices that decide their label anyway are cut: the solver works to 1e-10 of the largest one.
    prices = psi[rows].clip(-DECIDED, DECIDED)
    falling = np.argsort(-prices, kind="stable")
    value, found = equilibrium(prices[falling], _opening(metric, beta, len(prices), sure))
    q[np.flatnonzero(rows)[falling]] = found
    return value, q


def decided(psi: Floats, beta: float) -> Floats:
    """The adversary's q (n,) for F_beta where a price alone decides it, 0 or 1; nan where the game does.

    If no prediction's F_beta changes by more than D with the label of one row, then whoever moves that label's mass
    from 1 to 0 gains -psi_i per mass and loses at most D: q_i = 0 where psi_i < -D, and q_i = 1 where psi_i > D.
    The predictor need not name a row that is never true, and may name all P rows that always are: F_beta is then
    (1 + b^2) TP / (b^2 l + k) with P <= TP <= k, l, and TP + 1 over one more is no less. That makes D smaller, which
    decides more rows.

    >>> decided(np.array([1.5, 0.4, 0.3, -0.3, -0.4]), 1.0)  # one label is sure, so D = 1/3, then two and D = 1/5
    array([1., 1., 1., 0., 0.])
    >>> decided(np.array([0.9, -0.9, -1.1]), 1.0)
    array([nan, nan,  0.])
    """
    q, sure, swing = np.full(len(psi), np.nan), -1, 1.0
    while sure < (sure := int(np.sum(psi > swing))):
        swing = min(swing, _swing(beta, sure, len(psi)))
    q[psi > swing], q[psi < -swing] = 1.0, 0.0
    return q


@lru_cache(maxsize=512)
def _swing(beta: float, sure: int, n: int) -> float:
    """The most that one of n labels changes F_beta where `sure` rows are named and true; D in `decided`."""
    if sure == 0:
        return 1.0  # no positives, true or predicted, against one that is true
    gain, _ = affine("fbeta", beta, n)
    k, l = np.meshgrid(np.arange(sure, n + 1), np.arange(sure, n), indexing="ij")  # noqa: E741, the paper's letter
    less, more = gain[k, l], gain[k, l + 1]
    # A row that is not named lowers F_beta by becoming true, most where all that are named or true are both. One that
    # is named raises it by less the more are right already, and there are k - 1 others to name.
    unnamed, named = np.minimum(k, l) * (less - more), np.where(k > sure, (sure + 1) * more - sure * less, 0.0)
    return float(max(unnamed.max(initial=0.0), named.max(initial=0.0)))


@lru_cache(maxsize=512)
def _opening(metric: Metric, beta: float, n: int, sure: int) -> Opening:
    """The game of n rows beside `sure` ones that are named and true, which k, l and TP in it do not count."""
    gain, constant = (table[sure:, sure:] for table in affine(metric, beta, n + sure))
    return opening(gain, constant + sure * gain)


def affine(metric: Metric, beta: float, n: int) -> tuple[Floats, Floats]:
    """a and c, both (n + 1, n + 1), in M = a[k, l] TP + c[k, l] for k predicted and l true positives among n.

    >>> affine("accuracy", 1.0, 1)
    (array([[2., 2.],
           [2., 2.]]), array([[ 1.,  0.],
           [ 0., -1.]]))
    """
    k, l = np.meshgrid(np.arange(n + 1.0), np.arange(n + 1.0), indexing="ij")  # noqa: E741, the paper's letter
    if metric == "accuracy":
        return np.full_like(k, 2 / n), (n - k - l) / n
    if metric == "mcc":
        above, below, rest = float(n), np.sqrt(k * l * (n - k) * (n - l)), -k * l
    else:
        above, below, rest = 1 + beta**2, beta**2 * l + k, 0 * k
    empty, whole = below == 0, np.where(below == 0, 1.0, below)
    return np.where(empty, 0.0, above / whole), np.where(empty, k == l, rest / whole)
