"""Curves for the report, short enough to be written down."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from sklearn.metrics import precision_recall_curve

from evalign import metrics
from evalign.comparison.aims import Judge, as_confusion
from evalign.comparison.run import Trial

POINTS = 200
EPOCHS = 1000


def precision_recall(trials: Sequence[Trial], judge: Judge) -> list[dict[str, Any]]:
    """Of two classes: each contender's curve on the test rows of the first split, and where its rules stand on it."""
    curves = []
    for trial in trials:
        if trial.contender.name == "majority" or not 0 < trial.truth.sum() < len(trial.truth):
            continue
        precision, recall, _ = precision_recall_curve(trial.truth, trial.probabilities[:, 1])
        precision, recall = precision[::-1], recall[::-1]
        keep = np.unique(np.linspace(0, len(recall) - 1, min(len(recall), POINTS)).round().astype(int))
        points = {}
        for name, predicted in trial.predictions.items():
            c = as_confusion(judge.confusion(trial.truth, predicted))
            points[name] = [float(metrics.recall(c, "binary")), float(metrics.precision(c, "binary"))]
        curves.append(
            {
                "contender": trial.contender.name,
                "title": trial.contender.title,
                "recall": recall[keep].round(5).tolist(),
                "precision": precision[keep].round(5).tolist(),
                "points": points,
            }
        )
    return curves


def thinned(history: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """At most about EPOCHS rows of a history, the kept epoch among them.

    >>> rows = [{"epoch": i, "best": i == 7} for i in range(3000)]
    >>> short = thinned(rows)
    >>> len(short) <= EPOCHS + 1, 7 in [row["epoch"] for row in short]
    (True, True)
    """
    if len(history) <= EPOCHS:
        return list(history)
    keep = set(np.linspace(0, len(history) - 1, EPOCHS).round().astype(int).tolist())
    keep.add(max((i for i, row in enumerate(history) if row["best"]), default=0))
    return [history[i] for i in sorted(keep)]
