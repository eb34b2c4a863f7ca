"""Batches without end: pass after pass over the rows, shuffled within a buffer, the same ones for a seed."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch

from evalign.streaming.parts import Parts
from evalign.streaming.source import Chunk, ParquetRows, RowGroup
from evalign.tables.columns import TableError
from evalign.training.rows import Rows

BUFFER = 65_536  # rows that are shuffled together
LANES = 8  # row groups that are read at a time: neighbours in a file are often alike

Encode = Callable[[pd.DataFrame], Rows]


@dataclass(frozen=True)
class StreamBatches:
    """Batches of about `size` rows. Every training row is in one batch of a pass.

    A pass takes the row groups in an order of its own, reads `LANES` of them by turns and shuffles what is in the
    buffer. All of it follows from seed, pass and place, so that a place is a single number: `start_at` reads up to
    it, without encoding, and goes on with the batches that would have come.
    """

    source: ParquetRows
    groups: Sequence[RowGroup]
    parts: Parts
    encode: Encode
    size: int
    buffer: int = BUFFER

    def start_at(self, place: int) -> Iterator[Rows]:
        """The batches from this place on."""
        passed = 0
        for number in itertools.count():
            before = passed
            for block, chunks in enumerate(self._blocks(number)):
                marks = [self.parts.train_rows(chunk.numbers) for chunk in chunks]
                rows = sum(int(mark.sum()) for mark in marks)
                count = max(1, round(rows / self.size)) if rows else 0
                if passed + count > place:
                    yield from self._batches((number, block), chunks, marks, count, skip=max(0, place - passed))
                passed += count
            if passed == before:
                raise TableError(f"{self.source.path} has no training rows among the row groups of this rank")

    def _blocks(self, number: int) -> Iterator[list[Chunk]]:
        """What is in the buffer at a time, of one pass."""
        order = np.random.default_rng([self.parts.seed, number]).permutation(len(self.groups))
        held: list[Chunk] = []
        rows = 0
        for chunk in self.source.chunks([self.groups[i] for i in order], LANES):
            held.append(chunk)
            rows += chunk.batch.num_rows
            if rows >= self.buffer:
                yield held
                held, rows = [], 0
        if held:
            yield held

    def _batches(
        self, place: tuple[int, int], chunks: list[Chunk], marks: list[np.ndarray], count: int, skip: int
    ) -> Iterator[Rows]:
        parts = [self.encode(chunk.frame(mark)) for chunk, mark in zip(chunks, marks, strict=True) if mark.any()]
        rows = Rows(*(torch.cat([getattr(part, name) for part in parts]) for name in ("x", "y", "weight")))
        order = torch.from_numpy(np.random.default_rng([self.parts.seed, *place]).permutation(len(rows)))
        for index in order.tensor_split(count)[skip:]:
            yield rows[index.to(rows.y.device)]
