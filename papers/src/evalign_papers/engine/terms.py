"""A config's loss as a term that can be stacked: (logits, labels, weights, temperature) -> scalar, under vmap."""

from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from evalign import checks
from evalign.checks import safe_divide
from evalign.metrics import resolve
from evalign.objective import Objective
from evalign.steps import Step, StepChoice, Threshold, linear, sigmoid
from evalign.training.batches import Term
from evalign_papers.engine.config import Method
from evalign_papers.rivals.dice import dice_loss

SMALL = 1e-7


def build_term(method: Method, task: Any) -> Objective | Term:
    """The loss of a method; cross-entropy is the anchor of its stages and needs no loss."""
    options = dict(method.options)
    if method.name == "cross_entropy":
        return Objective("accuracy", task, StepChoice("annealed"))  # never called: no stage has a metric
    if method.name == "metric":
        name = options["step"]
        step = StepChoice(three_points if name == "three_points" else name, options["delta"], options["k"])
        return Objective(
            options["metric"], task, step, average=options["average"], thresholds=_thresholds(options["threshold"]),
            beta=torch.tensor(options["beta"]) if isinstance(options["beta"], list) else options["beta"],
        )  # fmt: skip
    if method.name == "released":
        return _released(**options)
    if method.name == "dice":
        return _dice_of_classes(**options) if task == "multiclass" else _dice(**options)
    if method.name == "wmw":
        return _wmw(**options)
    raise ValueError(f"no loss named {method.name!r} can be stacked; known: metric, released, cross_entropy, dice, wmw")


def _thresholds(threshold: Any) -> Any:
    return tuple(threshold) if isinstance(threshold, list) else threshold


def three_points(p: Tensor, threshold: Any) -> Tensor:
    """Lines through (0, 0), (tau, 1/2) and (1, 1), the step that BtG (supplement, 4.3) advises against.

    >>> three_points(torch.tensor([0.0, 0.45, 0.9, 1.0]), 0.9)
    tensor([0.0000, 0.2500, 0.5000, 1.0000])
    """
    return torch.where(p < threshold, p / (2 * threshold), 1 - (1 - p) / (2 * (1 - threshold)))


class LookupTable:
    """A step read from a table of bytes (BtG supplement Sec. 3): O(1) per value, about 1 kB.

    The threshold is rounded to a grid of 0.1, p is truncated to two decimals and values are stored in
    8 bits, so a value is off by at most the step's rise over 0.01 plus 1/510. The gradient is the table's
    own difference quotient.

    >>> table = LookupTable(linear)
    >>> table.bytes
    909
    >>> table(torch.tensor([0.0, 0.5, 1.0]), 0.5)
    tensor([0.0000, 0.5020, 1.0000])
    """

    def __init__(self, step: Step = linear) -> None:
        p = torch.linspace(0, 1, 101, dtype=torch.float64)
        rows = [step(p, tenth / 10) for tenth in range(1, 10)]
        self.table = (torch.stack(rows) * 255).round().to(torch.uint8)

    @property
    def bytes(self) -> int:
        return self.table.numel() * self.table.element_size()

    def __call__(self, p: Tensor, threshold: Threshold) -> Tensor:
        checks.check_threshold(threshold)
        tenths = torch.as_tensor(threshold, device=p.device, dtype=p.dtype) * 10
        row = tenths.round().long().clamp(1, 9) - 1
        return _Lookup.apply(p, row, self.table.to(p.device))  # type: ignore[no-any-return, no-untyped-call]


class _Lookup(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(p: Tensor, row: Tensor, table: Tensor) -> Tensor:
        return torch.where(p.isnan(), p, table[row, _column(p)].to(p.dtype) / 255)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        p, row, table = ctx.saved_tensors
        column = _column(p).clamp(max=99)
        rise = table[row, column + 1].to(p.dtype) - table[row, column].to(p.dtype)
        return grad * rise * (100 / 255), None, None


def _column(p: Tensor) -> Tensor:
    # 0.29 * 100 is 28.999… in binary: nudge before truncating, or a value on the grid reads its left neighbour.
    return (p.detach() * 100 + 1e-4).long().clamp(0, 100)


def released_counts(p: Tensor, y: Tensor, weight: Tensor, tau: Tensor, step: Any) -> tuple[Tensor, ...]:
    """TP, FN, FP, TN as the authors' package counts them: 1 - tau stands in for tau on one side of it.

    Rows of the other class come in with probability 0, which the sigmoid step does not map to 0.
    """
    above, below = p > tau, p < tau
    zero = torch.zeros_like(p)
    parts = (
        (torch.where(y > 0, p, zero), torch.where(above, tau, 1 - tau)),
        (torch.where(y > 0, 1 - p, zero), torch.where(below, 1 - tau, tau)),
        (torch.where(y > 0, zero, p), torch.where(below, tau, 1 - tau)),
        (torch.where(y > 0, zero, 1 - p), torch.where(below, 1 - tau, tau)),
    )
    return tuple((weight * step(x, t)).sum() for x, t in parts)


def _released(metric: str, step: str, beta: float | None) -> Term:
    """1 - the mean over nine thresholds of a metric of `released_counts`, or of the area that they span (AUROC)."""
    shape = (lambda x, t: linear(x, t, delta=0.2)) if step == "linear" else (lambda x, t: sigmoid(x, t, k=10.0))
    b2 = 1.0 if beta is None else beta * beta

    def term(logits: Tensor, y: Tensor, weight: Tensor, temperature: Tensor) -> Tensor:
        p = logits.sigmoid()
        grid = torch.linspace(0.1, 0.9, 9, dtype=p.dtype, device=p.device)  # a copy cannot be recorded
        tp, fn, fp, tn = vmap(lambda tau: released_counts(p, y, weight, tau.expand_as(p), shape))(grid)
        if metric == "accuracy":
            return 1 - ((tp + tn) / (tp + tn + fp + fn)).mean()
        if metric == "auroc":
            fpr, order = (fp / (fp + tn + SMALL)).sort()
            return 1 - torch.trapezoid((tp / (tp + fn + SMALL))[order], fpr)
        precision, recall = tp / (tp + fp + SMALL), tp / (tp + fn + SMALL)
        return 1 - ((1 + b2) * precision * recall / (b2 * precision + recall + SMALL)).mean()

    return term


def _dice(squash: bool, per_sample: bool) -> Term:
    """`rivals.dice_loss` of a binary problem, and the released one, which sums within a sample."""

    def term(logits: Tensor, y: Tensor, weight: Tensor, temperature: Tensor) -> Tensor:
        p, g = logits.sigmoid() if squash else logits, y.to(logits.dtype)
        overlap, mass = p * g, p * p + g
        if per_sample:
            return 1 - safe_divide((weight * overlap / (mass + SMALL)).sum(), weight.sum())
        return 1 - safe_divide(2 * (weight * overlap).sum(), (weight * mass).sum())

    return term


def _dice_of_classes(squash: bool, per_sample: bool) -> Term:
    def term(logits: Tensor, y: Tensor, weight: Tensor, temperature: Tensor) -> Tensor:
        return dice_loss(logits, y, squash=squash, per_sample=per_sample, sample_weight=weight)

    return term


def _wmw(gamma: float, p: float, of_positives: bool) -> Term:
    """`rivals.wmw_loss` on logits, its mean over pairs; positives against positives as released.

    For a positive x and a = x - gamma the negatives above a add up to sum (z - a)^3, a polynomial in a whose
    coefficients are sums of powers of z over those negatives: one sort instead of n^2 pairs, and a static shape.
    """
    if p != 3:
        raise ValueError(f"the stacked WMW loss has p = 3, as BtG does, got {p}; use rivals.wmw_loss")

    def term(logits: Tensor, y: Tensor, weight: Tensor, temperature: Tensor) -> Tensor:
        n = logits.shape[0]
        z = logits.double()
        z = z - (z.detach() * weight).sum() / weight.sum().clamp_min(1e-9)  # keeps cubes of small numbers precise
        high = ((y > 0) * weight).double()
        low = high if of_positives else ((y == 0) * weight).double()
        a = z - gamma
        keys = torch.cat([z, a])
        order = keys.detach().argsort(stable=True)
        place = order.argsort()[n:]
        sorted_z, counted = keys[order], torch.cat([low, torch.zeros_like(low)])[order]
        powers = torch.stack([counted * sorted_z**k for k in range(4)])
        s0, s1, s2, s3 = (powers.sum(1, keepdim=True) - powers.cumsum(1))[:, place]
        total = (high * (s3 - 3 * a * s2 + 3 * a**2 * s1 - a**3 * s0)).sum()
        return safe_divide(total, high.sum() * low.sum()).to(logits.dtype)

    return term


def metric_score(decide_for: str, classes: int) -> Any:
    """The hard score of validation rows."""
    from evalign.metrics import is_averaged
    from evalign.training.batches import argmax_score

    if not is_averaged(decide_for):
        return argmax_score(resolve(decide_for))
    return argmax_score(resolve(decide_for, average="binary" if classes == 2 else "macro"))
