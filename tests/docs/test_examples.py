"""The examples run and print the expected results."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # of the libraries, about their own parts
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def number(text, name):
    return float(re.search(rf"{re.escape(name)}\s+([-+.e\d]+)", text)[1])


@pytest.fixture
def shown(capfd):
    """What an example prints when its main part runs, in this process: libraries load once."""

    def run(name):
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capfd.readouterr().out

    return run


def test_lightning(shown):
    text = shown("lightning_digits.py")
    assert number(text, "val_f1") > 0.85
    assert number(text, "temperature") <= 0.2


def test_transformers(shown):
    assert number(shown("transformers_sentences.py"), "\neval_f1") > 0.9


def test_skorch(shown):
    assert number(shown("skorch_digits.py"), "test F1") > 0.85


def test_segmentation_finds_the_specks_that_cross_entropy_misses(shown):
    text = shown("segmentation.py")
    table = {line[:42].strip(): [float(value) for value in line[42:].split()] for line in text.splitlines()[1:]}
    assert {"cross-entropy", "Dice", "Jaccard", "MCC"} <= set(table)
    for label in ("Dice", "Jaccard"):
        assert table[label][2] > table["cross-entropy"][2] + 0.3
        assert table[label][3] > 0.8


def test_accumulation(shown):
    assert number(shown("accumulation.py"), "gradient of the whole batch") < 1e-6


def test_torchrun_gives_the_loss_of_one_process(shown, monkeypatch):
    quiet = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    for name, value in (quiet | alone).items():
        monkeypatch.setenv(name, value)
    one = shown("torchrun_loop.py")
    # A thread of gloo that releases a tensor while the interpreter ends aborts its process, so ranks end by os._exit.
    path = str(EXAMPLES / "torchrun_loop.py")
    program = f"import os, runpy; runpy.run_path({path!r}, run_name='__main__'); os._exit(0)"
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python"]
    environment = {name: value for name, value in os.environ.items() if name not in alone} | quiet
    run = [*launch, sys.executable, "-u", "-c", program]
    two = subprocess.run(run, capture_output=True, text=True, timeout=600, env=environment)
    assert two.returncode == 0, two.stderr
    assert number(two.stdout, "2 ranks: loss") == pytest.approx(number(one, "1 ranks: loss"), abs=1e-4)
