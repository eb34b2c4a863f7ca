"""What sweeps a threshold: metrics of a whole curve, from the counts at every threshold of a grid."""

import torch
from torch import Tensor

from evalign._numerics import safe_divide
from evalign.confusion import Confusion
from evalign.metrics import MetricFunction

CURVES = ("auroc",)


def mean_over_grid(c: Confusion, metric: MetricFunction, *, vectorised: bool = True) -> Tensor:
    """The mean of a metric over the leading (threshold) dimension, BtG's rule for reporting."""
    if vectorised:
        return metric(c).mean(0)
    return torch.stack([metric(part) for part in c.unbind()]).mean(0)


def auroc(c: Confusion) -> Tensor:
    """Area under (FPR, TPR) at thresholds that rise along the first dimension, by trapezoids (BtG Eq. 18, 21).

    The ends (1, 1) at tau = 0 and (0, 0) at tau = 1 are added. Binary counts give the area of class 1, multilabel
    ones the mean over the labels that have both outcomes; 0 where no area is defined, as for one class only.

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
