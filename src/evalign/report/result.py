"""Collect a comparison into one dictionary of plain JSON types that holds all a report shows."""

import math
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.calibration import calibration_curve
from sklearn.metrics import precision_recall_curve

from evalign import metrics
from evalign.comparison.aims import Judge, as_confusion
from evalign.comparison.run import Comparison, Trial
from evalign.comparison.significance import Line, interval, resampled_matrices, resampled_scores, summarise

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


def operating_points(trial: Trial, decision: str) -> dict[str, Any] | None:
    """Counts at every threshold of two classes, on the rows that training held out; None where none are kept."""
    held_out = getattr(trial.estimator, "held_out_predictions_", None)
    if held_out is None or held_out.probabilities.shape[1] != 2:
        return None
    p, y, weight = held_out.probabilities[:, 1], held_out.labels, held_out.weight
    order = np.argsort(-p, kind="stable")
    ends = np.flatnonzero(np.diff(p[order], append=-np.inf))  # last row of each run of equal probabilities
    ends = ends[np.unique(np.linspace(0, len(ends) - 1, min(len(ends), POINTS)).round().astype(int))]
    tp, fp = (np.cumsum((weight * (y == label))[order])[ends] for label in (1, 0))
    flagged = trial.rules[decision].predict(held_out.probabilities) == 1
    lowest = p[flagged].min() if flagged.any() else np.inf
    return {
        "title": line_title(trial.contender.title, decision),
        "rows": len(p),
        "thresholds": p[order][ends].tolist(),
        "tp": tp.tolist(),
        "fp": fp.tolist(),
        "positives": float(weight[y == 1].sum()),
        "negatives": float(weight[y == 0].sum()),
        "chosen": int(np.searchsorted(-p[order][ends], -lowest, side="right").clip(1) - 1),
    }


def calibration(trials: Sequence[Trial], *, bins: int = 10) -> list[dict[str, Any]]:
    """Observed share against predicted probability of the positive class, on the test rows of the first split."""
    curves = []
    for trial in trials:
        if trial.contender.name == "majority" or trial.probabilities.shape[1] != 2:
            continue
        p = trial.probabilities[:, 1].clip(0, 1)
        observed, predicted = calibration_curve(trial.truth, p, n_bins=bins, strategy="quantile", pos_label=1)
        name, title = trial.contender.name, trial.contender.title
        curves.append(
            {"contender": name, "title": title, "observed": observed.tolist(), "predicted": predicted.tolist()}
        )
    return curves


def thinned(history: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """At most about EPOCHS rows of a history, the kept epoch among them.

    >>> rows = [{"epoch": i, "best": i == 7} for i in range(3000)]
    >>> short = thinned(rows)
    >>> len(short) <= EPOCHS + 1, 7 in [row["epoch"] for row in short]
    (True, True)
    """
    history = [row for row in history if not math.isnan(row.get("score", 0.0))]  # of trees no score is watched
    if len(history) <= EPOCHS:
        return history
    keep = set(np.linspace(0, len(history) - 1, EPOCHS).round().astype(int).tolist())
    keep.add(max((i for i, row in enumerate(history) if row["best"]), default=0))
    return [history[i] for i in sorted(keep)]


TITLES = {"argmax": "argmax", "tuned": "tuned", "plug_in": "plug-in", "auto": "calibrated"}
PER_CLASS = {"precision": metrics.precision, "recall": metrics.recall, "f1": metrics.f1}


def build_result(
    comparison: Comparison, reference: tuple[str, str], *, repeats: int = 1000, seed: int = 0
) -> dict[str, Any]:
    """Scores, intervals, per-class scores, curves and histories; the caller adds settings, data and notes.

    With one split intervals come from resampling test rows, with more the standard error from the splits.
    """
    judge, lines = comparison.judge, summarise(comparison.rows, reference)
    table = [_entry(line, judge) for line in lines]
    if comparison.splits == 1:
        _add_intervals(table, comparison, reference, repeats, seed)
    shown = shown_in_detail(lines, reference)
    shown_histories = (reference[0], "cross_entropy")
    trained = [t for t in comparison.trials if t.contender.name in shown_histories and hasattr(t.estimator, "history_")]
    return {
        "metric": {"name": judge.aim.name, "title": metric_title(judge), "average": judge.average, "beta": judge.beta},
        "classes": judge.names,
        "class_rows": lines[0].confusion.sum(axis=1).tolist(),
        "splits": comparison.splits,
        "interrupted": comparison.interrupted,
        "reference": list(reference),
        "table": table,
        "per_class": [per_class(line, judge, repeats, seed) for line in shown],
        "curves": precision_recall(comparison.trials, judge) if len(judge.classes) == 2 else [],
        "calibration": calibration(comparison.trials),
        "operating": next(
            (operating_points(t, reference[1]) for t in comparison.trials if t.contender.name == reference[0]), None
        ),
        "rules": [_rules(trial) for trial in comparison.trials],
        "history": {trial.contender.title: thinned(trial.estimator.history_) for trial in trained},
    }


def metric_title(judge: Judge) -> str:
    """The metric in a reader's words.

    >>> from evalign.comparison.aims import Aim
    >>> metric_title(Judge(Aim("f1"), ["no", "yes"])), metric_title(Judge(Aim("mcc"), [0, 1, 2]))
    ("F1 of 'yes'", 'MCC')
    """
    name = judge.aim.name
    words = {"f1": "F1", "mcc": "MCC", "gmean": "G-mean", "fbeta": "F-beta"}.get(name, name.replace("_", " "))
    if name == "fbeta" and isinstance(judge.beta, int | float):
        words = f"F{judge.beta:g}"
    if not metrics.is_averaged(name):
        return words
    return f"{words} of {judge.names[1]!r}" if judge.average == "binary" else f"{judge.average} {words}"


def line_title(title: str, decision: str) -> str:
    return title if title.startswith("majority") else f"{title} + {TITLES.get(decision, decision)}"


def shown_in_detail(lines: Sequence[Line], reference: tuple[str, str]) -> list[Line]:
    """The reference, cross-entropy as it is mostly used, with the reference's decision, and the best other model."""
    by_key = {(line.contender, line.decision): line for line in lines}
    keys = [reference, ("cross_entropy", "argmax"), ("cross_entropy", "plug_in")]
    others = [key for key in by_key if key[0] not in ("cross_entropy", "majority") and not key[0].startswith("ours")]
    return [by_key[key] for key in dict.fromkeys([*keys, *others[:1]]) if key in by_key]


def per_class(line: Line, judge: Judge, repeats: int, seed: int) -> dict[str, Any]:
    """Precision, recall and F1 of each class as [value, low, high]."""
    draws = list(resampled_matrices(line.confusion, repeats=repeats, seed=seed))
    scores: dict[str, Any] = {}
    for name, score in PER_CLASS.items():
        value = score(as_confusion(line.confusion), None).numpy()
        low, high = interval(np.concatenate([score(as_confusion(part), None).numpy() for part in draws]))
        scores[name] = np.stack([value, low, high], axis=1).tolist()
    return {
        "title": line_title(line.title, line.decision),
        "contender": line.contender,
        "decision": line.decision,
        "confusion": line.confusion.tolist(),
    } | scores


def versions() -> dict[str, str]:
    """What a result may depend on."""
    from evalign import __version__

    found = {"evalign": __version__, "python": platform.python_version()}
    for name in ("torch", "numpy", "scikit-learn", "pandas", "pyarrow"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _entry(line: Line, judge: Judge) -> dict[str, Any]:
    return {
        "title": line_title(line.title, line.decision),
        "contender": line.contender,
        "decision": line.decision,
        "score": line.mean,
        "error": line.error,
        "scores": list(line.scores),
        "difference": line.difference,
        "difference_error": line.difference_error,
        "p": line.p,
        "limits": line.limits,
        "missed": judge.missed(line.limits),
        "seconds": round(line.seconds, 3),
        "confusion": line.confusion.tolist(),
    }


def _add_intervals(
    table: Sequence[dict[str, Any]], comparison: Comparison, reference: tuple[str, str], repeats: int, seed: int
) -> None:
    predictions: Mapping[str, NDArray[np.int64]] = {
        f"{trial.contender.name}/{decision}": predicted
        for trial in comparison.trials
        for decision, predicted in trial.predictions.items()
    }
    judge, truth = comparison.judge, comparison.trials[0].truth
    scores = resampled_scores(truth, predictions, len(judge.classes), judge.scores, repeats=repeats, seed=seed)
    ours = scores["/".join(reference)]
    for entry in table:
        theirs = scores[f"{entry['contender']}/{entry['decision']}"]
        entry["interval"] = interval(theirs).tolist()
        entry["difference_interval"] = interval(ours - theirs).tolist()


def _rules(trial: Trial) -> dict[str, Any]:
    return {
        "contender": trial.contender.name,
        "title": trial.contender.title,
        "rules": {name: rule.to_json() for name, rule in trial.rules.items()},
    }
