"""plug_in: the decision rule that a metric asks of honest probabilities, without a label."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch

from evalign import _checks as checks
from evalign.confusion import Confusion
from evalign.decision.calibration import floor_of, helpful_temperature, temperature_of
from evalign.decision.climb import Pool, solve
from evalign.decision.constraints import Constraint, parse_constraints
from evalign.decision.goal import SLACK, Goal
from evalign.decision.multilabel import LabelTally, best_thresholds
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
from evalign.decision.search import Sweep, Tally, occurs
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
    """The rule that maximises M(C) of the expected confusion matrix C = sum_i w_i p(x_i) one-hot(decision_i)^T.

    No labels are needed, any metric and any number of classes will do, and there is nothing to overfit but the
    probabilities: they must be honest, that is calibrated, and of rows that the model was not trained on.

    Two classes: every threshold is tried; for F1 the best is F* / 2. More: the gain matrix G = dM/dC is followed
    to a maximum (Frank-Wolfe, Narasimhan 2015) and decides argmax_j (p^T G)_j; of all gain matrices on the way,
    and argmax, the one with the best M(C) is kept. Multilabel: one threshold a label, each by itself where the
    metric is a mean over labels, in turn until none moves where it is not ("micro", functions, constraints).

    Parameters
    ----------
    probabilities: (n, C) rows that add up to 1; (n,) of the positive class; (n, L) with task="multilabel".
    metric: a name in `metrics.METRICS`, or a function of a `Confusion` with a gradient.
    average: None is "binary" for two classes and "macro" otherwise.
    subject_to: constraints on expected scores, like "recall >= 0.9", "recall[2] >= 0.9" (one class), a tuple
        (metric or function, ">=" or "<=", value), or a list of these. If they cannot be met, the rule that misses
        them least is returned with `feasible=False`, with a warning.
    target, calibrate: True rescales the probabilities first by the temperature that fits labels `target` best,
        "auto" only if that lowers the log-loss in cross-validation.
    margin: expected gain in the metric below which argmax (multilabel: 1/2) is kept.
    rounds: of the ascent to the gain matrix, at most.

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
    goal = make_goal(metric, p, task, average, beta, subject_to)
    temperature, floor = _temperature(p, target, calibrate, task, weight)
    q = recalibrated(p, temperature, floor=floor, multilabel=goal.multilabel)
    if goal.multilabel:
        rule = _many_labels(q, goal, weight, metric, average, beta)
    elif goal.classes == 2:
        rule = _two_classes(q, goal, weight)
    else:
        tally = Tally(q, weight, expected=True, reads_matrix=goal.reads_matrix)
        rule = rule_of(solve(q, goal, tally, tally, rounds=int(rounds)))
    rule = worthwhile(rule, q, goal, lambda d: expected_confusion(q, d, task=task, sample_weight=weight), margin)
    c = expected_confusion(q, rule.decide(q), task=task, sample_weight=weight)
    return finished(replace(rule, temperature=temperature, floor=floor), goal, c)


def expected_confusion(
    probabilities: Any, predicted: Any, *, task: Task = "multiclass", sample_weight: Any = None
) -> Confusion:
    """The confusion that decisions will have on average if the probabilities are honest.

    Any metric of it estimates that metric without a label; a class expected in fewer than 0.05 rows is left out
    of means over classes.

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
            *map(torch.from_numpy, (tp, actual, count, total)), present=occurs(actual, weight), multilabel=True
        )
    tally = Tally(p, weight, expected=True, reads_matrix=True)
    return tally.confusion(torch.from_numpy(tally.count(d)))


def make_goal(
    metric: str | MetricFunction, p: Floats, task: Task, average: Average | None, beta: Beta | None, subject_to: Any
) -> Goal:
    """The goal of a rule for these probabilities."""
    multilabel, columns = task == "multilabel", p.shape[1]
    if average is None:
        average = "binary" if columns == 2 and not multilabel else "macro"
    if average == "binary" and (columns != 2 or multilabel):
        raise ValueError(
            f"average='binary' needs two classes, got {columns} {'labels' if multilabel else 'classes'}; "
            "use 'macro', 'micro' or 'weighted'"
        )
    return Goal(
        metric, parse_constraints(subject_to), average=average, beta=beta, classes=columns, multilabel=multilabel
    )


def label_goals(goal: Goal, metric: str | MetricFunction, average: Average | None, beta: Beta | None) -> list[Goal]:
    """The goal of each label by itself."""
    betas = np.broadcast_to(np.asarray(1.0 if beta is None else beta, dtype=np.float64), goal.classes)
    return [
        Goal(metric, average=average or "macro", beta=None if beta is None else float(b), classes=1, multilabel=True)
        for b in betas
    ]


def worthwhile(rule: Rule, p: Floats, goal: Goal, count: Callable[[Labels], Confusion], margin: float) -> Rule:
    """The rule if it gains more than `margin` over argmax, else argmax, unless that misses a constraint."""
    if margin == 0.0:
        return rule
    halves = (0.5,) * rule.columns
    plain = Rule("thresholds", rule.columns, thresholds=halves) if goal.multilabel else Rule("argmax", rule.columns)
    scores = []
    for one in (rule, plain):
        c = count(one.decide(p))
        scores.append(float(torch.as_tensor(goal.metric.function(c))))
    missed = any(not limit_met(goal, c, r) for r in range(len(goal.constraints)))
    return rule if missed or scores[0] - scores[1] > margin else plain


def limit_met(goal: Goal, c: Confusion, r: int) -> bool:
    """Whether one confusion meets constraint r."""
    score, limit = float(torch.as_tensor(goal.limits[r].function(c))), goal.constraints[r]
    return score >= limit.value - SLACK if limit.op == ">=" else score <= limit.value + SLACK


def finished(rule: Rule, goal: Goal, c: Confusion) -> Rule:
    """The rule with its name and value, and a warning if it misses its constraints."""
    value = float(torch.as_tensor(goal.metric.function(c)))
    if not rule.feasible:
        scores = [float(torch.as_tensor(limit.function(c))) for limit in goal.limits]
        warn_infeasible(goal.constraints, scores)
    return replace(rule, metric=goal.name, value=value if np.isfinite(value) else None)


def warn_infeasible(constraints: Sequence[Constraint], scores: Sequence[float]) -> None:
    wanted = ", ".join(str(c) for c in constraints)
    reached = ", ".join(f"{s:.4g}" for s in scores)
    warnings.warn(
        f"no decision was found that meets {wanted}; the rule that misses least reaches {reached} (feasible=False)",
        UserWarning,
        stacklevel=4,
    )


def rule_of(pool: Pool) -> Rule:
    """The pool's best gain matrix as a rule."""
    g, feasible = pool.best.g, not pool.shortfall.any()
    classes = g.shape[1]
    if (g == np.eye(classes)).all() if not pool.best.affine else bool((g[0] == 1).all() and not g[1].any()):
        return Rule("argmax", classes, feasible=feasible)
    if pool.best.affine:
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
    floor = floor_of(p, multilabel=multilabel)
    return fit(p, y, weight, multilabel=multilabel, floor=floor), floor


def _two_classes(p: Floats, goal: Goal, weight: Floats) -> Rule:
    sweep = Sweep(p[:, 1], p[:, 1], weight, expected=True)
    k = sweep.best(goal)
    threshold = sweep.threshold(k) if goal.constraints else sweep.stationary_threshold(k, goal)
    return Rule("threshold", 2, threshold=threshold, feasible=not sweep.misses(goal, k))


def _many_labels(p: Floats, goal: Goal, weight: Floats, metric: Any, average: Average | None, beta: Any) -> Rule:
    size = p.shape[1]
    if goal.separable:
        thresholds = []
        for label, own in enumerate(label_goals(goal, metric, average, beta)):
            sweep = Sweep(p[:, label], p[:, label], weight, expected=True, multilabel=True)
            thresholds.append(sweep.stationary_threshold(sweep.best(own), own))
        return Rule("thresholds", size, thresholds=tuple(thresholds))
    tally = LabelTally(p, p, weight, expected=True)
    found, feasible = best_thresholds(goal, tally, tally)
    return Rule("thresholds", size, thresholds=tuple(found), feasible=feasible)
