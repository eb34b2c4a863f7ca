"""Memory that was freed and is still held: the C library keeps it, between what is in use, for what comes next."""

import contextlib
import ctypes
import sys


def give_back() -> None:
    """Return freed memory to the system before a long run needs other room; where there is no glibc, nothing happens.

    Columns that were learned and encoded leave holes that no batch of a network fits into.

    >>> give_back()
    """
    with contextlib.suppress(AttributeError, OSError, TypeError):  # another C library, none to be found, Windows
        ctypes.CDLL(None).malloc_trim(0)
    if "pyarrow" in sys.modules:  # text of data frames, in memory of its own
        sys.modules["pyarrow"].default_memory_pool().release_unused()
