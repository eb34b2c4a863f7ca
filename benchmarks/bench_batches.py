"""Small batches with and without a memory: the loss they show, and the F1 that training with them reaches.

    python benchmarks/bench_batches.py value                     # writes benchmarks/results/bench_batches_value.csv
    python benchmarks/bench_batches.py training --data-dir DIR   # writes benchmarks/results/bench_batches_training.csv

`value`: a fixed model's soft F1 with 2 % positives, its mean over small batches beside that of all rows at once.
`training`: F1 of the positive class on test rows over random splits (64 / 16 / 20), a network 64-32, AdamW; "metric" is
1 - soft F1 from scratch, "anchored" a quarter of the epochs with cross-entropy, then 1 - soft F1 + cross-entropy. The
weights are those of the best validation F1 at argmax, looked at after every epoch. Large batches get at least
`LEAST_STEPS` steps, since an epoch has few of them, and a learning rate of 3e-3 in place of 1e-3.
"""

import argparse
import copy
import csv
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads that spin while they wait fight over busy cores

import numpy as np
import pandas as pd
import torch
from sklearn.datasets import make_blobs
from sklearn.metrics import f1_score
from sklearn.model_selection import train_test_split
from torch import Tensor

from evalign import Confusion, MetricLoss
from evalign.memory import Memory
from evalign.networks import mlp

RESULTS = Path(__file__).parent / "results"
LEAST_STEPS = 600
# Batch size, and rows of the rarest class that are remembered: 0 is no memory, 100 the default.
ARMS = ((4096, 0), (64, 0), (64, 100), (64, 300))


def value_rows(seed: int) -> list[dict[str, Any]]:
    """A model with a soft F1 of about 0.15: the case of peers' users."""
    generator = torch.Generator().manual_seed(seed)
    y = (torch.rand(32_000, generator=generator) < 0.02).long()
    z = 1.5 * torch.randn(len(y), generator=generator) - 2.2 + 2.4 * y
    whole = 1 - float(MetricLoss("f1", task="binary")(z, y))
    rows = []
    for size in (16, 32, 64, 512):
        for memory in (None, "auto"):
            loss = MetricLoss("f1", task="binary", memory=memory)
            for _ in range(2):  # the second time around, when every row has been seen
                parts = zip(torch.split(z.requires_grad_(), size), torch.split(y, size), strict=True)
                scores = torch.stack([1 - loss(*part).detach() for part in parts])
            mean = float(scores.mean())
            rows.append(
                {"seed": seed, "batch": size, "memory": memory or "none", "whole": whole, "mean": mean,
                 "off_percent": 100 * (mean / whole - 1), "spread": float(scores.std())}
            )  # fmt: skip
    return rows


def load(name: str, folder: Path | None) -> tuple[np.ndarray, np.ndarray]:
    if name == "blobs":  # BtG's synthetic set, thinned to 3 % positives
        X, y = make_blobs(10_000, centers=2, n_features=3, cluster_std=10, random_state=42)
        keep = (y == 0) | (np.cumsum(y == 1) <= 155)
        return X[keep].astype(np.float32), y[keep]
    if folder is None:
        raise SystemExit(f"{name} needs --data-dir, the folder with {name}.parquet")
    frame = pd.read_parquet(folder / f"{name}.parquet")
    if name == "creditcard":  # every tenth of the negatives
        frame = frame[(frame["Class"] == 1) | (np.arange(len(frame)) % 10 == 0)]
        X = frame.drop(columns=["Class", "Time"]).assign(Amount=np.log(frame["Amount"] + 1e-3))
        return X.to_numpy(np.float32), frame["Class"].to_numpy(np.int64)
    y = pd.factorize(frame["target"], sort=True)[0].astype(np.int64)
    return frame.drop(columns=[c for c in ("target", "split") if c in frame]).to_numpy(np.float32), y


def train(
    X: np.ndarray, y: np.ndarray, size: int, rows: int, method: str, seed: int, epochs: int
) -> tuple[float, float]:
    """Validation and test F1 of the best epoch."""
    rest, test = train_test_split(np.arange(len(y)), test_size=0.2, stratify=y, random_state=seed)
    fit, valid = train_test_split(rest, test_size=0.2, stratify=y[rest], random_state=seed)
    X = (X - X[fit].mean(0)) / X[fit].std(0).clip(1e-6)
    x, target = torch.from_numpy(X[fit]), torch.from_numpy(y[fit])
    torch.manual_seed(seed)
    network = mlp(X.shape[1], 2, (64, 32), 0.25)
    entropy = torch.nn.CrossEntropyLoss()
    memory = Memory(rows_of_rarest=rows) if rows else None
    metric = MetricLoss(f1_of_positives, anchor=float(method == "anchored"), memory=memory)
    rate = 1e-3 if size < 1024 else 3e-3
    optimiser = torch.optim.AdamW(network.parameters(), lr=rate, fused=True)
    steps = max(1, len(fit) // size)
    epochs = max(epochs, -(-LEAST_STEPS // steps))
    best, weights = -1.0, copy.deepcopy(network.state_dict())
    for epoch in range(epochs):
        loss = entropy if method == "anchored" and epoch < epochs // 4 else metric
        network.train()
        for index in torch.randperm(len(fit)).tensor_split(steps):
            optimiser.zero_grad()
            loss(network(x[index]), target[index]).backward()
            optimiser.step()
        score = f1(network, X[valid], y[valid])
        if score > best:
            best, weights = score, copy.deepcopy(network.state_dict())
    network.load_state_dict(weights)
    return best, f1(network, X[test], y[test])


def f1_of_positives(c: Confusion) -> Tensor:
    return 2 * c.tp[1] / (c.actual[1] + c.predicted[1])


@torch.no_grad()
def f1(network: torch.nn.Module, X: np.ndarray, y: np.ndarray) -> float:
    network.eval()
    predicted: Tensor = network(torch.from_numpy(X)).argmax(1)
    return float(f1_score(y, predicted.numpy(), zero_division=0.0))


def training_rows(name: str, method: str, splits: int, epochs: int, folder: Path | None) -> list[dict[str, Any]]:
    X, y = load(name, folder)
    rows: list[dict[str, Any]] = []
    for seed in range(splits):
        for size, remembered in ARMS:  # arms of a split one after the other: they are compared in pairs
            valid, test = train(X, y, size, remembered, method, seed, epochs)
            rows.append(
                {"set": name, "method": method, "split": seed, "batch": size, "remembered_rows": remembered,
                 "valid_f1": valid, "test_f1": test}
            )  # fmt: skip
    for size, remembered in ARMS:
        scores = np.array([r["test_f1"] for r in rows if (r["batch"], r["remembered_rows"]) == (size, remembered)])
        error = scores.std(ddof=1) / len(scores) ** 0.5 if len(scores) > 1 else float("nan")
        what = f"{name:12} {method:9} batch {size:5} remembered {remembered:4}"
        print(f"{what} F1 {scores.mean():.3f} ± {error:.3f}", flush=True)
    return rows


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    facts = {"device": platform.machine() + " cpu", "torch": torch.__version__, "commit": commit.stdout.strip()}
    path.parent.mkdir(exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*rows[0], *facts], lineterminator="\n")
        writer.writeheader()
        writer.writerows(
            {k: f"{v:.4g}" if isinstance(v, float) else v for k, v in row.items()} | facts for row in rows
        )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["value", "training"])
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--sets", default="mammography,creditcard")
    parser.add_argument("--methods", default="anchored")
    parser.add_argument("--splits", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=25)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    if args.what == "value":
        for seed in range(2):
            rows += value_rows(seed)
        print(pd.DataFrame(rows).groupby(["batch", "memory"])[["whole", "mean", "off_percent"]].mean().to_string())
    else:
        for name in args.sets.split(","):
            for method in args.methods.split(","):
                rows += training_rows(name, method, args.splits, args.epochs, args.data_dir)
                write(args.out or RESULTS / "bench_batches_training.csv", rows)
    write(args.out or RESULTS / f"bench_batches_{args.what}.csv", rows)


if __name__ == "__main__":
    main()
