"""Check a table's file before pandas is imported: path, format, encoding, header and line lengths."""

import csv
import difflib
import gzip
import io
import re
import sys
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Literal, NoReturn, cast

TEXT = (".csv", ".tsv", ".tab", ".txt")
PARQUET = (".parquet", ".pq")
EXCEL, FEATHER, JSON_LINES = (".xlsx",), (".feather", ".arrow"), (".jsonl", ".ndjson")
TABS = (".tsv", ".tab")
SUFFIXES = (*TEXT, *PARQUET, *EXCEL, *FEATHER, *JSON_LINES)
HINTS = {
    **dict.fromkeys((".xls", ".xlsm", ".xlsb", ".ods"), "save it as .xlsx"),
    **dict.fromkeys((".zip", ".bz2", ".xz", ".zst", ".7z", ".tar"), "unpack it"),
    ".json": "save it as .jsonl, one object a line",
}
# First bytes of files that are not text.
BEGINNINGS = {
    b"PK\x03\x04": "is a zip archive or a workbook, not text; unpack it, or rename it to {path.stem}.xlsx",
    b"\x1f\x8b": "is compressed with gzip; rename it to {path.name}.gz",
    b"PAR1": "is a Parquet file, not text; rename it to {path.stem}.parquet",
    b"%PDF": "is a PDF document, not text; save the table in it as CSV",
}
Format = Literal["text", "parquet", "excel", "feather", "json lines"]
UTF8 = "utf-8-sig"  # with or without a byte order mark


class TableError(ValueError):
    """A file or table that cannot be used; the message is one sentence for the user."""


def quoted(names: Iterable[object], *, most: int = 10) -> str:
    """The first `most` names in quotes, and how many more there are."""
    listed = [repr(name) for name in names]
    return ", ".join(listed[:most]) + (f" and {len(listed) - most} more" if len(listed) > most else "")


def did_you_mean(wanted: str, options: Iterable[str]) -> str:
    """A question with the closest option, or nothing; case is ignored.

    >>> did_you_mean("Incme", ["age", "income"])
    "; did you mean 'income'?"
    """
    folded = {option.casefold(): option for option in options}
    near = difflib.get_close_matches(wanted.casefold(), folded, n=1, cutoff=0.6)
    return f"; did you mean {folded[near[0]]!r}?" if near else ""


def check_header(where: str, names: Sequence[str], wanted: Iterable[str] | None) -> None:
    """Raise if two columns have the same name, or a wanted column is missing."""
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise TableError(f"{where} has the column {quoted(twice)} more than once; rename or drop one")
    present = set(names)
    if lacking := [name for name in dict.fromkeys(wanted or ()) if name not in present]:
        hint = did_you_mean(str(lacking[0]), map(str, names)) if len(lacking) == 1 else "; check the names"
        raise TableError(f"{where} has no column {quoted(lacking)}, only {quoted(names)}{hint or '; check the name'}")


def file_format(path: Path) -> tuple[Format, str]:
    """Format of a file by its suffix, and the suffix without .gz.

    >>> file_format(Path("a.tsv.gz")), file_format(Path("b.xlsx"))
    (('text', '.tsv'), ('excel', '.xlsx'))
    """
    last = path.suffix.lower()
    suffix = Path(path.stem).suffix.lower() if last == ".gz" else last
    if suffix in TEXT:
        return "text", suffix
    formats: dict[Format, tuple[str, ...]] = {
        "parquet": PARQUET, "excel": EXCEL, "feather": FEATHER, "json lines": JSON_LINES
    }  # fmt: skip
    for name, suffixes in formats.items():
        if last in suffixes:
            return name, last
    hint = HINTS.get(last, "rename or convert it")
    raise TableError(
        f"{path} must end in {', '.join(SUFFIXES)} or one of the first four followed by .gz, got "
        f"{last or 'no suffix'}; {hint}"
    )


def check_file(path: Path) -> None:
    """Raise unless the file exists, is readable and is not empty."""
    try:
        with path.open("rb") as file:
            empty = not file.read(1)
    except IsADirectoryError:
        files = sorted(name for name in _names_in(path) if name.lower().endswith(SUFFIXES))
        hint = f"; it holds {quoted(files)}" if files else ""
        raise TableError(f"{path} is a folder, not a file{hint}") from None
    except (FileNotFoundError, NotADirectoryError):
        raise TableError(_no_such_file(path)) from None
    except PermissionError:
        raise TableError(f"{path} is not readable by this user; change its permissions, e.g. chmod u+r") from None
    except (OSError, ValueError) as error:  # a name too long, a null byte in it
        raise TableError(f"{str(path)!r} cannot be opened ({error}); check the name") from None
    if empty:
        raise TableError(f"{path} is empty; a header and rows are expected")


def check_is_text(path: Path, encoding: str | None = None) -> None:
    """Raise if a file starts like another format, or has the zero bytes of undeclared UTF-16."""
    with text_errors(path), open_bytes(path) as file:
        begin = file.read(1000)
    if hint := next((hint for start, hint in BEGINNINGS.items() if begin.startswith(start)), None):
        raise TableError(f"{path} {hint.format(path=path)}")
    if encoding is None and not begin.startswith((b"\xff\xfe", b"\xfe\xff")) and 4 * begin.count(0) > len(begin):
        order = "utf-16-le" if begin[1::2].count(0) > begin[::2].count(0) else "utf-16-be"
        raise TableError(
            f"{path} must be UTF-8 text, but looks like UTF-16; save it as UTF-8, or name its encoding: "
            f"--encoding {order}"
        )


def check_encoding(encoding: str | None) -> None:
    """Raise unless Python has this text encoding."""
    try:
        "".encode(encoding or UTF8)
    except LookupError:
        raise TableError(f"--encoding must name a text encoding such as utf-8 or cp1252, got {encoding!r}") from None


def check_source(path: Path, wanted: Iterable[str], encoding: str | None = None) -> None:
    """Run the checks that do not read the table: file, format, and for text the wanted columns."""
    check_encoding(encoding)
    check_file(path)
    kind, suffix = file_format(path)
    if kind == "text":
        check_is_text(path, encoding)
        encoding = encoding or detect_encoding(path)
        with text_errors(path):
            delimiter = "\t" if suffix in TABS else header_delimiter(path, encoding)
            header = read_header(path, delimiter, encoding)
        if len(header) == 1 and not {*wanted} <= {*header}:
            raise TableError(
                f"{path} has one column, {header[0]!r}; a header of names separated by , ; | or tabs is expected"
            )
        check_header(str(path), name_columns(header), wanted)


def name_columns(header: Sequence[str]) -> list[str]:
    """Give columns without a name one by their position.

    >>> name_columns(["", "age", " "])
    ['column_1', 'age', 'column_3']
    """
    return [name if name.strip() else f"column_{i}" for i, name in enumerate(header, 1)]


def _no_such_file(path: Path) -> str:
    if re.match(r"[a-z0-9]{2,}:/", str(path)):
        return f"{str(path).replace(':/', '://')} is a URL, but a local file is expected; download it first"
    if not path.parent.is_dir():
        return f"{path} does not exist, nor does its folder {path.parent}; check the path"
    hint = did_you_mean(path.name, _names_in(path.parent))
    return f"{path} does not exist{hint or f'; is {path.parent.resolve()} the right folder?'}"


def _names_in(folder: Path) -> list[str]:
    try:
        return [entry.name for entry in folder.iterdir()]
    except OSError:  # a folder may be entered and yet not listed
        return []


# -- delimited text ---------------------------------------------------------------------------------------------------


def open_bytes(path: Path) -> IO[bytes]:
    return cast(IO[bytes], gzip.GzipFile(path)) if path.suffix.lower() == ".gz" else path.open("rb")


def open_text(path: Path, encoding: str = UTF8) -> IO[str]:
    return io.TextIOWrapper(open_bytes(path), encoding=encoding, newline="")


def detect_encoding(path: Path) -> str:
    """UTF-16 if the file starts with its byte order mark, else UTF-8."""
    with text_errors(path), open_bytes(path) as file:
        return "utf-16" if file.read(2) in (b"\xff\xfe", b"\xfe\xff") else UTF8


def header_delimiter(path: Path, encoding: str = UTF8) -> str:
    """The most frequent of comma, semicolon, tab and vertical bar in the header, outside of quoted names."""
    with open_text(path, encoding) as file:
        line = re.sub(r'"[^"]*"', "", next((line for line in file if line.strip()), ""))
    return max(",;\t|", key=line.count)


def read_header(path: Path, delimiter: str, encoding: str = UTF8) -> list[str]:
    with open_text(path, encoding) as file:
        header = next((row for row in csv.reader(file, delimiter=delimiter) if row), None)
    if header is None:
        raise TableError(f"{path} is empty; a header and rows are expected")
    if any("\0" in name for name in header):
        raise TableError(f"{path} must be UTF-8 text, but looks like UTF-16 or a binary file; save it as UTF-8")
    return header


def check_rows(path: Path, delimiter: str, encoding: str = UTF8) -> None:
    """Raise for the first row whose number of fields differs from the header; reads the whole file."""
    limit = csv.field_size_limit(sys.maxsize)  # the default of 128 KiB would refuse a long entry
    try:
        try:
            _count_fields(path, delimiter, encoding, strict=True)
        except csv.Error as error:
            if "unexpected end of data" in str(error):
                raise TableError(f"{path} ends inside a quoted entry; close the quote or remove it") from None
            _count_fields(path, delimiter, encoding, strict=False)  # allow stray quotes, which Arrow and pandas accept
    finally:
        csv.field_size_limit(limit)


def _count_fields(path: Path, delimiter: str, encoding: str, *, strict: bool) -> None:
    width = 0
    with open_text(path, encoding) as file:
        reader = csv.reader(file, delimiter=delimiter, strict=strict)
        for row in reader:
            width = width or len(row)
            if row and len(row) != width:
                fields = "1 field" if len(row) == 1 else f"{len(row)} fields"
                raise TableError(
                    f"{path}, line {reader.line_num} has {fields} where the header has {width}; "
                    "correct it, or quote entries that contain the delimiter"
                )


@contextmanager
def text_errors(path: Path) -> Iterator[None]:
    """Turn the errors of reading a text file into a `TableError`."""
    try:
        yield
    except TableError:
        raise
    except UnicodeError:
        refuse_encoding(path)
    except (gzip.BadGzipFile, zlib.error, EOFError):
        raise TableError(f"{path} is not a gzip file or is damaged; compress it again") from None
    except (csv.Error, ValueError, OSError) as error:
        reason = str(error).strip().split("\n")[0].rstrip(".")
        raise TableError(f"{path} cannot be read as a table ({reason}); check its quotes") from None


def refuse_encoding(path: Path) -> NoReturn:
    """Raise an error that names the first byte that is not UTF-8."""
    with open_bytes(path) as file:
        for number, line in enumerate(file, 1):
            try:
                line.decode("utf-8")
            except UnicodeDecodeError as error:
                raise TableError(
                    f"{path} must be UTF-8 text, but has the byte 0x{line[error.start]:02x} in line {number}; save it "
                    "as UTF-8, or name its encoding, e.g. --encoding cp1252"
                ) from None
    raise TableError(f"{path} is UTF-8 text and cannot be read with another encoding; leave the encoding out") from None
