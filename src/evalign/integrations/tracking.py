"""The exact soft and hard metric of an epoch, for all integrations.

A forward hook on the loss sees every validation batch. Counts are summed, over ranks too, and the metric is applied
once, since the mean of the batches' losses would be a different number. Where the loss is such a mean, with a metric
per image or a module as the anchor, it is taken over rows.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from evalign import metrics
from evalign._batch import FlatBatch, Sums, dense
from evalign.confusion import Confusion
from evalign.distributed import is_up
from evalign.losses import MetricLoss


class Tracker:
    """Sums the counts of the batches that a loss sees outside of training.

    >>> loss = MetricLoss("f1")
    >>> tracker = Tracker(loss)
    >>> with tracker.listening(), torch.no_grad():
    ...     for x, y in ((torch.eye(3), [0, 1, 2]), (torch.eye(3), [0, 2, 2])):
    ...         _ = loss(10 * x, torch.tensor(y))
    >>> {name: round(value, 3) for name, value in tracker.scores().items()}
    {'loss': 0.178, 'f1': 0.822, 'soft_f1': 0.822}
    """

    def __init__(self, loss: MetricLoss) -> None:
        self.loss = loss
        self.name = metrics.name_of(loss.metric)
        self.reset()

    def reset(self) -> None:
        self.sums: Sums | Tensor | None = None  # a tensor: the sum of losses and the number of rows
        self.hard: Confusion | None = None
        self.rows: list[FlatBatch] = []  # for ranking metrics, which need all scores at once

    @contextmanager
    def listening(self) -> Iterator[None]:
        handle = self.listen()
        try:
            yield
        finally:
            handle.remove()

    def listen(self) -> Any:
        """Record the batches of the loss until the returned handle is removed."""
        return self.loss.register_forward_hook(self._see, with_kwargs=True)

    def _see(self, module: nn.Module, inputs: Any, named: dict[str, Any], output: Tensor) -> None:
        if not (self.loss.training and torch.is_grad_enabled()):
            self.add(*inputs, **named)

    @torch.no_grad()
    def add(self, input: Tensor, target: Tensor, sample_weight: Tensor | None = None) -> None:
        """Record a batch that the loss is called with."""
        sums: Any = None
        if self.loss.per_image or callable(self.loss.options.anchor_term):
            value = self.loss.forward(input, target, sample_weight).mean()
            sums = torch.stack([value * len(input), value.new_tensor(len(input))])
        if self.loss.objective.is_ranking:
            flat = self.loss.flat(input, target, sample_weight).rows()
            y, weight = dense(flat.y, flat.weight, flat.logits.dtype)
            self.rows.append(FlatBatch(flat.logits.cpu(), y.cpu(), weight.cpu()))
        else:
            sums = self.loss.sums(input, target, sample_weight).alone() if sums is None else sums
            hard = self._hard(input, target, sample_weight)
            self.hard = hard if self.hard is None else self.hard + hard
        self.sums = sums if self.sums is None else self.sums + sums

    def scores(self) -> dict[str, float]:
        """The loss of all batches together, and the hard and the soft metric, by name."""
        parts: list[Any] = [(self.sums, self.hard, self.rows)]
        if is_up() and dist.get_world_size() > 1:  # as objects, since a rank without a batch knows no shapes
            own = _portable(self.sums), _portable(self.hard), self.rows
            parts = [(None, None, [])] * dist.get_world_size()
            dist.all_gather_object(parts, own)
        totals, hard, rows = zip(*parts, strict=True)
        found: dict[str, float] = {}
        objective, beta = self.loss.objective, self.loss.beta
        with torch.no_grad():
            if any(rows):
                logits, y, weight = (torch.cat([row[i] for part in rows for row in part]) for i in range(3))
                found["loss"] = float(objective(logits, y, weight, self.loss.temperature))
                found[self.name] = 1 - float(objective.ranked(logits, y, weight))
            total: Any = sum(part for part in totals if part is not None)
            if isinstance(total, Tensor):
                found["loss"] = float(total[0] / total[1])
            elif isinstance(total, Sums):
                found["loss"] = float(objective.of_sums(total, beta))
                found[f"soft_{self.name}"] = 1 - float(objective.metric_term(total.confusion, beta))
        counts: Any = sum(part for part in hard if part is not None)
        if isinstance(counts, Confusion) and self.loss.metric != "auroc":
            found[self.name] = float(objective.score(counts, beta))
        return dict(sorted(found.items(), key=lambda item: (item[0] != "loss", item[0])))

    def _hard(self, input: Tensor, target: Tensor, sample_weight: Tensor | None) -> Confusion:
        """Counts of the labels predicted by argmax or by the threshold (1/2 for a grid)."""
        loss = self.loss
        options: dict[str, Any] = {"sample_weight": sample_weight, "ignore_index": loss.ignore_index}
        if loss.task == "multiclass":
            dim = loss.class_dim
            if target.is_floating_point():  # a soft label counts as its most probable class
                target = target.argmax(dim)
            confusion = Confusion.hard(input.argmax(dim), target, input.shape[dim], **options)
        else:
            if loss.task == "binary" and input.dim() == target.dim() + 1:
                two = input.shape[loss.class_dim] == 2
                first, last = input.select(loss.class_dim, 0), input.select(loss.class_dim, -1)
                input = last - first if two and loss.from_logits else last
            p = input.sigmoid() if loss.from_logits else input
            ignored = target == loss.ignore_index
            target = torch.where(ignored, loss.ignore_index, (target >= 0.5).long())
            threshold = loss.objective.thresholds
            chosen = (p >= (threshold if isinstance(threshold, float) else 0.5)).long()
            confusion = Confusion.hard(chosen, target, 2, multilabel=loss.task == "multilabel", **options)
        if not confusion.multilabel:
            _ = confusion.matrix  # built now: a sum has a matrix only if its parts have
        return confusion


def _portable(part: Any) -> Any:
    """A copy to send to other processes: on the CPU, without an unbuilt matrix."""
    if part is None or isinstance(part, Tensor):
        return part if part is None else part.cpu()
    confusion = part.confusion if isinstance(part, Sums) else part
    matrix = None if confusion.built_matrix is None else confusion.built_matrix.cpu()
    vectors = {name: getattr(confusion, name).cpu() for name in ("tp", "actual", "predicted", "total")}
    present = None if confusion.present is None else confusion.present.cpu()
    copied = confusion.replaced(**vectors, present=present, matrix=matrix)
    return Sums(copied, part.entropy.cpu(), part.weight.cpu()) if isinstance(part, Sums) else copied
