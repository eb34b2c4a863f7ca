"""Read delimited text with Arrow; where Arrow fails, find the reason or fall back to pandas."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import pandas as pd
import pyarrow as pa
import pyarrow.csv

from evalign.tables.files import (
    TABS,
    UTF8,
    check_header,
    check_rows,
    detect_encoding,
    header_delimiter,
    name_columns,
    read_header,
    refuse_encoding,
    text_errors,
)
from evalign.tables.formats import ColumnFormat, Note, convert

DECIMAL = "decimal"  # the key of a frame's `attrs` with the separator that was given or found


def read_text(
    path: Path,
    columns: Sequence[str] | None,
    suffix: str,
    *,
    text: Collection[object],
    missing: Sequence[str],
    decimal: str | None,
    encoding: str | None,
    formats: Mapping[str, ColumnFormat],
    labels: str | None,
    note: Note,
) -> tuple[pd.DataFrame, dict[str, ColumnFormat]]:
    """The table, and the formats of the columns that were converted; see `evalign.tables.read.read_table`."""
    encoding = encoding or detect_encoding(path)
    with text_errors(path):
        delimiter = "\t" if suffix in TABS else header_delimiter(path, encoding)
        header = read_header(path, delimiter, encoding)
    named = name_columns(header)
    check_header(str(path), named, columns)
    reader = _Reader(path, delimiter, encoding, header, named, missing)
    wanted = list(columns) if columns is not None else named
    given = [*text, *(name for name in formats if name in named)]  # a known format parses text
    frame = reader.read(wanted, given, decimal or ".")
    notes: list[str] = []
    kept = (*text, labels)  # labels are never converted
    found = convert(frame, known=formats, text=kept, decimal=decimal, delimiter=delimiter, note=notes.append)
    commas = [name for name, one in found.items() if getattr(one, "decimal", ".") == "," and name not in formats]
    if decimal is None and commas and not _has_points(frame, found):
        decimal = ","
        # One column with a decimal comma tells how the others are meant: "1.234" is a thousand there.
        frame, notes = reader.read(wanted, given, ","), []
        note(f"numbers were read with a decimal comma, as in column {commas[0]!r}; --decimal . would read a point")
        found = convert(frame, known=formats, text=kept, decimal=decimal, delimiter=delimiter, note=notes.append)
        notes = [one for one in notes if not one.endswith("read as numbers with a decimal comma")]
    for one in notes:
        note(one)
    if labels in wanted and labels not in text and frame[labels].dtype.kind in "iuf":
        as_written = reader.read([labels], [labels], ".")[labels].str.strip()
        if as_written.nunique() > frame[labels].nunique():  # 01 and 1 are two classes
            frame[labels] = as_written
    frame = _without_row_numbers(frame, header, columns, note)
    frame.attrs[DECIMAL] = decimal
    return frame, found


def _has_points(frame: pd.DataFrame, found: Mapping[str, ColumnFormat]) -> bool:
    """Whether some column certainly has decimal points; "1.234" may be a thousand."""
    if any(getattr(one, "thousands", "") == "," for one in found.values()):
        return True
    floats = [frame[name].dropna().abs() for name in frame if frame[name].dtype.kind == "f"]
    return any(((column < 1) & (column > 0)).any() or (1000 * column % 1 > 0).any() for column in floats)


class _Reader:
    """Arrow's reader with the layout of one file."""

    def __init__(
        self, path: Path, delimiter: str, encoding: str, header: list[str], named: list[str], missing: Sequence[str]
    ) -> None:
        self.path, self.delimiter, self.encoding, self.header, self.named = path, delimiter, encoding, header, named
        self.missing = [*missing, *(f" {entry}" for entry in missing if entry)]  # "1, ?, 2" is common

    def read(self, wanted: list[str], text: Collection[object], decimal: str) -> pd.DataFrame:
        unnamed = self.named != self.header  # then columns cannot be selected by name
        types = {old: pa.string() for old, name in zip(self.header, self.named, strict=True) if name in text}
        try:
            table = pa.csv.read_csv(
                self.path,
                read_options=pa.csv.ReadOptions(encoding="utf8" if self.encoding == UTF8 else self.encoding),
                parse_options=pa.csv.ParseOptions(delimiter=self.delimiter, newlines_in_values=True),
                convert_options=pa.csv.ConvertOptions(
                    null_values=self.missing,
                    strings_can_be_null=True,
                    include_columns=None if unnamed else wanted,
                    column_types=types,
                    decimal_point=decimal,
                ),
            )
        except (pa.ArrowException, OSError, UnicodeError):
            with text_errors(self.path):
                check_rows(self.path, self.delimiter, self.encoding)
                return self._read_with_pandas(wanted, text, decimal)
        if unnamed:
            table = table.rename_columns(self.named).select(wanted)
        if any(pa.types.is_binary(kind) for kind in table.schema.types):  # what Arrow makes of text it cannot decode
            refuse_encoding(self.path)
        last = table.column(self.named[-1])[-1].as_py() if table.num_rows and self.named[-1] in wanted else None
        if isinstance(last, str) and "\n" in last:  # possibly a quote that is never closed
            with text_errors(self.path):
                check_rows(self.path, self.delimiter, self.encoding)
        return to_pandas(table)

    def _read_with_pandas(self, wanted: list[str], text: Collection[object], decimal: str) -> pd.DataFrame:
        return read_with_pandas(
            self.path, self.delimiter, self.encoding, self.named, wanted, text, self.missing, decimal
        )


def to_pandas(table: Any) -> pd.DataFrame:
    """Convert with Arrow's column types; pandas' own metadata in a file may be damaged or hide a column as index."""
    # Each Arrow column is freed once it is converted, so the table is not held twice.
    return cast(pd.DataFrame, table.to_pandas(ignore_metadata=True, split_blocks=True, self_destruct=True))


def read_with_pandas(
    path: Path, delimiter: str, encoding: str, named: list[str], wanted: list[str], text: Collection[object],
    missing: list[str], decimal: str,
) -> pd.DataFrame:  # fmt: skip
    """Read what Arrow does not, e.g. an entry longer than its block of 1 MiB."""
    frame = pd.read_csv(
        path,
        sep=delimiter,
        header=0,
        names=named,
        usecols=wanted,
        index_col=False,
        na_values=missing,
        keep_default_na=False,
        dtype={name: str for name in wanted if name in text},
        low_memory=False,
        encoding=encoding,
        decimal=decimal,
    )
    return frame[wanted]


def _without_row_numbers(
    frame: pd.DataFrame, header: list[str], columns: Sequence[str] | None, note: Note
) -> pd.DataFrame:
    """Drop columns without a name that are empty or number the rows; others keep the name of their position."""
    if columns is not None:
        return frame
    for i, (old, name) in enumerate(zip(header, name_columns(header), strict=True)):
        if old.strip():
            continue
        column = frame[name]
        if column.isna().all():  # a delimiter at the end of every line
            frame = frame.drop(columns=name)
        elif i == 0 and column.dtype.kind in "iu" and column.is_unique:  # written by pandas or R
            frame = frame.drop(columns=name)
            note("the first column has no name and numbers the rows; it was ignored")
        else:
            note(f"column {i + 1} has no name in the header; it is used as {name!r}")
    return frame
