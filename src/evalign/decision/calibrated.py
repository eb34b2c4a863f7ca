"""Default rule: calibrate on held-out labels, decide by the plug-in rule, check the choice by cross-validation."""

from dataclasses import replace
from typing import Any, Literal

import numpy as np

from evalign import _checks as checks
from evalign.decision.calibration import balanced_folds, fit_calibration
from evalign.decision.certified import certified_rule, check_confidence
from evalign.decision.plug_in import (
    argmax_rule,
    best_expected,
    expected_confusion,
    lead,
    metric_value,
    plug_in,
    with_constraints,
)
from evalign.decision.rule import Floats, Labels, Rule, Task, as_held_out, as_probabilities, as_weights
from evalign.decision.search.problem import Problem
from evalign.decision.tuned import guarded, tuned
from evalign.metrics import Average, Beta, MetricFunction

Decision = Literal["auto", "plug_in", "tuned", "argmax"]
DECISIONS: tuple[Decision, ...] = ("auto", "plug_in", "tuned", "argmax")
FOLDS, GROUPS = 4, 20  # of the cross-validated comparison, and of its jackknife
EVIDENCE = 0.5  # standard errors by which argmax must lead to replace the calibrated rule
COMPARED = 2**20  # probabilities on which argmax is compared; of larger arrays a stratified sample of rows
MARGIN = 1e-4  # expected gain over argmax below which argmax decides


def calibrated(
    probabilities: Any, target: Any, metric: str | MetricFunction, *, task: Task = "multiclass",
    average: Average | None = None, beta: Beta | None = None, subject_to: Any = None, confidence: float | None = None,
    sample_weight: Any = None,
) -> Rule:  # fmt: skip
    """Default rule of all estimators: calibrate on held-out labels, then `plug_in` on the calibrated probabilities.

    1. q ~ p^(1 / T) exp(offsets) by penalised likelihood (multilabel: a slope and an offset a label). The penalty
       shrinks towards q = p, so that few rows change little.
    2. The rule is the plug-in rule of q. Its threshold moves towards the best thresholds of bootstrap samples of the
       labels by the share that is not noise; with more than two classes, tuned offsets replace it if they lead by 2.5
       standard errors in cross-validation (as in `tuned`).
    3. If argmax leads the plug-in rule of q by half a standard error in cross-validation, argmax decides.

    Constraints are met on the labels (`confidence=None`), or certified: with `confidence=0.9` they hold for new rows
    with probability 0.9; see `evalign.decision.certified` for the bounds. Parameters as in `plug_in`.

    >>> p, y = [0.1, 0.2, 0.3, 0.8, 0.2, 0.3, 0.6, 0.9] * 20, [0, 0, 1, 1, 0, 0, 1, 1] * 20
    >>> bool(calibrated(p, y, "f1").predict([0.45])[0])
    True
    >>> rule = calibrated(p, y, "precision", subject_to="recall >= 0.9", confidence=0.9)
    >>> rule.feasible, rule.bounds[0] >= 0.9
    (True, True)
    """
    p, y, weight = as_held_out(probabilities, target, sample_weight, task)
    problem = Problem.of(metric, p, task, average, beta, subject_to)
    if confidence is not None:
        check_confidence(problem, weight, confidence)
    calibration = fit_calibration(p, y, weight, multilabel=problem.multilabel)
    q = calibration(p)
    if confidence is not None:
        return replace(
            certified_rule(q, y, problem, confidence), shares=_shares(y, weight, problem), **calibration.fields
        )
    rule = replace(guarded(p, y, weight, problem), shares=_shares(y, weight, problem))
    free = not problem.constraints and problem.at_most is None
    if free and _argmax_lead(p, y, weight, problem) > 0:
        rule = replace(argmax_rule(problem), shares=rule.shares)
    value = metric_value(problem, problem.observed(rule.decide(p), y, weight))
    return with_constraints(replace(rule, value=value), p, problem, weight, y)


def _shares(y: Labels, weight: Floats, problem: Problem) -> tuple[float, ...]:
    """Share of each class or label in the rows."""
    counts = weight @ y if problem.multilabel else np.bincount(y, weight, problem.classes)
    return tuple((counts / weight.sum()).tolist())


def _argmax_lead(p: Floats, y: Labels, weight: Floats, problem: Problem) -> float:
    """Cross-validated lead of argmax over the calibrated plug-in rule, less EVIDENCE standard errors (jackknife)."""
    if p.size > COMPARED:
        rows = balanced_folds(p, y, -(-p.size // COMPARED)) == 0
        p, y, weight = p[rows], y[rows], weight[rows]
    part = balanced_folds(p, y, FOLDS * GROUPS)
    fold, group = part % FOLDS, part // FOLDS
    plain, decided = argmax_rule(problem).decide(p), np.zeros_like(y)
    for k in range(FOLDS):
        fit, rest = fold != k, fold == k
        if not rest.any():
            continue
        if weight[fit].sum() == 0:
            return -np.inf
        calibration = fit_calibration(p[fit], y[fit], weight[fit], multilabel=problem.multilabel)
        rule = best_expected(calibration(p[fit]), problem, weight[fit], None)
        decided[rest] = rule.decide(calibration(p[rest]))
    ahead, error = lead(problem, plain, decided, y, weight, group)
    return ahead - EVIDENCE * error


def learn_rule(
    decision: str, probabilities: Any, target: Any, metric: str | MetricFunction, *, confidence: float | None = None,
    **options: Any,
) -> Rule:  # fmt: skip
    """Learn the rule that an estimator's `decision` option names from held-out probabilities and labels.

    "auto" is `calibrated`, also the rule of every certified constraint; "plug_in" and "tuned" are the functions of that
    name; "argmax" is the largest probability. Options as in `calibrated`.

    >>> learn_rule("argmax", [0.2, 0.7], [0, 1], "f1").kind
    'argmax'
    """
    checks.check_choice("decision", decision, DECISIONS)
    constrained = options.get("subject_to") is not None
    if decision == "argmax" and (constrained or confidence is not None):
        raise ValueError("decision 'argmax' cannot meet constraints; use 'auto', 'plug_in' or 'tuned'")
    if decision == "plug_in" and confidence is not None:
        raise ValueError(
            "decision 'plug_in' cannot certify constraints; use 'auto' or 'tuned', or leave out confidence"
        )
    if decision == "argmax":
        p = as_probabilities(probabilities, options.get("task", "multiclass"))
        return argmax_rule(
            Problem.of(metric, p, options.get("task", "multiclass"), options.get("average"), options.get("beta"), None)
        )
    if decision == "plug_in":
        return plug_in(probabilities, metric, target=target, margin=MARGIN, **options)
    learn = calibrated if decision == "auto" else tuned
    return learn(probabilities, target, metric, confidence=confidence, **options)


def joint_rule(
    rule: Rule, probabilities: Any, metric: str | MetricFunction, *, task: Task = "multiclass",
    average: Average | None = None, beta: Beta | None = None, subject_to: Any = None, sample_weight: Any = None,
) -> Rule:  # fmt: skip
    """Rule for a batch of rows that are decided jointly: the plug-in rule of their own calibrated probabilities.

    Calibration is that of `rule`, which was learned from held-out labels. Budgets ("flagged <= 2%") hold exactly in the
    batch. `rule` itself is returned if the batch's own rule is expected to gain less than one row, if labels have shown
    argmax to be better, and with constraints that need labels: these cannot rest on probabilities. So it is for
    thresholds (two classes, multilabel) without a budget: labels have corrected them, which is worth more than the
    batch (docs/research/decisions.md).

    >>> rule = Rule("threshold", 2, threshold=0.3)
    >>> round(joint_rule(rule, [0.4, 0.6, 0.8, 0.9] * 20, "f1").threshold, 2)
    0.3
    """
    p = as_probabilities(probabilities, task)
    problem = Problem.of(metric, p, task, average, beta, subject_to)
    if problem.needs_labels or not len(p) or (rule.kind == "argmax" and rule.value is not None):
        return rule
    limited = bool(problem.constraints) or problem.at_most is not None
    if not limited and (rule.threshold is not None or rule.multilabel):
        return rule
    q, weight = rule.calibrate(p), as_weights(sample_weight, p)
    found = best_expected(q, problem, weight, None)
    counts = [expected_confusion(q, d, task=task, sample_weight=weight) for d in (found.decide(q), rule.decide(p))]
    values = [metric_value(problem, c) or 0.0 for c in counts]
    if not limited and values[0] - values[1] < 1 / len(p):  # less than a row's worth
        return rule
    kind = "offsets" if found.kind == "argmax" and rule.offsets is not None else found.kind
    found = replace(found, kind=kind, temperature=rule.temperature, offsets=rule.offsets, floor=rule.floor)
    return replace(found, metric=problem.name, shares=rule.shares)
