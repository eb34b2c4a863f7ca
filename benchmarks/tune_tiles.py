"""What the row kernels take on a GPU with other tiles than those of `kernels.triton_rows`, and what the host takes.

    python benchmarks/tune_tiles.py --out tune_tiles.csv             # all of it: about a minute, most of it compiling
    python benchmarks/tune_tiles.py --kernels back_along host --sizes 8192x131072

Every candidate is recorded as a CUDA graph of the loss's forward and backward and replayed; a row has the median
milliseconds of the whole. The first candidate of each kernel is the one in use. `host` times the calls alone, for
cross-entropy and for ours, and prints where ours spends them.
"""

import argparse
import cProfile
import pstats
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from bench_loss import Loss, circumstances, recorded, replay_seconds, save
from torch import Tensor

from evalign import MetricLoss
from evalign.kernels import triton_rows
from evalign.kernels.triton_launch import next_power_of_2

SIZES = ["8192x1000", "65536x257", "4096x32768", "8192x131072"]
# Rows, classes and warps of a program; rows are always 1 for `along`.
CANDIDATES: dict[str, list[tuple[int, ...]]] = {
    "tile": [(2048, 8), (1024, 4), (4096, 8), (2048, 4)],  # entries and warps
    "along": [(8192, 32), (4096, 16), (8192, 16), (4096, 8), (16384, 32)],
    "down": [(4, 512, 8), (2, 512, 4), (8, 512, 16), (8, 256, 8), (4, 1024, 8)],
    "back_along": [(2, 4096, 32), (2, 2048, 16), (4, 2048, 32), (1, 8192, 32), (2, 2048, 8), (1, 4096, 16)],
}


def problem(n: int, d: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(n, d, device="cuda", requires_grad=True), torch.randint(0, d, (n,), device="cuda")


def chosen(kernel: str, candidate: tuple[int, ...]) -> Callable[[int], tuple[int, ...]]:
    if kernel != "tile":
        return lambda d: candidate
    entries, warps = candidate

    def tile(d: int) -> tuple[int, ...]:
        block = next_power_of_2(max(d, 16))
        return max(1, entries // block), block, warps

    return tile


def replayed(loss: Loss, logits: Tensor, target: Tensor) -> float:
    graph = recorded(loss, logits, target)
    assert graph is not None
    repeats = max(1, round(0.005 / replay_seconds(graph, 1)))
    return statistics.median(replay_seconds(graph, repeats) for _ in range(5))


def tuned(kernel: str, n: int, d: int) -> list[dict[str, Any]]:
    if (kernel == "tile") != (d <= triton_rows.WHOLE):
        return []
    logits, target = problem(n, d)
    entropy, rows, usual = replayed(F.cross_entropy, logits, target), [], getattr(triton_rows, kernel)
    for candidate in CANDIDATES[kernel]:
        setattr(triton_rows, kernel, chosen(kernel, candidate))
        try:
            ms = 1e3 * replayed(MetricLoss("f1").cuda(), logits, target)
        except Exception as error:  # too many registers, say: the others are still worth knowing
            print(kernel, candidate, type(error).__name__, str(error)[:200], flush=True)
            continue
        finally:
            setattr(triton_rows, kernel, usual)
        row = {"n": n, "d": d, "kernel": kernel, "candidate": "x".join(map(str, candidate)), "ms": round(ms, 4)}
        rows.append({**row, "ratio": round(1e-3 * ms / entropy, 3), "entropy_ms": round(1e3 * entropy, 4)})
        print("{n:>7} {d:>6} {kernel:10} {candidate:12} {ms:>9} ms {ratio:>6}x".format(**rows[-1]), flush=True)
    return rows


def host() -> None:
    """Microseconds of the host for forward, and for both, of a batch that the GPU is done with sooner."""
    logits, target = problem(1024, 10)
    ours = MetricLoss("f1").cuda()
    losses: dict[str, Loss] = {"cross_entropy": F.cross_entropy, "f1": ours}
    for name, loss in losses.items():
        both = [0.0, 0.0]
        for backward in (0, 1):
            for repeats in (20, 300):  # the first are warm-up
                torch.cuda.synchronize()
                start = time.perf_counter()
                for _ in range(repeats):
                    value = loss(logits, target)
                    if backward:
                        logits.grad = None
                        value.backward()  # type: ignore[no-untyped-call]
                both[backward] = 1e6 * (time.perf_counter() - start) / repeats
        print(f"host {name:14} forward {both[0]:6.1f} us, with backward {both[1]:6.1f} us", flush=True)
    steps: dict[str, Callable[[], Any]] = {
        "forward": lambda: ours(logits, target),
        "with backward": lambda: torch.autograd.grad(ours(logits, target), logits),
    }
    for label, step in steps.items():
        profile = cProfile.Profile()
        profile.enable()
        for _ in range(500):
            step()
        profile.disable()
        print(label, flush=True)
        pstats.Stats(profile).sort_stats("tottime").print_stats(14)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", nargs="*", default=["host", *CANDIDATES], choices=["host", *CANDIDATES])
    parser.add_argument("--sizes", nargs="*", default=SIZES, help="NxD ...")
    parser.add_argument("--commit", help="where there is no repository to ask")
    parser.add_argument("--out", type=Path, default=Path("tune_tiles.csv"))
    options = parser.parse_args()
    if "host" in options.kernels:
        host()
    rows: list[dict[str, Any]] = []
    for kernel in (kernel for kernel in options.kernels if kernel != "host"):
        for size in options.sizes:
            n, d = map(int, size.split("x"))
            rows += [{**row, **circumstances("cuda", options.commit)} for row in tuned(kernel, n, d)]
            if rows:
                save(options.out, rows)


if __name__ == "__main__":
    main()
