"""evalign: train classifiers on the confusion-matrix metric they are judged by."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from evalign import annealing, curves, decision, membership, metrics, steps
    from evalign.blend import EASTBlend
    from evalign.booster import EASTBooster
    from evalign.confusion import Confusion
    from evalign.estimator import EASTClassifier
    from evalign.losses import MetricLoss, metric_loss
    from evalign.metric_decision import MetricDecision

__version__ = "0.1.0"
__all__ = [
    "Confusion",
    "EASTBlend",
    "EASTBooster",
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
_FOUND_IN = {
    "Confusion": "confusion",
    "EASTBlend": "blend",
    "EASTBooster": "booster",
    "EASTClassifier": "estimator",
    "MetricDecision": "metric_decision",
    "MetricLoss": "losses",
    "metric_loss": "losses",
}


def __getattr__(name: str) -> Any:
    # Found on first use: a user of the loss alone never imports pandas or scikit-learn, and `evalign --help` not even
    # torch, which alone takes a second.
    if name not in __all__:
        raise AttributeError(f"module 'evalign' has no attribute {name!r}")
    import importlib

    module = importlib.import_module(f"evalign.{_FOUND_IN.get(name, name)}")
    return getattr(module, name) if name in _FOUND_IN else module


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
