"""What the README shows runs, and the promises of the package hold."""

import inspect
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
import typer
from sklearn.utils import estimator_checks

import evalign
from commands import animals, command
from evalign.cli.app import app
from evalign.estimators.planning import PRESETS

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
SHELL = [
    shlex.split(line, comments=True)
    for block in re.findall(r"```sh\n(.*?)```", README, re.DOTALL)
    for line in block.splitlines()
]
PROSE = re.sub(r"```.*?```", "", README, flags=re.DOTALL)
INLINE = list(dict.fromkeys(re.findall(r"`([^`]+)`", PROSE)))
COMMANDS = typer.main.get_command(app).commands
ESTIMATORS = (evalign.EASTBlend, evalign.MetricDecision, evalign.EASTClassifier)


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.split("\n")[0])
def test_python_of_the_readme_runs(block, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    exec(compile(block, "README.md", "exec"), names)
    assert names.keys() & {"loss", "model"}


def check_words(words):
    """Raise unless the names and options of a shell command exist."""
    if words[0] == "make":
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
    elif words[0] == "source":
        assert words[1] == ".venv/bin/activate"  # .venv is the Makefile's
    elif words[0] == "python":
        assert (ROOT / words[1]).is_file()
    elif words[:2] == ["pip", "install"]:
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        name, extra = re.fullmatch(r"(\w+)(?:\[(\w+)\])?", words[2]).groups()
        assert name == project["name"]
        assert extra is None or extra in project["optional-dependencies"]
    else:
        assert words[0] == "evalign"
        known = {option for parameter in COMMANDS[words[1]].params for option in parameter.opts}
        assert {word for word in words if word.startswith("-")} <= known


@pytest.mark.parametrize("words", SHELL, ids=shlex.join)
def test_shell_lines_name_what_exists(words):
    check_words(words)


@pytest.mark.slow
def test_shell_lines_run_one_after_the_other(tmp_path):
    table = animals(400, 0).rename(columns={"kind": "diagnosis"})
    table.to_csv(tmp_path / "patients.csv", index=False)
    table.drop(columns="diagnosis").to_csv(tmp_path / "new.csv", index=False)
    lines = [words[1:] for words in SHELL if words[0] == "evalign"]
    assert len(lines) >= 3
    for words in lines:
        done = command(*words, cwd=tmp_path)
        assert done.code == 0, (words, done.err)
    assert (tmp_path / "predictions.csv").is_file()
    assert (tmp_path / "evalign-compare" / "report.html").is_file()


@pytest.mark.parametrize("code", INLINE)
def test_inline_code_names_what_exists(code):
    if code.startswith("MetricLoss("):
        loss = eval(code, {"MetricLoss": evalign.MetricLoss})
        shape = (6,) if "binary" in code else (6, 3, 2, 2) if "jaccard" in code else (6, 3)
        target = torch.arange(6 * (4 if len(shape) == 4 else 1)) % (2 if len(shape) == 1 else 3)
        value = loss(torch.zeros(shape), target.reshape(6, *shape[2:]))
        assert 0 <= float(value) <= 1
    elif assigned := re.fullmatch(r"(\w+)=.*", code):
        assert all(assigned[1] in inspect.signature(estimator).parameters for estimator in ESTIMATORS)
    elif " " in code and not code.startswith("("):
        check_words(shlex.split(code))
    elif not re.fullmatch(r"\(N,.*\)", code):  # a shape
        known = {
            *evalign.__all__,
            *COMMANDS,
            *PRESETS,
            *dir(estimator_checks),
            *dir(evalign.EASTBlend),
            ".venv",
            "evalign",
        }
        assert code in known or shutil.which(code)


def test_the_loss_alone_imports_neither_pandas_nor_scikit_learn():
    code = (
        "import sys, torch; from evalign import MetricLoss, annealing;"
        "MetricLoss('f1')(torch.zeros(4, 3), torch.tensor([0, 1, 2, 0]));"
        "print(sorted({'pandas', 'sklearn', 'matplotlib', 'rich', 'typer', 'pyarrow'} & set(sys.modules)))"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"


def without(package, *words):
    """Run a Python command line without a package."""
    hide = f"import sys, runpy; sys.modules[{package!r}] = None; sys.argv[:] = {list(words)}; "
    run = "runpy.run_module('evalign', run_name='__main__')" if words[0] == "evalign" else words[0]
    return subprocess.run([sys.executable, "-c", hide + run], capture_output=True, text=True, check=False)


def test_what_to_install_is_said(tmp_path):
    shown = without("typer", "evalign", "--version")
    wanted = "which is not installed; pip install 'evalign"
    assert (shown.returncode, shown.stderr) == (2, f"evalign: the command line needs typer, {wanted}[cli]'\n")
    animals(40, 0).to_csv(tmp_path / "a.csv", index=False)
    shown = without("pandas", "evalign", "fit", str(tmp_path / "a.csv"), "-t", "kind", "-o", str(tmp_path / "run"))
    assert (shown.returncode, shown.stderr) == (2, f"evalign: this needs pandas, {wanted}[cli]'\n")
    shown = without("pandas", "import evalign; evalign.EASTBlend")
    assert shown.stderr.endswith(f"ModuleNotFoundError: evalign.EASTBlend needs pandas, {wanted}[tables]'\n")


@pytest.mark.slow
def test_the_plain_loop_example_runs():
    shown = subprocess.run(
        [sys.executable, ROOT / "examples" / "plain_loop.py"], capture_output=True, text=True, check=True
    )
    scores = [float(line.split()[-1]) for line in shown.stdout.strip().splitlines()]
    assert len(scores) == 2
    assert min(scores) > 0.8
