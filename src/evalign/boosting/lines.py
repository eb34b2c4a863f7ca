"""The five-point step at one threshold, as four lines: its value and its slope in one look."""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from evalign.objective import Objective


@dataclass(frozen=True)
class Lines:
    """Points (0, 0), (tau - w/2, low), (tau, 1/2), (tau + w/2, 1 - low), (1, 1), joined by lines.

    BtG Eq. 5 and EAST Eq. 4; `evalign.steps` has the same as functions.

    >>> Lines(0.5, low=0.2, width=0.5).value_and_slope(torch.tensor([0.125, 0.5, 0.875]))
    (tensor([0.1000, 0.5000, 0.9000]), tensor([0.8000, 1.2000, 0.8000]))
    """

    threshold: float
    low: float
    width: float

    @classmethod
    def of(cls, objective: Objective, temperature: float) -> Self | None:
        """The step of a binary or multilabel objective, None where it is not made of lines at one threshold."""
        if objective.task == "multiclass" or isinstance(objective.thresholds, tuple):
            return None
        threshold = 0.5 if objective.thresholds is None else objective.thresholds
        room = min(threshold, 1 - threshold)
        if objective.step.step == "annealed":
            return cls(threshold, temperature, 5 * temperature * room)
        if objective.step.step == "linear":
            return cls(threshold, objective.step.delta, room)
        return None

    def value_and_slope(self, p: Tensor) -> tuple[Tensor, Tensor]:
        left, right = self.threshold - self.width / 2, self.threshold + self.width / 2
        middle = (1 - 2 * self.low) / self.width
        # At T = 0.4 an outer line has no length, and no probability lies on it.
        first = self.low / left if left > 0 else 0.0
        last = self.low / (1 - right) if right < 1 else 0.0
        below, above = p < left, p > right
        slope = torch.full_like(p, middle).masked_fill_(below, first).masked_fill_(above, last)
        inner = 0.5 + middle * (p - self.threshold)
        return torch.where(below, first * p, torch.where(above, 1 - last * (1 - p), inner)), slope
