"""Time the row kernels on a GPU with other tile sizes, and the host's share of a call.

    python benchmarks/tune_tiles.py --seconds 25 --chosen chosen.json
    python benchmarks/bench_loss.py --device cuda --only fused --graphs --tiles chosen.json --sizes 8192x1000

Every candidate is recorded as a CUDA graph of the loss's forward and backward and replayed; a row has its median
milliseconds. The first candidate of each kernel is the current one; the fastest is kept while later kernels are tuned.
No candidate starts after `--seconds`, most of which is compilation. The fastest for each size are written to
`--chosen`. `host` times the calls alone, for cross-entropy and for ours, and prints a profile of ours.
"""

import argparse
import cProfile
import json
import pstats
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from bench_loss import Loss, Size, circumstances, recorded, replay_seconds, save
from torch import Tensor

from evalign import MetricLoss
from evalign.kernels.gpu import gpu_loss as triton_rows
from evalign.kernels.gpu import loss_plans
from evalign.kernels.plan import TILE_CLASSES
from evalign.storage.atomic import write_atomically

SIZES = ["8192x1000", "65536x257", "4096x32768", "8x19x512x512"]
# What each function of these names gives, less what follows from the number of classes. The tiles: warps, and
# programs (`tile`) or tiles of a program (`back_tile`); of images, whether logits stay in registers, pixels, warps,
# programs. The others: rows, but for `along`, classes, warps.
CANDIDATES: dict[str, list[tuple[int, ...]]] = {
    "back_tile": [(4, 1), (2, 1), (8, 1), (4, 4)],
    "tile": [(8, 256), (4, 1056), (4, 528), (4, 264)],
    "back_along": [(2, 2048, 16), (1, 4096, 16), (4, 2048, 32)],
    "down": [(4, 512, 4), (4, 1024, 8), (8, 512, 8)],
    "along": [(4096, 16), (4096, 8)],
    "dense_tile": [(1, 128, 4, 264), (1, 128, 4, 528), (1, 128, 4, 1056), (1, 64, 2, 1056), (1, 256, 4, 264),
                   (1, 256, 8, 264), (0, 256, 4, 528), (0, 512, 4, 528), (0, 256, 4, 1056), (0, 128, 4, 1056)],
}  # fmt: skip
TILES = ("tile", "back_tile")
PLANS = (*TILES, "dense_tile")
IN_USE = {kernel: getattr(loss_plans if kernel in PLANS else triton_rows, kernel) for kernel in CANDIDATES}


def problem(size: Size) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return size.batch("cuda")


def use(kernel: str, candidate: tuple[int, ...]) -> None:
    """Launch the kernel with these settings from now on, for any number of classes."""
    if kernel == "dense_tile":
        loss_plans.cached_dense.cache_clear()
        loss_plans.dense_tile = lambda d: (bool(candidate[0]), *candidate[1:])  # type: ignore[assignment,return-value]
        return
    if kernel not in TILES:
        setattr(triton_rows, kernel, lambda d: candidate)
        return
    warps, last = candidate
    loss_plans.cached_rows.cache_clear()

    def tile(d: int, aligned: bool, scattered: bool = False) -> tuple[int, ...]:
        return (*loss_plans.shape(d, aligned, warps), warps, last)

    setattr(loss_plans, kernel, tile)


def candidates(kernel: str, d: int) -> list[tuple[int, ...]]:
    """The current settings, followed by others."""
    scattered = (d >= loss_plans.SCATTERED,) if kernel == "tile" else ()
    first = IN_USE[kernel](d, d % 4 == 0, *scattered)[3:] if kernel in TILES else IN_USE[kernel](d)
    first = tuple(map(int, first))
    return [first, *(other for other in CANDIDATES[kernel] if other != first)]


def replayed(loss: Loss, logits: Tensor, target: Tensor) -> float:
    graph = recorded(loss, logits, target)
    assert graph is not None
    repeats = max(1, round(0.005 / replay_seconds(graph, 1)))
    return statistics.median(replay_seconds(graph, repeats) for _ in range(5))


def fits(kernel: str, size: Size) -> bool:
    if (kernel == "dense_tile") != (size.kind == "dense"):
        return False
    return kernel == "dense_tile" or (kernel in TILES) == (size.shape[1] <= TILE_CLASSES)


def tuned(size: Size, kernels: list[str], until: float) -> list[dict[str, Any]]:
    """Tune one kernel after the other for one size, keeping the fastest candidates."""
    logits, target = problem(size)
    n, d = "x".join(map(str, size.shape[:1] + size.shape[2:])), size.shape[1]
    entropy, rows = replayed(F.cross_entropy, logits, target), []
    for kernel in kernels:
        if not fits(kernel, size):
            continue
        times: dict[tuple[int, ...], float] = {}
        for candidate in candidates(kernel, d):
            if times and time.perf_counter() > until:
                break
            use(kernel, candidate)
            try:
                times[candidate] = 1e3 * replayed(MetricLoss("f1").cuda(), logits, target)
            except Exception as error:  # for example too many registers; still report the others
                print(kernel, candidate, type(error).__name__, str(error)[:200], flush=True)
                continue
            ms = round(times[candidate], 4)
            row = {"n": n, "d": d, "kernel": kernel, "candidate": "x".join(map(str, candidate)), "ms": ms}
            rows.append({**row, "ratio": round(1e-3 * ms / entropy, 3), "entropy_ms": round(1e3 * entropy, 4)})
            print("{n:>10} {d:>6} {kernel:10} {candidate:14} {ms:>9} ms {ratio:>6}x".format(**rows[-1]), flush=True)
        use(kernel, min(times, key=lambda candidate: times[candidate]) if times else candidates(kernel, d)[0])
    return rows


def fastest(rows: list[dict[str, Any]]) -> dict[str, dict[str, list[int]]]:
    """The fastest candidate of every size and kernel."""
    found: dict[str, dict[str, list[int]]] = {}
    for row in sorted(rows, key=lambda row: -row["ms"]):
        found.setdefault(f"{row['n']}x{row['d']}", {})[row["kernel"]] = [int(x) for x in row["candidate"].split("x")]
    return found


def host() -> None:
    """Host microseconds of forward, and of forward and backward, for a batch that the GPU finishes sooner."""
    logits, target = problem(Size.of("1024x10"))
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
    parser.add_argument("--sizes", nargs="*", default=SIZES, help="NxC, NxCxHxW ...")
    parser.add_argument("--commit", help="where there is no repository to ask")
    parser.add_argument("--seconds", type=float, default=60.0, help="after which no candidate is begun")
    parser.add_argument("--chosen", type=Path, help="where the fastest are written")
    parser.add_argument("--out", type=Path, default=Path("tune_tiles.csv"))
    options = parser.parse_args()
    until = time.perf_counter() + options.seconds
    kernels = [kernel for kernel in options.kernels if kernel != "host"]
    rows: list[dict[str, Any]] = []
    for size in options.sizes if kernels else []:
        rows += [{**row, **circumstances("cuda", options.commit)} for row in tuned(Size.of(size), kernels, until)]
        if rows:
            save(options.out, rows)
        if options.chosen is not None:
            write_atomically(options.chosen, json.dumps(fastest(rows)))
    if "host" in options.kernels:
        host()


if __name__ == "__main__":
    main()
