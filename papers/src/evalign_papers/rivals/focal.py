"""Focal loss: cross-entropy with less weight on well-classified samples (Lin, Goyal, Girshick, He, Dollár 2017)."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from evalign import checks
from evalign.confusion import TASKS, Task
from evalign_papers.rivals.inputs import PerClass, classes_of, flat, vector_of, weighted_mean


def focal_loss(
    logits: Tensor,
    target: Tensor,
    *,
    task: Task = "multiclass",
    gamma: float = 2.0,
    alpha: float | PerClass | None = None,
    sample_weight: Tensor | None = None,
) -> Tensor:
    """FL = mean of -alpha_t (1 - p_t)^gamma log p_t, p_t the probability of the true class (Eq. 5).

    alpha: None is 1 for all. A number, of binary and multilabel problems, is alpha for positives and 1 - alpha for
    negatives (the paper's best: gamma 2 with alpha 0.25); a vector has one entry per class. gamma 0 is
    cross-entropy, with alpha the balanced one of Eq. 3. The mean is over the samples; alpha is not divided out.

    >>> focal_loss(torch.tensor([2.0, -1.0]), torch.tensor([1, 1]), task="binary", alpha=0.25)
    tensor(0.0880)
    """
    vector = _alpha(task, gamma, alpha)
    batch = flat(logits, target, sample_weight, task)
    z, y, w = batch
    if task == "multiclass":
        log_p = z.log_softmax(-1)
        true = F.one_hot(y, z.shape[1]).bool()
        # log(1 - p_t) summed over the others: 1 - p_t is 0 to rounding long before its logarithm matters.
        log_t, log_rest = log_p.gather(1, y.unsqueeze(1)).squeeze(1), log_p.masked_fill(true, -torch.inf).logsumexp(1)
    else:
        z_t = torch.where(y == 1, z, -z)
        log_t, log_rest = F.logsigmoid(z_t), F.logsigmoid(-z_t)
    each = -(gamma * log_rest).exp() * log_t if gamma else -log_t
    if vector is not None:
        per_class = vector.to(z)
        classes = 2 if task == "multilabel" else classes_of(batch, task)
        checks.check_per_class("alpha", per_class, classes, number_allowed=False)
        each = per_class[y] * each
    return weighted_mean(each, w)


class FocalLoss(nn.Module):
    """Module form of `focal_loss`.

    >>> FocalLoss(gamma=0.0)(torch.tensor([[0.0, 0.0, 0.0]]), torch.tensor([1]))
    tensor(1.0986)
    """

    alpha: Tensor | None

    def __init__(self, *, task: Task = "multiclass", gamma: float = 2.0, alpha: float | PerClass | None = None) -> None:
        super().__init__()
        self.register_buffer("alpha", _alpha(task, gamma, alpha))
        self.task: Task = task
        self.gamma = gamma

    def forward(self, logits: Tensor, target: Tensor, sample_weight: Tensor | None = None) -> Tensor:
        return focal_loss(
            logits, target, task=self.task, gamma=self.gamma, alpha=self.alpha, sample_weight=sample_weight
        )


def _alpha(task: Task, gamma: float, alpha: float | PerClass | None) -> Tensor | None:
    """Check the options; alpha as a vector over the classes, or over no and yes."""
    checks.check_choice("task", task, TASKS)
    checks.check_number("gamma", gamma, low=0.0)
    if not isinstance(alpha, (int, float)):
        return vector_of("alpha", alpha)
    if task == "multiclass":
        raise ValueError(f"alpha must have one entry per class for task='multiclass', got the number {alpha:g}")
    checks.check_number("alpha", alpha, low=0.0, high=1.0)
    return torch.tensor([1.0 - alpha, float(alpha)], dtype=torch.float64)
