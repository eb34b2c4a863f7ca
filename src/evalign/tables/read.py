"""Read a table from a file, and split it into features and labels; each error is one sentence.

Nothing in a file is executed: text and JSON are data, Parquet and Feather are read by Arrow, workbooks by openpyxl.
"""

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
from numpy.typing import NDArray

from evalign.tables.columns import column_kind
from evalign.tables.files import (
    TABS,
    UTF8,
    TableError,
    check_encoding,
    check_file,
    check_header,
    check_is_text,
    check_rows,
    detect_encoding,
    file_format,
    header_delimiter,
    name_columns,
    quoted,
    read_header,
    refuse_encoding,
    text_errors,
)
from evalign.tables.formats import ColumnFormat, Note, convert, format_from_json, is_text

DECIMAL = "decimal"  # key in `attrs` of a frame: the given or detected decimal separator


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
    missing_labels: Sequence[str],
    note: Note,
) -> tuple[pd.DataFrame, dict[str, ColumnFormat]]:
    """The table, and the formats of the columns that were converted; see `evalign.tables.read.read_table`."""
    check_is_text(path, encoding)
    encoding = encoding or detect_encoding(path)
    with text_errors(path):
        delimiter = "\t" if suffix in TABS else header_delimiter(path, encoding)
        header = read_header(path, delimiter, encoding)
    named = name_columns(header)
    check_header(str(path), named, columns)
    reader = TextReader(path, delimiter, encoding, header, named, missing)
    wanted = list(columns) if columns is not None else named
    given = [*text, *(name for name in formats if name in named)]  # a known format parses text
    frame = reader.read(wanted, given, decimal or ".")
    notes: list[str] = []
    kept = (*text, labels)  # labels are never converted
    found = convert(frame, known=formats, text=kept, decimal=decimal, delimiter=delimiter, note=notes.append)
    commas = [name for name, one in found.items() if getattr(one, "decimal", ".") == "," and name not in formats]
    if decimal is None and commas and not _has_points(frame, found):
        decimal = ","
        # A decimal comma in one column decides for the others: "1.234" is a thousand.
        frame, notes = reader.read(wanted, given, ","), []
        note(
            f"numbers were read with a decimal comma, as in column {commas[0]!r}; for a decimal point pass --decimal ."
        )
        found = convert(frame, known=formats, text=kept, decimal=decimal, delimiter=delimiter, note=notes.append)
        notes = [one for one in notes if not one.endswith("read as numbers with a decimal comma")]
    for one in notes:
        note(one)
    if labels in wanted and labels not in text and not is_text(frame[labels]) and frame[labels].dtype.kind != "b":
        as_written = reader.read([labels], [labels], ".")[labels].str.strip()
        # Dates may be classes, and 01 and 1 different ones; so may +1, and whole numbers beyond 64 bits.
        numbers = frame[labels].dtype.kind in "iuf" and as_written.nunique() == frame[labels].nunique()
        if not numbers or as_written.str.fullmatch(r"\+\d+|-?\d{16,}").any():
            frame[labels] = as_written
    if labels in wanted and _may_name_classes(frame[labels]):
        again = TextReader(path, delimiter, encoding, header, named, missing_labels)
        frame[labels] = again.read([labels], [labels], ".")[labels]
    frame = _without_row_numbers(frame, header, columns, note)
    frame.attrs[DECIMAL] = decimal
    return frame, found


def _may_name_classes(labels: "pd.Series[Any]") -> bool:
    """Whether entries read as missing, such as None, may be classes, because the others are words too."""
    return bool(labels.isna().any()) and is_text(labels)


def _has_points(frame: pd.DataFrame, found: Mapping[str, ColumnFormat]) -> bool:
    """Whether some column certainly has decimal points; "1.234" may be a thousand."""
    if any(getattr(one, "thousands", "") == "," for one in found.values()):
        return True
    floats = [frame[name].dropna().abs() for name in frame if frame[name].dtype.kind == "f"]
    return any(((column < 1) & (column > 0)).any() or (1000 * column % 1 > 0).any() for column in floats)


class TextReader:
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
                return self.read_with_pandas(wanted, text, decimal)
        if unnamed:
            table = table.rename_columns(self.named).select(wanted)
        if any(pa.types.is_binary(kind) for kind in table.schema.types):  # Arrow's type for text that it cannot decode
            refuse_encoding(self.path)
        last = table.column(self.named[-1])[-1].as_py() if table.num_rows and self.named[-1] in wanted else None
        if isinstance(last, str) and "\n" in last:  # possibly a quote that is never closed
            with text_errors(self.path):
                check_rows(self.path, self.delimiter, self.encoding)
        return to_pandas(table)

    def read_with_pandas(self, wanted: list[str], text: Collection[object], decimal: str) -> pd.DataFrame:
        """Read what Arrow does not, e.g. an entry longer than its block of 1 MiB."""
        frame = pd.read_csv(
            self.path,
            sep=self.delimiter,
            header=0,
            names=self.named,
            usecols=wanted,
            index_col=False,
            na_values=self.missing,
            keep_default_na=False,
            dtype={name: str for name in wanted if name in text},
            low_memory=False,
            encoding=self.encoding,
            decimal=decimal,
        )
        return frame[wanted]


def to_pandas(table: Any) -> pd.DataFrame:
    """Convert by Arrow's types, ignoring pandas' metadata, which may be damaged or hide a column as the index."""
    # Each Arrow column is freed once it is converted, so the table is not held twice.
    return cast(pd.DataFrame, table.to_pandas(ignore_metadata=True, split_blocks=True, self_destruct=True))


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


INDEX = re.compile(r"__index_level_\d+__")  # pandas' name for row numbers
# UCI files write "?". As text it would turn a numeric column into a categorical one.
MISSING = ("", "NA", "N/A", "n/a", "#N/A", "<NA>", "NaN", "nan", "null", "NULL", "None", "?")
MISSING_LABELS = ("", "?")
FORMATS = "formats"  # key in `attrs` of a frame: the formats of converted columns


def read_table(
    path: str | Path,
    columns: Sequence[str] | None = None,
    *,
    text: Collection[object] = (),
    missing: Sequence[str] = MISSING,
    decimal: str | None = None,
    encoding: str | None = None,
    formats: Mapping[str, Mapping[str, Any]] | None = None,
    labels: str | None = None,
    missing_labels: Sequence[str] = MISSING_LABELS,
    note: Note = lambda text: None,
) -> pd.DataFrame:
    """Read a table by its suffix: .csv and .txt (comma, semicolon, tab or |), .tsv and .tab, all also with .gz behind;
    .parquet, .pq, .feather, .arrow, .jsonl, .ndjson, .xlsx.

    `columns` are those to read, in this order. `text` are columns to keep as text even if they look like numbers: pass
    `TableEncoder.text_columns_` when reading rows to predict. `missing` are the entries of a text file that stand for
    no value. Text that holds numbers or dates is converted if its format is certain; `decimal` fixes the separator,
    `formats` are those in `frame.attrs["formats"]` of the training table, and `note` is called with a sentence
    about each conversion. `labels` is a column in which different spellings of a number (1, 01) stay apart, and in
    which words such as None and NA are classes if all other values are words; there only `missing_labels` mean no
    value.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp(), "people.csv")
    >>> _ = path.write_text("age,job\\n30,cook\\n?,smith\\n")
    >>> read_table(path).isna().sum().to_dict()
    {'age': 1, 'job': 0}
    """
    path = Path(path)
    check_file(path)
    if decimal not in (None, ".", ","):
        raise TableError(f"the decimal separator must be . or , got {decimal!r}")
    check_encoding(encoding)
    kind, suffix = file_format(path)
    known = {name: format_from_json(one) for name, one in (formats or {}).items()}
    found: dict[str, ColumnFormat] = {}
    if kind == "text":
        frame, found = read_text(
            path, columns, suffix, text=text, missing=missing, decimal=decimal, encoding=encoding, formats=known,
            labels=labels, missing_labels=missing_labels, note=note,
        )  # fmt: skip
    elif kind == "excel":
        frame = read_excel(path, columns, text, missing, note, labels, missing_labels)
        found = convert(frame, known=known, text=(*text, labels), decimal=decimal, note=note)
    elif kind == "json lines":
        frame = read_arrow(path, columns, _read_json)
        found = convert(frame, known=known, text=(*text, labels), decimal=decimal, note=note)
    else:
        frame = read_arrow(path, columns, _read_parquet if kind == "parquet" else _read_feather)
    if not len(frame):
        raise TableError(f"{path} has a header but no rows; is it the right file?")
    frame.attrs[FORMATS] = {name: asdict(one) for name, one in found.items()}
    return frame


def read_arrow(path: Path, columns: Sequence[str] | None, read: Any) -> pd.DataFrame:
    """Read a file with Arrow, turning its errors into one sentence."""
    try:
        frame = to_pandas(read(path, columns))
    except TableError:
        raise
    except (pa.ArrowException, OSError, ValueError) as error:
        reason = str(error).strip().split("\n")[0].rstrip(".")
        kind = {"json lines": "a file of JSON lines"}.get(
            file_format(path)[0], f"a {file_format(path)[0].title()} file"
        )
        raise TableError(f"{path} is not {kind} or is damaged ({reason}); write it again") from None
    return frame


def _selected(path: Path, names: list[str], columns: Sequence[str] | None) -> list[str]:
    check_header(str(path), names, columns)
    return list(columns) if columns is not None else [name for name in names if not INDEX.fullmatch(name)]


def _read_parquet(path: Path, columns: Sequence[str] | None) -> Any:
    # Not pyarrow's `read_table`, which would read folders named key=value in the path as columns.
    with pa.parquet.ParquetFile(path) as file:
        return file.read(columns=(wanted := _selected(path, file.schema_arrow.names, columns))).select(wanted)


def _read_feather(path: Path, columns: Sequence[str] | None) -> Any:
    import pyarrow.feather

    table = pyarrow.feather.read_table(path)
    return table.select(_selected(path, table.column_names, columns))


def _read_json(path: Path, columns: Sequence[str] | None) -> Any:
    import pyarrow.json

    table = pyarrow.json.read_json(path)
    return table.select(_selected(path, table.column_names, columns))


def read_excel(
    path: Path, columns: Sequence[str] | None, text: Collection[object], missing: Sequence[str], note: Note,
    labels: str | None, missing_labels: Sequence[str],
) -> pd.DataFrame:  # fmt: skip
    """The first sheet of a workbook, with a header in its first row."""
    try:
        import openpyxl  # noqa: F401
    except ModuleNotFoundError:
        raise TableError(f"{path} needs openpyxl to be read; run pip install 'evalign[excel]'") from None
    try:
        with pd.ExcelFile(path, engine="openpyxl") as book:
            names = [str(name) for name in book.sheet_names]
            kept = {str(name): str for name in text}
            options: dict[str, Any] = {"sheet_name": 0, "keep_default_na": False}
            frame: pd.DataFrame = pd.read_excel(book, na_values=list(missing), dtype=kept, **options)
            if labels in frame and _may_name_classes(frame[labels]):
                frame[labels] = pd.read_excel(book, na_values=list(missing_labels), dtype=kept, **options)[labels]
    except Exception as error:  # a damaged archive may raise any error in openpyxl
        reason = str(error).strip().split("\n")[0].rstrip(".")
        raise TableError(f"{path} is not an Excel workbook or is damaged ({reason}); save it again") from None
    if len(names) > 1:
        note(f"{path.name} has {len(names)} sheets; the first, {names[0]!r}, was read")
    frame.columns = [
        f"column_{i}" if str(name).startswith("Unnamed: ") else str(name) for i, name in enumerate(frame.columns, 1)
    ]
    empty = [name for name in frame if str(name).startswith("column_") and frame[name].isna().all()]
    frame = frame.drop(columns=empty).dropna(how="all", ignore_index=True)
    return frame[_selected(path, list(frame.columns), columns)]


def check_target(
    frame: pd.DataFrame,
    column: str,
    *,
    min_rows: int = 2,
    classification: bool = False,
    drop_unlabelled: bool = False,
    note: Note = lambda text: None,
) -> tuple[pd.DataFrame, NDArray[Any]]:
    """Split a table into features and labels; every class must have `min_rows` rows.

    Numbers that look like a regression target are refused unless `classification` is true; fractions then
    become text. Rows without a label are refused, or dropped with `drop_unlabelled`.

    >>> X, y = check_target(pd.DataFrame({"age": [1, 2, 3, 4], "sick": ["no", "yes", "no", "yes"]}), "sick")
    >>> list(X.columns), y.tolist()
    (['age'], ['no', 'yes', 'no', 'yes'])
    """
    check_header("the table", list(frame.columns), [column])
    if frame.shape[1] == 1:
        raise TableError(f"the table has no column except the target {column!r}; add feature columns")
    if drop_unlabelled and frame[column].isna().any() and frame[column].notna().any():
        note(f"{int(frame[column].isna().sum())} of {len(frame)} rows have no label and were dropped")
        frame = frame[frame[column].notna()].reset_index(drop=True)
    labels = frame[column]
    kind = column_kind(labels, column)
    if labels.isna().all():
        raise TableError(f"the target {column!r} has no label in any row; is it the right column?")
    if lacking := int(labels.isna().sum()):
        rows = "1 row has" if lacking == 1 else f"{lacking} of {len(labels)} rows have"
        raise TableError(
            f"the target {column!r} must have a label in every row, but {rows} none; drop them with --drop-unlabelled"
        )
    if words := sorted({*MISSING} & {*labels.unique()} if kind == "text" else ()):
        note(f"the target {column!r} has the class {quoted(words)}; if that means no label, add --drop-unlabelled")
    if kind == "text" and (alike := _alike(labels.unique().tolist())):
        note(f"the target {column!r} has the classes {quoted(alike)}, which differ only in case or spaces")
    y = labels.infer_objects().to_numpy()
    if kind == "number" and y.dtype.kind not in "iuf":  # categories, decimals
        y = np.asarray(y, dtype=np.float64)
    if classification and y.dtype.kind == "f" and not (y == np.rint(y)).all():
        y = np.array([str(label) for label in y.tolist()], dtype=object)  # fractions would be a regression target
    codes, classes = pd.factorize(y)
    counts = np.bincount(codes)
    # Classes of five rows on average can hardly be learned; so many numbers are amounts, not classes.
    amounts = len(classes) > max(20, len(y) / 5)
    if y.dtype.kind == "f":
        amounts |= not (np.isfinite(classes) & (classes == np.rint(classes))).all()
    if kind == "number" and amounts and not classification:
        raise TableError(
            f"the target {column!r} looks like a regression target, with {len(classes)} different numbers in {len(y)} "
            "rows; bin it into ranges first, or pass --task classification if each number is a class"
        )
    check_class_counts(column, dict(zip(classes.tolist(), counts.tolist(), strict=True)), min_rows)
    return frame.drop(columns=column), y


def check_class_counts(column: str, counts: Mapping[Any, int], min_rows: int = 2) -> None:
    """Raise unless there are two classes, each with `min_rows` rows."""
    if len(counts) < 2:
        raise TableError(f"the target {column!r} must have at least two classes, but has only {quoted(counts)}")
    if rare := [label for label, count in counts.items() if count < min_rows]:
        raise TableError(
            f"every class of the target {column!r} must have at least {min_rows} rows, but "
            f"{quoted(rare)} {'has' if len(rare) == 1 else 'have'} fewer; add rows, or merge or drop the class"
        )


def check_indicators(
    frame: pd.DataFrame, columns: Sequence[str], *, drop_unlabelled: bool = False, note: Note = lambda text: None
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Split a table into features and several labels: columns of 0 and 1, in which both occur at least twice.

    >>> frame = pd.DataFrame({"size": range(4), "red": [0, 1, 0, 1], "blue": [1, 1, 0, 0]})
    >>> check_indicators(frame, ["red", "blue"])[1].sum().to_dict()
    {'red': 2, 'blue': 2}
    """
    check_header("the table", list(frame.columns), columns)
    if frame.shape[1] == len(columns):
        raise TableError("the table has no columns except the targets; add feature columns")
    if drop_unlabelled and (lacking := int(frame[list(columns)].isna().any(axis=1).sum())):
        note(f"{lacking} of {len(frame)} rows lack a label and were dropped")
        frame = frame.dropna(subset=list(columns), ignore_index=True)
    y = indicators(frame[list(columns)])
    if rare := [name for name in y if min(y[name].sum(), (1 - y[name]).sum()) < 2]:
        raise TableError(
            f"every target must have at least two rows of 0 and two of 1, but {quoted(rare)} has fewer; leave it out"
        )
    return frame.drop(columns=list(columns)), y


def indicators(labels: pd.DataFrame) -> pd.DataFrame:
    """Columns of 0 and 1, or of true and false, as integers."""
    for name in labels:
        if not labels[name].isin([0, 1]).all():
            found = labels[name].unique().tolist()
            raise TableError(
                f"several targets must each be 0 or 1 in every row, but {name!r} holds {quoted(found, most=5)}; "
                "replace them, or drop rows without a label with --drop-unlabelled"
            )
    return labels.astype(np.int64)


def _alike(names: Sequence[str]) -> list[str]:
    """The first names that differ only in case and surrounding spaces.

    >>> _alike(["yes", "no", "Yes "])
    ['Yes ', 'yes']
    """
    groups = Counter(name.strip().casefold() for name in names)
    folded = next((name for name, count in groups.items() if count > 1), None)
    return sorted(name for name in names if name.strip().casefold() == folded)
