"""AP-Perf: training against an adversary that picks the labels (Fathony and Kolter 2020, AISTATS, Sec. 3).

BtG Table 1 compares with it ("F1 via adversarial approach"). A predictor draws labels from P to maximise the metric,
an adversary draws the labels they are judged by from Q to minimise it, at a price psi per label that the network sets:

    v(psi) = min_Q max_P  E[ M(y_hat, y_check) ] - sum_i psi_i (q_i - y_i),   q_i = Q(y_check_i = 1),

and the loss is 1 - v. It is convex in psi, at least 0, and 0 once psi is large with the sign of the labels. By the
envelope theorem its gradient is q - y. Given k predicted and l true positives, a metric of the confusion matrix that is
affine in TP, M = a_kl TP + c_kl, sees of P and Q only their marginals p_ik = P(y_hat_i = 1, k) and
q_il = Q(y_check_i = 1, l), so the game is a linear program with O(n^2) variables and constraints. Of F_beta only the
rows whose price does not decide their label are in it (`decided`), which after an epoch are few.

DIFFERS: the authors' package stops its ADMM after 100 rounds, ignores the gradient that comes in, and reports a value
in which the predictor with k positives collects only its k - 1 best; here the program is solved exactly.
"""

import importlib
import math
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from evalign import checks
from evalign.baselines.inputs import flat

Floats = NDArray[np.float64]
Metric = Literal["f1", "fbeta", "accuracy", "mcc"]
METRICS: tuple[Metric, ...] = ("f1", "fbeta", "accuracy", "mcc")

# A label's price beyond 2, the widest range of a metric (mcc), decides that label: no change of the others is worth it.
DECIDED = 4.0


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
    pieces' losses: a linear program of 25 open rows takes 0.1 s, one of 50 rows 2 s. It is solved on the CPU, by scipy.
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
    """Module form of `ap_perf_loss`; `task` is there so that every rival is made alike.

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
            raise ValueError(f"beta goes with metric 'fbeta', got metric {metric!r}; leave beta out")
        return 1.0
    if beta is None:
        raise ValueError("metric 'fbeta' needs a beta, got None; say beta=1.0 or metric='f1'")
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


def adversary(psi: Floats, *, metric: Metric = "f1", beta: float = 1.0) -> tuple[float, Floats]:
    """The adversary's best answer to prices psi (n,): the metric that the best predictor then gets, and q (n,).

    >>> value, q = adversary(np.array([0.0]))
    >>> value, q
    (0.5, array([0.5]))
    """
    if not np.isfinite(psi).all():
        raise ValueError("AP-Perf needs finite logits, got nan or infinity; lower the learning rate")
    q = np.full(len(psi), np.nan) if metric in ("accuracy", "mcc") else decided(psi, beta)
    rows, sure = np.isnan(q), int(np.sum(q == 1.0))
    if not rows.any():
        return 1.0, q  # the predictor names the sure ones, and no other
    # Prices that decide their label anyway are cut: the solver works to 1e-7 of the largest one.
    prices = psi[rows].clip(-DECIDED, DECIDED)
    n, program = len(prices), _program(metric, beta, len(prices), sure)
    cost = program.cost.copy()
    cost[: n * n] = -np.tile(prices, n)
    solved = _scipy("optimize").linprog(
        cost, A_ub=program.at_most, b_ub=np.zeros(program.at_most.shape[0]), A_eq=program.equal, b_eq=program.total,
        bounds=program.bounds, method="highs-ds", options={"presolve": False},  # presolve takes longer than it saves
    )  # fmt: skip
    if solved.status != 0:
        raise RuntimeError(f"AP-Perf's linear program of {n} rows was not solved, scipy says: {solved.message}")
    q[rows] = solved.x[: n * n].reshape(n, n).sum(0).clip(0.0, 1.0)
    return float(solved.fun + prices @ q[rows]), q


def decided(psi: Floats, beta: float) -> Floats:
    """The adversary's q (n,) for F_beta where a price alone decides it, 0 or 1; nan where the game does.

    If no prediction's F_beta changes by more than D with the label of one row, then whoever moves that label's mass
    from 1 to 0 gains -psi_i per mass and loses at most D: q_i = 0 where psi_i < -D, and q_i = 1 where psi_i > D.
    The predictor need not name a row that is never true, and may name all P rows that always are: F_beta is then
    (1 + b^2) TP / (b^2 l + k) with P <= TP <= k, l, and TP + 1 over one more is no less. That makes D smaller, which
    decides more rows.

    >>> decided(np.array([1.5, 0.4, 0.3, -0.3, -0.4]), 1.0)  # one label is sure, so D = 1/3, then two and D = 1/5
    array([1., 1., 1., 0., 0.])
    >>> decided(np.array([0.9, -0.9, -1.1]), 1.0)
    array([nan, nan,  0.])
    """
    q, sure, swing = np.full(len(psi), np.nan), -1, 1.0
    while sure < (sure := int(np.sum(psi > swing))):
        swing = min(swing, _swing(beta, sure, len(psi)))
    q[psi > swing], q[psi < -swing] = 1.0, 0.0
    return q


@lru_cache(maxsize=512)
def _swing(beta: float, sure: int, n: int) -> float:
    """The most that one of n labels changes F_beta where `sure` rows are named and true; D in `decided`."""
    if sure == 0:
        return 1.0  # no positives, true or predicted, against one that is true
    gain, _ = affine("fbeta", beta, n)
    k, l = np.meshgrid(np.arange(sure, n + 1), np.arange(sure, n), indexing="ij")  # noqa: E741, the paper's letter
    less, more = gain[k, l], gain[k, l + 1]
    # A row that is not named lowers F_beta by becoming true, most where all that are named or true are both. One that
    # is named raises it by less the more are right already, and there are k - 1 others to name.
    unnamed, named = np.minimum(k, l) * (less - more), np.where(k > sure, (sure + 1) * more - sure * less, 0.0)
    return float(max(unnamed.max(initial=0.0), named.max(initial=0.0)))


class _Program(NamedTuple):
    """minimise cost.x where at_most x <= 0, equal x = total, within bounds; x is described in `_program`."""

    cost: Floats
    at_most: Any
    equal: Any
    total: Floats
    bounds: Floats


@lru_cache(maxsize=512)
def _program(metric: Metric, beta: float, n: int, sure: int) -> _Program:
    """The adversary's linear program over x = (q_li, s_l, u_ki, lambda_k, t), k and l from 1 but s_l from 0.

    The n rows play beside `sure` ones that are named and true, which k, l and TP here do not count.

    s_l = Q(l true positives), q_li = Q(l true ones, i among them):  sum_i q_li = l s_l,  q_li <= s_l,  sum_l s_l = 1.
    The predictor that answers with k positives picks the k samples with the largest W_ki = sum_l a_kl q_li. The sum
    of the k largest is min over lambda, u >= 0 of  k lambda_k + sum_i u_ki  where  u_ki >= W_ki - lambda_k,  and
    t, the predictor's best, is at least this plus sum_l c_kl s_l, for every k from 0.
    """
    sparse = _scipy("sparse")
    gain, constant = (table[sure:, sure:] for table in affine(metric, beta, n + sure))
    constant = constant + sure * gain
    one, each = np.ones((n, 1)), np.arange(1.0, n + 1)
    eye, wide = sparse.eye_array(n), sparse.eye_array(n * n)
    columns = sparse.kron(eye, one)  # (n^2, n): entry (k, i) takes the value of k
    skip_first = sparse.eye_array(n, n + 1, k=1)  # drops l = 0 (transposed: puts a row of zeros at k = 0)
    at_most = sparse.block_array(
        [
            [wide, -columns @ skip_first, None, None, None],
            [sparse.kron(gain[1:, 1:], eye), None, -wide, -columns, None],
            [None, constant, skip_first.T @ columns.T, skip_first.T @ sparse.diags_array(each), -np.ones((n + 1, 1))],
        ]
    )
    equal = sparse.block_array(
        [
            [columns.T, -sparse.diags_array(each) @ skip_first, None],
            [None, np.ones((1, n + 1)), sparse.coo_array((1, n * n + n + 1))],
        ]
    )
    size = 2 * n * n + 2 * n + 2
    cost, bounds = np.zeros(size), np.tile([0.0, np.inf], (size, 1))
    cost[-1], bounds[-n - 1 :, 0] = 1.0, -np.inf
    return _Program(cost, at_most.tocsc(), equal.tocsc(), np.append(np.zeros(n), 1.0), bounds)


def _scipy(name: str) -> Any:
    """A part of scipy, found on first use: it comes with scikit-learn, and no other loss needs it."""
    try:
        return importlib.import_module(f"scipy.{name}")
    except ImportError as error:
        raise ImportError("AP-Perf needs scipy, which is not installed; pip install 'evalign[tables]'") from error


def affine(metric: Metric, beta: float, n: int) -> tuple[Floats, Floats]:
    """a and c, both (n + 1, n + 1), in M = a[k, l] TP + c[k, l] for k predicted and l true positives among n.

    >>> affine("accuracy", 1.0, 1)
    (array([[2., 2.],
           [2., 2.]]), array([[ 1.,  0.],
           [ 0., -1.]]))
    """
    k, l = np.meshgrid(np.arange(n + 1.0), np.arange(n + 1.0), indexing="ij")  # noqa: E741, the paper's letter
    if metric == "accuracy":
        return np.full_like(k, 2 / n), (n - k - l) / n
    if metric == "mcc":
        above, below, rest = float(n), np.sqrt(k * l * (n - k) * (n - l)), -k * l
    else:
        above, below, rest = 1 + beta**2, beta**2 * l + k, 0 * k
    empty, whole = below == 0, np.where(below == 0, 1.0, below)
    return np.where(empty, 0.0, above / whole), np.where(empty, k == l, rest / whole)
