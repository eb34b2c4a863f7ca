"""The exact soft and hard metric of an epoch, for all integrations.

A forward hook on the loss sees every validation batch. Counts are added up, over ranks too, and the metric is applied
once: the mean of the batches' losses would be another number.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from evalign._batch import FlatBatch, Sums, dense
from evalign.confusion import Confusion
from evalign.distributed import is_up
from evalign.losses import MetricLoss


class Tracker:
    """Adds up the batches that a loss sees outside of training.

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
        self.name = loss.metric if isinstance(loss.metric, str) else getattr(loss.metric, "__name__", "metric")
        self.reset()

    def reset(self) -> None:
        self.sums: Sums | None = None
        self.hard: Confusion | None = None
        self.rows: list[FlatBatch] = []  # of ranking metrics, which need all scores at once

    @contextmanager
    def listening(self) -> Iterator[None]:
        handle = self.listen()
        try:
            yield
        finally:
            handle.remove()

    def listen(self) -> Any:
        """See the loss's batches until the returned handle is removed."""
        return self.loss.register_forward_hook(self._see, with_kwargs=True)

    def _see(self, module: nn.Module, inputs: Any, named: dict[str, Any], output: Tensor) -> None:
        if not (self.loss.training and torch.is_grad_enabled()):
            self.add(*inputs, **named)

    @torch.no_grad()
    def add(self, input: Tensor, target: Tensor, sample_weight: Tensor | None = None) -> None:
        """Take note of a batch, as the loss is called with it."""
        if self.loss.objective.is_ranking:
            flat = self.loss.flat(input, target, sample_weight)
            y, weight = dense(flat.y, flat.weight, flat.logits.dtype)
            self.rows.append(FlatBatch(flat.logits.cpu(), y.cpu(), weight.cpu()))
            return
        sums = self.loss.sums(input, target, sample_weight).alone()
        hard = self._hard(input, target, sample_weight)
        self.sums = sums if self.sums is None else self.sums + sums
        self.hard = hard if self.hard is None else self.hard + hard

    def scores(self) -> dict[str, float]:
        """The loss of all batches together, and the metric of hard and of soft counts, under its name."""
        if self.loss.objective.is_ranking:
            return self._ranking_scores()
        parts = [(self.sums, self.hard)]
        if is_up() and dist.get_world_size() > 1:  # objects, since a rank without a batch does not know any shape
            parts = [(None, None)] * dist.get_world_size()
            dist.all_gather_object(parts, (_portable(self.sums), _portable(self.hard)))
        soft = [sums for sums, _ in parts if sums is not None]
        if not soft:
            return {}
        total = soft[0]
        for other in soft[1:]:
            total = total + other
        with torch.no_grad():
            loss = self.loss.objective.of_sums(total, self.loss.beta)
            score = 1 - self.loss.objective.metric_term(total.confusion, self.loss.beta)
        found = {"loss": float(loss), f"soft_{self.name}": float(score)}
        if (hard := self._hard_score(sum((h for _, h in parts if h is not None), start=0))) is not None:
            found[self.name] = hard
        return dict(sorted(found.items(), key=lambda item: (item[0] != "loss", item[0])))

    def _ranking_scores(self) -> dict[str, float]:
        """The loss and the exact metric of all rows, of all ranks."""
        rows = self.rows
        if is_up() and dist.get_world_size() > 1:
            parts: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(parts, rows)
            rows = [row for part in parts for row in part]
        if not rows:
            return {}
        logits, y, weight = (torch.cat([row[i] for row in rows]) for i in range(3))  # type: ignore[misc]
        objective, temperature = self.loss.objective, self.loss.temperature
        with torch.no_grad():
            score = 1 - objective.ranked(logits, y, weight)
            return {"loss": float(objective(logits, y, weight, temperature)), self.name: float(score)}

    def _hard(self, input: Tensor, target: Tensor, sample_weight: Tensor | None) -> Confusion:
        """Counts at the labels that argmax, or the threshold (1/2 for a grid), predicts."""
        loss = self.loss
        options: dict[str, Any] = {"sample_weight": sample_weight, "ignore_index": loss.ignore_index}
        if loss.task == "multiclass":
            dim = loss.class_dim
            if target.is_floating_point():  # soft labels count as the likeliest
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
            _ = confusion.matrix  # built now: a sum has one only if its parts have
        return confusion

    def _hard_score(self, c: Any) -> float | None:
        if not isinstance(c, Confusion) or self.loss.metric == "auroc":
            return None
        return float(self.loss.objective.score(c, self.loss.beta))


def _portable(part: Any) -> Any:
    """Without what cannot travel between processes: a matrix that was never built, and other devices."""
    if part is None:
        return None
    confusion = part.confusion if isinstance(part, Sums) else part
    matrix = None if confusion.built_matrix is None else confusion.built_matrix.cpu()
    vectors = {name: getattr(confusion, name).cpu() for name in ("tp", "actual", "predicted", "total")}
    present = None if confusion.present is None else confusion.present.cpu()
    copied = confusion.replaced(**vectors, present=present, matrix=matrix)
    return Sums(copied, part.entropy.cpu(), part.weight.cpu()) if isinstance(part, Sums) else copied
