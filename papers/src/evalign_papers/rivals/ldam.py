"""LDAM: cross-entropy with a wider margin for rarer classes (Cao, Wei, Gaidon, Arechiga and Ma 2019, Eq. 13)."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from evalign import checks, objective
from evalign.confusion import Task
from evalign_papers.rivals.inputs import PerClass, classes_of, counts_of, flat, vector_of, weight_of_labels

TASKS: tuple[Task, ...] = ("multiclass", "binary")


def ldam_loss(
    logits: Tensor,
    target: Tensor,
    counts: PerClass,
    *,
    task: Task = "multiclass",
    max_margin: float = 0.5,
    scale: float = 30.0,
    weight: PerClass | None = None,
    sample_weight: Tensor | None = None,
) -> Tensor:
    """L = mean of -log( e^{s (z_y - Delta_y)} / (e^{s (z_y - Delta_y)} + sum_{j != y} e^{s z_j}) ).

    Delta_j = C / n_j^{1/4}, with C such that the largest margin is `max_margin`; `counts` holds n_j, the training
    rows of each class. s is `scale`: the paper's logits are cosines, within [-1, 1], and 30 stretches them; for a
    plain linear layer s is only a unit of measure. `weight` has one entry per class (`drw_weights`), and the mean
    is weighted by it. A binary logit is read as the two logits (0, z).

    >>> ldam_loss(torch.tensor([[0.5, 0.0]]), torch.tensor([0]), counts=[1, 16], scale=1.0)  # Delta = 0.5, 0.25
    tensor(0.6931)
    """
    margins = ldam_margins(counts, max_margin=max_margin)
    return _ldam(logits, target, margins, task, scale, vector_of("weight", weight), sample_weight)


class LDAMLoss(nn.Module):
    """Module form of `ldam_loss`; make it with `counts=class_counts(training_labels)`.

    Deferred re-weighting (the paper's DRW) trains without weights first; towards the end set
    `loss.weight = drw_weights(counts)`.

    >>> loss = LDAMLoss([1, 16], scale=1.0)
    >>> logits, target = torch.tensor([[0.5, 0.0], [0.0, 0.25]]), torch.tensor([0, 1])
    >>> loss(logits, target)
    tensor(0.6931)
    >>> loss.weight = drw_weights([1, 16])
    """

    margins: Tensor
    weight: Tensor | None

    def __init__(
        self,
        counts: PerClass,
        *,
        task: Task = "multiclass",
        max_margin: float = 0.5,
        scale: float = 30.0,
        weight: PerClass | None = None,
    ) -> None:
        super().__init__()
        _check_options(task, scale)
        self.task: Task = task
        self.scale = scale
        # The margins and not the counts: those would overflow when a network is made float16 with its loss.
        self.register_buffer("margins", ldam_margins(counts, max_margin=max_margin))
        self.register_buffer("weight", vector_of("weight", weight))

    def forward(self, logits: Tensor, target: Tensor, sample_weight: Tensor | None = None) -> Tensor:
        return _ldam(logits, target, self.margins, self.task, self.scale, self.weight, sample_weight)


def ldam_margins(counts: PerClass, *, max_margin: float = 0.5) -> Tensor:
    """Delta_j = C / n_j^{1/4} with max_j Delta_j = `max_margin`; a class without rows counts as if it had one.

    >>> ldam_margins([1, 16, 81])
    tensor([0.5000, 0.2500, 0.1667], dtype=torch.float64)
    """
    checks.check_number("max_margin", max_margin, low=0.0)
    n = counts_of(counts)
    return max_margin * (n.min() / n) ** 0.25


def drw_weights(counts: PerClass, *, beta: float = 0.9999) -> Tensor:
    """(1 - beta) / (1 - beta^{n_j}), scaled to add up to C: the weights of the paper's second stage.

    1 - beta^n over 1 - beta is the effective number of samples (Cui et al. 2019).

    >>> drw_weights([1, 3], beta=0.5)
    tensor([1.2727, 0.7273], dtype=torch.float64)
    """
    checks.check_number("beta", beta, low=0.0, high=1.0, open_high=True)
    n = counts_of(counts)
    effective = -torch.expm1(n * math.log(beta)) if beta else torch.ones_like(n)
    return len(n) * (1 / effective) / (1 / effective).sum()


def _check_options(task: Task, scale: float) -> None:
    checks.check_choice("task", task, TASKS)
    checks.check_number("scale", scale, low=0.0, open_low=True)


def _ldam(
    logits: Tensor,
    target: Tensor,
    margins: Tensor,
    task: Task,
    scale: float,
    weight: Tensor | None,
    sample_weight: Tensor | None,
) -> Tensor:
    _check_options(task, scale)
    batch = flat(logits, target, sample_weight, task)
    z, y, _ = batch
    checks.check_per_class("counts", margins, classes_of(batch, task), number_allowed=False)
    margins = margins.to(z)
    binary = task == "binary"
    margin = torch.where(y == 1, margins[1], -margins[0]) if binary else F.one_hot(y, z.shape[1]) * margins
    return objective.cross_entropy(scale * (z - margin), y, weight_of_labels("weight", weight, batch, task), task)
