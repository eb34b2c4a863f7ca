"""Equilibrium of AP-Perf's game, found between few answers of each side, to which better ones are added.

Both sides answer with sets of rows, of which there are 2^n. But given the other side's mixture the best set of a size
is found by sorting, so a linear program over some answers is enough: where neither side has a better one outside of it,
its solution is that of the whole game. (Double oracle; McMahan, Gordon and Blum 2003.)
"""

import importlib
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

EXACT = 1e-9  # what an answer outside may be better by
ROUNDS = 1000  # of new answers; nine are usual for 20 rows
OPTIONS = {
    "output_flag": False,
    "threads": 1,
    "primal_feasibility_tolerance": EXACT / 10,
    "dual_feasibility_tolerance": EXACT / 10,
    # The adversary's new answers leave a solution feasible, so the primal simplex goes on from it. Numbers are between
    # -1 and 2 but for prices: to look for a smaller program, to scale or to perturb takes longer than it saves.
    "solver": "simplex",
    "simplex_strategy": 4,
    "presolve": "off",
    "simplex_scale_strategy": 0,
    "primal_simplex_bound_perturbation_multiplier": 0.0,
}


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
    """A solver of its own for every game, so that the answer does not depend on games before."""
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
    """HiGHS itself, found on first use: no other loss needs it, and scipy cannot go on from an earlier solution."""
    try:
        return importlib.import_module("highspy")
    except ImportError as error:
        raise ImportError("AP-Perf needs highspy, which is not installed; pip install 'evalign[rivals]'") from error
