"""evalign: train classifiers on the confusion-matrix metric they are judged by."""

from typing import TYPE_CHECKING, Any

from evalign import annealing, curves, membership, metrics, steps
from evalign.confusion import Confusion
from evalign.losses import MetricLoss, metric_loss

if TYPE_CHECKING:
    from evalign.estimator import EASTClassifier
    from evalign.metric_decision import MetricDecision

__version__ = "0.1.0"
__all__ = [
    "Confusion",
    "EASTClassifier",
    "MetricDecision",
    "MetricLoss",
    "annealing",
    "curves",
    "decision",
    "membership",
    "metric_loss",
    "metrics",
    "steps",
]


def __getattr__(name: str) -> Any:
    # Found on first use: a user of the loss alone never imports pandas or scikit-learn.
    if name == "EASTClassifier":
        from evalign.estimator import EASTClassifier

        return EASTClassifier
    if name == "MetricDecision":
        from evalign.metric_decision import MetricDecision

        return MetricDecision
    if name == "decision":
        import importlib

        return importlib.import_module("evalign.decision")
    raise AttributeError(f"module 'evalign' has no attribute {name!r}")
