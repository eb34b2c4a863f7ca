"""Images per second in training: our loss against cross-entropy, same network, interleaved in one run on a GPU.

    python benchmarks/bench_images.py                    # Darknet-19, batch 256, bf16, channels-last
    python benchmarks/bench_images.py --data-dir DIR     # CIFAR-10's own images instead of noise

A step is that of `evalign.training`: gather bytes on the device, shift, mirror and normalise, forward in bf16, loss in
float32, backward, fused AdamW; eagerly, and recorded as a CUDA graph and replayed. `ratio` is images per second over
those of cross-entropy, median of alternating rounds; the control is a second cross-entropy.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from bench_loss import circumstances, save
from torch import Tensor, nn

from evalign.objective import Objective
from evalign.steps import StepChoice
from evalign.training.batches import Rows
from evalign.training.in_memory import Phase, adamw, batch_loss
from evalign.training.recipes import Stage
from evalign_papers.engine.recorded import RecordedStep
from evalign_papers.networks import Pictures, darknet19

CE = Stage("cross-entropy", metric=False, anchor=1.0, learning_rate=1e-3, epochs=1, patience=1)
METRIC = Stage("metric", metric=True, anchor=0.0, learning_rate=1e-3, epochs=1, patience=1)
ANCHORED = Stage("metric", metric=True, anchor=1.0, learning_rate=1e-3, epochs=1, patience=1)
LOSSES = {
    "cross_entropy": (CE, "f1"),
    "cross_entropy (control)": (CE, "f1"),
    "f1": (METRIC, "f1"),
    "f1 + anchor": (ANCHORED, "f1"),
    "mcc + anchor": (ANCHORED, "mcc"),
    "balanced_accuracy + anchor": (ANCHORED, "balanced_accuracy"),
}


def pictures(data_dir: str | None, device: str, n: int = 20480) -> Rows:
    if data_dir is None:
        x = torch.randint(0, 256, (n, 32, 32, 3), dtype=torch.uint8, device=device)
        return Rows.of(x, torch.randint(0, 10, (n,), device=device))
    from evalign_papers.datasets import load

    dataset = load("cifar10", data_dir, parts=["batch1", "batch2"])
    X: Any = dataset.X
    return Rows.of(torch.from_numpy(X).to(device), torch.from_numpy(dataset.y).to(device))


def plain_step(
    network: nn.Module, rows: Rows, stage: Stage, objective: Objective, batch_size: int, *, amp: bool = False
) -> Callable[[Tensor], None]:
    """An update of the training loop for the rows of an index, not recorded."""
    optimiser = adamw(network, stage)
    network.train()

    def step(index: Tensor) -> None:
        loss = batch_loss(network, rows[index], Phase(stage, objective, stage.temperature), amp)
        optimiser.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()

    return step


def step_of(stage: Stage, metric: str, rows: Rows, batch: int, *, recorded: bool) -> Callable[[Tensor], None]:
    torch.manual_seed(0)
    first = Pictures((0.47, 0.47, 0.47), (0.25, 0.25, 0.25))
    network = nn.Sequential(first, darknet19(10)).to(rows.x.device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    objective = Objective(metric, "multiclass", StepChoice("annealed"), anchor=stage.anchor)
    make = RecordedStep if recorded else plain_step
    return make(network, rows, stage, objective, batch, amp=rows.x.is_cuda)


def seconds(step: Callable[[Tensor], None], batches: list[Tensor], device: str) -> float:
    wait: Callable[[], None] = torch.cuda.synchronize if device == "cuda" else lambda: None
    wait()
    start = time.perf_counter()
    for index in batches:
        step(index)
    wait()
    return (time.perf_counter() - start) / len(batches)


def measure(rows: Rows, batch: int, rounds: int, device: str, recorded: bool) -> list[dict[str, object]]:
    order = torch.randperm(len(rows), device=device)
    batches = list(torch.split(order[: batch * (len(rows) // batch)], batch))[:40]
    steps = {name: step_of(*how, rows, batch, recorded=recorded) for name, how in LOSSES.items()}
    for step in steps.values():
        seconds(step, batches[:3], device)
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            times[name].append(seconds(step, batches, device))
    found: list[dict[str, object]] = []
    for name in steps:
        ratios = [base / own for own, base in zip(times[name], times["cross_entropy"], strict=True)]
        low, *_, high = statistics.quantiles(ratios, n=5)
        found.append(
            {
                "network": "darknet19",
                "batch": batch,
                "step": "recorded" if recorded else "plain",
                "loss": name,
                "images_per_second": round(batch / statistics.median(times[name])),
                "ms": round(1e3 * statistics.median(times[name]), 3),
                "ratio": round(statistics.median(ratios), 3),
                "ratio_p20": round(low, 3),
                "ratio_p80": round(high, 3),
            }
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", nargs="*", choices=["plain", "recorded"], default=["plain", "recorded"])
    parser.add_argument("--commit", help="where there is no repository to ask")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "bench_images.csv")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("bench_images needs a GPU, this machine has none that torch can use; run it on one")
    torch.backends.cudnn.benchmark = True
    rows, found = pictures(options.data_dir, "cuda"), list[dict[str, object]]()
    for kind in options.steps:
        for row in measure(rows, options.batch, options.rounds, "cuda", kind == "recorded"):
            found.append({**row, **circumstances("cuda", options.commit)})
            print("{step:9} {loss:28} {images_per_second:>8} images/s {ms:>8} ms {ratio:>6}x".format(**row), flush=True)
        save(options.out, found)


if __name__ == "__main__":
    main()
