"""Numbers and dates written as text against what pandas reads them as; what is not certain stays text, with a note."""

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evalign.tables.files import TableError
from evalign.tables.formats import NumberFormat, expand_dates
from evalign.tables.read import check_target, read_table


def read(tmp_path, text, name="t.csv", **options):
    path = tmp_path / name
    path.write_text(text)
    notes = []
    return read_table(path, note=notes.append, **options), notes


@pytest.mark.parametrize(
    ("entries", "numbers", "said"),
    [
        (["1,5", "22,75", "3"], [1.5, 22.75, 3], "a decimal comma"),
        (["12,345", "1,222", "7"], [12345, 1222, 7], "',' between thousands"),
        (["1,234.5", "2,000,000", "7"], [1234.5, 2e6, 7], "',' between thousands"),
        (["1.234,5", "2.000.000", "7"], [1234.5, 2e6, 7], "'.' between thousands"),
        (["0,345", "1,222"], [0.345, 1.222], "a decimal comma"),  # no thousands start with 0
        (["1 234", "1 234 567,5"], [1234, 1234567.5], "' ' between thousands"),
        (["1'234", "56"], [1234, 56], '"\'" between thousands'),
        (["12.3%", "-4%"], [12.3, -4], "the unit %"),
        (["$5", "-$1,250.50", "7"], [5, -1250.5, 7], "the unit $"),
        (["5 €", "1,50 €"], [5, 1.5], "the unit €"),
        (["USD 5", "USD 7.5"], [5, 7.5], "the unit USD"),
        (["1", "n/a?", "3.5", "-"], [1, np.nan, 3.5, np.nan], "'n/a?', '-' for missing values in 2 rows"),
        (["($1,250.50)", "$7"], [-1250.5, 7], "the unit $"),
        (["12,34,567", "1,23,456.5"], [1234567, 123456.5], "',' between thousands"),
        (["12.5 kg", "7kg", "?"], [12.5, 7, np.nan], "the unit kg"),
        (["1", "#DIV/0!", "3"], [1, np.nan, 3], "'#DIV/0!' for missing values in 1 row"),
    ],
)
def test_numbers_are_converted_with_a_note(tmp_path, entries, numbers, said):
    text = "a,b\n" + "".join(f'"{entry}",x\n' for entry in entries)
    frame, notes = read(tmp_path, text)
    np.testing.assert_array_equal(frame["a"].to_numpy(dtype=float), numbers)
    assert any(said in note for note in notes), notes


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a;b\n12,345;x\n1,222;y\n", "may be a decimal or a thousands separator"),
        ("a,b\n1,x\n2,x\n3,x\n4,x\n5,x\nbroken,x\n", "numbers in 83% of its rows but also text such as 'broken'"),
        ("a,b\n$5,x\n€6,x\n", "mixes units"),
        ("a,b\n5%,x\n6,x\n", "mixes units"),
        ("a,b\n01/02/2024,x\n03/04/2024,x\n", "day and month are ambiguous"),
        ("a,b\n01/02/24,x\n03/04/24,x\n", "day and month are ambiguous"),
        (
            "a,b\n" + "2024-01-31,x\n" * 9 + "0000-00-00,x\n",
            "dates in 90% of its rows but also text such as '0000-00-00'",
        ),
        ("a,b\n" + "31.01.2024,x\n" * 9 + "soon,x\n", "dates in 90% of its rows but also text such as 'soon'"),
        ('a,b\n"1,5",x\n2.5,x\n', "writes numbers in several ways, such as '1,5' and '2.5'"),
        ("a,b\n1,x\n2,x\n3,x\n<5,x\n>9,x\n", "numbers in 60% of its rows but also text such as '<5'"),
    ],
)
def test_what_is_not_certain_stays_text_with_a_note(tmp_path, text, said):
    frame, notes = read(tmp_path, text)
    assert pd.api.types.is_string_dtype(frame["a"])
    assert [said in note for note in notes] == [True]


@pytest.mark.parametrize(
    "entries",
    [
        ["red", "blue"],
        ["1-2", "3-4"],
        ["1.2.3", "2.0.1"],
        ["A1", "B2"],
        ["1st", "2nd"],
        ["12A", "7"],
        ["10.0.0.1", "10.0.0.2"],
    ],
)
def test_categories_stay_categories_without_a_note(tmp_path, entries):
    frame, notes = read(tmp_path, "a,b\n" + "".join(f"{entry},x\n" for entry in entries))
    assert frame["a"].tolist() == entries
    assert notes == []


def test_one_decimal_comma_tells_how_the_other_columns_are_meant(tmp_path):
    frame, notes = read(tmp_path, "a;b;c\n1,5;1.234;x\n2,25;12.500;y\n")
    assert frame["b"].tolist() == [1234, 12500]
    assert "decimal comma, as in column 'a'" in notes[0]
    frame, _ = read(tmp_path, "a;b\n1,5;0.5\n2,25;0.7\n")  # a column that has points for certain keeps them
    assert (frame["a"].tolist(), frame["b"].tolist()) == ([1.5, 2.25], [0.5, 0.7])
    frame, _ = read(tmp_path, "a;b\n12,345;x\n1,222;y\n", decimal=",")
    assert frame["a"].tolist() == [12.345, 1.222]
    with pytest.raises(TableError, match="decimal separator must be"):
        read(tmp_path, "a\n1\n", decimal=";")


def test_rows_to_predict_are_read_as_in_training(tmp_path):
    trained, _ = read(tmp_path, 'a,day\n"1.234,5",31.12.2024\n"7,25",01.02.2024\n')
    alone, _ = read(tmp_path, "a,day\n1.234,01.02.2024\n", formats=trained.attrs["formats"])
    assert alone["a"].tolist() == [1234]
    us, _ = read(tmp_path, "day,b\n12/31/2024,x\n", "us.csv")
    alone, _ = read(tmp_path, "day,b\n01/02/2024,x\n", formats=us.attrs["formats"])
    assert alone["day"][0] == pd.Timestamp("2024-01-02")


def test_another_unit_than_in_training_is_refused(tmp_path):
    trained, _ = read(tmp_path, "a,b\n$5,50%\n7,12%\n")
    formats = trained.attrs["formats"]
    same, _ = read(tmp_path, "a,b\n6,5%\n", formats=formats)
    assert (same["a"].tolist(), same["b"].tolist()) == ([6], [5])
    with pytest.raises(TableError, match="'a' had the unit \\$ in training, but has € here"):
        read(tmp_path, "a,b\n€6,5%\n", formats=formats)
    for entry in ("0.05", '"1,5"'):  # 5 % or a twentieth of it?
        with pytest.raises(TableError, match=r"'b' .*%.* in training"):
            read(tmp_path, f"a,b\n6,{entry}\n", formats=formats)


@pytest.mark.parametrize(
    ("dates", "first"),
    [
        (["01 Feb 2024", "28 Mar 2024"], "2024-02-01"),
        (["1-Feb-24", "28-Mar-24"], "2024-02-01"),
        (["Feb 1, 2024", "March 28, 2024"], None),  # two formats
        (["February 1, 2024", "March 28, 2024"], "2024-02-01"),
        (["02/01/2024 01:30 PM", "03/28/2024 02:30 AM"], "2024-02-01 13:30"),
        (["2/1/24", "3/28/24"], "2024-02-01"),
        (["28/3/24", "1/2/24"], "2024-03-28"),
        (["2024-02", "2023-11"], "2024-02-01"),
    ],
)
def test_dates_as_people_write_them(tmp_path, dates, first):
    frame, _ = read(tmp_path, "a,b\n" + "".join(f'"{date}",x\n' for date in dates))
    assert frame["a"].tolist()[0] == (dates[0] if first is None else pd.Timestamp(first))


def test_words_among_dates_are_missing_values(tmp_path):
    frame, notes = read(tmp_path, "day,b\n31.01.2024,x\nunknown,x\n29.02.2024,x\n-,x\n")
    assert frame["day"].tolist() == [pd.Timestamp("2024-01-31"), pd.NaT, pd.Timestamp("2024-02-29"), pd.NaT]
    assert notes == ["column 'day' was read as dates with 'unknown', '-' for missing values in 2 rows"]
    alone, _ = read(tmp_path, "day,b\n01.02.2024,x\nn/a?,x\n", formats=frame.attrs["formats"])
    assert alone["day"].tolist() == [pd.Timestamp("2024-02-01"), pd.NaT]


def test_dates_as_labels_are_classes(tmp_path):
    frame, _ = read(tmp_path, "a,day\n" + "1,2024-01-31\n2,2024-02-29\n" * 2, labels="day")
    assert check_target(frame, "day")[1].tolist() == ["2024-01-31", "2024-02-29"] * 2


@given(st.lists(st.integers(-(10**9), 10**9).map(lambda n: n / 100), min_size=1), st.sampled_from([",.", ".,", " ,"]))
def test_any_number_is_read_back(numbers, separators):
    thousands, decimal = separators
    texts = [f"{n:,.2f}".translate(str.maketrans({",": thousands, ".": decimal})) for n in numbers]
    assert NumberFormat(decimal, thousands).parse(pd.Series(texts)).tolist() == numbers


def test_dates_become_numbers():
    dates = pd.to_datetime(pd.Series(["2024-02-29 18:30", None, "1969-12-31 06:00"]))
    expanded = expand_dates(pd.DataFrame({"when": dates, "n": [1, 2, 3]}))
    assert list(expanded) == ["when:days", "when:month", "when:day", "when:weekday", "when:hour", "n"]
    assert expanded["when:days"].tolist()[::2] == pytest.approx([19782 + 18.5 / 24, -0.75])
    assert expanded["when:hour"].tolist()[::2] == [18.5, 6]
    assert expanded["when:weekday"].tolist()[::2] == [3, 2]
    assert expanded.iloc[1, :5].isna().all()
    as_trained = expand_dates(pd.DataFrame({"when": dates}), features=["when:days", "when:month"])
    assert list(as_trained) == ["when:days", "when:month"]
    plain = pd.DataFrame({"n": [1]})
    assert expand_dates(plain) is plain
    monthly = pd.DataFrame({"when": pd.to_datetime(["2024-02-01", "2024-03-01"])})  # the day tells nothing
    assert list(expand_dates(monthly)) == ["when:days", "when:month"]


def test_columns_that_held_dates_in_training():
    features = ["when:days", "when:month", "n"]
    unknown = expand_dates(pd.DataFrame({"when": [None, None], "n": [1, 2]}), features=features)
    assert list(unknown) == features
    assert unknown[["when:days", "when:month"]].isna().all(axis=None)
    written = expand_dates(pd.DataFrame({"when": ["1970-02-02", None], "n": [1, 2]}), features=features)
    assert written["when:days"].tolist()[:1] == [32]  # of a Parquet file, whose text is not converted
    with pytest.raises(TableError, match="'when' held dates in training, but holds 'soon' here; write dates as YYYY"):
        expand_dates(pd.DataFrame({"when": [None, "soon"], "n": [1, 2]}), features=features)
    with pytest.raises(TableError, match="has no column 'when'"):
        expand_dates(pd.DataFrame({"n": [1, 2]}), features=features)
    assert list(expand_dates(pd.DataFrame({"when:days": [1], "when:month": [2]}), features=features)) == features[:2]


def test_times_of_day_and_time_spans_become_seconds(tmp_path):
    frame, _ = read(tmp_path, "t,b\n12:30:00,x\n00:00:01,y\n")
    assert expand_dates(frame)["t"].tolist() == [45000, 1]
    assert expand_dates(pd.DataFrame({"t": pd.to_timedelta(["90s", None])}))["t"].tolist()[0] == 90


def test_columns_without_a_name(tmp_path):
    frame, notes = read(tmp_path, ",a,\n5,1,7\n3,2,8\n")
    assert list(frame) == ["a", "column_3"]
    assert notes == [
        "the first column has no name and numbers the rows; it was ignored",
        "column 3 has no name in the header; it is used as 'column_3'",
    ]
    frame, notes = read(tmp_path, ",a,\nred,1,\nblue,2,\n")
    assert list(frame) == ["column_1", "a"]  # an empty one is a delimiter at the line's end
    assert len(notes) == 1


def test_labels_that_differ_in_spelling_stay_apart(tmp_path):
    text = "y,x\n" + "001,1\n01,2\n1,3\n" * 3
    frame, _ = read(tmp_path, text, labels="y")
    assert sorted(set(check_target(frame, "y")[1])) == ["001", "01", "1"]
    assert read(tmp_path, text.replace("001", "2").replace("01", "3"), labels="y")[0]["y"].dtype.kind == "i"


def test_fractions_are_classes_if_it_is_said():
    frame = pd.DataFrame({"y": [0.5, 1.5, 2.0] * 4, "x": range(12)})
    with pytest.raises(TableError, match="--task classification"):
        check_target(frame, "y")
    assert sorted(set(check_target(frame, "y", classification=True)[1])) == ["0.5", "1.5", "2.0"]


def test_rows_without_a_label_are_dropped_if_it_is_said():
    frame, notes = pd.DataFrame({"y": ["a", "b", None, "a", "b"], "x": range(5)}), []
    with pytest.raises(TableError, match="--drop-unlabelled"):
        check_target(frame, "y")
    X, y = check_target(frame, "y", drop_unlabelled=True, note=notes.append)
    assert (X["x"].tolist(), y.tolist()) == ([0, 1, 3, 4], ["a", "b", "a", "b"])
    assert notes == ["1 of 5 rows have no label and were dropped"]


FRAME = pd.DataFrame({"a": [1, 2], "b": ["x", "y"], "day": pd.to_datetime(["2024-01-01", "2024-02-01"])})


def test_other_formats_give_the_same_frame(tmp_path):
    FRAME.to_feather(tmp_path / "t.feather")
    FRAME.to_json(tmp_path / "t.jsonl", orient="records", lines=True, date_format="iso")
    pytest.importorskip("openpyxl")
    FRAME.to_excel(tmp_path / "t.xlsx", index=False)
    for name in ("t.feather", "t.jsonl", "t.xlsx"):
        pd.testing.assert_frame_equal(expand_dates(read_table(tmp_path / name)), expand_dates(FRAME), check_dtype=False)
        assert list(read_table(tmp_path / name, ["b", "a"])) == ["b", "a"]


def test_other_formats_that_are_refused(tmp_path, monkeypatch):
    for name, words in {"t.xlsx": "Excel workbook", "t.feather": "Feather file", "t.jsonl": "JSON lines"}.items():
        (tmp_path / name).write_text("nonsense")
        with pytest.raises(TableError, match=f"{words} or is damaged"):
            read_table(tmp_path / name)
    (tmp_path / "t.xls").write_text("old")
    with pytest.raises(TableError, match=r"save it as \.xlsx"):
        read_table(tmp_path / "t.xls")
    monkeypatch.setitem(__import__("sys").modules, "openpyxl", None)
    with pytest.raises(TableError, match=r"pip install 'evalign\[excel\]'"):
        read_table(tmp_path / "t.xlsx")


def test_encodings(tmp_path):
    path = tmp_path / "t.csv"
    for encoding, given_ in {"cp1252": "cp1252", "utf-16": None, "utf-8": None}.items():
        path.write_bytes("näme,b\nü,1\n".encode(encoding))
        assert read_table(path, encoding=given_).to_dict("list") == {"näme": ["ü"], "b": [1]}
    with pytest.raises(TableError, match="--encoding must name"):
        read_table(path, encoding="klingon")
