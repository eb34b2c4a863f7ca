"""Cutting planes for a regularised maximum of linear functions: the solver behind `svm_perf`.

One slack variable as in Joachims 2006, "Training linear SVMs in linear time" (KDD), with the line search of Franc and
Sonnenburg 2008, "Optimized cutting plane algorithm for support vector machines" (ICML).
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Violated = Callable[[Floats], tuple[float, Floats]]


class Solution(NamedTuple):
    """Weights (d,), the objective there, how far at most it is above the minimum, and the planes it took."""

    w: Floats
    objective: float
    gap: float
    iterations: int


class _Point(NamedTuple):
    """Weights and scores, the objective there, and the plane xi >= delta - turn.scores that touches it."""

    objective: float
    w: Floats
    scores: Floats
    delta: float
    turn: Floats


def minimise(rows: Floats, violated: Violated, total: float, *, gap: float, max_iter: int) -> Solution:
    """The minimum over w of 1/2 |w|^2 + total * xi(rows w), where xi is the maximum of planes and at least 0.

    `violated(scores)` returns the plane that is highest at these scores, (delta, turn) for delta - turn.scores.
    It ends once the objective is within `gap` of the minimum, or after `max_iter` planes.

    >>> hinge = lambda scores: (float(scores[0] < 1), (scores < 1).astype(float))  # max(0, 1 - score)
    >>> w, objective, gap, _ = minimise(np.array([[2.0]]), hinge, 10.0, gap=1e-9, max_iter=50)
    >>> w.round(6).tolist(), round(objective, 6), gap <= 1e-9
    ([0.5], 0.125, True)
    """

    def at(w: Floats, scores: Floats) -> _Point:
        delta, turn = violated(scores)
        return _Point(0.5 * float(w @ w) + total * (delta - float(turn @ scores)), w, scores, delta, turn)

    # The plane 0 says xi >= 0; with it the dual weights add up to `total` exactly.
    planes, deltas, share = np.zeros((1, rows.shape[1])), np.zeros(1), np.ones(1)
    best, lower = at(np.zeros(rows.shape[1]), np.zeros(len(rows))), -np.inf
    iteration = 0
    while iteration < max_iter:
        iteration += 1
        w = total * (share @ planes)
        # Any weights on the simplex bound the minimum from below, so the gap holds even where the QP is inexact.
        lower = max(lower, total * float(share @ deltas) - 0.5 * float(w @ w))
        end = at(w, rows @ w)
        best = _line_search(at, best, end, total)
        if best.objective - lower <= gap:
            break
        # The planes' own minimum jumps about in many dimensions; a cut near the best point so far is more useful.
        cut = at(0.9 * best.w + 0.1 * end.w, 0.9 * best.scores + 0.1 * end.scores)
        planes, deltas = np.vstack([planes, cut.turn @ rows]), np.append(deltas, cut.delta)
        share = simplex_maximum(total * (planes @ planes.T), deltas, np.append(share, 0.0))
    return Solution(best.w, best.objective, max(0.0, best.objective - lower), iteration)


def _line_search(at: Callable[[Floats, Floats], _Point], start: _Point, end: _Point, total: float) -> _Point:
    """The lowest point seen while halving the way from start to end by the sign of the slope.

    Scores are linear along the way, so that no step costs a product with the rows.
    """
    way, along = end.w - start.w, end.scores - start.scores
    low, high, best = 0.0, 1.0, min(start, end, key=_objective)
    for _ in range(6):
        middle = (low + high) / 2
        point = at(start.w + middle * way, start.scores + middle * along)
        rises = float(point.w @ way) - total * float(point.turn @ along) > 0
        low, high = (low, middle) if rises else (middle, high)
        best = min(best, point, key=_objective)
    return best


def _objective(point: _Point) -> float:
    return point.objective


def simplex_maximum(q: Floats, gain: Floats, start: Floats) -> Floats:
    """The maximum of gain.a - 1/2 a'q a over a >= 0, sum(a) = 1, by active sets from a feasible start.

    Solves on the coordinates in use; one that would turn negative is dropped at the wall, and at the optimum of a face
    the coordinate with the steepest gain joins. Warm starts make that a few small systems per added plane.

    >>> simplex_maximum(np.diag([0.0, 4.0]), np.array([0.0, 1.0]), np.array([1.0, 0.0])).round(6).tolist()
    [0.75, 0.25]
    """
    a, used, left = start.copy(), start > 0, np.inf
    # Planes can be dependent; the ridge makes every face's optimum unique, far below any tolerance in use.
    ridge = 1e-13 * max(float(q.diagonal().max()), 1e-13)
    for _ in range(20 * len(a) + 100):
        slope = gain - q @ a
        face = np.flatnonzero(used)
        system = np.ones((len(face) + 1, len(face) + 1))
        system[:-1, :-1] = q[np.ix_(face, face)] + ridge * np.eye(len(face))
        system[-1, -1] = 0.0
        step = np.linalg.solve(system, np.append(slope[face] - slope[face].mean(), 0.0))[:-1]
        shrinking = step < 0
        room = np.where(shrinking, a[face] / np.where(shrinking, -step, 1.0), np.inf)
        length = min(1.0, float(room.min()))
        a[face] = np.maximum(a[face] + length * step, 0.0)
        a /= a.sum()
        if length == 1.0:
            slope = gain - q @ a
            steepest = int(slope.argmax())
            excess = float(slope[steepest] - slope @ a)
            # Solving a face again takes the ridge's error out, until rounding is all that is left.
            if excess <= 1e-12 or (used[steepest] and excess > left / 2):
                break
            left = excess if used[steepest] else np.inf
            used[steepest] = True
        elif length > 0.0:
            a[face[room.argmin()]] = 0.0
            used = a > 0
        else:
            break  # the coordinate that joined cannot grow: its gain was rounding
    return a
