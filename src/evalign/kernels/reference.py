r"""Fused row counts in torch operations, for float64 and wherever compilation is unavailable.

The loss depends on a batch only through tp_k and the column sums, so dL/dg_ij is A_j plus B_k at the label, and only
the probabilities need to be kept, as for cross-entropy. With x = p / tau, tau the
mean of the two largest entries (tau <= 1/2, so only the largest can lie above tau), a five-point step with outer
value `low` and breakpoints tau (1 -+ reach) is

    h = a x                                  x < 1 - reach      a = low / (1 - reach)
    h = 1/2 + b (x - 1)                      otherwise          b = (1/2 - low) / reach
    h = 1 - low (1 - p) / (1 - c tau)        x > c = 1 + reach, the largest entry at most

`annealed` has low = T and reach = 5 T / 2; `linear` has low = delta and reach = 1/2. Below c tau, h is a function
of p / tau alone: it does not change when all of p is scaled, so there the softmax's own projection vanishes
(sum_j p_j dL/dp_j = 0), and only a largest entry beyond c tau contributes to it.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from evalign.checks import sum_by_label
from evalign.kernels.plan import Counts, FivePoints, KernelSettings, Slopes

CHUNK = 1 << 20  # entries processed at once: a few buffers of this size stay in a core's cache


class _Rows(NamedTuple):
    """Data of a row for the backward pass: indices of its two largest entries, tau, and the sum of h."""

    first: Tensor
    second: Tensor
    tau: Tensor
    total: Tensor


def row_forward(
    logits: Tensor, y: Tensor, weight: Tensor, settings: KernelSettings
) -> tuple[Counts, tuple[Tensor, ...]]:
    points, smoothing, *_ = settings
    p, d = torch.softmax(logits, 1), logits.shape[1]
    rows, at_label, predicted = _forward(p, y, weight, points)
    tp = sum_by_label(weight * at_label, y, d)
    # log(sum of exp) from the largest entry, whose probability cannot underflow.
    log_sum = _pick(logits, rows.first) - _pick(p, rows.first).log()
    expected = _pick(logits, y)
    if smoothing:
        expected = (1 - smoothing) * expected + smoothing * logits.mean(1)
    # An ignored row counts for nothing, even if its loss is infinite.
    losses = torch.where(weight == 0, 0.0, weight * (log_sum - expected))
    return Counts(tp, predicted, losses.sum(), sum_by_label(weight, y, d)), (logits, y, weight, *rows)


def row_backward(kept: tuple[Tensor, ...], settings: KernelSettings, slopes: Slopes) -> Tensor:
    points, smoothing, *_ = settings
    logits, y, weight, *rest = kept
    p = torch.softmax(logits, 1)
    gradient = torch.empty_like(p)
    anchor = p.new_zeros(()) if slopes.losses is None else slopes.losses
    with torch.autocast(p.device.type, enabled=False):
        for part in _parts(p):
            rows = _Rows(*(x[part] for x in rest))
            given = (slopes.predicted, slopes.tp, anchor)
            _backward(p[part], y[part], weight[part], rows, points, smoothing, *given, gradient[part])
    return gradient


def _forward(p: Tensor, y: Tensor, weight: Tensor, points: FivePoints) -> tuple[_Rows, Tensor, Tensor]:
    n, d = p.shape
    rows = _Rows(y.new_empty(n), y.new_empty(n), p.new_empty(n), p.new_empty(n))
    at_label, predicted = p.new_empty(n), p.new_zeros(d)
    for part in _parts(p):
        q = p[part]
        two, index = q.topk(2, 1)
        largest, first, second = two[:, 0], index[:, 0], index[:, 1]
        tau = two.mean(1)
        h = _values(q, tau, points)
        top = _top_step(largest, tau, points)
        h.scatter_(1, first[:, None], top.value[:, None])
        total = h.sum(1)
        at_label[part] = _pick(h, y[part]) / total
        # Not a vector-matrix product, which autocast would round, and which adds rows one by one in float32.
        predicted += h.mul_((weight[part] / total)[:, None]).sum(0)
        for kept, new in zip(rows, (first, second, tau, total), strict=True):
            kept[part] = new
    return rows, at_label, predicted


def _backward(
    p: Tensor,
    y: Tensor,
    weight: Tensor,
    rows: _Rows,
    points: FivePoints,
    smoothing: float,
    A: Tensor,
    B: Tensor,
    anchor: Tensor,
    out: Tensor,
) -> None:
    first, second, tau, total = rows
    largest = _pick(p, first)
    top = _top_step(largest, tau, points)
    h, scaled = _values_and_slopes(p, tau, points)  # scaled = p h'(p), which also is -tau dh/dtau
    h.scatter_(1, first[:, None], top.value[:, None])
    at_label = B[y]
    mean = (h @ A + _pick(h, y) * at_label) / total  # sum_j g_j dL/dg_j
    share = weight / total
    # out = (dL/dh) p h', with dL/dh = share (A_j + B_k at the label - mean)
    torch.sub(A, mean[:, None], out=out)
    out.mul_(share[:, None])
    out.scatter_add_(1, y[:, None], (share * at_label)[:, None])
    dh_top = _pick(out, first)
    scaled.scatter_(1, first[:, None], (largest * top.slope)[:, None])
    out.mul_(scaled)
    # Through tau: entries below c tau give -(p h') / tau, the largest its own derivative.
    in_top = dh_top * largest * top.slope
    d_tau = dh_top * top.by_tau - (out.sum(1) - in_top) / tau
    projection = in_top + tau * dh_top * top.by_tau  # sum_j p_j dL/dp_j, in which all but the largest cancel
    # Cross-entropy's gradient is p - onehot; its p joins the projection's.
    ce = anchor * weight
    torch.addcmul(out, p, (ce - projection)[:, None], out=out)
    out.scatter_add_(1, y[:, None], (smoothing - 1) * ce[:, None])
    if smoothing:
        out.sub_((smoothing / p.shape[1]) * ce[:, None])
    half = d_tau[:, None] / 2
    out.scatter_add_(1, first[:, None], half * largest[:, None])
    out.scatter_add_(1, second[:, None], half * p.gather(1, second[:, None]))


def _values(p: Tensor, tau: Tensor, points: FivePoints) -> Tensor:
    """h of every entry, as if none were beyond c tau.

    The two lines cross at x = 1 - reach, so that h is the larger of them where the inner one is steeper, else the
    smaller: floating-point passes only, where a comparison and a choice would cost three times as much.
    """
    h = (p * (points.b / tau)[:, None]).add_(0.5 - points.b)
    if points.reach >= 1:
        return h
    outer = p * (points.a / tau)[:, None]
    return torch.maximum(outer, h, out=h) if points.a <= points.b else torch.minimum(outer, h, out=h)


def _values_and_slopes(p: Tensor, tau: Tensor, points: FivePoints) -> tuple[Tensor, Tensor]:
    """The same h, and p h'(p)."""
    if points.reach >= 1:
        scaled = p * (points.b / tau)[:, None]
        return scaled + (0.5 - points.b), scaled
    inner = torch.sub(p, (tau * (1 - points.reach))[:, None]).sign_().clamp_min_(0)  # 1 on the inner line, else 0
    slope = torch.addcmul((points.a / tau)[:, None], inner, ((points.b - points.a) / tau)[:, None])
    scaled = slope.mul_(p)
    return torch.add(scaled, inner, alpha=0.5 - points.b), scaled


class _Top(NamedTuple):
    value: Tensor
    slope: Tensor  # dh/dp
    by_tau: Tensor  # dh/dtau


def _top_step(p: Tensor, tau: Tensor, points: FivePoints) -> _Top:
    """The step at a row's largest entry, the only one that can be beyond c tau."""
    c = 1 + points.reach
    beyond = p > c * tau
    gap = torch.where(beyond, 1 - c * tau, 1.0)
    loss = points.low * (1 - p) / gap
    x = p / tau
    return _Top(
        torch.where(beyond, 1 - loss, 0.5 + points.b * (x - 1)),
        torch.where(beyond, points.low / gap, points.b / tau),
        torch.where(beyond, -c * loss / gap, -points.b * x / tau),
    )


def _pick(x: Tensor, index: Tensor) -> Tensor:
    return x.gather(1, index[:, None])[:, 0]


def _parts(p: Tensor) -> list[slice]:
    size = max(1, CHUNK // p.shape[1])
    return [slice(i, i + size) for i in range(0, p.shape[0], size)]
