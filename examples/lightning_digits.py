"""Lightning: train on digits for macro F1, anneal the temperature, and log the metric of every validation epoch.

python examples/lightning_digits.py
"""

from functools import partial

import lightning.pytorch as pl
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from evalign import MetricLoss
from evalign.annealing import Geometric
from evalign.integrations.lightning import MetricCallback


class Digits(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        self.loss = MetricLoss("f1", anchor=1.0, memory="auto")

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        x, y = batch
        return self.loss(self.network(x), y)  # type: ignore[no-any-return]

    def validation_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        x, y = batch
        self.loss(self.network(x), y)  # the callback sees the call and sums its counts

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def main() -> None:
    pl.seed_everything(0, verbose=False)
    X, y = load_digits(return_X_y=True)
    rows = TensorDataset(torch.tensor(X / 16).float(), torch.tensor(y))
    train, valid = random_split(rows, [0.8, 0.2])
    callback = MetricCallback(partial(Geometric, patience=2))
    trainer = pl.Trainer(
        max_epochs=8, callbacks=[callback], accelerator="cpu", logger=False, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False,
    )  # fmt: skip
    trainer.fit(Digits(), DataLoader(train, batch_size=32, shuffle=True), DataLoader(valid, batch_size=256))
    for name, value in sorted(trainer.callback_metrics.items()):
        print(f"{name:12} {float(value):.3f}")


if __name__ == "__main__":
    main()
