"""Sums: everything a loss needs of a batch, all of which adds up over batches, micro-batches and ranks.

A metric of the sum is not the mean of the metrics, so that these numbers, and not losses, are what is shared.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from evalign.confusion import Confusion, Task
from evalign.numerics import sum_by_label


@dataclass(frozen=True)
class Sums:
    """Soft counts, and the weighted sum of the cross-entropies with the sum of the weights.

    `rows` says how many rows stand behind each class (behind the yes and the no of each label) where weights make the
    label counts say something else; None where they do not, or where nobody asked.

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
        """The counts as one vector: 3 C numbers, 4 L with labels of their own, and C^2 if the matrix is there."""
        c = self.confusion
        parts = [c.tp, c.actual, c.predicted, *([c.total] if c.multilabel else [])]
        if isinstance(c._matrix, Tensor):
            parts.append(c._matrix)
        return torch.cat([part.reshape(-1) for part in parts])

    def with_counts(self, counts: Tensor) -> "Sums":
        """The same kind of sums, with other numbers in place of `counts`."""
        c = self.confusion
        shape, size = c.tp.shape, c.tp.numel()
        vectors = counts[: (3 + c.multilabel) * size].reshape(-1, *shape)
        tp, actual, predicted = vectors[0], vectors[1], vectors[2]
        matrix = counts[3 * size :].reshape(c._matrix.shape) if isinstance(c._matrix, Tensor) else None
        confusion = Confusion(
            tp,
            actual,
            predicted,
            vectors[3] if c.multilabel else actual.sum(-1),
            present=actual > 0,
            multilabel=c.multilabel,
            matrix=matrix,
            outcomes=c.outcomes,
        )
        return replace(self, confusion=confusion)

    @property
    def rows_behind_classes(self) -> Tensor:
        """`rows`, or the label counts where rows have no weights."""
        if self.rows is not None:
            return self.rows
        c = self.confusion
        actual = c.actual if c.actual.dim() == 1 else c.actual[0]
        if not c.multilabel or c.outcomes != 2:
            return actual
        return torch.cat([actual, (c.total if c.total.dim() == 1 else c.total[0]) - actual])

    @property
    def vector(self) -> Tensor:
        """All numbers in one vector, which one message carries."""
        rows = [] if self.rows is None else [self.rows]
        return torch.cat([self.counts, self.entropy.reshape(1), self.weight.reshape(1), *rows])

    def with_vector(self, vector: Tensor) -> "Sums":
        size = self.counts.numel()
        rows = None if self.rows is None else vector[size + 2 :]
        return replace(self.with_counts(vector[:size]), entropy=vector[size], weight=vector[size + 1], rows=rows)

    def alone(self) -> "Sums":
        """Numbers only: without the batch, which a matrix that may still be asked for holds on to."""
        return self.with_vector(self.vector)

    def __add__(self, other: "Sums") -> "Sums":
        return self.with_vector(self.vector + other.vector)

    def __radd__(self, other: object) -> "Sums":  # so that sum() works, which starts from 0
        return self if other == 0 else NotImplemented


def rows_behind(y: Tensor, weight: Tensor, task: Task, classes: int) -> Tensor:
    """How many rows with a weight each class has; for multilabel problems those with and those without a label.

    >>> rows_behind(torch.tensor([0, 1, 1]), torch.tensor([2.0, 0.5, 0.0]), "binary", 2)
    tensor([1., 1.])
    """
    counted = (weight > 0).to(weight.dtype)
    if task == "multilabel":
        yes = (counted * y).sum(0)
        return torch.cat([yes, counted.sum(0) - yes])
    return sum_by_label(counted, y, classes)


def standing_for(value: Tensor, source: Tensor, scale: float | Tensor = 1.0) -> Tensor:
    """`value`, with the gradient of `scale * source`: a part of a sum stands for the whole of it.

    >>> part = torch.tensor(2.0, requires_grad=True)
    >>> whole = standing_for(torch.tensor(10.0), part, 5.0)
    >>> (whole**2).backward()
    >>> whole.item(), part.grad.item()
    (10.0, 100.0)
    """
    factor = torch.as_tensor(scale, dtype=source.dtype, device=source.device)
    return _StandingFor.apply(value.to(source.dtype), source, factor)  # type: ignore[no-any-return, no-untyped-call]


class _StandingFor(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(value: Tensor, source: Tensor, scale: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[2])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, None]:
        (scale,) = ctx.saved_tensors
        return None, grad * scale, None
