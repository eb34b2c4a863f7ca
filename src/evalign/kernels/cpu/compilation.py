"""Compile the CPU loops once per machine, in the background: the eager form serves until they are ready.

`EVALIGN_COMPILE` chooses what the first batch on a machine does:

- `background` (the default): if the loops are compiled and cached, load them; otherwise compute in eager form while a
  process of low priority compiles them, and switch when it is done. Both forms agree to rounding, but the batch at
  which a first run switches depends on timing.
- `wait`: compile when needed, and wait; every run of a program gives the same bits.
- `off`: never use compiled loops.
"""

import hashlib
import importlib.util
import logging
import os
import platform
import subprocess
import sys
import threading
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from evalign import _checks

MODES = ("background", "wait", "off")
COMMAND = "from evalign.kernels.cpu.compilation import compile_all; compile_all()"
_state: str | None = None  # None: not looked yet; "compiling", "ready" or "never"


def ready() -> bool:
    """Whether compiled loops may be used now; the first call may start their compilation."""
    if _state is None:
        _look()
    return _state == "ready"


def mode() -> str:
    """What the environment chooses; anything but one of `MODES` is an error."""
    chosen = os.environ.get("EVALIGN_COMPILE", MODES[0])
    _checks.check_choice("EVALIGN_COMPILE", chosen, MODES)
    return chosen


def _look() -> None:
    global _state
    chosen = mode()
    if chosen == "off" or importlib.util.find_spec("numba") is None:
        _state = "never"
    elif chosen == "wait" or is_cached():
        from evalign.kernels.cpu.jit import available

        _state = "ready" if available() else "never"
    else:
        _state = "compiling"
        threading.Thread(target=_compile_in_background, name="evalign-compile", daemon=True).start()


def _compile_in_background() -> None:
    """Have another process fill the cache, so that this one keeps its GIL; then load from the cache, or compile."""
    global _state
    try:
        if cache_folder() is not None:
            variables = {**os.environ, "EVALIGN_COMPILE": "wait", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
            # A session of its own: a script that ends sooner leaves a filled cache all the same.
            process = subprocess.Popen(
                [sys.executable, "-c", COMMAND], env=variables, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
            process.wait()
        _run_all_loops()
        _state = "ready"
    except Exception as error:  # a loss must not fail for lack of a compiler
        _state = "never"
        logging.getLogger("evalign").warning("compiling the loss's loops failed, the eager form stays: %s", error)


def compile_all() -> None:
    """Compile every loop into numba's cache, one process of a machine at a time; `COMMAND` runs it."""
    if hasattr(os, "nice"):
        os.nice(10)
    folder = cache_folder()
    if folder is None:
        _run_all_loops()
        return
    with (folder / "evalign_compile.lock").open("w") as lock:
        if os.name == "posix":
            import fcntl

            fcntl.flock(lock, fcntl.LOCK_EX)
        if not is_cached():
            _run_all_loops()
            _stamp(folder).touch()


def _run_all_loops() -> None:
    from evalign.kernels.cpu.cpu_loss import run_all_loops  # imports numba

    run_all_loops()


def is_cached() -> bool:
    """Whether all loops of this version were compiled on this machine before."""
    folder = cache_folder()
    return folder is not None and _stamp(folder).exists()


@cache
def cache_folder() -> Path | None:
    """Where numba keeps compiled code: NUMBA_CACHE_DIR, or beside the sources; None if that cannot be written."""
    chosen = os.environ.get("NUMBA_CACHE_DIR")
    folder = Path(chosen) if chosen else Path(__file__).parent / "__pycache__"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None
    return folder if os.access(folder, os.W_OK) else None


@cache
def _fingerprint() -> str:
    """Of sources, versions and processor: whatever numba compiles anew for."""
    digest = hashlib.sha256(f"{sys.version} {platform.machine()} {_processor()}".encode())
    for name in ("numba", "llvmlite", "numpy"):
        try:
            digest.update(version(name).encode())
        except PackageNotFoundError:
            digest.update(b"none")
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(f"{source} {source.stat().st_mtime_ns} {source.stat().st_size}".encode())
    return digest.hexdigest()[:16]


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return " ".join(sorted({line for line in lines if line.startswith(("model name", "flags"))}))


def _stamp(folder: Path) -> Path:
    return folder / f"evalign_compiled_{_fingerprint()}"


def _reset_after_fork() -> None:
    global _state  # the thread that compiles is the parent's
    if _state == "compiling":
        _state = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_after_fork)
