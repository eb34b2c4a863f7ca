"""Probabilities, labels and weights of any library as checked numpy arrays.

Values are always looked at here: a decision rule is learned once, at the edge, where a wrong number costs more
than a pass over the data.
"""

from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from evalign import checks

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
