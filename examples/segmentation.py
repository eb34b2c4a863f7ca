"""Dice, Jaccard and MCC losses for segmentation: logits (N, C, H, W), labels (N, H, W), synthetic images.

python examples/segmentation.py

Three classes: background, discs, and specks of three by three pixels, one pixel in sixty-four. If MONAI or
segmentation-models-pytorch is installed, its Dice loss is trained for comparison.
"""

import importlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from sklearn.metrics import f1_score
from torch import Tensor, nn

from evalign import MetricLoss

Loss = Callable[[Tensor, Tensor], Tensor]
NAMES = ("background", "disc", "speck")
SIDE, STEPS = 24, 75


def made_pictures(n: int, seed: int) -> tuple[Tensor, Tensor]:
    """Grey images (n, 1, SIDE, SIDE) and their masks (n, SIDE, SIDE): a disc, a speck on or next to it, and noise."""
    generator = torch.Generator().manual_seed(seed)
    grid = torch.arange(SIDE)
    centre, radius = torch.randint(6, SIDE - 6, (2, n, 1, 1), generator=generator), 4
    disc = (grid[:, None] - centre[0]) ** 2 + (grid - centre[1]) ** 2 <= radius**2
    corner = torch.randint(0, SIDE - 3, (2, n, 1, 1), generator=generator)
    rows, columns = grid[:, None] - corner[0], grid - corner[1]
    speck = (rows >= 0) & (rows < 3) & (columns >= 0) & (columns < 3)
    mask = torch.where(speck, 2, disc.long())
    noise = 0.5 * torch.randn(n, SIDE, SIDE, generator=generator)
    return (torch.tensor([0.0, 1.0, 2.0])[mask] + noise)[:, None], mask


def losses() -> dict[str, Loss]:
    """Our losses; the Dice score of a class is its F1. Some cross-entropy keeps the network from dropping a class."""
    found: dict[str, Loss] = {
        "cross-entropy": F.cross_entropy,
        "Dice": MetricLoss("f1", anchor=0.3),
        "Jaccard": MetricLoss("jaccard", anchor=0.3),
        "MCC": MetricLoss("mcc", anchor=0.3),
    }
    return found | peers()


def peers() -> dict[str, Loss]:
    """Dice losses of other libraries, if installed, with the same anchor."""
    found: dict[str, Loss] = {}
    try:
        dice: Any = importlib.import_module("monai.losses").DiceLoss(softmax=True, to_onehot_y=True, batch=True)
        found["MONAI Dice"] = lambda z, y: dice(z, y[:, None]) + 0.3 * F.cross_entropy(z, y)
    except ImportError:
        pass
    try:
        other: Any = importlib.import_module("segmentation_models_pytorch.losses").DiceLoss("multiclass")
        found["SMP Dice"] = lambda z, y: other(z, y) + 0.3 * F.cross_entropy(z, y)
    except (ImportError, RuntimeError):  # needs a torchvision that matches torch
        pass
    return found


def network() -> nn.Module:
    layers: list[nn.Module] = []
    width = 1
    for dilation in (1, 2, 4):
        layers += [nn.Conv2d(width, 8, 3, padding=dilation, dilation=dilation), nn.ReLU()]
        width = 8
    return nn.Sequential(*layers, nn.Conv2d(width, len(NAMES), 1))


def train(loss: Loss, x: Tensor, y: Tensor) -> nn.Module:
    torch.manual_seed(0)
    model = network()
    optimiser = torch.optim.AdamW(model.parameters(), lr=2e-2)
    for step in range(STEPS):
        rows = slice(16 * (step % 3), 16 * (step % 3) + 16)
        value = loss(model(x[rows]), y[rows])
        optimiser.zero_grad()
        value.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
    return model


def main() -> None:
    x, y = made_pictures(48, 0)
    x_test, y_test = made_pictures(48, 1)
    print(f"Dice of each class on new images{'':8}" + "".join(f"{name:>12}" for name in NAMES) + f"{'mean':>10}")
    for label, loss in losses().items():
        model = train(loss, x, y)
        with torch.no_grad():
            predicted = model(x_test).argmax(1)
        each = f1_score(y_test.flatten(), predicted.flatten(), average=None)
        print(f"{label:42}" + "".join(f"{value:12.3f}" for value in each) + f"{each.mean():10.3f}")


if __name__ == "__main__":
    main()
