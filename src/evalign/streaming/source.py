"""A folder of Parquet files as rows with numbers, read a chunk at a time; row groups are what ranks share out."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet
from numpy.typing import NDArray

from evalign.tables.columns import TableError, check_header, quoted
from evalign.tables.delimited import to_pandas
from evalign.tables.reading import INDEX, PARQUET, check_file

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
    """Neighbouring rows, as Arrow has them; `first` is the number of the first."""

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

    Rows are numbered through; only metadata is read until `chunks` is asked for. All files must have the same columns.

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
        self.columns = [name for name in self.columns if name not in drop and not INDEX.fullmatch(name)]
        check_header(str(path), self.columns, [target])
        self.features = [name for name in self.columns if name != target]
        if not self.features:
            raise TableError(f"{path} has no column but the target {target!r}; features are expected beside it")
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
                f"{quoted(sorted(odd))}; write them alike, or put them into folders of their own"
            )
        for index in range(opened.metadata.num_row_groups):
            rows = opened.metadata.row_group(index).num_rows
            if rows:
                self.groups.append(RowGroup(file, index, rows, self.rows))
            self.rows += rows

    def share(self, rank: int, ranks: int) -> list[RowGroup]:
        """The row groups that one of several ranks reads; together they read each once."""
        if len(self.groups) < ranks:
            raise TableError(
                f"{self.path} has {len(self.groups)} row groups, fewer than the {ranks} ranks; "
                "write it with smaller ones, e.g. row_group_size=100000"
            )
        return self.groups[rank::ranks]

    def chunks(self, groups: Sequence[RowGroup], lanes: int = 1) -> Iterator[Chunk]:
        """The rows of row groups in that order, `lanes` of them read at a time, by turns: neighbours are mixed."""
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
            # One thread: what the processor has left is for training, and readers ahead of it would fill memory.
            batches = opened.iter_batches(CHUNK, row_groups=[group.index], columns=self.columns, use_threads=False)
            for batch in batches:
                yield Chunk(first, batch.select(self.columns))
                first += batch.num_rows


def parquet_files(path: Path) -> list[Path]:
    """The Parquet files at a path; hidden ones and what Spark writes beside them (`_SUCCESS`) are no data."""
    if not path.is_dir():
        if path.suffix.lower() not in PARQUET:
            raise TableError(f"only Parquet is read in passes, got {path}; convert it, or leave --stream out")
        return [path]
    files = sorted(
        file
        for file in path.rglob("*")
        if file.suffix.lower() in PARQUET
        and not any(part.startswith((".", "_")) for part in file.relative_to(path).parts)
    )
    if not files:
        check_file(path)  # which says what the folder holds instead
    return files


def _opened(file: Path) -> Any:
    try:
        return pa.parquet.ParquetFile(file, buffer_size=READ_AHEAD, pre_buffer=False)
    except (pa.ArrowException, OSError) as error:
        reason = str(error).strip().split("\n")[0].rstrip(".")
        raise TableError(f"{file} is not a Parquet file or is damaged ({reason}); write it anew") from None
