"""Report of a decision: bootstrap intervals of its threshold, metric and constraints, as text and HTML."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from html import escape
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import expit

from evalign.confusion import Confusion, Task
from evalign.decision.costs import COST
from evalign.decision.learned import calibrated
from evalign.decision.rule import BLOCK, Floats, Labels, Rule, as_labels, as_probabilities, logit
from evalign.decision.search.problem import Problem
from evalign.decision.search.thresholds import ThresholdSweep
from evalign.metrics import Average, Beta, MetricFunction

RESAMPLES = 300
RELEARNED = 30  # resamples on which the rule is learned again, for the interval of its threshold
GRID = 81  # thresholds of the curve
Learner = Callable[[Floats, Labels], Rule]


@dataclass(frozen=True)
class Estimate:
    """A value with its 95 % interval, for resampled rows."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, value: float, draws: Floats) -> "Estimate":
        """Percentile interval of the draws."""
        finite = draws[np.isfinite(draws)]
        low, high = np.quantile(finite, [0.025, 0.975]) if len(finite) else (np.nan, np.nan)
        return cls(float(value), float(low), float(high))

    def __str__(self) -> str:
        return f"{self.value:.3f} (95 % interval {self.low:.3f} to {self.high:.3f})"


@dataclass(frozen=True)
class RuleReport:
    """Report of a rule on labelled rows; `str` is text, `html` a self-contained page.

    `gain` is the lead over `argmax`, the largest probability (multilabel: all labels with 1/2 or more), also for
    "cost", where lower is better. `coverage` is the share of rows that a rule with `reject` decides. The interval of
    `threshold` is that of rules learned from resampled rows. `curve` has columns threshold, value, low and high for two
    classes: the metric of every threshold on the uncalibrated probability of class 1, with its 95 % band. `positive`
    is what the text calls that class.
    """

    rule: Rule
    rows: int
    metric: str
    value: Estimate
    argmax: Estimate
    gain: Estimate
    constraints: dict[str, tuple[Estimate, float]] = field(default_factory=dict)
    threshold: Estimate | None = None
    coverage: Estimate | None = None
    curve: Floats | None = None
    positive: str = "class 1"

    def __str__(self) -> str:
        lines = [
            f"Decision for {self.metric}, on {self.rows} rows",
            f"  {self.metric}: {self.value}",
            f"  {'probability of 1/2 or more' if self.rule.multilabel else 'largest probability'}: {self.argmax}",
            f"  gain: {self.gain.value:+.3f} (95 % interval {self.gain.low:+.3f} to {self.gain.high:+.3f})",
        ]
        if self.threshold is not None:
            t = self.threshold
            spread = f"learned from resamples of these rows: {t.low:.3f} to {t.high:.3f}"
            lines.insert(1, f"  threshold on the probability of {self.positive}: {t.value:.3f} ({spread})")
        if self.coverage is not None:
            lines.insert(1, f"  share of rows decided: {self.coverage}")
        for text, (estimate, missed) in self.constraints.items():
            lines.append(f"  {text}: {estimate}; missed in {missed:.0%} of resamples")
        if not self.rule.feasible:
            lines.append("  The constraints could not all be met.")
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """Dictionary of plain JSON types."""
        estimates = {name: getattr(self, name) for name in ("value", "argmax", "gain", "threshold", "coverage")}
        return {
            "rule": self.rule.to_json(),
            "rows": self.rows,
            "metric": self.metric,
            **{name: e.__dict__ for name, e in estimates.items() if e is not None},
            "constraints": {k: {**e.__dict__, "missed": missed} for k, (e, missed) in self.constraints.items()},
            "curve": None if self.curve is None else self.curve.tolist(),
        }

    def html(self) -> str:
        """Page with the text and, for two classes, a plot of the metric against the threshold."""
        picture = "" if self.curve is None else self.svg()
        return (
            f'<!doctype html><html lang="en"><meta charset="utf-8"><title>Decision for {escape(self.metric)}</title>'
            "<style>body{font:15px/1.5 system-ui,sans-serif;max-width:44em;margin:2em auto;padding:0 1em;color:#222;"
            "background:#fff}pre{white-space:pre-wrap;font:inherit}svg{width:100%;height:auto}"
            "@media(prefers-color-scheme:dark){body{color:#ddd;background:#161616}}</style>"
            f"<h1>Decision for {escape(self.metric)}</h1><pre>{escape(str(self))}</pre>{picture}</html>"
        )

    def svg(self) -> str:
        """Metric against threshold with its band, as an SVG element; two classes only."""
        if self.curve is None:
            raise ValueError("only a rule for two classes has a threshold to plot")
        threshold, value, low, high = self.curve.T
        bottom, top = max(-1.0, float(low.min())), min(1.0, float(high.max()))
        span = max(top - bottom, 1e-9)

        def points(x: Floats, y: Floats) -> str:
            return " ".join(
                f"{50 + 530 * a:.1f},{250 - 230 * (b - bottom) / span:.1f}" for a, b in zip(x, y, strict=True)
            )

        band = points(np.append(threshold, threshold[::-1]), np.append(low, high[::-1]))
        chosen = "" if self.threshold is None else _marks(self.threshold)
        ticks = "".join(
            f'<text x="{50 + 530 * t:.0f}" y="268" text-anchor="middle">{t:g}</text>' for t in (0, 0.25, 0.5, 0.75, 1)
        ) + "".join(
            f'<text x="44" y="{254 - 230 * k / 4:.0f}" text-anchor="end">{bottom + span * k / 4:.2f}</text>'
            for k in range(5)
        )
        return (
            f'<svg viewBox="0 0 600 300" role="img" font-size="11" fill="currentColor" '
            f'aria-label="{escape(self.metric, quote=True)} against the threshold">'
            f'<polygon points="{band}" fill="#4477aa" opacity="0.25"/>'
            f'<polyline points="{points(threshold, value)}" fill="none" stroke="#4477aa" stroke-width="2"/>'
            f"{chosen}{ticks}"
            f'<text x="315" y="290" text-anchor="middle">threshold (chosen: dashed, with its interval); '
            f"{escape(self.metric)} with its 95 % band</text></svg>"
        )


def _marks(threshold: Estimate) -> str:
    at, low, high = (50 + 530 * min(max(x, 0.0), 1.0) for x in (threshold.value, threshold.low, threshold.high))
    return (
        f'<rect x="{low:.1f}" y="20" width="{max(high - low, 1):.1f}" height="230" opacity="0.08"/>'
        f'<line x1="{at:.1f}" x2="{at:.1f}" y1="20" y2="250" stroke="currentColor" stroke-dasharray="4 3"/>'
    )


def evaluate_rule(
    rule: Rule, probabilities: Any, target: Any, metric: str | MetricFunction | None = None, *,
    average: Average | None = None, beta: Beta | None = None, subject_to: Any = None, learn: Learner | None = None,
    costs: Any = None, random_state: int = 0,
) -> RuleReport:  # fmt: skip
    """Estimate threshold, metric and constraints of a rule on labelled rows, with 95 % intervals by the bootstrap.

    Use rows that the rule was not learned from. `metric` and `subject_to` default to the rule's own. The interval of
    the threshold is that of rules learned from resampled rows by `learn` (probabilities, labels -> rule), by default
    `calibrated` with the same metric and constraints. `costs` (n, C, C) are those of the rows, for kind "row_costs".

    >>> rng = np.random.default_rng(0)
    >>> y = (rng.random(400) < 0.2).astype(int)
    >>> p = expit(rng.normal(2.0 * y - 2.0, 1.0))
    >>> worth = evaluate_rule(calibrated(p, y, "f1"), p, y)
    >>> worth.value.low < worth.value.value < worth.value.high
    True
    >>> print(str(worth).splitlines()[0])
    Decision for f1, on 400 rows
    """
    metric = rule.metric if metric is None else metric
    if metric is None:
        raise ValueError("the rule does not record the metric it was learned for; pass metric=")
    task: Task = "multilabel" if rule.multilabel else "multiclass"
    p = as_probabilities(probabilities, task)
    rule.check_columns(p)
    y = as_labels(target, p, task)
    if not len(y):
        raise ValueError("a report needs at least one labelled row, got none")
    if rule.kind == "row_costs":
        return _paid(rule, p, y, costs, np.random.default_rng(random_state))
    limits = list(rule.subject_to) if subject_to is None else subject_to
    problem = Problem.of(metric, p, task, average, beta, limits or None)
    random = np.random.default_rng(random_state)
    decided, decided_share = rule.decide(p), np.ones(RESAMPLES + 1)
    if rule.multilabel:
        (ours, limit_values), (theirs, _) = _label_scores(problem, y, [decided, p >= 0.5], random)
    else:
        # A score sees only the label and the two decisions of a row: resampling rows is resampling these patterns.
        patterns, counts = np.unique(np.stack([y, decided, p.argmax(axis=1)]), axis=1, return_counts=True)
        draws = np.vstack([counts, random.multinomial(len(y), counts / len(y), size=RESAMPLES)]).astype(np.float64)
        ours, limit_values = _scores(problem, patterns[0], patterns[1], draws)
        theirs, _ = _scores(problem, patterns[0], patterns[2], draws)
        decided_share = draws @ (patterns[1] >= 0) / len(y)
    costs = problem.name == COST  # their mean is maximised as minus the cost
    if costs and rule.reject is not None:  # a rejected row has a cost, too
        ours = np.where(decided_share > 0, decided_share * ours, 0.0) + (1 - decided_share) * rule.reject
    missed = (problem.missing(limit_values[1:].T) > 0).mean(axis=1)
    constraints = {
        constraint.describe(): (Estimate.of(values[0], values[1:]), float(share))
        for constraint, values, share in zip(problem.constraints, limit_values.T, missed, strict=True)
    }
    threshold, curve = None, None
    if p.shape[1] == 2 and rule.kind == "threshold":
        again = partial(
            calibrated, metric=metric, average=average, beta=beta, subject_to=limits or None, confidence=rule.confidence
        )
        threshold = _threshold(rule, p, y, learn or again, random)
        curve = _curve(problem, p, y, random)
    gain, sign = ours - theirs, -1 if costs else 1
    value, argmax = (Estimate.of(sign * scores[0], sign * scores[1:]) for scores in (ours, theirs))
    coverage = None if rule.reject is None else Estimate.of(decided_share[0], decided_share[1:])
    return RuleReport(
        rule, len(y), problem.name, value, argmax, Estimate.of(gain[0], gain[1:]), constraints, threshold, coverage,
        curve,
    )  # fmt: skip


def _paid(rule: Rule, p: Floats, y: Labels, costs: Any, random: np.random.Generator) -> RuleReport:
    """Report of a rule with row costs: mean costs of its decisions and of argmax."""
    n, decided = len(y), rule.predict(p, costs=costs)
    own = np.asarray(costs, dtype=np.float64)[np.arange(n), y]  # cost of each decision, given the true class
    ours, theirs = (np.take_along_axis(own, d[:, None], axis=1)[:, 0] for d in (decided, p.argmax(axis=1)))
    if rule.reject is not None:
        ours = np.where(decided >= 0, ours, -rule.reject)
    columns = np.stack([ours, theirs, theirs - ours, decided >= 0], axis=1)
    draws = [np.bincount(random.integers(n, size=n), minlength=n) @ columns / n for _ in range(RESAMPLES)]
    value, argmax, gain, share = map(Estimate.of, columns.mean(axis=0), np.array(draws).T)
    coverage = None if rule.reject is None else share
    return RuleReport(rule, n, rule.metric or COST, value, argmax, gain, coverage=coverage)


def raw_threshold(rule: Rule) -> float:
    """Smallest uncalibrated probability of class 1 that a threshold rule labels positive.

    >>> round(raw_threshold(Rule("threshold", 2, threshold=0.5, offsets=(0.0, 1.0))), 3)
    0.269
    """
    if rule.threshold is None:
        raise ValueError(f"a rule of kind {rule.kind!r} has no threshold")
    if not 0 < rule.threshold < 1 or (rule.temperature == 1.0 and rule.offsets is None):
        return rule.threshold
    offset = 0.0 if rule.offsets is None else rule.offsets[1] - rule.offsets[0]
    return float(expit(float(np.asarray(rule.temperature)) * (float(logit(np.array(rule.threshold))) - offset)))


def _scores(problem: Problem, y: Labels, decided: Labels, draws: Floats) -> tuple[Floats, Floats]:
    """Metric (B,) and constrained scores (B, R) of resampled patterns; rejected rows do not count."""
    size, kept = problem.classes, decided >= 0
    cell = (y * size + decided)[kept]
    order = np.argsort(cell, kind="stable")
    cells, first = np.unique(cell[order], return_index=True)
    values, limits = [], []
    for part in np.array_split(draws, -(-len(draws) * size * size // BLOCK)):
        flat = np.zeros((len(part), size * size))
        flat[:, cells] = np.add.reduceat(part[:, kept][:, order], first, axis=1)
        matrix = torch.from_numpy(flat.reshape(-1, size, size))
        value, limit = _evaluated(problem, Confusion.of_matrix(matrix))
        values.append(value)
        limits.append(limit)
    return np.concatenate(values), np.concatenate(limits)


def _label_scores(
    problem: Problem, y: Labels, decisions: Sequence[NDArray[Any]], random: np.random.Generator
) -> list[tuple[Floats, Floats]]:
    """Metric (B,) and constrained scores (B, R) of resampled rows with labels y (n, L), for each array of decisions."""
    n, labels = y.shape
    columns = np.hstack([y, *(part for d in decisions for part in (d, d * y))]).astype(np.float64)
    draws = [np.bincount(random.integers(n, size=n), minlength=n) @ columns for _ in range(RESAMPLES)]
    sums = np.stack([columns.sum(axis=0), *draws]).reshape(1 + RESAMPLES, -1, labels)
    actual, *counts = torch.from_numpy(sums).unbind(1)
    total = torch.full_like(actual, n)
    return [
        _evaluated(problem, Confusion(tp, actual, predicted, total, multilabel=True))
        for predicted, tp in zip(counts[::2], counts[1::2], strict=True)
    ]


def _evaluated(problem: Problem, c: Confusion) -> tuple[Floats, Floats]:
    """Metric (B,) and constrained scores (B, R) of a batch of B confusions."""
    with torch.no_grad():
        limits = [limit(c).double().numpy() for limit in problem.limits]
        return problem.metric(c).double().numpy(), np.array(limits).reshape(-1, len(c.tp)).T


def _threshold(rule: Rule, p: Floats, y: Labels, learn: Learner, random: np.random.Generator) -> Estimate:
    found = []
    for _ in range(RELEARNED):
        rows = random.integers(len(y), size=len(y))
        if len(np.unique(y[rows])) == 2:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # constraints that a resample cannot meet
                again = learn(p[rows], y[rows])
            found.append(raw_threshold(again) if again.threshold is not None else 0.5)
    return Estimate.of(raw_threshold(rule), np.array(found))


def _curve(problem: Problem, p: Floats, y: Labels, random: np.random.Generator) -> Floats:
    sweep = ThresholdSweep(p[:, 1], y.astype(np.float64), np.ones(len(y)), expected=False)
    grid = np.linspace(0.0, 1.0, GRID)
    cuts = np.array([sweep.cut_at(t) for t in grid])
    values = problem.value(sweep.at(cuts))
    draws = []
    for _ in range(RESAMPLES // 5):
        times = np.bincount(random.integers(len(y), size=len(y)), minlength=len(y)).astype(np.float64)
        draws.append(problem.value(sweep.at(cuts, sweep.counts(times))))
    low, high = np.quantile(np.array(draws), [0.025, 0.975], axis=0)
    return np.stack([grid, values, low, high], axis=1)


Rule.reporter = staticmethod(evaluate_rule)  # for `Rule.report`, which cannot import this module
