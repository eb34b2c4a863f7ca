"""Rival losses and estimators, one per file, each with its paper and equation.

The losses are `nn.Module`s called as `loss(logits, target, sample_weight=None)`, with the shapes of `MetricLoss`;
each has a functional form. `LOSSES` names them. SVM-perf and CCS are scikit-learn estimators, in
`svm_perf` and `ccs`; they are not imported here, so that a user of a loss never imports scikit-learn.
"""

from torch import nn

from evalign_papers.rivals.ap_perf import APPerfLoss, ap_perf_loss
from evalign_papers.rivals.cross_entropy import CrossEntropyLoss, class_weights, cross_entropy_loss, oversampled
from evalign_papers.rivals.dice import DiceLoss, dice_loss
from evalign_papers.rivals.focal import FocalLoss, focal_loss
from evalign_papers.rivals.inputs import class_counts
from evalign_papers.rivals.ldam import LDAMLoss, drw_weights, ldam_loss
from evalign_papers.rivals.logit_adjustment import LogitAdjustedLoss, logit_adjusted_loss
from evalign_papers.rivals.soft_f1 import SigmoidF1Loss, sigmoid_f1_loss
from evalign_papers.rivals.wmw import WMWLoss, wmw_loss

# Each takes `task`; "ldam" and "logit_adjustment" take the class counts of the training rows first.
LOSSES: dict[str, type[nn.Module]] = {
    "ap_perf": APPerfLoss,
    "cross_entropy": CrossEntropyLoss,
    "dice": DiceLoss,
    "focal": FocalLoss,
    "ldam": LDAMLoss,
    "logit_adjustment": LogitAdjustedLoss,
    "sigmoid_f1": SigmoidF1Loss,
    "wmw": WMWLoss,
}

__all__ = [
    "LOSSES",
    "APPerfLoss",
    "CrossEntropyLoss",
    "DiceLoss",
    "FocalLoss",
    "LDAMLoss",
    "LogitAdjustedLoss",
    "SigmoidF1Loss",
    "WMWLoss",
    "ap_perf_loss",
    "class_counts",
    "class_weights",
    "cross_entropy_loss",
    "dice_loss",
    "drw_weights",
    "focal_loss",
    "ldam_loss",
    "logit_adjusted_loss",
    "oversampled",
    "sigmoid_f1_loss",
    "wmw_loss",
]
