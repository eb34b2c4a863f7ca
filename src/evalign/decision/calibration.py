"""Calibration of probabilities on held-out labels: temperature, class offsets, and one slope and offset per label."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.optimize import minimize
from scipy.special import expit, softmax

from evalign.decision.rule import FLOOR, Floats, Labels, Vector, logit, recalibrated

RIDGE = 0.5  # ridge on log slope and offsets: a prior of standard deviation 1.4 around "already calibrated"
STEEPEST = 30.0  # largest log slope: beyond it every probability is 0 or 1
BLOCK = 2**18  # probabilities processed at a time, so that temporary arrays fit in the cache
SAMPLE = 2**23  # maximum probabilities used in a fit; larger arrays are sampled by row, stratified
ROWS = 4000  # maximum held-out rows kept, and new rows used, for tests of a shift


def probability_floor(p: Floats, *, multilabel: bool) -> float:
    """Value that replaces a probability of 0: half the smallest positive one, if there are zeros.

    Nearest neighbours and forests return exact zeros, whose logarithm would outweigh all other rows.
    """
    values = np.concatenate([p.ravel(), 1 - p.ravel()]) if multilabel else p.ravel()
    smallest = values.min(where=values > 0, initial=1.0)
    return float(np.clip(smallest / 2, FLOOR, 0.05)) if (values == 0).any() else FLOOR


def sampled_rows(p: Floats, weight: Floats) -> Labels:
    """Rows to keep for tests of a shift, at most `ROWS`; drawn by weight where weights differ."""
    most = min(ROWS, max(100, 2**20 // p.shape[1]))
    random = np.random.default_rng(0)
    if weight.min() < weight.max():
        return np.asarray(random.choice(len(p), min(most, len(p)), p=weight / weight.sum()))
    return np.arange(len(p)) if len(p) <= most else np.sort(random.choice(len(p), most, replace=False))


def balanced_folds(p: Floats, y: Labels, folds: int) -> Labels:
    """Fold of each row: rows, sorted by label and score, are assigned in turn, independent of their order."""
    fold = np.empty(len(p), dtype=np.int64)
    fold[np.lexsort((*p.T[:8], *y.reshape(len(y), -1).T[:8]))] = np.arange(len(p)) % folds
    return fold


@dataclass(frozen=True)
class Calibration:
    """q ~ max(p, floor)^(1 / temperature) exp(offsets), normalised; label by label if multilabel."""

    temperature: float | Vector
    offsets: Vector
    floor: float
    multilabel: bool

    def __call__(self, p: Floats) -> Floats:
        return recalibrated(p, self.temperature, self.offsets, floor=self.floor, multilabel=self.multilabel)

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of a `Rule` that apply this calibration."""
        return {"temperature": self.temperature, "offsets": self.offsets, "floor": self.floor}


def fit_calibration(
    p: Floats, y: Labels, weight: Floats, *, multilabel: bool = False, ridge: float = RIDGE
) -> Calibration:
    """Temperature and class offsets of the best penalised likelihood; multilabel: a slope and an offset per label.

    minimise  sum_i w_i (-log q_i[y_i]) + ridge / 2 (log(1 / T)^2 + |offsets|^2). One slope and one offset per class
    undo class weights, resampling and overconfidence, and are few enough for a small sample.
    """
    floor = probability_floor(p, multilabel=multilabel)
    if p.size > SAMPLE:
        part = balanced_folds(p, y, -(-p.size // SAMPLE)) == 0
        p, y, weight = p[part], y[part], weight[part]
    size = p.shape[1]
    z = logit(p, floor) if multilabel else np.log(np.maximum(p, floor))
    step = max(1, BLOCK // size)
    blocks = [slice(i, i + step) for i in range(0, len(y), step)]
    if multilabel:

        def label_loss(x: Floats, *, curvature: bool = False) -> tuple[float, Floats]:
            slopes, value, found = np.exp(np.minimum(x[:size], STEEPEST)), 0.0, np.zeros(2 * size)
            for b in blocks:
                scores = slopes * z[b] + x[size:]
                value += float(weight[b] @ np.logaddexp(0.0, np.where(y[b] == 1, -scores, scores)).sum(axis=1))
                q = expit(scores)
                own = weight[b, None] * (q * (1 - q) if curvature else q - y[b])
                steps = slopes * z[b]
                found += np.concatenate([(own * (steps**2 if curvature else steps)).sum(axis=0), own.sum(axis=0)])
            return value, found

        best = _minimise(label_loss, 2 * size, weight.sum(), ridge)
        return Calibration(tuple(np.exp(-best[:size])), tuple(best[size:]), floor, True)

    def class_loss(x: Floats, *, curvature: bool = False) -> tuple[float, Floats]:
        slope, value, found = np.exp(np.minimum(x[0], STEEPEST)), 0.0, np.zeros(1 + size)
        for b in blocks:
            q = np.asarray(softmax(slope * z[b] + x[1:], axis=1))
            rows = np.arange(len(q))
            value -= float(weight[b] @ np.log(np.maximum(q[rows, y[b]], 1e-300)))
            if curvature:
                mean = (q * z[b]).sum(axis=1)
                found[0] += slope**2 * float(weight[b] @ ((q * z[b] ** 2).sum(axis=1) - mean**2))
                found[1:] += weight[b] @ (q * (1 - q))
                continue
            q[rows, y[b]] -= 1
            q *= weight[b, None]
            found[0] += slope * np.vdot(q, z[b])
            found[1:] += q.sum(axis=0)
        return value, found

    best = _minimise(class_loss, 1 + size, weight.sum(), ridge)
    return Calibration(float(np.exp(-best[0])), tuple(best[1:]), floor, False)


def _minimise(loss: Callable[..., tuple[float, Floats]], size: int, scale: float, ridge: float) -> Floats:
    """Minimiser of (loss(x) + ridge / 2 |x|^2) / scale, from 0.

    Parameters are scaled by the curvature at 0: offsets of rare and frequent classes differ in it by their shares, and
    L-BFGS would need hundreds of rounds for many classes.
    """
    unit = np.sqrt(scale / (np.maximum(loss(np.zeros(size), curvature=True)[1], 0.0) + ridge))

    def objective(u: Floats) -> tuple[float, Floats]:
        value, slope = loss(unit * u)
        return (value + ridge / 2 * float((unit * u) @ (unit * u))) / scale, unit * (slope + ridge * unit * u) / scale

    found = minimize(objective, np.zeros(size), jac=True, method="L-BFGS-B", options={"gtol": 1e-7, "ftol": 1e-14})
    return np.asarray(unit * found.x, dtype=np.float64).round(10)  # further digits depend on the order of rows
