"""Rows that are kept of a stream, in few tables: thousands of small ones take more room than their rows."""

from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from numpy.typing import NDArray

from evalign.streaming.source import Chunk
from evalign.tables.delimited import to_pandas

MOST_TABLES = 64  # before neighbours are joined


@dataclass
class HeldOut:
    """Marked rows of the chunks of a stream, in their order; neighbours of one type are joined from time to time.

    >>> held = HeldOut(most=2)
    >>> for first in (0, 3, 6):
    ...     chunk = Chunk(first, pa.record_batch({"x": [first, first + 1, first + 2]}))
    ...     held.add(chunk, np.array([True, False, True]))
    >>> [frame["x"].tolist() for frame in held.frames()]
    [[0, 2, 3, 5, 6, 8]]
    """

    most: int = MOST_TABLES
    tables: list[Any] = field(default_factory=list)

    def add(self, chunk: Chunk, rows: NDArray[np.bool_]) -> None:
        if rows.any():
            self.tables.append(chunk.table(rows))
        if len(self.tables) > self.most:
            self._join()

    def frames(self) -> list[pd.DataFrame]:
        """What was kept, which is then no longer here."""
        self._join()
        tables, self.tables = self.tables, []
        return [to_pandas(table) for table in tables]

    def _join(self) -> None:
        # Files may differ in the types of their columns, which is for the encoders to say.
        alike = groupby(self.tables, key=lambda table: table.schema)
        self.tables = [pa.concat_tables(tables).combine_chunks() for _, tables in alike]
