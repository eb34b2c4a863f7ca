"""Probabilities or outputs -> the scores of a report: one decision (honest), or means over thresholds (the papers)."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.func import vmap

from evalign import Confusion, decision, metrics
from evalign.decision import Rule
from evalign.membership import BTG_GRID
from evalign.metrics import Average, MetricFunction
from evalign_papers.engine.reports import Scores

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


RARE = 3
MOST_NAMED = 20  # with more classes a report leaves out the scores per class


class Tail(NamedTuple):
    """Long-tailed training part: rows of each class, and a second metric to make decisions for."""

    counts: Ints
    goal: str = "f1"


def hard_scores(
    predicted: Ints, y: Ints, classes: int, names: Sequence[str] = (), tail: Tail | None = None
) -> dict[str, float]:
    """Every metric of one decision; with class names also precision and recall per class, with a tail its scores.

    >>> hard_scores(np.array([1, 1, 0]), np.array([1, 0, 0]), 2)["f1"]
    0.6666666666666666
    >>> hard_scores(np.array([1, 1, 2]), np.array([1, 0, 2]), 3, ("cat", "dog", "frog"))["precision_dog"]
    0.5
    """
    labels = torch.from_numpy(predicted), torch.from_numpy(y)
    c = Confusion.hard(*labels, classes)
    scores = {name: float(metric(c)) for name, metric in (BINARY if classes == 2 else MULTICLASS).items()}
    if 2 < classes == len(names) <= MOST_NAMED:
        for name, metric in (("precision", metrics.precision), ("recall", metrics.recall)):
            each = metric(c, average=None)
            scores |= {f"{name}_{own}": float(value) for own, value in zip(names, each, strict=True)}
    if tail is not None:
        rarest = np.argsort(tail.counts, kind="stable")[:RARE]
        scores["rare_recall"] = float(metrics.recall(c, average=None)[torch.from_numpy(rarest)].mean())
        # Re-weight test rows to the class shares of the training part.
        weight = torch.from_numpy((tail.counts / np.bincount(y, minlength=classes))[y])
        scores["f1_train"] = float(MULTICLASS["f1"](Confusion.hard(*labels, classes, sample_weight=weight)))
    return scores


def auroc(positive: Floats, y: Ints) -> float:
    """AUROC of the ranking, nan if there is only one class."""
    from sklearn.metrics import roc_auc_score

    return float(roc_auc_score(y, positive)) if 0 < y.sum() < len(y) else float("nan")


def honest_scores(
    valid: Floats,
    valid_y: Ints,
    test: Floats,
    test_y: Ints,
    decide_for: str,
    names: Sequence[str] = (),
    tail: Tail | None = None,
) -> Scores:
    """Scores of three decisions learned on validation rows; `valid` and `test` are probabilities (n, C).

    A `tail` adds two, tuned and plug-in for its goal.
    """
    classes = test.shape[1]
    rules = {"argmax": Rule("argmax", classes)}
    for goal, suffix in [(decide_for, ""), *([] if tail is None else [(tail.goal, f"_{tail.goal}")])]:
        average: Average | None = None
        if metrics.is_averaged(goal):
            average = "binary" if classes == 2 else "macro"
        rules[f"tuned{suffix}"] = decision.tuned(valid, valid_y, goal, average=average)
        rules[f"plug_in{suffix}"] = decision.plug_in(valid, goal, average=average, margin=1 / len(valid))
    scores = {name: hard_scores(rule.predict(test), test_y, classes, names, tail) for name, rule in rules.items()}
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
        cuts = torch.linspace(0.1, 0.9, CUTS, dtype=logits.dtype, device=logits.device)  # on the device, not copied
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
