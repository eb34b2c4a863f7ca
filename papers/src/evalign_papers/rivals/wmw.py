"""The Wilcoxon-Mann-Whitney surrogate of AUROC (Yan, Dodier, Mozer and Wolniewicz 2003, ICML, objective R).

BtG Table 1 compares with it; gamma 0.2 and p 3 are BtG's.
"""

from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from evalign import checks
from evalign.checks import safe_divide
from evalign_papers.rivals.inputs import flat

Reduction = Literal["sum", "mean"]
REDUCTIONS: tuple[Reduction, ...] = ("sum", "mean")


def wmw_loss(
    logits: Tensor,
    target: Tensor,
    *,
    gamma: float = 0.2,
    p: float = 3.0,
    reduction: Reduction = "sum",
    squash: bool = False,
    as_published: bool = False,
    max_pairs: int = 2**22,
    sample_weight: Tensor | None = None,
) -> Tensor:
    """R = sum over positives i, negatives j of (-(x_i - x_j - gamma))^p where x_i - x_j < gamma, else 0.

    Binary logits (N,) or (N, 1). A pair weighs w_i w_j. A batch without a positive or without a negative gives 0,
    with gradient 0. The scores order the samples and are no probabilities: choose a threshold on held-out rows.

    reduction: "mean" divides by the weight of the pairs, so that batches of any size give losses of one size (and
        float16 gradients that do not overflow).
    squash: True takes x = sigmoid(z), scores within [0, 1]; False x = z, as BtG does.
    as_published: compare positives with positives, each with itself too, as BtG's code does.
    max_pairs: that many pairs are in memory at once; more are computed in blocks.

    >>> logits, target = torch.tensor([2.0, -1.0, 0.0]), torch.tensor([1, 0, 0])
    >>> wmw_loss(logits, target), wmw_loss(-logits, target)
    (tensor(0.), tensor(43.4160))
    """
    _check_options(gamma, p, reduction, max_pairs)
    z, y, w = flat(logits, target, sample_weight, "binary")
    x = z.sigmoid() if squash else z
    high, low = (y == 1) & (w != 0), (y == 0) & (w != 0)
    if as_published:
        low = high
    above, below, weight_above, weight_below = x[high], x[low], w[high], w[low]
    if not len(above) or not len(below):
        return x[:0].sum()  # not 0 * x.sum(): an infinite score would make that nan

    total: Tensor = _Pairs.apply(above, below, weight_above, weight_below, gamma, p, max_pairs)  # type: ignore[no-untyped-call]
    return total if reduction == "sum" else safe_divide(total, weight_above.sum() * weight_below.sum())


class WMWLoss(nn.Module):
    """Module form of `wmw_loss`; `task` exists for a common signature.

    >>> WMWLoss(reduction="mean")(torch.tensor([0.1, 0.0, 0.0]), torch.tensor([1, 0, 0]))
    tensor(0.0010)
    """

    def __init__(
        self,
        *,
        task: Literal["binary"] = "binary",
        gamma: float = 0.2,
        p: float = 3.0,
        reduction: Reduction = "sum",
        squash: bool = False,
        as_published: bool = False,
        max_pairs: int = 2**22,
    ) -> None:
        super().__init__()
        checks.check_choice("task", task, ["binary"])
        _check_options(gamma, p, reduction, max_pairs)
        self.task = task
        self.gamma, self.p, self.reduction, self.squash = gamma, p, reduction, squash
        self.as_published, self.max_pairs = as_published, max_pairs

    def forward(self, logits: Tensor, target: Tensor, sample_weight: Tensor | None = None) -> Tensor:
        return wmw_loss(
            logits, target, gamma=self.gamma, p=self.p, reduction=self.reduction, squash=self.squash,
            as_published=self.as_published, max_pairs=self.max_pairs, sample_weight=sample_weight,
        )  # fmt: skip


def _check_options(gamma: float, p: float, reduction: Reduction, max_pairs: int) -> None:
    checks.check_number("gamma", gamma, low=0.0, open_low=True)
    checks.check_number("p", p, low=1.0, open_low=True)  # at p = 1 the slope jumps, which Yan et al. rule out
    checks.check_choice("reduction", reduction, REDUCTIONS)
    checks.check_number("max_pairs", max_pairs, low=1)


class _Pairs(torch.autograd.Function):
    """sum_ij w_i w_j max(0, gamma - (x_i - x_j))^p with its gradient, in blocks of rows i.

    Autograd would keep every block for the backward; the slopes summed over the pairs are all that it needs.
    """

    @staticmethod
    def forward(
        ctx: Any, above: Tensor, below: Tensor, above_weight: Tensor, below_weight: Tensor, gamma: float, p: float,
        max_pairs: int,
    ) -> Tensor:  # fmt: skip
        total, slope_above, slope_below = above.new_zeros(()), torch.empty_like(above), torch.zeros_like(below)
        size = max(1, max_pairs // len(below))
        for start in range(0, len(above), size):
            rows = slice(start, start + size)
            short = (gamma - (above[rows].unsqueeze(1) - below)).clamp_min(0)
            slope = p * short ** (p - 1)
            total += above_weight[rows] @ (slope * short) @ below_weight / p
            slope_above[rows] = -above_weight[rows] * (slope @ below_weight)
            slope_below += above_weight[rows] @ slope * below_weight
        ctx.save_for_backward(slope_above, slope_below)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        slope_above, slope_below = ctx.saved_tensors
        return grad * slope_above, grad * slope_below, None, None, None, None, None
