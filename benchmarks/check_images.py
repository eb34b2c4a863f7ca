"""Check within a minute that training on images is the same on a GPU as on a CPU.

    python benchmarks/check_images.py --device cuda

- no step waits for the GPU (torch raises if one does),
- recorded training (CUDA graph) ends with the weights of plain training,
- killed training resumes from its checkpoint and ends with the weights of an uninterrupted run,
- shifted and mirrored images are windows of the reflected images.
"""

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from bench_images import plain_step
from torch import nn

from evalign import metrics
from evalign.objective import Objective
from evalign.steps import StepChoice
from evalign.training.batches import Rows, argmax_score
from evalign.training.in_memory import InMemory, train
from evalign.training.loop import Epoch
from evalign.training.recipes import Recipe, Stage
from evalign_papers.engine.recorded import RecordedRows
from evalign_papers.networks import Pictures
from evalign_papers.networks.darknet import Conv, darknet
from evalign_papers.networks.image_input import moved

STAGE = Stage(
    "metric", metric=True, anchor=1.0, learning_rate=1e-3, epochs=3, patience=9, monitor="last", decay="cosine",
    cool_to=0.1,
)  # fmt: skip
RECIPE = Recipe("check", "", (STAGE, Stage(**{**vars(STAGE), "name": "offsets", "offset": 1.0})))
OBJECTIVE = Objective("balanced_accuracy", "multiclass", StepChoice("annealed"), anchor=1.0)
NEAR = 0.02  # of a validation loss: convolutions on a GPU add up in no fixed order


class Killed(Exception):
    pass


def pictures(device: str, n: int = 256) -> Rows:
    """Three classes of uneven size that differ in brightness."""
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(n) % 7 % 3
    x = (torch.randint(0, 150, (n, 16, 16, 3), generator=generator) + 35 * y[:, None, None, None]).to(torch.uint8)
    return Rows.of(x.to(device), y.to(device))


def network(device: str, augment: bool) -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Sequential(Pictures((0.5,) * 3, (0.2,) * 3, augment=augment), darknet(((Conv(8),), (Conv(16),)), 3))
    return layers.to(device, memory_format=torch.channels_last)  # type: ignore[call-overload,no-any-return]


def trained(
    device: str,
    *,
    recorded: bool = False,
    checkpoint: Path | None = None,
    on_epoch: Callable[[Epoch], None] | None = None,
) -> list[Epoch]:
    rows = pictures(device)
    return train(
        network(device, augment=False), rows, rows, RECIPE, OBJECTIVE, argmax_score(metrics.balanced_accuracy),
        batch_size=32, source=RecordedRows if recorded else InMemory, checkpoint=checkpoint, on_epoch=on_epoch,
    )  # fmt: skip


def check_no_waiting(device: str) -> None:
    rows = pictures(device)
    for stage in (STAGE, Stage(**{**vars(STAGE), "metric": False})):
        step = plain_step(network(device, augment=True), rows, stage, OBJECTIVE, 32, amp=device == "cuda")
        batches = torch.randperm(len(rows), device=device).split(32)  # type: ignore[no-untyped-call]
        for index in batches[:3]:
            step(index)  # kernels are compiled and algorithms chosen
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("error")
        try:
            for index in batches:
                step(index)
        finally:
            if device == "cuda":
                torch.cuda.set_sync_debug_mode("default")


def check_recorded(device: str) -> None:
    _near(trained(device), trained(device, recorded=True))


def check_resumed(device: str) -> None:
    def kill(epoch: Epoch) -> None:
        if epoch.epoch in (2, 4):
            raise Killed

    undisturbed = trained(device)
    for recorded in (False, True):
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "training.safetensors"
            for _ in range(2):
                try:
                    trained(device, recorded=recorded, checkpoint=file, on_epoch=kill)
                except Killed:
                    continue
                raise AssertionError("the training was not killed")
            _near(undisturbed, trained(device, recorded=recorded, checkpoint=file))


def check_moved(device: str) -> None:
    x, border = pictures(device, 8).x[:], 2
    padded = F.pad(x.float().permute(0, 3, 1, 2), (border,) * 4, mode="reflect").permute(0, 2, 3, 1).to(torch.uint8)
    found = moved(x, border)
    for ours, whole in zip(found, padded, strict=True):
        windows = [whole[i : i + 16, j : j + 16] for i in range(2 * border + 1) for j in range(2 * border + 1)]
        assert any(torch.equal(ours, w) or torch.equal(ours, w.flip(1)) for w in windows)


def _near(expected: list[Epoch], found: list[Epoch]) -> None:
    ours, theirs = [epoch.loss for epoch in found], [epoch.loss for epoch in expected]
    assert len(ours) == len(theirs) == RECIPE.epochs
    assert all(abs(a - b) < NEAR * max(1.0, b) for a, b in zip(ours, theirs, strict=True)), (ours, theirs)
    assert ours[-1] < ours[0]


CHECKS = (check_no_waiting, check_moved, check_recorded, check_resumed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    device = parser.parse_args().device
    failed = 0
    for check in CHECKS:
        try:
            check(device)
        except Exception as error:  # still report the others
            failed += 1
            print(f"{check.__name__}: FAILED on {device}: {type(error).__name__}: {error}", flush=True)
        else:
            print(f"{check.__name__}: ok on {device}", flush=True)
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    main()
