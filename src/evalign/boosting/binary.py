"""The derivatives of a binary objective whose metric has a closed form, by compiled loops (float32 scores)."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from evalign._objective import Objective
from evalign.boosting.gradients import Table
from evalign.kernels.plan import Lines

Floats = NDArray[np.float32]


class Bend(NamedTuple):
    """What the second derivative is made of; see `ScoreObjective`."""

    curvature: float
    floor: float
    damping: float


def takes(objective: Objective, table: Table, temperature: float) -> bool:
    """Whether there is a compiled form for this objective and these scores."""
    is_one_column = objective.task == "binary" and table.scores.is_contiguous()
    return is_one_column and objective.is_whole(table.scores, table.y, table.weight, temperature, objective.beta)


def derivatives(
    objective: Objective, table: Table, temperature: float, metric_weight: float, bend: Bend
) -> tuple[float, float, Floats, Floats]:
    """1 - metric, mean cross-entropy (0 without an anchor), and both derivatives of n times the loss.

    >>> import torch
    >>> from evalign.steps import StepChoice
    >>> objective = Objective("f1", "binary", StepChoice("annealed"), average="binary", anchor=1.0)
    >>> table = Table(torch.zeros(4), torch.tensor([0, 0, 0, 1]), torch.ones(4))
    >>> lost, entropy, gradient, hessian = derivatives(objective, table, 0.2, 1.0, Bend(1.0, 1e-3, 1.0))
    >>> gradient.round(3), hessian.round(3)
    (array([ 0.633,  0.633,  0.633, -1.167], dtype=float32), array([0.383, 0.383, 0.383, 0.917], dtype=float32))
    """
    from evalign.boosting import binary_loop  # these need numba, which takes half a second to import
    from evalign.kernels.cpu.cpu_loss import by_column, count_columns, metric_of

    plan = objective.plan(beta=objective.beta)
    settings = plan.settings(objective.points(temperature))
    columns = (table.scores[:, None], table.y[:, None], table.weight[:, None])
    counts = np.zeros((3, 2))
    losses, totals = count_columns(columns, settings, counts, two_classes=True)
    n = float(counts[1].sum())
    value, slopes = metric_of(counts, totals, plan)
    by_tp, by_predicted = by_column(slopes)[:, 0]
    pull = n * metric_weight * np.array([by_predicted, by_predicted + by_tp])
    anchor = objective.anchor
    options = (anchor, (anchor or 1.0) * bend.curvature, bend.floor, bend.damping, objective.label_smoothing)
    gradient, hessian = np.empty(len(table.scores), np.float32), np.empty(len(table.scores), np.float32)
    z, y, w = (column.numpy() for column in (table.scores, table.y, table.weight))
    line = np.array(Lines.at(settings.thresholds[0], settings.points), np.float32)
    binary_loop.derivatives(
        z, y, w, line, pull.astype(np.float32), np.array(options, np.float32), gradient, hessian
    )  # fmt: skip
    return value, losses / n if anchor and n else 0.0, gradient, hessian
