"""Calibration: probabilities that mean what they say, fitted on held-out labels."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from evalign.decision.arrays import Floats, Labels, Task, as_labels, as_probabilities, as_weights
from evalign.decision.rules import FLOOR, expit, logit, softmax

RIDGE = 0.5  # of log slope and offsets: a prior of standard deviation 1.4 about "already calibrated"
FOLDS = 5


def fit_temperature(
    probabilities: Any, target: Any, *, task: Task = "multiclass", sample_weight: Any = None
) -> float:
    """T that minimises the log-loss of p^(1 / T), normalised (Guo 2017); above 1 where p is overconfident.

    Labels are class indices (n,), or 0/1 (n, L) with task="multilabel". Within 1/20 and 20.

    >>> fit_temperature([0.9, 0.9, 0.9, 0.1], [1, 1, 0, 0]) > 1
    True
    """
    p = as_probabilities(probabilities, task)
    return temperature_of(p, as_labels(target, p, task), as_weights(sample_weight, p), multilabel=task == "multilabel")


def temperature_of(p: Floats, y: Labels, weight: Floats, *, multilabel: bool) -> float:
    """`fit_temperature` of checked arrays."""
    loss = _log_loss(p, y, weight, multilabel=multilabel)
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


def helpful_temperature(p: Floats, y: Labels, weight: Floats, *, multilabel: bool) -> float:
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
        temperature = temperature_of(p[fit], y[fit], weight[fit], multilabel=multilabel)
        loss = _log_loss(p[rest], y[rest], weight[rest], multilabel=multilabel)
        gain += loss(1.0) - loss(temperature)
    return temperature_of(p, y, weight, multilabel=multilabel) if gain > 0 else 1.0


def _log_loss(p: Floats, y: Labels, weight: Floats, *, multilabel: bool) -> Callable[[float], float]:
    """Temperature -> summed log-loss."""
    if multilabel:
        signed = np.where(y == 1, 1.0, -1.0) * logit(p)
        return lambda t: float((weight[:, None] * np.logaddexp(0.0, -signed / t)).sum())
    z = np.log(np.maximum(p, FLOOR))
    at_label = z[np.arange(len(y)), y]

    def loss(t: float) -> float:
        scaled = z / t
        top = scaled.max(axis=1, initial=-np.inf)
        return float((weight * (top + np.log(np.exp(scaled - top[:, None]).sum(axis=1)) - at_label / t)).sum())

    return loss


def scaled_classes(p: Floats, y: Labels, weight: Floats) -> tuple[Floats, float, Floats]:
    """p^(1 / T) exp(offsets) of the best penalised likelihood: (calibrated p, T, offsets (C,)).

    minimise  sum_i w_i (-log q_i[y_i]) + RIDGE / 2 (log(1 / T)^2 + |offsets|^2). One slope and one offset a
    class: enough to undo class weights, resampling and overconfidence, too little to follow a small sample.
    """
    z = np.log(np.maximum(p, FLOOR))
    x, labels, w = torch.from_numpy(z), torch.from_numpy(y), torch.from_numpy(weight)

    def loss(parameters: Tensor) -> Tensor:
        scores = x * parameters[0].exp() + parameters[1:]
        return w @ torch.nn.functional.cross_entropy(scores, labels, reduction="none")

    best = _minimise(loss, 1 + p.shape[1])
    slope, offsets = float(np.exp(best[0])), best[1:]
    return softmax(z * slope + offsets), 1 / slope, offsets


def scaled_labels(p: Floats, y: Labels, weight: Floats) -> Floats:
    """sigmoid(slope_l logit(p_l) + offset_l) of the best penalised likelihood, label by label (n, L)."""
    z = logit(p)
    x, labels = torch.from_numpy(z), torch.from_numpy(y).double()
    w = torch.from_numpy(weight)[:, None]
    size = p.shape[1]

    def loss(parameters: Tensor) -> Tensor:
        scores = x * parameters[:size].exp() + parameters[size:]
        return (w * torch.nn.functional.binary_cross_entropy_with_logits(scores, labels, reduction="none")).sum()

    best = _minimise(loss, 2 * size)
    return np.asarray(expit(z * np.exp(best[:size]) + best[size:]))


def _minimise(loss: Callable[[Tensor], Tensor], size: int) -> Floats:
    """loss(x) + RIDGE / 2 |x|^2 from 0 by L-BFGS."""
    x = torch.zeros(size, dtype=torch.float64, requires_grad=True)
    optimiser = torch.optim.LBFGS([x], max_iter=200, tolerance_grad=1e-6, tolerance_change=1e-10, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimiser.zero_grad()
        total = loss(x) + RIDGE / 2 * x.square().sum()
        total.backward()  # type: ignore[no-untyped-call]
        return total

    with torch.enable_grad():
        optimiser.step(closure)  # type: ignore[arg-type]
    return np.asarray(x.detach().numpy().copy())
