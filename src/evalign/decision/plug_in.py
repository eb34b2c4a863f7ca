"""Plug-in rule: maximise the expected metric of calibrated probabilities; constraints are met on labels."""

from dataclasses import replace
from typing import Any

from evalign import checks
from evalign.confusion import Task
from evalign.decision.rule import Floats, Labels, Rule, as_labels, as_probabilities, as_weights
from evalign.decision.search.counts import expected_confusion, expected_gain
from evalign.decision.search.problem import Problem
from evalign.decision.search.thresholds import best_expected
from evalign.metrics import Average, Beta, MetricFunction


def plug_in(
    probabilities: Any, metric: str | MetricFunction, *, task: Task = "multiclass", average: Average | None = None,
    beta: Beta | None = None, subject_to: Any = None, sample_weight: Any = None, target: Any = None,
    margin: float = 0.0,
) -> Rule:  # fmt: skip
    """Rule that maximises M(C) of the expected confusion matrix C = sum_i w_i p(x_i) one-hot(decision_i)^T.

    It needs no labels and works for any metric and any number of classes, but the probabilities must be calibrated and
    predicted for rows that the model was not trained on.

    Two classes: all thresholds are compared; for F1 the best is F* / 2. More classes: Frank-Wolfe (Narasimhan 2015)
    follows the gain matrix G = dM/dC, decisions are argmax_j (p^T G)_j, and the gain matrix with the best M(C) is
    kept, argmax included. Multilabel: one threshold per label, separately if the metric is a mean over labels,
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
    target: labels of these rows; needed by constraints. To calibrate on labels, use `calibrated`.
    margin: expected gain in the metric below which argmax (multilabel: the threshold 1/2) is kept.

    >>> import numpy as np
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
    checks.check_number("margin", margin, low=0.0)
    problem = Problem.of(metric, p, task, average, beta, subject_to)
    y = None if target is None else as_labels(target, p, task)
    if y is None and problem.needs_labels:
        raise ValueError(
            f"{problem.constraints[0]} cannot be checked on probabilities alone; pass the labels of these rows as "
            "target=, or use decision.tuned or decision.calibrated"
        )
    rule = best_expected(p, problem, weight, y)
    if margin > 0.0 and problem.at_most is None:
        rule = _unless_negligible(rule, p, problem, weight, y, margin)
    decided = rule.decide(p)
    expected = expected_confusion(p, decided, task=task, sample_weight=weight)
    rule = replace(rule, value=problem.metric_value(expected))
    return problem.completed(rule, expected if y is None else problem.observed(decided, y, weight))


def _unless_negligible(
    rule: Rule, q: Floats, problem: Problem, weight: Floats, y: Labels | None, margin: float
) -> Rule:
    """The rule if it is expected to gain more than `margin` over argmax or argmax misses a constraint, else argmax."""
    plain = problem.argmax_rule()
    decided = plain.decide(q)
    c = expected_confusion(q, decided, task=problem.task, sample_weight=weight)
    c = c if y is None else problem.observed(decided, y, weight)
    if problem.missing(problem.constraint_values(c)).any():
        return rule
    return rule if expected_gain(problem, q, rule.decide(q), decided, weight) > margin else plain
