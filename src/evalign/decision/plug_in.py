"""Plug-in rule: maximise the expected metric of calibrated probabilities; constraints are met on labels."""

import warnings
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from evalign import checks
from evalign.confusion import Confusion
from evalign.decision.calibration import helpful_temperature, probability_floor, temperature_of
from evalign.decision.rule import (
    FLOOR,
    Floats,
    Labels,
    Rule,
    Task,
    as_held_out,
    as_labels,
    as_probabilities,
    as_weights,
    recalibrated,
)
from evalign.decision.search.counts import ClassCounts
from evalign.decision.search.frank_wolfe import Gain, maximise
from evalign.decision.search.problem import Problem, present_classes
from evalign.decision.search.thresholds import LabelCounts, ThresholdSweep, best_thresholds
from evalign.metrics import Average, Beta, MetricFunction

Calibrate = bool | Literal["auto"]
ROUNDS = 40


def plug_in(
    probabilities: Any, metric: str | MetricFunction, *, task: Task = "multiclass", average: Average | None = None,
    beta: Beta | None = None, subject_to: Any = None, sample_weight: Any = None, target: Any = None,
    calibrate: Calibrate = False, margin: float = 0.0, rounds: int = ROUNDS,
) -> Rule:  # fmt: skip
    """Rule that maximises M(C) of the expected confusion matrix C = sum_i w_i p(x_i) one-hot(decision_i)^T.

    It needs no labels and works for any metric and any number of classes, but the probabilities must be calibrated and
    those of rows that the model was not trained on.

    Two classes: all thresholds are compared; for F1 the best is F* / 2. More classes: Frank-Wolfe (Narasimhan 2015)
    follows the gain matrix G = dM/dC, decisions are argmax_j (p^T G)_j, and the gain matrix with the best M(C) is
    kept, argmax included. Multilabel: one threshold a label, separately if the metric is a mean over labels,
    otherwise ("micro", functions, constraints) by coordinate ascent.

    Parameters
    ----------
    probabilities: (n, C) rows that add up to 1; (n,) of the positive class; (n, L) with task="multilabel".
    metric: a name in `metrics.METRICS`, or a differentiable function of a `Confusion`.
    average: None is "binary" for two classes and "macro" otherwise.
    subject_to: constraints like "recall >= 0.9", "recall[2] >= 0.9" (one class), "flagged <= 2%" (share of rows
        decided positive), "flagged <= 200" (rows of each call of `predict`), a tuple (metric or function, ">=" or
        "<=", value), or a list of these. They are met on the labels `target`, never on probabilities alone; only
        "flagged" needs no labels. If no rule meets them, the rule with the least shortfall is returned with
        `feasible=False` and a warning that names the nearest feasible value.
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
    if calibrate not in (False, True, "auto"):
        raise ValueError(f"calibrate must be False, True or 'auto', got {calibrate!r}")
    problem = Problem.of(metric, p, task, average, beta, subject_to)
    y = None if target is None else as_labels(target, p, task)
    if y is None and problem.needs_labels:
        raise ValueError(
            f"{problem.constraints[0]} cannot rest on probabilities alone; pass the labels of these rows as target=, "
            "or use decision.tuned or decision.calibrated"
        )
    temperature, floor = _temperature(p, y, calibrate, weight, multilabel=problem.multilabel)
    q = recalibrated(p, temperature, floor=floor, multilabel=problem.multilabel)
    rule = best_expected(q, problem, weight, y, rounds=int(rounds))
    rule = unless_negligible(rule, q, problem, weight, y, margin)
    value = metric_value(problem, expected_confusion(q, rule.decide(q), task=task, sample_weight=weight))
    rule = replace(rule, temperature=temperature, floor=floor, value=value)
    return with_constraints(rule, p, problem, weight, y)


def best_expected(q: Floats, problem: Problem, weight: Floats, y: Labels | None, *, rounds: int = ROUNDS) -> Rule:
    """Rule of the best expected metric for calibrated probabilities q, among those that meet constraints on y."""
    limited = y is not None and bool(problem.constraints)
    if problem.multilabel:
        if problem.separable:
            sweeps = [
                ThresholdSweep(q[:, k], q[:, k], weight, expected=True, multilabel=True) for k in range(q.shape[1])
            ]
            found = [
                s.stationary_threshold(s.best(own), own) for s, own in zip(sweeps, problem.per_label(), strict=True)
            ]
            return Rule("thresholds", problem.classes, thresholds=tuple(found))
        values = LabelCounts(q, q, weight, expected=True)
        limits = LabelCounts(q, np.asarray(y, np.float64), weight, expected=False) if limited else values
        return Rule("thresholds", problem.classes, thresholds=tuple(best_thresholds(problem, values, limits)))
    if problem.classes == 2:
        sweep = ThresholdSweep(q[:, 1], q[:, 1], weight, expected=True)
        observed = ThresholdSweep(q[:, 1], np.asarray(y, np.float64), weight, expected=False) if limited else sweep
        k = sweep.best(problem, observed)
        threshold = sweep.threshold(k) if problem.constraints else sweep.stationary_threshold(k, problem)
        return Rule("threshold", 2, threshold=threshold, at_most=problem.at_most)
    counts = ClassCounts(q, weight, problem.classes, reads_matrix=problem.reads_matrix)
    limit_counts = counts
    if limited and y is not None:
        limit_counts = ClassCounts(y, weight, problem.classes, reads_matrix=problem.reads_matrix)
    return gain_rule(maximise(q, problem, counts, limit_counts, rounds=rounds).gain)


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
    p, d, weight = as_held_out(probabilities, predicted, sample_weight, task)
    if task == "multilabel":
        actual, total = weight @ p, np.full(p.shape[1], weight.sum())
        tp, count = np.einsum("n,nl,nl->l", weight, p, d), weight @ d
        return Confusion(
            *map(torch.from_numpy, (tp, actual, count, total)), present=present_classes(actual, weight), multilabel=True
        )
    counts = ClassCounts(p, weight, p.shape[1], reads_matrix=True)
    return counts.confusion(torch.from_numpy(counts.count(d)))


def metric_value(problem: Problem, c: Confusion) -> float | None:
    """The metric of one confusion; None if it is not finite."""
    value = float(torch.as_tensor(problem.metric.function(c)))
    return value if np.isfinite(value) else None


def expected_gain(problem: Problem, q: Floats, one: Labels, other: Labels, weight: Floats) -> float:
    """Expected lead of decisions `one` over `other` in the metric; -inf if that of `one` is not finite."""
    counts = [expected_confusion(q, d, task=problem.task, sample_weight=weight) for d in (one, other)]
    first, second = (metric_value(problem, c) for c in counts)
    return -np.inf if first is None else first - (second or 0.0)


def lead(problem: Problem, one: Labels, other: Labels, y: Labels, weight: Floats, group: Labels) -> tuple[float, float]:
    """Lead of decisions `one` over `other` in the metric, and its jackknife error over groups of rows."""

    def difference(rows: NDArray[np.bool_]) -> float:
        first, second = (metric_value(problem, problem.observed(d[rows], y[rows], weight[rows])) for d in (one, other))
        return (first or 0.0) - (second or 0.0)

    kept = [group != g for g in np.unique(group)]
    leads = np.array([difference(rows) for rows in kept if weight[rows].any()])
    error = float(np.sqrt(max(len(leads) - 1, 0) * leads.var())) if len(leads) else np.inf
    return difference(np.ones(len(y), dtype=bool)), error


def argmax_rule(problem: Problem) -> Rule:
    """Rule of the largest probability; multilabel: 1/2."""
    if problem.multilabel:
        return Rule("thresholds", problem.classes, thresholds=(0.5,) * problem.classes)
    return Rule("argmax", problem.classes)


def unless_negligible(rule: Rule, q: Floats, problem: Problem, weight: Floats, y: Labels | None, margin: float) -> Rule:
    """The rule if it is expected to gain more than `margin` over argmax or argmax misses a constraint, else argmax."""
    plain = argmax_rule(problem)
    decided = plain.decide(q)
    missed = problem.missing(constraint_values(decided, q, problem, weight, y)).any()
    if margin == 0.0 or problem.at_most is not None or missed:
        return rule
    return rule if expected_gain(problem, q, rule.decide(q), decided, weight) > margin else plain


def constraint_values(decisions: Labels, q: Floats, problem: Problem, weight: Floats, y: Labels | None) -> list[float]:
    """Value of each constraint: on the labels y or, for shares of flagged rows, without."""
    if not problem.constraints:
        return []
    if y is None:
        c = expected_confusion(q, decisions, task=problem.task, sample_weight=weight)
    else:
        c = problem.observed(decisions, y, weight)
    return [float(torch.as_tensor(limit.function(c))) for limit in problem.limits]


def with_constraints(rule: Rule, p: Floats, problem: Problem, weight: Floats, y: Labels | None) -> Rule:
    """The rule with its metric, constraints and the values reached; warns if a constraint is missed."""
    decisions = rule.decide(p)
    reached = constraint_values(decisions, rule.calibrate(p), problem, weight, y)
    rule = replace(
        rule,
        metric=problem.name,
        subject_to=tuple(map(str, problem.constraints)),
        reached=tuple(reached),
        feasible=not problem.missing(reached).any(),
    )
    if not rule.feasible:
        warn_infeasible(problem, reached)
    return rule


def warn_infeasible(problem: Problem, reached: list[float], confidence: float | None = None) -> None:
    """Warn with the nearest feasible values of the constraints."""
    wanted = " and ".join(c.describe() for c in problem.constraints)
    nearest = " and ".join(c.describe(v) for c, v in zip(problem.constraints, reached, strict=True))
    certified = "" if confidence is None else f" with confidence {confidence:g}"
    warnings.warn(
        f"no decision meets {wanted}{certified}; nearest feasible: {nearest} (feasible=False)",
        UserWarning,
        stacklevel=4,
    )


def gain_rule(gain: Gain) -> Rule:
    """Rule of a gain matrix."""
    g, classes = gain.g, gain.g.shape[1]
    if (g == np.eye(classes)).all() if not gain.affine else bool((g[0] == 1).all() and not g[1].any()):
        return Rule("argmax", classes)
    if gain.affine:
        return Rule("affine", classes, weights=tuple(g[0]), biases=tuple(g[1]))
    return Rule("gain", classes, gain=tuple(map(tuple, g)))


def _temperature(
    p: Floats, y: Labels | None, calibrate: Calibrate, weight: Floats, *, multilabel: bool
) -> tuple[float, float]:
    if calibrate is False:
        return 1.0, FLOOR
    if y is None:
        raise ValueError("calibrate needs the labels of these rows; pass target=, or leave calibrate out")
    fit = helpful_temperature if calibrate == "auto" else temperature_of
    floor = probability_floor(p, multilabel=multilabel)
    return fit(p, y, weight, multilabel=multilabel, floor=floor), floor
