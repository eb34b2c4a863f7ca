"""evalign: train classifiers on the confusion-matrix metric they are judged by."""

from evalign import annealing, curves, membership, metrics, steps
from evalign.confusion import Confusion
from evalign.losses import MetricLoss, metric_loss

__version__ = "0.1.0"
__all__ = ["Confusion", "MetricLoss", "annealing", "curves", "membership", "metric_loss", "metrics", "steps"]
