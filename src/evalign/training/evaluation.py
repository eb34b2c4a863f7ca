r"""Logits, validation values and class offsets of a network, for every shape that the logits of a task may have.

Class offsets: at a confusion matrix C the gradient G = dM/dC is what one more sample of class k, decided as j, is worth
to the metric. Decided right instead of wrong, with errors spread as those of class k are, a sample is worth

    w_k = G_kk - sum_{j != k} e_kj G_kj,        e_kj = C_kj / sum_{j != k} C_kj.

A network whose logits f + o are fitted to the labels has f = log p - o, and argmax f is argmax_k w_k p_k for
o_k = -log w_k: the decision that is best for these gains. Accuracy has w = const, so no offset; balanced accuracy has
w_k = 1 / (K n_k), so o = log prior, the logit adjustment of Menon et al. 2021.
"""

import itertools
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from evalign._objective import Objective, cross_entropy
from evalign.confusion import Confusion, Task
from evalign.metrics import MetricFunction
from evalign.tables.packed import Table, number_type
from evalign.training.batches import Rows
from evalign.training.recipes import Stage

# (logits, labels, weights, temperature) -> what a stage with `metric` minimises beside its anchor; vmappable
Term = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
Watch = Callable[[Tensor, Tensor, Tensor], Tensor]  # logits, labels, weights -> (k,) numbers to keep of every epoch


def joined(parts: Iterable[Tensor], rows: int, dim: int = 0) -> Tensor:
    """`torch.cat` of parts computed one after the other, `rows` long in all.

    The result is allocated first: small results allocated between the large temporary tensors of each part would
    fragment the heap.

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
    """Logits, labels and weights in the shapes that an objective takes.

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
    """The loss of logits; for an ensemble (members, n, C) the mean of its members' losses.

    >>> mean_over_members(lambda z: z.sum(), torch.ones(3, 2, 5), "multiclass")
    tensor(10.)
    """
    if task != "multiclass" or logits.dim() < 3:
        return loss(logits)
    return torch.stack([loss(own) for own in logits]).mean()


def with_offset(logits: Tensor, offset: Tensor | None, task: Task) -> Tensor:
    """Logits plus class offsets; a binary logit is the difference of two.

    >>> with_offset(torch.zeros(1), torch.tensor([1.0, 3.0]), "binary")
    tensor([2.])
    """
    if offset is None:
        return logits
    offset = offset.to(logits)
    return logits + (offset[1] - offset[0] if task == "binary" else offset)


Score = Callable[[Tensor, Tensor, Tensor], Tensor]  # probabilities (n, C), labels (n,), weights (n,) -> hard metric
IMAGES_AT_ONCE = 2048


def rows_at_once(device: torch.device) -> int:
    """Rows per forward pass outside of training."""
    return 1024 if device.type == "cpu" else 16384


@torch.no_grad()
def predict_logits(network: nn.Module, x: Table, rows: Tensor | None = None, *, amp: bool = False) -> Tensor:
    """Logits of x, or of those `rows` of it, in evaluation mode; bytes give float32.

    In pieces, so that hidden layers never hold a whole table, and neither does a copy of the rows.
    """
    network.eval()
    size = rows_at_once(x.device) if x.dim() <= 2 else IMAGES_AT_ONCE
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
    """Class offsets of the metric at the confusion matrix of `rows`, multiplied by the strength of the stage.

    After the first time, the mean of the previous and the new offset, since the matrix responds to the offset.
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


LEAST = 1e-3  # of the largest gain: a metric may have nothing to gain from a class, but no logit moves by more than 7


def of_matrix(matrix: Tensor) -> Confusion:
    """The counts of a matrix (C, C), rows = labels; classes without a row are left out of means."""
    actual = matrix.sum(1)
    return Confusion(matrix.diagonal(), actual, matrix.sum(0), matrix.sum(), present=actual > 0, matrix=matrix)


def gain_matrix(matrix: Tensor, metric: Callable[[Confusion], Tensor]) -> Tensor:
    """G = dM/dC at `matrix`, by autograd.

    >>> from evalign import metrics
    >>> gain_matrix(torch.tensor([[3.0, 1.0], [2.0, 4.0]]), metrics.accuracy)
    tensor([[ 0.0300, -0.0700],
            [-0.0700,  0.0300]], dtype=torch.float64)
    """
    if matrix.dim() != 2 or matrix.shape[0] != matrix.shape[1] or matrix.shape[0] < 2:
        raise ValueError(
            f"a confusion matrix (C, C) of two classes at least is needed, got shape {tuple(matrix.shape)}"
        )
    with torch.enable_grad():
        counts = matrix.detach().double().requires_grad_()
        return torch.autograd.grad(metric(of_matrix(counts)), counts)[0]


def class_gains(matrix: Tensor, metric: Callable[[Confusion], Tensor]) -> Tensor:
    """w_k for every class; one error, spread as all errors are, is added to each row so that none has zero errors."""
    gain = gain_matrix(matrix, metric)
    counts = matrix.detach().to(gain)
    errors = counts - counts.diagonal().diag()
    usual = errors.sum(0) if bool(errors.sum() > 0) else torch.ones_like(errors[0])
    usual = usual.expand_as(errors) * (1 - torch.eye(len(errors), dtype=gain.dtype, device=gain.device))
    # A class whose own column alone has errors falls back on an even spread.
    even = (1 - torch.eye(len(errors), dtype=gain.dtype, device=gain.device)) / (len(errors) - 1)
    mass = usual.sum(1, keepdim=True)
    errors = errors + torch.where(mass > 0, usual / torch.where(mass > 0, mass, 1.0), even)
    return gain.diagonal() - (errors * gain).sum(1) / errors.sum(1)


def metric_offset(matrix: Tensor, metric: Callable[[Confusion], Tensor], strength: float = 1.0) -> Tensor:
    """o_k = -strength log w_k, centred (a constant moves no decision); a class without rows gets the smallest.

    >>> from evalign import metrics
    >>> matrix = torch.tensor([[80.0, 10.0], [5.0, 5.0]])
    >>> metric_offset(matrix, metrics.balanced_accuracy)  # log(90 / 10) / 2 = 1.0986, and its negative
    tensor([ 1.0986, -1.0986], dtype=torch.float64)
    >>> metric_offset(matrix, metrics.accuracy)
    tensor([0., 0.], dtype=torch.float64)
    """
    gains = class_gains(matrix, metric)
    if not bool(gains.isfinite().all()) or not bool(gains.max() > 0):
        raise ValueError(
            f"an offset needs a metric that gains when errors are put right, got gains {gains.tolist()}; "
            "train without offset"
        )
    gains = gains.clamp_min(LEAST * gains.max())
    seen = matrix.sum(1).to(gains.device) > 0
    gains = torch.where(seen, gains, gains[seen].max() if bool(seen.any()) else gains.max())
    offset = -strength * gains.log()
    return offset - offset.mean()
