"""Return freed heap memory to the operating system."""

import contextlib
import ctypes
import sys


def release_memory() -> None:
    """Trim the heap before a long run allocates; does nothing where the C library is not glibc.

    Encoding a table column by column fragments the heap into pieces that are too small for a batch.

    >>> release_memory()
    """
    with contextlib.suppress(AttributeError, OSError, TypeError):  # no glibc, or no C library to be found
        ctypes.CDLL(None).malloc_trim(0)
    if "pyarrow" in sys.modules:  # text columns live in Arrow's own pool
        sys.modules["pyarrow"].default_memory_pool().release_unused()
