"""Both distributions, built as wheels and installed without access to the source trees."""

import re
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Python of an environment that holds the two wheels, with dependencies from the environment of the tests."""
    folder = tmp_path_factory.mktemp("wheels")
    build = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--wheel-dir",
        folder,
    ]
    subprocess.run([*build, ROOT, ROOT / "papers"], check=True)
    wheels = sorted(folder.glob("*.whl"))
    assert [re.sub("-.*", "", wheel.name) for wheel in wheels] == ["evalign", "evalign_papers"]
    place = folder / "environment"
    venv.create(place, with_pip=True)
    python = place / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-deps", *wheels], check=True)
    # Dependencies only: a path that a .pth file names is not searched for .pth files in turn, so that an editable
    # installation of evalign there stays out of sight.
    site = next((place / "lib").glob("python*/site-packages"))
    (site / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return python


def run(python, *arguments, folder):
    return subprocess.run(
        [python, *arguments], cwd=folder, capture_output=True, text=True, check=False, env={"PATH": "/usr/bin:/bin"}
    )


def test_the_wheels_are_what_is_imported(installed, tmp_path):
    code = "import evalign, evalign_papers; print(evalign.__file__, evalign_papers.__file__)"
    shown = run(installed, "-c", code, folder=tmp_path)
    assert shown.returncode == 0, shown.stderr
    assert all(str(installed.parents[1]) in path for path in shown.stdout.split())


def test_examples_of_the_readme_run_from_the_wheel(installed, tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert blocks
    for block in blocks:
        shown = run(installed, "-c", block, folder=tmp_path)
        assert shown.returncode == 0, shown.stderr


@pytest.mark.parametrize("command", [["--help"], ["datasets"], ["reproduce", "--list"], ["reproduce", "btg-s8"]])
def test_commands_run_from_the_wheel(installed, tmp_path, command):
    shown = run(installed, "-m", "evalign", *command, folder=tmp_path)
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.strip()


def test_without_the_papers_their_commands_say_what_to_install(installed, tmp_path):
    code = (
        "import importlib.metadata as m; m.entry_points = lambda **_: ();"
        "from evalign.cli.app import main; main(['reproduce', 'btg-1'])"
    )
    shown = run(installed, "-c", code, folder=tmp_path)
    assert shown.returncode == 2
    assert "pip install evalign-papers" in shown.stderr
    assert len(shown.stderr.strip().splitlines()) == 1
