"""The Lightning callback in real trainers: what it logs, how it cools, and that a checkpoint resumes it."""

from functools import partial

import lightning.pytorch as pl
import pytest
import torch
from sklearn.metrics import f1_score
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from evalign import MetricLoss
from evalign.annealing import Geometric
from evalign.integrations.lightning import MetricCallback, step_in_parts
from schedules import Linear

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")


class Module(pl.LightningModule):
    def __init__(self, memory=None, validates=True):
        super().__init__()
        torch.manual_seed(0)
        self.network = nn.Linear(4, 3)
        self.loss = MetricLoss("f1", anchor=0.5, memory=memory)
        self.validates = validates

    def forward(self, x):
        return self.network(x)

    def training_step(self, batch, index):
        x, y = batch
        return self.loss(self(x), y)

    def validation_step(self, batch, index):
        x, y = batch
        if self.validates:
            self.loss(self(x), y)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.05)


def rows(n=70, seed=0):
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(5, (n,), generator=generator).clamp(max=2)
    return torch.randn(n, 4, generator=generator) + torch.nn.functional.one_hot(y, 4), y


def loader(seed, batch=16):
    return DataLoader(TensorDataset(*rows(seed=seed)), batch_size=batch)


def trainer(folder, callback, epochs=3, **options):
    return pl.Trainer(
        max_epochs=epochs, callbacks=[callback], accelerator="cpu", devices=1, logger=False, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False, default_root_dir=folder, **options,
    )  # fmt: skip


def test_it_logs_the_metric_of_the_whole_epoch(tmp_path):
    module, callback = Module(), MetricCallback(None)
    run = trainer(tmp_path, callback)
    run.fit(module, loader(0), loader(1))
    x, y = rows(seed=1)
    logged = {name: value.item() for name, value in run.callback_metrics.items()}
    with torch.no_grad():
        z = module.eval()(x)
        assert logged["val_f1"] == pytest.approx(f1_score(y, z.argmax(1), average="macro"), abs=1e-6)
        assert logged["val_loss"] == pytest.approx(module.loss(z, y).item(), abs=1e-6)
        assert logged["val_soft_f1"] == pytest.approx(1 - MetricLoss("f1")(z, y).item(), abs=1e-6)
    assert logged["temperature"] == pytest.approx(0.2)


def test_the_schedule_cools_and_stops_training(tmp_path):
    module, callback = Module(), MetricCallback(partial(Linear, steps=2, start=0.2, end=0.1))
    run = trainer(tmp_path, callback, epochs=10)
    run.fit(module, loader(0), loader(1))
    assert module.loss.temperature == pytest.approx(0.1)
    assert run.current_epoch == 2


def test_a_checkpoint_resumes_schedule_temperature_and_memory(tmp_path):
    make = partial(Geometric, patience=1, rate=0.9)

    def fit(module, epochs, start=None):
        callback = MetricCallback(make)
        run = trainer(tmp_path, callback, epochs=epochs)
        run.fit(module, loader(0), loader(1), ckpt_path=start, weights_only=True if start else None)
        return run, callback

    straight = Module("auto")
    _, expected = fit(straight, 6)
    half = Module("auto")
    fit(half, 3)[0].save_checkpoint(tmp_path / "half.ckpt")
    resumed = Module("auto")
    _, callback = fit(resumed, 6, tmp_path / "half.ckpt")
    assert callback.state_dict() == expected.state_dict()
    torch.testing.assert_close(resumed.state_dict(), straight.state_dict(), rtol=0, atol=0)
    assert resumed.loss.memory.state[-1] > 0


class InParts(Module):
    automatic_optimization = False

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, index):
        return step_in_parts(self, self.loss, batch, parts=4)


def test_a_step_in_parts_is_the_step_of_the_whole_batch(tmp_path):
    whole, parts = Module().double(), InParts().double()
    x, y = rows()
    data = DataLoader(TensorDataset(x.double(), y), batch_size=35)
    for module in (whole, parts):
        trainer(tmp_path, MetricCallback(None)).fit(module, data, data)
    torch.testing.assert_close(parts.state_dict(), whole.state_dict())
    with pytest.raises(RuntimeError, match="automatic_optimization = False"):
        step_in_parts(whole, whole.loss, (x, y), 2)


def test_what_is_missing_is_told(tmp_path):
    with pytest.raises(TypeError, match=r"a MetricLoss as self.criterion, got NoneType"):
        trainer(tmp_path, MetricCallback(attribute="criterion")).fit(Module(), loader(0), loader(1))
    with pytest.raises(RuntimeError, match=r"no validation batch reached self.loss"):
        trainer(tmp_path, MetricCallback(None)).fit(Module(validates=False), loader(0), loader(1))
