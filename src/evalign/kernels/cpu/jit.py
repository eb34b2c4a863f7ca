"""Loops compiled by numba, where it is installed (`pip install evalign[fast]`), in as many threads as torch uses.

Nothing here is imported before the first loss is computed: numba takes half a second.
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from itertools import pairwise
from typing import Any, TypeVar, cast

import torch

SERIAL = 1 << 17  # entries, a quarter of a millisecond, below which waking a thread costs more than it saves

F = TypeVar("F", bound=Callable[..., Any])
# No `nnan` and `ninf`: a network that diverged must be seen to have diverged. Sums may be taken in any order.
REORDERED = {"reassoc", "contract", "nsz", "arcp"}


@cache
def available() -> bool:
    try:
        import numba  # noqa: F401
    except ImportError:  # not there, or too old for this numpy
        return False
    return True


def loop(*, exact: bool = False) -> Callable[[F], F]:
    """Compile a function for the types it is called with, once for this machine; it runs without Python's lock."""
    import numba

    compile_ = partial(numba.njit, nogil=True, fastmath=False if exact else REORDERED, error_model="numpy")

    def decorate(function: F) -> F:
        try:
            return cast(F, compile_(function, cache=True))
        except RuntimeError:  # nowhere to keep it: compiled anew in every process
            return cast(F, compile_(function))

    return decorate


def parts(rows: int, entries: int) -> list[tuple[int, int]]:
    """Rows [start, stop) for each thread; one part where that is quicker."""
    count = max(1, min(torch.get_num_threads(), rows, entries // SERIAL))
    edges = [rows * i // count for i in range(count + 1)]
    return list(pairwise(edges))


def in_threads(jobs: Sequence[Callable[[], Any]]) -> list[Any]:
    """The results of all jobs; the first runs in this thread, which would only wait otherwise."""
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


def _forget_threads() -> None:
    global _pool
    _pool = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_threads)
