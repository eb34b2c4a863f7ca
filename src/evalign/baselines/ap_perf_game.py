"""The game of `ap_perf`: the adversary's best labels for given prices, by a linear program.

Given k predicted and l true positives, a metric of the confusion matrix that is affine in TP, M = a_kl TP + c_kl, sees
of P and Q only their marginals p_ik = P(y_hat_i = 1, k) and q_il = Q(y_check_i = 1, l) (Fathony and Kolter 2020, Sec.
3), so the game is a linear program with O(n^2) variables and constraints. Of F_beta only those labels are in it which
their price does not decide (`decided`, `_taken_back`); the value and the best q are those of the whole.
"""

import importlib
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

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
    # Prices that decide their label anyway are cut: the solver works to 1e-7 of the largest one.
    prices = psi[rows].clip(-DECIDED, DECIDED)
    n, program = len(prices), _program(metric, beta, len(prices), sure)
    cost = program.cost.copy()
    cost[: n * n] = -np.tile(prices, n)
    # True labels that the adversary would rather take back are not in the program, nor levels that lack labels.
    allowed = prices >= -_taken_back(metric, beta, n, sure)[:, None]
    levels = allowed.sum(1) >= np.arange(1, n + 1)
    entries = (allowed & levels[:, None]).ravel()
    rest = np.ones(n * n + n + 1, dtype=bool)
    columns = np.concatenate([entries, [True], levels, rest])
    at_most, equal = program.at_most[np.append(entries, rest)][:, columns], np.append(levels, True)
    solved = _scipy("optimize").linprog(
        cost[columns], A_ub=at_most, b_ub=np.zeros(at_most.shape[0]), A_eq=program.equal[equal][:, columns],
        b_eq=program.total[equal], bounds=program.bounds[columns],
        method="highs-ds", options={"presolve": False},  # presolve takes longer than it saves
    )  # fmt: skip
    if solved.status != 0:
        raise RuntimeError(f"AP-Perf's linear program of {n} rows was not solved, scipy says: {solved.message}")
    each = np.zeros(n * n)
    each[entries] = solved.x[: entries.sum()]
    q[rows] = each.reshape(n, n).sum(0).clip(0.0, 1.0)
    return float(solved.fun + prices @ q[rows]), q


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
def _taken_back(metric: Metric, beta: float, n: int, sure: int) -> Floats:
    """(n,) the most that F_beta rises when one of l = 1 … n true labels (beside `sure` ones) is taken back.

    A label whose price is below minus that is never among l true ones: without it the adversary is better off.
    """
    if metric in ("accuracy", "mcc"):
        return np.full(n, np.inf)
    gain, _ = affine("fbeta", beta, n + sure)
    k, l = np.meshgrid(np.arange(sure, n + sure + 1), np.arange(sure + 1, n + sure + 1), indexing="ij")  # noqa: E741
    # It rises for those who did not name the row, most for those who are right in all that can be right.
    rises: Floats = (np.minimum(k, l - 1) * (gain[k, l - 1] - gain[k, l])).max(0)
    if sure == 0:
        rises[0] = 1.0  # no positives are left, and whoever predicted none is right
    return rises


class _Program(NamedTuple):
    """minimise cost.x where at_most x <= 0, equal x = total, within bounds; x is described in `_program`."""

    cost: Floats
    at_most: Any
    equal: Any
    total: Floats
    bounds: Floats


@lru_cache(maxsize=512)
def _program(metric: Metric, beta: float, n: int, sure: int) -> _Program:
    """The adversary's linear program over x = (q_li, s_l, u_ki, lambda_k, t), k and l from 1 but s_l from 0.

    The n rows play beside `sure` ones that are named and true, which k, l and TP here do not count.

    s_l = Q(l true positives), q_li = Q(l true ones, i among them):  sum_i q_li = l s_l,  q_li <= s_l,  sum_l s_l = 1.
    The predictor that answers with k positives picks the k samples with the largest W_ki = sum_l a_kl q_li. The sum
    of the k largest is min over lambda, u >= 0 of  k lambda_k + sum_i u_ki  where  u_ki >= W_ki - lambda_k,  and
    t, the predictor's best, is at least this plus sum_l c_kl s_l, for every k from 0.
    """
    sparse = _scipy("sparse")
    gain, constant = (table[sure:, sure:] for table in affine(metric, beta, n + sure))
    constant = constant + sure * gain
    one, each = np.ones((n, 1)), np.arange(1.0, n + 1)
    eye, wide = sparse.eye_array(n), sparse.eye_array(n * n)
    columns = sparse.kron(eye, one)  # (n^2, n): entry (k, i) takes the value of k
    skip_first = sparse.eye_array(n, n + 1, k=1)  # drops l = 0 (transposed: puts a row of zeros at k = 0)
    at_most = sparse.block_array(
        [
            [wide, -columns @ skip_first, None, None, None],
            [sparse.kron(gain[1:, 1:], eye), None, -wide, -columns, None],
            [None, constant, skip_first.T @ columns.T, skip_first.T @ sparse.diags_array(each), -np.ones((n + 1, 1))],
        ]
    )
    equal = sparse.block_array(
        [
            [columns.T, -sparse.diags_array(each) @ skip_first, None],
            [None, np.ones((1, n + 1)), sparse.coo_array((1, n * n + n + 1))],
        ]
    )
    size = 2 * n * n + 2 * n + 2
    cost, bounds = np.zeros(size), np.tile([0.0, np.inf], (size, 1))
    cost[-1], bounds[-n - 1 :, 0] = 1.0, -np.inf
    return _Program(cost, at_most.tocsr(), equal.tocsr(), np.append(np.zeros(n), 1.0), bounds)


def _scipy(name: str) -> Any:
    """A part of scipy, found on first use: it comes with scikit-learn, and no other loss needs it."""
    try:
        return importlib.import_module(f"scipy.{name}")
    except ImportError as error:
        raise ImportError("AP-Perf needs scipy, which is not installed; pip install 'evalign[tables]'") from error


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
