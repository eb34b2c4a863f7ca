"""Tables: read a file into a data frame, profile it, encode it as a float32 matrix, split its rows."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from evalign.tables.encode import TableEncoder as TableEncoder

__all__ = ["TableEncoder"]


def __getattr__(name: str) -> Any:
    # On first use: checking a file must not import torch, which takes longer than most tables.
    if name != "TableEncoder":
        raise AttributeError(f"module 'evalign.tables' has no attribute {name!r}")
    from evalign.tables.encode import TableEncoder

    return TableEncoder
