"""A recorded step is the loop's own: on a CPU to the bit, with the numbers that are written into it."""

import gc
import sys
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from evalign import metrics
from evalign.networks.mlp import mlp
from evalign.objective import Objective
from evalign.steps import StepChoice
from evalign.training.batches import Rows, argmax_score
from evalign.training.in_memory import InMemory, Phase, adamw, batch_loss, train
from evalign.training.recipes import Recipe, Stage
from evalign_papers.engine.recorded import RecordedRows, RecordedStep

STAGE = Stage("metric", metric=True, anchor=0.5, learning_rate=0.01, epochs=1, patience=1, weight_decay=0.1)
OBJECTIVE = Objective("mcc", "multiclass", StepChoice("annealed"), anchor=0.5)


def rows() -> Rows:
    generator = torch.Generator().manual_seed(0)
    return Rows.of(torch.randn(40, 4, generator=generator), torch.arange(40) % 3)


def fresh() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.BatchNorm1d(4), mlp(4, 3, (8,), 0.2))


def plain_step(
    network: nn.Module, rows: Rows, stage: Stage, objective: Objective, batch_size: int, *, amp: bool = False
) -> Callable[[Tensor], None]:
    """An update of the training loop for the rows of an index, without a recording."""
    optimiser = adamw(network, stage)
    network.train()

    def step(index: Tensor) -> None:
        loss = batch_loss(network, rows[index], Phase(stage, objective, stage.temperature), amp)
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        optimiser.step()

    return step


def test_a_recorded_step_is_the_plain_one():
    states = []
    for make in (plain_step, RecordedStep):
        network = fresh()
        step = make(network, rows(), STAGE, OBJECTIVE, 10)
        torch.manual_seed(5)
        for index in torch.arange(40).split(10):
            step(index)
        states.append(network.state_dict())
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


def test_temperature_and_learning_rate_are_read_anew():
    network = fresh()
    step = RecordedStep(network, rows(), STAGE, OBJECTIVE, 10)
    step.temperature.fill_(0.05)
    step.learning_rate.zero_()
    before = {name: value.clone() for name, value in network.named_parameters()}
    torch.manual_seed(1)
    step(torch.arange(10))
    assert all(torch.equal(value, before[name]) for name, value in network.named_parameters())
    torch.manual_seed(1)
    expected = batch_loss(network, rows()[torch.arange(10)], Phase(STAGE, OBJECTIVE, 0.05))
    assert float(step.total) == pytest.approx(float(expected.detach()))
    warmer = batch_loss(network, rows()[torch.arange(10)], Phase(STAGE, OBJECTIVE, 0.2))
    assert float(step.total) != pytest.approx(float(warmer.detach()))


def test_a_batch_of_another_size_is_refused():
    with pytest.raises(ValueError, match="takes 10 rows each time, got 9"):
        RecordedStep(fresh(), rows(), STAGE, OBJECTIVE, 10)(torch.arange(9))


def test_the_benchmark_of_images_measures_and_says_what_it_needs(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "benchmarks"))
    import bench_images

    if not torch.cuda.is_available():
        monkeypatch.setattr(sys, "argv", ["bench_images.py"])
        with pytest.raises(SystemExit, match="needs a GPU"):
            bench_images.main()
    some = {name: bench_images.LOSSES[name] for name in ("cross_entropy", "f1 + anchor")}
    monkeypatch.setattr(bench_images, "LOSSES", some)
    found = bench_images.measure(bench_images.pictures(None, "cpu", 4), 2, 2, "cpu", recorded=False)
    assert [row["loss"] for row in found] == list(some)
    assert found[0]["ratio"] == 1.0
    assert all(row["images_per_second"] > 0 for row in found)


@pytest.mark.parametrize("interrupted", [False, True])
def test_a_recorded_training_is_the_plain_one_where_batches_are_even(tmp_path, interrupted):
    """Cosine, cooling, offsets and two stages; killed in between, it ends the same."""
    stages = (
        replace(STAGE, epochs=3, decay="cosine", cool_to=0.05),
        replace(STAGE, name="next", epochs=2, offset=0.5),
    )  # fmt: skip

    def run(network, recorded, on_epoch=None):
        return train(
            network, rows(), rows(), Recipe("r", "", stages), OBJECTIVE, argmax_score(metrics.mcc), batch_size=10,
            source=RecordedRows if recorded else InMemory, checkpoint=tmp_path / "c" if recorded else None,
            on_epoch=on_epoch,
        )  # fmt: skip

    plain, recorded = fresh(), fresh()
    history = run(plain, False)
    if interrupted:

        def kill(epoch):
            if epoch.epoch == 2:
                raise RuntimeError("killed")

        with pytest.raises(RuntimeError, match="killed"):
            run(fresh(), True, kill)
    found = run(recorded, True)
    assert [epoch.loss for epoch in found] == [epoch.loss for epoch in history]
    assert [epoch.train_loss for epoch in found] == pytest.approx([epoch.train_loss for epoch in history])
    states = plain.state_dict(), recorded.state_dict()
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


def test_uneven_rows_are_left_out_in_turn():
    seen = torch.zeros(41)

    class Noting(nn.Linear):
        def forward(self, x):
            if self.training:
                seen[x[:, 0].long()] += 1
            return super().forward(x)

    odd = Rows.of(torch.arange(41.0)[:, None], torch.arange(41) % 3)
    recipe = Recipe("r", "", (replace(STAGE, epochs=20, patience=20, learning_rate=1e-6),))
    train(Noting(1, 3), odd, odd, recipe, OBJECTIVE, argmax_score(metrics.mcc), batch_size=10, source=RecordedRows)
    assert seen.sum() == 20 * 40
    assert seen.min() >= 17


@pytest.mark.parametrize("name", ["check_no_waiting", "check_moved", "check_recorded", "check_resumed"])
def test_what_is_checked_on_a_gpu_holds_here(name, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "benchmarks"))
    import check_images

    checks = {check.__name__: check for check in check_images.CHECKS}
    assert checks[name]("cuda" if torch.cuda.is_available() else "cpu") is None
    assert len(checks) == 4


@pytest.mark.parametrize("collects", [True, False])
def test_garbage_is_collected_before_a_recording_and_not_during_it(collects):
    from evalign.training.loop import _nothing_collected

    class Kept:
        pass

    def cycle():
        kept = Kept()
        kept.itself = kept
        return weakref.ref(kept)

    before = gc.isenabled()
    try:
        (gc.enable if collects else gc.disable)()
        earlier = cycle()
        with _nothing_collected():
            assert earlier() is None
            assert not gc.isenabled()
        assert gc.isenabled() == collects
    finally:
        (gc.enable if before else gc.disable)()
