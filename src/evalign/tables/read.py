"""A CSV, TSV or Parquet file -> a data frame; a data frame -> features and labels; each error is one sentence.

Nothing in a file is executed: CSV is text, and Parquet is read by Arrow, which has no pickled types since 14.0.1.
"""

import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet
from numpy.typing import NDArray

from evalign.tables.columns import TableError as TableError
from evalign.tables.columns import check_header, column_kind, did_you_mean, quoted
from evalign.tables.delimited import read_text, to_pandas

TEXT = (".csv", ".tsv", ".tab", ".txt")
PARQUET = (".parquet", ".pq")
INDEX = re.compile(r"__index_level_\d+__")  # what pandas calls row numbers
# "?" is what the UCI files write. As text it would turn a column of numbers into one of categories.
MISSING = ("", "NA", "N/A", "n/a", "#N/A", "<NA>", "NaN", "nan", "null", "NULL", "None", "?")


def read_table(
    path: str | Path,
    columns: Sequence[str] | None = None,
    *,
    text: Collection[object] = (),
    missing: Sequence[str] = MISSING,
) -> pd.DataFrame:
    """Read a table by its suffix: .csv and .txt (comma, semicolon or tab, as the header has it), .tsv and .tab, all
    also with .gz behind; .parquet and .pq.

    `columns` are those to read, in this order. `text` are columns to keep as text though they look like numbers: pass
    `TableEncoder.text_columns_` when reading what is to be predicted. `missing` are the entries of a text file that
    stand for no value; Parquet has its own. Row numbers that pandas or R wrote, which is what a first column without
    a name holds, are left out.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp(), "people.csv")
    >>> _ = path.write_text("age,job\\n30,cook\\n?,smith\\n")
    >>> read_table(path).isna().sum().to_dict()
    {'age': 1, 'job': 0}
    """
    path = Path(path)
    check_file(path)
    last = path.suffix.lower()
    suffix = Path(path.stem).suffix.lower() if path.suffix == ".gz" else last
    if last in PARQUET:
        frame = read_parquet(path, columns)
    elif suffix in TEXT:
        frame = read_text(path, columns, suffix, text, missing)
    else:
        raise TableError(
            f"{path} must end in {', '.join(TEXT + PARQUET)} or .gz after one of the first four, "
            f"got {last or 'no suffix'}; rename or convert it"
        )
    if "" in frame and frame[""].isna().all():  # a delimiter at the end of every line
        frame = frame.drop(columns="")
    if not len(frame):
        raise TableError(f"{path} has a header but no rows; is it the right file?")
    return frame


def check_file(path: Path) -> None:
    """There must be a file that this user may read, and it must hold something."""
    try:
        with path.open("rb") as file:
            empty = not file.read(1)
    except IsADirectoryError:
        files = sorted(name for name in _names_in(path) if name.lower().endswith((*TEXT, *PARQUET)))
        hint = f"; it holds {quoted(files)}" if files else ""
        raise TableError(f"{path} is a folder, a file is expected{hint}") from None
    except (FileNotFoundError, NotADirectoryError):
        raise TableError(_no_such_file(path)) from None
    except PermissionError:
        raise TableError(f"{path} may not be read by this user; change its permissions, e.g. chmod u+r") from None
    except (OSError, ValueError) as error:  # a name too long, a null byte in it
        raise TableError(f"{str(path)!r} cannot be opened ({error}); check the name") from None
    if empty:
        raise TableError(f"{path} is empty; a header and rows are expected")


def _no_such_file(path: Path) -> str:
    if re.match(r"[a-z0-9]{2,}:/", str(path)):
        return f"{str(path).replace(':/', '://')} is an address, a file on this machine is expected; download it first"
    if not path.parent.is_dir():
        return f"{path} does not exist, nor does its folder {path.parent}; check the path"
    hint = did_you_mean(path.name, _names_in(path.parent))
    return f"{path} does not exist{hint or f'; is {path.parent.resolve()} the right folder?'}"


def _names_in(folder: Path) -> list[str]:
    try:
        return [entry.name for entry in folder.iterdir()]
    except OSError:  # a folder may be entered and yet not listed
        return []


def read_parquet(path: Path, columns: Sequence[str] | None) -> pd.DataFrame:
    try:
        # Not pyarrow's `read_table`: it would take folders named key=value on the way for columns.
        with pa.parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            check_header(str(path), names, columns)
            wanted = list(columns) if columns is not None else [name for name in names if not INDEX.fullmatch(name)]
            frame = to_pandas(file.read(columns=wanted))
    except TableError:
        raise
    except (pa.ArrowException, OSError, ValueError) as error:
        reason = str(error).strip().split("\n")[0].rstrip(".")
        raise TableError(f"{path} is not a Parquet file or is damaged ({reason}); write it anew") from None
    return frame[wanted]


def check_target(frame: pd.DataFrame, column: str, *, min_rows: int = 2) -> tuple[pd.DataFrame, NDArray[Any]]:
    """Split a table into features and labels; every class must have `min_rows` rows, to train on and to check with.

    >>> X, y = check_target(pd.DataFrame({"age": [1, 2, 3, 4], "sick": ["no", "yes", "no", "yes"]}), "sick")
    >>> list(X.columns), y.tolist()
    (['age'], ['no', 'yes', 'no', 'yes'])
    """
    check_header("the table", list(frame.columns), [column])
    if frame.shape[1] == 1:
        raise TableError(f"the table has no column but the target {column!r}; features are expected beside it")
    labels = frame[column]
    kind = column_kind(labels, column)
    if lacking := int(labels.isna().sum()):
        rows = "1 row has" if lacking == 1 else f"{lacking} of {len(labels)} rows have"
        raise TableError(
            f"the target {column!r} must have a label in every row, {rows} none; "
            "drop them, or choose what counts as missing if an entry such as None is a class"
        )
    y = labels.infer_objects().to_numpy()
    if kind == "number" and y.dtype.kind not in "iuf":  # categories, decimals
        y = np.asarray(y, dtype=np.float64)
    codes, classes = pd.factorize(y)
    counts = np.bincount(codes)
    # A class with five rows on average can hardly be learned; numbers that many are amounts, not classes.
    amounts = len(classes) > max(20, len(y) / 5)
    if y.dtype.kind == "f":
        amounts |= not (np.isfinite(classes) & (classes == np.rint(classes))).all()
    if kind == "number" and amounts:
        raise TableError(
            f"the target {column!r} looks like regression, {len(classes)} different numbers in {len(y)} rows; "
            "classes are expected: cut it into ranges first"
        )
    if len(classes) < 2:
        raise TableError(f"the target {column!r} must have two classes or more, it has only {quoted(classes.tolist())}")
    if (counts < min_rows).any():
        rare = classes[counts < min_rows].tolist()
        raise TableError(
            f"every class of the target {column!r} must have {min_rows} rows or more, "
            f"{quoted(rare)} {'has' if len(rare) == 1 else 'have'} fewer; add rows, or merge or drop the class"
        )
    return frame.drop(columns=column), y
