"""Metrics of whole curves: areas over a grid of thresholds, and rankings, whose thresholds are the scores.

A ranking metric depends only on the order of the scores, so its gradient is 0 wherever it exists. `ranking` has the
exact value and the gradient of soft counts at thresholds that follow the scores; `exact_ranking` has only the value.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from evalign import checks
from evalign.checks import represents, safe_divide
from evalign.confusion import Confusion
from evalign.metrics import MetricFunction

RANKINGS = ("auroc", "average_precision", "precision_at", "recall_at", "recall_at_precision", "top_k_accuracy")
THRESHOLDS = 64  # quantiles of the positive scores at which soft counts are taken
LEAST_SPREAD = 0.1  # of the scores: with a smaller one the gradient of the sigmoids would be unbounded
ENTRIES = 1 << 24  # maximum of thresholds x scores, by using fewer thresholds


def mean_over_grid(c: Confusion, metric: MetricFunction, *, vectorised: bool = True) -> Tensor:
    """The mean of a metric over the leading (threshold) dimension, BtG's rule for reporting."""
    if vectorised:
        return metric(c).mean(0)
    return torch.stack([metric(part) for part in c.unbind()]).mean(0)


def auroc(c: Confusion) -> Tensor:
    """Area under (FPR, TPR) at thresholds that rise along the first dimension, by trapezoids (BtG Eq. 18, 21).

    The ends (1, 1) at tau = 0 and (0, 0) at tau = 1 are added. Binary counts give the area of class 1, multilabel
    ones the mean over the labels that have both outcomes; 0 if no area is defined, as with a single class. The area
    depends on where the scores lie between the thresholds; `ranking` depends only on their order.

    >>> from evalign import membership, steps
    >>> s = membership.grid(torch.tensor([0.2, 0.4, 0.35, 0.8]), steps.hard, torch.arange(0.05, 1, 0.05))
    >>> auroc(Confusion.soft_grid(s, torch.tensor([0, 0, 1, 1]), "binary"))
    tensor(0.7500)
    """
    if not c.multilabel:
        total = c.total.unsqueeze(-1)
        c = Confusion(c.tp[..., 1:], c.actual[..., 1:], c.predicted[..., 1:], total, multilabel=True)
    negatives = c.total - c.actual
    tpr, fpr = safe_divide(c.tp, c.actual), safe_divide(c.fp, negatives)
    first, last = torch.ones_like(tpr[:1]), torch.zeros_like(tpr[:1])
    tpr, fpr = torch.cat([first, tpr, last]), torch.cat([first, fpr, last])
    area = ((fpr[:-1] - fpr[1:]) * (tpr[1:] + tpr[:-1])).sum(0) / 2
    defined = (c.actual[0] > 0) & (negatives[0] > 0)
    return safe_divide(torch.where(defined, area, 0.0).sum(-1), defined.sum(-1).to(area.dtype))


def check_at(metric: str, at: Any) -> None:
    """Check `at`: rows or a share of them for a budget, a precision, or the k of top-k accuracy."""
    needs = metric in ("precision_at", "recall_at", "recall_at_precision", "top_k_accuracy")
    if needs != (at is not None):
        what = "needs at=: rows (an int) or a share of them (a float), a precision, or k" if needs else "takes no at"
        raise ValueError(f"metric {metric!r} {what}, got {at!r}")
    if at is None:
        return
    if metric == "recall_at_precision" or isinstance(at, float):
        checks.check_number("at", at, low=0.0, high=1.0, open_low=True)
        if metric == "top_k_accuracy":
            raise ValueError(f"at of top_k_accuracy must be a whole number, got {at!r}")
    else:
        checks.check_number("at", at, low=1)


def exact_ranking(
    metric: str,
    scores: Tensor,
    target: Tensor,
    *,
    sample_weight: Tensor | None = None,
    at: float | None = None,
    max_fpr: float | None = None,
) -> Tensor:
    """A ranking metric of scores, in float64 and without a gradient, as in scikit-learn.

    `scores` and `target` are (N,), or (N, L) for the mean over labels; for "top_k_accuracy" (N, C) and (N,).

    >>> y, p = torch.tensor([0, 0, 1, 1]), torch.tensor([0.1, 0.4, 0.35, 0.8])
    >>> exact_ranking("auroc", p, y), exact_ranking("average_precision", p, y)
    (tensor(0.7500, dtype=torch.float64), tensor(0.8333, dtype=torch.float64))
    >>> exact_ranking("precision_at", p, y, at=1), exact_ranking("recall_at_precision", p, y, at=0.6)
    (tensor(1., dtype=torch.float64), tensor(1., dtype=torch.float64))
    """
    checks.check_choice("metric", metric, RANKINGS)
    check_at(metric, at)
    if max_fpr is not None:
        checks.check_number("max_fpr", max_fpr, low=0.0, high=1.0, open_low=True)
    checks.check_floating("scores", scores)
    checks.check_labels(target, soft_allowed=metric != "top_k_accuracy")
    if metric == "top_k_accuracy":
        checks.check_class_shapes(scores, target, name="scores")
        checks.check_label_range(target, scores.shape[1], None)
    else:
        checks.check_same_shape("scores", scores, target)
        checks.check_bounds("target", target.double(), low=0.0, high=1.0)
    weight = torch.ones(target.shape) if sample_weight is None else sample_weight
    weight = checks.check_weights(weight, tuple(target.shape)).to(scores.device)
    if checks.can_read(scores) and bool(scores.isnan().any()):
        raise ValueError("scores must be numbers, got nan; has the network diverged?")
    if not len(scores):
        return scores.new_zeros((), dtype=torch.float64)
    with torch.no_grad():
        if metric == "top_k_accuracy":
            return _top_k(scores.double(), target, weight.double(), int(at or 1), 1.0)[0]
        scores, target, weight = (x.reshape(len(x), -1) for x in (scores, target, weight))
        order = _Order.of(scores.double(), target.double(), weight.double())
        return _mean_defined(order, _exact(metric, order, at, max_fpr), metric)


def ranking(
    metric: str,
    scores: Tensor,
    y: Tensor,
    weight: Tensor,
    *,
    at: float | None = None,
    max_fpr: float | None = None,
    temperature: float | Tensor = 0.2,
) -> Tensor:
    """The exact metric of scores (M, L), 0/1 labels and weights, with the gradient of its soft form.

    Soft counts are sums of sigmoid((z - tau) / s), s the temperature x the spread of the scores, or `LEAST_SPREAD` if
    that is more, at thresholds tau that are scores themselves: quantiles of the positives for areas, and the k-th
    largest score for a budget. The spread is a constant to derivatives.
    """
    if metric == "top_k_accuracy":
        value, soft = _top_k(scores, y, weight, int(at or 1), temperature)
        return represents(value, soft)
    order = _Order.of(scores, y, weight)
    with torch.no_grad():
        value = _mean_defined(order, _exact(metric, order, at, max_fpr), metric)
        value = torch.where((scores.isnan() & (weight != 0)).any(), math.nan, value)
    soft = _mean_defined(order, _soft(metric, order, at, max_fpr, temperature), metric)
    return represents(value, soft)


class _Order(NamedTuple):
    """Columns sorted by decreasing score, (L, M): scores, and positives and negatives up to each, ties included.

    `hits` and `alarms` are the weights of the entries, `tp` and `fp` their sums up to the last of equal scores, `start`
    the position of the first of equal scores.
    """

    z: Tensor
    hits: Tensor
    alarms: Tensor
    tp: Tensor
    fp: Tensor
    start: Tensor

    @classmethod
    def of(cls, scores: Tensor, y: Tensor, weight: Tensor) -> "_Order":
        # Ignored entries may be nan; infinite scores become very large ones, which have finite differences.
        scores = torch.where(weight == 0, 0.0, scores).nan_to_num(0.0, 1e4, -1e4)
        place = scores.detach().argsort(0, descending=True)
        z = scores.gather(0, place).t().contiguous()
        w = weight.gather(0, place).t()
        hits = w * y.to(w.dtype).gather(0, place).t()
        falling = -z.detach()
        start = torch.searchsorted(falling, falling, right=False)
        end = torch.searchsorted(falling, falling, right=True) - 1
        tp, fp = (x.double().cumsum(1).gather(1, end) for x in (hits, w - hits))
        return cls(z, hits, w - hits, tp, fp, start)

    @property
    def before(self) -> tuple[Tensor, Tensor]:
        """tp and fp before the first of equal scores."""
        last = (self.start - 1).clamp_min(0)
        return tuple(torch.where(self.start > 0, x.gather(1, last), 0.0) for x in (self.tp, self.fp))  # type: ignore[return-value]


def _exact(metric: str, order: _Order, at: float | None, max_fpr: float | None) -> Tensor:
    """The metric of every column, (L,)."""
    tp, fp = order.tp, order.fp
    positives, negatives = tp[:, -1:], fp[:, -1:]
    if metric == "auroc":
        limit = 1.0 if max_fpr is None else max_fpr
        tpr, fpr = safe_divide(tp, positives), safe_divide(fp, negatives)
        left, low = (torch.nn.functional.pad(x, (1, 0))[:, :-1] for x in (fpr, tpr))
        right = fpr.clamp_max(limit)
        high = low + (tpr - low) * safe_divide(right - left, fpr - left)
        area = torch.where(left < limit, (right - left) * (low + high) / 2, 0.0).sum(1)
        return area if max_fpr is None or max_fpr == 1 else _standardised(area, limit)
    if metric == "average_precision":
        return (order.hits * safe_divide(tp, tp + fp)).sum(1) / positives[:, 0].clamp_min(1e-300)
    if metric == "recall_at_precision":
        assert at is not None
        reached = safe_divide(tp, tp + fp) >= at
        return torch.where(reached, safe_divide(tp, positives), 0.0).amax(1)
    budget, place = _budget(order, at)
    tp_before, fp_before = (x.gather(1, place) for x in order.before)
    tp, fp = tp.gather(1, place), fp.gather(1, place)
    # Among equal scores at the limit any may be chosen: take the mean over all choices.
    share = safe_divide(budget - tp_before - fp_before, tp + fp - tp_before - fp_before)
    found = tp_before + share.clamp(0, 1) * (tp - tp_before)
    return safe_divide(found, budget if metric == "precision_at" else positives)[:, 0]


def _standardised(area: Tensor, limit: float) -> Tensor:
    """McClish's correction, as in scikit-learn: 1/2 for chance and 1 for the best."""
    worst = limit**2 / 2
    return (1 + (area - worst) / (limit - worst)) / 2


def _budget(order: _Order, at: float | None) -> tuple[Tensor, Tensor]:
    """The weight of the flagged rows, and the position of the last of them, (L, 1)."""
    assert at is not None
    counted = order.tp + order.fp
    total = counted[:, -1:]
    budget = torch.minimum(total, at * total if isinstance(at, float) else torch.full_like(total, at))
    place = torch.searchsorted(counted, budget * (1 - 1e-12)).clamp_max(counted.shape[1] - 1)
    return budget, place


def _soft(metric: str, order: _Order, at: float | None, max_fpr: float | None, temperature: float | Tensor) -> Tensor:
    """Differentiable approximation per column, (L,): soft counts at thresholds that are scores."""
    z, hits, alarms = order.z, order.hits, order.alarms
    positives, negatives = hits.sum(1, keepdim=True), alarms.sum(1, keepdim=True)
    mass = (hits + alarms).detach()
    centre = safe_divide((mass * z.detach()).sum(1, keepdim=True), mass.sum(1, keepdim=True))
    spread = safe_divide((mass * (z.detach() - centre) ** 2).sum(1, keepdim=True), mass.sum(1, keepdim=True)).sqrt()
    width = (temperature * spread.clamp_min(LEAST_SPREAD)).clamp_min(1e-6).to(z.dtype)
    if metric in ("auroc", "average_precision"):
        number = THRESHOLDS  # an exported program has one number of them for batches of any size
        if not torch.compiler.is_exporting():
            number = max(8, min(THRESHOLDS, ENTRIES // max(1, z.numel())))
        wanted = (torch.arange(number, device=z.device) + 0.5) / number * order.tp[:, -1:]
        own = hits.double().cumsum(1)  # among equal scores those of positives, which the gradient should raise
        place = torch.searchsorted(own, wanted.contiguous()).clamp_max(z.shape[1] - 1)
    elif metric == "recall_at_precision":
        assert at is not None
        precision = safe_divide(order.tp, order.tp + order.fp)
        reached = torch.where(precision >= at, order.tp, -1.0)
        place = torch.where(reached.amax(1) >= 0, reached.argmax(1), precision.argmax(1))[:, None]
    else:
        _, place = _budget(order, at)
    tau = z.gather(1, place)
    if metric not in ("auroc", "average_precision"):
        tau = tau.detach()
    above = torch.sigmoid((z[:, None, :] - tau[:, :, None]) / width[:, :, None])  # (L, thresholds, M)
    tp, fp = (above * hits[:, None]).sum(2), (above * alarms[:, None]).sum(2)
    if metric == "auroc":
        limit = 1.0 if max_fpr is None else max_fpr
        fpr = safe_divide(fp, negatives)
        unreached = (fpr > limit).all(1, keepdim=True)  # as if all scores were equal: there would be no gradient
        return 1 - (torch.where(unreached, fpr, fpr.clamp_max(limit)) / limit).mean(1)
    if metric == "average_precision":
        return safe_divide(tp, tp + fp).mean(1)
    if metric == "precision_at":
        return safe_divide(tp, tp + fp)[:, 0]
    if metric == "recall_at":
        budget, _ = _budget(order, at)
        return (safe_divide(tp, tp + fp) * safe_divide(budget.to(tp.dtype), positives))[:, 0]
    assert at is not None
    # recall + price x (precision - `at`), at the price for which moving the threshold gains nothing.
    slope = (above * (1 - above)).detach()
    by_tp, by_fp = (slope * hits[:, None]).sum(2), (slope * alarms[:, None]).sum(2)
    price = safe_divide(by_tp, at * by_fp - (1 - at) * by_tp).clamp(0.0, 100.0)
    return safe_divide(tp + price * ((1 - at) * tp - at * fp), positives)[:, 0]


def _mean_defined(order: _Order, scores: Tensor, metric: str) -> Tensor:
    """The mean over columns with a positive label and, if false positives are shares of negatives, a negative one."""
    defined = order.tp[:, -1] > 0
    if metric == "auroc":
        defined = defined & (order.fp[:, -1] > 0)
    elif metric == "precision_at":
        defined = order.tp[:, -1] + order.fp[:, -1] > 0
    return safe_divide(torch.where(defined, scores, 0.0).sum(), defined.sum().to(scores.dtype))


def _top_k(z: Tensor, y: Tensor, weight: Tensor, k: int, temperature: float | Tensor) -> tuple[Tensor, Tensor]:
    """Share of rows whose label is among the k largest logits, and the same by sigmoids of the distance to the k-th."""
    if not 1 <= k < z.shape[1]:
        raise ValueError(f"at of top_k_accuracy must lie in 1 to {z.shape[1] - 1} for {z.shape[1]} classes, got {k}")
    z = torch.where(weight[:, None] == 0, 0.0, z)
    own = z.gather(1, y[:, None])
    rivals = z.scatter(1, y[:, None], -math.inf).topk(k, 1).values[:, -1:]
    margin = (own - rivals)[:, 0]
    width = (temperature * z.detach().std(1).clamp_min(LEAST_SPREAD)).clamp_min(1e-6)
    hit = torch.where(margin.isnan(), math.nan, (margin >= 0).to(z.dtype)).detach()
    soft = torch.sigmoid(margin.nan_to_num() / width)
    return safe_divide((weight * hit).sum(), weight.sum()), safe_divide((weight * soft).sum(), weight.sum())
