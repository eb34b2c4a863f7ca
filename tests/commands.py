"""Run the command line, in this process or as a user does, and a table to run it on."""

import io
import os
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from evalign.cli.app import main

FAST = ["--epochs", "2", "--hidden", "4", "--device", "cpu", "--folds", "1", "--model", "network"]


class Said(NamedTuple):
    code: int
    out: str
    err: str


def call(*arguments: object) -> Said:
    """Run a command line in this process."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    with redirect_stdout(out), redirect_stderr(err):
        try:
            main([str(argument) for argument in arguments])
        except SystemExit as stopped:
            code = int(stopped.code or 0)
    return Said(code, out.getvalue(), err.getvalue())


def command(*arguments: object, cwd: Path | None = None) -> Said:
    """Run the real command in a separate process."""
    done = subprocess.run(
        [sys.executable, "-m", "evalign", *map(str, arguments)],
        capture_output=True, text=True, cwd=cwd, timeout=600, check=False, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    return Said(done.returncode, done.stdout, done.stderr)


def assert_refused(said: Said, words: str = "") -> None:
    """One line on stderr with this text, exit code 2, nothing on stdout."""
    assert said.code == 2, said
    assert said.err.startswith("evalign: "), said.err
    assert said.err.count("\n") == 1, said.err
    assert words in said.err
    assert said.out == ""


def animals(n: int = 120, seed: int = 0) -> pd.DataFrame:
    """Two classes, numbers and a category."""
    rng = np.random.default_rng(seed)
    kind = rng.choice(["cat", "dog"], n, p=[0.6, 0.4])
    return pd.DataFrame(
        {
            "weight": (rng.normal(size=n) + 2.0 * (kind == "dog")).round(4),
            "height": rng.normal(size=n).round(4),
            "colour": np.where(rng.random(n) < 0.8, np.where(kind == "cat", "grey", "brown"), "white"),
            "kind": kind,
        }
    )
