"""Cost of memory and sync relative to a training step of an MLP 512-256-128, in one process and in two with DDP.

    python benchmarks/bench_overhead.py        # writes benchmarks/results/bench_overhead.csv
    taskset -c 12-15 python benchmarks/bench_overhead.py --rounds 50 --out FILE   # on a larger machine

Rounds interleave the contenders, so that a busy machine slows all of them alike; each ratio is the median over rounds
of (step with / step without), with its 20th and 80th percentile. The control is the same loss again; its distance from
1.0 is the noise level. `work` is the same ratio in processor seconds of all threads of a rank, which excludes waiting
for the other rank. "message alone" sends a message of the same length at the same place, without sync.
"""

import argparse
import csv
import os
import platform
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # spinning threads compete for busy cores

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

from evalign import MetricLoss
from evalign.networks.mlp import mlp

RESULTS = Path(__file__).parent / "results" / "bench_overhead.csv"
FEATURES, CLASSES = 30, 10


def stepper(loss: nn.Module, size: int, *, ddp: bool) -> Callable[[], None]:
    torch.manual_seed(0)
    network: nn.Module = mlp(FEATURES, CLASSES)
    if ddp:
        network = DistributedDataParallel(network)
    optimiser = torch.optim.AdamW(network.parameters(), fused=True)
    x, y = torch.randn(size, FEATURES), torch.randint(CLASSES, (size,))

    def step() -> None:
        optimiser.zero_grad()
        loss(network(x), y).backward()
        optimiser.step()

    return step


class Message(nn.Module):
    """The loss of one rank, after a message as long as that of `sync`."""

    def __init__(self) -> None:
        super().__init__()
        self.loss, self.numbers = MetricLoss("f1", anchor=1.0, sync=False), torch.zeros(3 * CLASSES + 2)

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        dist.all_reduce(self.numbers)
        loss: Tensor = self.loss(input, target)
        return loss


def measure(rank: int, ranks: int, folder: str, rounds: int) -> None:
    """Measure with this number of ranks; rank 0 writes the rows to a file."""
    torch.set_num_threads(1)
    if ranks > 1:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    rows: list[dict[str, Any]] = []
    for size in (64, 1024):
        losses: dict[str, nn.Module] = {
            "none": MetricLoss("f1", anchor=1.0, sync=False),
            "none (control)": MetricLoss("f1", anchor=1.0, sync=False),
            "memory": MetricLoss("f1", anchor=1.0, sync=False, memory=0.9),  # at "auto" it would have nothing to keep
            "memory auto": MetricLoss("f1", anchor=1.0, sync=False, memory="auto"),
        }
        if ranks > 1:
            losses["message alone"] = Message()
            losses["sync"] = MetricLoss("f1", anchor=1.0)
            losses["sync and memory"] = MetricLoss("f1", anchor=1.0, memory="auto")
        steps = {name: stepper(loss, size, ddp=ranks > 1) for name, loss in losses.items()}
        times: dict[str, list[float]] = {name: [] for name in steps}
        work: dict[str, list[float]] = {name: [] for name in steps}
        for turn in range(rounds + 3):
            for name, step in steps.items():
                started, worked = time.perf_counter(), time.process_time()
                step()
                if turn >= 3:
                    times[name].append(time.perf_counter() - started)
                    work[name].append(time.process_time() - worked)
        for name, taken in times.items():
            ratios = over(taken, times["none"])
            low, *_, high = statistics.quantiles(ratios, n=5)
            rows.append(
                {"ranks": ranks, "batch": size, "loss": name, "ms": 1e3 * statistics.median(taken),
                 "ratio": statistics.median(ratios), "ratio_p20": low, "ratio_p80": high,
                 "work": statistics.median(over(work[name], work["none"])), "rounds": rounds}
            )  # fmt: skip
    if rank == 0:
        write(Path(folder) / "rows.csv", rows)
    if ranks > 1:
        dist.destroy_process_group()


def over(taken: list[float], by: list[float]) -> list[float]:
    return [a / b for a, b in zip(taken, by, strict=True)]


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows({k: f"{v:.4g}" if isinstance(v, float) else v for k, v in row.items()} for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    facts = {"device": platform.machine() + " cpu", "load": f"{os.getloadavg()[0]:.1f}", "torch": torch.__version__}
    found: list[dict[str, Any]] = []
    for ranks in (1, 2):
        with tempfile.TemporaryDirectory() as folder:
            spawn(measure, (ranks, folder, args.rounds), nprocs=ranks)  # type: ignore[no-untyped-call]
            with (Path(folder) / "rows.csv").open() as file:
                found += [row | facts | {"commit": commit.stdout.strip()} for row in csv.DictReader(file)]
    args.out.parent.mkdir(exist_ok=True)
    write(args.out, found)
    for row in found:
        cost = f"{row['ms']:>6} ms  x {row['ratio']}, work x {row['work']}"
        print(f"{row['ranks']} ranks, batch {row['batch']:>4}: {row['loss']:16} {cost}")


if __name__ == "__main__":
    main()
