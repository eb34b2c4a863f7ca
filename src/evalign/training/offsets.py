r"""Class offsets of a metric, added to the logits in training only.

At a confusion matrix C, the gradient G = dM/dC gives the metric's gain from one more sample of class k that is decided
as j. Deciding a sample of class k correctly instead of wrongly, with errors distributed as now, gains

    w_k = G_kk - sum_{j != k} e_kj G_kj,        e_kj = C_kj / sum_{j != k} C_kj.

A network whose logits f + o are fitted to the labels has f = log p - o, and argmax f is argmax_k w_k p_k for
o_k = -log w_k: the decision that is best for these gains. Accuracy has w = const, so no offset; balanced accuracy has
w_k = 1 / (K n_k), so o = log prior, the logit adjustment of Menon et al. 2021.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from evalign.confusion import Confusion, Task
from evalign.objective import Objective
from evalign.training.batches import Rows, Term, flat, predict_logits, probabilities_of
from evalign.training.recipes import Stage


def with_offset(logits: Tensor, offset: Tensor | None, task: Task) -> Tensor:
    """Logits plus class offsets; a binary logit gets the difference of the two.

    >>> with_offset(torch.zeros(1), torch.tensor([1.0, 3.0]), "binary")
    tensor([2.])
    """
    if offset is None:
        return logits
    offset = offset.to(logits)
    return logits + (offset[1] - offset[0] if task == "binary" else offset)


def estimate_offset(
    network: nn.Module, rows: Rows, objective: Objective | Term, stage: Stage, before: Tensor | None, amp: bool = False
) -> Tensor:
    """Class offsets of the metric at the confusion matrix of `rows`, multiplied by the strength of the stage.

    From the second time on, the mean of the previous and the new offset, since the matrix responds to the offset.
    """
    if not isinstance(objective, Objective) or objective.task == "multilabel" or objective.metric == "auroc":
        raise ValueError("class offsets need a metric of one confusion matrix; train without offset")
    logits, y, weight = flat(predict_logits(network, rows.x, amp=amp), rows.y, rows.weight, objective.task)
    p = probabilities_of(logits, objective.task)
    matrix = Confusion.hard(p.argmax(1), y, p.shape[1], sample_weight=weight).matrix
    return next_offset(matrix, objective, stage, before).to(rows.x.device)


def next_offset(matrix: Tensor, objective: Objective, stage: Stage, before: Tensor | None) -> Tensor:
    """Class offsets at a confusion matrix; after the first time, the mean of these and of the ones before.

    On the CPU: a few numbers per stage, in float64, which not every device supports.
    """
    offset = metric_offset(matrix.cpu(), objective.score, stage.offset).float()
    return offset if before is None else (offset + before.cpu()) / 2


LEAST = 1e-3  # share of the largest gain: a class may gain nothing, but no logit moves by more than 7


def of_matrix(matrix: Tensor) -> Confusion:
    """The counts of a matrix (C, C), rows = labels; classes without rows are left out of means."""
    return Confusion.of_matrix(matrix, present=matrix.sum(1) > 0)


def gain_matrix(matrix: Tensor, metric: Callable[[Confusion], Tensor]) -> Tensor:
    """G = dM/dC at `matrix`, by autograd.

    >>> from evalign import metrics
    >>> gain_matrix(torch.tensor([[3.0, 1.0], [2.0, 4.0]]), metrics.accuracy)
    tensor([[ 0.0300, -0.0700],
            [-0.0700,  0.0300]], dtype=torch.float64)
    """
    if matrix.dim() != 2 or matrix.shape[0] != matrix.shape[1] or matrix.shape[0] < 2:
        raise ValueError(f"a confusion matrix of shape (C, C) with C >= 2 is needed, got shape {tuple(matrix.shape)}")
    with torch.enable_grad():
        counts = matrix.detach().double().requires_grad_()
        return torch.autograd.grad(metric(of_matrix(counts)), counts)[0]


def class_gains(matrix: Tensor, metric: Callable[[Confusion], Tensor]) -> Tensor:
    """w_k for every class; one error, distributed like all errors, is added to each row so that no row has none."""
    gain = gain_matrix(matrix, metric)
    counts = matrix.detach().to(gain)
    errors = counts - counts.diagonal().diag()
    usual = errors.sum(0) if bool(errors.sum() > 0) else torch.ones_like(errors[0])
    usual = usual.expand_as(errors) * (1 - torch.eye(len(errors), dtype=gain.dtype, device=gain.device))
    # A class whose own column alone has errors uses a uniform distribution.
    even = (1 - torch.eye(len(errors), dtype=gain.dtype, device=gain.device)) / (len(errors) - 1)
    mass = usual.sum(1, keepdim=True)
    errors = errors + torch.where(mass > 0, usual / torch.where(mass > 0, mass, 1.0), even)
    return gain.diagonal() - (errors * gain).sum(1) / errors.sum(1)


def metric_offset(matrix: Tensor, metric: Callable[[Confusion], Tensor], strength: float = 1.0) -> Tensor:
    """o_k = -strength log w_k, centred (a constant changes no decision); a class without rows gets the smallest offset.

    >>> from evalign import metrics
    >>> matrix = torch.tensor([[80.0, 10.0], [5.0, 5.0]])
    >>> metric_offset(matrix, metrics.balanced_accuracy)  # log(90 / 10) / 2 = 1.0986, and its negative
    tensor([ 1.0986, -1.0986], dtype=torch.float64)
    >>> metric_offset(matrix, metrics.accuracy)
    tensor([0., 0.], dtype=torch.float64)
    """
    gains = class_gains(matrix, metric)
    if not bool(gains.isfinite().all()) or not bool(gains.max() > 0):
        raise ValueError(
            f"class offsets need a metric that improves when errors are corrected, got gains {gains.tolist()}; "
            "train without offset"
        )
    gains = gains.clamp_min(LEAST * gains.max())
    seen = matrix.sum(1).to(gains.device) > 0
    gains = torch.where(seen, gains, gains[seen].max() if bool(seen.any()) else gains.max())
    offset = -strength * gains.log()
    return offset - offset.mean()
