"""Check a user's batch and flatten it into the arrays that `Objective` takes; sums of such batches."""

from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from evalign import checks
from evalign.checks import counting_dtype, is_soft, sum_by_label
from evalign.confusion import Confusion, Task

Weight = Tensor | int
CACHED_ONES = 1 << 18  # maximum size of a cached tensor of ones


class FlatBatch(NamedTuple):
    """Logits (M, C), (M,) or (M, L), valid labels, and the weight of every label, 0 where it is ignored.

    Images may keep the form (N, C, S), with labels (N S,) or shares (N, C, S), or (N, L, S) for all three; see `rows`.
    If `weight` is a number, it is the label to ignore, and all others have weight 1. Labels are integers, or
    probabilities: (M, C) of every class, (M,) or (M, L) of the positive class. `smoothing_weights` are the rows'
    weights without
    those of their classes, and the class weights: smoothed cross-entropy needs them separately.
    """

    logits: Tensor
    y: Tensor
    weight: Weight
    smoothing_weights: tuple[Tensor, Tensor] | None = None

    def rows(self) -> "FlatBatch":
        """The same batch with one row per label."""
        return FlatBatch(*as_rows(self.logits, self.y, self.weight), self.smoothing_weights)

    def split(self, images: int) -> "FlatBatch":
        """The same batch with a leading dimension of images, which have equally many rows; weights as a tensor."""
        if self.logits.dim() == 3:
            return self.rows().split(images)
        y, weight = dense(self.y, self.weight, self.logits.dtype)

        def by_image(x: Tensor) -> Tensor:
            return x.reshape(images, x.shape[0] // max(images, 1), *x.shape[1:])

        apart = self.smoothing_weights and (by_image(self.smoothing_weights[0]), self.smoothing_weights[1])
        return FlatBatch(by_image(self.logits), by_image(y), by_image(weight), apart)

    def with_shares(self) -> "FlatBatch":
        """The same multiclass batch, with weights as a tensor, and integer labels as shares of every class."""
        logits, y, weight, apart = self
        if y.is_floating_point():
            return self
        y = (y[..., None] == torch.arange(logits.shape[-1], device=y.device)).to(logits.dtype)
        return FlatBatch(logits, y, weight) if apart is None else FlatBatch(logits, y * apart[1], apart[0], apart)


def dense(y: Tensor, weight: Weight, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Valid labels, and the weight of each, for logits of this dtype.

    >>> dense(torch.tensor([2, -100]), -100, torch.float32)
    (tensor([2, 0]), tensor([1., 0.]))
    """
    if isinstance(weight, Tensor):
        return y, weight
    valid = y != weight
    y = torch.where(valid, y, 0)
    return y if y.is_floating_point() else y.long(), valid.to(counting_dtype(dtype))


def as_rows(logits: Tensor, y: Tensor, weight: Weight) -> tuple[Tensor, Tensor, Weight]:
    """Logits, labels and weights with images (N, C, S) converted to rows; rows are unchanged."""
    if logits.dim() < 3:
        return logits, y, weight
    y = rows_of_images(y) if y.dim() == 3 else y
    weight = rows_of_images(weight) if isinstance(weight, Tensor) and weight.dim() == 3 else weight
    return rows_of_images(logits), y, weight


def confusion_mass(y: Tensor, weight: Tensor) -> Tensor:
    """The sum of all soft labels (M, C), each with the weight of its row."""
    return (y * weight[:, None]).sum()


def flatten(
    task: Task,
    input: Tensor,
    target: Tensor,
    *,
    offset: Any = None,
    weight: Any = None,
    pos_weight: Any = None,
    sample_weight: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    from_logits: bool = True,
    class_dim: int = 1,
    images: bool = False,
) -> FlatBatch:
    """Check a batch and reshape it to one row per label; contiguous `images` may keep their form, flattened.

    >>> flatten("multiclass", torch.zeros(2, 3, 4, 4), torch.zeros(2, 4, 4).long()).logits.shape
    torch.Size([32, 3])
    """
    if class_dim != 1:
        input, target = _classes_second(input, target, task, class_dim)
    input, target, all_count = _checked(input, target, task, ignore_index, from_logits)
    dtype = torch.float32 if input.dtype in (torch.float16, torch.bfloat16) else input.dtype
    classes = 2 if task == "binary" else input.shape[1]
    if offset is not None:
        offset = per_class("offset", offset, classes, input.device, dtype)
    if weight is not None:
        weight = per_class("weight", weight, classes, input.device, dtype)

    # GPU kernels read half precision and count in float32, so the batch need not be converted.
    unconverted = from_logits and offset is None and input.is_cuda
    images = images and offset is None and from_logits and input.dim() > 2 and input.is_contiguous()
    images = images and (task == "multiclass" or (weight is None and pos_weight is None))
    logits = _one_row_a_label(input if unconverted else input.to(dtype), task, scores=True, images=images)
    if not from_logits:
        logits = _to_logits(logits, task)
    if offset is not None:
        logits = logits + (offset[1] - offset[0] if task == "binary" else offset)
    soft = task == "multiclass" and target.is_floating_point()
    if sample_weight is None and weight is None and pos_weight is None and input.is_cuda and not soft:  # nor of labels
        return FlatBatch(logits, _one_row_a_label(target, task, images=images), ignore_index)

    shape = target.shape[:1] + target.shape[2:] if soft else target.shape
    if all_count or soft:
        y, counted = target, _ones(shape, dtype, target.device)
    else:
        y, counted = dense(target, ignore_index, dtype)
    if sample_weight is not None:
        sample_weight = checks.check_weights(sample_weight, tuple(shape))
        checks.check_bounds("sample_weight", sample_weight, low=0.0, open_high=True)
        counted = counted * sample_weight.to(dtype)
    y = _one_row_a_label(y, task, scores=soft, images=images)
    counted = _one_row_a_label(counted, task, images=images)
    y = y.to(dtype) if y.is_floating_point() else y.long()
    if pos_weight is not None:
        vector = torch.as_tensor(pos_weight, dtype=dtype, device=input.device)
        checks.check_per_class("pos_weight", vector, y.shape[-1] if task == "multilabel" else 1)
        counted = counted * (1 + (vector.reshape(()) if task == "binary" else vector).sub(1) * y)
    if weight is None:
        return FlatBatch(logits, y, counted)
    apart = (counted, weight) if task == "multiclass" and label_smoothing else None
    if soft:
        return FlatBatch(logits, y * weight.reshape(-1, *[1] * (y.dim() - 2)), counted, apart)
    own = weight if task == "multilabel" else weight[y.long()]
    if task == "binary" and y.is_floating_point():
        own = weight[0] + (weight[1] - weight[0]) * y
    return FlatBatch(logits, y, counted * own, apart)


def _ones(shape: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Weights of 1, read-only: small batches on a CPU share one tensor."""
    if device.type == "cpu" and not torch.compiler.is_compiling() and prod(shape) <= CACHED_ONES:
        return _cached_ones(tuple(shape), dtype)
    return torch.ones(shape, dtype=dtype, device=device)


@lru_cache(16)
def _cached_ones(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    with torch.inference_mode(False):
        return torch.ones(shape, dtype=dtype)


def _classes_second(input: Tensor, target: Tensor, task: Task, class_dim: int) -> tuple[Tensor, Tensor]:
    """Input and, if it has a score per class, target, with classes moved to dimension 1."""
    checks.check_floating("input", input)
    if not -input.dim() <= class_dim < input.dim():
        raise ValueError(f"class_dim must be a dimension of the input {tuple(input.shape)}, got {class_dim}")
    if task == "binary" and input.shape == target.shape:  # no dimension of classes
        return input, target
    if task == "multilabel" or (target.is_floating_point() and target.shape == input.shape):
        target = target.movedim(class_dim, 1)
    return input.movedim(class_dim, 1), target


def _checked(
    input: Tensor, target: Tensor, task: Task, ignore_index: int, from_logits: bool
) -> tuple[Tensor, Tensor, bool]:
    """Input, target, and whether some label may be ignored (without another pass over the labels)."""
    checks.check_floating("input", input)
    soft = isinstance(target, Tensor) and task == "multiclass" and target.is_floating_point() and target.dim() > 1
    checks.check_labels(target, soft_allowed=task != "multiclass" or soft)
    if not target.is_floating_point() and target.dtype != torch.long:
        target = target.long()  # ignore_index -100 is 156 to an unsigned byte
    if task == "multiclass":
        checks.check_class_shapes(input, target[:, 0] if soft else target)
        if not from_logits:
            checks.check_probabilities(input, sum_to_one=True)
        else:
            checks.check_not_probabilities(input)
        if soft:
            checks.check_same_shape("input", input, target)
            checks.check_probabilities(target, sum_to_one=True, name="target")
            return input, target, True
        return input, target, checks.check_label_range(target, input.shape[1], ignore_index)
    if task == "binary" and input.dim() == target.dim() + 1 and input.shape[1] in (1, 2):
        two = input.shape[1] == 2  # two logits: their difference is the logit of class 1
        input = input[:, 1] - (input[:, 0] if from_logits else 0.0) if two else input.squeeze(1)
    checks.check_same_shape("input", input, target)
    if task == "multilabel" and input.dim() < 2:
        raise ValueError(
            f"input must have shape (N, L) or (N, L, d1, ...), got {tuple(input.shape)}; "
            "for one label use task='binary'"
        )
    if not from_logits:
        checks.check_probabilities(input, sum_to_one=False)
    return input, target, checks.check_binary_values(target, ignore_index)


def _one_row_a_label(x: Tensor, task: Task, *, scores: bool = False, images: bool = False) -> Tensor:
    """Labels (M,) or (M, L), class scores (M, C); the latter two as (N, L, S) if `images` keep their form."""
    if task == "multilabel" or (task == "multiclass" and scores):
        return x if x.dim() == 2 else x.flatten(2) if images else rows_of_images(x)
    return x if x.dim() == 1 else x.reshape(-1)


def _to_logits(p: Tensor, task: Task) -> Tensor:
    if task == "multiclass":
        return p.clamp_min(torch.finfo(p.dtype).tiny).log()
    return p.logit(eps=torch.finfo(p.dtype).eps)


def per_class(name: str, value: Any, classes: int, device: torch.device, dtype: torch.dtype) -> Any:
    """A per-class option as a tensor of the right length; beta alone may be one number."""
    if value is None or (name == "beta" and isinstance(value, (int, float))):
        return value
    vector = torch.as_tensor(value, dtype=dtype, device=device)
    checks.check_per_class(name, vector, classes, number_allowed=name == "beta")
    return vector


def rows_of_images(x: Tensor) -> Tensor:
    """(N, C, d1, ...) -> (M, C), a row per pixel: a view if the classes of a pixel are contiguous, else a copy.

    On a CPU the copy keeps every class contiguous, which compiled loops read fastest.

    >>> rows_of_images(torch.arange(8).reshape(2, 2, 2)).tolist()
    [[0, 2], [1, 3], [4, 6], [5, 7]]
    """
    last = x.movedim(1, -1)
    if x.is_cuda or last.is_contiguous():
        return last.reshape(-1, x.shape[1])
    return x.transpose(0, 1).reshape(x.shape[1], -1).t()


@dataclass(frozen=True)
class Sums:
    """Soft counts, and the weighted sum of the cross-entropies with the sum of the weights.

    `rows` is the number of rows of each class (with and without each label, for multilabel problems); None if it
    equals the label counts or was not requested.

    >>> c = Confusion.soft(torch.tensor([[0.75, 0.25], [0.5, 0.5]]), torch.tensor([0, 1]))
    >>> sums = Sums(c, entropy=torch.tensor(0.9), weight=torch.tensor(2.0))
    >>> sums.counts
    tensor([0.7500, 0.5000, 1.0000, 1.0000, 1.2500, 0.7500])
    >>> (sums + sums).confusion.total
    tensor(4.)
    """

    confusion: Confusion
    entropy: Tensor
    weight: Tensor
    rows: Tensor | None = None

    @property
    def counts(self) -> Tensor:
        """The counts as one vector: 3 C numbers, 4 L for separate labels, and C^2 if there is a matrix."""
        c = self.confusion
        parts = [c.tp, c.actual, c.predicted, *([c.total] if c.multilabel else [])]
        if isinstance(c._matrix, Tensor):
            parts.append(c._matrix)
        return torch.cat([part.reshape(-1) for part in parts])

    def with_counts(self, counts: Tensor) -> "Sums":
        """The same kind of sums with other `counts`."""
        c = self.confusion
        shape, size = c.tp.shape, c.tp.numel()
        vectors = counts[: (3 + c.multilabel) * size].reshape(-1, *shape)
        tp, actual, predicted = vectors[0], vectors[1], vectors[2]
        matrix = counts[3 * size :].reshape(c._matrix.shape) if isinstance(c._matrix, Tensor) else None
        total = vectors[3] if c.multilabel else actual.sum(-1)
        given = {"tp": tp, "actual": actual, "predicted": predicted, "total": total}
        return replace(self, confusion=c.replaced(**given, present=actual > 0, matrix=matrix))

    @property
    def rows_behind_classes(self) -> Tensor:
        """`rows`, or the label counts if rows are unweighted."""
        if self.rows is not None:
            return self.rows
        c = self.confusion
        actual = c.actual if c.actual.dim() == 1 else c.actual[0]
        if not c.multilabel or c.outcomes != 2:
            return actual
        return torch.cat([actual, (c.total if c.total.dim() == 1 else c.total[0]) - actual])

    @property
    def vector(self) -> Tensor:
        """All numbers as one vector, for a single message."""
        rows = [] if self.rows is None else [self.rows]
        return torch.cat([self.counts, self.entropy.reshape(1), self.weight.reshape(1), *rows])

    def with_vector(self, vector: Tensor) -> "Sums":
        size = self.counts.numel()
        rows = None if self.rows is None else vector[size + 2 :]
        return replace(self.with_counts(vector[:size]), entropy=vector[size], weight=vector[size + 1], rows=rows)

    def alone(self) -> "Sums":
        """The sums without a reference to the batch, which an unbuilt matrix would keep alive."""
        return self.with_vector(self.vector)

    def __add__(self, other: "Sums") -> "Sums":
        return self.with_vector(self.vector + other.vector)

    def __radd__(self, other: object) -> "Sums":  # so that sum() works, which starts from 0
        return self if other == 0 else NotImplemented


def rows_behind(y: Tensor, weight: Tensor, task: Task, classes: int) -> Tensor:
    """Number of rows with a weight above 0 per class; for multilabel problems, with and without each label.

    >>> rows_behind(torch.tensor([0, 1, 1]), torch.tensor([2.0, 0.5, 0.0]), "binary", 2)
    tensor([1., 1.])
    """
    counted = (weight > 0).to(weight.dtype)
    if is_soft(task, y):
        return (counted[:, None] * y).sum(0)
    if task == "multilabel" or y.is_floating_point():
        yes = (counted * y).sum(0)
        no = counted.sum(0) - yes
        return torch.cat([yes, no]) if task == "multilabel" else torch.stack([no, yes])
    return sum_by_label(counted, y, classes)
