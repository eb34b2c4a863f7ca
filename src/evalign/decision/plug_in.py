"""Plug-in rule: maximise the expected metric of calibrated probabilities, without labels."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch

from evalign import _checks as checks
from evalign.confusion import Confusion
from evalign.decision.calibration import helpful_temperature, probability_floor, temperature_of
from evalign.decision.constraints import Constraint, parse_constraints
from evalign.decision.problem import SLACK, Problem, present_classes
from evalign.decision.rule import (
    FLOOR,
    Floats,
    Labels,
    Rule,
    Task,
    as_labels,
    as_probabilities,
    as_weights,
    recalibrated,
)
from evalign.decision.search.counts import ClassCounts
from evalign.decision.search.frank_wolfe import BestGain, maximise
from evalign.decision.search.label_thresholds import LabelCounts, best_thresholds
from evalign.decision.search.thresholds import ThresholdSweep
from evalign.metrics import Average, Beta, MetricFunction

Calibrate = bool | Literal["auto"]


def plug_in(
    probabilities: Any,
    metric: str | MetricFunction,
    *,
    task: Task = "multiclass",
    average: Average | None = None,
    beta: Beta | None = None,
    subject_to: Any = None,
    sample_weight: Any = None,
    target: Any = None,
    calibrate: Calibrate = False,
    margin: float = 0.0,
    rounds: int = 40,
) -> Rule:
    """Rule that maximises M(C) of the expected confusion matrix C = sum_i w_i p(x_i) one-hot(decision_i)^T.

    It needs no labels and works for any metric and any number of classes. It relies on the probabilities: they must be
    calibrated, and of rows that the model was not trained on.

    Two classes: all thresholds are compared; for F1 the best is F* / 2. More classes: Frank-Wolfe (Narasimhan 2015)
    follows the gain matrix G = dM/dC, decisions are argmax_j (p^T G)_j, and the gain matrix with the best M(C) is
    kept, argmax included. Multilabel: one threshold a label, separately if the metric is a mean over labels,
    otherwise ("micro", functions, constraints) by coordinate ascent.

    Parameters
    ----------
    probabilities: (n, C) rows that add up to 1; (n,) of the positive class; (n, L) with task="multilabel".
    metric: a name in `metrics.METRICS`, or a differentiable function of a `Confusion`.
    average: None is "binary" for two classes and "macro" otherwise.
    subject_to: constraints on expected scores, like "recall >= 0.9", "recall[2] >= 0.9" (one class), a tuple
        (metric or function, ">=" or "<=", value), or a list of these. If none meets them, the rule with the least
        shortfall is returned with `feasible=False` and a warning.
    target, calibrate: True first applies the temperature that fits the labels `target` best, "auto" only if it
        lowers the log-loss in cross-validation.
    margin: expected gain in the metric below which argmax (multilabel: 1/2) is kept.
    rounds: of Frank-Wolfe, at most.

    >>> p = np.array([[0.6, 0.3, 0.1], [0.5, 0.3, 0.2], [0.6, 0.1, 0.3], [0.3, 0.6, 0.1]])
    >>> plug_in(p, "accuracy").predict(p)
    array([0, 0, 0, 1])
    >>> plug_in(p, "balanced_accuracy").predict(p)
    array([0, 2, 2, 1])
    >>> plug_in([0.1, 0.2, 0.3, 0.8], "f1")
    Rule('threshold', 2, threshold=0.3333, metric='f1', value=0.6667)
    """
    p = as_probabilities(probabilities, task)
    weight = as_weights(sample_weight, p)
    checks.check_number("rounds", rounds, low=1)
    checks.check_number("margin", margin, low=0.0)
    problem = make_problem(metric, p, task, average, beta, subject_to)
    temperature, floor = _temperature(p, target, calibrate, task, weight)
    q = recalibrated(p, temperature, floor=floor, multilabel=problem.multilabel)
    if problem.multilabel:
        rule = _many_labels(q, problem, weight, metric, average, beta)
    elif problem.classes == 2:
        rule = _two_classes(q, problem, weight)
    else:
        counts = ClassCounts(q, weight, problem.classes, reads_matrix=problem.reads_matrix)
        rule = as_rule(maximise(q, problem, counts, counts, rounds=int(rounds)))

    def count(decisions: Labels) -> Confusion:
        return expected_confusion(q, decisions, task=task, sample_weight=weight)

    rule = unless_negligible(rule, q, problem, count, margin)
    return with_value(replace(rule, temperature=temperature, floor=floor), problem, count(rule.decide(q)))


def expected_confusion(
    probabilities: Any, predicted: Any, *, task: Task = "multiclass", sample_weight: Any = None
) -> Confusion:
    """Expected confusion of decisions if the probabilities are calibrated.

    A metric of it is an estimate without labels. A class with fewer than 0.05 expected rows is left out of means over
    classes.

    >>> from evalign import metrics
    >>> metrics.accuracy(expected_confusion([0.1, 0.7], [0, 1]))
    tensor(0.8000, dtype=torch.float64)
    """
    p = as_probabilities(probabilities, task)
    d = as_labels(predicted, p, task)
    weight = as_weights(sample_weight, p)
    if task == "multilabel":
        w = weight[:, None]
        actual, total = (w * p).sum(axis=0), np.full(p.shape[1], weight.sum())
        tp, count = (w * p * d).sum(axis=0), (w * d).sum(axis=0)
        return Confusion(
            *map(torch.from_numpy, (tp, actual, count, total)), present=present_classes(actual, weight), multilabel=True
        )
    counts = ClassCounts(p, weight, p.shape[1], reads_matrix=True)
    return counts.confusion(torch.from_numpy(counts.count(d)))


def make_problem(
    metric: str | MetricFunction, p: Floats, task: Task, average: Average | None, beta: Beta | None, subject_to: Any
) -> Problem:
    """Optimisation problem of a rule for these probabilities."""
    multilabel, columns = task == "multilabel", p.shape[1]
    if average is None:
        average = "binary" if columns == 2 and not multilabel else "macro"
    if average == "binary" and (columns != 2 or multilabel):
        raise ValueError(
            f"average='binary' needs two classes, got {columns} {'labels' if multilabel else 'classes'}; "
            "use 'macro', 'micro' or 'weighted'"
        )
    return Problem(
        metric, parse_constraints(subject_to), average=average, beta=beta, classes=columns, multilabel=multilabel
    )


def label_problems(
    problem: Problem, metric: str | MetricFunction, average: Average | None, beta: Beta | None
) -> list[Problem]:
    """The problem of each label by itself."""
    betas = np.broadcast_to(np.asarray(1.0 if beta is None else beta, dtype=np.float64), problem.classes)
    return [
        Problem(metric, average=average or "macro", beta=None if beta is None else float(b), classes=1, multilabel=True)
        for b in betas
    ]


def unless_negligible(
    rule: Rule, p: Floats, problem: Problem, count: Callable[[Labels], Confusion], margin: float
) -> Rule:
    """The rule if it gains more than `margin` over argmax, else argmax, unless that misses a constraint."""
    if margin == 0.0:
        return rule
    halves = (0.5,) * rule.columns
    plain = Rule("thresholds", rule.columns, thresholds=halves) if problem.multilabel else Rule("argmax", rule.columns)
    scores = []
    for one in (rule, plain):
        c = count(one.decide(p))
        scores.append(float(torch.as_tensor(problem.metric.function(c))))
    missed = any(not limit_met(problem, c, r) for r in range(len(problem.constraints)))
    return rule if missed or scores[0] - scores[1] > margin else plain


def limit_met(problem: Problem, c: Confusion, r: int) -> bool:
    """Whether one confusion meets constraint r."""
    score, limit = float(torch.as_tensor(problem.limits[r].function(c))), problem.constraints[r]
    return score >= limit.value - SLACK if limit.op == ">=" else score <= limit.value + SLACK


def with_value(rule: Rule, problem: Problem, c: Confusion) -> Rule:
    """The rule with metric and value; warns if constraints are missed."""
    value = float(torch.as_tensor(problem.metric.function(c)))
    if not rule.feasible:
        scores = [float(torch.as_tensor(limit.function(c))) for limit in problem.limits]
        warn_infeasible(problem.constraints, scores)
    return replace(rule, metric=problem.name, value=value if np.isfinite(value) else None)


def warn_infeasible(constraints: Sequence[Constraint], scores: Sequence[float]) -> None:
    wanted = ", ".join(str(c) for c in constraints)
    reached = ", ".join(f"{s:.4g}" for s in scores)
    warnings.warn(
        f"no decision was found that meets {wanted}; the rule that misses least reaches {reached} (feasible=False)",
        UserWarning,
        stacklevel=4,
    )


def as_rule(best: BestGain) -> Rule:
    """Rule of the best gain matrix."""
    g, feasible = best.gain.g, not best.shortfall.any()
    classes = g.shape[1]
    if (g == np.eye(classes)).all() if not best.gain.affine else bool((g[0] == 1).all() and not g[1].any()):
        return Rule("argmax", classes, feasible=feasible)
    if best.gain.affine:
        return Rule("affine", classes, weights=tuple(g[0]), biases=tuple(g[1]), feasible=feasible)
    return Rule("gain", classes, gain=tuple(map(tuple, g)), feasible=feasible)


def _temperature(p: Floats, target: Any, calibrate: Calibrate, task: Task, weight: Floats) -> tuple[float, float]:
    if calibrate not in (False, True, "auto"):
        raise ValueError(f"calibrate must be False, True or 'auto', got {calibrate!r}")
    if calibrate is False:
        return 1.0, FLOOR
    if target is None:
        raise ValueError("calibrate needs the labels of these rows; pass target=, or leave calibrate out")
    y: Labels = as_labels(target, p, task)
    fit = helpful_temperature if calibrate == "auto" else temperature_of
    multilabel = task == "multilabel"
    floor = probability_floor(p, multilabel=multilabel)
    return fit(p, y, weight, multilabel=multilabel, floor=floor), floor


def _two_classes(p: Floats, problem: Problem, weight: Floats) -> Rule:
    sweep = ThresholdSweep(p[:, 1], p[:, 1], weight, expected=True)
    k = sweep.best(problem)
    threshold = sweep.threshold(k) if problem.constraints else sweep.stationary_threshold(k, problem)
    return Rule("threshold", 2, threshold=threshold, feasible=not sweep.misses(problem, k))


def _many_labels(p: Floats, problem: Problem, weight: Floats, metric: Any, average: Average | None, beta: Any) -> Rule:
    size = p.shape[1]
    if problem.separable:
        thresholds = []
        for label, own in enumerate(label_problems(problem, metric, average, beta)):
            sweep = ThresholdSweep(p[:, label], p[:, label], weight, expected=True, multilabel=True)
            thresholds.append(sweep.stationary_threshold(sweep.best(own), own))
        return Rule("thresholds", size, thresholds=tuple(thresholds))
    counts = LabelCounts(p, p, weight, expected=True)
    found, feasible = best_thresholds(problem, counts, counts)
    return Rule("thresholds", size, thresholds=tuple(found), feasible=feasible)
