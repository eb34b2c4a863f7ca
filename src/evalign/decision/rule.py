"""The decision rule, from probabilities to labels, with conversion to and from JSON; checks of its inputs."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cached_property, partial
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit

from evalign import checks
from evalign.checks import all_numbers, is_number, is_whole, shortened
from evalign.confusion import TASKS, Task

Floats = NDArray[np.float64]
Labels = NDArray[np.int64]


def to_numpy(x: Any) -> NDArray[Any]:
    """Numpy array of anything array-like; torch tensors are detached and moved to the CPU."""
    if hasattr(x, "detach"):
        x = x.detach().cpu()
        x = x.float() if str(x.dtype) in ("torch.bfloat16", "torch.float16") else x
    return np.asarray(x)


def as_probabilities(probabilities: Any, task: Task = "multiclass") -> Floats:
    """Checked probabilities (n, C) with rows that sum to 1, or (n, L) if multilabel; (n,) is the positive class of two.

    >>> as_probabilities([0.25, 1.0])
    array([[0.75, 0.25],
           [0.  , 1.  ]])
    """
    checks.check_choice("task", task, TASKS)
    p = to_numpy(probabilities)
    if p.dtype.kind not in "fiub":
        raise TypeError(f"probabilities must be numbers, got an array of {p.dtype}; pass the output of predict_proba")
    p = np.asarray(p, dtype=np.float64)
    one_column = p.ndim == 1 and task != "multilabel"
    if not one_column and (p.ndim != 2 or p.shape[1] < (1 if task == "multilabel" else 2)):
        expected = "(n, L)" if task == "multilabel" else "(n, C) with C >= 2, or (n,) for two classes"
        raise ValueError(f"probabilities must have shape {expected}, got {p.shape}")
    if task == "binary" and p.ndim == 2 and p.shape[1] != 2:
        raise ValueError(f"probabilities of a binary task have shape (n,) or (n, 2), got {p.shape}")
    if p.size and not (p.min() >= -1e-6 and p.max() <= 1 + 1e-6):  # phrased so that nan fails too
        found = "nan" if np.isnan(p).any() else f"{p.min():.3g} to {p.max():.3g}"
        raise ValueError(f"probabilities must lie in [0, 1], got {found}; for scores apply softmax or sigmoid first")
    p = np.asarray(np.clip(p, 0.0, 1.0))
    if one_column:
        return np.stack([1 - p, p], axis=1)
    if task != "multilabel" and p.size:
        off = float(np.abs(p.sum(axis=1) - 1).max())
        if off > 1e-2:
            raise ValueError(
                f"probabilities must add up to 1 in every row, got sums off by {off:.3g}; "
                "apply softmax first, or set task='multilabel'"
            )
    return p


def as_labels(target: Any, like: Floats, task: Task) -> Labels:
    """Checked class indices (n,), or 0/1 of the probabilities' shape with task="multilabel".

    >>> as_labels([True, False], np.full((2, 2), 0.5), "binary")
    array([1, 0])
    """
    y = to_numpy(target)
    shape = like.shape if task == "multilabel" else like.shape[:1]
    if y.shape != shape:
        raise ValueError(f"target must have shape {shape} for probabilities {like.shape}, got {y.shape}")
    high = 1 if task == "multilabel" else like.shape[1] - 1
    whole = y.dtype.kind in "iub" or (y.dtype.kind == "f" and bool(np.all(y == np.floor(y))))
    if not whole:
        raise TypeError(
            f"target must hold class indices 0 to {high}, got {y.dtype}; "
            "use np.unique(labels, return_inverse=True), or MetricDecision, which takes any labels"
        )
    if y.size and (y.min() < 0 or y.max() > high):
        wrong = y[(y < 0) | (y > high)][0]
        raise ValueError(f"target must hold class indices 0 to {high}, got {wrong:g}")
    return y.astype(np.int64)


def as_weights(sample_weight: Any, like: Floats, *, part: bool = False) -> Floats:
    """Checked weights (n,); None means 1 for every row. In a `part` of the rows all may be 0.

    >>> as_weights(None, np.full((2, 2), 0.5))
    array([1., 1.])
    """
    if len(like) == 0 and not part:
        raise ValueError("learning a rule needs at least one row of probabilities, got none")
    if sample_weight is None:
        return np.ones(len(like))
    weight = to_numpy(sample_weight).astype(np.float64)
    if weight.shape != like.shape[:1]:
        raise ValueError(f"sample_weight must have shape {like.shape[:1]}, got {weight.shape}")
    if not (np.isfinite(weight).all() and (weight >= 0).all() and (part or weight.any())):
        raise ValueError("sample_weight must be finite, at least 0 and not all 0; leave out rows that do not count")
    return weight


def as_held_out(
    probabilities: Any, target: Any, weight: Any, task: Task = "multiclass"
) -> tuple[Floats, Labels, Floats]:
    """Checked probabilities, labels and weights of held-out rows."""
    p = as_probabilities(probabilities, task)
    return p, as_labels(target, p, task), as_weights(weight, p)


Kind = Literal["argmax", "threshold", "thresholds", "offsets", "affine", "gain", "row_costs"]
VERSION = 2
FLOOR = 1e-12  # minimum probability before taking a logarithm
TIE = 1e-14  # scores closer than this are equal: matrix products round differently for different row counts
NEVER = 2.0  # a threshold that no probability reaches
BLOCK = 2**18  # size of temporary arrays, so that they fit in the cache
REJECTED = -1  # decision of a rejected row

# Parameters of each kind; all may have temperature, offsets, floor and reject.
PARAMETERS: dict[str, tuple[str, ...]] = {
    "argmax": (),
    "threshold": ("threshold",),
    "thresholds": ("thresholds",),
    "offsets": ("offsets",),
    "affine": ("weights", "biases"),
    "gain": ("gain",),
    "row_costs": (),
}
Vector = tuple[float, ...]


@dataclass(frozen=True, repr=False)
class Rule:
    """Decision rule: labels from calibrated probabilities q, a row of `columns` numbers.

    ============  ==================================================================================
    kind          decision
    ============  ==================================================================================
    argmax        argmax_j q_j
    threshold     two classes: 1 if q_1 >= threshold
    thresholds    multilabel: 1 if q_l >= thresholds_l, label by label
    offsets       argmax_j q_j, with q from the offsets
    affine        argmax_j (weights_j q_j + biases_j), a gain matrix diag(weights) + 1 biases^T
    gain          argmax_j (q^T gain)_j
    row_costs     argmin_j sum_i q_i cost_ij, with the row's own costs, passed to `predict`
    ============  ==================================================================================

    Calibration: q_j ~ max(p_j, floor)^(1 / temperature) exp(offsets_j), normalised; multilabel: sigmoid(logit(p_l) /
    temperature_l + offsets_l). Ties go to the larger probability, then to the lower index; a probability equal to its
    threshold is positive.

    reject: rows whose best score (q of the decided class; q^T gain; minus the expected cost) is below this value are
        not decided: their label is `REJECTED`, -1.
    at_most: two classes; at most this many rows of a call are positive, those with the largest q_1.
    metric, value: the maximised metric, and its value on the rows the rule was learned from.
    coverage: share of these rows that was not rejected.
    shares: share of each class in these rows.
    subject_to, reached, bounds, confidence: the constraints, their values on these rows, the bounds certified at the
        joint confidence (None: not certified); `feasible` is False if a constraint is not met.

    >>> rule = Rule("threshold", 2, threshold=0.3)
    >>> rule.predict([0.1, 0.3, 0.9])
    array([0, 1, 1])
    >>> Rule.from_json(rule.to_json()) == rule
    True
    """

    reporter: ClassVar[Callable[..., Any] | None] = None

    kind: Kind
    columns: int
    threshold: float | None = None
    thresholds: Vector | None = None
    offsets: Vector | None = None
    weights: Vector | None = None
    biases: Vector | None = None
    gain: tuple[Vector, ...] | None = None
    temperature: float | Vector = 1.0
    floor: float = FLOOR
    reject: float | None = None
    at_most: int | None = None
    feasible: bool = True
    metric: str | None = None
    value: float | None = None
    coverage: float | None = None
    shares: Vector | None = None
    subject_to: tuple[str, ...] = ()
    reached: Vector = ()
    bounds: Vector | None = None
    confidence: float | None = None

    def __post_init__(self) -> None:
        if self.kind not in PARAMETERS:
            raise ValueError(f"kind of a rule must be one of {', '.join(PARAMETERS)}, got {self.kind!r}")
        if not is_whole(self.columns) or self.columns < 1:
            raise ValueError(f"columns of a rule must be a whole number above 0, got {self.columns!r}")
        object.__setattr__(self, "columns", int(self.columns))
        if self.kind == "threshold" and self.columns != 2:
            raise ValueError(f"a threshold rule needs 2 columns, got {self.columns}")
        if self.multilabel and not isinstance(self.temperature, (int, float)):
            object.__setattr__(
                self, "temperature", checks.frozen_numbers("temperature of a rule", self.temperature, (self.columns,))
            )
        temperatures = self.temperature if isinstance(self.temperature, tuple) else (self.temperature,)
        if not all(is_number(t) and t > 0 for t in temperatures):
            raise ValueError(f"temperature of a rule must be a number above 0, got {self.temperature!r}")
        if not is_number(self.floor) or not 0 < self.floor < 0.5:
            raise ValueError(f"floor of a rule must be a number between 0 and 1/2, got {self.floor!r}")
        if self.at_most is not None and (self.kind != "threshold" or not is_whole(self.at_most) or self.at_most < 0):
            raise ValueError(f"at_most must be a whole number, and requires kind 'threshold', got {self.at_most!r}")
        if self.reject is not None and (self.multilabel or not is_number(self.reject)):
            raise ValueError(f"reject must be a number, and is not supported for multilabel rules, got {self.reject!r}")
        shapes: dict[str, tuple[int, ...]] = {"threshold": (), "gain": (self.columns,) * 2}
        shapes |= {"reached": (len(self.subject_to),), "bounds": (len(self.subject_to),)}
        for name in ("threshold", "thresholds", "offsets", "weights", "biases", "gain", "shares", "reached", "bounds"):
            value = getattr(self, name)
            required = name in PARAMETERS[self.kind]
            if value is None and not required:
                continue
            if not required and name not in ("offsets", "shares", "reached", "bounds"):
                raise ValueError(f"a rule of kind {self.kind!r} has no {name}; leave it out")
            # Convert through an array, so that lists from JSON, numpy arrays and tuples become equal tuples.
            object.__setattr__(
                self, name, checks.frozen_numbers(f"{name} of a rule", value, shapes.get(name, (self.columns,)))
            )
        object.__setattr__(self, "subject_to", tuple(map(str, self.subject_to)))

    @cached_property
    def _gain(self) -> Floats:
        return np.asarray(self.gain, dtype=np.float64)

    @property
    def multilabel(self) -> bool:
        """Whether each column is a separate label."""
        return self.kind == "thresholds"

    def predict(self, probabilities: Any, *, costs: Any = None) -> Labels:
        """Labels (n,) for probabilities (n, C), or 0/1 (n, L) for a multilabel rule; -1 is a rejected row.

        `costs` (n, C, C) are the costs of each row by true and decided class, for kind "row_costs".

        >>> Rule("offsets", 3, offsets=(0.0, 0.0, 1.0)).predict([[0.5, 0.2, 0.3], [0.6, 0.2, 0.2]])
        array([2, 0])
        """
        p = as_probabilities(probabilities, "multilabel" if self.multilabel else "multiclass")
        self.check_columns(p)
        if (costs is None) == (self.kind == "row_costs"):
            raise ValueError(
                f"costs (n, C, C) are required for rules of kind 'row_costs' and no other, got kind {self.kind!r}"
            )
        if costs is not None and np.shape(costs) != (len(p), self.columns, self.columns):
            expected = (len(p), self.columns, self.columns)
            raise ValueError(f"costs must have shape {expected}, got {np.shape(costs)}")
        return self.decide(p, costs)

    def check_columns(self, p: Floats) -> None:
        """Raise if probabilities have another number of columns."""
        if p.shape[1] != self.columns:
            raise ValueError(f"this rule needs {self.columns} columns of probabilities, got {p.shape[1]}")

    def calibrate(self, p: Floats) -> Floats:
        """Calibrated probabilities q."""
        return recalibrated(p, self.temperature, self.offsets, floor=self.floor, multilabel=self.multilabel)

    def decide(self, p: Floats, costs: Any = None) -> Labels:
        """`predict` of checked probabilities, in blocks of rows."""
        step = max(1, BLOCK // (self.columns**2 if costs is not None else self.columns))
        parts = [
            self._decide_block(p[i : i + step], None if costs is None else np.asarray(costs[i : i + step], np.float64))
            for i in range(0, max(len(p), 1), step)
        ]
        decisions = np.concatenate(parts) if len(parts) > 1 else parts[0]
        if self.at_most is not None and (decisions == 1).sum() > self.at_most:
            positive = np.flatnonzero(decisions == 1)
            order = np.argsort(-p[positive, 1], kind="stable")  # calibration preserves the order of two classes
            decisions[positive[order[self.at_most :]]] = 0
        return decisions

    def _decide_block(self, p: Floats, costs: Floats | None) -> Labels:
        q = self.calibrate(p)
        if self.kind == "thresholds":
            return (q >= np.asarray(self.thresholds)).astype(np.int64)
        if self.kind == "threshold":
            decisions = (q[:, 1] >= float(self.threshold or 0.0)).astype(np.int64)
            return self._rejected(decisions, q)
        scores = self._scores(q, costs)
        return self._rejected(decide(scores, p), scores)

    def _scores(self, q: Floats, costs: Floats | None = None) -> Floats:
        scores: Floats = q
        if self.kind == "affine":
            scores = q * np.asarray(self.weights) + np.asarray(self.biases)
        elif self.kind == "gain":
            scores = q @ self._gain
        elif costs is not None:
            scores = -np.einsum("ni,nij->nj", q, costs)
        return scores

    def scores(self, p: Floats) -> Floats:
        """Scores (n, C) of checked probabilities whose largest is the decision; ties are broken by a tiny margin.

        >>> Rule("threshold", 2, threshold=0.3).scores(np.array([[0.5, 0.5], [0.7, 0.3]])).round(3)
        array([[0.3, 0.5],
               [0.3, 0.3]])
        """
        q = self.calibrate(p)
        if self.kind == "threshold":
            scores = np.stack([np.full(len(q), float(self.threshold or 0.0)), q[:, 1]], axis=1)
        else:
            scores = self._scores(q).copy()
        decisions = self.decide(p)
        rows = np.flatnonzero(decisions >= 0)  # a rejected row keeps its scores
        others = scores[rows].copy()
        others[np.arange(len(rows)), decisions[rows]] = -np.inf
        chosen = scores[rows, decisions[rows]]
        scores[rows, decisions[rows]] = np.maximum(chosen, np.nextafter(others.max(axis=1), np.inf))
        return scores

    def _rejected(self, decisions: Labels, scores: Floats) -> Labels:
        if self.reject is None:
            return decisions
        best = scores[np.arange(len(scores)), decisions]
        return np.where(best < self.reject - TIE, REJECTED, decisions)

    def report(self, probabilities: Any, target: Any, metric: Any = None, **options: Any) -> Any:
        """Intervals of threshold, metric and constraints on labelled rows; see `evaluate_rule`.

        `print(rule.report(p, y))` gives text, `rule.report(p, y).html()` a page with a plot.
        """
        assert Rule.reporter is not None  # set by evalign.decision.rule_report, which the package imports
        return Rule.reporter(self, probabilities, target, metric, **options)

    def to_json(self) -> dict[str, Any]:
        """Dictionary of plain JSON types."""
        held = ((f, getattr(self, f.name)) for f in fields(self))
        return {"version": VERSION} | {f.name: _plain(v) for f, v in held if v is not None and not v == () == f.default}

    @classmethod
    def from_json(cls, data: Any) -> "Rule":
        """Rule of a `to_json` dictionary; raises ValueError for anything else."""
        if not isinstance(data, dict):
            raise ValueError(f"a rule must be a dictionary, got {type(data).__name__}; use json.loads first")
        if data.get("version") != VERSION:
            raise ValueError(f"a rule of version {VERSION} was expected, got {data.get('version')!r}; learn it again")
        given = {name: value for name, value in data.items() if name != "version"}
        wrong = [f"lacks {name!r}" for name in ("kind", "columns") if name not in given]
        known = {f.name for f in fields(cls)}
        wrong += [f"has an unknown entry {name!r}" for name in given if name not in known]
        if wrong:
            raise ValueError(f"a rule has kind, columns and the parameters of its kind, but this one {wrong[0]}")
        for name, value in given.items():
            wanted, right = JSON_TYPES.get(name, ("finite numbers", all_numbers))
            if not right(value):
                raise ValueError(f"{name} of a rule must be {wanted}, got {shortened(value)}")
        return cls(**given | {name: int(given[name]) for name in ("columns", "at_most") if name in given})

    def __repr__(self) -> str:
        shown = [repr(self.kind), str(self.columns)]
        for f in fields(self)[2:]:
            value = getattr(self, f.name)
            if value == f.default or f.name in ("gain", "shares"):
                continue
            if isinstance(value, tuple) and f.name != "subject_to":
                text = np.array2string(np.asarray(value), precision=4, threshold=12, separator=", ")
            else:
                text = f"{value:.4g}" if isinstance(value, float) else repr(value)
            shown.append(f"{f.name}={text}")
        return f"Rule({', '.join(shown)})"


def decide(scores: Floats, p: Floats) -> Labels:
    """argmax of the scores; ties go to the larger probability, then to the lower index.

    >>> decide(np.array([[1.0, 1.0, 0.0]]), np.array([[0.2, 0.3, 0.5]]))
    array([1])
    """
    decisions: Labels = scores.argmax(axis=1).astype(np.int64, copy=False)
    best = np.take_along_axis(scores, decisions[:, None], axis=1)
    tied = scores >= best - TIE * np.maximum(np.abs(best), 1.0)
    if np.count_nonzero(tied) > len(tied):
        rows = np.flatnonzero(tied.sum(axis=1) > 1)
        decisions[rows] = np.where(tied[rows], p[rows], -1.0).argmax(axis=1)
    return decisions


def decide_blocks(p: Floats, score: Callable[[Floats], Floats]) -> Labels:
    """`decide(score(p), p)` with temporary arrays of at most BLOCK numbers."""
    step = max(1, BLOCK // p.shape[1])
    parts = [decide(score(p[i : i + step]), p[i : i + step]) for i in range(0, max(len(p), 1), step)]
    return np.concatenate(parts) if len(parts) > 1 else parts[0]


def logit(p: Floats, floor: float = FLOOR) -> Floats:
    """log(p / (1 - p)), with p kept at least `floor` away from 0 and 1."""
    p = np.clip(p, floor, 1 - floor)
    return np.log(p) - np.log1p(-p)


def recalibrated(
    p: Floats, temperature: float | Vector, offsets: Any = None, *, floor: float = FLOOR, multilabel: bool = False
) -> Floats:
    """p^(1 / temperature) exp(offsets), normalised; p itself if nothing changes.

    >>> recalibrated(np.array([[0.8, 0.2]]), 0.5).round(3)
    array([[0.941, 0.059]])
    """
    if temperature == 1.0 and offsets is None:
        return p
    slope, shift = np.asarray(temperature), 0.0 if offsets is None else np.asarray(offsets)
    if multilabel:
        return np.asarray(expit(logit(p, floor) / slope + shift))
    q = np.empty_like(p)
    step = max(1, BLOCK // p.shape[1])
    for i in range(0, len(p), step):
        z = np.maximum(p[i : i + step], floor, out=q[i : i + step])
        np.log(z, out=z)
        z /= slope
        z += shift
        z -= z.max(axis=1, keepdims=True)
        np.exp(z, out=z)
        z /= z.sum(axis=1, keepdims=True)
    return q


# Entries of a rule's JSON that are not numbers or lists of numbers. Other programs write 1 for 1.0.
JSON_TYPES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    **dict.fromkeys(("kind", "metric"), ("a str", lambda x: isinstance(x, str))),
    **dict.fromkeys(("columns", "at_most"), ("a whole number", is_whole)),
    **dict.fromkeys(("coverage", "confidence"), ("a number from 0 to 1", partial(is_number, low=0.0, high=1.0))),
    "value": ("a number", is_number),
    "shares": (
        "numbers of at least 0",
        lambda x: isinstance(x, list) and all(is_number(v, low=0.0) for v in x),
    ),
    "feasible": ("a bool", lambda x: isinstance(x, bool)),
    "subject_to": ("a list of texts", lambda x: isinstance(x, list) and all(isinstance(text, str) for text in x)),
}


def _plain(x: Any) -> Any:
    return [_plain(v) for v in x] if isinstance(x, tuple) else x
