"""tuned: the decision rule chosen on held-out labels, guarded against the noise of small sets."""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from evalign.confusion import Confusion
from evalign.decision.calibration import scaled_classes, scaled_labels
from evalign.decision.climb import solve
from evalign.decision.goal import Goal, search
from evalign.decision.multilabel import LabelTally, best_thresholds
from evalign.decision.plug_in import (
    expected_confusion,
    finished,
    label_goals,
    make_goal,
    rule_of,
    worthwhile,
)
from evalign.decision.rule import (
    FLOOR,
    Floats,
    Labels,
    Rule,
    Task,
    as_labels,
    as_probabilities,
    as_weights,
    expit,
    logit,
)
from evalign.decision.search import EXACT, Column, Sweep, Tally
from evalign.metrics import Average, Beta, MetricFunction

RESAMPLES = 30
FOLDS, GROUPS = 4, 20  # of the cross-fitted comparison, and of its jackknife
INSIST = 2.5  # standard errors by which labels must contradict a guarded rule
MARGIN = 1e-4  # a guarded rule that is expected to gain less than this over argmax is argmax


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
    """The rule that does best on held-out labels: for probabilities that cannot be trusted as they are.

    A metric of a few hundred labels is a jagged function of a threshold, and its highest point is luck: tuned
    rules often do worse on new rows than argmax. So the labels are used where they are most worth (`guard=True`):

    1. They calibrate: q is p^(1/T) exp(offsets), normalised, by penalised likelihood, which is smooth.
    2. The rule is the `plug_in` one for q.
    3. Two classes and separable labels: the threshold then moves towards the mean t of the best cuts of 30
       bootstrap samples, by the share max(0, 1 - var(t) / (t - t_q)^2) that is not noise (James-Stein), so that
       many labels overrule a calibration that does not fit. More classes: offsets tuned as with `guard=False`
       take over if, on folds they were not tuned on, they lead by 2.5 standard errors.

    `guard=False` maximises the metric on the labels as they are: the best of all cut points for two classes, one
    offset a class by coordinate ascent with exact line search, one threshold a label. Cuts lie halfway between
    neighbouring probabilities. Constraints (see `plug_in`) are met on the labels in either case.

    >>> tuned([0.1, 0.2, 0.3, 0.8], [0, 0, 1, 1], "f1", guard=False)
    Rule('threshold', 2, threshold=0.25, metric='f1', value=1)
    >>> tuned([0.1, 0.2, 0.3, 0.8], [0, 0, 1, 1], "precision", subject_to="recall >= 0.9").predict([0.25, 0.28])
    array([1, 1])
    """
    p = as_probabilities(probabilities, task)
    y = as_labels(target, p, task)
    weight = as_weights(sample_weight, p)
    goal = make_goal(metric, p, task, average, beta, subject_to)
    if goal.multilabel:
        own = label_goals(goal, metric, average, beta) if goal.separable else []
        rule = _many_labels(p, y, weight, goal, own, guard)
    elif goal.classes == 2:
        rule = _two_classes(p, y, weight, goal, guard)
    else:
        rule = _many_classes(p, y, weight, goal, guard, rounds)
    return finished(rule, goal, _counted(rule.decide(p), y, weight, goal))


def _two_classes(p: Floats, y: Labels, weight: Floats, goal: Goal, guard: bool) -> Rule:
    q = scaled_classes(p, y, weight).q[:, 1] if guard else None
    threshold, feasible = _cut(p[:, 1], y, weight, goal, q, multilabel=False)
    return Rule("threshold", 2, threshold=threshold, feasible=feasible)


def _cut(p: Floats, y: Labels, weight: Floats, goal: Goal, q: Floats | None, *, multilabel: bool) -> tuple[float, bool]:
    """Threshold of one score, and whether it meets the constraints; q are calibrated probabilities, for the guard."""
    counted = Sweep(p, y.astype(np.float64), weight, expected=False, multilabel=multilabel)
    if q is None:
        k = counted.best(goal)
        return counted.threshold(k), not counted.misses(goal, k)
    expected = Sweep(p, q, weight, expected=True, multilabel=multilabel)
    size, half, at_once = len(counted), counted.cut_at(0.5), goal.at_once(1)
    centre = search(lambda i: (np.zeros(len(i)), goal.value(expected.at(i))), size, half, at_once)
    gain = np.subtract(*goal.value(expected.at(np.array([centre, half]))))
    threshold = _moved(counted, goal, expected.threshold(centre) if gain > MARGIN else 0.5)
    k = counted.cut_at(threshold)
    if not counted.misses(goal, k):
        return threshold, True
    # Labels say which cuts meet the constraints, calibrated probabilities which of these is best.
    k = search(lambda i: (counted.judge(goal, i)[0], goal.value(expected.at(i))), size, k, goal.at_once(1, EXACT))
    return counted.threshold(k), not counted.misses(goal, k)


def _moved(counted: Sweep, goal: Goal, threshold: float) -> float:
    """`threshold` moved towards the best cuts of bootstrap samples, as far as these agree; on the logit scale."""
    generator = np.random.default_rng(0)
    n, half = len(counted.weight), counted.cut_at(0.5)
    cuts = []
    for _ in range(RESAMPLES):
        counts = counted.counts(np.bincount(generator.integers(n, size=n), minlength=n).astype(np.float64))
        judge = lambda i, counts=counts: (np.zeros(len(i)), goal.value(counted.at(i, counts)))  # noqa: E731
        cuts.append(counted.threshold(search(judge, len(counted), half, goal.at_once(8))))
    z, centre = logit(np.array(cuts)), float(logit(np.array(threshold)))
    away = z.mean() - centre
    share = max(0.0, 1 - z.var() / away**2) if away else 0.0
    return float(expit(centre + share * away)) if share > 0 else threshold


def _many_classes(p: Floats, y: Labels, weight: Floats, goal: Goal, guard: bool, rounds: int) -> Rule:
    counted = Tally(np.eye(p.shape[1])[y], weight, expected=False, reads_matrix=goal.reads_matrix)
    if not guard:
        return _offsets(p, goal, counted)
    q, temperature, offsets, floor = scaled_classes(p, y, weight)
    expected = Tally(q, weight, expected=True, reads_matrix=goal.reads_matrix)
    rule = rule_of(solve(q, goal, expected, counted if goal.constraints else expected, rounds=rounds))
    kind = "offsets" if rule.kind == "argmax" else rule.kind
    rule = replace(rule, kind=kind, temperature=temperature, offsets=tuple(offsets), floor=floor)
    if goal.constraints:
        return rule
    if _labels_insist(p, y, weight, goal, rule):
        return _offsets(p, goal, counted)
    return worthwhile(rule, p, goal, lambda d: expected_confusion(q, d, sample_weight=weight), MARGIN)


def _labels_insist(p: Floats, y: Labels, weight: Floats, goal: Goal, rule: Rule) -> bool:
    """Whether offsets tuned on other folds beat `rule` by more than INSIST standard errors (jackknife)."""
    n, order = len(p), np.lexsort((*p.T, y))
    fold, group = np.empty(n, dtype=np.int64), np.empty(n, dtype=np.int64)
    # Dealt out in the order of labels and scores: every fold and every group has its share of each class.
    fold[order], group[order] = np.arange(n) % FOLDS, np.arange(n) // FOLDS % GROUPS
    decided = np.empty(n, dtype=np.int64)
    for k in range(FOLDS):
        rest = fold != k
        if weight[rest].sum() == 0:
            return False
        tally = Tally(np.eye(p.shape[1])[y[rest]], weight[rest], expected=False, reads_matrix=goal.reads_matrix)
        decided[~rest] = _offsets(p[rest], goal, tally).decide(p[~rest])
    guarded = rule.decide(p)

    def lead(rows: NDArray[np.bool_]) -> float:
        counts = (_counted(d[rows], y[rows], weight[rows], goal) for d in (decided, guarded))
        offsets, plain = (float(torch.as_tensor(goal.metric.function(c))) for c in counts)
        return offsets - plain

    leads = np.array([lead(group != k) for k in range(GROUPS) if weight[group != k].any()])
    error = np.sqrt((GROUPS - 1) / GROUPS * ((leads - leads.mean()) ** 2).sum())
    return bool(lead(np.ones(n, dtype=bool)) > max(INSIST * error, MARGIN))


def _counted(decisions: Labels, y: Labels, weight: Floats, goal: Goal) -> Confusion:
    return Confusion.hard(
        torch.from_numpy(decisions), torch.from_numpy(y), goal.classes,
        sample_weight=torch.from_numpy(weight), multilabel=goal.multilabel,
    )  # fmt: skip


def _offsets(p: Floats, goal: Goal, counted: Tally, passes: int = 5) -> Rule:
    """argmax_j (log p_j + offset_j), one offset after the other at its best on the labels."""
    z = np.log(np.maximum(p, FLOOR))
    offsets = np.zeros(p.shape[1])
    for _ in range(passes):
        before = offsets.copy()
        for j in range(len(offsets)):
            column = Column.of(z + offsets, j)
            judge = lambda i, column=column: column.judge(goal, counted, counted, i)  # noqa: E731
            k = search(judge, len(column), column.here(), goal.at_once(counted.width))
            if k != column.here():
                offsets[j] += column.raise_by(k)
        if (offsets == before).all():
            break
    rule = Rule("offsets", len(offsets), offsets=tuple(offsets - offsets.mean()))
    missed = counted.shortfalls(counted.count(rule.decide(p)), goal)
    return replace(rule, feasible=not missed.any())


def _many_labels(p: Floats, y: Labels, weight: Floats, goal: Goal, own: list[Goal], guard: bool) -> Rule:
    q = scaled_labels(p, y, weight) if guard else None
    if goal.separable:
        thresholds = [
            _cut(p[:, k], y[:, k], weight, g, None if q is None else q[:, k], multilabel=True)[0]
            for k, g in enumerate(own)
        ]
        return Rule("thresholds", p.shape[1], thresholds=tuple(thresholds))
    limits = LabelTally(p, y.astype(np.float64), weight, expected=False)
    values = limits if q is None else LabelTally(p, q, weight, expected=True)
    found, feasible = best_thresholds(goal, values, limits)
    return Rule("thresholds", p.shape[1], thresholds=tuple(found), feasible=feasible)
