"""Metrics: functions of a Confusion, for hard and soft counts.

A metric is one quotient of tp, actual, predicted and total, whatever their origin. On hard
counts the values are scikit-learn's with `labels=range(C)`. `average` is "binary" (class 1), "macro",
"micro", "weighted" (by label counts) or None (one score per class). `zero_division` is the score where a
quotient is 0/0; with nan the class is left out of the mean.
"""

import inspect
import math
from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any, Literal

import torch
from torch import Tensor

from evalign import checks
from evalign.checks import safe_divide, safe_sqrt
from evalign.confusion import Confusion

Average = Literal["binary", "macro", "micro", "weighted"]
AVERAGES: tuple[Average, ...] = ("binary", "macro", "micro", "weighted")
Beta = float | Sequence[float] | Tensor
MetricFunction = Callable[[Confusion], Tensor]


def fbeta(c: Confusion, average: Average | None = "macro", *, beta: Beta = 1.0, zero_division: float = 0.0) -> Tensor:
    """F_beta = (1 + b^2) TP / ((1 + b^2) TP + b^2 FN + FP); `beta` > 1 prefers recall; one per class is allowed.

    >>> c = Confusion.hard(torch.tensor([0, 1, 1, 1]), torch.tensor([0, 0, 1, 1]))
    >>> fbeta(c, "binary", beta=2.0)
    tensor(0.9091, dtype=torch.float64)
    """
    # A number stays a number: copying a tensor to the device would synchronise.
    if isinstance(beta, (int, float)):
        checks.check_beta(beta)
        b2: float | Tensor = min(float(beta) ** 2, 1e300) if beta < math.inf else math.inf
        if b2 == math.inf:
            return recall(c, average, zero_division=zero_division)
        return _average(c, (1 + b2) * c.tp, b2 * c.actual + c.predicted, average, zero_division)
    b2 = torch.as_tensor(beta, dtype=c.tp.dtype, device=c.tp.device) ** 2
    checks.check_per_class("beta", b2, c.num_classes)
    only_recall = b2.isinf()
    b2 = torch.where(only_recall, 0.0, b2)
    bottom = torch.where(only_recall, c.actual, b2 * c.actual + c.predicted)
    return _average(c, (1 + b2) * c.tp, bottom, average, zero_division)


def f1(c: Confusion, average: Average | None = "macro", *, zero_division: float = 0.0) -> Tensor:
    """F1 = 2 TP / (2 TP + FN + FP), also called Dice.

    >>> f1(Confusion.hard(torch.tensor([0, 1, 1, 1]), torch.tensor([0, 0, 1, 1])), average=None)
    tensor([0.6667, 0.8000], dtype=torch.float64)
    """
    return _average(c, 2 * c.tp, c.actual + c.predicted, average, zero_division)


def precision(c: Confusion, average: Average | None = "macro", *, zero_division: float = 0.0) -> Tensor:
    """TP / (TP + FP).

    >>> precision(Confusion.hard(torch.tensor([0, 1, 1, 1]), torch.tensor([0, 0, 1, 1])), "binary")
    tensor(0.6667, dtype=torch.float64)
    """
    return _average(c, c.tp, c.predicted, average, zero_division)


def recall(c: Confusion, average: Average | None = "macro", *, zero_division: float = 0.0) -> Tensor:
    """TP / (TP + FN).

    >>> recall(Confusion.hard(torch.tensor([0, 1, 1, 1]), torch.tensor([0, 0, 1, 1])))
    tensor(0.7500, dtype=torch.float64)
    """
    return _average(c, c.tp, c.actual, average, zero_division)


def specificity(c: Confusion, average: Average | None = "macro", *, zero_division: float = 0.0) -> Tensor:
    """TN / (TN + FP), the recall of "not this class".

    >>> specificity(Confusion.hard(torch.tensor([0, 1, 1, 1]), torch.tensor([0, 0, 1, 1])), "binary")
    tensor(0.5000, dtype=torch.float64)
    """
    return _average(c, c.tn, c.totals - c.actual, average, zero_division)


def jaccard(c: Confusion, average: Average | None = "macro", *, zero_division: float = 0.0) -> Tensor:
    """TP / (TP + FP + FN), intersection over union.

    >>> jaccard(Confusion.hard(torch.tensor([0, 1, 1, 1]), torch.tensor([0, 0, 1, 1])), "binary")
    tensor(0.6667, dtype=torch.float64)
    """
    return _average(c, c.tp, c.actual + c.predicted - c.tp, average, zero_division)


def dice(c: Confusion, average: Average | None = "macro", *, zero_division: float = 0.0) -> Tensor:
    """`f1`, by its name in segmentation.

    >>> dice(Confusion.hard(torch.tensor([0, 1, 1, 1]), torch.tensor([0, 0, 1, 1])), "binary")
    tensor(0.8000, dtype=torch.float64)
    """
    return f1(c, average, zero_division=zero_division)


def tversky(
    c: Confusion,
    average: Average | None = "macro",
    *,
    alpha: float = 0.5,
    beta: Beta = 0.5,
    zero_division: float = 0.0,
) -> Tensor:
    """TP / (TP + alpha FP + beta FN); (1/2, 1/2) is Dice, (1, 1) is Jaccard. `beta` may be one number per class.

    >>> tversky(Confusion.hard(torch.tensor([0, 1, 1, 1]), torch.tensor([0, 0, 1, 1])), "binary", alpha=1.0, beta=1.0)
    tensor(0.6667, dtype=torch.float64)
    """
    missed: Any = beta if isinstance(beta, (int, float)) else torch.as_tensor(beta).to(c.tp)
    bottom = (1.0 - alpha - missed) * c.tp + alpha * c.predicted + missed * c.actual
    return _average(c, 1.0 * c.tp, bottom, average, zero_division)


def _mean_over_labels(*, omit_absent: bool) -> Callable[[Callable[..., Tensor]], Callable[..., Tensor]]:
    """A metric of the whole matrix; for separate labels, its mean over labels.

    In soft counts a label that never occurs has a constant correlation of 0, and is left out of the mean.
    """

    def decorate(metric: Callable[..., Tensor]) -> Callable[..., Tensor]:
        @wraps(metric)
        def wrapper(c: Confusion, **options: float) -> Tensor:
            if not c.multilabel:
                return metric(c, **options)
            mask = None if c.present is None else c.present if omit_absent else c.total > 0
            return _mean(c, metric(c.one_vs_rest(), **options), mask)

        return wrapper

    return decorate


@_mean_over_labels(omit_absent=False)
def accuracy(c: Confusion) -> Tensor:
    """sum_k TP_k / n; for multilabel counts the mean over labels (1 - Hamming loss).

    >>> accuracy(Confusion.hard(torch.tensor([0, 1, 1, 1]), torch.tensor([0, 0, 1, 1])))
    tensor(0.7500, dtype=torch.float64)
    """
    return safe_divide(c.tp.sum(-1), c.total)


@_mean_over_labels(omit_absent=False)
def balanced_accuracy(c: Confusion) -> Tensor:
    """Mean recall over the classes with labels.

    >>> balanced_accuracy(Confusion.hard(torch.tensor([0, 1, 1, 1]), torch.tensor([0, 0, 1, 1])))
    tensor(0.7500, dtype=torch.float64)
    """
    return _mean(c, safe_divide(c.tp, c.actual), _labelled(c), defined=True)


@_mean_over_labels(omit_absent=False)
def gmean(c: Confusion) -> Tensor:
    """Geometric mean of the recalls of the classes with labels; sqrt(TPR TNR) for two.

    Gradient 0 where a recall is exactly 0, since the true one is infinite.

    >>> gmean(Confusion.hard(torch.tensor([0, 1, 1, 1]), torch.tensor([0, 0, 1, 1])))
    tensor(0.7071, dtype=torch.float64)
    """
    labelled = _labelled(c)
    # A recall of 1 for the others does not change the sum of logarithms.
    recalls = torch.where(labelled, safe_divide(c.tp, c.actual), 1.0)
    missed = recalls <= 0
    logs = torch.where(missed, 1.0, recalls).log().sum(-1)
    mean = safe_divide(logs, labelled.sum(-1).to(logs.dtype)).exp()
    return torch.where(missed.any(-1) | ~labelled.any(-1), 0.0, mean)


@_mean_over_labels(omit_absent=True)
def mcc(c: Confusion) -> Tensor:
    """Matthews correlation, (c s - sum p_k t_k) / sqrt((s^2 - sum p_k^2) (s^2 - sum t_k^2)), c = sum TP, s = n.

    0 if all labels or all predictions are of one class. Shares of n keep the squares within float32.

    >>> mcc(Confusion.hard(torch.tensor([0, 1, 1, 1]), torch.tensor([0, 0, 1, 1])))
    tensor(0.5774, dtype=torch.float64)
    """
    correct, predicted, actual = _shares(c)
    # sum q (1 - q) is 1 - sum q^2 without subtracting two numbers near 1.
    spread = safe_sqrt((predicted * (1 - predicted)).sum(-1)) * safe_sqrt((actual * (1 - actual)).sum(-1))
    return safe_divide(correct - (predicted * actual).sum(-1), spread)


@_mean_over_labels(omit_absent=True)
def cohen_kappa(c: Confusion, *, zero_division: float = 0.0) -> Tensor:
    """(p_o - p_e) / (1 - p_e): agreement beyond chance; `zero_division` where chance agrees always.

    >>> cohen_kappa(Confusion.hard(torch.tensor([0, 1, 1, 1]), torch.tensor([0, 0, 1, 1])))
    tensor(0.5000, dtype=torch.float64)
    """
    correct, predicted, actual = _shares(c)
    chance = (predicted * actual).sum(-1)
    return safe_divide(correct - chance, 1 - chance, at_zero=zero_division)


def quadratic_kappa(c: Confusion, *, zero_division: float = 0.0) -> Tensor:
    """1 - sum w_ij C_ij / sum w_ij E_ij with w_ij = (i - j)^2, E_ij = t_i p_j / n, for ordered classes.

    >>> quadratic_kappa(Confusion.hard(torch.tensor([0, 1, 2, 2]), torch.tensor([0, 1, 1, 2])))
    tensor(0.8000, dtype=torch.float64)
    """
    rank = torch.arange(c.num_classes, dtype=c.tp.dtype, device=c.tp.device)
    cost = (rank[:, None] - rank) ** 2
    _, predicted, actual = _shares(c)  # shares of n, since products of counts could leave the range of float32
    paid = safe_divide((cost * c.matrix).sum((-2, -1)), c.total)
    expected = (actual.unsqueeze(-1) * cost * predicted.unsqueeze(-2)).sum((-2, -1))
    return safe_divide(expected - paid, expected, at_zero=zero_division)


METRICS: dict[str, Callable[..., Tensor]] = {
    metric.__name__: metric
    for metric in (
        accuracy, balanced_accuracy, f1, fbeta, precision, recall, specificity, jaccard, dice, tversky, gmean, mcc,
        cohen_kappa, quadratic_kappa,
    )
}  # fmt: skip


_AVERAGED = frozenset(name for name, metric in METRICS.items() if "average" in inspect.signature(metric).parameters)


def is_averaged(name: str) -> bool:
    """Whether a metric has one score per class, combined by `average`."""
    return name in _AVERAGED


def name_of(metric: str | MetricFunction) -> str:
    """The name of a metric, whether it is given by name or as a function."""
    return metric if isinstance(metric, str) else getattr(metric, "__name__", "metric")


def quotient(name: str, c: Confusion, **options: Any) -> tuple[Tensor, Tensor]:
    """Numerator and denominator of a metric that is a quotient of counts, averaged over classes.

    >>> quotient("recall", Confusion.hard(torch.tensor([0, 1, 1]), torch.tensor([0, 0, 1])))
    (tensor([1., 1.], dtype=torch.float64), tensor([2., 1.], dtype=torch.float64))
    """
    given = {key: value for key, value in options.items() if value is not None}
    return METRICS[name](c, average=_PARTS, **given)  # type: ignore[return-value]


def resolve(
    metric: str | MetricFunction,
    *,
    average: Average = "macro",
    beta: Beta | None = None,
    alpha: float | None = None,
    smooth: float = 0.0,
    include_background: bool = True,
) -> MetricFunction:
    """Convert a metric's name with its options, or a user's function, to a function of a Confusion.

    `smooth` is added to both parts of every class's quotient, and a class without a label then counts in a macro mean;
    without the background, class 0 is left out.

    >>> resolve("fbeta", average="binary", beta=2.0)(Confusion.hard(torch.tensor([0, 1]), torch.tensor([0, 1])))
    tensor(1., dtype=torch.float64)
    """
    if callable(metric):
        return metric
    checks.check_choice("metric", metric, METRICS)
    if beta is not None and metric not in ("fbeta", "tversky"):
        raise ValueError(f"beta requires metric 'fbeta', got metric {metric!r}; leave beta out or use 'fbeta'")
    options: dict[str, Any] = {"beta": beta, "alpha": alpha}
    if smooth or not include_background:
        return partial(_smoothed, name=metric, average=average, smooth=smooth, first=not include_background, **options)
    options = {key: value for key, value in options.items() if value is not None}
    if is_averaged(metric):
        checks.check_choice("average", average, AVERAGES)
        options["average"] = average
    return partial(METRICS[metric], **options)


def _smoothed(c: Confusion, *, name: str, average: Average, smooth: float, first: int, **options: Any) -> Tensor:
    """A metric averaged over the classes from `first` on, `smooth` added to both parts of each quotient."""
    top, bottom = (part[..., first:] + smooth for part in quotient(name, c, **options))
    present = None if smooth or c.present is None else c.present[..., first:]
    tp, actual, predicted = (x[..., first:] for x in (c.tp, c.actual, c.predicted))
    kept = c.replaced(tp=tp, actual=actual, predicted=predicted, present=present, matrix=None)
    return _average(kept, top, bottom, average, 0.0)


_PARTS: Any = "parts"


def _average(c: Confusion, top: Tensor, bottom: Tensor, average: Average | None, zero_division: float) -> Tensor:
    if average is _PARTS:
        return top, bottom  # type: ignore[return-value]
    if average is not None:
        checks.check_choice("average", average, AVERAGES)
    if average == "micro":
        return safe_divide(top.sum(-1), bottom.sum(-1), at_zero=zero_division)
    scores = safe_divide(top, bottom, at_zero=zero_division)
    if average is None:
        return scores
    if average == "binary":
        if c.num_classes != 2 or c.multilabel:
            wanted = (
                "one target of two classes, got several targets"
                if c.multilabel
                else f"two classes, got {c.num_classes}"
            )
            raise ValueError(f"average='binary' needs {wanted}; use 'macro', 'micro' or 'weighted'")
        return scores[..., 1]
    defined = zero_division == zero_division
    if average == "weighted":
        return _mean(c, scores, None, weight=c.actual, defined=defined)
    return _mean(c, scores, c.present, defined=defined)


def _mean(
    c: Confusion, scores: Tensor, mask: Tensor | None, weight: Tensor | None = None, *, defined: bool = False
) -> Tensor:
    """Mean over classes that are in the mask and defined; nan if none is defined, 0 if the mask is empty."""
    if defined and mask is not None and weight is None:  # reads no values: a third of the operations
        kept = mask.to(scores.dtype)
        return safe_divide((kept * scores).sum(-1), kept.sum(-1))
    # An undefined score is left out, but not one that is nan because its counts are (a network diverged).
    undefined = scores.isnan() & ~c.tp.isnan() & ~c.predicted.isnan()
    kept = (~undefined).to(scores.dtype)
    if mask is not None:
        kept = kept * mask
    if weight is not None:  # without weights all classes weigh the same, as in scikit-learn
        weighted = kept * weight
        kept = torch.where(weighted.sum(-1, keepdim=True) == 0, kept, weighted)
    mean = safe_divide((kept * torch.where(undefined, 0.0, scores)).sum(-1), kept.sum(-1))
    return torch.where(undefined.all(-1), torch.nan, mean)


def _labelled(c: Confusion) -> Tensor:
    return c.actual > 0 if c.present is None else c.present


def _shares(c: Confusion) -> tuple[Tensor, Tensor, Tensor]:
    """Accuracy, and predictions and labels as shares of n."""
    n = c.total.unsqueeze(-1)
    return safe_divide(c.tp.sum(-1), c.total), safe_divide(c.predicted, n), safe_divide(c.actual, n)
