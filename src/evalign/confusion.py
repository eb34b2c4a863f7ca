"""Confusion: additive counts of a classifier's outcomes, hard or soft.

Counts add up over batches, shards and ranks; a metric is applied once, at the end. Only matrix-weighted metrics need
more than three vectors (tp, actual, predicted) and the total, so the state is O(d).
"""

from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor

from evalign import checks
from evalign.checks import counting_dtype, sum_by_label

Task = Literal["binary", "multiclass", "multilabel"]
TASKS: tuple[Task, ...] = ("binary", "multiclass", "multilabel")


class Confusion:
    """Per-class counts of length C: `tp, fp, fn, tn, actual, predicted`, and the scalar `total`.

    With C[i, j] the weight of samples with label i assigned to class j: tp_k = C[k, k],
    actual_k = sum_j C[k, j], predicted_k = sum_i C[i, k]. Binary problems have C = 2 and class 1 is positive.
    Vectors may have leading dimensions (one per threshold of a grid); metrics reduce the last one. In a
    `multilabel` confusion every label is a separate binary problem, and `total` has one entry per label.

    >>> c = Confusion.hard(torch.tensor([0, 1, 1, 2]), torch.tensor([0, 1, 2, 2]), num_classes=3)
    >>> c.tp.tolist(), c.fp.tolist(), c.fn.tolist()
    ([1.0, 1.0, 1.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0])
    >>> (c + c).total
    tensor(8., dtype=torch.float64)
    """

    def __init__(
        self,
        tp: Tensor,
        actual: Tensor,
        predicted: Tensor,
        total: Tensor,
        *,
        present: Tensor | None = None,
        multilabel: bool = False,
        matrix: Tensor | Callable[[], Tensor] | None = None,
        outcomes: int | None = None,
    ) -> None:
        self.tp, self.actual, self.predicted, self.total = tp, actual, predicted, total
        # Classes in a macro mean; None means all. Soft counts leave out a class without labels: its score would be
        # a constant 0, and the loss could never reach 0.
        self.present = present
        self.multilabel = multilabel
        self._matrix = matrix
        # Number of outcomes of a sample, for label smoothing: C for one-vs-rest problems of C classes.
        self.outcomes = outcomes or (2 if multilabel else tp.shape[-1])

    @classmethod
    def of_matrix(cls, matrix: Tensor, *, present: Tensor | None = None) -> "Confusion":
        """The counts of a matrix (..., C, C), rows = labels, columns = predictions.

        >>> Confusion.of_matrix(torch.tensor([[3.0, 1.0], [0.0, 2.0]])).predicted
        tensor([3., 3.])
        """
        actual, predicted = matrix.sum(-1), matrix.sum(-2)
        tp, total = matrix.diagonal(dim1=-2, dim2=-1), matrix.sum((-2, -1))
        return cls(tp, actual, predicted, total, present=present, matrix=matrix)

    @property
    def fp(self) -> Tensor:
        return self.predicted - self.tp

    @property
    def fn(self) -> Tensor:
        return self.actual - self.tp

    @property
    def tn(self) -> Tensor:
        return self.totals - self.actual - self.predicted + self.tp

    @property
    def totals(self) -> Tensor:
        """The total beside every class, (..., 1), or the one of each label."""
        return self.total if self.multilabel else self.total.unsqueeze(-1)

    @property
    def num_classes(self) -> int:
        return self.tp.shape[-1]

    @property
    def matrix(self) -> Tensor:
        """The (C, C) matrix, rows = labels, columns = predictions, built on first access."""
        if self._matrix is None:
            raise ValueError(
                "this Confusion holds no matrix: multilabel counts have none, and a sum has one only if "
                "`.matrix` was read on every part before adding"
            )
        if not isinstance(self._matrix, Tensor):
            self._matrix = self._matrix()
        return self._matrix

    @property
    def built_matrix(self) -> Tensor | None:
        """The matrix if it was given or has been built, else None."""
        return self._matrix if isinstance(self._matrix, Tensor) else None

    def __add__(self, other: "Confusion") -> "Confusion":
        if not isinstance(other, Confusion):
            return NotImplemented
        if self.num_classes != other.num_classes or self.multilabel != other.multilabel:
            raise ValueError(
                f"only confusions of the same kind can be added, got {self.num_classes} and {other.num_classes} "
                f"classes, multilabel {self.multilabel} and {other.multilabel}"
            )
        present = None
        if self.present is not None and other.present is not None:
            present = self.present | other.present
        # A matrix that was never built is dropped: building it later would need every batch in memory.
        matrix = None
        if isinstance(self._matrix, Tensor) and isinstance(other._matrix, Tensor):
            matrix = self._matrix + other._matrix
        tp, actual = self.tp + other.tp, self.actual + other.actual
        predicted, total = self.predicted + other.predicted, self.total + other.total
        return self.replaced(tp=tp, actual=actual, predicted=predicted, total=total, present=present, matrix=matrix)

    def __radd__(self, other: object) -> "Confusion":  # so that sum() works, which starts from 0
        return self if other == 0 else NotImplemented

    def __repr__(self) -> str:
        kind = "multilabel, " if self.multilabel else ""
        return f"Confusion({kind}classes={self.num_classes}, total={self.total.detach().sum().item():g})"

    def unbind(self) -> Iterator["Confusion"]:
        """One Confusion per entry of the first leading dimension (a threshold grid)."""
        for i in range(self.tp.shape[0]):
            present = self.present
            if present is not None and present.dim() == self.tp.dim():
                present = present[i]
            tp, actual, predicted, total = self.tp[i], self.actual[i], self.predicted[i], self.total[i]
            yield self.replaced(tp=tp, actual=actual, predicted=predicted, total=total, present=present, matrix=None)

    def replaced(self, **changes: Any) -> "Confusion":
        """The same kind of counts with some constructor arguments replaced."""
        names = ("tp", "actual", "predicted", "total", "present", "multilabel", "outcomes")
        return Confusion(**{"matrix": self._matrix} | {name: getattr(self, name) for name in names} | changes)

    def one_vs_rest(self) -> "Confusion":
        """Every class as a separate two-class problem: vectors of shape (..., C, 2)."""
        total = self.totals.expand_as(self.tp)
        return Confusion(
            torch.stack([self.tn, self.tp], -1),
            torch.stack([total - self.actual, self.actual], -1),
            torch.stack([total - self.predicted, self.predicted], -1),
            total,
        )

    def smoothed(self, label_smoothing: float) -> "Confusion":
        """The counts for labels (1 - e) one-hot + e / C; counts are linear in the labels, so no pass over data."""
        if not label_smoothing:
            return self
        keep, spread = 1 - label_smoothing, label_smoothing / self.outcomes
        built = self._matrix
        matrix = None if built is None else lambda: keep * self.matrix + spread * self.predicted.unsqueeze(-2)
        tp, actual = keep * self.tp + spread * self.predicted, keep * self.actual + spread * self.totals
        return self.replaced(tp=tp, actual=actual, matrix=matrix)

    @classmethod
    def hard(
        cls,
        predicted: Tensor,
        target: Tensor,
        num_classes: int | None = None,
        *,
        sample_weight: Tensor | None = None,
        ignore_index: int = -100,
        multilabel: bool = False,
    ) -> "Confusion":
        """Counts of predicted labels, of any one shape; `multilabel` takes 0/1 arrays (N, L).

        >>> Confusion.hard(torch.tensor([[1, 0]]), torch.tensor([[1, 1]]), multilabel=True).tp
        tensor([1., 0.], dtype=torch.float64)
        """
        checks.check_labels(target)
        checks.check_labels(predicted)
        checks.check_same_shape("predicted", predicted, target)
        predicted, target = predicted.long(), target.long()  # ignore_index -100 is 156 to an unsigned byte
        precise = torch.float32 if target.device.type == "mps" else torch.float64  # whole numbers stay exact
        if multilabel:
            num_classes = 2
        if num_classes is None:
            labels = torch.stack([target, predicted])[:, target != ignore_index]
            num_classes = max(2, 1 + int(labels.max())) if labels.numel() else 2
        checks.check_label_range(target, num_classes, ignore_index)
        # The prediction for an ignored entry may be anything.
        checks.check_label_range(torch.where(target == ignore_index, 0, predicted), num_classes, None, name="predicted")
        weight, y = _weights_and_labels(target, sample_weight, ignore_index, precise)
        chosen = torch.where(target == ignore_index, 0, predicted).long()
        if multilabel:
            return _independent(chosen.to(precise), y, weight, multilabel=True, soft=False)
        y, chosen, weight = y.reshape(-1), chosen.reshape(-1), weight.reshape(-1)
        size = num_classes

        def add_up(index: Tensor, values: Tensor, length: int) -> Tensor:
            return values.new_zeros(length).scatter_add(0, index, values)

        actual = add_up(y, weight, size)
        return cls(
            add_up(y, weight * (y == chosen), size),
            actual,
            add_up(chosen, weight, size),
            actual.sum(),  # weight.sum() rounds differently, and the share of a single class must be exactly 1
            matrix=lambda: add_up(y * size + chosen, weight, size * size).reshape(size, size),
        )

    @classmethod
    def soft(
        cls,
        membership: Tensor,
        target: Tensor,
        *,
        sample_weight: Tensor | None = None,
        ignore_index: int = -100,
        task: Task | None = None,
    ) -> "Confusion":
        """Counts of soft membership, differentiable; a class without a label is left out of macro means.

        `membership` (N, C, ...) with `target` (N, ...) is multiclass; one shape for both is binary (the
        membership of class 1) when it is one-dimensional and multilabel otherwise, unless `task` says so. A floating
        target holds shares: of the positive class, or for task="multiclass" of every class, (N, C, ...).

        >>> Confusion.soft(torch.tensor([[0.75, 0.25], [0.5, 0.5]]), torch.tensor([0, 1])).matrix
        tensor([[0.7500, 0.2500],
                [0.5000, 0.5000]])
        """
        checks.check_floating("membership", membership)
        checks.check_labels(target, soft_allowed=True)
        if task is None:
            same = membership.shape == target.shape
            task = "multiclass" if not same else "binary" if membership.dim() == 1 else "multilabel"
        checks.check_choice("task", task, TASKS)
        membership = membership.to(counting_dtype(membership.dtype))
        if task == "multiclass" and target.is_floating_point():
            return cls._of_shares(membership, target.to(membership.dtype), sample_weight)
        target = target.to(membership.dtype) if target.is_floating_point() else target.long()
        weight, y = _weights_and_labels(target, sample_weight, ignore_index, membership.dtype)
        if task != "multiclass":
            checks.check_same_shape("membership", membership, target)
            checks.check_binary_values(target, ignore_index)
            return _independent(membership, y, weight, multilabel=task == "multilabel", soft=True)
        checks.check_class_shapes(membership, target, name="membership")
        checks.check_label_range(target, membership.shape[1], ignore_index)
        g = membership.movedim(1, -1).reshape(-1, membership.shape[1])
        y, weight = y.reshape(-1), weight.reshape(-1)
        size = g.shape[1]
        actual = sum_by_label(weight, y, size)
        return cls(
            sum_by_label(weight * g.gather(1, y[:, None])[:, 0], y, size),
            actual,
            (g * weight[:, None]).sum(0),  # weight @ g would be rounded to half precision under autocast
            actual.sum(),
            present=actual > 0,
            matrix=lambda: sum_by_label(g * weight[:, None], y, size),
        )

    @classmethod
    def _of_shares(cls, membership: Tensor, shares: Tensor, sample_weight: Tensor | None) -> "Confusion":
        """Counts of soft membership and soft labels, (N, C, ...) both: tp_k = sum_i w_i y_ik g_ik."""
        checks.check_same_shape("membership", membership, shares)
        g, y = (x.movedim(1, -1).reshape(-1, x.shape[1]) for x in (membership, shares))
        if sample_weight is not None:
            expected = (shares.shape[0], *shares.shape[2:])
            y = y * checks.check_weights(sample_weight, expected).to(y.dtype).reshape(-1, 1)
        actual = y.sum(0)
        return cls(
            (y * g).sum(0),
            actual,
            (g * y.sum(1, keepdim=True)).sum(0),
            actual.sum(),
            present=actual > 0,
            matrix=lambda: (y.unsqueeze(2) * g.unsqueeze(1)).sum(0),
        )

    @classmethod
    def soft_grid(
        cls,
        membership: Tensor,
        target: Tensor,
        task: Task,
        *,
        sample_weight: Tensor | None = None,
        ignore_index: int = -100,
    ) -> "Confusion":
        """Soft counts for every threshold of a grid: membership (G, ...) as `membership.grid` makes it.

        Multiclass membership (G, N, C, ...) is treated as one-vs-rest, since a class's membership at its own
        threshold does not determine the others: the result is multilabel, with one problem per class.

        >>> Confusion.soft_grid(torch.tensor([[0.2, 0.9], [0.1, 0.6]]), torch.tensor([0, 1]), "binary").tp
        tensor([[0.8000, 0.9000],
                [0.9000, 0.6000]])
        """
        checks.check_labels(target, soft_allowed=True)
        checks.check_choice("task", task, TASKS)
        options = {"sample_weight": sample_weight, "ignore_index": ignore_index}
        if task == "multiclass":
            parts = [cls.soft(m, target, task=task, **options) for m in membership]  # type: ignore[arg-type]
            columns = zip(*((c.tp, c.actual, c.predicted, c.total.expand_as(c.tp)) for c in parts), strict=True)
            tp, actual, predicted, total = (torch.stack(column) for column in columns)
            return cls(
                tp, actual, predicted, total, present=parts[0].present, multilabel=True, outcomes=parts[0].num_classes
            )
        membership = membership.to(counting_dtype(membership.dtype))
        checks.check_same_shape("membership of each threshold", membership[0], target)
        checks.check_binary_values(target, ignore_index)
        weight, y = _weights_and_labels(target, sample_weight, ignore_index, membership.dtype)
        return _independent(membership, y, weight, multilabel=task == "multilabel", soft=True)


def _weights_and_labels(
    target: Tensor, sample_weight: Tensor | None, ignore_index: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Weights and labels with 0 for ignored labels."""
    valid = target != ignore_index
    weight = valid.to(dtype)
    if sample_weight is not None:
        weight = weight * checks.check_weights(sample_weight, tuple(target.shape)).to(dtype)
    y = torch.where(valid, target, 0)
    return weight, y.to(dtype) if y.is_floating_point() else y.long()


def _independent(s: Tensor, y: Tensor, weight: Tensor, *, multilabel: bool, soft: bool) -> Confusion:
    """Counts of binary problems from membership `s` (leading grid dimensions allowed): all samples are one
    problem (binary) or every column is one (multilabel)."""
    over = tuple(i - y.dim() for i in range(y.dim()) if i != 1) if multilabel else tuple(range(-y.dim(), 0))
    labels = weight * y
    tp, predicted = (s * labels).sum(over), (s * weight).sum(over)
    actual, total = labels.sum(over).expand_as(tp), weight.sum(over).expand_as(tp)
    if multilabel:
        return Confusion(tp, actual, predicted, total, present=actual > 0 if soft else None, multilabel=True)
    two = Confusion(
        tp[..., None], actual[..., None], predicted[..., None], total[..., None], multilabel=True
    ).one_vs_rest()
    actual = two.actual[..., 0, :]
    tp, predicted = two.tp[..., 0, :], two.predicted[..., 0, :]

    def matrix() -> Tensor:
        return torch.stack([torch.stack([tp[..., 0], actual[..., 0] - tp[..., 0]], -1),
                            torch.stack([actual[..., 1] - tp[..., 1], tp[..., 1]], -1)], -2)  # fmt: skip

    return Confusion(tp, actual, predicted, total, present=actual > 0 if soft else None, matrix=matrix)
