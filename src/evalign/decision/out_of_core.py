"""Rules from more rows than fit in memory: batches, Parquet files or a Ray dataset, read in passes.

Every pass adds up counts, so that batches and workers may come in any order. Two classes need one pass: rows of equal
probability and label are one row of their total weight. More classes need one pass for each round of Frank-Wolfe.
"""

import pickle
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from evalign import checks
from evalign.confusion import Confusion
from evalign.decision.calibration import SAMPLE, Calibration, fit_calibration
from evalign.decision.certified import (
    best_certified,
    candidate_rules,
    certify_counts,
    check_confidence,
    falling_levels,
    in_turn,
    with_certificate,
)
from evalign.decision.constraints import class_index, parse_constraints
from evalign.decision.learned import DECISIONS, learn_rule, with_calibration
from evalign.decision.rule import Floats, Labels, Rule, as_labels, as_probabilities, as_weights, decide_blocks
from evalign.decision.search.counts import ClassCounts, State
from evalign.decision.search.frank_wolfe import FIRST, Gain, ascend, identity, run_together
from evalign.decision.search.problem import Problem, present_classes
from evalign.metrics import Average, Beta, MetricFunction

DISTINCT = 2**20  # distinct probabilities kept for two classes
PREFIX = "probability_"  # prefix of the columns of a file
CHUNK = 2**16  # rows of a Parquet file read at a time
CORRECTIONS = 8  # rounds of tightening constraints that a rule of a sample misses on all rows
PIECE = 2**18  # probabilities counted at a time
Batch = tuple[Floats, Labels | None, Floats]
Sums = tuple[NDArray[Any], ...]


class ProbabilityBatches:
    """Probabilities, labels and weights that can be read repeatedly; `total` sums a function over the batches.

    source: a callable that returns an iterable of batches, or a list of batches: p, (p, labels) or (p, labels,
        weights); a Parquet file or folder; a Ray dataset. Files and datasets have columns `probability_CLASS`, as
        `evalign predict` writes them, and columns of labels and weights by these names.
    """

    def __init__(self, source: Any, target: str | None = None, sample_weight: str | None = None) -> None:
        self.source, self.target, self.sample_weight = source, target, sample_weight
        if isinstance(source, Iterator):
            raise TypeError("batches are read several times, got an iterator; pass a function that returns one")

    @property
    def is_ray(self) -> bool:
        return hasattr(self.source, "map_batches")

    @property
    def class_names(self) -> list[str] | None:
        """Classes in the names of the columns; None for batches in memory."""
        if self.is_ray:
            columns = self.source.columns()
        elif isinstance(self.source, (str, Path)):
            columns = self._files().schema.names
        else:
            return None
        return [name.removeprefix(PREFIX) for name in columns if name.startswith(PREFIX)]

    def _files(self) -> Any:
        import pyarrow.dataset as ds

        return ds.dataset(str(self.source), format="parquet")

    def __iter__(self) -> Iterator[Batch]:
        if isinstance(self.source, (str, Path)):
            for part in self._files().to_batches(batch_size=CHUNK):
                if len(part):
                    yield self.of_columns({n: part.column(n).to_numpy(zero_copy_only=False) for n in part.schema.names})
            return
        batches: Iterable[Any] = self.source() if callable(self.source) else self.source
        for batch in batches:
            parts = batch if isinstance(batch, tuple) else (batch,)
            columns = parts[0].shape[1] if np.ndim(parts[0]) == 2 else 2
            step = max(1, PIECE // max(columns, 1))
            for i in range(0, len(parts[0]), step):  # pieces that fit in the cache
                own = [None if part is None else part[i : i + step] for part in (*parts, None, None)[:3]]
                p = as_probabilities(own[0])
                yield (
                    p,
                    None if own[1] is None else as_labels(own[1], p, "multiclass"),
                    as_weights(own[2], p, part=True),
                )

    def of_columns(self, columns: dict[str, Any]) -> Batch:
        """Batch of the columns of a file."""
        names = [name for name in columns if name.startswith(PREFIX)]
        if len(names) < 2:
            raise ValueError(f"columns probability_CLASS of at least two classes are needed, got {', '.join(columns)}")
        p = as_probabilities(np.stack([np.asarray(columns[name], dtype=np.float64) for name in names], axis=1))
        labels = None
        if self.target is not None:
            if self.target not in columns:
                raise ValueError(f"there is no column {self.target!r} of labels, only {', '.join(columns)}")
            classes = [name.removeprefix(PREFIX) for name in names]
            found, inverse = np.unique(np.asarray(columns[self.target]).astype(str), return_inverse=True)
            codes = [class_index(label, classes, f"label in column {self.target!r}") for label in found.tolist()]
            labels = np.array(codes, dtype=np.int64)[inverse]
        if self.sample_weight is not None and self.sample_weight not in columns:
            raise ValueError(f"there is no column {self.sample_weight!r} of weights, only {', '.join(columns)}")
        weight = None if self.sample_weight is None else columns[self.sample_weight]
        return p, labels, as_weights(weight, p, part=True)

    def map(self, function: Callable[[Batch], Sums]) -> Iterator[Sums]:
        """Apply `function` to every batch, with Ray on the workers."""
        if not self.is_ray:
            yield from map(function, self)
            return
        reader = partial(_on_worker, function, self.target, self.sample_weight)
        for row in self.source.map_batches(reader, batch_format="numpy").iter_rows():
            yield pickle.loads(row["sums"])  # from our own workers

    def total(self, function: Callable[[Batch], Sums]) -> Sums:
        """Sums over all batches of the arrays that `function` returns."""
        sums: Sums | None = None
        for parts in self.map(function):
            sums = parts if sums is None else tuple(a + b for a, b in zip(sums, parts, strict=True))
        if sums is None:
            raise ValueError("learning a rule needs at least one row of probabilities, got none")
        return sums


def _on_worker(
    function: Callable[[Batch], Sums], target: str | None, weight: str | None, columns: dict[str, Any]
) -> dict[str, Any]:
    batch = ProbabilityBatches(None, target, weight).of_columns(columns)
    return {"sums": np.array([pickle.dumps(function(batch))], dtype=object)}


def learn_from_batches(
    source: Any, metric: str | MetricFunction, *, decision: str = "auto", target: str | None = None,
    sample_weight: str | None = None, average: Average | None = None, beta: Beta | None = None,
    subject_to: Any = None, confidence: float | None = None, rounds: int = 40,
) -> Rule:  # fmt: skip
    """Learn a rule from rows that are read in batches; memory does not grow with the number of rows.

    `source`, `target` and `sample_weight` as in `ProbabilityBatches`; the others as in `plug_in` and `calibrated`.
    "plug_in" needs no labels. For two classes the rule is that of all rows, with probabilities rounded if more than a
    million are distinct. For more classes it is the plug-in rule as for large arrays, without moving single rows, after
    "auto" has calibrated on a sample of 8 million probabilities. With constraints and more than two classes, the rule
    is learned on this sample, and meets the constraints on all rows; a certificate rests on the rows outside of the
    sample. Certificates of two classes need about 50 bytes per row.

    >>> rng = np.random.default_rng(0)
    >>> parts = [rng.dirichlet([3.0, 1.0, 0.5], size=1000) for _ in range(3)]
    >>> rule = learn_from_batches(parts, "f1", decision="plug_in")
    >>> rule.kind, rule.columns
    ('affine', 3)
    >>> learn_from_batches([p[:, :2] / p[:, :2].sum(1, keepdims=True) for p in parts], "f1", decision="plug_in").kind
    'threshold'
    """
    checks.check_choice("decision", decision, DECISIONS)
    batches = ProbabilityBatches(source, target, sample_weight)
    known = batches.total(_shape_sums)
    classes, total, rows, labelled = len(known[0]), float(known[1]), float(known[2]), bool(known[3] == 0)
    if not total > 0:
        raise ValueError("sample_weight must not be 0 in all rows; leave out rows that do not count")
    if decision != "plug_in" and not labelled:
        raise ValueError(f"decision {decision!r} needs labels in every batch; pass them, or use decision='plug_in'")
    constraints = parse_constraints(subject_to, batches.class_names) or None
    options: dict[str, Any] = {"average": average, "beta": beta, "subject_to": constraints}
    if classes == 2:
        p, y, weight = _distinct(batches)
        if confidence is not None and np.isclose(float(known[4]) * rows, total**2, rtol=1e-12):
            # A certificate counts rows; all weigh the same.
            times = np.rint(weight * rows / total).astype(np.int64)
            p, y, weight = p.repeat(times, axis=0), y.repeat(times), np.ones(times.sum())
        labels = y if labelled else None
        return learn_rule(decision, p, labels, metric, sample_weight=weight, confidence=confidence, **options)
    if decision == "argmax" and constraints is None:
        return Rule("argmax", classes)
    step, calibration = max(1, -(-int(rows) * classes // SAMPLE)), None
    if constraints is not None or confidence is not None:
        p, labels, weight = _sample(batches, step)
        if confidence is not None and np.isclose(float(known[4]) * rows, total**2, rtol=1e-12):
            weight = np.ones(len(p))
        elif confidence is not None:
            raise ValueError("certified constraints need rows of equal weight; leave out weights or confidence")
        if step == 1:
            return learn_rule(decision, p, labels, metric, sample_weight=weight, confidence=confidence, **options)
        if confidence is None:
            return _constrained(batches, (p, labels, weight), metric, decision, options)
        return _certified(batches, (p, labels, weight), step, metric, decision, options, confidence)
    if decision != "plug_in":
        p, labels, weight = _sample(batches, step)
        assert labels is not None
        calibration = fit_calibration(p, labels, weight)
    problem = Problem.of(metric, np.zeros((1, classes)), "multiclass", average, beta, None)
    counts = BatchedCounts(batches, calibration, classes, reads_matrix=problem.reads_matrix)
    gain, value = _best_gain(counts, problem, rounds)
    rule = replace(gain.rule(), metric=problem.name, value=value)
    if calibration is None:
        return rule
    rule = replace(rule, **calibration.fields)
    c = _observed(batches, rule)
    return replace(rule, value=problem.metric_value(c), shares=tuple((c.actual / c.total).tolist()))


def _observed(batches: ProbabilityBatches, rule: Rule) -> Confusion:
    """Confusion of a rule's decisions in all rows; expected, without labels."""
    return Confusion.of_matrix(torch.from_numpy(batches.total(partial(_matrices, [rule], 1))[0][0]))


def _matrices(rules: list[Rule], step: int, batch: Batch) -> Sums:
    """Confusion matrices (rules, C, C) of every `step`-th row, and of the other rows."""
    p, y, weight = batch
    found = np.zeros((2, len(rules), p.shape[1], p.shape[1]))
    parts = np.arange(len(p)) % step > 0
    for k, part in enumerate((~parts, parts)):
        counts = ClassCounts(p[part] if y is None else y[part], weight[part], p.shape[1], reads_matrix=True)
        found[k] = [counts.count(rule.decide(p[part])) for rule in rules] if part.any() else 0.0
    return found[0], found[1]


def _constrained(
    batches: ProbabilityBatches, sample: Batch, metric: str | MetricFunction, decision: str, options: dict[str, Any]
) -> Rule:
    """Rule learned on a sample that meets the constraints on all rows: where it misses one, its limit is tightened."""
    p, y, weight = sample
    problem = Problem.of(metric, p[:1], "multiclass", *options.values())
    limits, found = list(problem.constraints), []
    for _ in range(CORRECTIONS):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # about the limits of the sample
            own = options | {"subject_to": limits}
            rule = learn_rule(decision, p, y, metric, sample_weight=weight, **own)
        c = _observed(batches, rule)
        missing = problem.missing(problem.constraint_values(c))
        found.append((float(missing.sum()), rule, c))
        if not missing.any():
            break
        signs = [1.5 if r.op == ">=" else -1.5 for r in limits]
        limits = [replace(r, value=r.value + s * m) for r, s, m in zip(limits, signs, missing, strict=True)]
    _, rule, c = min(found, key=lambda one: one[0])
    if decision != "plug_in":
        rule = replace(rule, value=problem.metric_value(c), shares=tuple((c.actual / c.total).tolist()))
    return problem.completed(rule, c)


def _certified(
    batches: ProbabilityBatches, sample: Batch, step: int, metric: str | MetricFunction, decision: str,
    options: dict[str, Any], confidence: float,
) -> Rule:  # fmt: skip
    """Candidates learned on every `step`-th row, certified on the others; see `evalign.decision.certified`."""
    p, y, _ = sample
    if decision not in ("auto", "tuned") or y is None:
        raise ValueError(f"decision {decision!r} cannot certify constraints; use 'auto' or 'tuned' and pass labels")
    problem = Problem.of(metric, p[:1], "multiclass", *options.values())
    ones = np.ones(len(p))
    check_confidence(problem, ones, confidence)
    calibration = fit_calibration(p, y, ones)
    rules = [with_calibration(rule, calibration) for rule in candidate_rules(calibration(p), y, problem)]
    known, tested = batches.total(partial(_matrices, rules, step))
    unit = len(p) / known[0].sum()  # all rows have one weight
    confusions = [Confusion.of_matrix(torch.from_numpy(m * unit)) for m in tested]
    tests = (partial(certify_counts, problem, c) for c in confusions)
    certificates = in_turn(tests, falling_levels(len(rules), 1 - confidence))
    whole = [Confusion.of_matrix(torch.from_numpy((a + b) * unit)) for a, b in zip(known, tested, strict=True)]
    values = np.array([problem.metric_value(c) or 0.0 for c in whole])
    rule, certificate = best_certified(rules, certificates, problem, values)
    c = whole[rules.index(rule)]
    rule = replace(rule, shares=tuple((c.actual / c.total).tolist()))
    return with_certificate(rule, certificate, problem, c, confidence)


def _shape_sums(batch: Batch) -> Sums:
    p, y, weight = batch
    return weight @ p, weight.sum(), np.asarray(float(len(p))), np.asarray(float(y is None)), weight @ weight


def _distinct(batches: ProbabilityBatches) -> tuple[Floats, Labels, Floats]:
    """Merge rows of two classes with equal probability and label into one row of their total weight."""

    def compressed(score: Floats, y: Labels, weight: Floats) -> Sums:
        order = np.lexsort((y, score))
        score, y, weight = score[order], y[order], weight[order]
        first = np.append(True, (score[1:] != score[:-1]) | (y[1:] != y[:-1]))
        return score[first], y[first], np.add.reduceat(weight, np.flatnonzero(first))

    def of_batch(batch: Batch) -> Sums:
        p, y, weight = batch
        return compressed(p[:, 1], np.zeros(len(p), dtype=np.int64) if y is None else y, weight)

    digits = 17
    held: list[Sums] = []

    def merge() -> None:
        nonlocal digits, held
        score, y, weight = (np.concatenate(parts) for parts in zip(*held, strict=True))
        merged = compressed(score if digits == 17 else score.round(digits), y, weight)
        while len(merged[0]) > DISTINCT:  # fewer digits, until they fit
            digits = 9 if digits == 17 else digits - 1
            merged = compressed(merged[0].round(digits), *merged[1:])
        held = [merged]

    for part in batches.map(of_batch):
        held.append(part)
        if sum(len(score) for score, _, _ in held) > 2 * DISTINCT:
            merge()
    merge()
    score, y, weight = held[0]
    return np.stack([1 - score, score], axis=1), y, weight


def _sample(batches: ProbabilityBatches, step: int) -> Batch:
    """Every `step`-th row of each batch."""

    def taken(batch: Batch) -> Sums:
        p, y, weight = batch
        labels = np.zeros(0, dtype=np.int64) if y is None else y[::step].copy()
        return p[::step].copy(), labels, weight[::step].copy()  # a view would keep the whole batch in memory

    p, y, weight = (np.concatenate(parts) for parts in zip(*batches.map(taken), strict=True))
    return p, y if len(y) == len(p) else None, weight


class BatchedCounts(ClassCounts):
    """Expected counts of the decisions of a gain matrix, each by one pass over the batches."""

    def __init__(
        self, batches: ProbabilityBatches, calibration: Calibration | None, classes: int, *, reads_matrix: bool
    ) -> None:
        self.batches, self.calibration, self.classes, self.reads_matrix = batches, calibration, classes, reads_matrix
        actual, total, rows, weighted = batches.total(partial(_actual_sums, calibration))
        self.prior, self.actual, self.total = actual / rows, torch.from_numpy(weighted), float(total)
        self.rows = int(rows)
        self.present = present_classes(weighted, np.array([float(total) / float(rows)]))
        self.expected, self.width = True, classes * (classes if reads_matrix else 2)

    def decided(self, scores: list[Any]) -> list[State]:
        """States of the decisions for the largest of each of several scores; None is decisions drawn from q."""
        counted = partial(_counted, scores, self.calibration, self.classes, self.reads_matrix)
        return list(self.batches.total(counted)[0])


def _actual_sums(calibration: Calibration | None, batch: Batch) -> Sums:
    p, _, weight = batch
    q = p if calibration is None else calibration(p)
    return q.sum(axis=0), weight.sum(), np.asarray(float((weight > 0).sum())), weight @ q


def _counted(
    scores: list[Any], calibration: Calibration | None, classes: int, reads_matrix: bool, batch: Batch
) -> Sums:
    """States of several score functions, (K, ...); None is randomised decisions with the probabilities themselves."""
    p, _, weight = batch
    q = p if calibration is None else calibration(p)
    counts = ClassCounts(q, weight, classes, reads_matrix=reads_matrix)
    return (np.stack([counts.count_mixed(q) if s is None else counts.count(decide_blocks(q, s)) for s in scores]),)


def _best_gain(counts: BatchedCounts, problem: Problem, rounds: int) -> tuple[Gain, float]:
    """`frank_wolfe.maximise` without constraints and without moving rows one by one; all starts share the passes."""
    prior = np.maximum(counts.prior, 1e-12)
    starts = counts.decided([*(partial(np.multiply, prior**-power) for power in (0.0, 0.5, 1.0)), None])
    best, best_value = identity(counts), counts.value(starts[0], problem)

    def count(gains: list[Gain]) -> list[State]:
        nonlocal best, best_value
        states = counts.decided([gain.scores for gain in gains])
        for gain, state in zip(gains, states, strict=True):
            if (value := counts.value(state, problem)) > best_value:
                best, best_value = gain, value
        return states

    objective = problem.lagrangian(np.zeros(0))
    ends = run_together([ascend(counts, objective, start, min(FIRST, rounds)) for start in starts], count)
    if rounds > FIRST:
        start = max(ends, key=lambda end: end[1])[0]
        run_together([ascend(counts, objective, start, rounds - FIRST)], count)
    return best, best_value
