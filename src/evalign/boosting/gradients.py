"""Gradient of a metric with respect to the scores of all rows, in blocks of rows or compiled (numba)."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evalign.confusion import Confusion
from evalign.kernels.plan import Lines
from evalign.objective import Objective

FUSED = 1 << 22  # scores per block of the fused form, which stores one number for each
FUSED_STEPS = ("annealed", "linear")
EAGER = 1 << 17  # scores per block of the plain form, which stores about thirty numbers for each


@dataclass(frozen=True)
class ScoredRows:
    """Scores (n, C), (n,) for binary or (n, L) for multilabel tasks, labels and weights of the labels' shape."""

    scores: Tensor
    y: Tensor
    weight: Tensor

    def blocks(self, size: int) -> Iterator[tuple[slice, "ScoredRows"]]:
        rows = max(1, size // max(1, self.scores[:1].numel()))
        for start in range(0, max(1, len(self.scores)), rows):
            part = slice(start, start + rows)
            yield part, ScoredRows(self.scores[part], self.y[part], self.weight[part])


def metric_gradient(objective: Objective, table: ScoredRows, temperature: float) -> tuple[Tensor, Tensor]:
    """1 - M(C) and its gradient, of the scores' shape, in blocks of rows; by the fused form if there is one.

    >>> from evalign.steps import StepChoice
    >>> objective = Objective("accuracy", "binary", StepChoice("annealed"), average="binary")
    >>> table = ScoredRows(torch.zeros(2), torch.tensor([0, 1]), torch.ones(2))
    >>> metric_gradient(objective, table, 0.2)
    (tensor(0.5000), tensor([ 0.1500, -0.1500]))
    """
    if objective.is_ranking:
        scores = table.scores.detach().requires_grad_()
        with torch.enable_grad():
            value = objective.ranked(scores, table.y, table.weight, temperature)
            return value.detach(), torch.autograd.grad(value, scores)[0]

    def counted(part: ScoredRows) -> Confusion:
        return objective.counts(part.scores, part.y, part.weight, temperature)[0]

    def plain(part: ScoredRows) -> Confusion:
        return objective.confusion(part.scores, part.y, part.weight, temperature)

    fused = objective.step.step in FUSED_STEPS and not isinstance(objective.thresholds, tuple)
    fused &= objective.thresholds is None if objective.task == "multiclass" else table.scores.dtype == torch.float32
    size = FUSED if fused else EAGER
    # The fused form stores one number per score and no graph, so a table that fits in a block needs one pass.
    in_one_pass = fused and table.scores.numel() <= size
    if in_one_pass:
        scores = table.scores.detach().requires_grad_()
        confusion = counted(ScoredRows(scores, table.y, table.weight))
    else:
        with torch.no_grad():
            confusion = sum((counted(part) for _, part in table.blocks(size)), start=0)  # type: ignore[assignment]
    value, slopes = _pull(objective, confusion, lambda: _summed_matrix(plain, table))
    reads_matrix = len(slopes) == 3
    if in_one_pass and not reads_matrix:
        return value, torch.autograd.grad((confusion.tp, confusion.predicted), scores, slopes)[0]
    gradient = torch.empty_like(table.scores)
    for part, block in table.blocks(EAGER if reads_matrix else size):
        scores = block.scores.detach().requires_grad_()
        counts = (plain if reads_matrix else counted)(ScoredRows(scores, block.y, block.weight))
        values = [counts.tp, counts.predicted, *([counts.matrix] if reads_matrix else [])]
        gradient[part] = torch.autograd.grad(values, scores, slopes)[0]
    return value, gradient


def _summed_matrix(plain: Callable[[ScoredRows], Confusion], table: ScoredRows) -> Tensor:
    with torch.no_grad():
        parts = [plain(part).matrix for _, part in table.blocks(EAGER)]
    return torch.stack(parts).sum(0)


def _pull(objective: Objective, confusion: Confusion, matrix: Callable[[], Tensor]) -> tuple[Tensor, list[Tensor]]:
    """1 - M, and its derivatives with respect to tp, predicted and, if the metric reads it, the matrix."""
    leaves = [confusion.tp.detach().requires_grad_(), confusion.predicted.detach().requires_grad_()]

    def read() -> Tensor:  # only for quadratic kappa and some user functions
        leaves.append(matrix().detach().requires_grad_())
        return leaves[-1]

    tp, predicted = leaves
    cut = confusion.replaced(tp=tp, predicted=predicted, matrix=None if confusion.multilabel else read)
    value = objective.metric_term(cut)
    if not value.requires_grad:  # a function of the labels alone
        value = value + 0.0 * (tp.sum() + predicted.sum())
    found = torch.autograd.grad(value, leaves, allow_unused=True)
    return value.detach(), [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, found, strict=True)]


class Bend(NamedTuple):
    """Terms of the second derivative; see `ScoreObjective`."""

    curvature: float
    floor: float
    damping: float


def has_compiled_form(objective: Objective, table: ScoredRows, temperature: float) -> bool:
    """Whether there is a compiled form for this objective and these scores."""
    is_one_column = objective.task == "binary" and table.scores.is_contiguous()
    return is_one_column and objective.is_whole(table.scores, table.y, table.weight, temperature, objective.beta)


def compiled_derivatives(
    objective: Objective, table: ScoredRows, temperature: float, metric_weight: float, bend: Bend
) -> tuple[float, float, NDArray[np.float32], NDArray[np.float32]]:
    """1 - metric, mean cross-entropy (0 without an anchor), and both derivatives of n times the loss.

    >>> import torch
    >>> from evalign.steps import StepChoice
    >>> objective = Objective("f1", "binary", StepChoice("annealed"), average="binary", anchor=1.0)
    >>> table = ScoredRows(torch.zeros(4), torch.tensor([0, 0, 0, 1]), torch.ones(4))
    >>> lost, entropy, gradient, hessian = compiled_derivatives(objective, table, 0.2, 1.0, Bend(1.0, 1e-3, 1.0))
    >>> gradient.round(3), hessian.round(3)
    (array([ 0.633,  0.633,  0.633, -1.167], dtype=float32), array([0.383, 0.383, 0.383, 0.917], dtype=float32))
    """
    # These need numba, which takes half a second to import.
    from evalign.kernels.cpu.column_loops import derivatives
    from evalign.kernels.cpu.cpu_loss import count_columns, metric_of

    plan = objective.plan(beta=objective.beta)
    settings = objective.settings(temperature)
    counts = np.zeros((3, 2))
    losses, totals = count_columns((table.scores, table.y, table.weight), settings, counts, two_classes=True)
    n = float(counts[1].sum())
    slopes = np.empty((2, 2))
    value = metric_of(counts, totals, plan, slopes)
    (by_tn, by_tp), (by_no, by_yes) = slopes
    pull = n * metric_weight * np.array([by_yes - by_no - by_tn, by_yes - by_no + by_tp])  # of a row with label 0, 1
    anchor = objective.anchor
    options = (anchor, (anchor or 1.0) * bend.curvature, bend.floor, bend.damping, objective.label_smoothing)
    gradient, hessian = np.empty(len(table.scores), np.float32), np.empty(len(table.scores), np.float32)
    columns = table.scores.numpy(), table.y.numpy(), table.weight.numpy()
    line = np.array(Lines.at(settings.thresholds[0], settings.points), np.float32)
    derivatives(columns, line, pull.astype(np.float32), np.array(options, np.float32), gradient, hessian)
    return value, losses / n if anchor and n else 0.0, gradient, hessian
