"""Approximations of the Heaviside step H(p, tau) = [p >= tau].

Every step takes probabilities of any shape and a threshold that is a number, or a tensor that broadcasts
against them (one per row, one per grid point), and returns soft membership of the same shape.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from evalign import checks

Threshold = float | Tensor
Step = Callable[[Tensor, Threshold], Tensor]


def hard(p: Tensor, threshold: Threshold) -> Tensor:
    """H(p, tau) = [p >= tau]; a tie is positive, as in scikit-learn.

    >>> hard(torch.tensor([0.2, 0.5, 0.9]), 0.5)
    tensor([0., 1., 1.])
    """
    return (p >= threshold).to(p.dtype)


def linear(p: Tensor, threshold: Threshold, *, delta: float | Tensor = 0.1) -> Tensor:
    """Five points joined by lines (BtG Eq. 5), with tau_m = min(tau, 1 - tau).

    The points are (0, 0), (tau - tau_m/2, delta), (tau, 1/2), (tau + tau_m/2, 1 - delta), (1, 1).

    >>> linear(torch.tensor([0.0, 0.25, 0.5, 0.75, 1.0]), 0.5, delta=0.1)
    tensor([0.0000, 0.1000, 0.5000, 0.9000, 1.0000])
    """
    checks.check_threshold(threshold)
    checks.check_number("delta", delta, low=0.0, high=0.5)
    return _five_points(p, threshold, delta, _distance_to_end(threshold))


def annealed(p: Tensor, threshold: Threshold, *, temperature: float | Tensor = 0.2) -> Tensor:
    """The same five points with delta = T and tau_m = 5 T min(tau, 1 - tau), 0 < T <= 0.4 (EAST Eq. 4).

    T = 0.2 is `linear` with delta 0.2, and T -> 0 gives H. At T = 0.4 the outermost points meet their
    neighbours (the left ones for tau <= 1/2, the right ones for tau >= 1/2), so that H jumps from 0 to T
    there; following Eq. 4, p = 0 then belongs to the middle line.

    >>> annealed(torch.tensor([0.1, 0.5, 0.9]), 0.5, temperature=0.01)
    tensor([0.0021, 0.5000, 0.9979])
    """
    checks.check_threshold(threshold)
    checks.check_temperature(temperature)
    return _five_points(p, threshold, temperature, 5 * temperature * _distance_to_end(threshold))


def sigmoid(p: Tensor, threshold: Threshold, *, k: float | Tensor = 10.0) -> Tensor:
    """1 / (1 + exp(-k (p - tau))) (BtG Sec. 3.1); it misses 0 and 1 at the ends for small k.

    >>> sigmoid(torch.tensor([0.0, 0.5, 1.0]), 0.5, k=10.0)
    tensor([0.0067, 0.5000, 0.9933])
    """
    checks.check_threshold(threshold)
    checks.check_number("k", k, low=0.0, open_low=True)
    return torch.sigmoid(k * (p - threshold))


def identity(p: Tensor, threshold: Threshold) -> Tensor:
    """The probability itself, without a step: the soft counts of Dice, Jaccard and Tversky losses in other libraries.

    >>> identity(torch.tensor([0.2, 0.5]), 0.5)
    tensor([0.2000, 0.5000])
    """
    return p


def _distance_to_end(threshold: Threshold) -> Threshold:
    if isinstance(threshold, Tensor):
        return torch.minimum(threshold, 1 - threshold)
    return min(threshold, 1 - threshold)


def _five_points(p: Tensor, threshold: Threshold, low: Threshold, width: Threshold) -> Tensor:
    """Lines through (0, 0), (tau - w/2, low), (tau, 1/2), (tau + w/2, 1 - low), (1, 1)."""
    left, room = threshold - width / 2, 1 - threshold - width / 2
    # Where two points meet (T = 0.4) the outer line has length 0. Every quotient is bounded before it is
    # divided, or the branch not taken would send inf * 0 = nan back to the threshold.
    below = low * _at_most(p, left) / _positive(left)
    above = 1 - low * _at_most(1 - p, room) / _positive(room)
    offset = p - threshold
    half = width / 2
    middle = 0.5 + (1 - 2 * low) * _at_most(-_at_most(-offset, half), half) / width
    return torch.where(p < left, below, torch.where(1 - p < room, above, middle))


def _at_most(x: Tensor, bound: Threshold) -> Tensor:
    return torch.where(x > bound, bound, x)  # in this order a nan stays one, and a tie has the slope of its line


def _positive(x: Threshold) -> Threshold:
    if isinstance(x, Tensor):
        return torch.where(x > 0, x, 1.0)
    return x if x > 0 else 1.0


@dataclass(frozen=True)
class StepChoice:
    """A step by name with its options, or a user's function; only the temperature is set later."""

    step: str | Step
    delta: float = 0.1
    k: float = 10.0

    def __post_init__(self) -> None:
        if not callable(self.step):
            checks.check_choice("step", self.step, ["annealed", "linear", "sigmoid", "identity"])
        checks.check_number("delta", self.delta, low=0.0, high=0.5)
        checks.check_number("k", self.k, low=0.0, open_low=True, open_high=True)
        if self.step == "identity":
            object.__setattr__(self, "step", identity)

    def at(self, temperature: float | Tensor) -> Step:
        if callable(self.step):
            return self.step
        if self.step == "annealed":
            return partial(annealed, temperature=temperature)
        return partial(linear, delta=self.delta) if self.step == "linear" else partial(sigmoid, k=self.k)
