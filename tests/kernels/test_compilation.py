"""When compiled loops are used: a loss never waits for the compiler unless requested."""

import os
import subprocess
import sys
import time

import pytest
import torch

from evalign import MetricLoss
from evalign.kernels.cpu import compilation

needs_numba = pytest.mark.skipif(not compilation.available(), reason="needs numba")
SCRIPT = """
import sys, time, torch
from evalign import MetricLoss
from evalign.kernels.cpu import compilation
loss, z, y = MetricLoss("f1"), torch.eye(6)[:, :3].requires_grad_(), torch.tensor([0, 1, 2, 0, 1, 2])
first = loss(z, y)
print(compilation._state, type(first.grad_fn).__name__, "numba.core" in sys.modules)
end = time.monotonic() + 500
while not compilation.ready() and time.monotonic() < end:
    time.sleep(0.2)
again = loss(z, y)
print(compilation._state, type(again.grad_fn).__name__, abs(float(again - first)) < 1e-6)
"""

EXIT = """
import time
from evalign.kernels.cpu import compilation
compilation.is_cached, compilation.cache_folder = (lambda: False), (lambda: None)

def slow():
    time.sleep(0.5)
    print("ended", flush=True)

compilation._run_all_loops = slow
compilation.ready()
"""


@pytest.fixture
def chosen(monkeypatch):
    def choose(mode, cached=False):
        started = []
        monkeypatch.setenv("EVALIGN_COMPILE", mode)
        monkeypatch.setattr(compilation, "_state", None)
        monkeypatch.setattr(compilation, "is_cached", lambda: cached)
        monkeypatch.setattr(compilation, "_compile_in_background", lambda: started.append(1))
        return started

    return choose


@needs_numba
@pytest.mark.parametrize(
    ("mode", "cached", "is_ready", "starts"),
    [("wait", False, True, 0), ("background", True, True, 0), ("background", False, False, 1), ("off", True, False, 0)],
)
def test_the_mode_decides(chosen, mode, cached, is_ready, starts):
    started = chosen(mode, cached)
    for _ in range(3):
        assert compilation.ready() == is_ready
    end = time.monotonic() + 60
    while len(started) < starts and time.monotonic() < end:
        time.sleep(0.01)
    assert len(started) == starts


def test_an_unknown_mode_is_refused(chosen):
    chosen("later")
    with pytest.raises(ValueError, match="EVALIGN_COMPILE must be one of"):
        compilation.ready()


def test_without_compiled_loops_the_loss_is_the_same(chosen):
    z, y = torch.randn(20, 5, generator=torch.Generator().manual_seed(0)), torch.arange(20) % 5
    found = {}
    for mode in ("off", "wait"):
        chosen(mode)
        x = z.clone().requires_grad_()
        value = MetricLoss("f1", anchor=0.5)(x, y)
        value.backward()
        found[mode] = value.detach(), x.grad
    torch.testing.assert_close(found["off"], found["wait"], rtol=1e-5, atol=1e-7)


@needs_numba
def test_a_short_script_waits_for_a_thread_that_loads_the_loops():
    # Cut off inside LLVM, such a thread aborts the process: "terminate called without an active exception".
    variables = {**os.environ, "EVALIGN_COMPILE": "background"}
    run = subprocess.run([sys.executable, "-c", EXIT], env=variables, capture_output=True, text=True, timeout=300)
    assert (run.returncode, run.stdout) == (0, "ended\n"), run.stderr


def test_the_loops_are_not_loaded_while_a_program_is_exported(monkeypatch):
    exporting, loaded = [True, True, False], []
    monkeypatch.setattr(compilation, "_state", "compiling")
    monkeypatch.setattr(compilation, "cache_folder", lambda: None)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: exporting.pop(0))
    monkeypatch.setattr(compilation, "_run_all_loops", lambda: loaded.append(len(exporting)))
    compilation._compile_in_background()
    assert (compilation._state, loaded) == ("ready", [0])


@needs_numba
@pytest.mark.slow
def test_an_empty_cache_is_filled_in_the_background_once(tmp_path):
    variables = {**os.environ, "EVALIGN_COMPILE": "background", "NUMBA_CACHE_DIR": str(tmp_path)}
    lines = []
    for _ in range(2):
        run = subprocess.run(
            [sys.executable, "-c", SCRIPT], env=variables, capture_output=True, text=True, check=True, timeout=600
        )
        lines.append(run.stdout.splitlines())
    assert lines[0] == ["compiling RowCountsBackward False", "ready CompiledLossBackward True"] or (
        lines[0][0].startswith("compiling") and lines[0][1] == "ready CompiledLossBackward True"
    )
    assert lines[1] == ["ready CompiledLossBackward True"] * 2
