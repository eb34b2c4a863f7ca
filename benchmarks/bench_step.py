"""Time of a training step with our loss relative to cross-entropy, in one interleaved run.

    python benchmarks/bench_step.py                                   # the MLP on this machine's cores
    python benchmarks/bench_step.py --device cuda --networks mlp darknet19 head32k

A step is: gradients to None, forward, loss, backward, AdamW. Networks: EAST's MLP on 54 features and 7 classes, batch
1024; Darknet-19 on 32 x 32 images, batch 256; one linear layer from 1024 features to 32768 classes, batch 4096. Every
loss trains its own copy; the ratio is the median over rounds; the control is a second cross-entropy.
"""

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from bench_loss import circumstances, save
from torch import Tensor, nn

from evalign import MetricLoss
from evalign.networks.mlp import mlp
from evalign_papers.networks import darknet19


def problem(name: str, device: str) -> tuple[nn.Module, Tensor, Tensor]:
    network: nn.Module
    if name == "mlp":
        network, x, classes = mlp(54, 7), torch.randn(1024, 54), 7
    elif name == "darknet19":
        network, x, classes = darknet19(10), torch.randn(256, 3, 32, 32), 10
    else:
        network, x, classes = nn.Linear(1024, 32768), torch.randn(4096, 1024), 32768
    return network.to(device), x.to(device), torch.randint(0, classes, (len(x),), device=device)


def step_of(network: nn.Module, loss: Callable[[Tensor, Tensor], Tensor], x: Tensor, y: Tensor) -> Callable[[], None]:
    network = copy.deepcopy(network)
    optimiser = torch.optim.AdamW(network.parameters(), lr=1e-3)

    def step() -> None:
        optimiser.zero_grad()
        loss(network(x), y).backward()  # type: ignore[no-untyped-call]
        optimiser.step()

    return step


def seconds(step: Callable[[], None], repeats: int, device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        step()
    if device == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / repeats


def measure(name: str, device: str, rounds: int) -> list[dict[str, object]]:
    torch.manual_seed(0)
    network, x, y = problem(name, device)
    losses: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "cross_entropy": F.cross_entropy,
        "cross_entropy (control)": F.cross_entropy,
        "f1": MetricLoss("f1").to(device),
        "f1 + anchor": MetricLoss("f1", anchor=1.0).to(device),
        "f1 eager": MetricLoss("f1", backend="eager").to(device),
    }
    steps = {label: step_of(network, loss, x, y) for label, loss in losses.items()}
    warm = [min(seconds(step, 1, device) for _ in range(3)) for step in steps.values()]
    repeats = max(1, round(0.05 / warm[0]))
    times: dict[str, list[float]] = {label: [] for label in steps}
    for _ in range(rounds):
        for label, step in steps.items():
            times[label].append(seconds(step, repeats, device))
    rows: list[dict[str, object]] = []
    for label in steps:
        ratios = [t / b for t, b in zip(times[label], times["cross_entropy"], strict=True)]
        low, *_, high = statistics.quantiles(ratios, n=5)
        rows.append(
            {
                "network": name,
                "loss": label,
                "ms": round(1e3 * statistics.median(times[label]), 4),
                "ratio": round(statistics.median(ratios), 3),
                "ratio_p20": round(low, 3),
                "ratio_p80": round(high, 3),
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--networks", nargs="*", default=["mlp"], choices=["mlp", "darknet19", "head32k"])
    parser.add_argument("--commit", help="where there is no repository to ask")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "bench_step.csv")
    options = parser.parse_args()
    rows: list[dict[str, object]] = []
    for name in options.networks:
        for row in measure(name, options.device, options.rounds):
            rows.append({**row, **circumstances(options.device, options.commit)})
            print("{network:10} {loss:24} {ms:>9} ms  {ratio:>6}x".format(**row), flush=True)
        save(options.out, rows)


if __name__ == "__main__":
    main()
