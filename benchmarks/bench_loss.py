"""Forward + backward of our losses and every rival's as a multiple of cross-entropy, in one interleaved run.

    python benchmarks/bench_loss.py                                   # writes benchmarks/results/bench_loss.csv
    python benchmarks/bench_loss.py --sizes 8192x1000 --compiled --out results.csv
    python benchmarks/bench_loss.py --device cuda --only ours --sizes 4096x32768 --out results.csv

Rounds interleave all contenders, so that a busy machine slows all of them alike; each ratio is the median over
rounds of (time / cross-entropy's time in the same round). On a machine that others use, `ratio_best`, best round
against best round, and `ratio_cpu`, the same in seconds of work of all threads, are nearer to what a quiet one gives.
A second cross-entropy row is the control: it should read 1.0. Peak memory and the bytes kept for backward are measured
in separate runs. A loss has to read the logits twice and to write its gradient once, so 1.5 copies of the logits
are the least time there is: `of_copy` is the fraction of that bandwidth. With `--graphs` each loss is also recorded as
a CUDA graph and replayed: `graph_ms` is what its kernels take, without the host. Rows are written after every size.
"""

import argparse
import contextlib
import csv
import importlib
import io
import json
import os
import platform
import random
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the memory profiler reports its own start and stop
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # spinning threads compete for busy cores

import torch
import torch.nn.functional as F
from torch import Tensor

from evalign import MetricLoss, membership
from evalign.storage.atomic import write_atomically
from evalign_papers.rivals import (
    APPerfLoss,
    DiceLoss,
    FocalLoss,
    LDAMLoss,
    LogitAdjustedLoss,
    SigmoidF1Loss,
    WMWLoss,
)

SIZES = ["128x10", "1024x10", "65536x10", "1024x257", "8192x257", "8192x1000", "131072x100"]
BINARY = ["20x1", "1024x1", "8192x1", "100000x1"]
OTHERS = [
    "2x19x256x256",
    "4x3x256x256",
    "4x100x64x64",
    "8192x100:multilabel",
    "2x5x256x256:multilabel",
    "8192x100:soft",
]
Loss = Callable[[Tensor, Tensor], Tensor]


class Size(NamedTuple):
    """N x C, or N x C x d1 x ... of images; C = 1 is one logit per sample; ":multilabel" or ":soft" targets."""

    shape: tuple[int, ...]
    kind: str

    @classmethod
    def of(cls, text: str) -> "Size":
        numbers, _, kind = text.partition(":")
        shape = tuple(map(int, numbers.split("x")))
        return cls(shape, kind or ("binary" if shape[1] == 1 else "dense" if len(shape) > 2 else "multiclass"))

    def batch(self, device: str) -> tuple[Tensor, Tensor]:
        """Logits, and targets in a type that no contender converts: floats for binary problems."""
        shape = self.shape[:1] if self.kind == "binary" else self.shape
        logits = torch.randn(shape, device=device, requires_grad=True)
        if self.kind in ("binary", "multilabel"):
            return logits, torch.randint(0, 2, shape, device=device).float()
        if self.kind == "soft":
            return logits, torch.randn(shape, device=device).softmax(1)
        return logits, torch.randint(0, shape[1], (shape[0], *shape[2:]), device=device)


def contenders(size: Size) -> dict[str, Loss]:
    """The contenders, starting with the reference."""
    n, d = size.shape[:2]
    if size.kind == "binary":
        return binary_contenders(n)
    if size.kind == "multilabel":
        return multilabel_contenders()
    if size.kind == "dense":
        return dense_contenders()
    if size.kind == "soft":
        losses: dict[str, Loss] = {"cross_entropy": F.cross_entropy, "cross_entropy (control)": F.cross_entropy}
        return losses | {"f1": MetricLoss("f1"), "f1 + anchor": MetricLoss("f1", anchor=1.0)}
    counts = torch.ones(d)
    return {
        "cross_entropy": F.cross_entropy,
        "cross_entropy (control)": F.cross_entropy,
        "f1": MetricLoss("f1"),
        "f1 + anchor": MetricLoss("f1", anchor=1.0),
        "mcc": MetricLoss("mcc"),
        "f1 eager": MetricLoss("f1", backend="eager"),
        "rival: dice": DiceLoss(),
        "rival: focal": FocalLoss(),
        "rival: ldam": LDAMLoss(counts),
        "rival: logit adjustment": LogitAdjustedLoss(counts),
    }


def dense_contenders() -> dict[str, Loss]:
    """With the Dice losses of MONAI and segmentation-models-pytorch, where these are installed."""
    losses: dict[str, Loss] = {
        "cross_entropy": F.cross_entropy,
        "cross_entropy (control)": F.cross_entropy,
        "jaccard": MetricLoss("jaccard"),
        "jaccard + anchor": MetricLoss("jaccard", anchor=1.0),
        "f1 eager": MetricLoss("f1", backend="eager"),
    }
    with contextlib.suppress(ImportError):
        dice = importlib.import_module("monai.losses").DiceLoss(to_onehot_y=True, softmax=True)
        losses["rival: monai dice"] = lambda z, y: dice(z, y[:, None])
    with contextlib.suppress(ImportError):
        losses["rival: smp dice"] = importlib.import_module("segmentation_models_pytorch.losses").DiceLoss("multiclass")
    return losses


def multilabel_contenders() -> dict[str, Loss]:
    entropy = F.binary_cross_entropy_with_logits
    return {
        "bce": entropy,
        "bce (control)": entropy,
        "f1": MetricLoss("f1", task="multilabel"),
        "f1 + anchor": MetricLoss("f1", task="multilabel", anchor=1.0),
        "f1 eager": MetricLoss("f1", task="multilabel", backend="eager"),
    }


def binary_contenders(n: int) -> dict[str, Loss]:
    entropy = F.binary_cross_entropy_with_logits
    losses: dict[str, Loss] = {
        "bce": entropy,
        "bce (control)": entropy,
        "f1": MetricLoss("f1", task="binary"),
        "f1, nine thresholds": MetricLoss("f1", task="binary", step="linear", threshold=membership.BTG_GRID),
        "auroc": MetricLoss("auroc", task="binary"),
        "rival: dice": DiceLoss(task="binary"),
        "rival: focal": FocalLoss(task="binary"),
        "rival: sigmoid F1": SigmoidF1Loss(task="binary"),
    }
    if n <= 8192:  # all pairs of a positive and a negative
        losses["rival: wmw"] = WMWLoss()
    if n <= 25:  # a game of n^2 variables, solved for every batch
        losses["rival: ap-perf F1"] = APPerfLoss()
    return losses


def chosen(losses: dict[str, Loss], only: str, device: str) -> dict[str, Loss]:
    """All of them, or cross-entropy and ours; as modules they follow the logits to their device."""
    kept = {name: loss for name, loss in losses.items() if only == "all" or not name.startswith("rival")}
    if only == "fused":
        kept = {name: loss for name, loss in kept.items() if "eager" not in name}
    return {name: loss.to(device) if isinstance(loss, torch.nn.Module) else loss for name, loss in kept.items()}


def run(loss: Loss, logits: Tensor, target: Tensor) -> None:
    logits.grad = None
    loss(logits, target).backward()  # type: ignore[no-untyped-call]


class Seconds(NamedTuple):
    wall: float
    cpu: float  # of all threads of the process


def seconds(loss: Loss, logits: Tensor, target: Tensor, repeats: int) -> Seconds:
    if logits.is_cuda:
        torch.cuda.synchronize()
    start, work = time.perf_counter(), time.process_time()
    for _ in range(repeats):
        run(loss, logits, target)
    if logits.is_cuda:
        torch.cuda.synchronize()
    return Seconds((time.perf_counter() - start) / repeats, (time.process_time() - work) / repeats)


def graph_seconds(losses: dict[str, Loss], logits: Tensor, target: Tensor, rounds: int = 7) -> dict[str, float]:
    """Forward and backward as a replayed CUDA graph, the median of interleaved rounds; nan where none was recorded."""
    graphs = {name: recorded(loss, logits, target) for name, loss in losses.items()}
    found: dict[str, list[float]] = {name: [] for name in losses}
    for _ in range(rounds):
        for name, graph in graphs.items():
            if graph is None:
                continue
            once = replay_seconds(graph, 1)
            found[name].append(replay_seconds(graph, max(1, round(0.005 / once))))
    return {name: statistics.median(times) if times else float("nan") for name, times in found.items()}


def recorded(loss: Loss, logits: Tensor, target: Tensor) -> torch.cuda.CUDAGraph | None:
    def step() -> None:
        torch.autograd.grad(loss(logits, target), logits)

    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            step()
    except RuntimeError:  # a rival that reads a value
        torch.cuda.synchronize()
        return None
    return graph


def replay_seconds(graph: torch.cuda.CUDAGraph, repeats: int) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        graph.replay()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / repeats


def bytes_kept(loss: Loss, logits: Tensor, target: Tensor) -> int:
    """Bytes of tensors that autograd saves, each storage once, without the input itself."""
    seen: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() != logits.untyped_storage().data_ptr():
            seen[storage.data_ptr()] = storage.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        result = loss(logits, target)
    own: tuple[Tensor, ...] = getattr(result.grad_fn, "kept", None) or ()  # the memory of our gradient
    return sum(seen.values()) + sum(x.nbytes for x in own)


def peak_bytes(loss: Loss, logits: Tensor, target: Tensor) -> int:
    """Peak bytes allocated during forward and backward, beyond the initial ones."""
    run(loss, logits, target)
    logits.grad = None
    if logits.is_cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run(loss, logits, target)
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run(loss, logits, target)
    level = peak = 0
    for event in sorted(profile.profiler.kineto_results.events(), key=lambda e: e.start_ns()):
        if event.name() == "[memory]":
            level += event.nbytes()
            peak = max(peak, level)
    return peak


def measure(
    size: Size,
    device: str,
    rounds: int,
    only: str = "all",
    compiled: bool = False,
    graphs: bool = False,
    names: list[str] | None = None,
) -> list[dict[str, object]]:
    torch.manual_seed(0)
    logits, target = size.batch(device)
    losses = chosen(contenders(size), only, device)
    losses = {name: loss for at, (name, loss) in enumerate(losses.items()) if names is None or at == 0 or name in names}
    if compiled:
        torch.compiler.reset()
        baseline, ours = next(iter(losses)), losses.get("f1", losses.get("jaccard"))
        losses[f"{baseline} compiled"] = torch.compile(losses[baseline])
        if isinstance(ours, MetricLoss):
            losses["ours compiled"] = torch.compile(ours)
            eager = MetricLoss(ours.metric, task=ours.task, backend="eager").to(device)
            losses["eager compiled"] = torch.compile(eager)
    # Two warm-up runs for compilers and allocators.
    warm = {name: min(seconds(loss, logits, target, 1).wall for _ in range(3)) for name, loss in losses.items()}
    repeats = {name: max(1, round(0.01 / once)) for name, once in warm.items()}
    found: dict[str, list[Seconds]] = {name: [] for name in losses}
    copies, dice = [], random.Random(0)
    for _ in range(rounds):
        # In a new order every round, since the previous contender affects clocks and caches.
        for name in dice.sample(list(losses), len(losses)):
            found[name].append(seconds(losses[name], logits, target, repeats[name]))
        copies.append(copy_seconds(logits))
    times, work = ({name: [x[k] for x in all_] for name, all_ in found.items()} for k in (0, 1))
    least = min(next(iter(work.values())))
    base, copy = next(iter(times.values())), statistics.median(copies)
    replayed = graph_seconds(losses, logits, target) if graphs else dict.fromkeys(losses, float("nan"))
    least_replayed = next(iter(replayed.values()))
    rows = []
    for name, loss in losses.items():
        ratios = [t / b for t, b in zip(times[name], base, strict=True)]
        low, *_, high = statistics.quantiles(ratios, n=5)
        median = statistics.median(times[name])
        first, *_, last = statistics.quantiles(times[name], n=5)
        rows.append(
            {
                "n": size.shape[0],
                "d": size.shape[1],
                "shape": "x".join(map(str, size.shape)),
                "kind": size.kind,
                "loss": name,
                "ms": round(1e3 * median, 4),
                "ms_best": round(1e3 * min(times[name]), 4),
                "ms_p20": round(1e3 * first, 4),
                "ms_p80": round(1e3 * last, 4),
                "ratio": round(statistics.median(ratios), 2),
                "ratio_p20": round(low, 2),
                "ratio_p80": round(high, 2),
                "ratio_best": round(min(times[name]) / min(base), 2),
                "ratio_cpu": round(min(work[name]) / least, 2),
                "peak_mib": round(peak_bytes(loss, logits, target) / 2**20, 2),
                "kept_mib": round(bytes_kept(loss, logits, target) / 2**20, 2),
                "of_copy": round(1.5 * copy / median, 3),
                "graph_ms": round(1e3 * replayed[name], 4),
                "graph_ratio": round(replayed[name] / least_replayed, 2),
            }
        )
    return rows


def copy_seconds(logits: Tensor) -> float:
    times = []
    with torch.no_grad():
        into = torch.empty_like(logits)
        for _ in range(5):
            if logits.is_cuda:
                torch.cuda.synchronize()
            start = time.perf_counter()
            into.copy_(logits)
            if logits.is_cuda:
                torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
    return min(times)


def circumstances(device: str, commit: str | None = None) -> dict[str, object]:
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    name = torch.cuda.get_device_name() if device == "cuda" else platform.processor() or platform.machine()
    return {
        "device": name,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": commit or found.stdout.strip() or "unknown",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--sizes", nargs="*", default=SIZES + BINARY + OTHERS, help="NxC, NxCxHxW ...")
    parser.add_argument("--only", choices=["all", "ours", "fused"], default="all", help="leave out rivals, and eager")
    parser.add_argument("--losses", nargs="*", help="those of these names alone, besides cross-entropy")
    parser.add_argument("--compiled", action="store_true", help="cross-entropy through torch.compile as well")
    parser.add_argument("--graphs", action="store_true", help="recorded as CUDA graphs as well")
    parser.add_argument("--tiles", type=Path, help="what `tune_tiles.py --chosen` wrote: the tiles of each size")
    parser.add_argument("--commit", help="where there is no repository to ask")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "bench_loss.csv")
    options = parser.parse_args()
    rows: list[dict[str, object]] = []
    tiles = json.loads(options.tiles.read_text()) if options.tiles else {}
    for size in options.sizes:
        for kernel, candidate in tiles.get(size, {}).items():
            from tune_tiles import use  # which needs Triton

            use(kernel, tuple(candidate))
        kinds = options.only, options.compiled, options.graphs, options.losses
        for row in measure(Size.of(size), options.device, options.rounds, *kinds):
            rows.append({**row, **circumstances(options.device, options.commit)})
            shown = "{shape:>14} {loss:24} {ms:>9} ms {ratio:>6}x {ratio_best:>6}x {ratio_cpu:>6}x {peak_mib:>8} MiB"
            if options.graphs:
                shown += "  graph {graph_ms:>8} ms {graph_ratio:>5}x"
            print(shown.format(**row), flush=True)
        save(options.out, rows)


def save(path: Path, rows: list[dict[str, object]]) -> None:
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_atomically(path, text.getvalue())


if __name__ == "__main__":
    main()
