"""A run that was interrupted and resumed ends with the same bits as an uninterrupted one."""

import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from torch import nn

from evalign import metrics
from evalign.networks.mlp import mlp
from evalign.objective import Objective
from evalign.steps import StepChoice
from evalign.training.batches import Rows, argmax_score
from evalign.training.in_memory import train
from evalign.training.recipes import Recipe, Stage
from evalign_papers.networks import Pictures

OBJECTIVE = Objective("balanced_accuracy", "multiclass", StepChoice("annealed"))
SCORE = argmax_score(metrics.balanced_accuracy)
CE = Stage("ce", metric=False, anchor=1.0, learning_rate=0.02, epochs=3, patience=3, monitor="entropy", decay="cosine")
METRIC = Stage(
    "metric", metric=True, anchor=1.0, learning_rate=0.1, epochs=7, patience=1, rate=0.5, max_stale=9, monitor="score",
    offset=1.0,
)  # fmt: skip
RECIPE = Recipe("short", "", (CE, METRIC, replace(METRIC, name="again", monitor="last", rate=None, epochs=2)))
EPOCHS = 12


class Killed(Exception):
    pass


def small_pictures(n: int, seed: int) -> Rows:
    generator = torch.Generator().manual_seed(seed)
    y = (torch.arange(n) % 7 % 3).long()  # three classes of uneven size
    x = torch.randint(0, 156, (n, 8, 8, 3), generator=generator) + 15 * y[:, None, None, None]
    return Rows.of(x.to(torch.uint8), y)


def network() -> nn.Module:
    """Random numbers in training (shifts, dropout) and state beside the weights (batch norm)."""
    torch.manual_seed(0)
    layers = nn.Sequential(
        Pictures((0.5,) * 3, (0.2,) * 3, border=2), nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(),
        mlp(144, 3, (8,), 0.3),
    )  # fmt: skip
    return layers.to(memory_format=torch.channels_last)


def run(path: Path | None, on_epoch=None, **options):
    own = network()
    arguments = {"batch_size": 16, "seed": 3, "checkpoint": path, "on_epoch": on_epoch, **options}
    history = train(own, small_pictures(42, 0), small_pictures(28, 1), RECIPE, OBJECTIVE, SCORE, **arguments)
    return own, [{**asdict(epoch), "seconds": 0.0} for epoch in history]


@pytest.fixture(scope="module")
def uninterrupted():
    own, history = run(None)
    assert len(history) == EPOCHS
    assert len({epoch["temperature"] for epoch in history}) > 1  # it cooled
    assert not all(epoch["best"] for epoch in history)
    return own.state_dict(), history


def assert_same(found, uninterrupted) -> None:
    own, history = found
    state, expected = uninterrupted
    assert history == expected
    assert all(torch.equal(value, state[name]) for name, value in own.state_dict().items())


def killed_at(path: Path, when: int, **options) -> None:
    def kill(epoch) -> None:
        if epoch.epoch == when:
            raise Killed

    with pytest.raises(Killed):
        run(path, kill, **options)


def test_a_checkpoint_changes_nothing(tmp_path, uninterrupted):
    assert_same(run(tmp_path / "c"), uninterrupted)


@pytest.mark.parametrize("when", range(1, EPOCHS + 1))
def test_killed_after_any_epoch_it_ends_the_same(tmp_path, uninterrupted, when):
    killed_at(tmp_path / "c", when)
    assert_same(run(tmp_path / "c"), uninterrupted)


def test_killed_again_and_again_within_epochs_it_ends_the_same(tmp_path, uninterrupted):
    """Killed in the middle of a batch, with every third epoch saved: lost epochs are repeated."""
    steps, interrupted = 0, 0
    while True:
        original = nn.Conv2d.forward

        def forward(self, x, original=original):
            nonlocal steps
            steps += 1
            if steps % 23 == 0:
                raise Killed
            return original(self, x)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(nn.Conv2d, "forward", forward)
            try:
                found = run(tmp_path / "c", checkpoint_every=3)
            except Killed:
                interrupted += 1
                assert interrupted < 20
                continue
        break
    assert interrupted >= 2
    assert_same(found, uninterrupted)


def test_a_finished_training_is_read_and_not_run(tmp_path, uninterrupted):
    run(tmp_path / "c")
    assert_same(run(tmp_path / "c", lambda epoch: pytest.fail("an epoch was run")), uninterrupted)


def test_a_checkpoint_of_another_training_is_refused(tmp_path):
    killed_at(tmp_path / "c", 2)
    with pytest.raises(ValueError, match="to a run with seed 3, this one has 4"):
        run(tmp_path / "c", seed=4)
    with pytest.raises(ValueError, match="batch_size"):
        run(tmp_path / "c", batch_size=8)


def test_a_damaged_checkpoint_is_told(tmp_path):
    killed_at(tmp_path / "c", 2)
    content = (tmp_path / "c").read_bytes()
    (tmp_path / "c").write_bytes(content[:-100])
    with pytest.raises(ValueError, match="remove it to start over"):
        run(tmp_path / "c")
    (tmp_path / "c").write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(ValueError, match="checksum"):
        run(tmp_path / "c")


def test_half_a_checkpoint_is_never_there(tmp_path, monkeypatch, uninterrupted):
    """Killed while the file is written: the previous one is still complete."""
    killed_at(tmp_path / "c", 4)
    before = (tmp_path / "c").read_bytes()

    def fail(*_args):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr("os.replace", fail)
        with pytest.raises(Killed):
            run(tmp_path / "c")
    assert (tmp_path / "c").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["c"]
    assert_same(run(tmp_path / "c"), uninterrupted)


def test_without_safetensors_training_runs_and_a_checkpoint_says_what_it_needs(tmp_path, monkeypatch, uninterrupted):
    monkeypatch.setitem(sys.modules, "evalign.storage.container", None)
    monkeypatch.delattr("evalign.storage.container", raising=False)
    assert_same(run(None), uninterrupted)
    with pytest.raises(ValueError, match="checkpoints need safetensors"):
        run(tmp_path / "c")
