"""`evalign bench`: time of MetricLoss relative to cross-entropy on this machine."""

import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from evalign.cli import options as o

if TYPE_CHECKING:
    import torch

NAME = "bench"
EXAMPLE = "evalign bench --metric mcc --size 8192x1000"
SIZES = ["1024x10", "65536x10", "8192x257", "8192x1000"]
OURS, CONTROL = "ours", "cross-entropy again"


def command(
    metric: Annotated[str, typer.Option("--metric", "-m", help="Metric of the loss.")] = "f1",
    size: Annotated[
        list[str] | None,
        typer.Option(
            "--size", help="Batch size as ROWSxCLASSES; repeatable. Default: three sizes.", show_default=False
        ),
    ] = None,
    anchor: Annotated[float, typer.Option("--anchor", min=0.0, help="Weight of the cross-entropy term.")] = 0.0,
    rounds: Annotated[int, typer.Option("--rounds", min=3, help="Timed repetitions of each loss.")] = 15,
    device: o.Device = "auto",
    json: o.Json = False,
) -> None:
    """Time MetricLoss, forward and backward, as a multiple of cross-entropy; losses alternate within one run.

    The control is cross-entropy timed a second time: its distance from 1.0 is the noise level.
    """
    import torch

    from evalign import MetricLoss
    from evalign.cli.console import Output
    from evalign.cli.options import resolve_device

    output = Output(quiet=False, as_json=json)
    place = torch.device(resolve_device(device))
    losses: dict[str, Callable[..., torch.Tensor]] = {
        "cross-entropy": torch.nn.functional.cross_entropy,
        OURS: MetricLoss(metric, anchor=anchor).to(place),
    }
    losses[CONTROL] = losses["cross-entropy"]
    rows = []
    for text in size or SIZES:
        n, d = parse_size(text)
        times = alternating_times(losses, n, d, rounds, place)
        base = times["cross-entropy"]
        ratios = {name: statistics.median(a / b for a, b in zip(own, base, strict=True)) for name, own in times.items()}
        rows.append(
            {
                "rows": n, "classes": d, "cross_entropy_ms": round(1e3 * statistics.median(base), 4),
                "ours_ms": round(1e3 * statistics.median(times[OURS]), 4), "ratio": round(ratios[OURS], 3),
                "control": round(ratios[CONTROL], 3),
            }
        )  # fmt: skip
    output.json({"metric": metric, "anchor": anchor, "device": str(place), "torch": torch.__version__, "sizes": rows})
    output.show(_table(rows, metric))


def parse_size(size: str) -> tuple[int, int]:
    """Parse --size.

    >>> parse_size("8192x1000")
    (8192, 1000)
    """
    numbers = size.lower().split("x")
    if len(numbers) != 2 or not all(number.isdigit() and int(number) >= 2 for number in numbers):
        raise ValueError(f"--size must be ROWSxCLASSES with two or more of each, e.g. 8192x1000, got {size!r}")
    return int(numbers[0]), int(numbers[1])


def alternating_times(
    losses: dict[str, Callable[..., "torch.Tensor"]], n: int, d: int, rounds: int, device: "torch.device"
) -> dict[str, list[float]]:
    """Seconds per loss and round; losses alternate, so that noise affects all equally."""
    import torch

    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(n, d, generator=generator).to(device).requires_grad_()
    target = torch.randint(0, d, (n,), generator=generator).to(device)

    def once(loss: Callable[..., torch.Tensor]) -> float:
        logits.grad = None
        _wait(device)
        started = time.perf_counter()
        loss(logits, target).backward()  # type: ignore[no-untyped-call]
        _wait(device)
        return time.perf_counter() - started

    for loss in losses.values():  # compile, choose algorithms, fill caches
        for _ in range(3):
            once(loss)
    times: dict[str, list[float]] = {name: [] for name in losses}
    for _ in range(rounds):
        for name, loss in losses.items():
            times[name].append(once(loss))
    return times


def _wait(device: "torch.device") -> None:
    if device.type == "cuda":
        import torch

        torch.cuda.synchronize(device)


def _table(rows: list[dict[str, Any]], metric: str) -> Any:
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0))
    for title in ("rows", "classes", "cross-entropy, ms", f"1 - {metric}, ms", "ratio", "control"):
        table.add_column(title, justify="right")
    for row in rows:
        table.add_row(*(f"{value:g}" for value in row.values()))
    return table
