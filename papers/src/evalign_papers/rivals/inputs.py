"""Shared parts of the rival losses: checked and flattened batches, per-class vectors, the weighted mean.

Shapes are those of `MetricLoss`: multiclass logits (N, C) or (N, C, d1, ...) with integer targets (N,) or
(N, d1, ...); binary (N,) or (N, 1) with 0/1 targets (N,), or one shape for both; multilabel (N, L) or
(N, L, d1, ...) for both. A target of -100 does not count, as in torch.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evalign import checks
from evalign.checks import counting_dtype, safe_divide
from evalign.confusion import Task

IGNORED = -100
Labels = Tensor | Sequence[int] | NDArray[Any]
PerClass = Tensor | Sequence[float] | NDArray[Any]


class Batch(NamedTuple):
    """Logits (M,) or (M, C), labels (M,) or (M, L) that are all valid, and their weights, 0 where ignored."""

    logits: Tensor
    y: Tensor
    weight: Tensor


def flat(logits: Tensor, target: Tensor, sample_weight: Tensor | None, task: Task) -> Batch:
    """Check a batch and flatten it, in float32 at least; a dense sample's entries stay next to each other.

    >>> flat(torch.zeros(2, 1).half(), torch.tensor([1, -100]), None, "binary")
    Batch(logits=tensor([0., 0.]), y=tensor([1, 0]), weight=tensor([1., 0.]))
    """
    checks.check_floating("logits", logits)
    checks.check_labels(target, soft_allowed=task != "multiclass")
    if not target.is_floating_point():
        target = target.long()  # -100 is 156 to an unsigned byte
    if task == "multiclass":
        checks.check_class_shapes(logits, target, name="logits")
        checks.check_label_range(target, logits.shape[1], IGNORED)
    else:
        if task == "binary" and logits.dim() == target.dim() + 1 and logits.shape[1] == 1:
            logits = logits.squeeze(1)
        checks.check_same_shape("logits", logits, target)
        if task == "multilabel" and logits.dim() < 2:
            raise ValueError(
                f"logits must have shape (N, L) or (N, L, d1, ...), got {tuple(logits.shape)}; "
                "for one label use task='binary'"
            )
        checks.check_binary_values(target, IGNORED)

    logits = logits.to(counting_dtype(logits.dtype))
    valid = target != IGNORED
    y, weight = torch.where(valid, target, 0).long(), valid.to(logits.dtype)
    if sample_weight is not None:
        weight = weight * checks.check_weights(sample_weight, tuple(target.shape)).to(logits.dtype)
    if task == "multilabel":
        return Batch(_classes_last(logits), _classes_last(y), _classes_last(weight))
    return Batch(
        _classes_last(logits) if task == "multiclass" else logits.reshape(-1), y.reshape(-1), weight.reshape(-1)
    )


def _classes_last(x: Tensor) -> Tensor:
    return x if x.dim() == 2 else x.movedim(1, -1).reshape(-1, x.shape[1])


def weighted_mean(values: Tensor, weight: Tensor) -> Tensor:
    """sum(w v) / sum(w), and 0 with gradient 0 if all weights are 0."""
    return safe_divide((values * weight).sum(), weight.sum())


def weight_of_labels(name: str, vector: Tensor | None, batch: Batch, task: Task) -> Tensor:
    """The weight of every label times that of its class (multilabel: of its column)."""
    if vector is None:
        return batch.weight
    per_class = vector.to(batch.weight)
    checks.check_per_class(name, per_class, classes_of(batch, task), number_allowed=False)
    return batch.weight * (per_class if task == "multilabel" else per_class[batch.y])


def classes_of(batch: Batch, task: Task) -> int:
    return 2 if task == "binary" else batch.logits.shape[1]


def vector_of(name: str, values: PerClass | None) -> Tensor | None:
    """A per-class option as a separate vector, so that a module can keep it as a buffer."""
    if values is None:
        return None
    vector = torch.as_tensor(values).detach().clone()
    if vector.dim() != 1:
        raise ValueError(f"{name} must have one entry per class, got shape {tuple(vector.shape)}")
    return vector if vector.is_floating_point() else vector.to(torch.get_default_dtype())


def counts_of(counts: PerClass) -> Tensor:
    """Training rows per class, float64, for formulas with a power or a logarithm of them.

    A class without rows counts as one with a single row: the formulas would give it an infinite offset, and
    the first label of that class an infinite loss.
    """
    vector = torch.as_tensor(counts).detach().clone().double()
    if vector.dim() != 1 or len(vector) < 2:
        raise ValueError(
            f"counts must hold the number of training rows of each class, one entry for each of C >= 2 classes, "
            f"got shape {tuple(vector.shape)}; use class_counts(labels)"
        )
    if not bool((vector >= 0).all()):  # phrased so that nan fails too
        raise ValueError(f"counts must be 0 or more, got {vector.tolist()}; use class_counts(labels)")
    return vector.clamp_min(1.0)


def class_counts(labels: Labels, num_classes: int | None = None) -> Tensor:
    """The number of rows of each class; `num_classes` names classes that these rows may lack.

    >>> class_counts([0, 2, 2], num_classes=4)
    tensor([1, 0, 2, 0])
    """
    y = torch.as_tensor(np.asarray(labels) if not isinstance(labels, Tensor) else labels)
    if y.dim() != 1:
        raise ValueError(f"labels must have shape (N,), got {tuple(y.shape)}; pass class numbers, not one-hot rows")
    if y.numel() and y.is_floating_point():
        raise TypeError(f"labels must be integers from 0, got {y.dtype}; use labels.astype(int) or labels.long()")
    y = y.long()
    if y.numel() and int(y.min()) < 0:
        raise ValueError(f"labels must be integers from 0, got {int(y.min())}; leave out rows that do not count")
    counts = torch.bincount(y, minlength=num_classes or 0)
    if num_classes is not None and len(counts) > num_classes:
        raise ValueError(f"labels must lie in 0 to {num_classes - 1}, got {len(counts) - 1}; raise num_classes")
    return counts
