"""AP-Perf: training against an adversary that picks the labels (Fathony and Kolter 2020, AISTATS, Sec. 3).

BtG Table 1 compares with it ("F1 via adversarial approach"). A predictor draws labels from P to maximise the metric,
an adversary draws the labels they are judged by from Q to minimise it, at a price psi per label that the network sets:

    v(psi) = min_Q max_P  E[ M(y_hat, y_check) ] - sum_i psi_i (q_i - y_i),   q_i = Q(y_check_i = 1),

and the loss is 1 - v. It is convex in psi, at least 0, and 0 once psi is large with the sign of the labels. By the
envelope theorem its gradient is q - y. `ap_perf_game` solves the game.

DIFFERS: the authors' package stops its ADMM after 100 rounds, ignores the gradient that comes in, and reports a value
in which the predictor with k positives collects only its k - 1 best; here the game is solved exactly.
"""

import math
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from evalign import checks
from evalign_papers.rivals.ap_perf_game import METRICS, Metric, adversary
from evalign_papers.rivals.inputs import flat


def ap_perf_loss(
    logits: Tensor,
    target: Tensor,
    *,
    metric: Metric = "f1",
    beta: float | None = None,
    max_rows: int = 25,
    sample_weight: Tensor | None = None,
) -> Tensor:
    """L = 1 - v(psi), psi the binary logits (N,) or (N, 1); predict psi >= 0.

    A batch of more than `max_rows` rows is cut into equal pieces, in order, and L is the mean over its rows of their
    pieces' losses: a game of 25 open rows takes 10 ms, one of 50 rows 0.2 s. It is solved on the CPU, by HiGHS.
    F_beta of no positives, true or predicted, is 1, and so is the mcc of two equal constant answers; other 0/0 are 0.
    The game counts rows, so there is no `sample_weight`. A batch without a counted label gives 0.

    >>> psi = torch.tensor([0.3, -0.2, 0.1], requires_grad=True)
    >>> loss = ap_perf_loss(psi, torch.tensor([1, 0, 0]))
    >>> loss.backward()
    >>> loss.detach(), psi.grad
    (tensor(0.4500), tensor([-0.6667,  0.1667,  0.1667]))
    """
    beta = _check_options(metric, beta, max_rows)
    if sample_weight is not None:
        raise ValueError("AP-Perf counts rows, so sample_weight must be None, got one; repeat rows instead")
    psi, y, counted = flat(logits, target, None, "binary")
    psi, y = psi[counted > 0], y[counted > 0]
    if not len(psi):
        return psi.sum()
    pieces = math.ceil(len(psi) / max_rows)
    games = zip(psi.tensor_split(pieces), y.tensor_split(pieces), strict=True)
    losses = [len(part) * _Game.apply(part, labels, metric, beta) for part, labels in games]  # type: ignore[no-untyped-call]
    return torch.stack(losses).sum() / len(psi)


class APPerfLoss(nn.Module):
    """Module form of `ap_perf_loss`; `task` exists for a common signature.

    >>> APPerfLoss("accuracy")(torch.tensor([2.0, -2.0]), torch.tensor([1, 0]))
    tensor(0.)
    """

    def __init__(
        self,
        metric: Metric = "f1",
        *,
        task: Literal["binary"] = "binary",
        beta: float | None = None,
        max_rows: int = 25,
    ) -> None:
        super().__init__()
        checks.check_choice("task", task, ["binary"])
        _check_options(metric, beta, max_rows)
        self.metric, self.task, self.beta, self.max_rows = metric, task, beta, max_rows

    def forward(self, logits: Tensor, target: Tensor, sample_weight: Tensor | None = None) -> Tensor:
        return ap_perf_loss(
            logits, target, metric=self.metric, beta=self.beta, max_rows=self.max_rows, sample_weight=sample_weight
        )


def _check_options(metric: Metric, beta: float | None, max_rows: int) -> float:
    """Check the options; the beta to use."""
    checks.check_choice("metric", metric, METRICS)
    checks.check_number("max_rows", max_rows, low=1)
    if metric != "fbeta":
        if beta is not None:
            raise ValueError(f"beta requires metric 'fbeta', got metric {metric!r}; leave beta out")
        return 1.0
    if beta is None:
        raise ValueError("metric 'fbeta' needs a beta, got None; set beta=1.0 or metric='f1'")
    checks.check_number("beta", beta, low=0.0)
    return float(beta)


class _Game(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, psi: Tensor, y: Tensor, metric: Metric, beta: float) -> Tensor:
        prices, labels = psi.detach().cpu().double().numpy(), y.cpu().double().numpy()
        value, q = adversary(prices, metric=metric, beta=beta)
        ctx.save_for_backward(torch.as_tensor(q - labels, dtype=psi.dtype, device=psi.device))
        return psi.new_tensor(1 - value + prices @ (q - labels))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (slope,) = ctx.saved_tensors
        return grad * slope, None, None, None
