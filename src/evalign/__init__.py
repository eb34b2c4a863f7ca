"""evalign: train classifiers on the confusion-matrix metric they are judged by."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from evalign import annealing, curves, decision, membership, metrics, steps
    from evalign.confusion import Confusion
    from evalign.estimators.blend import EASTBlend, fit
    from evalign.estimators.boosted import EASTBooster
    from evalign.estimators.metric_decision import MetricDecision
    from evalign.estimators.network import EASTClassifier
    from evalign.losses import MetricLoss, metric_loss

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
    "fit",
    "membership",
    "metric_loss",
    "metrics",
    "steps",
]
_FOUND_IN = {
    "Confusion": "confusion",
    "EASTBlend": "estimators.blend",
    "EASTBooster": "estimators.boosted",
    "EASTClassifier": "estimators.network",
    "MetricDecision": "estimators.metric_decision",
    "MetricLoss": "losses",
    "fit": "estimators.blend",
    "metric_loss": "losses",
}


def __getattr__(name: str) -> Any:
    # Imported on first use: the loss alone never imports pandas or scikit-learn, and `evalign --help` does not even
    # import torch, which takes a second.
    if name not in __all__:
        raise AttributeError(f"module 'evalign' has no attribute {name!r}")
    import importlib

    try:
        module = importlib.import_module(f"evalign.{_FOUND_IN.get(name, name)}")
    except ModuleNotFoundError as error:
        wanted = f"evalign.{name} needs {error.name}, which is not installed; pip install 'evalign[tables]'"
        raise ModuleNotFoundError(wanted, name=error.name) from error
    return getattr(module, name) if name in _FOUND_IN else module


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
