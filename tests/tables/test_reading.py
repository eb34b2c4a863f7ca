"""Files -> frames against pandas' reader, and every error message for files and targets."""

import csv
import gzip
import io
import os
from decimal import Decimal
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from evalign.tables import read
from evalign.tables.encode import TableEncoder
from evalign.tables.files import TableError
from evalign.tables.read import check_target, read_table

FRAME = pd.DataFrame(
    {
        "age": [30, 41, 22, 58],
        "pay": [1.5, np.nan, -3e-7, 1e300],
        "job": ["cook", "smith, master", 'the "great"', "two\nlines"],
        "fit": [True, False, True, True],
    }
)


@pytest.fixture
def write(tmp_path):
    def write(content, name="table.csv"):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write


def refusal(path, **options):
    """The sentence of the error, which is one line and names the file."""
    with pytest.raises(TableError) as error:
        read_table(path, **options)
    message = str(error.value)
    assert "\n" not in message
    return message.replace(str(path), path.name).replace(str(path.parent), "FOLDER")


# --- what is read


@pytest.mark.parametrize(
    "name", ["t.csv", "t.CSV", "t.csv.gz", "t.txt", "t.parquet", "t.pq", "semicolon.csv", "t.tsv", "t.tab", "tab.txt"]
)
def test_every_format_gives_the_same_frame(tmp_path, name):
    path = tmp_path / name
    if name.endswith(("parquet", "pq")):
        FRAME.to_parquet(path)
    else:
        FRAME.to_csv(
            path, index=False, sep=";" if "semicolon" in name else "\t" if "t.t" in name or "tab" in name else ","
        )
    pd.testing.assert_frame_equal(read_table(path), FRAME, check_exact=True)
    pd.testing.assert_frame_equal(read_table(str(path), ["job", "age"]), FRAME[["job", "age"]])


def test_a_tab_file_may_have_commas_in_its_header(write):
    for name in ("t.tsv", "t.tab"):
        assert list(read_table(write("a,b,c\td,e\n1\t2\n", name))) == ["a,b,c", "d,e"]
    assert list(read_table(write('"a,b,c";d\n1;2\n'))) == ["a,b,c", "d"]


def test_line_ends_byte_order_marks_and_blank_lines_are_no_matter(write):
    expected = pd.DataFrame({"a": [1, 3], "é": [2, 4]})
    text = "a,é\n1,2\n3,4\n"
    for content in (
        text,
        text.rstrip(),
        text.replace("\n", "\r\n"),
        text.replace("\n", "\r"),
        "\n" + text,
        text.replace("\n", "\n\n"),
        text.encode("utf-8-sig"),
    ):
        pd.testing.assert_frame_equal(read_table(write(content)), expected)


def test_missing_entries_leave_numbers_numbers(write):
    entries = ["", "NA", "N/A", "n/a", "#N/A", "<NA>", "NaN", "nan", "null", "NULL", "None", "?"]
    rows = "".join(f"{entry},x\n" for entry in entries) + "7, ?\n8, y\n"
    frame = read_table(write("a,b\n" + rows))
    assert frame["a"].tolist()[-2:] == [7, 8]
    assert frame["a"].isna().sum() == len(entries)
    assert frame["b"].isna().sum() == 1
    assert read_table(write("a\n?\nNA\n1\n"), missing=())["a"].tolist() == ["?", "NA", "1"]


def test_columns_named_as_text_stay_text(write):
    path = write("zip,n\n01234,1\n5,2\n")
    assert read_table(path, text=["zip", "none such"])["zip"].tolist() == ["01234", "5"]
    trained = TableEncoder().fit(read_table(write("zip,n\n01,1\nA2,2\n", "old.csv")))
    assert trained.text_columns_ == ["zip"]
    new = write("zip,n\n01,1\n02,2\n", "new.csv")
    with pytest.raises(ValueError, match="'zip' held text in training, got 1; pass the same kind"):
        trained.transform(read_table(new))
    assert trained.transform(read_table(new, text=trained.text_columns_))[:, :2].tolist() == [[1, 0], [0, 0]]


def test_row_numbers_of_pandas_and_r_are_left_out(tmp_path, write):
    FRAME.to_csv(tmp_path / "i.csv")
    FRAME.set_index(pd.Index([9, 7, 5, 3])).to_parquet(tmp_path / "i.parquet")
    for name in ("i.csv", "i.parquet"):
        pd.testing.assert_frame_equal(read_table(tmp_path / name), FRAME)
    assert list(read_table(write('"",a\n"1",2\n'))) == ["a"]
    FRAME.set_index("age").to_parquet(tmp_path / "named.parquet")  # an index with a name is data
    assert sorted(read_table(tmp_path / "named.parquet")) == sorted(FRAME)


def test_a_delimiter_at_every_lines_end_is_no_column(write):
    assert list(read_table(write("a,b,\n1,2,\n"))) == ["a", "b"]
    assert list(read_table(write("a,b,\n1,2,3\n"))) == ["a", "b", "column_3"]


def test_folders_named_like_partitions_add_no_column(tmp_path):
    folder = tmp_path / "split=train"
    folder.mkdir()
    FRAME.to_parquet(folder / "t.parquet")
    assert list(read_table(folder / "t.parquet")) == list(FRAME)


def test_a_type_that_changes_late_in_a_long_file_is_noticed(write):
    frame = read_table(write("a,b\n" + "1,2\n" * 600_000 + "0.5,x\n"))
    assert frame["a"].iloc[-1] == 0.5
    assert frame["b"].iloc[[0, -1]].tolist() == ["2", "x"]


def test_an_entry_longer_than_arrows_block_is_read_by_pandas(write, monkeypatch):
    calls, original = [], read.TextReader.read_with_pandas
    monkeypatch.setattr(read.TextReader, "read_with_pandas", lambda *a: calls.append(1) or original(*a))
    frame = read_table(write(f"z,a,b\n?,01,{'x' * 3_000_000}\n5,NA,y\n"), ["b", "a", "z"], text=["a"])
    assert calls
    assert list(frame) == ["b", "a", "z"]
    assert frame["a"].iloc[0] == "01"
    assert frame["a"].isna().tolist() == [False, True]
    assert frame["z"].isna().tolist() == [True, False]
    path = write(f"a,b\n{'x' * 3_000_000},1\n3\n")
    assert refusal(path).startswith("table.csv, line 3 has 1 field where the header has 2;")


ENTRY = st.one_of(st.integers(-(10**6), 10**6).map(str), st.text('ab,;"\n \té?', max_size=4))


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(ENTRY, ENTRY), min_size=1, max_size=6), st.sampled_from([csv.QUOTE_MINIMAL, csv.QUOTE_ALL]))
@example([("1", "x\n")], csv.QUOTE_MINIMAL)
def test_what_pandas_writes_is_read_back(tmp_path, rows, quoting):
    frame = pd.DataFrame(rows, columns=["first", "second"], dtype=object)
    path = tmp_path / "t.csv"
    frame.to_csv(path, index=False, quoting=quoting)
    out = read_table(path, text=["first", "second"], missing=())
    pd.testing.assert_frame_equal(out.astype(object), frame)


# --- files that are refused


def test_a_file_that_does_not_exist_and_its_neighbours(tmp_path, write):
    write("a\n1\n", "train.csv")
    assert refusal(tmp_path / "trian.csv") == "trian.csv does not exist; did you mean 'train.csv'?"
    assert refusal(tmp_path / "Train.CSV") == "Train.CSV does not exist; did you mean 'train.csv'?"
    assert refusal(tmp_path / "zzz.pq") == "zzz.pq does not exist; is FOLDER the right folder?"
    assert refusal(tmp_path / "no" / "a.csv") == "a.csv does not exist, nor does its folder FOLDER; check the path"
    assert refusal(tmp_path / "train.csv" / "a.csv").startswith("a.csv does not exist, nor does its folder")
    with pytest.raises(TableError, match=r"^https://x\.org/a\.csv is a URL, but a local file is expected"):
        read_table("https://x.org/a.csv")
    assert "cannot be opened (" in refusal(tmp_path / ("x" * 300 + ".csv"))
    with pytest.raises(TableError, match=r"cannot be opened .embedded null byte.; check the name"):
        read_table("\0.csv")


def test_a_folder_that_may_not_be_listed_gives_no_hint(tmp_path, monkeypatch):
    monkeypatch.setattr(Path, "iterdir", lambda self: (_ for _ in ()).throw(PermissionError()))
    assert refusal(tmp_path / "a.csv") == "a.csv does not exist; is FOLDER the right folder?"


def test_a_folder_is_no_file(tmp_path, write):
    (tmp_path / "sub").mkdir()
    assert refusal(tmp_path / "sub") == "sub is a folder, not a file"
    write("a\n1\n", "sub/train.csv")
    write("a\n1\n", "sub/notes.md")
    assert refusal(tmp_path / "sub") == "sub is a folder, not a file; it holds 'train.csv'"


def test_a_file_one_may_not_read(write, monkeypatch):
    path = write("a\n1\n")
    if os.geteuid():
        path.chmod(0)
    else:  # root may read everything

        def no(*_, **__):
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(Path, "open", no)
    assert refusal(path) == "table.csv is not readable by this user; change its permissions, e.g. chmod u+r"


@pytest.mark.parametrize(
    ("name", "suffix"), [("t.md", ".md"), ("t", "no suffix"), ("t.parquet.gz", ".gz"), ("t.gz", ".gz")]
)
def test_suffixes_that_are_not_known(write, name, suffix):
    message = refusal(write("a\n1\n", name))
    assert message.startswith(f"{name} must end in .csv, .tsv, .tab, .txt, .parquet, .pq, .xlsx, ")
    assert message.endswith(f"got {suffix}; rename or convert it")


def parquet(table):
    file = io.BytesIO()
    pq.write_table(table, file)
    return file.getvalue()


GOOD = parquet(pa.table({"a": [1, 2], "b": ["x", "y"]}))
EMPTY = "is empty; a header and rows are expected"
NO_ROWS = "has a header but no rows; is it the right file?"
QUOTE = "ends inside a quoted entry; close the quote or remove it"
NOT_GZIP = "is not a gzip file or is damaged; compress it again"
MEND = "; correct it, or quote entries that contain the delimiter"
AS_UTF8 = "; save it as UTF-8, or name its encoding, e.g. --encoding cp1252"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", f" {EMPTY}"),
        (b"\n\r\n", f" {EMPTY}"),
        (b"a,b", f" {NO_ROWS}"),
        (b"a,b\n", f" {NO_ROWS}"),
        (b"a,b,a\n1,2,3\n", " has the column 'a' more than once; rename or drop one"),
        (b"a,b\n1,2\n3\n", f", line 3 has 1 field where the header has 2{MEND}"),
        (b"a,b\n1,2\n\n3,4,5\n", f", line 4 has 3 fields where the header has 2{MEND}"),
        (b'a,b\n1,"x"y\n3\n', f", line 3 has 1 field where the header has 2{MEND}"),
        (b'a,b\n1,"x\n2,3\n4,5\n', f" {QUOTE}"),
        (b'a,"b\n1,2\n', f" {QUOTE}"),
        (b"a,b\n1,2\n3,caf\xe9\n", f" must be UTF-8 text, but has the byte 0xe9 in line 3{AS_UTF8}"),
        (b"caf\xe9,b\n1,2\n", f" must be UTF-8 text, but has the byte 0xe9 in line 1{AS_UTF8}"),
        (
            b"a,b\n" + b"1,2\n" * 9999 + b"\xff,2\n",
            f" must be UTF-8 text, but has the byte 0xff in line 10001{AS_UTF8}",
        ),
        (
            "a,b\n1,2\n".encode("utf-16-le"),
            " must be UTF-8 text, but looks like UTF-16; save it as UTF-8, or name its encoding: --encoding utf-16-le",
        ),
    ],
)
@pytest.mark.parametrize("zipped", [False, True])
def test_text_files_that_are_refused(write, content, message, zipped):
    path = write(gzip.compress(content), "table.csv.gz") if zipped else write(content)
    assert refusal(path) == path.name + message


def test_bytes_that_are_not_utf8_in_a_column_kept_as_text(write):
    assert "0xe9 in line 2" in refusal(write(b"a,b\n1,\xe9\n"), text=["b"])


def test_gzip_files_that_are_damaged(write):
    whole = gzip.compress(os.urandom(30_000).hex().encode())
    for content in (b"no gzip", whole[:-900], whole[:500] + b"\0\0\0" + whole[503:]):
        assert refusal(write(content, "t.csv.gz")) == f"t.csv.gz {NOT_GZIP}"


def test_a_quote_that_pandas_and_arrow_cannot_read(write, monkeypatch):
    def fail(*_, **__):
        raise pd.errors.ParserError("Error tokenizing data.\nmore of it")

    monkeypatch.setattr(read.TextReader, "read_with_pandas", fail)
    message = refusal(write(f"a,b\n{'x' * 3_000_000},1\n"))
    assert message == "table.csv cannot be read as a table (Error tokenizing data); check its quotes"


def test_columns_that_a_file_lacks(write):
    path = write("income,age\n1,2\n")
    assert (
        refusal(path, columns=["incme"])
        == "table.csv has no column 'incme', only 'income', 'age'; did you mean 'income'?"
    )
    assert refusal(path, columns=["zzz"]) == "table.csv has no column 'zzz', only 'income', 'age'; check the name"
    assert refusal(write(GOOD, "t.pq"), columns=["A"]) == "t.pq has no column 'A', only 'a', 'b'; did you mean 'a'?"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", f"{EMPTY}"),
        (b"a,b\n1,2\n", "is not a Parquet file or is damaged (Parquet magic bytes not found"),
        (GOOD[:-20], "is not a Parquet file or is damaged ("),
        (GOOD[:4] + bytes(40) + GOOD[44:], "is not a Parquet file or is damaged ("),
        (parquet(pa.table({"a": pa.array([], pa.int64())})), NO_ROWS),
        (parquet(pa.table([[1], [2]], names=["a", "a"])), "has the column 'a' more than once; rename or drop one"),
    ],
)
def test_parquet_files_that_are_refused(write, content, message):
    assert refusal(write(content, "t.parquet")).startswith(f"t.parquet {message}")


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_damaged_file_is_read_or_refused_in_one_line(tmp_path, data):
    name, whole = data.draw(st.sampled_from([("t.parquet", GOOD), ("t.csv", FRAME.to_csv().encode())]))
    content = bytearray(whole)
    for place, byte in data.draw(st.lists(st.tuples(st.integers(0, len(whole) - 1), st.integers(0, 255)), max_size=5)):
        content[place] = byte
    path = tmp_path / name
    path.write_bytes(content[: data.draw(st.integers(0, len(whole)))])
    message = ""
    try:
        read_table(path)
    except TableError as error:
        message = str(error)
    assert "\n" not in message


# --- the target


def table(labels, **more):
    return pd.DataFrame({"f": range(len(labels)), "label": labels, **more})


@pytest.mark.parametrize(
    ("labels", "dtype"),
    [
        (["no", "yes"] * 3, object),
        ([0, 1, 2] * 2, np.int64),
        ([0.0, 1.0] * 3, np.float64),
        ([True, False] * 3, bool),
        (pd.Series([1, 2] * 3, dtype="Int64"), np.int64),
        (pd.Series([True, False] * 3, dtype=object), bool),
        (pd.Categorical(["u", "v"] * 3), object),
        (pd.Categorical([1, 2] * 3), np.int64),
        ([Decimal(1), Decimal(2)] * 3, np.float64),
    ],
)
def test_features_and_labels_are_split(labels, dtype):
    frame = table(labels, g="x")
    X, y = check_target(frame, "label")
    assert list(X) == ["f", "g"]
    assert y.dtype == dtype
    assert y.tolist() == list(labels)
    assert list(frame) == ["f", "label", "g"]


def test_many_numbers_are_classes_while_each_has_rows():
    assert len(np.unique(check_target(table(np.repeat(np.arange(100), 6)), "label")[1])) == 100
    assert len(np.unique(check_target(table(np.repeat(np.arange(30), 5)), "label")[1])) == 30
    assert len(np.unique(check_target(table(np.repeat(np.arange(20), 2)), "label")[1])) == 20


MISSING_LABEL = r"; drop them with --drop-unlabelled$"


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        (
            table([0, 1]).rename(columns={"label": "Label"}),
            r"^the table has no column 'label', only 'f', 'Label'; did you mean 'Label'\?$",
        ),
        (
            pd.DataFrame(np.eye(12), columns=[f"c{j}" for j in range(12)]),
            "'c9' and 2 more; check the name$",
        ),
        (
            pd.DataFrame([[1, 2, 3]], columns=["label", "f", "label"]),
            "^the table has the column 'label' more than once",
        ),
        (
            pd.DataFrame({"label": [0, 1]}),
            "^the table has no column except the target 'label'; add feature columns$",
        ),
        (
            table(["a", None, "b"]),
            f"^the target 'label' must have a label in every row, but 1 row has none{MISSING_LABEL}",
        ),
        (table([1.0, np.nan, np.nan]), f"every row, but 2 of 3 rows have none{MISSING_LABEL}"),
        (table([None, None]), "^the target 'label' has no label in any row; is it the right column\\?$"),
        (table(["a", "a"]), "^the target 'label' must have at least two classes, but has only 'a'$"),
        (table([7, 7]), "at least two classes, but has only 7$"),
        (
            table(["a", "b", "a"]),
            "^every class of the target 'label' must have at least 2 rows, but 'b' has fewer; add rows, or merge",
        ),
        (table([1, 2, 3, 3]), "must have at least 2 rows, but 1, 2 have fewer"),
        (
            table([0.5, 1.0] * 9),
            "^the target 'label' looks like a regression target, with 2 different numbers in 18 rows; bin it",
        ),
        (table([*range(21)] * 2), "looks like a regression target, with 21 different numbers in 42 rows"),
        (table(range(21)), "looks like a regression target, with 21 different numbers in 21 rows"),
        (table([0.0, np.inf] * 2), "looks like a regression target"),
        (table(pd.date_range("2020", periods=2)), "column 'label' holds dates"),
        (table([[1], [2]]), "column 'label' holds list values"),
        (table([1, "a"]), "column 'label' mixes int and str values"),
    ],
)
def test_targets_that_are_refused(frame, message):
    with pytest.raises(ValueError, match=message) as error:
        check_target(frame, "label")
    assert "\n" not in str(error.value)


def test_the_least_number_of_rows_of_a_class_is_an_option():
    frame = table(["a"] * 4 + ["b"] * 3)
    check_target(frame, "label", min_rows=3)
    with pytest.raises(TableError, match="must have at least 4 rows, but 'b' has fewer"):
        check_target(frame, "label", min_rows=4)
