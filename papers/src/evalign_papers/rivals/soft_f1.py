"""sigmoidF1: F1 of counts that a tunable sigmoid makes soft (Bénédict, Koops, Odijk and de Rijke 2022, TMLR)."""

import torch
from torch import Tensor, nn

from evalign import checks
from evalign.checks import safe_divide
from evalign.confusion import Task
from evalign_papers.rivals.inputs import flat, weighted_mean

TASKS: tuple[Task, ...] = ("binary", "multilabel")


def sigmoid_f1_loss(
    logits: Tensor,
    target: Tensor,
    *,
    task: Task = "multilabel",
    beta: float = 1.0,
    eta: float = 0.0,
    sample_weight: Tensor | None = None,
) -> Tensor:
    """L = mean over labels of 1 - 2 TP / (2 TP + FN + FP), with S(u; beta, eta) = 1 / (1 + exp(-beta (u + eta))).

    TP = sum_i S(u_i) y_i, FP = sum_i S(u_i) (1 - y_i), FN = sum_i (1 - S(u_i)) y_i over the batch; u is the
    network's output. beta 1 and eta 0 are the defaults of the authors' code; the paper tunes both per data set. A
    label without positives costs 1, with gradient 0; one without weight is left out of the mean.

    DIFFERS: the authors' code puts the network's output through a plain sigmoid first, so that S sees 0 to 1 and
    returns 1/2 to 0.73 at the defaults; the paper's u is the output itself.

    >>> sigmoid_f1_loss(torch.tensor([2.0, -1.0, 0.0]), torch.tensor([1, 0, 1]), task="binary")
    tensor(0.2433)
    """
    _check_options(task, beta, eta)
    u, y, w = flat(logits, target, sample_weight, task)
    if task == "binary":
        u, y, w = u.unsqueeze(1), y.unsqueeze(1), w.unsqueeze(1)
    s = torch.sigmoid(beta * (u + eta))
    tp, predicted, actual = (w * s * y).sum(0), (w * s).sum(0), (w * y).sum(0)
    return weighted_mean(1 - safe_divide(2 * tp, predicted + actual), (w.sum(0) > 0).to(s.dtype))


class SigmoidF1Loss(nn.Module):
    """Module form of `sigmoid_f1_loss`.

    >>> SigmoidF1Loss(beta=5.0)(torch.tensor([[2.0, -2.0], [-2.0, 2.0]]), torch.eye(2))
    tensor(4.5419e-05)
    """

    def __init__(self, *, task: Task = "multilabel", beta: float = 1.0, eta: float = 0.0) -> None:
        super().__init__()
        _check_options(task, beta, eta)
        self.task: Task = task
        self.beta, self.eta = beta, eta

    def forward(self, logits: Tensor, target: Tensor, sample_weight: Tensor | None = None) -> Tensor:
        return sigmoid_f1_loss(
            logits, target, task=self.task, beta=self.beta, eta=self.eta, sample_weight=sample_weight
        )


def _check_options(task: Task, beta: float, eta: float) -> None:
    checks.check_choice("task", task, TASKS)
    checks.check_number("beta", beta, low=0.0, open_low=True)
    checks.check_number("eta", eta)
