"""Cost of other libraries' losses and ours, in one interleaved run and a separate environment.

    make bench-peers            # makes .venv-peers, writes benchmarks/results/bench_peers.csv

A package that cannot be imported or run here is listed with the reason: torch-btg calls .cuda() on every batch, LibAUC
pulls in sixteen packages. Of segmentation-models-pytorch, which needs torchvision, the losses are loaded alone.
"""

import csv
import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bench_loss
import torch
import torch.nn.functional as F
from torch import Tensor

from evalign import MetricLoss

RESULTS = Path(__file__).parent / "results" / "bench_peers.csv"
PICTURES = (8, 4, 128, 128)  # N, C, H, W of segmentation
PIXELS = (8 * 128 * 128, 4)
SIZES = [(1024, 10), (65536, 10), (8192, 257), (8192, 1000), (8192, 1), PIXELS]


def peers(d: int) -> dict[str, Callable[[Any], Callable[[Tensor, Tensor], Tensor]]]:
    """Package and loss to a factory; each loss takes logits (n, d) or (n,) and labels."""
    if d == 1:
        return {
            "monai: Dice": lambda m: _columns(m("monai.losses").DiceLoss(sigmoid=True, batch=True)),
            "monai: Tversky": lambda m: _columns(m("monai.losses").TverskyLoss(sigmoid=True, batch=True)),
            "segmentation_models_pytorch: Dice": lambda _: _smp().DiceLoss("binary"),
            "torch_btg: fb_loss": lambda m: _first(m("torch_btg.loss").fb_loss()),
            "libauc: AUCM": lambda m: m("libauc.losses").AUCMLoss(),
        }
    options = {"softmax": True, "to_onehot_y": True, "batch": True}
    return {
        "monai: Dice": lambda m: _columns(m("monai.losses").DiceLoss(**options)),
        "monai: Tversky": lambda m: _columns(m("monai.losses").TverskyLoss(**options)),
        "monai: GeneralizedDice": lambda m: _columns(m("monai.losses").GeneralizedDiceLoss(**options)),
        "segmentation_models_pytorch: Dice": lambda _: _smp().DiceLoss("multiclass"),
    }


def _smp() -> Any:
    """The losses of segmentation-models-pytorch without its networks, which alone need torchvision."""
    found = importlib.util.find_spec("segmentation_models_pytorch")
    if found is None or not found.submodule_search_locations:
        raise ModuleNotFoundError("segmentation-models-pytorch is not installed")
    folder = Path(found.submodule_search_locations[0]) / "losses"
    spec = importlib.util.spec_from_file_location(
        "smp_losses", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    if spec is None or spec.loader is None:
        raise ModuleNotFoundError(f"segmentation-models-pytorch has no losses in {folder}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def segmentation_peers() -> dict[str, Callable[[Any], Callable[[Tensor, Tensor], Tensor]]]:
    """The same of dense losses, which take logits (N, C, H, W) and labels (N, H, W)."""
    options = {"softmax": True, "to_onehot_y": True, "batch": True}
    smp = "segmentation_models_pytorch"
    return {
        "monai: Dice, (N, C, H, W)": lambda m: _channel(m("monai.losses").DiceLoss(**options)),
        "monai: Jaccard, (N, C, H, W)": lambda m: _channel(m("monai.losses").DiceLoss(jaccard=True, **options)),
        f"{smp}: Dice, (N, C, H, W)": lambda _: _smp().DiceLoss("multiclass"),
        f"{smp}: Jaccard, (N, C, H, W)": lambda _: _smp().JaccardLoss("multiclass"),
    }


def _channel(loss: Any) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda logits, target: loss(logits, target[:, None])


def _pictured(loss: Any) -> Callable[[Tensor, Tensor], Tensor]:
    """A dense loss on random logits drawn as (n, d)."""
    return lambda z, y: loss(z.view(PICTURES), y.view(PICTURES[0], *PICTURES[2:]))


def segmentation_contenders() -> dict[str, Callable[[Tensor, Tensor], Tensor]]:
    found: dict[str, Any] = {"cross_entropy, (N, C, H, W)": F.cross_entropy}
    for label, metric in (("Dice", "f1"), ("Jaccard", "jaccard"), ("MCC", "mcc")):
        found[f"evalign: {label}, (N, C, H, W)"] = MetricLoss(metric)
    for name, make in segmentation_peers().items():
        _try(name, make, torch.randn(2, 4, 8, 8, requires_grad=True), torch.randint(0, 4, (2, 8, 8)), found)
    return {name: _pictured(loss) for name, loss in found.items()}


def _columns(loss: Any) -> Callable[[Tensor, Tensor], Tensor]:
    """MONAI wants labels as a column."""
    return lambda logits, target: loss(logits.reshape(len(logits), -1), target[:, None])


def _first(loss: Any) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda logits, target: loss(logits.sigmoid(), target)[0]


def contenders(size: bench_loss.Size) -> dict[str, Callable[[Tensor, Tensor], Tensor]]:
    found: dict[str, Callable[[Tensor, Tensor], Tensor]]
    n, d = size.shape
    if (n, d) == PIXELS:
        return segmentation_contenders()
    if d == 1:
        found = {
            "bce": lambda z, y: F.binary_cross_entropy_with_logits(z, y.to(z.dtype)),
            "evalign: f1": MetricLoss("f1", task="binary"),
        }
    else:
        found = {"cross_entropy": F.cross_entropy, "evalign: f1": MetricLoss("f1")}
    logits = torch.randn((4, d) if d > 1 else (4,), requires_grad=True)
    target = torch.tensor([0, 1, 1, 0])
    for name, make in peers(d).items():
        _try(name, make, logits, target, found)
    return found


def _try(name: str, make: Any, logits: Tensor, target: Tensor, found: dict[str, Any]) -> None:
    """Add a loss to `found` if it can be made and run here, else the reason to `REASONS`."""
    try:
        loss = make(importlib.import_module)
        loss(logits, target).backward()
    except Exception as error:  # any failure of another package is the finding
        REASONS[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:100]}"
    else:
        found[name] = loss


REASONS: dict[str, str] = {}


def main() -> None:
    bench_loss.contenders = contenders
    rows: list[dict[str, object]] = []
    for n, d in SIZES:
        for row in bench_loss.measure(bench_loss.Size.of(f"{n}x{d}"), "cpu", 9):
            rows.append({**row, "reason": "", **bench_loss.circumstances("cpu")})
            print("{n:>7} {d:>5}  {loss:36} {ms:>9} ms  {ratio:>6}x  {peak_mib:>8} MiB".format(**row), flush=True)
    for name, reason in REASONS.items():
        rows.append({"loss": name, "reason": reason})
        print(f"not run: {name}: {reason}")
    with RESULTS.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]), restval="")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
