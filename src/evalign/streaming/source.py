"""Parquet files as a stream of rows, and their partition by row number, on which all ranks and runs agree."""

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from evalign.distributed import is_up
from evalign.tables.files import PARQUET, SUFFIXES, TableError, check_header, quoted
from evalign.tables.read import INDEX, to_pandas

Numbers = NDArray[np.uint64]
MOST_HELD_OUT = 100_000  # rows: they fit in memory, and the standard error of a score on them is 0.002


def hashed(numbers: Numbers, seed: int) -> Numbers:
    """SplitMix64 (Steele et al. 2014) of row numbers: 64-bit hashes for this seed.

    >>> hashed(np.arange(2, dtype=np.uint64), 1234567).tolist()
    [6457827717110365317, 3203168211198807973]
    """
    z = np.uint64(seed) + (numbers + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: Numbers = z ^ (z >> np.uint64(31))
    return mixed


@dataclass(frozen=True)
class Parts:
    """Shares of test and validation rows; the others are for training.

    >>> parts = Parts(test=0.25, valid=0.25, seed=0)
    >>> numbers = np.arange(1000, dtype=np.uint64)
    >>> [int(part.sum()) for part in (parts.test_rows(numbers), parts.valid_rows(numbers), parts.train_rows(numbers))]
    [245, 272, 483]
    """

    test: float
    valid: float
    seed: int

    @classmethod
    def for_rows(cls, rows: int, test_size: float, validation_fraction: float, seed: int) -> "Parts":
        """The requested shares, but at most `MOST_HELD_OUT` rows of each."""
        most = MOST_HELD_OUT / rows
        return cls(min(test_size, most), min((1 - test_size) * validation_fraction, most), seed)

    def test_rows(self, numbers: Numbers) -> NDArray[np.bool_]:
        return self._place(numbers) < self.test

    def valid_rows(self, numbers: Numbers) -> NDArray[np.bool_]:
        place = self._place(numbers)
        return (place >= self.test) & (place < self.test + self.valid)

    def train_rows(self, numbers: Numbers) -> NDArray[np.bool_]:
        return self._place(numbers) >= self.test + self.valid

    def _place(self, numbers: Numbers) -> NDArray[np.float64]:
        """A number in [0, 1) for every row."""
        return (hashed(numbers, self.seed) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def own_rank() -> int:
    return dist.get_rank() if is_up() else 0


def rank_count() -> int:
    return dist.get_world_size() if is_up() else 1


def gathered(value: Any) -> list[Any]:
    """The values of all ranks, in the order of the ranks.

    >>> gathered("alone")
    ['alone']
    """
    if rank_count() == 1:
        return [value]
    found: list[Any] = [None] * rank_count()
    dist.all_gather_object(found, value)
    return found


@contextlib.contextmanager
def process_group(device: str) -> Iterator[None]:
    """Context with torchrun's process group; does nothing for a single process."""
    if is_up() or int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield
        return
    on_gpu = device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())
    if on_gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()


CHUNK = 8192  # rows decoded at a time
READ_AHEAD = 1 << 20  # bytes of a column; without it Arrow fetches a whole row group's


@dataclass(frozen=True)
class RowGroup:
    """A part of a file that can be read alone; `first` is the number of its first row in the whole data set."""

    file: Path
    index: int
    rows: int
    first: int


@dataclass(frozen=True)
class Chunk:
    """Consecutive rows in Arrow's format; `first` is the number of the first."""

    first: int
    batch: Any

    @property
    def numbers(self) -> NDArray[np.uint64]:
        return np.arange(self.first, self.first + self.batch.num_rows, dtype=np.uint64)

    def table(self, rows: NDArray[np.bool_]) -> Any:
        """The rows that are marked, as an Arrow table."""
        return pa.Table.from_batches([self.batch]).filter(pa.array(rows))

    def frame(self, rows: NDArray[np.bool_]) -> pd.DataFrame:
        """The rows that are marked, as a data frame."""
        return to_pandas(self.table(rows))


class ParquetRows:
    """The rows of a Parquet file, or of all Parquet files in a folder and below, in the order of their names.

    Rows are numbered across files. Only metadata is read until `chunks` is called. All files must have the same
    columns.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> for part in (0, 1):
    ...     pd.DataFrame({"x": [1.0, 2.0, 3.0], "y": [0, 1, part]}).to_parquet(folder / f"{part}.parquet")
    >>> source = ParquetRows(folder, "y")
    >>> source.rows, source.features, [group.first for group in source.groups]
    (6, ['x'], [0, 3])
    >>> [chunk.batch.num_rows for chunk in source.chunks(source.groups)]
    [3, 3]
    """

    def __init__(self, path: Path, target: str, drop: Sequence[str] = ()) -> None:
        self.path, self.target = path, target
        self.files = parquet_files(path)
        self.groups: list[RowGroup] = []
        self.columns: list[str] = []
        self.rows = 0
        for file in self.files:
            with _opened(file) as opened:
                self._add(file, opened)
        check_header(str(path), self.columns, [target, *drop])
        self.columns = [name for name in self.columns if name not in drop and not INDEX.fullmatch(name)]
        self.features = [name for name in self.columns if name != target]
        if not self.features:
            raise TableError(f"{path} has no column except the target {target!r}; add feature columns")
        if not self.rows:
            raise TableError(f"{path} has no rows; is it the right folder?")

    def _add(self, file: Path, opened: Any) -> None:
        names = opened.schema_arrow.names
        if not self.columns:
            check_header(str(file), names, [])
            self.columns = names
        elif odd := set(names) ^ set(self.columns):
            raise TableError(
                f"all files of a data set must have the same columns, {file} and {self.files[0]} differ in "
                f"{quoted(sorted(odd))}; give them the same columns, or put them in separate folders"
            )
        for index in range(opened.metadata.num_row_groups):
            rows = opened.metadata.row_group(index).num_rows
            if rows:
                self.groups.append(RowGroup(file, index, rows, self.rows))
            self.rows += rows

    def share(self, rank: int, ranks: int) -> list[RowGroup]:
        """The row groups that this rank reads; together the ranks read each one once."""
        if len(self.groups) < ranks:
            raise TableError(
                f"{self.path} has {len(self.groups)} row groups, fewer than the {ranks} ranks; "
                "write it with smaller ones, e.g. row_group_size=100000"
            )
        return self.groups[rank::ranks]

    def chunks(self, groups: Sequence[RowGroup], lanes: int = 1) -> Iterator[Chunk]:
        """The rows of row groups in that order, reading `lanes` of them in turn, which mixes neighbours."""
        waiting = iter(groups)
        open_ones: list[Iterator[Chunk]] = []
        while True:
            while len(open_ones) < lanes and (group := next(waiting, None)) is not None:
                open_ones.append(self._read(group))
            if not open_ones:
                return
            for reader in list(open_ones):
                chunk = next(reader, None)
                if chunk is None:
                    open_ones.remove(reader)
                else:
                    yield chunk

    def _read(self, group: RowGroup) -> Iterator[Chunk]:
        first = group.first
        with _opened(group.file) as opened:
            # One thread: other cores are for training, and readers running ahead would fill memory.
            batches = opened.iter_batches(CHUNK, row_groups=[group.index], columns=self.columns, use_threads=False)
            for batch in batches:
                yield Chunk(first, batch.select(self.columns))
                first += batch.num_rows


def parquet_files(path: Path) -> list[Path]:
    """The Parquet files at a path; hidden files and markers of Spark (`_SUCCESS`) are skipped."""
    if not path.is_dir():
        if path.suffix.lower() not in PARQUET:
            raise TableError(f"only Parquet can be read in passes, got {path}; convert it, or remove --stream")
        return [path]
    files = sorted(
        file
        for file in path.rglob("*")
        if file.suffix.lower() in PARQUET
        and not any(part.startswith((".", "_")) for part in file.relative_to(path).parts)
    )
    if not files:
        others = sorted(file.name for file in path.iterdir() if file.name.lower().endswith(SUFFIXES))
        raise TableError(f"{path} is a folder that holds no Parquet file{f' but {quoted(others)}' if others else ''}")
    return files


def _opened(file: Path) -> Any:
    try:
        return pa.parquet.ParquetFile(file, buffer_size=READ_AHEAD, pre_buffer=False)
    except (pa.ArrowException, OSError) as error:
        reason = str(error).strip().split("\n")[0].rstrip(".")
        raise TableError(f"{file} is not a Parquet file or is damaged ({reason}); write it again") from None
