"""Delimited text, CSV and its like -> a data frame: Arrow reads it, and where it cannot, the reason is looked for."""

import csv
import gzip
import io
import re
import sys
import zlib
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NoReturn, cast

import pandas as pd
import pyarrow as pa
import pyarrow.csv

from evalign.tables.columns import TableError, check_header

TABS = (".tsv", ".tab")


def read_text(
    path: Path, columns: Sequence[str] | None, suffix: str, text: Collection[object], missing: Sequence[str]
) -> pd.DataFrame:
    """Read `columns`, or all but a first one without a name; see `evalign.tables.read.read_table`."""
    with text_errors(path):
        delimiter = "\t" if suffix in TABS else header_delimiter(path)
        header = read_header(path, delimiter)
    check_header(str(path), header, columns)
    wanted = list(columns) if columns is not None else header[1:] if header[0] == "" else header
    entries = [*missing, *(f" {entry}" for entry in missing if entry)]  # "1, ?, 2" is common
    try:
        table = pa.csv.read_csv(
            path,
            parse_options=pa.csv.ParseOptions(delimiter=delimiter, newlines_in_values=True),
            convert_options=pa.csv.ConvertOptions(
                null_values=entries,
                strings_can_be_null=True,
                include_columns=wanted,
                column_types={name: pa.string() for name in wanted if name in text},
            ),
        )
    except (pa.ArrowException, OSError, UnicodeDecodeError):
        with text_errors(path):
            check_rows(path, delimiter)
            return read_with_pandas(path, delimiter, wanted, text, entries)
    if any(pa.types.is_binary(kind) for kind in table.schema.types):  # what Arrow makes of text it cannot decode
        refuse_encoding(path)
    last = table.column(header[-1])[-1].as_py() if table.num_rows and header[-1] in wanted else None
    if isinstance(last, str) and "\n" in last:  # perhaps a quote that nothing closes, which swallows the rows after it
        with text_errors(path):
            check_rows(path, delimiter)
    return to_pandas(table)


def to_pandas(table: Any) -> pd.DataFrame:
    """Column types by Arrow alone: pandas' own notes in a file may be damaged, or hide a column as the index."""
    # Each Arrow column is freed once it is converted, so the table is not held twice.
    return cast(pd.DataFrame, table.to_pandas(ignore_metadata=True, split_blocks=True, self_destruct=True))


def read_with_pandas(
    path: Path, delimiter: str, wanted: list[str], text: Collection[object], missing: list[str]
) -> pd.DataFrame:
    """For what Arrow does not read, e.g. an entry longer than its block of 1 MiB."""
    frame = pd.read_csv(
        path,
        sep=delimiter,
        usecols=wanted,
        index_col=False,
        na_values=missing,
        keep_default_na=False,
        dtype={name: str for name in wanted if name in text},
        low_memory=False,
        encoding="utf-8-sig",
    )
    return frame[wanted]


def open_bytes(path: Path) -> IO[bytes]:
    return cast(IO[bytes], gzip.GzipFile(path)) if path.suffix == ".gz" else path.open("rb")


def open_text(path: Path) -> IO[str]:
    return io.TextIOWrapper(open_bytes(path), encoding="utf-8-sig", newline="")


def header_delimiter(path: Path) -> str:
    """The comma, semicolon or tab that the header has most of, quoted names aside."""
    with open_text(path) as file:
        line = re.sub(r'"[^"]*"', "", next((line for line in file if line.strip()), ""))
    return max(",;\t", key=line.count)


def read_header(path: Path, delimiter: str) -> list[str]:
    with open_text(path) as file:
        header = next((row for row in csv.reader(file, delimiter=delimiter) if row), None)
    if header is None:
        raise TableError(f"{path} is empty; a header and rows are expected")
    if any("\0" in name for name in header):
        raise TableError(f"{path} must be UTF-8 text, it looks like UTF-16 or a binary file; save it as UTF-8")
    return header


def check_rows(path: Path, delimiter: str) -> None:
    """Find the row that has another number of fields than the header; slow, so only on a suspicion."""
    limit = csv.field_size_limit(sys.maxsize)  # 128 KiB unless told, and a long entry is no fault
    try:
        try:
            count_fields(path, delimiter, strict=True)
        except csv.Error as error:
            if "unexpected end of data" in str(error):
                raise TableError(f"{path} ends inside of a quoted entry; close the quote or remove it") from None
            count_fields(path, delimiter, strict=False)  # stray quotes, which Arrow and pandas let pass
    finally:
        csv.field_size_limit(limit)


def count_fields(path: Path, delimiter: str, *, strict: bool) -> None:
    width = 0
    with open_text(path) as file:
        reader = csv.reader(file, delimiter=delimiter, strict=strict)
        for row in reader:
            width = width or len(row)
            if row and len(row) != width:
                fields = "1 field" if len(row) == 1 else f"{len(row)} fields"
                raise TableError(
                    f"{path}, line {reader.line_num} has {fields} where the header has {width}; "
                    "mend it, or quote entries that hold the delimiter"
                )


@contextmanager
def text_errors(path: Path) -> Iterator[None]:
    """What can go wrong in reading a text file, as one sentence."""
    try:
        yield
    except TableError:
        raise
    except UnicodeDecodeError:
        refuse_encoding(path)
    except (gzip.BadGzipFile, zlib.error, EOFError):
        raise TableError(f"{path} is not a gzip file or is damaged; compress it anew") from None
    except (csv.Error, ValueError, OSError) as error:
        reason = str(error).strip().split("\n")[0].rstrip(".")
        raise TableError(f"{path} cannot be read as a table ({reason}); check its quotes") from None


def refuse_encoding(path: Path) -> NoReturn:
    """Say where the first byte stands that is not UTF-8."""
    what = "is not"
    with open_bytes(path) as file:
        for number, line in enumerate(file, 1):
            try:
                line.decode("utf-8")
            except UnicodeDecodeError as error:
                utf16 = number == 1 and line.startswith((b"\xff\xfe", b"\xfe\xff"))
                what = "is UTF-16" if utf16 else f"has the byte 0x{line[error.start]:02x} in line {number}"
                break
    raise TableError(f"{path} must be UTF-8 text, it {what}; save it as UTF-8 (in a spreadsheet: CSV UTF-8)") from None
