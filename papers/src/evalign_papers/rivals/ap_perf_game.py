"""The game of `ap_perf`: the adversary's best labels for given prices.

Given k predicted and l true positives, a metric of the confusion matrix that is affine in TP, M = a_kl TP + c_kl, sees
of P and Q only their marginals p_ik = P(y_hat_i = 1, k) and q_il = Q(y_check_i = 1, l) (Fathony and Kolter 2020, Sec.
3). Of F_beta only those labels are in the game which their price does not decide (`decided`); the value and the best
q are those of the whole game.

`equilibrium` solves the game by the double oracle method (McMahan, Gordon and Blum 2003). Both sides answer with sets
of rows, of which there are 2^n; but given the other side's mixture the best set of a size is found by sorting, so a
linear program over some of the answers is enough: once neither side has a better answer outside of it, its solution is
that of the whole game.
"""

import importlib
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Metric = Literal["f1", "fbeta", "accuracy", "mcc"]
METRICS: tuple[Metric, ...] = ("f1", "fbeta", "accuracy", "mcc")

EXACT = 1e-9  # what an answer outside may be better by
ROUNDS = 1000  # of new answers; nine are usual for 20 rows
OPTIONS = {
    "output_flag": False,
    "threads": 1,
    "primal_feasibility_tolerance": EXACT / 10,
    "dual_feasibility_tolerance": EXACT / 10,
    # The adversary's new answers leave a solution feasible, so the primal simplex continues from it. Numbers other than
    # prices are between -1 and 2: presolve, scaling and perturbation cost more time than they save.
    "solver": "simplex",
    "simplex_strategy": 4,
    "presolve": "off",
    "simplex_scale_strategy": 0,
    "primal_simplex_bound_perturbation_multiplier": 0.0,
}

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
    """The adversary's q (n,) for F_beta if the price decides it, 0 or 1; nan if the game does.

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
def _opening(metric: Metric, beta: float, n: int, sure: int) -> "Opening":
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


class Answers(NamedTuple):
    """m answers: how many of n rows each has, (m,), and how likely each row is among them, (m, n), 0 or 1 if sure."""

    size: Ints
    rows: Floats

    def and_also(self, other: "Answers") -> "Answers":
        return Answers(np.concatenate([self.size, other.size]), np.concatenate([self.rows, other.rows]))

    def drawn(self, share: Floats) -> tuple[Floats, Floats]:
        """Of answers drawn by share (m,): how often a size occurs (n + 1,), and a row beside it (n + 1, n)."""
        some = np.flatnonzero(share)  # few
        by_size = np.where(np.arange(self.rows.shape[1] + 1)[:, None] == self.size[some], share[some], 0.0)
        return by_size.sum(1), by_size @ self.rows[some]


class Opening(NamedTuple):
    """What is the same for all prices of n rows: the metric, a TP + c by (k, l), and the answers to begin with."""

    gain: Floats
    constant: Floats
    named: Answers  # the predictor's
    true: Answers  # the adversary's
    program: Any  # highspy.HighsLp, of prices 0


def opening(gain: Floats, constant: Floats) -> Opening:
    """gain and constant are (n + 1, n + 1), see `ap_perf_game.affine`; rows are in the order of falling prices.

    The predictor begins with the k first rows, the adversary with the l first ones and with l of all rows by lot: where
    prices are nearly equal, so is the best q, and it would take many sets to put that together.
    """
    n = len(gain) - 1
    sizes = np.arange(n + 1)
    named = Answers(sizes, _first(n))
    by_lot = Answers(sizes[1:n], np.repeat(sizes[1:n, None] / n, n, axis=1))
    true = named.and_also(by_lot)
    return Opening(gain, constant, named, true, _program(_payoff(gain, constant, named, true)))


def equilibrium(prices: Floats, start: Opening) -> tuple[float, Floats]:
    """The metric that the best predictor gets, and the adversary's q (n,), for prices (n,) that do not rise.

    >>> from evalign_papers.rivals.ap_perf_game import affine
    >>> equilibrium(np.array([0.25, -0.25]), opening(*affine("f1", 1.0, 2)))
    (0.4, array([0.4, 0.2]))
    """
    gain, constant, named, true, program = start
    solver = _solver(program)
    solver.changeColsCost(len(true.size), np.arange(1, len(true.size) + 1, dtype=np.int32), -true.rows @ prices)
    for _ in range(ROUNDS):
        share, chance = _solve(solver, len(prices))
        s, q = true.drawn(share[1:])
        r, p = named.drawn(chance[1:])
        # Who names k rows gets sum_l a_kl q_li for row i; t, share's first, is the most that answers so far get.
        better = _better(gain @ q, constant @ s, share[0])
        # Who has l true rows keeps psi_i of row i and pays sum_k a_kl p_ki; chance's first is t - psi.q, which he pays.
        cheaper = _better(prices - gain.T @ p, -r @ constant, chance[0])
        if not (len(better.size) or len(cheaper.size)):
            return float(share[0]), q.sum(0).clip(0.0, 1.0)
        if len(better.size):
            lines = np.column_stack([np.full(len(better.size), -1.0), _payoff(gain, constant, better, true)])
            solver.addRows(len(lines), np.full(len(lines), -np.inf), np.zeros(len(lines)), *_sparse(lines))
            named = named.and_also(better)
        if len(cheaper.size):
            lines = np.column_stack([np.ones(len(cheaper.size)), _payoff(gain, constant, named, cheaper).T])
            free = np.full(len(lines), np.inf)
            solver.addCols(len(lines), -cheaper.rows @ prices, np.zeros(len(lines)), free, *_sparse(lines))
            true = true.and_also(cheaper)
    raise RuntimeError(f"AP-Perf's game of {len(prices)} rows took over {ROUNDS} rounds; use a smaller max_rows")


@lru_cache(maxsize=64)
def _first(n: int) -> Floats:
    """(n + 1, n): the k first of n rows, k = 0 … n."""
    return np.tril(np.ones((n + 1, n)), -1)


def _better(worth: Floats, beside: Floats, so_far: float) -> Answers:
    """The best sets of each size k, whose rows are worth (n + 1, n) and beside (n + 1,), if better than so far."""
    sizes = np.arange(len(worth))
    rows = np.empty_like(worth)
    rows[sizes[:, None], np.argsort(-worth, axis=1, kind="stable")] = _first(len(worth) - 1)
    better = (worth * rows).sum(1) + beside > so_far + EXACT
    return Answers(sizes[better], rows[better])


def _program(payoff: Floats) -> Any:
    """The adversary's linear program: minimise t - psi.q over t and the shares x >= 0 of its answers.

    sum x = 1,  t >= sum_l x_l payoff_kl  for every answer k of the predictor.
    """
    highs, (named, true) = _highspy(), payoff.shape
    program = highs.HighsLp()
    program.num_col_, program.num_row_ = 1 + true, 1 + named
    program.col_cost_ = np.append(1.0, np.zeros(true))
    program.col_lower_, program.col_upper_ = np.append(-np.inf, np.zeros(true)), np.full(1 + true, np.inf)
    program.row_lower_, program.row_upper_ = np.append(1.0, np.full(named, -np.inf)), np.append(1.0, np.zeros(named))
    t = np.append(0.0, np.full(named, -1.0))
    program.a_matrix_.format_ = highs.MatrixFormat.kColwise
    size, starts, places, values = _sparse(np.vstack([t, np.column_stack([np.ones(true), payoff.T])]))
    program.a_matrix_.start_, program.a_matrix_.index_, program.a_matrix_.value_ = (
        np.append(starts, size),
        places,
        values,
    )
    return program


def _payoff(gain: Floats, constant: Floats, named: Answers, true: Answers) -> Floats:
    """The metric of every answer of the predictor, in rows, against every one of the adversary."""
    k, l = named.size[:, None], true.size  # noqa: E741, the paper's letter
    return gain[k, l] * (named.rows @ true.rows.T) + constant[k, l]


def _sparse(vectors: Floats) -> tuple[int, NDArray[np.int32], NDArray[np.int32], Floats]:
    """How many numbers there are in vectors (m, size), where each begins, their places and values."""
    which, places = np.nonzero(vectors)
    starts = np.searchsorted(which, np.arange(len(vectors)))
    return len(which), starts.astype(np.int32), places.astype(np.int32), vectors[which, places]


def _solver(program: Any) -> Any:
    """A new solver for every game, so that the answer does not depend on earlier games."""
    solver = _highspy().Highs()
    for name, value in OPTIONS.items():
        solver.setOptionValue(name, value)
    solver.passModel(program)
    return solver


def _solve(solver: Any, n: int) -> tuple[Floats, Floats]:
    """t and the adversary's shares; psi.q - t and the predictor's chances."""
    solver.run()
    status = solver.getModelStatus()
    if status != _highspy().HighsModelStatus.kOptimal:
        raise RuntimeError(
            f"AP-Perf's linear program of {n} rows was not solved, HiGHS says: {solver.modelStatusToString(status)}"
        )
    solution = solver.getSolution()
    return np.array(solution.col_value), -np.array(solution.row_dual)


def _highspy() -> Any:
    """HiGHS itself, found on first use: no other loss needs it, and scipy cannot continue from an earlier solution."""
    try:
        return importlib.import_module("highspy")
    except ImportError as error:
        raise ImportError("AP-Perf needs highspy, which is not installed; pip install highspy") from error
