"""Calibration: probabilities that mean what they say, fitted on held-out labels."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from evalign.decision.rule import (
    FLOOR,
    Floats,
    Labels,
    Task,
    as_labels,
    as_probabilities,
    as_weights,
    expit,
    logit,
    softmax,
)

RIDGE = 0.5  # of log slope and offsets: a prior of standard deviation 1.4 about "already calibrated"
FOLDS = 5
STEEPEST = 30.0  # log slope that a line search may look at: beyond it every probability is 0 or 1 anyway


def floor_of(p: Floats, *, multilabel: bool) -> float:
    """What a probability of 0 stands for: half of the smallest that is not, where a model says 0 at all.

    Neighbours and forests say 0 of what they have not seen among few; taken at its word, its logarithm would
    outweigh all other rows.
    """
    values = np.concatenate([p.ravel(), 1 - p.ravel()]) if multilabel else p.ravel()
    positive = values[values > 0]
    return float(np.clip(positive.min() / 2, FLOOR, 0.05)) if len(positive) < len(values) else FLOOR


def fit_temperature(probabilities: Any, target: Any, *, task: Task = "multiclass", sample_weight: Any = None) -> float:
    """T that minimises the log-loss of p^(1 / T), normalised (Guo 2017); above 1 where p is overconfident.

    Labels are class indices (n,), or 0/1 (n, L) with task="multilabel". Within 1/20 and 20.

    >>> fit_temperature([0.9, 0.9, 0.9, 0.1], [1, 1, 0, 0]) > 1
    True
    """
    p = as_probabilities(probabilities, task)
    y, weight, multilabel = as_labels(target, p, task), as_weights(sample_weight, p), task == "multilabel"
    return temperature_of(p, y, weight, multilabel=multilabel, floor=floor_of(p, multilabel=multilabel))


def temperature_of(p: Floats, y: Labels, weight: Floats, *, multilabel: bool, floor: float = FLOOR) -> float:
    """`fit_temperature` of checked arrays."""
    loss = _log_loss(p, y, weight, multilabel=multilabel, floor=floor)
    # The log-loss is convex in 1 / T, so it has one dip in log T too: golden section search.
    low, high, ratio = np.log(1 / 20), np.log(20.0), (np.sqrt(5) - 1) / 2
    a, b = high - ratio * (high - low), low + ratio * (high - low)
    at_a, at_b = loss(np.exp(a)), loss(np.exp(b))
    while high - low > 1e-4:
        if at_a <= at_b:
            high, b, at_b = b, a, at_a
            a = high - ratio * (high - low)
            at_a = loss(np.exp(a))
        else:
            low, a, at_a = a, b, at_b
            b = low + ratio * (high - low)
            at_b = loss(np.exp(b))
    return float(np.exp((low + high) / 2))


def helpful_temperature(p: Floats, y: Labels, weight: Floats, *, multilabel: bool, floor: float = FLOOR) -> float:
    """The fitted temperature if it lowers the log-loss of rows it was not fitted on (5 folds), else 1."""
    if len(p) < 2 * FOLDS:
        return 1.0
    # Rows sorted by label and score, then dealt out: folds alike in both, whatever the order of the rows.
    order = np.lexsort((*p.T, *y.reshape(len(y), -1).T))
    fold = np.empty(len(p), dtype=np.int64)
    fold[order] = np.arange(len(p)) % FOLDS
    gain = 0.0
    for k in range(FOLDS):
        fit, rest = fold != k, fold == k
        if weight[fit].sum() == 0:
            continue
        temperature = temperature_of(p[fit], y[fit], weight[fit], multilabel=multilabel, floor=floor)
        loss = _log_loss(p[rest], y[rest], weight[rest], multilabel=multilabel, floor=floor)
        gain += loss(1.0) - loss(temperature)
    return temperature_of(p, y, weight, multilabel=multilabel, floor=floor) if gain > 1e-6 * weight.sum() else 1.0


def _log_loss(p: Floats, y: Labels, weight: Floats, *, multilabel: bool, floor: float) -> Callable[[float], float]:
    """Temperature -> summed log-loss."""
    if multilabel:
        signed = np.where(y == 1, 1.0, -1.0) * logit(p, floor)
        return lambda t: float((weight[:, None] * np.logaddexp(0.0, -signed / t)).sum())
    z = np.log(np.maximum(p, floor))
    at_label = z[np.arange(len(y)), y]

    def loss(t: float) -> float:
        scaled = z / t
        top = scaled.max(axis=1, initial=-np.inf)
        return float((weight * (top + np.log(np.exp(scaled - top[:, None]).sum(axis=1)) - at_label / t)).sum())

    return loss


class Scaling(NamedTuple):
    """q ~ max(p, floor)^(1 / temperature) exp(offsets)."""

    q: Floats
    temperature: float
    offsets: Floats
    floor: float


def scaled_classes(p: Floats, y: Labels, weight: Floats) -> Scaling:
    """p^(1 / T) exp(offsets), normalised, of the best penalised likelihood.

    minimise  sum_i w_i (-log q_i[y_i]) + RIDGE / 2 (log(1 / T)^2 + |offsets|^2). One slope and one offset a
    class: enough to undo class weights, resampling and overconfidence, too little to follow a small sample.
    """
    floor = floor_of(p, multilabel=False)
    z, rows = np.log(np.maximum(p, floor)), np.arange(len(y))

    def loss(x: Floats) -> tuple[float, Floats]:
        slope = np.exp(np.minimum(x[0], STEEPEST))
        q = softmax(slope * z + x[1:])
        value = -float(weight @ np.log(np.maximum(q[rows, y], 1e-300)))
        q[rows, y] -= 1
        q *= weight[:, None]
        return value, np.concatenate([[slope * (q * z).sum()], q.sum(axis=0)])

    best = _minimise(loss, 1 + p.shape[1], weight.sum())
    slope, offsets = float(np.exp(best[0])), best[1:]
    return Scaling(softmax(z * slope + offsets), 1 / slope, offsets, floor)


def scaled_labels(p: Floats, y: Labels, weight: Floats) -> Floats:
    """sigmoid(slope_l logit(p_l) + offset_l) of the best penalised likelihood, label by label (n, L)."""
    z, size = logit(p, floor_of(p, multilabel=True)), p.shape[1]
    sign = np.where(y == 1, 1.0, -1.0)

    def loss(x: Floats) -> tuple[float, Floats]:
        slopes = np.exp(np.minimum(x[:size], STEEPEST))
        scores = slopes * z + x[size:]
        value = float(weight @ np.logaddexp(0.0, -sign * scores).sum(axis=1))
        residual = weight[:, None] * (expit(scores) - y)
        return value, np.concatenate([slopes * (residual * z).sum(axis=0), residual.sum(axis=0)])

    best = _minimise(loss, 2 * size, weight.sum())
    return np.asarray(expit(z * np.exp(best[:size]) + best[size:]))


def _minimise(loss: Callable[[Floats], tuple[float, Floats]], size: int, scale: float, memory: int = 10) -> Floats:
    """(loss(x) + RIDGE / 2 |x|^2) / scale from 0, by L-BFGS with step halving.

    Written out: scipy is no dependency here, and torch.optim takes seconds to import.
    """

    def objective(x: Floats) -> tuple[float, Floats]:
        value, slope = loss(x)
        return (value + RIDGE / 2 * float(x @ x)) / scale, (slope + RIDGE * x) / scale

    x = np.zeros(size)
    value, slope = objective(x)
    pairs: list[tuple[Floats, Floats]] = []
    for _ in range(200):
        if np.abs(slope).max() < 1e-7:
            break
        direction = -_inverse_hessian_times(slope, pairs)
        step = 1.0 if pairs else min(1.0, 1.0 / float(np.abs(direction).max()))
        downhill = float(slope @ direction)
        for _ in range(30):
            moved = x + step * direction
            new_value, new_slope = objective(moved)
            if new_value <= value + 1e-4 * step * downhill:
                break
            step /= 2
        else:  # no step goes down: as far as rounding lets it
            break
        change, bend = moved - x, new_slope - slope
        if change @ bend > 1e-12 * np.sqrt((change @ change) * (bend @ bend)):
            pairs = [*pairs[1 - memory :], (change, bend)]
        x, value, slope = moved, new_value, new_slope
    return x


def _inverse_hessian_times(slope: Floats, pairs: list[tuple[Floats, Floats]]) -> Floats:
    """The two loops of L-BFGS (Nocedal and Wright, algorithm 7.4)."""
    q = slope.copy()
    shares = []
    for change, bend in reversed(pairs):
        share = float(change @ q) / float(change @ bend)
        q -= share * bend
        shares.append(share)
    if pairs:
        change, bend = pairs[-1]
        q *= float(change @ bend) / float(bend @ bend)
    for (change, bend), share in zip(pairs, reversed(shares), strict=True):
        q += change * (share - float(bend @ q) / float(change @ bend))
    return q
