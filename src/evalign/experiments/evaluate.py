"""Probabilities or outputs -> the scores of a report: one decision (honest), or means over thresholds (the papers)."""

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.func import vmap

from evalign import Confusion, decision, metrics
from evalign.decision import Rule
from evalign.experiments.report import Scores
from evalign.membership import BTG_GRID
from evalign.metrics import Average, MetricFunction

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def _positive(metric: str, beta: float | None = None) -> MetricFunction:
    return metrics.resolve(metric, average="binary", beta=beta)


BINARY: dict[str, MetricFunction] = {
    "f1": _positive("f1"),
    "f2": _positive("fbeta", 2.0),
    "f3": _positive("fbeta", 3.0),
    "precision": _positive("precision"),
    "recall": _positive("recall"),
    "accuracy": metrics.resolve("accuracy"),
    "balanced_accuracy": metrics.resolve("balanced_accuracy"),
    "mcc": metrics.resolve("mcc"),
    "macro_f1": metrics.resolve("f1", average="macro"),
}
MULTICLASS: dict[str, MetricFunction] = {
    "f1": metrics.resolve("f1", average="macro"),
    "precision": metrics.resolve("precision", average="macro"),
    "recall": metrics.resolve("recall", average="macro"),
    "accuracy": metrics.resolve("accuracy"),
    "balanced_accuracy": metrics.resolve("balanced_accuracy"),
    "mcc": metrics.resolve("mcc"),
}
CUTS = len(BTG_GRID)


def hard_scores(predicted: Ints, y: Ints, classes: int) -> dict[str, float]:
    """Every metric of one decision.

    >>> hard_scores(np.array([1, 1, 0]), np.array([1, 0, 0]), 2)["f1"]
    0.6666666666666666
    """
    c = Confusion.hard(torch.from_numpy(predicted), torch.from_numpy(y), classes)
    return {name: float(metric(c)) for name, metric in (BINARY if classes == 2 else MULTICLASS).items()}


def auroc(positive: Floats, y: Ints) -> float:
    """AUROC of the ranking, nan where one class alone is left."""
    from sklearn.metrics import roc_auc_score

    return float(roc_auc_score(y, positive)) if 0 < y.sum() < len(y) else float("nan")


def honest_scores(valid: Floats, valid_y: Ints, test: Floats, test_y: Ints, decide_for: str) -> Scores:
    """Scores of three decisions, each learned on validation rows alone; `valid` and `test` are probabilities (n, C)."""
    classes = test.shape[1]
    average: Average | None = None
    if metrics.is_averaged(decide_for):
        average = "binary" if classes == 2 else "macro"
    rules = {
        "argmax": Rule("argmax", classes),
        "tuned": decision.tuned(valid, valid_y, decide_for, average=average),
        "plug_in": decision.plug_in(valid, decide_for, average=average, margin=1 / len(valid)),
    }
    scores = {name: hard_scores(rule.predict(test), test_y, classes) for name, rule in rules.items()}
    if classes == 2:
        ranking = auroc(test[:, 1], test_y)
        for own in scores.values():
            own["auroc"] = ranking
    return scores


WATCHED = tuple(BINARY)


def watch_cuts(squash: bool) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """The papers' reporting, for every epoch: means over the thresholds 0.1 … 0.9 of every metric of `BINARY`.

    The numbers of outputs cut as probabilities come first, those of what the released code cuts second: the same
    where its network ends in a sigmoid (`squash`), the logits themselves where it does not.
    """

    def watch(logits: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        p = logits.sigmoid()
        cuts = torch.linspace(0.1, 0.9, CUTS, dtype=logits.dtype, device=logits.device)  # made there, not copied
        outputs = torch.stack([p, p if squash else logits])
        above = (outputs.unsqueeze(1) > cuts.unsqueeze(1)).to(logits.dtype).flatten(0, 1)  # (2 x 9, n)
        true = y.to(logits.dtype) * weight
        actual = torch.stack([weight.sum() - true.sum(), true.sum()])

        def one(tp: Tensor, predicted: Tensor) -> Tensor:
            both = torch.stack([weight.sum() - predicted, predicted])
            c = Confusion(torch.stack([actual[0] - predicted + tp, tp]), actual, both, weight.sum(), present=actual > 0)
            return torch.stack([metric(c) for metric in BINARY.values()])

        return vmap(one)(above @ true, above @ weight).reshape(2, CUTS, -1).mean(1).flatten()

    return watch
