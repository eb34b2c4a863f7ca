"""Tuned rule: maximise the metric on held-out labels, with shrinkage against the noise of small samples."""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import expit

from evalign.confusion import Confusion
from evalign.decision.calibration import balanced_folds, fit_calibration
from evalign.decision.plug_in import (
    as_rule,
    expected_confusion,
    label_problems,
    make_problem,
    unless_negligible,
    with_value,
)
from evalign.decision.problem import Problem
from evalign.decision.rule import (
    FLOOR,
    Floats,
    Labels,
    Rule,
    Task,
    as_labels,
    as_probabilities,
    as_weights,
    logit,
)
from evalign.decision.search.counts import ClassCounts, OffsetSweep
from evalign.decision.search.frank_wolfe import maximise
from evalign.decision.search.label_thresholds import LabelCounts, best_thresholds
from evalign.decision.search.refine import coarse_to_fine
from evalign.decision.search.thresholds import EXACT, ThresholdSweep
from evalign.metrics import Average, Beta, MetricFunction

RESAMPLES = 30
FOLDS, GROUPS = 4, 20  # of the cross-fitted comparison, and of its jackknife
EVIDENCE = 2.5  # standard errors by which tuned offsets must beat the calibrated rule
MARGIN = 1e-4  # expected gain over argmax below which a guarded rule is argmax


def tuned(
    probabilities: Any,
    target: Any,
    metric: str | MetricFunction,
    *,
    task: Task = "multiclass",
    average: Average | None = None,
    beta: Beta | None = None,
    subject_to: Any = None,
    sample_weight: Any = None,
    guard: bool = True,
    rounds: int = 40,
) -> Rule:
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
    probabilities. Constraints (see `plug_in`) are met on the labels in either case.

    >>> tuned([0.1, 0.2, 0.3, 0.8], [0, 0, 1, 1], "f1", guard=False)
    Rule('threshold', 2, threshold=0.25, metric='f1', value=1)
    >>> tuned([0.1, 0.2, 0.3, 0.8], [0, 0, 1, 1], "precision", subject_to="recall >= 0.9").predict([0.25, 0.28])
    array([1, 1])
    """
    p = as_probabilities(probabilities, task)
    y = as_labels(target, p, task)
    weight = as_weights(sample_weight, p)
    problem = make_problem(metric, p, task, average, beta, subject_to)
    if problem.multilabel:
        own = label_problems(problem, metric, average, beta) if problem.separable else []
        rule = _many_labels(p, y, weight, problem, own, guard)
    elif problem.classes == 2:
        rule = _two_classes(p, y, weight, problem, guard)
    else:
        rule = _many_classes(p, y, weight, problem, guard, rounds)
    return with_value(rule, problem, _counted(rule.decide(p), y, weight, problem))


def _two_classes(p: Floats, y: Labels, weight: Floats, problem: Problem, guard: bool) -> Rule:
    q = fit_calibration(p, y, weight)(p)[:, 1] if guard else None
    threshold, feasible = _threshold(p[:, 1], y, weight, problem, q, multilabel=False)
    return Rule("threshold", 2, threshold=threshold, feasible=feasible)


def _threshold(
    p: Floats, y: Labels, weight: Floats, problem: Problem, q: Floats | None, *, multilabel: bool
) -> tuple[float, bool]:
    """Threshold of one score, and whether it meets the constraints; the guard needs calibrated probabilities q."""
    counted = ThresholdSweep(p, y.astype(np.float64), weight, expected=False, multilabel=multilabel)
    if q is None:
        k = counted.best(problem)
        return counted.threshold(k), not counted.misses(problem, k)
    expected = ThresholdSweep(p, q, weight, expected=True, multilabel=multilabel)
    size, half, batch_size = len(counted), counted.cut_at(0.5), problem.batch_size(1)
    centre = coarse_to_fine(lambda i: (np.zeros(len(i)), problem.value(expected.at(i))), size, half, batch_size)
    gain = np.subtract(*problem.value(expected.at(np.array([centre, half]))))
    threshold = _shrunk_threshold(counted, problem, expected.threshold(centre) if gain > MARGIN else 0.5)
    k = counted.cut_at(threshold)
    if not counted.misses(problem, k):
        return threshold, True
    # Labels determine which cuts meet the constraints, calibrated probabilities the best of these.
    k = coarse_to_fine(
        lambda i: (counted.score(problem, i)[0], problem.value(expected.at(i))), size, k, problem.batch_size(1, EXACT)
    )
    return counted.threshold(k), not counted.misses(problem, k)


def _shrunk_threshold(counted: ThresholdSweep, problem: Problem, threshold: float) -> float:
    """`threshold` shrunk towards the mean of the best bootstrap thresholds, on the logit scale (James-Stein)."""
    generator = np.random.default_rng(0)
    n, half = len(counted.weight), counted.cut_at(0.5)
    cuts = []
    for _ in range(RESAMPLES):
        counts = counted.counts(np.bincount(generator.integers(n, size=n), minlength=n).astype(np.float64))
        score = lambda i, counts=counts: (np.zeros(len(i)), problem.value(counted.at(i, counts)))  # noqa: E731
        cuts.append(counted.threshold(coarse_to_fine(score, len(counted), half, problem.batch_size(8))))
    z, centre = logit(np.array(cuts)), float(logit(np.array(threshold)))
    away = z.mean() - centre
    share = max(0.0, 1 - z.var() / away**2) if away else 0.0
    return float(expit(centre + share * away)) if share > 0 else threshold


def _many_classes(p: Floats, y: Labels, weight: Floats, problem: Problem, guard: bool, rounds: int) -> Rule:
    counted = ClassCounts(y, weight, problem.classes, reads_matrix=problem.reads_matrix)
    if not guard:
        return _offsets(p, problem, counted)
    calibration = fit_calibration(p, y, weight)
    q = calibration(p)
    expected = ClassCounts(q, weight, problem.classes, reads_matrix=problem.reads_matrix)
    rule = as_rule(maximise(q, problem, expected, counted if problem.constraints else expected, rounds=rounds))
    kind = "offsets" if rule.kind == "argmax" else rule.kind
    rule = replace(rule, kind=kind, **calibration.fields)
    if problem.constraints:
        return rule
    if _tuning_wins(p, y, weight, problem, rule):
        return _offsets(p, problem, counted)
    return unless_negligible(rule, p, problem, lambda d: expected_confusion(q, d, sample_weight=weight), MARGIN)


def _tuning_wins(p: Floats, y: Labels, weight: Floats, problem: Problem, rule: Rule) -> bool:
    """Whether offsets tuned on other folds beat `rule` by more than EVIDENCE standard errors (jackknife)."""
    n, cells = len(p), balanced_folds(p, y, FOLDS * GROUPS)
    fold, group = cells % FOLDS, cells // FOLDS
    decided = np.empty(n, dtype=np.int64)
    for k in range(FOLDS):
        rest = fold != k
        if weight[rest].sum() == 0:
            return False
        counts = ClassCounts(y[rest], weight[rest], problem.classes, reads_matrix=problem.reads_matrix)
        decided[~rest] = _offsets(p[rest], problem, counts).decide(p[~rest])
    guarded = rule.decide(p)

    def lead(rows: NDArray[np.bool_]) -> float:
        counts = (_counted(d[rows], y[rows], weight[rows], problem) for d in (decided, guarded))
        offsets, plain = (float(torch.as_tensor(problem.metric.function(c))) for c in counts)
        return offsets - plain

    leads = np.array([lead(group != k) for k in range(GROUPS) if weight[group != k].any()])
    error = np.sqrt((GROUPS - 1) / GROUPS * ((leads - leads.mean()) ** 2).sum())
    return bool(lead(np.ones(n, dtype=bool)) > max(EVIDENCE * error, MARGIN))


def _counted(decisions: Labels, y: Labels, weight: Floats, problem: Problem) -> Confusion:
    return Confusion.hard(
        torch.from_numpy(decisions), torch.from_numpy(y), problem.classes,
        sample_weight=torch.from_numpy(weight), multilabel=problem.multilabel,
    )  # fmt: skip


def _offsets(p: Floats, problem: Problem, counted: ClassCounts, passes: int = 5) -> Rule:
    """Rule argmax_j (log p_j + offset_j): coordinate ascent on the labels."""
    z = np.log(np.maximum(p, FLOOR))
    offsets = np.zeros(p.shape[1])
    for _ in range(passes):
        before = offsets.copy()
        for j in range(len(offsets)):
            sweep = OffsetSweep.of(z + offsets, j)
            score = lambda i, sweep=sweep: sweep.score(problem, counted, counted, i)  # noqa: E731
            k = coarse_to_fine(score, len(sweep), sweep.current(), problem.batch_size(counted.width))
            if k != sweep.current():
                offsets[j] += sweep.offset(k)
        if (offsets == before).all():
            break
    rule = Rule("offsets", len(offsets), offsets=tuple(offsets - offsets.mean()))
    missed = counted.shortfalls(counted.count(rule.decide(p)), problem)
    return replace(rule, feasible=not missed.any())


def _many_labels(p: Floats, y: Labels, weight: Floats, problem: Problem, own: list[Problem], guard: bool) -> Rule:
    q = fit_calibration(p, y, weight, multilabel=True)(p) if guard else None
    if problem.separable:
        thresholds = [
            _threshold(p[:, k], y[:, k], weight, g, None if q is None else q[:, k], multilabel=True)[0]
            for k, g in enumerate(own)
        ]
        return Rule("thresholds", p.shape[1], thresholds=tuple(thresholds))
    limits = LabelCounts(p, y.astype(np.float64), weight, expected=False)
    values = limits if q is None else LabelCounts(p, q, weight, expected=True)
    found, feasible = best_thresholds(problem, values, limits)
    return Rule("thresholds", p.shape[1], thresholds=tuple(found), feasible=feasible)
