"""Two claims of Bridging the Gap about time: against AP-Perf (2.3 against 70 minutes), and the lookup table's O(1).

    python benchmarks/bench_btg_claims.py --out benchmarks/results/bench_btg_claims.csv

CPU seconds of one thread, interleaved, so that ratios hold on a busy machine; the median of `--repeats`. An epoch is
one of the 32-16 network on 7157 rows of 6 features with 2.3 % positives, like the training part of Mammography: batches
of 1024 for the soft-set F1, of 20 for AP-Perf, as in both papers.
"""

import argparse
import csv
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from evalign import MetricLoss, steps
from evalign.networks.mlp import mlp
from evalign_papers.engine.reports import environment
from evalign_papers.engine.terms import LookupTable
from evalign_papers.rivals.ap_perf import APPerfLoss

ROWS, FEATURES, SHARE = 7157, 6, 0.023


def seconds(act: Callable[[], object]) -> float:
    started = time.process_time()
    act()
    return time.process_time() - started


def epoch(loss_of: Callable[..., torch.Tensor], batch: int, rows: int = ROWS) -> float:
    """CPU seconds of one epoch; with fewer rows, scaled to all of them."""
    generator = torch.Generator().manual_seed(0)
    y = (torch.rand(ROWS, generator=generator) < SHARE).long()
    x = torch.randn(ROWS, FEATURES, generator=generator) + y[:, None]
    torch.manual_seed(0)
    network = mlp(FEATURES, 1, (32, 16), 0.5)
    optimiser = torch.optim.Adam(network.parameters(), 1e-3)

    def run() -> None:
        for start in range(0, rows, batch):
            loss = loss_of(network(x[start : start + batch]).squeeze(1), y[start : start + batch])
            optimiser.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()

    return seconds(run) * ROWS / rows


def step_time(step: Callable[[torch.Tensor, float], torch.Tensor], n: int, backward: bool) -> float:
    p, calls = torch.rand(n, generator=torch.Generator().manual_seed(0), requires_grad=backward), max(1, 100_000 // n)

    def run() -> None:
        for _ in range(calls):
            out = step(p, 0.3)
            if backward:
                out.sum().backward()  # type: ignore[no-untyped-call]

    return seconds(run) / calls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--ap-perf-rows", type=int, default=1000, help="rows of an epoch of AP-Perf that are timed")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    soft = MetricLoss("f1", task="binary", threshold=0.5, step="linear", delta=0.1)
    tasks: dict[str, Callable[[], float]] = {
        "epoch: soft-set F1, batches of 1024": partial(epoch, soft, 1024),
        "epoch: cross-entropy, batches of 1024": partial(
            epoch, lambda z, y: torch.nn.functional.binary_cross_entropy_with_logits(z, y.float()), 1024
        ),
        "epoch: AP-Perf F1, batches of 20": partial(epoch, APPerfLoss(), 20, args.ap_perf_rows),
    }
    table = LookupTable(steps.linear)
    for n in (1024, 1_000_000):
        for backward in (False, True):
            kind = f"{n} values, {'forward and backward' if backward else 'forward'}"
            tasks[f"step: linear, {kind}"] = partial(step_time, steps.linear, n, backward)
            tasks[f"step: sigmoid, {kind}"] = partial(step_time, steps.sigmoid, n, backward)
            tasks[f"step: lookup table, {kind}"] = partial(step_time, table, n, backward)
    times: dict[str, list[float]] = {name: [] for name in tasks}
    for repeat in range(args.repeats + 1):
        for name, task in tasks.items():
            value = task()
            if repeat:  # the first round warms up
                times[name].append(value)
    where = environment("cpu")
    rows = [{"task": name, "seconds": statistics.median(values), **where} for name, values in times.items()]
    for row in rows:
        print(f"{row['task']:<60}{row['seconds']:.6f} s")
    if args.out is not None:
        with args.out.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
