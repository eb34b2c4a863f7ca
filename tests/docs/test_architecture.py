"""The rules of docs/architecture.md that import-linter does not check: names, sizes, private members."""

import ast
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PRODUCT = ROOT / "src" / "evalign"
MODULES = sorted([*PRODUCT.rglob("*.py"), *(ROOT / "papers" / "src").rglob("*.py")])
FOLDERS = sorted({path.parent for path in MODULES})
PUBLIC = {"_replace", "_asdict", "_fields", "_make"}  # of a NamedTuple
# Private parts of torch belong in kernels/private_apis.py, behind its switch; these have no public counterpart.
TORCH = {
    "checks.py": {"torch._C._functorch", "forward_ad._current_level"},  # whether a transformation is at work
    "memory.py": {"torch._C._current_graph_task_id"},  # whether a backward pass recomputes a batch
    "distributed.py": {"item._join_config"},  # whether DDP.join() is active
}


def is_private(name):
    return name.startswith("_") and not name.startswith("__") and name not in PUBLIC


def imported_private(tree):
    """Private names that a module imports from another module of ours; private modules such as `checks` are shared."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in ("evalign", "evalign_papers"):
            for alias in node.names:
                module = ROOT / "src" / Path(*node.module.split("."), alias.name)
                if is_private(alias.name) and not module.with_suffix(".py").exists():
                    yield f"{node.module}.{alias.name}"


def defined_names(tree):
    """What a module defines or stores as an attribute."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


def read_private(tree):
    """Private attributes that a module reads from anything but `self`, as (owner, name)."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            owner = ast.unparse(node.value)
            if owner not in ("self", "cls", "super()"):
                yield owner, node.attr


def test_private_names_are_found():
    code = ast.parse("from evalign.metrics import _mean, f1\nfrom evalign import checks\nx._y, self._z, t._replace()")
    assert list(imported_private(code)) == ["evalign.metrics._mean"]
    assert list(read_private(code)) == [("x", "_y")]


@pytest.mark.parametrize("package", FOLDERS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_package_reads_no_private_member_of_another(package):
    trees = {path.name: ast.parse(path.read_text()) for path in MODULES if path.parent == package}
    own = {name for tree in trees.values() for name in defined_names(tree)}
    for file, tree in trees.items():
        assert list(imported_private(tree)) == [], file
        foreign = {f"{owner}.{name}" for owner, name in read_private(tree) if name not in own}
        if file != "private_apis.py":
            # `torch._C` is the owner of what is read there.
            assert foreign - {"torch._C"} == (TORCH.get(file, set()) if package == PRODUCT else set()), file


def test_every_module_name_occurs_once():
    names = Counter(path.stem for path in MODULES if path.parent.name not in ("cli", "commands"))
    assert {name for name, times in names.items() if times > 1} <= {"__init__", "__main__"}


def test_every_class_name_occurs_once():
    """But for the same class for two frameworks, such as `MetricObjective` of LightGBM and XGBoost."""
    names = Counter()
    for path in PRODUCT.rglob("*.py"):
        names.update(node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef))
    assert {name for name, times in names.items() if times > 1} == {"MetricObjective", "MetricCallback"}


@pytest.mark.parametrize("package", FOLDERS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_folder_has_at_most_fourteen_entries_and_the_root_sixteen_modules(package):
    modules = [path for path in package.glob("*.py") if path.name not in ("__init__.py", "__main__.py")]
    if package == PRODUCT:
        assert len(modules) <= 16
    else:
        entries = [path for path in package.iterdir() if path.name != "__pycache__"]
        assert len(entries) <= 14


def test_a_module_has_at_most_450_lines():
    lines = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in MODULES}
    assert {path: count for path, count in lines.items() if count > 450} == {}


@pytest.mark.slow
@pytest.mark.parametrize(("use", "most"), [("loss", 8), ("fit", 25), ("command", 60)])
def test_one_use_enters_few_files(use, most):
    command = [sys.executable, str(ROOT / "tools" / "count_files.py"), use]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (ROOT / "src", ROOT / "papers" / "src")))}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    count = next(line for line in reversed(done.stdout.splitlines()) if line.isdigit())
    assert int(count) <= most
