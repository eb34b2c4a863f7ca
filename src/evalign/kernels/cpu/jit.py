"""Compilation by numba (`pip install evalign[fast]`), and threads for compiled loops.

Nothing here imports numba before the first compiled loop is needed: that takes half a second.
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from itertools import pairwise
from typing import Any, TypeVar, cast

import torch

SERIAL = 1 << 17  # entries (0.25 ms of work) below which a second thread costs more than it saves

Function = TypeVar("Function", bound=Callable[..., Any])
# Not `nnan` and `ninf`: nan and inf of a diverged network must reach the loss. Sums may be reordered.
REORDERED = {"reassoc", "contract", "nsz", "arcp"}


@cache
def available() -> bool:
    try:
        import numba  # noqa: F401
    except ImportError:  # not there, or too old for this numpy
        return False
    return True


def loop(*, exact: bool = False) -> Callable[[Function], Function]:
    """Compile a function for the types it is called with, cached on disk; it runs without the GIL."""
    import numba

    compile_ = partial(numba.njit, nogil=True, fastmath=False if exact else REORDERED, error_model="numpy")

    def decorate(function: Function) -> Function:
        try:
            return cast(Function, compile_(function, cache=True))
        except RuntimeError:  # no writable cache folder: compiled in every process
            return cast(Function, compile_(function))

    return decorate


def parts(rows: int, entries: int) -> list[tuple[int, int]]:
    """Ranges of rows, one for each thread; a single one for small batches."""
    count = max(1, min(torch.get_num_threads(), rows, entries // SERIAL))
    edges = [rows * i // count for i in range(count + 1)]
    return list(pairwise(edges))


def in_threads(jobs: Sequence[Callable[[], Any]]) -> list[Any]:
    """Results of all jobs; the first one runs in the calling thread."""
    if len(jobs) == 1:
        return [jobs[0]()]
    others = [_executor().submit(job) for job in jobs[1:]]
    return [jobs[0](), *(other.result() for other in others)]


# Not numba's own threads: they abort the process when two Python threads use them at once, or after a fork.
_pool: ThreadPoolExecutor | None = None


def _executor() -> ThreadPoolExecutor:
    global _pool
    if _pool is None:
        _pool = ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="evalign")
    return _pool


def _reset_pool() -> None:
    global _pool
    _pool = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_pool)
