"""What the README shows runs, and the promises of the package hold."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.split("\n")[0])
def test_python_of_the_readme_runs(block, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    exec(compile(block, "README.md", "exec"), names)
    assert names.keys() & {"loss", "model"}


def test_the_loss_alone_imports_neither_pandas_nor_scikit_learn():
    code = (
        "import sys, torch; from evalign import MetricLoss, annealing;"
        "MetricLoss('f1')(torch.zeros(4, 3), torch.tensor([0, 1, 2, 0]));"
        "print(sorted({'pandas', 'sklearn', 'matplotlib', 'rich', 'typer', 'pyarrow'} & set(sys.modules)))"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"


def test_the_plain_loop_example_runs():
    shown = subprocess.run(
        [sys.executable, ROOT / "examples" / "plain_loop.py"], capture_output=True, text=True, check=True
    )
    scores = [float(line.split()[-1]) for line in shown.stdout.strip().splitlines()]
    assert len(scores) == 2
    assert min(scores) > 0.8
