"""Rules from more rows than fit in memory: batches, Parquet files or a Ray dataset, read in passes.

Every pass adds up counts, so that batches and workers may come in any order. Two classes need one pass: rows of equal
probability and label are one row of their total weight. More classes need one pass for each round of Frank-Wolfe.
"""

import pickle
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
from evalign.decision.constraints import class_index, parse_constraints
from evalign.decision.learned import DECISIONS, learn_rule
from evalign.decision.rule import Floats, Labels, Rule, as_labels, as_probabilities, as_weights, decide_blocks
from evalign.decision.search.counts import ClassCounts, State
from evalign.decision.search.frank_wolfe import FIRST, Gain, ascend, identity, run_together
from evalign.decision.search.problem import Problem, present_classes
from evalign.metrics import Average, Beta, MetricFunction

DISTINCT = 2**20  # distinct probabilities kept for two classes
PREFIX = "probability_"  # prefix of the columns of a file
CHUNK = 2**16  # rows of a Parquet file read at a time
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
    "auto" has calibrated on a sample of 8 million probabilities. Constraints on more than two classes need the rows in
    memory, and so do certificates (about 50 bytes per row).

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
    if subject_to is not None or confidence is not None:
        raise ValueError("constraints of more than two classes need the rows in memory; use decision.calibrated")
    if decision == "argmax":
        return Rule("argmax", classes)
    calibration = None if decision == "plug_in" else fit_calibration(*_sample(batches, rows, classes))
    problem = Problem.of(metric, np.zeros((1, classes)), "multiclass", average, beta, None)
    counts = BatchedCounts(batches, calibration, classes, reads_matrix=problem.reads_matrix)
    gain, value = _best_gain(counts, problem, rounds)
    rule = replace(gain.rule(), metric=problem.name, value=value)
    if calibration is None:
        return rule
    rule = replace(rule, **calibration.fields)
    c = Confusion.of_matrix(torch.from_numpy(batches.total(partial(_observed_sums, rule))[0]))
    return replace(rule, value=problem.metric_value(c), shares=tuple((c.actual / c.total).tolist()))


def _observed_sums(rule: Rule, batch: Batch) -> Sums:
    """Confusion matrix of a rule's decisions."""
    p, y, weight = batch
    assert y is not None
    size = rule.columns
    return (np.bincount(y * size + rule.decide(p), weight, size * size).reshape(size, size),)


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


def _sample(batches: ProbabilityBatches, rows: float, classes: int) -> tuple[Floats, Labels, Floats]:
    """Rows for the calibration: all if they are few, otherwise evenly spaced ones."""
    step = max(1, -(-int(rows) * classes // SAMPLE))

    def taken(batch: Batch) -> Sums:
        p, y, weight = batch
        assert y is not None
        return p[::step].copy(), y[::step].copy(), weight[::step].copy()  # a view would keep the whole batch in memory

    p, y, weight = zip(*batches.map(taken), strict=True)
    return np.concatenate(p), np.concatenate(y), np.concatenate(weight)


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
