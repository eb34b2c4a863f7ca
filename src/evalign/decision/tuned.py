"""Tuned rule: maximise the metric on held-out labels, with shrinkage against the noise of small samples."""

from dataclasses import replace
from typing import Any

import numpy as np
from scipy.special import expit

from evalign.decision.calibration import balanced_folds, fit_calibration
from evalign.decision.certified import certified_rule, check_confidence
from evalign.decision.plug_in import (
    argmax_rule,
    best_expected,
    expected_confusion,
    lead,
    metric_value,
    with_constraints,
)
from evalign.decision.rule import FLOOR, Floats, Labels, Rule, Task, as_held_out, logit
from evalign.decision.search.counts import ClassCounts, OffsetSweep
from evalign.decision.search.label_thresholds import LabelCounts, best_thresholds
from evalign.decision.search.problem import Problem
from evalign.decision.search.refine import coarse_to_fine
from evalign.decision.search.thresholds import ThresholdSweep
from evalign.metrics import Average, Beta, MetricFunction

RESAMPLES = 30
FOLDS, GROUPS = 4, 20  # of the cross-fitted comparison, and of its jackknife
EVIDENCE = 2.5  # standard errors by which tuned offsets must beat the calibrated rule
SWEPT = 2**25  # rows x classes^2 above which calibration has the labels it needs and offsets are not tuned
MARGIN = 1e-4  # expected gain over argmax below which a guarded rule is argmax


def tuned(
    probabilities: Any, target: Any, metric: str | MetricFunction, *, task: Task = "multiclass",
    average: Average | None = None, beta: Beta | None = None, subject_to: Any = None, confidence: float | None = None,
    sample_weight: Any = None, guard: bool = True,
) -> Rule:  # fmt: skip
    """Rule that maximises the metric on held-out labels, for probabilities that are not calibrated.

    On a few hundred labels a metric is a jagged function of the threshold, and its maximum is mostly noise: rules
    tuned this way often do worse on new rows than argmax. With `guard=True`

    1. the labels calibrate: q ~ p^(1/T) exp(offsets), by penalised likelihood, which is smooth;
    2. the rule is the `plug_in` rule of q;
    3. for two classes and separable labels the threshold moves towards the mean t of the best thresholds of 30
       bootstrap samples, by the share max(0, 1 - var(t) / (t - t_q)^2) that is not noise (James-Stein), so that
       many labels overrule a calibration that does not fit. For more classes, offsets tuned as with `guard=False`
       are used if they lead by 2.5 standard errors on folds that they were not tuned on.

    `guard=False` maximises the metric on the labels themselves: all cut points for two classes, one offset a class by
    coordinate ascent with exact line search, one threshold a label. Thresholds lie halfway between neighbouring
    probabilities. Constraints (see `plug_in`) are met on the labels in either case; with
    `confidence` they are certified (see `calibrated`).

    >>> tuned([0.1, 0.2, 0.3, 0.8], [0, 0, 1, 1], "f1", guard=False)
    Rule('threshold', 2, threshold=0.25, metric='f1', value=1)
    >>> tuned([0.1, 0.2, 0.3, 0.8], [0, 0, 1, 1], "precision", subject_to="recall >= 0.9").predict([0.25, 0.28])
    array([1, 1])
    """
    p, y, weight = as_held_out(probabilities, target, sample_weight, task)
    problem = Problem.of(metric, p, task, average, beta, subject_to)
    if confidence is not None:
        check_confidence(problem, weight, confidence)
        calibration = fit_calibration(p, y, weight, multilabel=problem.multilabel)
        return replace(certified_rule(calibration(p), y, problem, confidence), **calibration.fields)
    rule = guarded(p, y, weight, problem) if guard else unguarded(p, y, weight, problem)
    value = metric_value(problem, problem.observed(rule.decide(p), y, weight))
    return with_constraints(replace(rule, value=value), p, problem, weight, y)


def unguarded(p: Floats, y: Labels, weight: Floats, problem: Problem) -> Rule:
    """Rule of the best metric on the labels."""
    truth = y.astype(np.float64)
    if problem.multilabel:
        counts = LabelCounts(p, truth, weight, expected=False)
        if problem.separable:
            sweeps = zip(counts.sweeps, problem.per_label(), strict=True)
            return Rule("thresholds", p.shape[1], thresholds=tuple(s.threshold(s.best(own)) for s, own in sweeps))
        return Rule("thresholds", p.shape[1], thresholds=tuple(best_thresholds(problem, counts, counts)))
    if problem.classes == 2:
        sweep = ThresholdSweep(p[:, 1], truth, weight, expected=False)
        return Rule("threshold", 2, threshold=sweep.threshold(sweep.best(problem)), at_most=problem.at_most)
    return _offsets(p, problem, ClassCounts(y, weight, problem.classes, reads_matrix=problem.reads_matrix))


def guarded(p: Floats, y: Labels, weight: Floats, problem: Problem) -> Rule:
    """Plug-in rule of calibrated probabilities, corrected by the labels as far as they are more than noise."""
    calibration = fit_calibration(p, y, weight, multilabel=problem.multilabel)
    q = calibration(p)
    if problem.constraints or problem.at_most is not None or (problem.multilabel and not problem.separable):
        rule = best_expected(q, problem, weight, y)
    elif problem.multilabel:
        columns = enumerate(problem.per_label())
        found = [_shrunk_threshold(q[:, k], y[:, k], weight, own, multilabel=True) for k, own in columns]
        return Rule("thresholds", p.shape[1], thresholds=tuple(found), **calibration.fields)
    elif problem.classes == 2:
        threshold = _shrunk_threshold(q[:, 1], y, weight, problem, multilabel=False)
        return Rule("threshold", 2, threshold=threshold, **calibration.fields)
    else:
        rule = best_expected(q, problem, weight, y)
        plain = argmax_rule(problem).decide(p)
        counts = [expected_confusion(q, d, sample_weight=weight) for d in (rule.decide(q), plain)]
        gain = (metric_value(problem, counts[0]) or 0.0) - (metric_value(problem, counts[1]) or 0.0)
        if len(p) * problem.classes**2 <= SWEPT and _tuning_wins(p, y, weight, problem, rule.decide(q)):
            return unguarded(p, y, weight, problem)
        if gain <= MARGIN:
            return argmax_rule(problem)
    if rule.kind == "argmax":
        return Rule("offsets", rule.columns, **calibration.fields)
    return replace(rule, **calibration.fields)


def _shrunk_threshold(q: Floats, y: Labels, weight: Floats, problem: Problem, *, multilabel: bool) -> float:
    """Plug-in threshold of q, moved towards the best thresholds of bootstrap samples (James-Stein, logit scale)."""
    observed = ThresholdSweep(q, y.astype(np.float64), weight, expected=False, multilabel=multilabel)
    expected = ThresholdSweep(q, q, weight, expected=True, multilabel=multilabel)
    half, best = observed.cut_at(0.5), expected.best(problem)
    gain = np.subtract(*problem.value(expected.at(np.array([best, half]))))
    threshold = expected.threshold(best) if gain > MARGIN else 0.5
    generator = np.random.default_rng(0)
    n, cuts = len(q), []
    for _ in range(RESAMPLES):
        counts = observed.counts(np.bincount(generator.integers(n, size=n), minlength=n).astype(np.float64))
        score = lambda i, counts=counts: (np.zeros(len(i)), problem.value(observed.at(i, counts)))  # noqa: E731
        cuts.append(observed.threshold(coarse_to_fine(score, len(observed), half, problem.batch_size(8))))
    z, centre = logit(np.array(cuts)), float(logit(np.array(threshold)))
    away = z.mean() - centre
    share = max(0.0, 1 - z.var() / away**2) if away else 0.0
    moved = float(expit(centre + share * away)) if share > 0 else threshold
    # Rows whose class has next to no weight: no threshold is worth anything, and the best one is arbitrary.
    if gain <= MARGIN and np.subtract(*problem.value(observed.at(np.array([observed.cut_at(moved), half])))) <= MARGIN:
        return 0.5
    return moved


def _tuning_wins(p: Floats, y: Labels, weight: Floats, problem: Problem, decisions: Labels) -> bool:
    """Whether offsets tuned on other folds beat `decisions` by more than EVIDENCE standard errors (jackknife)."""
    n, cells = len(p), balanced_folds(p, y, FOLDS * GROUPS)
    fold, group = cells % FOLDS, cells // FOLDS
    tuned_decisions = np.empty(n, dtype=np.int64)
    for k in range(FOLDS):
        rest = fold != k
        if weight[rest].sum() == 0:
            return False
        tuned_decisions[~rest] = unguarded(p[rest], y[rest], weight[rest], problem).decide(p[~rest])
    ahead, error = lead(problem, tuned_decisions, decisions, y, weight, group)
    return ahead > max(EVIDENCE * error, MARGIN)


def _offsets(p: Floats, problem: Problem, observed: ClassCounts, passes: int = 5) -> Rule:
    """Rule argmax_j (log p_j + offset_j): coordinate ascent on the labels."""
    z = np.log(np.maximum(p, FLOOR))
    offsets = np.zeros(p.shape[1])
    for _ in range(passes):
        before = offsets.copy()
        for j in range(len(offsets)):
            sweep = OffsetSweep.of(z + offsets, j)
            score = lambda i, sweep=sweep: sweep.score(problem, observed, observed, i)  # noqa: E731
            k = coarse_to_fine(score, len(sweep), sweep.current(), problem.batch_size(observed.width))
            if k != sweep.current():
                offsets[j] += sweep.offset(k)
        if (offsets == before).all():
            break
    return Rule("offsets", len(offsets), offsets=tuple(offsets - offsets.mean()))
