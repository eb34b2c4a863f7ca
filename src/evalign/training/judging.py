"""A network outside of training: its logits, how validation rows judge it, and the class offsets that they ask for."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from evalign.confusion import Confusion, Task
from evalign.objective import Objective, cross_entropy
from evalign.offsets import metric_offset
from evalign.training.outputs import Term, flat, joined, probabilities_of, with_offset
from evalign.training.packed import Table, number_type
from evalign.training.recipes import Stage
from evalign.training.rows import Rows

Score = Callable[[Tensor, Tensor, Tensor], Tensor]  # probabilities (n, C), labels (n,), weights (n,) -> hard metric
PICTURES_AT_ONCE = 2048


def rows_at_once(device: torch.device) -> int:
    """How many rows a network is shown at once outside of training: enough to be busy, and no table's worth."""
    return 1024 if device.type == "cpu" else 16384


@torch.no_grad()
def predict_logits(network: nn.Module, x: Table, rows: Tensor | None = None, *, amp: bool = False) -> Tensor:
    """Logits of x, or of those `rows` of it, in evaluation mode; bytes give float32.

    In pieces, so that hidden layers never hold a whole table, and neither does a copy of the rows.
    """
    network.eval()
    size = rows_at_once(x.device) if x.dim() <= 2 else PICTURES_AT_ONCE
    count = len(x) if rows is None else len(rows)
    places = [slice(i, i + size) for i in range(0, max(1, count), size)]
    pieces = (x[part] for part in (places if rows is None else torch.split(rows.to(x.device), size)))
    dtype = number_type(x)
    with torch.autocast(x.device.type, dtype=torch.bfloat16, enabled=amp):
        return joined((network(part).to(dtype) for part in pieces), count)


@torch.no_grad()
def validate(
    network: nn.Module,
    rows: Rows,
    stage: Stage,
    objective: Objective | Term,
    score: Score,
    temperature: float,
    amp: bool = False,
    *,
    task: Task = "multiclass",
    offset: Tensor | None = None,
) -> dict[str, float]:
    """Validation loss at this temperature (with the offsets that training has), cross-entropy and hard score."""
    task = objective.task if isinstance(objective, Objective) else task
    logits, y, weight = flat(predict_logits(network, rows.x, amp=amp), rows.y, rows.weight, task)
    entropy = cross_entropy(logits, y, weight, task)
    z = with_offset(logits, offset, task)
    anchor = entropy if offset is None else cross_entropy(z, y, weight, task)
    metric_term = 0.0
    if stage.metric and isinstance(objective, Objective):
        metric_term = float(objective.metric_term(objective.counts(z, y, weight, temperature)[0]))
    elif stage.metric and not isinstance(objective, Objective):
        metric_term = float(objective(z, y, weight, z.new_full((), temperature)))
    return {
        "loss": metric_term + stage.anchor * float(anchor),
        "entropy": float(entropy),
        "score": float(score(probabilities_of(logits, task), y, weight)),
    }


def estimate_offset(
    network: nn.Module, rows: Rows, objective: Objective | Term, stage: Stage, before: Tensor | None, amp: bool = False
) -> Tensor:
    """The class offsets that the metric asks for at the confusion matrix of `rows`, by the strength of the stage.

    After the first time, half way between what was and what is asked for now: the matrix answers to the offset.
    """
    if not isinstance(objective, Objective) or objective.task == "multilabel" or objective.metric == "auroc":
        raise ValueError("class offsets need a metric of one confusion matrix; train without offset")
    logits, y, weight = flat(predict_logits(network, rows.x, amp=amp), rows.y, rows.weight, objective.task)
    p = probabilities_of(logits, objective.task)
    matrix = Confusion.hard(p.argmax(1), y, p.shape[1], sample_weight=weight).matrix
    # On the CPU: a few numbers, once a stage, and float64, which not every device has.
    offset = metric_offset(matrix.cpu(), objective.score, stage.offset).float().to(rows.x.device)
    return offset if before is None else (offset + before) / 2
