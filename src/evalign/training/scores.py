"""The hard metric of probabilities, for watching validation data."""

from collections.abc import Callable

from torch import Tensor

from evalign.confusion import Confusion
from evalign.metrics import MetricFunction


def argmax_score(metric: MetricFunction) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """(probabilities (n, C), labels, weights) -> the metric of the most probable classes; vmappable.

    >>> import torch
    >>> from evalign import metrics
    >>> p = torch.tensor([[0.9, 0.1], [0.4, 0.6]])
    >>> argmax_score(metrics.accuracy)(p, torch.tensor([0, 0]), torch.tensor([1.0, 3.0]))
    tensor(0.2500, dtype=torch.float64)
    """

    def score(p: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        return metric(Confusion.hard(p.argmax(1), y, p.shape[1], sample_weight=weight))

    return score
