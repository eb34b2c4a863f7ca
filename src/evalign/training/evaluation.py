"""What networks put out, for every shape a task may have: one number a row, one a pair of a graph, or one a class."""

import itertools
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from evalign._objective import Objective, cross_entropy
from evalign.confusion import Confusion, Task
from evalign.metrics import MetricFunction
from evalign.tables.packed import Table, number_type
from evalign.training.batches import Rows
from evalign.training.offsets import metric_offset
from evalign.training.recipes import Stage

# (logits, labels, weights, temperature) -> what a stage with `metric` minimises beside its anchor; vmappable
Term = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
Watch = Callable[[Tensor, Tensor, Tensor], Tensor]  # logits, labels, weights -> (k,) numbers to keep of every epoch


def joined(parts: Iterable[Tensor], rows: int, dim: int = 0) -> Tensor:
    """`torch.cat` of parts that are made one after the other, `rows` long in all.

    The room for all is taken once: small results kept between the large tensors that come and go for each part would
    tear the free memory into pieces that no large tensor fits into, and every part would take new room.

    >>> joined((torch.full((1, n), float(n)) for n in (1, 2)), 3, dim=1)
    tensor([[1., 2., 2.]])
    """
    parts = iter(parts)
    first = next(parts)
    whole = first.new_empty(*first.shape[:dim], rows, *first.shape[dim + 1 :])
    start = 0
    for part in itertools.chain([first], parts):
        whole.narrow(dim, start, part.shape[dim]).copy_(part)
        start += part.shape[dim]
    return whole


def flat(logits: Tensor, y: Tensor, weight: Tensor, task: Task) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, labels and weights as an objective takes them.

    Binary logits (M,), (M, 1) or (F, E) and labels (M,) or (F, E) become vectors, a row's weight that of all its
    pairs. Multiclass ones, (M, C) and (M,), stay.

    >>> z, y, w = flat(torch.zeros(2, 3), torch.ones(2, 3), torch.tensor([1.0, 5.0]), "binary")
    >>> z.shape, w.tolist()
    (torch.Size([6]), [1.0, 1.0, 1.0, 5.0, 5.0, 5.0])
    """
    if task != "binary":
        return logits, y, weight
    if logits.numel() != y.numel():
        raise ValueError(
            f"a binary task has one logit for every label, got logits {tuple(logits.shape)} and labels "
            f"{tuple(y.shape)}; give the network one output"
        )
    if weight.dim() < y.dim():
        weight = weight.reshape(*weight.shape, *([1] * (y.dim() - weight.dim()))).expand(y.shape)
    return logits.reshape(-1), y.reshape(-1), weight.reshape(-1)


def probabilities_of(logits: Tensor, task: Task) -> Tensor:
    """Probabilities (n, C) of flat logits; (n, 2) of binary ones.

    >>> probabilities_of(torch.zeros(1), "binary")
    tensor([[0.5000, 0.5000]])
    """
    if task != "binary":
        return logits.softmax(-1)
    p = logits.sigmoid()
    return torch.stack([1 - p, p], -1)


def mean_over_members(loss: Callable[[Tensor], Tensor], logits: Tensor, task: Task) -> Tensor:
    """The loss of logits; of an ensemble's (members, n, C) the mean of its members' losses, each of its own counts.

    >>> mean_over_members(lambda z: z.sum(), torch.ones(3, 2, 5), "multiclass")
    tensor(10.)
    """
    if task != "multiclass" or logits.dim() < 3:
        return loss(logits)
    return torch.stack([loss(own) for own in logits]).mean()


def with_offset(logits: Tensor, offset: Tensor | None, task: Task) -> Tensor:
    """Flat logits with one number added for every class; a binary logit is the difference of two.

    >>> with_offset(torch.zeros(1), torch.tensor([1.0, 3.0]), "binary")
    tensor([2.])
    """
    if offset is None:
        return logits
    offset = offset.to(logits)
    return logits + (offset[1] - offset[0] if task == "binary" else offset)


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
