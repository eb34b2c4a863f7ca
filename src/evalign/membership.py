"""Probabilities -> soft class membership: by a fixed threshold, a grid of thresholds, or a dynamic one."""

from collections.abc import Sequence

import torch
from torch import Tensor

from evalign import checks
from evalign.checks import safe_divide
from evalign.steps import Step, Threshold

BTG_GRID = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)


def fixed(p: Tensor, step: Step, threshold: Threshold = 0.5) -> Tensor:
    """s = H(p, tau), the membership of the positive class, for binary problems (BtG Eq. 6); any shape.

    >>> from evalign import steps
    >>> fixed(torch.tensor([0.1, 0.5, 0.9]), steps.linear)
    tensor([0.0400, 0.5000, 0.9600])
    """
    return step(p, threshold)


def grid(p: Tensor, step: Step, thresholds: Sequence[float] | Tensor = BTG_GRID) -> Tensor:
    """H(p, tau_g) for every threshold of a grid, as a new leading dimension: (G, *p.shape).

    >>> from evalign import steps
    >>> grid(torch.tensor([0.3, 0.7]), steps.hard, [0.25, 0.5])
    tensor([[1., 1.],
            [0., 1.]])
    """
    if not isinstance(thresholds, Tensor):
        for threshold in thresholds:
            checks.check_threshold(threshold)
    if p.is_cuda and not isinstance(thresholds, Tensor):
        # Filled on the device: a copy to it would synchronise, and cannot be recorded in a CUDA graph.
        thresholds = torch.stack([p.new_full((), threshold) for threshold in thresholds])
    taus = torch.as_tensor(thresholds, dtype=p.dtype, device=p.device)
    return step(p, taus.reshape(-1, *([1] * p.dim()))).expand(len(taus), *p.shape)  # steps may take no threshold


def dynamic_threshold(p: Tensor, dim: int = 1) -> Tensor:
    """tau_avg(p), the mean of the two largest entries (EAST Sec. 4.1); at most 1/2 for probabilities.

    >>> dynamic_threshold(torch.tensor([[0.1, 0.6, 0.3]]))
    tensor([[0.4500]])
    """
    return p.topk(2, dim).values.mean(dim, keepdim=True)


def dynamic(p: Tensor, step: Step, threshold: Threshold | None = None, dim: int = 1) -> Tensor:
    """g(p) = h / sum(h) with h = H(p, tau_avg(p)) (EAST Eq. 5): a distribution over the classes in `dim`.

    The gradient flows through the threshold too. A fixed `threshold` replaces it if given.
    Where the step is 0 for every class (a hard step above all of them), so is the membership.

    >>> from evalign import steps
    >>> dynamic(torch.tensor([[0.1, 0.6, 0.3]]), steps.annealed)
    tensor([[0.0816, 0.6429, 0.2755]])
    """
    h = step(p, dynamic_threshold(p, dim) if threshold is None else threshold)
    return safe_divide(h, h.sum(dim, keepdim=True))
