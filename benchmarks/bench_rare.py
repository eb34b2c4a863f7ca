"""Training on 1 % positives: batches of 16 without a positive, and ranking losses compared with a pairwise one.

    python benchmarks/bench_rare.py absent | ranking [--seeds 5] [--steps 3000]
    python benchmarks/bench_rare.py libauc --seeds 10 --steps 800     # in the environment of `make bench-peers`
    python benchmarks/bench_rare.py summary                            # of the runs that it stored

Ten features, of which four are informative; a network 10-32-1, Adam; scores on 20,000 new rows, mean and
standard error over seeds. No choice is made on the test rows: `absent` and `ranking` show all learning rates. `libauc`
has LibAUC's losses with its optimisers beside ours, and chooses learning rate and sampling of each on 20,000 validation
rows, for each metric separately; every loss may have batches as they come, or half of positives as LibAUC advises, and
every learning rate falls to a tenth after half of the steps and again after three quarters. It writes all runs to
`results/bench_rare_libauc.csv`.
"""

import argparse
import importlib
import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
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
    "AUCM, written out": lambda: SquaredMargin(),
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


class LibAUC(torch.nn.Module):
    """A loss of LibAUC, on probabilities as in its tutorials; most know their rows by index."""

    def __init__(self, name: str, **options: Any) -> None:
        super().__init__()
        self.loss = getattr(importlib.import_module("libauc.losses"), name)(device="cpu", **options)

    def forward(self, z: Tensor, y: Tensor, index: Tensor) -> Tensor:
        if not 0 < int(y.sum()) < len(y):
            return 0 * z.sum()
        value: Tensor = self.loss(z.sigmoid()[:, None], y[:, None], index=index)
        return value


class Contender(NamedTuple):
    """A loss, made from the labels of the training rows and whether half of each batch are positives."""

    loss: Callable[[Tensor, bool], Loss]
    optimiser: str = "Adam"  # of torch, or of LibAUC
    rates: tuple[float, ...] = (1e-3, 3e-3, 1e-2, 3e-2)


ADAM = {"mode": "adam", "verbose": False, "device": "cpu"}
CONTENDERS: dict[str, Contender] = {
    **{name: Contender(lambda *_, make=make: make()) for name, make in RANKING.items() if "recall" not in name},
    "auroc, max_fpr .1": Contender(lambda *_: MetricLoss("auroc", max_fpr=0.1, task="binary")),
    "LibAUC AUCM, PESG": Contender(
        lambda y, half: LibAUC("AUCMLoss", version="v2" if half else "v1"), "PESG", (0.03, 0.1, 0.3, 1.0)
    ),
    "LibAUC AP, SOAP": Contender(lambda y, _: LibAUC("APLoss", data_len=len(y)), "SOAP"),
    "LibAUC AP (gamma .1), SOAP": Contender(lambda y, _: LibAUC("APLoss", data_len=len(y), gamma=0.1), "SOAP"),
    "LibAUC pAUC-CVaR, SOPA": Contender(
        lambda y, _: LibAUC("pAUC_CVaR_Loss", data_len=len(y), pos_len=int(y.sum()), beta=0.1), "SOPA"
    ),
    "LibAUC pAUC-DRO, SOPAs": Contender(lambda y, _: LibAUC("pAUC_DRO_Loss", data_len=len(y)), "SOPAs"),
}
METRICS: dict[str, Callable[[Any, Any], float]] = {
    "average precision": average_precision_score,
    "AUROC": roc_auc_score,
    "AUROC to .1": partial(roc_auc_score, max_fpr=0.1),
}


PAIRS = [  # losses for the same purpose
    ("auroc", "LibAUC AUCM, PESG", "AUROC"),
    ("average_precision", "LibAUC AP, SOAP", "average precision"),
    ("average_precision", "LibAUC AUCM, PESG", "average precision"),
    ("auroc, max_fpr .1", "LibAUC pAUC-CVaR, SOPA", "AUROC to .1"),
    ("auroc", "pairwise logistic", "AUROC"),
    ("average_precision", "pairwise logistic", "average precision"),
]


def optimiser_of(name: str, network: Loss, loss: Loss, rate: float) -> Any:
    if name == "Adam":
        return torch.optim.Adam(network.parameters(), lr=rate)
    kind = getattr(importlib.import_module("libauc.optimizers"), name)
    if name == "PESG":
        return kind(network.parameters(), loss_fn=loss.loss, lr=rate, verbose=False, device="cpu")
    return kind(network.parameters(), lr=rate, **ADAM)


def choose(y: Tensor, batch: int, half: bool, generator: torch.Generator) -> Tensor:
    """Rows of a batch: drawn at random, or half of them from the positives, as `DualSampler` does."""
    if not half:
        return torch.randint(len(y), (batch,), generator=generator)
    pools = (y == 1).nonzero()[:, 0], (y == 0).nonzero()[:, 0]
    return torch.cat([pool[torch.randint(len(pool), (batch // 2,), generator=generator)] for pool in pools])


def train_contender(name: str, seed: int, rate: float, half: bool, steps: int, batch: int = 256) -> dict[str, float]:
    """Every metric on validation and on test rows."""
    torch.manual_seed(seed)
    contender, (x, y) = CONTENDERS[name], rows(seed)
    network = torch.nn.Sequential(torch.nn.Linear(10, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    loss = contender.loss(y, half)
    optimiser, generator = optimiser_of(contender.optimiser, network, loss, rate), torch.Generator().manual_seed(seed)
    for step in range(steps):
        if step in (steps // 2, 3 * steps // 4):
            optimiser.param_groups[0]["lr"] /= 10
            if contender.optimiser == "PESG":
                optimiser.update_regularizer()
        chosen = choose(y, batch, half, generator)
        optimiser.zero_grad()
        scores = network(x[chosen])[:, 0]
        given = (chosen,) if isinstance(loss, LibAUC) else ()
        loss(scores, y[chosen], *given).backward()
        optimiser.step()
    found: dict[str, float] = {}
    for part, shift in (("valid", 1000), ("test", 100)):
        new, labels = rows(seed + shift)
        with torch.no_grad():
            scores = network(new)[:, 0]
        found |= {f"{part} {metric}": score(labels, scores) for metric, score in METRICS.items()}
    return found


def compare_with_libauc(out: Path, seeds: int, steps: int) -> pd.DataFrame:
    found = []
    for seed in range(seeds):
        for name, contender in CONTENDERS.items():
            for rate, half in itertools.product(contender.rates, (False, True)):
                run = {"loss": name, "seed": seed, "rate": rate, "half": half, "steps": steps}
                found.append(run | train_contender(name, seed, rate, half, steps))
        pd.DataFrame(found).to_csv(out, index=False, float_format="%.5f")
        print(f"split {seed} done", flush=True)
    return pd.DataFrame(found)


def summary(runs: pd.DataFrame) -> str:
    """Mean and standard error over splits; each loss at the setting that is best on the split's validation rows."""

    def chosen(name: str, metric: str) -> NDArray[np.float64]:
        own = runs[runs["loss"] == name]
        best = own.groupby("seed")[f"valid {metric}"].idxmax()
        return np.array(own.loc[best, f"test {metric}"], float)

    def error(scores: NDArray[np.float64]) -> float:
        return float(scores.std(ddof=1) / len(scores) ** 0.5)

    lines = ["| loss | " + " | ".join(METRICS) + " |", "|---|" + "---|" * len(METRICS)]
    for name in CONTENDERS:
        scores = (chosen(name, metric) for metric in METRICS)
        cells = [f"{best.mean():.3f} ± {error(best):.3f}" for best in scores]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    lines.append("")
    for ours, theirs, metric in PAIRS:
        gain = chosen(ours, metric) - chosen(theirs, metric)
        lines.append(f"{ours} - {theirs}, paired, {metric}: {gain.mean():+.4f} ± {error(gain):.4f}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["absent", "ranking", "libauc", "summary"])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3000)
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.what in ("libauc", "summary"):
        out = Path(__file__).parent / "results" / "bench_rare_libauc.csv"
        stored = given.what == "summary"
        print(summary(pd.read_csv(out) if stored else compare_with_libauc(out, given.seeds, given.steps)))
        return
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
