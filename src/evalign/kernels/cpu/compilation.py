"""Compilation of the CPU loops by numba (`pip install evalign[fast]`), and the threads that run them.

The loops are compiled once per machine, in the background: the eager form serves until they are ready. Nothing here
imports numba before the first compiled loop is needed: that takes half a second.

`EVALIGN_COMPILE` chooses what the first batch on a machine does:

- `background` (the default): if the loops are compiled and cached, load them; otherwise compute in eager form while a
  process of low priority compiles them, and switch when it is done. Both forms agree to rounding, but the batch at
  which a first run switches depends on timing.
- `wait`: compile when needed, and wait; every run of a program gives the same bits.
- `off`: never use compiled loops.
"""

import atexit
import hashlib
import importlib
import importlib.util
import logging
import os
import platform
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import torch

from evalign import checks

MODES = ("background", "wait", "off")
COMMAND = "from evalign.kernels.cpu.compilation import compile_all; compile_all()"
_state: str | None = None  # None (not checked yet), "compiling", "ready" or "never"
_thread: threading.Thread | None = None  # which compiles
_exiting = threading.Event()


def ready() -> bool:
    """Whether compiled loops may be used now; the first call may start compilation."""
    if _state is None:
        _look()
    return _state == "ready"


def wait() -> bool:
    """Wait for compilation and return whether compiled loops may be used, for graphs, which cannot switch later."""
    if not ready() and _thread is not None:
        _thread.join()
    return _state == "ready"


def mode() -> str:
    """The mode set in the environment; raises unless it is one of `MODES`."""
    chosen = os.environ.get("EVALIGN_COMPILE", MODES[0])
    checks.check_choice("EVALIGN_COMPILE", chosen, MODES)
    return chosen


def _look() -> None:
    global _state, _thread
    chosen = mode()
    if chosen == "off" or importlib.util.find_spec("numba") is None:
        _state = "never"
    elif chosen == "wait" or is_cached():
        _state = "ready" if available() else "never"
    else:
        _state = "compiling"
        _thread = threading.Thread(target=_compile_in_background, name="evalign-compile", daemon=True)
        _thread.start()


def _compile_in_background() -> None:
    """Compile in another process, without blocking this one's GIL; then load from the cache, or compile here."""
    global _state
    try:
        if cache_folder() is not None:
            variables = {**os.environ, "EVALIGN_COMPILE": "wait", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
            # In a new session, so that the cache is filled even if this script ends first.
            process = subprocess.Popen(
                [sys.executable, "-c", COMMAND], env=variables, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
            while process.poll() is None:
                if _exiting.wait(0.1):
                    return
        while torch.compiler.is_compiling():  # torch.export patches torch in all threads
            if _exiting.wait(0.1):
                return
        _run_all_loops()
        _state = "ready"
    except Exception as error:  # a loss must not fail because compilation does
        _state = "never"
        logging.getLogger("evalign").warning("compiling the loops failed, so the eager form is used: %s", error)


@atexit.register
def _finish_thread() -> None:
    """Wait for the background thread at exit: a thread killed inside LLVM would abort the process."""
    _exiting.set()
    if _thread is not None:
        _thread.join()


def compile_all() -> None:
    """Compile every loop into numba's cache, one process per machine at a time; `COMMAND` runs it."""
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
    importlib.import_module("evalign.kernels.cpu.cpu_loss").run_all_loops()  # imports numba, and this module


def is_cached() -> bool:
    """Whether all loops of this version were compiled on this machine before."""
    folder = cache_folder()
    return folder is not None and _stamp(folder).exists()


@cache
def cache_folder() -> Path | None:
    """Folder of numba's compiled code: NUMBA_CACHE_DIR, or next to the sources; None if not writable."""
    chosen = os.environ.get("NUMBA_CACHE_DIR")
    folder = Path(chosen) if chosen else Path(__file__).parent / "__pycache__"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None
    return folder if os.access(folder, os.W_OK) else None


@cache
def _fingerprint() -> str:
    """Hash of sources, versions and processor, on which compiled code depends."""
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


SERIAL = 1 << 17  # entries (0.25 ms of work) below which a second thread costs more than it saves

Function = TypeVar("Function", bound=Callable[..., Any])
# Not `nnan` and `ninf`: nan and inf of a diverged network must reach the loss. Sums may be reordered.
REORDERED = frozenset({"reassoc", "contract", "nsz", "arcp"})
ORDERED = frozenset({"contract"})


@cache
def available() -> bool:
    try:
        import numba  # noqa: F401
    except ImportError:  # not installed, or too old for this numpy
        return False
    return True


def loop(arithmetic: frozenset[str] = REORDERED) -> Callable[[Function], Function]:
    """Compile a function for its argument types, cached on disk; it runs without the GIL."""
    import numba

    compile_ = partial(numba.njit, nogil=True, fastmath=set(arithmetic), error_model="numpy")

    def decorate(function: Function) -> Function:
        try:
            return cast(Function, compile_(function, cache=True))
        except RuntimeError:  # no writable cache folder: compile in every process
            return cast(Function, compile_(function))

    return decorate


def parts(rows: int, entries: int) -> list[tuple[int, int]]:
    """Ranges of rows, one per thread; a single one for small batches."""
    count = max(1, min(torch.get_num_threads(), rows, entries // SERIAL))
    edges = [rows * i // count for i in range(count + 1)]
    return list(pairwise(edges))


def summed(run: Callable[..., float], rows: int, entries: int, into: Any) -> float:
    """Run a loop over all rows in threads with separate sums, added to `into`; return the sum of the results."""
    ranges = parts(rows, entries)
    if len(ranges) == 1:
        return run(0, rows, into)
    sums = np.zeros((len(ranges), *into.shape))
    losses: list[float] = in_threads([partial(run, *part, own) for part, own in zip(ranges, sums, strict=True)])
    into += sums.sum(0)
    return sum(losses)


def in_threads(jobs: Sequence[Callable[[], Any]]) -> list[Any]:
    """Results of all jobs; the first one runs in the calling thread."""
    if len(jobs) == 1:
        return [jobs[0]()]
    others = [_executor().submit(job) for job in jobs[1:]]
    return [jobs[0](), *(other.result() for other in others)]


# Not numba's threads, which abort the process if two Python threads use them at once, or after a fork.
_pool: ThreadPoolExecutor | None = None


def _executor() -> ThreadPoolExecutor:
    global _pool
    if _pool is None:
        _pool = ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="evalign")
    return _pool


def _reset_after_fork() -> None:
    global _pool, _state, _thread  # the threads, including a compiling one, belong to the parent
    _pool = _thread = None
    if _state == "compiling":
        _state = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_after_fork)
