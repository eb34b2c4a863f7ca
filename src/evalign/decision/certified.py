"""Certified constraints: exact binomial bounds and a multiplicity-controlled search (Learn-then-Test).

With probability `confidence` over the labelled rows, every constraint holds for new rows of the same distribution.

*Bounds.* Precision, recall, specificity, accuracy and the share of flagged rows are proportions of independent rows:
Clopper-Pearson bounds are exact. A mean over classes is bounded by the mean of the classes' bounds, each at a C-th of
the level (union bound); F-scores, Jaccard and the geometric mean are increasing in precisions and recalls and are
bounded through these in the same way. Micro averages of multilabel decisions sum dependent cells of a row; they are
tested by an empirical Bernstein bound over rows (Maurer and Pontil 2009). Several constraints share the level evenly
(Bonferroni).

*Search.* For two classes, recall, specificity and flagged are monotone in the threshold: the last threshold whose
bound holds is valid for all of them at once, without a correction. For other metrics of two classes about 16 ranks,
fixed in advance, are tested, from the first that can certify the precision. Of several labels, those whose constraints
are their own are handled like two classes. With other constraints and more classes, rules of increasing risk are
learned on 40 % of the rows and tested on the rest. Tests share the level: one that succeeds passes
its part on to the next (fallback procedure, Wiens 2003), so that the probability of a single wrong certificate is at
most 1 - confidence.

*Cross-fitting.* The guarantee is exact for probabilities of a model fitted on other rows. Out-of-fold probabilities
come from several models, and the final model is fitted on all rows: the guarantee is then approximate. On real tables
it was broken no more often than an exact one would be (docs/research/decisions.md).
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from scipy.special import betaincinv

from evalign import checks
from evalign.confusion import Confusion
from evalign.decision.calibration import balanced_folds
from evalign.decision.constraints import FLAGGED, Constraint
from evalign.decision.rule import Floats, Labels, Rule
from evalign.decision.search.problem import Problem
from evalign.decision.search.thresholds import ThresholdSweep, best_expected

RANKS = 16  # candidate thresholds of two classes for metrics that are not monotone
FEWEST = 10  # rows flagged by the first candidate
SEARCH_SHARE = 0.4  # share of rows for learning candidates with more classes or labels
LEVELS = (1e-4, 1e-3, 0.01, 0.05, 0.15, 0.4)  # levels at which candidates meet constraints on the search rows
PROPORTIONS = ("recall", "precision", "specificity", "accuracy", FLAGGED)
RECALL_MEANS = ("balanced_accuracy", "gmean")
F_SCORES = ("f1", "fbeta", "jaccard")
BOUNDED = (*PROPORTIONS, *RECALL_MEANS, *F_SCORES)


def binomial_bound(successes: Floats, trials: Floats, alpha: float, *, lower: bool) -> Floats:
    """Clopper-Pearson bound of a proportion at one-sided level alpha.

    >>> binomial_bound(np.array([22.0]), np.array([22.0]), 0.1, lower=True).round(3)
    array([0.901])
    """
    k, n = np.broadcast_arrays(np.asarray(successes, np.float64), np.asarray(trials, np.float64))
    with np.errstate(invalid="ignore"):
        if lower:
            return np.where(k > 0, betaincinv(np.maximum(k, 1e-9), n - k + 1, alpha), 0.0)
        return np.where(k < n, betaincinv(k + 1, np.maximum(n - k, 1e-9), 1 - alpha), 1.0)


def check_confidence(problem: Problem, weight: Floats, confidence: float) -> None:
    """Raise if constraints cannot be certified."""
    checks.check_number("confidence", confidence, low=0.0, high=1.0, open_low=True, open_high=True)
    if problem.at_most is not None:
        raise ValueError(
            f"flagged <= {problem.at_most} holds in every call of predict, and what else holds then depends on the "
            "number of rows in the call; write a share, like 'flagged <= 2%', or leave out confidence"
        )
    if not problem.constraints:
        raise ValueError("confidence requires subject_to; leave it out, or add a constraint like 'recall >= 0.9'")
    for c in problem.constraints:
        average = (
            problem.average
            if c.label is None and c.metric in ("recall", "precision", "specificity", *F_SCORES)
            else None
        )
        micro = average == "micro" and c.metric == "specificity" and not problem.multilabel
        if c.metric not in BOUNDED or average == "weighted" or micro:
            raise ValueError(
                f"{c} has no exact bound; certify {', '.join(BOUNDED)} (binary, macro, micro or of one class), "
                "or leave confidence out"
            )
    unit_weights(weight)


def unit_weights(weight: Floats) -> Floats:
    """Ones in place of equal weights; certificates count rows, so others are refused.

    >>> unit_weights(np.array([2.0, 2.0]))
    array([1., 1.])
    """
    if (weight != weight[0]).any():
        raise ValueError("certified constraints need rows of equal weight; leave out weights or confidence")
    return np.ones(len(weight))


class CertifiedProblem(Problem):
    """A problem whose constraints hold for bounds at a level instead of for the observed values."""

    level: float = 0.1

    @classmethod
    def at(cls, problem: Problem, level: float) -> "CertifiedProblem":
        found = cls(
            problem.source, problem.constraints, average=problem.average, beta=problem.beta, classes=problem.classes,
            multilabel=problem.multilabel,
        )  # fmt: skip
        found.level = level
        return found

    def batch_size(self, width: int, budget: int = 2**12) -> int:
        """Fewer confusions at once: a bound costs far more than a metric."""
        return super().batch_size(width, min(budget, 2**12))

    def shortfalls(self, c: Confusion) -> Floats:
        return self.missing(self.bounds(c))

    def bounds(self, c: Confusion) -> Floats:
        """Bound of each constraint for a batch of confusions of observed labels, (constraints, K)."""
        alpha = self.level / len(self.constraints)
        return np.stack([self._bound(r, c, alpha) for r in self.constraints])

    def _bound(self, r: Constraint, c: Confusion, alpha: float) -> Floats:
        tp, actual, predicted, total = (x.double().numpy() for x in (c.tp, c.actual, c.predicted, c.total))
        rows = total if c.multilabel else total[..., None]
        lower = r.op == ">="
        name, label = str(r.metric), r.label
        if name == FLAGGED and c.multilabel and label is None:
            return binomial_bound(predicted.mean(-1), rows[..., 0], alpha / 2, lower=lower)  # search only
        if label is None and name not in ("accuracy", *RECALL_MEANS) and (name == FLAGGED or self.average == "binary"):
            label = 1
        if name == "accuracy" or (self.average == "micro" and label is None and name not in RECALL_MEANS):
            if c.multilabel:  # cells are pooled for the search only; `certify_decisions` bounds them over rows
                top, bottom = _cells(name, tp, actual, predicted, rows * np.ones_like(tp), self.beta)
                trials = np.maximum(bottom.sum(-1), top.sum(-1))
                slack = 7 * self.classes * np.log(2 / alpha) / (3 * np.maximum(trials, 1.0))
                pooled = binomial_bound(top.sum(-1), trials, alpha, lower=lower)
                return np.asarray(np.clip(pooled - slack if lower else pooled + slack, 0.0, 1.0))
            bound = binomial_bound(tp.sum(-1), total, alpha, lower=lower)  # single-label: the accuracy
            return np.asarray(bound / (2 - bound) if name == "jaccard" else bound)
        classes = [label] if label is not None else list(range(self.classes))
        alpha = alpha / len(classes)

        def proportion(kind: str, alpha: float) -> Floats:
            if kind == "recall":
                return binomial_bound(tp[..., classes], actual[..., classes], alpha, lower=lower)
            if kind == "precision":
                return binomial_bound(tp[..., classes], predicted[..., classes], alpha, lower=lower)
            if kind == FLAGGED:
                return binomial_bound(predicted[..., classes], rows * np.ones(len(classes)), alpha, lower=lower)
            negative = (rows - actual)[..., classes]
            return binomial_bound(negative - (predicted - tp)[..., classes], negative, alpha, lower=lower)

        if name in ("recall", "precision", "specificity", FLAGGED):
            return np.asarray(proportion(name, alpha).mean(-1))
        if name in RECALL_MEANS:
            if c.multilabel:  # mean over labels of the two recalls
                both = [proportion("recall", alpha / 2), proportion("specificity", alpha / 2)]
                of_label = (both[0] + both[1]) / 2 if name != "gmean" else np.sqrt(both[0] * both[1])
                return np.asarray(of_label.mean(-1))
            recalls = proportion("recall", alpha)
            return np.asarray(recalls.mean(-1) if name != "gmean" else np.exp(np.log(recalls + 1e-300).mean(-1)))
        b2 = np.broadcast_to(np.asarray(1.0 if self.beta is None or name != "fbeta" else self.beta, float) ** 2,
                             self.classes)[classes]  # fmt: skip
        precision, recall = proportion("precision", alpha / 2), proportion("recall", alpha / 2)
        f = (1 + b2) * precision * recall / np.maximum(b2 * precision + recall, 1e-300)
        return np.asarray((f / (2 - f) if name == "jaccard" else f).mean(-1))


class Certificate(NamedTuple):
    """Bounds of a rule's constraints at its level, and whether all of them hold."""

    holds: bool
    bounds: Floats


def certify_counts(problem: Problem, c: Confusion, level: float) -> Certificate:
    """Certificate of fixed decisions from their confusion on labelled rows."""
    batch = Confusion(c.tp[None], c.actual[None], c.predicted[None], c.total[None], multilabel=c.multilabel)
    bounds = CertifiedProblem.at(problem, level).bounds(batch)[:, 0]
    return Certificate(not problem.missing(bounds).any(), bounds)


def certify_decisions(problem: Problem, decisions: Labels, y: Labels, level: float) -> Certificate:
    """Certificate of fixed decisions on labelled rows."""
    bounds = certify_counts(problem, problem.observed(decisions, y, np.ones(len(y))), level).bounds
    for i, r in enumerate(problem.constraints):
        micro = problem.average == "micro" and r.metric not in RECALL_MEANS
        if problem.multilabel and r.label is None and (micro or r.metric in (FLAGGED, "accuracy")):
            bounds[i] = _pooled_bound(r, decisions, y, level / len(problem.constraints), problem.beta)
    return Certificate(not problem.missing(bounds).any(), bounds)


def _cells(name: str, tp: Floats, y: Floats, d: Floats, one: Floats, beta: Any) -> tuple[Floats, Floats]:
    """Numerator and denominator of a pooled metric, from true positives, labels, decisions and ones."""
    b2 = np.asarray(1.0 if beta is None or name != "fbeta" else beta, dtype=np.float64) ** 2
    parts = {
        "recall": (tp, y),
        "precision": (tp, d),
        "specificity": (one - y - d + tp, one - y),
        "accuracy": (one - y - d + 2 * tp, one),
        FLAGGED: (d, one),
        "jaccard": (tp, d + y - tp),
    }
    return parts.get(name, ((1 + b2) * tp, b2 * y + d))


def _pooled_bound(r: Constraint, d: Labels, y: Labels, alpha: float, beta: Any) -> float:
    """Bound of sum top / sum bottom over all cells: empirical Bernstein of sum_l (top - v bottom) over rows."""
    top, bottom = _cells(str(r.metric), (d * y).astype(float), y.astype(float), d.astype(float), np.ones(y.shape), beta)
    a, b, n = top.sum(1), bottom.sum(1), len(y)
    width = y.shape[1] * (1.0 + (float(np.max(np.asarray(beta or 1.0))) ** 2 if r.metric in F_SCORES[:2] else 0.0))
    log, sign = np.log(2 / alpha), 1.0 if r.op == ">=" else -1.0
    v = np.linspace(0.0, 1.0, 1001)
    cov = np.cov(a, b)
    spread = np.sqrt(2 * np.maximum(cov[0, 0] - 2 * v * cov[0, 1] + v**2 * cov[1, 1], 0.0) * log / n)
    held = v[sign * (a.mean() - v * b.mean()) - spread - 7 * width * log / (3 * (n - 1)) >= 0]
    if r.op == ">=":
        return float(held.max(initial=0.0))
    return float(held.min(initial=1.0))


def certified_rule(q: Floats, y: Labels, problem: Problem, confidence: float) -> Rule:
    """Rule of the best expected metric on calibrated q among those whose constraints are certified on y."""
    alpha, ones = 1 - confidence, np.ones(len(y))
    check_confidence(problem, ones, confidence)
    learn, limits = _candidates, problem.constraints
    if all(is_monotone(r, problem) or (r.metric == "precision" and of_class(r, problem)) for r in limits):
        if problem.classes == 2 and not problem.multilabel:
            learn = _two_classes
        elif problem.multilabel and isinstance(problem.source, str) and all(r.label is not None for r in limits):
            learn = _label_by_label
    rule, certificate = learn(q, y, problem, alpha)
    return with_certificate(rule, certificate, problem, problem.observed(rule.decide(q), y, ones), confidence)


def with_certificate(rule: Rule, certificate: Certificate, problem: Problem, c: Confusion, confidence: float) -> Rule:
    """The rule with its certificate, and its values in the counts `c`; warns if a constraint is not certified."""
    if not certificate.holds:
        problem.warn_infeasible(certificate.bounds.tolist(), confidence)
    return replace(
        rule,
        metric=problem.name,
        value=problem.metric_value(c),
        subject_to=tuple(map(str, problem.constraints)),
        reached=tuple(problem.constraint_values(c)),
        bounds=tuple(certificate.bounds),
        confidence=confidence,
        feasible=certificate.holds,
    )


def of_class(r: Constraint, problem: Problem) -> bool:
    """Whether a constraint is about one class."""
    return r.label is not None or problem.average == "binary"


def is_monotone(r: Constraint, problem: Problem) -> bool:
    """Whether a constraint of two classes changes in one direction with the threshold."""
    return r.metric == FLAGGED or (r.metric in ("recall", "specificity") and of_class(r, problem))


def _two_classes(q: Floats, y: Labels, problem: Problem, alpha: float) -> tuple[Rule, Certificate]:
    """The last threshold whose monotone bounds hold; with other constraints, the best of some ranks."""
    ones = np.ones(len(y))
    expected = ThresholdSweep(q[:, 1], q[:, 1], ones, expected=True)
    observed = ThresholdSweep(q[:, 1], y.astype(np.float64), ones, expected=False)

    def best_of_cuts(cuts: Labels, levels: Floats) -> tuple[Rule, Certificate]:
        thresholds = [expected.threshold(int(k)) for k in cuts]
        rules = [Rule("threshold", 2, threshold=t) for t in thresholds]
        certificates = in_turn(
            (partial(certify_decisions, problem, (q[:, 1] >= t).astype(np.int64), y) for t in thresholds), levels
        )
        return best_certified(rules, certificates, problem, problem.value(expected.at(cuts)))

    def best_of_ranks(first: int, *, falling: bool) -> tuple[Rule, Certificate]:
        # Given the next lower score, the m rows above it are an independent sample of all rows above it, so that a
        # rank chosen in advance keeps the binomial law exact although its threshold is read from the data.
        ranks = np.unique(np.geomspace(min(first, len(y)), len(y), RANKS).astype(int))
        cuts = np.unique(np.searchsorted(observed.sizes, ranks, side="right") - 1)
        cuts = cuts[cuts > 0]
        return best_of_cuts(
            cuts, falling_levels(len(cuts), alpha) if falling else np.full(len(cuts), alpha / len(cuts))
        )

    if all(is_monotone(r, problem) for r in problem.constraints):
        return best_of_cuts(np.array([expected.best(CertifiedProblem.at(problem, alpha), observed)]), np.array([alpha]))
    floors = [r.value for r in problem.constraints if r.metric == "precision" and r.op == ">=" and r.label != 0]
    # Precision alone falls with the rank: the first test gets half of the level.
    found = best_of_ranks(_first_rank(max(floors, default=0.0), alpha / len(problem.constraints)),
                          falling=len(floors) == len(problem.constraints))  # fmt: skip
    nearest = found if found[1].holds else best_of_ranks(FEWEST, falling=False)
    return found if nearest[1].holds else nearest


def _label_by_label(q: Floats, y: Labels, problem: Problem, alpha: float) -> tuple[Rule, Certificate]:
    """Labels with constraints of their own decided like two classes, the others as without constraints."""
    free = Problem(problem.source, average=problem.average, beta=problem.beta, classes=problem.classes, multilabel=True)
    thresholds = list(best_expected(q, free, np.ones(len(y)), None).thresholds or ())
    betas = np.broadcast_to(np.asarray(1.0 if problem.beta is None else problem.beta, float), problem.classes)
    bounds = np.zeros(len(problem.constraints))
    for label in {r.label for r in problem.constraints}:
        own = [i for i, r in enumerate(problem.constraints) if r.label == label]
        single = Problem(
            problem.source, [replace(problem.constraints[i], label=1) for i in own], average="binary",
            beta=None if problem.beta is None else float(betas[label]), classes=2, multilabel=False,
        )  # fmt: skip
        both = np.stack([1 - q[:, label], q[:, label]], axis=1)
        rule, certificate = _two_classes(both, y[:, label], single, alpha * len(own) / len(bounds))
        thresholds[label], bounds[own] = float(rule.threshold or 0.0), certificate.bounds
    rule = Rule("thresholds", problem.classes, thresholds=tuple(thresholds))
    return rule, Certificate(not problem.missing(bounds).any(), bounds)


def _first_rank(precision: float, alpha: float) -> int:
    """Number of flagged rows below which a precision cannot be certified even if all of them are positive."""
    needed = np.log(alpha / RANKS) / np.log(np.clip(precision, 1e-9, 0.999))
    return max(FEWEST, int(np.ceil(needed)))


def falling_levels(tests: int, alpha: float) -> Floats:
    """Levels of several tests: half of alpha for the first; the others share the rest."""
    levels = np.full(tests, alpha / 2 / max(tests - 1, 1))
    levels[0] = alpha / 2 if tests > 1 else alpha
    return levels


def best_certified(
    rules: list[Rule], certificates: list[Certificate], problem: Problem, values: Floats
) -> tuple[Rule, Certificate]:
    """The certified rule with the best value; if there is none, the rule with the least shortfall."""
    shortfall = np.array([0.0 if c.holds else problem.missing(c.bounds).sum() for c in certificates])
    best = int(np.lexsort((-values, shortfall))[0])
    return rules[best], certificates[best]


def _candidates(q: Floats, y: Labels, problem: Problem, alpha: float) -> tuple[Rule, Certificate]:
    """Learn rules of increasing risk on some rows, test them in this order on the others."""
    part = balanced_folds(q, y, 10) < round(10 * SEARCH_SHARE)
    if part.all() or not part.any():
        raise ValueError(f"certified constraints need at least 10 labelled rows, got {len(y)}")
    rules = candidate_rules(q[part], y[part], problem)
    certificates = certify_in_turn(rules, q[~part], y[~part], problem, alpha)
    ones = np.ones(len(y))
    values = np.array([problem.metric_value(problem.observed(r.decide(q), y, ones)) or 0.0 for r in rules])
    return best_certified(rules, certificates, problem, values)


def candidate_rules(q: Floats, y: Labels, problem: Problem) -> list[Rule]:
    """Rules of increasing risk: the best whose constraints hold for bounds at each of `LEVELS` on these rows."""
    ones = np.ones(len(y))
    rules = [best_expected(q, CertifiedProblem.at(problem, level), ones, y) for level in LEVELS]
    return [rule for k, rule in enumerate(rules) if rule not in rules[:k]]


def certify_in_turn(rules: list[Rule], q: Floats, y: Labels, problem: Problem, alpha: float) -> list[Certificate]:
    """Certificates on rows that the rules were not learned from; the probability of one that is wrong is below alpha.

    The first rule is tested at half of alpha, the others share the rest; a certified rule passes its level on.
    """
    tests = (partial(certify_decisions, problem, rule.decide(q), y) for rule in rules)
    return in_turn(tests, falling_levels(len(rules), alpha))


def in_turn(tests: Iterable[Callable[[float], Certificate]], levels: Floats) -> list[Certificate]:
    """Certificates of tests, each a function of its level, where a test that holds passes its level on."""
    carried, certificates = 0.0, []
    for test, level in zip(tests, levels, strict=True):
        certificates.append(test(carried + level))
        carried = carried + level if certificates[-1].holds else 0.0
    return certificates
