"""What networks put out, for every shape a task may have: one number a row, one a pair of a graph, or one a class."""

import itertools
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from evalign.confusion import Task

# (logits, labels, weights, temperature) -> what a stage with `metric` minimises beside its anchor; vmappable
Term = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
Watch = Callable[[Tensor, Tensor, Tensor], Tensor]  # logits, labels, weights -> (k,) numbers to keep of every epoch


def joined(parts: Iterable[Tensor], rows: int, dim: int = 0) -> Tensor:
    """`torch.cat` of parts that are made one after the other, `rows` long in all.

    The room for all is taken once: small results kept between the large tensors that come and go for each part would
    tear the free memory into pieces that no large tensor fits into, and every part would take new room.

    >>> joined((torch.full((1, n), float(n)) for n in (1, 2)), 3, dim=1)
    tensor([[1., 2., 2.]])
    """
    parts = iter(parts)
    first = next(parts)
    whole = first.new_empty(*first.shape[:dim], rows, *first.shape[dim + 1 :])
    start = 0
    for part in itertools.chain([first], parts):
        whole.narrow(dim, start, part.shape[dim]).copy_(part)
        start += part.shape[dim]
    return whole


def flat(logits: Tensor, y: Tensor, weight: Tensor, task: Task) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, labels and weights as an objective takes them.

    Binary logits (M,), (M, 1) or (F, E) and labels (M,) or (F, E) become vectors, a row's weight that of all its
    pairs. Multiclass ones, (M, C) and (M,), stay.

    >>> z, y, w = flat(torch.zeros(2, 3), torch.ones(2, 3), torch.tensor([1.0, 5.0]), "binary")
    >>> z.shape, w.tolist()
    (torch.Size([6]), [1.0, 1.0, 1.0, 5.0, 5.0, 5.0])
    """
    if task != "binary":
        return logits, y, weight
    if logits.numel() != y.numel():
        raise ValueError(
            f"a binary task has one logit for every label, got logits {tuple(logits.shape)} and labels "
            f"{tuple(y.shape)}; give the network one output"
        )
    if weight.dim() < y.dim():
        weight = weight.reshape(*weight.shape, *([1] * (y.dim() - weight.dim()))).expand(y.shape)
    return logits.reshape(-1), y.reshape(-1), weight.reshape(-1)


def probabilities_of(logits: Tensor, task: Task) -> Tensor:
    """Probabilities (n, C) of flat logits; (n, 2) of binary ones.

    >>> probabilities_of(torch.zeros(1), "binary")
    tensor([[0.5000, 0.5000]])
    """
    if task != "binary":
        return logits.softmax(-1)
    p = logits.sigmoid()
    return torch.stack([1 - p, p], -1)


def mean_over_members(loss: Callable[[Tensor], Tensor], logits: Tensor, task: Task) -> Tensor:
    """The loss of logits; of an ensemble's (members, n, C) the mean of its members' losses, each of its own counts.

    >>> mean_over_members(lambda z: z.sum(), torch.ones(3, 2, 5), "multiclass")
    tensor(10.)
    """
    if task != "multiclass" or logits.dim() < 3:
        return loss(logits)
    return torch.stack([loss(own) for own in logits]).mean()


def with_offset(logits: Tensor, offset: Tensor | None, task: Task) -> Tensor:
    """Flat logits with one number added for every class; a binary logit is the difference of two.

    >>> with_offset(torch.zeros(1), torch.tensor([1.0, 3.0]), "binary")
    tensor([2.])
    """
    if offset is None:
        return logits
    offset = offset.to(logits)
    return logits + (offset[1] - offset[0] if task == "binary" else offset)
