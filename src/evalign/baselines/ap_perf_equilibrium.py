"""Equilibrium of AP-Perf's game, found between few answers of each side, to which better ones are added.

Both sides answer with sets of rows; there are 2^n of them. But given the other side's mixture the best set of each size
is found by sorting, so a linear program over some sets is enough: where neither side has a better answer outside of it,
its solution is that of the whole game.
"""

import importlib
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

EXACT = 1e-9  # what an answer outside may be better by
ROUNDS = 1000  # of new answers; ten are usual for 20 rows


class Answers(NamedTuple):
    """Sets of n rows, (m, n) of 0 and 1, and for every one the size (m,) it stands for."""

    size: Ints
    sets: Floats

    def __add__(self, other: "Answers") -> "Answers":  # type: ignore[override]
        return Answers(np.append(self.size, other.size), np.vstack([self.sets, other.sets]))

    def mean(self, share: Floats) -> tuple[Floats, Floats]:
        """Of answers drawn by share (m,): how often a size occurs (n + 1,), and a row with it (n + 1, n)."""
        n = self.sets.shape[1]
        chosen = np.arange(n + 1)[:, None] == self.size
        return chosen @ share, chosen @ (share[:, None] * self.sets)


class Opening(NamedTuple):
    """What is the same for all prices of n rows: the metric, a TP + c by (k, l), and the answers to begin with."""

    gain: Floats
    constant: Floats
    named: Answers  # the predictor's
    true: Answers  # the adversary's
    program: Any  # highspy.HighsLp, of prices 0


def opening(gain: Floats, constant: Floats) -> Opening:
    """gain and constant are (n + 1, n + 1), see `ap_perf_game.affine`; the rows are in order of falling prices.

    The sets to begin with are the j first rows: named by who names j, and true for every count l, since l is their size
    only on average (see `_program`). With them alone the game is solved already, mostly but not always: l true rows
    may be other ones than l + 1 true rows less one.
    """
    n = len(gain) - 1
    first = np.tril(np.ones((n + 1, n)), -1)
    named = Answers(np.arange(n + 1), first)
    true = Answers(np.append(0, np.repeat(np.arange(1, n + 1), n + 1)), np.vstack([first[:1], *[first] * n]))
    return Opening(gain, constant, named, true, _program(gain, constant, named, true))


def equilibrium(prices: Floats, start: Opening) -> tuple[float, Floats]:
    """The metric that the best predictor gets, and the adversary's q (n,), for prices (n,) that do not rise.

    >>> from evalign.baselines.ap_perf_game import affine
    >>> equilibrium(np.array([0.25, -0.25]), opening(*affine("f1", 1.0, 2)))
    (0.4, array([0.4, 0.2]))
    """
    gain, constant, named, true, program = start
    n, counts = len(prices), np.arange(len(prices) + 1)
    solver = _solver(program)
    solver.changeColsCost(len(true.size), np.arange(1, len(true.size) + 1, dtype=np.int32), -true.sets @ prices)
    for _ in range(ROUNDS):
        value, share, prices_of_size, chance, best = _solve(solver, n)
        # The predictor: with k rows named it is worth the k largest of W_ki = sum_l a_kl q_li, and sum_l c_kl s_l.
        s, q = true.mean(share)
        worth = gain @ q
        largest = np.argsort(-worth, axis=1, kind="stable")
        sets = np.zeros((n + 1, n))
        np.put_along_axis(sets, largest, np.where(np.arange(n) < counts[:, None], 1.0, 0.0), axis=1)
        found = (worth * sets).sum(1) + constant @ s
        name = found > value + EXACT
        # The adversary: row i among l true ones costs w_li = sum_k a_kl p_ki - psi_i, and what a set's size does.
        r, p = named.mean(chance)
        cost = gain.T @ p - prices - prices_of_size[:, None]
        pays = np.where(cost < 0, 1.0, 0.0)
        found = (cost * pays).sum(1) + prices_of_size * counts + r @ constant
        tell = found < best - EXACT
        tell[0] = False  # there is one set of no rows
        if not name.any() and not tell.any():
            return value, q.sum(0).clip(0.0, 1.0)
        if name.any():
            new = Answers(counts[name], sets[name])
            rows = np.hstack([np.full((len(new.size), 1), -1.0), _payoff(gain, constant, new, true)])
            solver.addRows(len(rows), np.full(len(rows), -np.inf), np.zeros(len(rows)), *_sparse(rows))
            named = named + new
        if tell.any():
            new = Answers(counts[tell], pays[tell])
            columns = np.vstack([_sizes(new, n), _payoff(gain, constant, named, new)]).T
            free = np.full(len(columns), np.inf)
            solver.addCols(len(columns), -new.sets @ prices, np.zeros(len(columns)), free, *_sparse(columns))
            true = true + new
    raise RuntimeError(f"AP-Perf's game of {n} rows was not solved in {ROUNDS} rounds; use a smaller max_rows")


def _program(gain: Floats, constant: Floats, named: Answers, true: Answers) -> Any:
    """The adversary's linear program: minimise t - psi.q over t and its answers' shares x.

    t >= sum_(l, v) x_lv (a_kl |S and v| + c_kl)  for every answer (k, S) of the predictor,
    sum x = 1,  sum_v x_lv (|v| - l) = 0  for every l.
    A set v need not have l rows, if all for l have on average: then q_li = sum_(v with i) x_lv is at most s_l, and sums
    to l s_l over i, and such q are those of sets of l rows.
    """
    highs, n = _highspy(), len(gain) - 1
    program = highs.HighsLp()
    program.num_col_, program.num_row_ = 1 + len(true.size), n + 1 + len(named.size)
    program.col_cost_ = np.append(1.0, np.zeros(len(true.size)))
    program.col_lower_ = np.append(-np.inf, np.zeros(len(true.size)))
    program.col_upper_ = np.full(program.num_col_, np.inf)
    program.row_lower_ = np.concatenate([[1.0], np.zeros(n), np.full(len(named.size), -np.inf)])
    program.row_upper_ = np.append(1.0, np.zeros(n + len(named.size)))
    t = np.append(np.zeros(n + 1), np.full(len(named.size), -1.0))
    columns = np.vstack([t, np.vstack([_sizes(true, n), _payoff(gain, constant, named, true)]).T])
    program.a_matrix_.format_ = highs.MatrixFormat.kColwise
    _, starts, program.a_matrix_.index_, program.a_matrix_.value_ = _sparse(columns)
    program.a_matrix_.start_ = np.append(starts, len(program.a_matrix_.index_))
    return program


def _payoff(gain: Floats, constant: Floats, named: Answers, true: Answers) -> Floats:
    """The metric of every answer of the predictor, in rows, against every one of the adversary."""
    pairs = np.ix_(named.size, true.size)
    return gain[pairs] * (named.sets @ true.sets.T) + constant[pairs]


def _sizes(true: Answers, n: int) -> Floats:
    """The rows 0 … n of the program: that shares sum to 1, and that sets for l have l rows on average."""
    found = np.zeros((n + 1, len(true.size)))
    found[true.size, np.arange(len(true.size))] = true.sets.sum(1) - true.size
    found[0] = 1.0
    return found


def _sparse(vectors: Floats) -> tuple[int, NDArray[np.int32], NDArray[np.int32], Floats]:
    """How many numbers there are in vectors (m, size), where each begins, their places and values."""
    which, places = np.nonzero(vectors)
    starts = np.searchsorted(which, np.arange(len(vectors)))
    return len(which), starts.astype(np.int32), places.astype(np.int32), vectors[which, places]


def _solver(program: Any) -> Any:
    """A solver of its own for every game, so that the answer does not depend on games before."""
    solver = _highspy().Highs()
    for name, value in (("output_flag", False), ("presolve", "off"), ("solver", "simplex"), ("threads", 1)):
        solver.setOptionValue(name, value)
    for name in ("primal_feasibility_tolerance", "dual_feasibility_tolerance"):
        solver.setOptionValue(name, EXACT / 10)
    solver.passModel(program)
    return solver


def _solve(solver: Any, n: int) -> tuple[float, Floats, Floats, Floats, float]:
    """t, the adversary's shares, the price of a set's size by l, the predictor's chances, and t - psi.q."""
    solver.run()
    status = solver.getModelStatus()
    if status != _highspy().HighsModelStatus.kOptimal:
        raise RuntimeError(
            f"AP-Perf's linear program of {n} rows was not solved, HiGHS says: {solver.modelStatusToString(status)}"
        )
    solution = solver.getSolution()
    value, *share = solution.col_value
    dual = np.array(solution.row_dual)
    return value, np.array(share), np.append(0.0, dual[1 : n + 1]), -dual[n + 1 :], float(dual[0])


def _highspy() -> Any:
    """HiGHS itself, found on first use: no other loss needs it, and scipy cannot go on from an earlier solution."""
    try:
        return importlib.import_module("highspy")
    except ImportError as error:
        raise ImportError("AP-Perf needs highspy, which is not installed; pip install 'evalign[rivals]'") from error
