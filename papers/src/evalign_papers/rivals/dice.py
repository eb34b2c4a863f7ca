"""Dice: the overlap of predicted and true sets (Milletari, Navab and Ahmadi 2016, V-Net, Sec. 3).

BtG supplement, Tables 7 and 12 ("Dice" on logits, "Dice^s" on sigmoid outputs); EAST Table 1.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from evalign import checks
from evalign.checks import safe_divide
from evalign.confusion import TASKS, Task
from evalign_papers.rivals.inputs import flat, weighted_mean


def dice_loss(
    logits: Tensor,
    target: Tensor,
    *,
    task: Task = "multiclass",
    squash: bool = True,
    power: int = 2,
    per_sample: bool = False,
    sample_weight: Tensor | None = None,
) -> Tensor:
    """L = 1 - D, D = 2 sum_i p_i g_i / (sum_i p_i^2 + sum_i g_i^2), sums over the batch.

    p is the sigmoid or softmax of the logits and g the 0/1 label. Binary problems take D of the positive class,
    the others its mean over the classes (labels) that the batch holds: D of an absent one is a constant 0. So is
    D of a binary batch without positives; its loss is 1, its gradient 0. A batch without weight gives 0.

    squash: False takes p = z, BtG's "Dice" on logits. D is then largest at z = g, so cut such scores at 1/2.
    power: of p in the denominator; 1 makes D the soft F1.
    per_sample: D of each sample, then their mean, as in BtG's code. With one output per
        sample D_i = 2 p g / (p^2 + g^2) is 0 for every negative, whatever p is: nothing is learnt from negatives,
        and "all positive" is the optimum. (The code also leaves out the 2: its value is (1 + L) / 2.)

    >>> logits, target = torch.tensor([2.0, -1.0, 0.0]), torch.tensor([1, 0, 1])
    >>> dice_loss(logits, target, task="binary")
    tensor(0.1086)
    >>> dice_loss(logits, target, task="binary", per_sample=True)
    tensor(0.4027)
    """
    _check_options(task, squash, power)
    z, y, w = flat(logits, target, sample_weight, task)
    p = z if not squash else z.softmax(-1) if task == "multiclass" else z.sigmoid()
    g = (F.one_hot(y, z.shape[1]) if task == "multiclass" else y).to(z.dtype)
    if task == "multiclass":
        w = w.unsqueeze(1).expand_as(p)
    overlap, mass = 2 * w * p * g, w * (p**power + g)
    if per_sample:
        n = logits.shape[0]
        shape = (n, z.numel() // max(n, 1))  # -1 is ambiguous for an empty batch
        overlap, mass, each = (x.reshape(shape).sum(1) for x in (overlap, mass, w))
    else:
        columns = 1 if task == "binary" else z.shape[1]
        overlap, mass, each = (x.reshape(-1, columns).sum(0) for x in (overlap, mass, w * g))
        each = (each > 0).to(z.dtype)  # the mean over classes is not weighted
    score = weighted_mean(safe_divide(overlap, mass), each)
    return torch.where(w.sum() == 0, 0.0 * score, 1 - score)


class DiceLoss(nn.Module):
    """Module form of `dice_loss`.

    >>> DiceLoss()(torch.tensor([[3.0, 0.0], [0.0, 3.0]]), torch.tensor([0, 1]))
    tensor(0.0024)
    """

    def __init__(
        self, *, task: Task = "multiclass", squash: bool = True, power: int = 2, per_sample: bool = False
    ) -> None:
        super().__init__()
        _check_options(task, squash, power)
        self.task: Task = task
        self.squash, self.power, self.per_sample = squash, power, per_sample

    def forward(self, logits: Tensor, target: Tensor, sample_weight: Tensor | None = None) -> Tensor:
        return dice_loss(
            logits, target, task=self.task, squash=self.squash, power=self.power, per_sample=self.per_sample,
            sample_weight=sample_weight,
        )  # fmt: skip


def _check_options(task: Task, squash: bool, power: int) -> None:
    checks.check_choice("task", task, TASKS)
    if power not in (1, 2):
        raise ValueError(f"power must be 1 (soft F1) or 2 (V-Net), got {power!r}")
    if power == 1 and not squash:
        raise ValueError("power=1 needs squash=True, got squash=False: a sum of logits may be 0 or less; use power=2")
