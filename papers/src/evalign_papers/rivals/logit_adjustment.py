"""Logit-adjusted cross-entropy (Menon, Jayasumana, Rawat, Jain, Veit and Kumar 2021, Eq. 10)."""

from torch import Tensor, nn

from evalign import checks, objective
from evalign.confusion import Task
from evalign_papers.rivals.inputs import PerClass, classes_of, counts_of, flat

TASKS: tuple[Task, ...] = ("multiclass", "binary")


def logit_adjusted_loss(
    logits: Tensor,
    target: Tensor,
    counts: PerClass,
    *,
    task: Task = "multiclass",
    tau: float = 1.0,
    sample_weight: Tensor | None = None,
) -> Tensor:
    """L = mean of -log( exp(f_y + tau log pi_y) / sum_y' exp(f_y' + tau log pi_y') ), pi_y = n_y / n.

    `counts` holds n_y, the training rows of each class; one without rows counts as if it had one. A binary logit is
    read as the two logits (0, z). Predict with the plain logits: that is the adjusted, class-balanced classifier.

    >>> import torch
    >>> logits, target = torch.zeros(1, 2), torch.tensor([1])
    >>> logit_adjusted_loss(logits, target, counts=[30, 10]), logit_adjusted_loss(logits, target, [30, 10], tau=0.0)
    (tensor(1.3863), tensor(0.6931))
    """
    return _adjusted(logits, target, _offset(counts, task, tau), task, sample_weight)


class LogitAdjustedLoss(nn.Module):
    """Module form of `logit_adjusted_loss`; make it with `counts=class_counts(training_labels)`.

    >>> import torch
    >>> LogitAdjustedLoss([30, 10], task="binary")(torch.zeros(1), torch.tensor([1]))
    tensor(1.3863)
    """

    offset: Tensor

    def __init__(self, counts: PerClass, *, task: Task = "multiclass", tau: float = 1.0) -> None:
        super().__init__()
        # The offset and not the counts: those would overflow when a network is made float16 with its loss.
        self.register_buffer("offset", _offset(counts, task, tau))
        self.task: Task = task

    def forward(self, logits: Tensor, target: Tensor, sample_weight: Tensor | None = None) -> Tensor:
        return _adjusted(logits, target, self.offset, self.task, sample_weight)


def _offset(counts: PerClass, task: Task, tau: float) -> Tensor:
    """tau log pi, one entry per class."""
    checks.check_choice("task", task, TASKS)
    checks.check_number("tau", tau)
    n = counts_of(counts)
    return tau * (n / n.sum()).log()


def _adjusted(logits: Tensor, target: Tensor, offset: Tensor, task: Task, sample_weight: Tensor | None) -> Tensor:
    batch = flat(logits, target, sample_weight, task)
    checks.check_per_class("counts", offset, classes_of(batch, task), number_allowed=False)
    offset = offset.to(batch.logits)
    z = batch.logits + (offset[1] - offset[0] if task == "binary" else offset)
    return objective.cross_entropy(z, batch.y, batch.weight, task)
