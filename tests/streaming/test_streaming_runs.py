"""Runs on streams: killed and resumed, on two ranks, and from the command line."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path

import pandas as pd
import pytest
import torch
from sklearn.metrics import f1_score
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from evalign import EASTClassifier
from evalign.cli.app import main
from evalign.networks.mlp import Ensemble
from evalign.objective import Objective
from evalign.steps import StepChoice
from evalign.storage import container
from evalign.streaming.fit_stream import Stream, fit_stream, step_loss, validate
from evalign.streaming.source import ParquetRows, Parts
from evalign.streaming.statistics import survey
from evalign.training.batches import Rows
from evalign.training.checkpoint import FORMAT
from evalign.training.in_memory import Phase, at_stage
from evalign.training.recipes import RECIPES
from ranks import on_ranks
from streams import people, write

FEATURES = ["age", "income", "job", "owner", "rooms", "always"]
OBJECTIVE = Objective("f1", "multiclass", StepChoice("annealed"))
pytestmark = pytest.mark.slow

KILLED = """
import os, signal, sys, threading, time
sys.path[:0] = {tests!r}
from test_streaming_runs import fitted

def kill():  # from inside: a parent on a busy machine may look too late
    while not os.path.exists({checkpoint!r}):
        time.sleep(0.002)
    os.kill(os.getpid(), signal.SIGKILL)

threading.Thread(target=kill, daemon=True).start()
fitted({folder!r}, {checkpoint!r})
"""


def fitted(folder, checkpoint=None):
    stream = Stream.open(ParquetRows(Path(folder), "sick"), seed=0)
    model = EASTClassifier("f1", hidden=(64, 64), epochs=24, random_state=0, device="cpu")
    return fit_stream(model, stream, checkpoint=None if checkpoint is None else Path(checkpoint))


def test_a_killed_run_goes_on_from_its_last_epoch_and_ends_as_if_nothing_had_happened(tmp_path):
    folder, checkpoint = write(tmp_path / "data", people(4000), row_group=500), tmp_path / "checkpoint.safetensors"
    whole = fitted(folder)
    tests = [str(folder) for folder in Path(__file__).parents[:2]]
    code = KILLED.format(tests=tests, folder=str(folder), checkpoint=str(checkpoint))
    process = subprocess.run([sys.executable, "-c", code], env=os.environ | {"OMP_NUM_THREADS": "1"}, timeout=600)
    assert process.returncode == -signal.SIGKILL
    left = container.read(checkpoint, FORMAT)[1]["history"]
    assert 1 <= len(left) < len(whole.history_)
    resumed = fitted(folder, checkpoint)
    # Epochs before the kill were not run again: their clock stands where it stood.
    assert [row["seconds"] for row in resumed.history_[: len(left)]] == [row["seconds"] for row in left]
    without_clock = [[{**row, "seconds": 0} for row in model.history_] for model in (whole, resumed)]
    assert without_clock[0] == without_clock[1]
    for name, value in whole.network_.state_dict().items():
        assert torch.equal(value, resumed.network_.state_dict()[name])
    assert resumed.decision_.to_json() == whole.decision_.to_json()


def test_a_checkpoint_of_another_run_is_refused(tmp_path):
    checkpoint = tmp_path / "checkpoint.safetensors"
    fitted(write(tmp_path / "one", people(600)), checkpoint)
    with pytest.raises(ValueError, match=r"belongs to a run with rows \[600, .*remove the file to start over"):
        fitted(write(tmp_path / "two", people(610)), checkpoint)


def rows_of(n):
    generator = torch.Generator().manual_seed(0)
    y = (torch.rand(n, generator=generator) < 0.2).long()
    return Rows.of(torch.randn(n, 4, generator=generator).double() + y[:, None], y)


def network(members=1):
    torch.manual_seed(0)
    if members > 1:
        return Ensemble(4, 2, (8,), dropout=0.0, members=members).double()
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()


def shares(rank, ranks):
    """Unequal ones, the last rank without validation rows."""
    return torch.arange(101).tensor_split([30])[rank], torch.arange(101 if rank == 0 else 0)


def gradients(rank, ranks):
    found = []
    for stage, members in product(RECIPES["anchored"].stages, (1, 3)):
        own, held_out = shares(rank, ranks)
        model, objective = network(members), at_stage(OBJECTIVE, stage)
        parallel = DistributedDataParallel(model)  # kept, since it averages only while it lives
        step_loss(parallel, rows_of(101)[own], Phase(stage, objective, 0.2)).backward()
        values, matrix = validate(model, rows_of(101)[held_out], Phase(stage, objective, 0.2))
        found.append(([p.grad for p in model.parameters()], values, matrix))
    return found


def test_two_ranks_have_the_gradient_and_the_validation_of_one_process(tmp_path):
    results = on_ranks(gradients, 2, tmp_path)
    for i, (stage, members) in enumerate(product(RECIPES["anchored"].stages, (1, 3))):
        model, objective = network(members), at_stage(OBJECTIVE, stage)
        step_loss(model, rows_of(101), Phase(stage, objective, 0.2)).backward()
        values, matrix = validate(model, rows_of(101), Phase(stage, objective, 0.2))
        for found in results:
            for one, parameter in zip(found[i][0], model.parameters(), strict=True):
                torch.testing.assert_close(one, parameter.grad, rtol=1e-6, atol=1e-9)
            assert found[i][1] == pytest.approx(values, abs=1e-9)
            assert torch.equal(found[i][2], matrix)


def test_validation_is_that_of_training_in_memory():
    from evalign import metrics
    from evalign.training import in_memory
    from evalign.training.batches import argmax_score

    for stage in RECIPES["anchored"].stages:
        objective = replace(at_stage(OBJECTIVE, stage), average="binary")
        score = argmax_score(metrics.resolve("f1", average="binary", beta=None))
        phase = Phase(stage, objective, 0.15)
        wanted = in_memory.validate(network(), rows_of(101), phase, score)
        assert validate(network(), rows_of(101), phase)[0] == pytest.approx(wanted, abs=1e-9)


def surveyed(rank, ranks, folder):
    source, parts = ParquetRows(folder, "sick"), Parts(0.2, 0.1, seed=0)
    found = survey(source, source.share(rank, ranks), parts)
    return found.statistics.encoder("both").to_json(), dict(found.labels), sum(map(len, found.valid))


def test_two_ranks_survey_the_whole_data_set(tmp_path):
    folder = write(tmp_path / "data", people(1000))
    (first, labels, one), (second, _, two) = on_ranks(surveyed, 2, tmp_path, folder)
    alone = surveyed(0, 1, folder)
    assert first == second
    assert labels == alone[1]
    assert one + two == alone[2]
    assert min(one, two) > 0
    for found, wanted in zip(first["columns"], alone[0]["columns"], strict=True):
        assert found.keys() == wanted.keys()
        assert all(found[k] == (pytest.approx(v) if isinstance(v, float) else v) for k, v in wanted.items())


def call(*arguments):
    with pytest.raises(SystemExit) as stopped:
        main([str(argument) for argument in arguments])
    return int(stopped.value.code or 0)


def test_torchrun_fits_a_model_that_predict_uses(tmp_path, capsys):
    folder, out = write(tmp_path / "data", people(2000), row_group=500), tmp_path / "run"
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "evalign"]
    options = ["--model", "network", "--hidden", "32", "--epochs", "24", "--device", "cpu"]
    fit = ["fit", folder, "--target", "sick", "--out", out, *options]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run([*run, *map(str, fit)], capture_output=True, text=True, timeout=600, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Report:") == 1  # of the first rank alone
    result = json.loads((out / "result.json").read_text())
    assert result["split"]["ranks"] == 2
    assert result["data"]["rows"] == 2000
    people(500, seed=1).to_parquet(tmp_path / "new.parquet")
    assert call("predict", out, tmp_path / "new.parquet", "--target", "sick", "--out", tmp_path / "p.csv") == 0
    said = pd.read_csv(tmp_path / "p.csv")["prediction"]
    assert f1_score(people(500, seed=1)["sick"], said, pos_label="yes") > 0.5


def test_fit_streams_a_folder(tmp_path, capsys):
    folder, out = write(tmp_path / "data", people(2000)), tmp_path / "run"
    assert call("fit", folder, "--target", "sick", "--out", out, "--hidden", "16", "--epochs", "4", "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert {row["contender"] for row in result["table"]} == {"ours", "cross_entropy", "majority"}
    assert (result["settings"]["model"], result["model"]["kind"]) == ("network", "network")  # not the usual blend
    assert any(note.startswith("a network is trained, because") for note in result["notes"])
    assert sum(result["data"]["classes"].values()) == 2000
    assert 350 < result["split"]["test_rows"] < 450
    assert sorted(path.name for path in out.iterdir()) == ["model.safetensors", "report.html", "result.json"]
    model = EASTClassifier.load(out / "model.safetensors")
    assert model.feature_names_in_.tolist() == FEATURES
    # The profile of the training rows, and which columns matter.
    missing = int(result["profile"]["missing values"].split()[0])
    share = people(2000)[FEATURES].isna().to_numpy().sum() / 2000
    assert missing == pytest.approx(share * int(result["profile"]["rows"].split(",")[0]), rel=0.2)
    assert result["profile"]["constant columns"] == "'always'"
    assert {row["column"] for row in result["importance"]} == set(FEATURES)
    report = (out / "report.html").read_text()
    assert "Which columns matter" in report
    assert "the training rows" in report


def test_a_constraint_that_a_stream_cannot_meet_exits_with_3(tmp_path):
    folder, out = write(tmp_path / "data", people(500)), tmp_path / "run"
    limits = ["--subject-to", "precision>=0.9999", "--subject-to", "recall>=0.9999"]
    assert call("fit", folder, "--target", "sick", "--out", out, "--hidden", "4", "--epochs", "2", "-q", *limits) == 3
    notes = json.loads((out / "result.json").read_text())["notes"]
    assert any("nearest feasible" in note for note in notes)
    assert sorted(path.name for path in out.iterdir()) == ["model.safetensors", "report.html", "result.json"]


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (lambda folder: write(folder, people(50)), ["--model", "boost"], "requires --model network"),
        (lambda folder: write(folder, people(50)), ["--model", "blend"], "requires --model network"),
        (lambda folder: write(folder, people(50)), ["--test-size", "1"], "--test-size must lie between 0 and 1"),
        (lambda folder: folder.mkdir(), [], "is a folder that holds no Parquet file"),
        (lambda folder: folder.write_text("a,b"), ["--stream"], "must end in .csv"),
    ],
)
def test_what_cannot_be_streamed_is_told_in_one_line(tmp_path, capsys, make, options, message):
    make(tmp_path / "data")
    assert call("fit", tmp_path / "data", "--target", "sick", "--out", tmp_path / "run", *options) == 2
    said = capsys.readouterr().err
    assert message in said
    assert len(said.splitlines()) == 1
