"""Bias of the loss of small batches against the loss of all rows, with and without a memory.

    python benchmarks/bench_batches.py      # writes benchmarks/results/bench_batches_value.csv

Soft F1 of a fixed model with 2 % positives: mean over the batches of a first and a second pass over 32 000 rows, in
twenty draws for batches of 16 and two for the others. "labels" is a memory that knows the label counts.
bench_batches_training.py measures training with such batches.
"""

import argparse
import csv
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # spinning threads compete for busy cores

import pandas as pd
import torch

from evalign import MetricLoss
from evalign.memory import Memory

RESULTS = Path(__file__).parent / "results" / "bench_batches_value.csv"
ROWS = 32_000


def value_rows(seed: int, sizes: tuple[int, ...]) -> list[dict[str, Any]]:
    """Logits and labels of a model with a soft F1 of about 0.12."""
    generator = torch.Generator().manual_seed(seed)
    y = (torch.rand(ROWS, generator=generator) < 0.02).long()
    z = 1.5 * torch.randn(len(y), generator=generator) - 2.2 + 2.4 * y
    whole = 1 - float(MetricLoss("f1", task="binary")(z, y))
    rows = []
    for size in sizes:
        for name in ("none", "auto", "labels"):
            memory = {"none": None, "auto": Memory(), "labels": Memory(labels=y.bincount())}[name]
            loss = MetricLoss("f1", task="binary", memory=memory)
            for number in (1, 2):
                parts = zip(torch.split(z.requires_grad_(), size), torch.split(y, size), strict=True)
                scores = torch.stack([1 - loss(*part).detach() for part in parts])
                mean = float(scores.mean())
                off = {"f1_off_percent": mean / whole - 1, "loss_off_percent": (1 - mean) / (1 - whole) - 1}
                rows.append(
                    {"seed": seed, "batch": size, "memory": name, "pass": number, "whole": whole, "mean": mean,
                     **{key: 100 * value for key, value in off.items()}, "spread": float(scores.std())}
                )  # fmt: skip
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
    parser.add_argument("--draws", type=int, default=20)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for seed in range(args.draws):
        rows += value_rows(seed, (16, 32, 64, 512) if seed < 2 else (16,))
        write(args.out, rows)
    frame = pd.DataFrame(rows).groupby(["batch", "memory", "pass"])[["f1_off_percent", "loss_off_percent"]]
    print(frame.agg(["mean", "std", "min", "max"]).round(3).to_string())


if __name__ == "__main__":
    main()
