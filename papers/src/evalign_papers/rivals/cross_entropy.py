"""Cross-entropy, plain, class-weighted and on oversampled rows: the rival of every table.

BtG supplement, Tables 8-9 (class weights W_c = n / (C n_c)) and 10-11 (oversampling the minority class); EAST
Table 1. Multiclass problems take the softmax form, binary and multilabel ones the sigmoid form.
"""

import torch
from torch import Tensor, nn

from evalign import checks, objective
from evalign.checks import safe_divide
from evalign.confusion import TASKS, Task
from evalign.training.batches import Batches, MakeBatches
from evalign_papers.rivals.inputs import Labels, PerClass, class_counts, flat, vector_of, weight_of_labels


def cross_entropy_loss(
    logits: Tensor,
    target: Tensor,
    *,
    task: Task = "multiclass",
    weight: PerClass | None = None,
    sample_weight: Tensor | None = None,
) -> Tensor:
    """L = sum_i w_i W_{y_i} (-log p_{i, y_i}) / sum_i w_i W_{y_i}, p = softmax(z) or sigmoid(z).

    `weight` holds W, one entry per class: (C,), or (2,) for binary problems; of multilabel problems, one entry
    per column. A batch without weight gives 0.

    >>> cross_entropy_loss(torch.tensor([2.0, -1.0]), torch.tensor([1, 1]), task="binary", weight=[1.0, 3.0])
    tensor(0.7201)
    """
    checks.check_choice("task", task, TASKS)
    batch = flat(logits, target, sample_weight, task)
    counted = weight_of_labels("weight", vector_of("weight", weight), batch, task)
    return objective.cross_entropy(batch.logits, batch.y, counted, task)


class CrossEntropyLoss(nn.Module):
    """Module form of `cross_entropy_loss`; with `weight=class_weights(labels)` the class-weighted rival.

    >>> CrossEntropyLoss(task="binary", weight=class_weights([0, 0, 0, 1]))(torch.zeros(2), torch.tensor([0, 1]))
    tensor(0.6931)
    """

    weight: Tensor | None

    def __init__(self, *, task: Task = "multiclass", weight: PerClass | None = None) -> None:
        super().__init__()
        checks.check_choice("task", task, TASKS)
        self.task: Task = task
        self.register_buffer("weight", vector_of("weight", weight))

    def forward(self, logits: Tensor, target: Tensor, sample_weight: Tensor | None = None) -> Tensor:
        return cross_entropy_loss(logits, target, task=self.task, weight=self.weight, sample_weight=sample_weight)


def class_weights(labels: Labels, num_classes: int | None = None) -> Tensor:
    """W_c = n / (C n_c), scikit-learn's "balanced"; 0 for a class without rows, whose weight is never used.

    DIFFERS: BtG's code gives BCE `pos_weight = W_1 / W_0` and divides by n. The ratio is the same; ours divides
    by the sum of the weights, so that the learning rate means what it means without them.

    >>> class_weights([0, 0, 0, 1])
    tensor([0.6667, 2.0000])
    """
    counts = class_counts(labels, num_classes).to(torch.get_default_dtype())
    return safe_divide(counts.sum(), len(counts) * counts)


def oversampled(labels: Labels, *, seed: int | torch.Generator = 0) -> Tensor:
    """Row numbers that balance the classes: every row once, then rows of each smaller class drawn again.

    Draws are with replacement, until every class has as many rows as the largest (imbalanced-learn's
    RandomOverSampler). Use it on training rows only, after the split.

    DIFFERS: BtG's code draws n rows in all, each class with the same probability, so that it also drops rows of
    the majority; its text, "repeatedly sampled from the minority class until class balance is reached", is this.

    >>> oversampled([0, 0, 0, 1], seed=0)
    tensor([0, 1, 2, 3, 3, 3])
    """
    counts = class_counts(labels)
    y = torch.as_tensor(labels)
    generator = seed if isinstance(seed, torch.Generator) else torch.Generator().manual_seed(seed)
    rows = [torch.arange(len(y))]
    for c in counts.nonzero().flatten().tolist():
        members = (y == c).nonzero().flatten().cpu()  # drawn on the CPU: the same rows on every device
        short = int(counts.max()) - len(members)
        rows.append(members[torch.randint(len(members), (short,), generator=generator)])
    return torch.cat(rows).to(y.device)


class BalancedBatches(Batches):
    """Batches of n draws with replacement, in which every class is as likely as any other, as in BtG's code."""

    def __init__(self, labels: Tensor, batch_size: int, *, seed: int, device: torch.device | str = "cpu") -> None:
        if labels.dim() != 1:
            raise ValueError(f"rows with many labels, such as graphs, cannot be drawn by class, got {labels.shape}")
        super().__init__(len(labels), batch_size, seed=seed, device=device)
        self.by_class, counts = labels.to(device).argsort(stable=True), labels.to(device).bincount()
        self.counts = counts[counts > 0]

    def order(self) -> Tensor:
        which = (self._uniform() * len(self.counts)).long()
        start = self.counts.cumsum(0) - self.counts
        return self.by_class[start[which] + (self._uniform() * self.counts[which]).long()]

    def _uniform(self) -> Tensor:
        return torch.rand(self.n, generator=self.generator, device=self.generator.device, dtype=torch.float64)


def balanced_batches(labels: Tensor) -> MakeBatches:
    """For `Stack`: balanced batches of rows with these labels."""
    return lambda rows, size, seed, device: BalancedBatches(
        labels[rows.to(labels.device)], size, seed=seed, device=device
    )
