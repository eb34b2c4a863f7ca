"""Probabilities, labels and weights of any library as checked numpy arrays.

Values are always looked at here: a decision rule is learned once, at the edge, where a wrong number costs more
than a pass over the data.
"""

from dataclasses import dataclass, fields
from functools import cached_property
from math import isfinite
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from evalign import _checks as checks

Floats = NDArray[np.float64]
Labels = NDArray[np.int64]
Task = Literal["binary", "multiclass", "multilabel"]
TASKS: tuple[Task, ...] = ("binary", "multiclass", "multilabel")


def to_numpy(x: Any) -> NDArray[Any]:
    """An array of anything array-like; torch tensors leave their graph and their device."""
    if hasattr(x, "detach"):
        x = x.detach().cpu()
        x = x.float() if str(x.dtype) in ("torch.bfloat16", "torch.float16") else x
    return np.asarray(x)


def as_probabilities(probabilities: Any, task: Task = "multiclass") -> Floats:
    """(n, C) rows that add up to 1, or (n, L) with task="multilabel"; (n,) is the positive class of two.

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
                "apply softmax first, or say task='multilabel'"
            )
    return p


def as_labels(target: Any, like: Floats, task: Task) -> Labels:
    """Class indices (n,), or 0/1 of the probabilities' shape with task="multilabel".

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


def as_weights(sample_weight: Any, like: Floats) -> Floats:
    """One weight per row; None weighs all rows 1.

    >>> as_weights(None, np.full((2, 2), 0.5))
    array([1., 1.])
    """
    if len(like) == 0:
        raise ValueError("a rule is learned from at least one row of probabilities, got none")
    if sample_weight is None:
        return np.ones(len(like))
    weight = to_numpy(sample_weight).astype(np.float64)
    if weight.shape != like.shape[:1]:
        raise ValueError(f"sample_weight must have shape {like.shape[:1]}, got {weight.shape}")
    if not (np.isfinite(weight).all() and weight.min() >= 0 and weight.sum() > 0):
        raise ValueError("sample_weight must be finite, at least 0 and not all 0; leave out rows that do not count")
    return weight


Kind = Literal["argmax", "threshold", "thresholds", "offsets", "affine", "gain"]
VERSION = 1
FLOOR = 1e-12  # of a probability whose logarithm is taken
TIE = 1e-14  # scores closer than this are equal: a matrix product rounds differently for other row counts

# What each kind is made of, besides `temperature`, which all may have; `offsets` may precede affine and gain.
PARTS: dict[str, tuple[str, ...]] = {
    "argmax": (),
    "threshold": ("threshold",),
    "thresholds": ("thresholds",),
    "offsets": ("offsets",),
    "affine": ("weights", "biases"),
    "gain": ("gain",),
}
Vector = tuple[float, ...]


@dataclass(frozen=True, repr=False)
class Rule:
    """How labels are decided from probabilities p, a row of `columns` numbers.

    ============  ==================================================================================
    kind          decision
    ============  ==================================================================================
    argmax        argmax_j p_j
    threshold     two classes: 1 where p_1 >= threshold
    thresholds    multilabel: 1 where p_l >= thresholds_l, label by label
    offsets       argmax_j (log p_j + offsets_j)
    affine        argmax_j (weights_j p_j + biases_j), a gain matrix diag(weights) + 1 biases^T
    gain          argmax_j (p^T gain)_j
    ============  ==================================================================================

    Before that, p is recalibrated as p_j^(1 / temperature) exp(offsets_j), normalised, where these are given
    (multilabel: the logit is divided by the temperature), and p below `floor` counts as `floor`. Ties go to the
    larger probability, then to the lower index; a probability on its threshold is positive. `feasible` is False
    if constraints could not be met, `metric` and `value` tell what was maximised and what it reached on the rows
    the rule was learned from.

    >>> rule = Rule("threshold", 2, threshold=0.3)
    >>> rule.predict([0.1, 0.3, 0.9])
    array([0, 1, 1])
    >>> Rule.from_json(rule.to_json()) == rule
    True
    """

    kind: Kind
    columns: int
    threshold: float | None = None
    thresholds: Vector | None = None
    offsets: Vector | None = None
    weights: Vector | None = None
    biases: Vector | None = None
    gain: tuple[Vector, ...] | None = None
    temperature: float = 1.0
    floor: float = FLOOR
    feasible: bool = True
    metric: str | None = None
    value: float | None = None

    def __post_init__(self) -> None:
        if self.kind not in PARTS:
            raise ValueError(f"kind of a rule must be one of {', '.join(PARTS)}, got {self.kind!r}")
        if not _is_number(self.columns) or self.columns != int(self.columns) or self.columns < 1:
            raise ValueError(f"columns of a rule must be a whole number above 0, got {self.columns!r}")
        if self.kind == "threshold" and self.columns != 2:
            raise ValueError(f"a threshold rule decides between 2 columns, got {self.columns}")
        if not _is_number(self.temperature) or self.temperature <= 0:
            raise ValueError(f"temperature of a rule must be a number above 0, got {self.temperature!r}")
        if not _is_number(self.floor) or not 0 < self.floor < 0.5:
            raise ValueError(f"floor of a rule must be a number between 0 and 1/2, got {self.floor!r}")
        for name in ("threshold", "thresholds", "offsets", "weights", "biases", "gain"):
            value = getattr(self, name)
            wanted = name in PARTS[self.kind]
            if value is None and not wanted:
                continue
            if not wanted and not (name == "offsets" and self.kind in ("affine", "gain")):
                raise ValueError(f"a rule of kind {self.kind!r} has no {name}; leave it out")
            shape: tuple[int, ...] = {"threshold": (), "gain": (self.columns,) * 2}.get(name, (self.columns,))
            # Through an array, so that lists from JSON, numpy arrays and tuples end up as one and compare equal.
            object.__setattr__(self, name, _frozen(name, value, shape))

    @cached_property
    def _gain(self) -> Floats:
        return np.asarray(self.gain, dtype=np.float64)

    def predict(self, probabilities: Any) -> Labels:
        """Labels (n,) of probabilities (n, C), or 0/1 (n, L) for a multilabel rule.

        >>> Rule("offsets", 3, offsets=(0.0, 0.0, 1.0)).predict([[0.5, 0.2, 0.3], [0.6, 0.2, 0.2]])
        array([2, 0])
        """
        p = as_probabilities(probabilities, "multilabel" if self.kind == "thresholds" else "multiclass")
        if p.shape[1] != self.columns:
            raise ValueError(f"this rule decides from {self.columns} columns of probabilities, got {p.shape[1]}")
        return self.decide(p)

    def decide(self, p: Floats) -> Labels:
        """`predict` without looking at the input."""
        q = recalibrated(p, self.temperature, self.offsets, floor=self.floor, multilabel=self.kind == "thresholds")
        if self.kind == "thresholds":
            return (q >= np.asarray(self.thresholds)).astype(np.int64)
        if self.kind == "threshold":
            return (q[:, 1] >= float(self.threshold or 0.0)).astype(np.int64)
        if self.kind == "affine":
            return decide(q * np.asarray(self.weights) + np.asarray(self.biases), p)
        return decide(q @ self._gain if self.kind == "gain" else q, p)

    def to_json(self) -> dict[str, Any]:
        """A dictionary of plain JSON types."""
        held = {f.name: getattr(self, f.name) for f in fields(self)}
        return {"version": VERSION} | {name: _plain(value) for name, value in held.items() if value is not None}

    @classmethod
    def from_json(cls, data: Any) -> "Rule":
        """The rule of a `to_json` dictionary; anything else is a ValueError."""
        if not isinstance(data, dict):
            raise ValueError(f"a rule is read from a dictionary, got {type(data).__name__}; use json.loads first")
        if data.get("version") != VERSION:
            raise ValueError(f"a rule of version {VERSION} was expected, got {data.get('version')!r}; learn it anew")
        given = {name: value for name, value in data.items() if name != "version"}
        unknown = sorted(set(given) - {f.name for f in fields(cls)}, key=str)
        missing = [name for name in ("kind", "columns") if name not in given]
        if unknown or missing:
            wrong = f"lacks {missing[0]!r}" if missing else f"has an unknown entry {unknown[0]!r}"
            raise ValueError(f"a rule holds kind, columns and what its kind asks for, but this one {wrong}")
        types: dict[str, type] = {"kind": str, "feasible": bool, "metric": str, "value": float}
        for name, wanted in types.items():
            if name in given and not isinstance(given[name], wanted):
                raise ValueError(f"{name} of a rule must be a {wanted.__name__}, got {_short(given[name])}")
        return cls(**given)

    def __repr__(self) -> str:
        shown = [repr(self.kind), str(self.columns)]
        for name in ("threshold", "thresholds", "offsets", "weights", "biases"):
            value = getattr(self, name)
            if value is not None:
                shown.append(f"{name}={np.array2string(np.asarray(value), precision=4, threshold=12, separator=', ')}")
        for name in ("temperature", "floor", "feasible", "metric", "value"):
            value = getattr(self, name)
            if value != getattr(Rule, name):
                shown.append(f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={value!r}")
        return f"Rule({', '.join(shown)})"


def decide(scores: Floats, p: Floats) -> Labels:
    """argmax of the scores; equal scores go to the larger probability, then to the lower index.

    >>> decide(np.array([[1.0, 1.0, 0.0]]), np.array([[0.2, 0.3, 0.5]]))
    array([1])
    """
    best = scores.max(axis=1, keepdims=True, initial=-np.inf)
    tied = scores >= best - TIE * np.maximum(np.abs(best), 1.0)
    return np.asarray(np.where(tied, p, -1.0).argmax(axis=1), dtype=np.int64)


def logit(p: Floats, floor: float = FLOOR) -> Floats:
    p = np.clip(p, floor, 1 - floor)
    return np.log(p) - np.log1p(-p)


def expit(z: Any) -> Any:
    return 0.5 * (1 + np.tanh(0.5 * np.asarray(z)))


def softmax(z: Floats) -> Floats:
    e = np.exp(z - z.max(axis=1, keepdims=True, initial=-np.inf))
    return np.asarray(e / e.sum(axis=1, keepdims=True))


def recalibrated(
    p: Floats, temperature: float, offsets: Any = None, *, floor: float = FLOOR, multilabel: bool = False
) -> Floats:
    """p^(1 / temperature) exp(offsets), normalised; the very same numbers if there is nothing to change.

    >>> recalibrated(np.array([[0.8, 0.2]]), 0.5).round(3)
    array([[0.941, 0.059]])
    """
    if temperature == 1.0 and offsets is None:
        return p
    if multilabel:
        return np.asarray(expit(logit(p, floor) / temperature))
    z = np.log(np.maximum(p, floor)) / temperature
    return softmax(z if offsets is None else z + np.asarray(offsets))


def _is_number(x: Any) -> bool:
    return isinstance(x, (int, float)) and not isinstance(x, bool) and isfinite(x)


def _frozen(name: str, value: Any, shape: tuple[int, ...]) -> Any:
    try:
        array = np.asarray(value, dtype=np.float64)
    except (TypeError, ValueError):
        array = np.asarray(np.nan)
    if array.shape != shape or not np.isfinite(array).all():
        raise ValueError(f"{name} of a rule must be finite numbers of shape {shape}, got {_short(value)}")
    return _tuples(array.tolist())


def _tuples(x: Any) -> Any:
    return tuple(_tuples(v) for v in x) if isinstance(x, list) else x


def _plain(x: Any) -> Any:
    return [_plain(v) for v in x] if isinstance(x, tuple) else x


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
