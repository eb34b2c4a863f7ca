"""Training on 1 % positives: batches of 16 without a positive, and ranking losses compared with a pairwise one.

    python benchmarks/bench_rare.py absent | ranking [--seeds 5] [--steps 3000]

Ten features, of which four are informative; a network 10-32-1, Adam; scores on 20,000 new rows, mean and
standard error over seeds. No choice is made on the test rows: all learning rates are shown.
"""

import argparse
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.metrics import average_precision_score, f1_score, roc_auc_score
from torch import Tensor

from evalign import MetricLoss

Loss = torch.nn.Module


def rows(seed: int, n: int = 20_000) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    y = (torch.rand(n, generator=generator) < 0.01).long()
    x = torch.randn(n, 10, generator=generator)
    x[:, :4] += 1.5 * y[:, None]
    x[:, 4] = x[:, 0] * x[:, 1]
    return x, y


class Entropy(torch.nn.Module):
    def forward(self, z: Tensor, y: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(z, y.float())


class Pairwise(torch.nn.Module):
    """mean over pairs of softplus(z_negative - z_positive), the logistic surrogate of the area."""

    def forward(self, z: Tensor, y: Tensor) -> Tensor:
        gaps = z[y == 0][None, :] - z[y == 1][:, None]
        return F.softplus(gaps).mean() if gaps.numel() else 0 * z.sum()


class SquaredMargin(torch.nn.Module):
    """The min-max margin loss of LibAUC (AUCM, Yuan et al. 2021) at its inner optimum: both spreads and the gap."""

    def forward(self, z: Tensor, y: Tensor) -> Tensor:
        p = z.sigmoid()
        if not 0 < int(y.sum()) < len(y):
            return 0 * z.sum()
        above, below = p[y == 1], p[y == 0]
        gap = 1 + below.mean() - above.mean()
        return above.var(unbiased=False) + below.var(unbiased=False) + gap.clamp_min(0) ** 2


class OnlyWithPositives(torch.nn.Module):
    """A loss that skips batches without a positive label, as any loss that is constant there does."""

    def __init__(self, loss: torch.nn.Module) -> None:
        super().__init__()
        self.loss = loss

    def forward(self, z: Tensor, y: Tensor) -> Tensor:
        value: Tensor = self.loss(z, y)
        return value if bool(y.any()) else 0 * z.sum()


ABSENT: dict[str, Callable[[], Loss]] = {
    "cross-entropy": lambda: Entropy(),
    "f1, no gradient without positives": lambda: OnlyWithPositives(MetricLoss("f1", task="binary")),
    "f1": lambda: MetricLoss("f1", task="binary"),
    "f1, anchor 1": lambda: MetricLoss("f1", task="binary", anchor=1.0),
    "f1, memory": lambda: MetricLoss("f1", task="binary", memory="auto"),
    "f1, memory, anchor 1": lambda: MetricLoss("f1", task="binary", memory="auto", anchor=1.0),
}
RANKING: dict[str, Callable[[], Loss]] = {
    "cross-entropy": lambda: Entropy(),
    "pairwise logistic": lambda: Pairwise(),
    "AUCM (LibAUC)": lambda: SquaredMargin(),
    "auroc": lambda: MetricLoss("auroc", task="binary"),
    "average_precision": lambda: MetricLoss("average_precision", task="binary"),
    "average_precision, anchor 1": lambda: MetricLoss("average_precision", task="binary", anchor=1.0),
    "recall_at 2 %": lambda: MetricLoss("recall_at", at=0.02, task="binary"),
}


def train(loss: Loss, seed: int, rate: float, batch: int, steps: int) -> tuple[float, float, float, float]:
    """F1 at 1/2, average precision, AUROC and recall within 2 % of the rows, on fresh rows."""
    torch.manual_seed(seed)
    (x, y), (new, labels) = rows(seed), rows(seed + 100)
    network = torch.nn.Sequential(torch.nn.Linear(10, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    optimiser = torch.optim.Adam(network.parameters(), lr=rate)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        chosen = torch.randint(len(x), (batch,), generator=generator)
        optimiser.zero_grad()
        loss(network(x[chosen])[:, 0], y[chosen]).backward()
        optimiser.step()
    with torch.no_grad():
        scores = network(new)[:, 0]
    flagged = labels[scores.argsort(descending=True)[: len(labels) // 50]]
    found = float(flagged.sum() / labels.sum())
    p, truth = scores.numpy(), labels.numpy()
    return f1_score(truth, p > 0), average_precision_score(truth, p), roc_auc_score(truth, p), found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["absent", "ranking"])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3000)
    given = parser.parse_args()
    torch.set_num_threads(1)
    losses, batch = (ABSENT, 16) if given.what == "absent" else (RANKING, 256)
    print(f"batches of {batch}, {given.steps} steps, {given.seeds} seeds, torch {torch.__version__}")
    print("| loss | learning rate | F1 | average precision | AUROC | recall within 2 % |\n|---|---|---|---|---|---|")
    for rate in (1e-3, 1e-2):
        for name, make in losses.items():
            found = np.array([train(make(), seed, rate, batch, given.steps) for seed in range(given.seeds)])
            error = found.std(0, ddof=1) / given.seeds**0.5
            cells = " | ".join(f"{m:.3f} ± {e:.3f}" for m, e in zip(found.mean(0), error, strict=True))
            print(f"| {name} | {rate:g} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
