"""Rules learned from held-out labels: `calibrated`, the default, and `tuned`; joint rules of a batch."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import numpy as np
from scipy.special import expit

from evalign import checks
from evalign.confusion import Task
from evalign.decision.calibration import Calibration, balanced_folds, fit_calibration
from evalign.decision.certified import certified_rule, check_confidence
from evalign.decision.plug_in import plug_in
from evalign.decision.rule import FLOOR, Floats, Labels, Rule, as_held_out, as_probabilities, as_weights, logit
from evalign.decision.search.counts import ClassCounts, OffsetSweep, expected_gain
from evalign.decision.search.problem import Problem, coarse_to_fine
from evalign.decision.search.thresholds import LabelCounts, ThresholdSweep, best_expected, best_thresholds
from evalign.metrics import Average, Beta, MetricFunction

Decision = Literal["auto", "plug_in", "tuned", "argmax"]
Learn = Callable[[Floats, Labels, Floats], Rule]
DECISIONS: tuple[Decision, ...] = ("auto", "plug_in", "tuned", "argmax")
FOLDS, GROUPS = 4, 20  # folds of the cross-validated comparison, and groups of its jackknife
RESAMPLES = 30
TUNING_EVIDENCE = 2.5  # standard errors by which tuned offsets must beat the calibrated rule
SWEPT = 2**25  # rows x classes^2 above which calibration has enough labels and offsets are not tuned
EVIDENCE = 0.5  # standard errors by which argmax must lead to replace the calibrated rule
COMPARED = 2**20  # maximum probabilities for the comparison with argmax; larger arrays are sampled by row, stratified
MARGIN = 1e-4  # expected gain over argmax below which argmax is kept


def calibrated(
    probabilities: Any, target: Any, metric: str | MetricFunction, *, task: Task = "multiclass",
    average: Average | None = None, beta: Beta | None = None, subject_to: Any = None, confidence: float | None = None,
    sample_weight: Any = None,
) -> Rule:  # fmt: skip
    """Default rule of all estimators: calibrate on held-out labels, then `plug_in` on the calibrated probabilities.

    1. q ~ p^(1 / T) exp(offsets) by penalised likelihood (multilabel: a slope and an offset per label). The penalty
       shrinks towards q = p, so that few rows change little.
    2. The rule is the plug-in rule of q. Its threshold moves towards the best thresholds of bootstrap samples of the
       labels by the share that is not noise; with more than two classes, tuned offsets replace it if they lead by 2.5
       standard errors in cross-validation (as in `tuned`).
    3. If argmax leads the plug-in rule of q by half a standard error in cross-validation, argmax is used.

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
    return _learned(p, y, weight, problem, confidence, _unless_argmax_leads)


def _learned(
    p: Floats, y: Labels, weight: Floats, problem: Problem, confidence: float | None, learn: Callable[..., Rule]
) -> Rule:
    """A certified rule, or the rule from `learn`, with the values reached."""
    counts = weight @ y if problem.multilabel else np.bincount(y, weight, problem.classes)
    shares = tuple((counts / weight.sum()).tolist())
    if confidence is not None:
        check_confidence(problem, weight, confidence)
        calibration = fit_calibration(p, y, weight, multilabel=problem.multilabel)
        return replace(certified_rule(calibration(p), y, problem, confidence), shares=shares, **calibration.fields)
    rule = learn(p, y, weight, problem)
    c = problem.observed(rule.decide(p), y, weight)
    return problem.completed(replace(rule, value=problem.metric_value(c), shares=shares), c)


def _unless_argmax_leads(p: Floats, y: Labels, weight: Floats, problem: Problem) -> Rule:
    free = not problem.constraints and problem.at_most is None
    return problem.argmax_rule() if free and _argmax_lead(p, y, weight, problem) > 0 else guarded(p, y, weight, problem)


def _cross_fitted(p: Floats, y: Labels, weight: Floats, learn: Learn) -> tuple[Labels, Labels] | None:
    """Decisions of rows by rules of other folds, and jackknife groups of rows; None if one fold has all the weight."""
    part = balanced_folds(p, y, FOLDS * GROUPS)
    decided = np.zeros_like(y)
    for k in range(FOLDS):
        fit, rest = part % FOLDS != k, part % FOLDS == k
        if weight[fit].sum() == 0:
            return None
        if rest.any():
            decided[rest] = learn(p[fit], y[fit], weight[fit]).decide(p[rest])
    return decided, part // FOLDS


def _argmax_lead(p: Floats, y: Labels, weight: Floats, problem: Problem) -> float:
    """Cross-validated lead of argmax over the calibrated plug-in rule, less EVIDENCE standard errors (jackknife)."""
    if p.size > COMPARED:
        rows = balanced_folds(p, y, -(-p.size // COMPARED)) == 0
        p, y, weight = p[rows], y[rows], weight[rows]

    def learn(p: Floats, y: Labels, weight: Floats) -> Rule:
        calibration = fit_calibration(p, y, weight, multilabel=problem.multilabel)
        return with_calibration(best_expected(calibration(p), problem, weight, None), calibration)

    found = _cross_fitted(p, y, weight, learn)
    if found is None:
        return -np.inf
    ahead, error = problem.lead(problem.argmax_rule().decide(p), found[0], y, weight, found[1])
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
        task = options.get("task", "multiclass")
        p = as_probabilities(probabilities, task)
        return Problem.of(metric, p, task, options.get("average"), options.get("beta"), None).argmax_rule()
    if decision == "plug_in":
        return plug_in(probabilities, metric, target=target, margin=MARGIN, **options)
    learn = calibrated if decision == "auto" else tuned
    return learn(probabilities, target, metric, confidence=confidence, **options)


def joint_rule(
    rule: Rule, probabilities: Any, metric: str | MetricFunction, *, task: Task = "multiclass",
    average: Average | None = None, beta: Beta | None = None, subject_to: Any = None, sample_weight: Any = None,
) -> Rule:  # fmt: skip
    """Rule for the joint prediction of a batch: the plug-in rule of its own calibrated probabilities.

    Probabilities are calibrated as in `rule`. Budgets ("flagged <= 2%") hold exactly in the batch. `rule` itself is
    returned if the expected gain is less than one row, if held-out labels favoured argmax, with constraints that need
    labels, and for thresholds (two classes, multilabel) without a budget: the labels that corrected these are worth
    more than the batch (docs/research/decisions.md).

    >>> rule = Rule("threshold", 2, threshold=0.3)
    >>> round(joint_rule(rule, [0.4, 0.6, 0.8, 0.9] * 20, "f1").threshold, 2)
    0.3
    """
    p = as_probabilities(probabilities, task)
    rule.check_columns(p)
    problem = Problem.of(metric, p, task, average, beta, subject_to)
    if problem.needs_labels or not len(p) or (rule.kind == "argmax" and rule.value is not None):
        return rule
    limited = bool(problem.constraints) or problem.at_most is not None
    if not limited and (rule.threshold is not None or rule.multilabel):
        return rule
    q, weight = rule.calibrate(p), as_weights(sample_weight, p)
    found = best_expected(q, problem, weight, None)
    gain = expected_gain(problem, q, found.decide(q), rule.decide(p), weight)
    if not limited and gain < 1 / len(p):  # less than one row
        return rule
    kind = "offsets" if found.kind == "argmax" and rule.offsets is not None else found.kind
    found = replace(found, kind=kind, temperature=rule.temperature, offsets=rule.offsets, floor=rule.floor)
    return replace(found, metric=problem.name, shares=rule.shares)


def tuned(
    probabilities: Any, target: Any, metric: str | MetricFunction, *, task: Task = "multiclass",
    average: Average | None = None, beta: Beta | None = None, subject_to: Any = None, confidence: float | None = None,
    sample_weight: Any = None, guard: bool = True,
) -> Rule:  # fmt: skip
    """Rule that maximises the metric on held-out labels, for probabilities that are not calibrated.

    On a few hundred labels the maximum of a metric over thresholds is mostly noise, and the rule often does worse than
    argmax on new rows. With `guard=True`

    1. the labels calibrate: q ~ p^(1/T) exp(offsets), by penalised likelihood, which is smooth;
    2. the rule is the `plug_in` rule of q;
    3. for two classes and separable labels the threshold moves towards the mean t of the best thresholds of 30
       bootstrap samples, by the share max(0, 1 - var(t) / (t - t_q)^2) that is not noise (James-Stein), so that
       many labels override a poor calibration. For more classes, offsets tuned as with `guard=False`
       are used if they lead by 2.5 standard errors on folds that they were not tuned on.

    `guard=False` maximises the metric on the labels themselves: all cut points for two classes, one offset per class by
    coordinate ascent with exact line search, one threshold per label. Thresholds lie halfway between neighbouring
    probabilities. Constraints (see `plug_in`) are met on the labels in either case; with
    `confidence` they are certified (see `calibrated`).

    >>> tuned([0.1, 0.2, 0.3, 0.8], [0, 0, 1, 1], "f1", guard=False)
    Rule('threshold', 2, threshold=0.25, metric='f1', value=1)
    >>> tuned([0.1, 0.2, 0.3, 0.8], [0, 0, 1, 1], "precision", subject_to="recall >= 0.9").predict([0.25, 0.28])
    array([1, 1])
    """
    p, y, weight = as_held_out(probabilities, target, sample_weight, task)
    problem = Problem.of(metric, p, task, average, beta, subject_to)
    return _learned(p, y, weight, problem, confidence, guarded if guard else unguarded)


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
        gain = expected_gain(problem, q, rule.decide(q), problem.argmax_rule().decide(p), weight)
        if len(p) * problem.classes**2 <= SWEPT and _tuning_wins(p, y, weight, problem, rule.decide(q)):
            return unguarded(p, y, weight, problem)
        if gain <= MARGIN:
            return problem.argmax_rule()
    return with_calibration(rule, calibration)


def with_calibration(rule: Rule, calibration: Calibration) -> Rule:
    """Convert a rule for calibrated probabilities to one for the original probabilities."""
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
    # A class of almost no weight: no threshold gains anything, and the best one is arbitrary.
    if gain <= MARGIN and np.subtract(*problem.value(observed.at(np.array([observed.cut_at(moved), half])))) <= MARGIN:
        return 0.5
    return moved


def _tuning_wins(p: Floats, y: Labels, weight: Floats, problem: Problem, decisions: Labels) -> bool:
    """Whether offsets tuned on other folds beat `decisions` by TUNING_EVIDENCE standard errors (jackknife)."""
    found = _cross_fitted(p, y, weight, partial(unguarded, problem=problem))
    if found is None:
        return False
    ahead, error = problem.lead(found[0], decisions, y, weight, found[1])
    return ahead > max(TUNING_EVIDENCE * error, MARGIN)


def _offsets(p: Floats, problem: Problem, observed: ClassCounts, passes: int = 5) -> Rule:
    """Rule argmax_j (log p_j + offset_j): coordinate ascent on the labels.

    It starts from argmax and, with constraints, also from offsets that favour rare classes.
    """
    z = np.log(np.maximum(p, FLOOR))
    prior = np.log(np.maximum(observed.actual.numpy() / observed.total, FLOOR))
    found: list[tuple[float, float, Floats]] = []
    for power in (0.0, 1.0, 0.5):
        offsets = -power * prior
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
        if not problem.constraints:
            return Rule("offsets", len(offsets), offsets=tuple(offsets - offsets.mean()))
        state = observed.count((z + offsets).argmax(axis=1))
        found.append((float(observed.shortfalls(state, problem).sum()), -observed.value(state, problem), offsets))
    offsets = min(found, key=lambda one: one[:2])[2]
    return Rule("offsets", len(offsets), offsets=tuple(offsets - offsets.mean()))
