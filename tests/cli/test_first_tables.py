"""Realistic tables through fit and predict: formats, dates, labels, leaks, folders of Parquet files."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from commands import FAST, Said, animals, assert_refused, call


def fit(path: Path, *options: object) -> Said:
    return call("fit", path, "-t", "kind", "-o", path.parent / "run", *FAST, *options)


def result(folder: Path) -> dict:
    return dict(json.loads((folder / "run" / "result.json").read_text()))


def test_odd_numbers_and_dates_are_used_alike_in_fit_and_predict(tmp_path: Path) -> None:
    plain = animals()
    plain["income"] = (1000 * (plain["weight"] + 5)).round(2)
    odd = plain.assign(
        income=[f"{value:,.2f}".translate(str.maketrans(",.", ".,")) for value in plain["income"]],
        share=[f"{abs(value):.1f}%" for value in plain["height"]],
        price=[f"${abs(value):.2f}" for value in plain["weight"]],
        day=[f"{i % 28 + 1:02d}.{i % 12 + 1:02d}.2024" for i in range(len(plain))],
    )
    odd.to_csv(tmp_path / "train.csv", index=False)
    said = fit(tmp_path / "train.csv")
    assert said.code == 0, said.err
    for words in ("'income' was read as numbers", "the unit %", "the unit $", "the dates in 'day'"):
        assert words in said.err
    kinds = {column["name"]: column["kind"] for column in result(tmp_path)["columns"]}
    assert set(kinds) == {"weight", "height", "colour", "income", "share", "price",
                          "day:days", "day:month", "day:day", "day:weekday"}  # fmt: skip
    assert [name for name, kind in kinds.items() if kind != "number"] == ["colour"]
    assert {row["column"] for row in result(tmp_path)["importance"]} == set(kinds)
    assert result(tmp_path)["profile"]["suspected leaks"] == "none"
    # One row alone could be read in other ways: "1.234,00" without a comma is 1.234.
    one = odd.head(1).assign(income="6.000", day="01.02.2024")
    one.to_csv(tmp_path / "one.csv", index=False)
    said = call("predict", tmp_path / "run", tmp_path / "one.csv")
    assert said.code == 0, said.err
    one.assign(income="6.000,00").to_csv(tmp_path / "same.csv", index=False)
    assert call("predict", tmp_path / "run", tmp_path / "same.csv").out == said.out


def test_labels_are_kept_as_written(tmp_path: Path) -> None:
    frame = animals(90)
    frame["kind"] = np.tile(["001", "01", "1"], 30)
    frame.to_csv(tmp_path / "train.csv", index=False)
    assert fit(tmp_path / "train.csv", "-q").code == 0
    assert result(tmp_path)["classes"] == ["001", "01", "1"]
    said = call("predict", tmp_path / "run", tmp_path / "train.csv", "--target", "kind", "--no-proba")
    assert set(said.out.split()[1:]) <= {"001", "01", "1"}


def test_fractions_are_labels_if_it_is_said(tmp_path: Path) -> None:
    frame = animals(90)
    frame["kind"] = np.tile([0.5, 1.5, 2.0], 30)
    frame.to_csv(tmp_path / "train.csv", index=False)
    assert_refused(fit(tmp_path / "train.csv"), "--task classification")
    assert fit(tmp_path / "train.csv", "--task", "classification", "-q").code == 0
    assert result(tmp_path)["classes"] == ["0.5", "1.5", "2.0"]


@pytest.mark.parametrize("name", ["train.csv", "train.xlsx"])
def test_words_for_missing_values_are_classes_of_a_target_of_words(tmp_path: Path, name: str) -> None:
    frame = animals().replace({"kind": {"cat": "None", "dog": "severe"}})
    frame.loc[:5, "height"] = None
    path = tmp_path / name
    write = frame.to_csv if name.endswith("csv") else frame.to_excel
    write(path, index=False, na_rep="NA")
    said = call("fit", path, "-t", "kind", "-o", tmp_path / "run", *FAST, "--test", path_of_others(tmp_path, frame))
    assert said.code == 0, said.err
    assert "the target 'kind' has the class 'None'; if that means no label, add --drop-unlabelled" in said.err
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert set(result["data"]["classes"]) == {"None", "severe"}
    assert result["profile"]["missing values"].startswith("6 of")
    said = call("predict", tmp_path / "run", path, "-t", "kind", "-o", tmp_path / "p.csv")
    assert said.code == 0, said.err
    assert set(pd.read_csv(tmp_path / "p.csv", keep_default_na=False)["prediction"]) <= {"None", "severe"}
    for option in (["--drop-unlabelled"], ["--na", "None", "--drop-unlabelled"]):
        said = call("fit", path, "-t", "kind", "-o", tmp_path / "no", *FAST, *option)
        assert_refused(Said(said.code, said.out, said.err.split("dropped\n")[-1]), "at least two classes")
    numbers = frame.replace({"kind": {"severe": "1"}})
    numbers.to_csv(tmp_path / "numbers.csv", index=False)  # among numbers a word is no class
    assert_refused(call("fit", tmp_path / "numbers.csv", "-t", "kind", "-o", tmp_path / "no"), "rows have none")


def path_of_others(folder: Path, frame: pd.DataFrame) -> Path:
    """A test file of the same classes."""
    frame.iloc[::-1].head(60).to_csv(folder / "others.csv", index=False)
    return folder / "others.csv"


def test_rows_without_a_label_are_dropped_if_it_is_said(tmp_path: Path) -> None:
    frame = animals(100)
    frame.loc[:4, "kind"] = None
    frame.to_csv(tmp_path / "train.csv", index=False)
    assert_refused(fit(tmp_path / "train.csv"), "--drop-unlabelled")
    assert "5 of 100 rows have no label" in fit(tmp_path / "train.csv", "--drop-unlabelled").err
    assert result(tmp_path)["data"]["rows"] == 95


def test_options_of_reading_hold_for_predict_too(tmp_path: Path) -> None:
    frame = animals(100).assign(height=lambda f: f["height"].astype(object).where(f.index % 9 > 0, "-999"))
    frame["colour"] = frame["colour"].replace("grey", "weiß")
    frame.to_csv(tmp_path / "train.csv", index=False, sep=";", decimal=",", encoding="cp1252")
    assert fit(tmp_path / "train.csv", "--decimal", ",", "--na", "-999", "--encoding", "cp1252", "-q").code == 0
    columns = {column["name"]: column for column in result(tmp_path)["columns"]}
    assert columns["height"]["missing"] == 12
    assert columns["weight"]["kind"] == "number"
    said = call("predict", tmp_path / "run", tmp_path / "train.csv")
    assert (said.code, len(said.out.splitlines())) == (0, 101), said.err


def test_labels_are_not_taken_for_features(tmp_path: Path) -> None:
    animals().assign(kind=lambda f: f["kind"].map({"cat": "10%", "dog": "20%"})).to_csv(tmp_path / "t.csv", index=False)
    assert fit(tmp_path / "t.csv", "-q").code == 0
    assert call("predict", tmp_path / "run", tmp_path / "t.csv").err == ""
    assert_refused(
        call("predict", tmp_path / "run", tmp_path / "t.csv", "--target", "weight"), "a feature of the model"
    )


def test_numbers_of_rows_are_noted(tmp_path: Path) -> None:
    animals().assign(passenger=range(7, 127)).sample(frac=1, random_state=0).to_csv(tmp_path / "train.csv", index=False)
    assert "'passenger' numbers the rows" in fit(tmp_path / "train.csv").err


def test_a_vertical_bar_separates_columns(tmp_path: Path) -> None:
    animals().to_csv(tmp_path / "train.csv", index=False, sep="|")
    assert fit(tmp_path / "train.csv", "-q").code == 0
    animals().to_csv(tmp_path / "train.csv", index=False, sep=" ")
    assert_refused(fit(tmp_path / "train.csv"), "has one column, 'weight height colour kind'")


def test_a_leak_is_noted(tmp_path: Path) -> None:
    animals().assign(answer=lambda f: f["kind"]).to_csv(tmp_path / "train.csv", index=False)
    assert "note: column 'answer' is a copy of the target" in fit(tmp_path / "train.csv").err
    assert any("'answer'" in note for note in result(tmp_path)["notes"])


def test_classes_of_two_rows_are_refused(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text("x,kind\n1,a\n2,a\n3,b\n4,b\n")
    for options in (FAST, ["--model", "boost"]):
        said = call("fit", tmp_path / "train.csv", "-t", "kind", "-o", tmp_path / "run", "-q", *options)
        assert_refused(said, "leaves no test rows")


@pytest.mark.parametrize("name", ["train.xlsx", "train.feather", "train.jsonl"])
def test_other_formats(tmp_path: Path, name: str) -> None:
    pytest.importorskip("openpyxl")
    write = {".xlsx": pd.DataFrame.to_excel, ".feather": pd.DataFrame.to_feather}.get(Path(name).suffix)
    if write is None:
        animals().to_json(tmp_path / name, orient="records", lines=True)
    else:
        write(animals(), tmp_path / name, **({"index": False} if name.endswith("xlsx") else {}))
    assert fit(tmp_path / name, "-q").code == 0
    said = call("predict", tmp_path / "run", tmp_path / name)
    assert (said.code, len(said.out.splitlines())) == (0, 121), said.err


def test_predict_takes_the_folder_of_parquet_files_that_fit_takes(tmp_path: Path) -> None:
    animals().to_csv(tmp_path / "train.csv", index=False)
    assert fit(tmp_path / "train.csv", "-q").code == 0
    (tmp_path / "parts").mkdir()
    new = animals(50, 3)
    new[:20].to_parquet(tmp_path / "parts" / "a.parquet")
    new[20:].to_parquet(tmp_path / "parts" / "b.parquet")
    new.to_parquet(tmp_path / "whole.parquet")
    parts = call("predict", tmp_path / "run", tmp_path / "parts")
    assert parts.code == 0, parts.err
    assert parts.out == call("predict", tmp_path / "run", tmp_path / "whole.parquet").out


@pytest.mark.slow
def test_two_splits_have_no_p_values(tmp_path: Path) -> None:
    animals().to_csv(tmp_path / "train.csv", index=False)
    words = ["compare", tmp_path / "train.csv", "-t", "kind", "-o", tmp_path / "run", "--splits", "2"]
    said = call(*words, "--epochs", "2", "--hidden", "4", "--folds", "1", "--device", "cpu")
    assert said.code == 0, said.err
    header = next(line for line in said.out.splitlines() if "training + decision" in line)
    assert header.split()[-1] != "p"
    assert all(row["p"] is None for row in result(tmp_path)["table"])


def test_notes_and_errors_name_the_columns_of_the_file(tmp_path: Path) -> None:
    """A date becomes several columns, but --drop and the messages know the one that is in the file."""
    frame = animals().assign(day=lambda f: np.where(f["kind"] == "cat", "2024-01-31", "2024-02-20"))
    frame.to_csv(tmp_path / "train.csv", index=False)
    said = fit(tmp_path / "train.csv")
    assert said.code == 0, said.err
    assert said.err.count("determines the target") == 1
    assert "ignore it with --drop 'day'\n" in said.err
    assert fit(tmp_path / "train.csv", "-q", "--force", "--drop", "day").code == 0
    frame.assign(day=[f"2024-01-{i % 28 + 1:02d}" for i in range(120)]).to_csv(tmp_path / "train.csv", index=False)
    assert fit(tmp_path / "train.csv", "-q", "--force").code == 0
    new = frame.drop(columns="kind")
    for odd, words in {
        "weight": "no column 'weight', only", "weight height": "no column 'weight', 'height', only",
        "day": "has no column 'day', which held dates in training",
    }.items():  # fmt: skip
        new.drop(columns=odd.split()).to_csv(tmp_path / "new.csv", index=False)
        said = call("predict", tmp_path / "run", tmp_path / "new.csv")
        assert_refused(said, words)
        assert ":days" not in said.err
    new.assign(day="soon").to_csv(tmp_path / "new.csv", index=False)
    said = call("predict", tmp_path / "run", tmp_path / "new.csv")
    assert_refused(said, "column 'day' held dates in training, but holds 'soon' here")
    new.assign(day="").to_csv(tmp_path / "new.csv", index=False)
    assert call("predict", tmp_path / "run", tmp_path / "new.csv").code == 0


@pytest.mark.parametrize(
    ("labels", "classes"),
    [
        (["-1", "+1"], {"-1", "+1"}),
        (["99999999999999999999", "12345678901234567890"], {"99999999999999999999", "12345678901234567890"}),
        (["1.0", "2.0"], {"1.0", "2.0"}),
        (["1", "2"], {"1", "2"}),
    ],
)
def test_whole_numbers_as_labels_are_kept_as_written(tmp_path: Path, labels: list[str], classes: set[str]) -> None:
    frame = animals()
    frame["kind"] = frame["kind"].map(dict(zip(["cat", "dog"], labels, strict=True)))
    frame.to_csv(tmp_path / "train.csv", index=False)
    said = fit(tmp_path / "train.csv", "-q")
    assert said.code == 0, said.err
    assert set(result(tmp_path)["data"]["classes"]) == classes
    said = call("predict", tmp_path / "run", tmp_path / "train.csv", "-t", "kind", "--no-proba")
    assert set(said.out.split()[1:]) <= classes, said


def test_a_target_without_any_label_is_refused(tmp_path: Path) -> None:
    animals().assign(kind="").to_csv(tmp_path / "train.csv", index=False)
    for option in ([], ["--drop-unlabelled"]):
        said = fit(tmp_path / "train.csv", *option)
        assert_refused(said, "the target 'kind' has no label in any row; is it the right column?")


def test_a_class_too_small_to_test_on_is_refused(tmp_path: Path) -> None:
    animals().assign(kind=[f"c{i % 60}" for i in range(120)]).to_csv(tmp_path / "train.csv", index=False)
    assert_refused(
        fit(tmp_path / "train.csv"), "holding out 0.2 of each class, the largest of 2 rows, leaves no test rows"
    )


def test_a_positive_class_without_test_rows_is_noted(tmp_path: Path) -> None:
    animals().assign(kind=["a"] * 118 + ["b"] * 2).to_csv(tmp_path / "train.csv", index=False)
    said = fit(tmp_path / "train.csv")
    assert "note: no test row has the class 'b', the positive one, so F1 of 'b' cannot be measured" in said.err
    assert "macro" not in said.err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--average", "binary"], "average='binary' needs one target of two classes, got several targets"),
        (["--metric", "quadratic_kappa"], "quadratic_kappa compares the classes of one target, got several targets"),
        (["--subject-to", "quadratic_kappa>=0.5"], "quadratic_kappa compares the classes of one target"),
        (["--task", "classification"], "--task classification needs a single target"),
    ],
)
def test_options_that_go_with_one_target_are_refused(tmp_path: Path, options: list[str], words: str) -> None:
    frame = animals().assign(kind=lambda f: (f["kind"] == "cat").astype(int), other=[0, 1] * 60)
    frame.to_csv(tmp_path / "train.csv", index=False)
    said = call("fit", tmp_path / "train.csv", "-t", "kind,other", "-o", tmp_path / "run", *FAST, *options)
    assert_refused(said, words)


@pytest.mark.parametrize("costs", ["fn=0,fp=0", "tn=1,fp=1,fn=2,tp=2"])
def test_costs_that_prefer_no_decision_are_refused(tmp_path: Path, costs: str) -> None:
    animals().to_csv(tmp_path / "train.csv", index=False)
    assert_refused(fit(tmp_path / "train.csv", "--costs", costs), "costs must differ between decisions")


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("train.parquet", ["--encoding", "cp1252"]), ("train.parquet", ["--decimal", ","]),
        ("train.parquet", ["--na", "grey"]), ("train.parquet", ["--stream", "--na", "grey"]),
        ("train.feather", ["--na", "grey"]), ("train.jsonl", ["--encoding", "cp1252"]),
        ("parts", ["--decimal", ","]),
    ],
)  # fmt: skip
def test_options_of_reading_that_a_format_does_not_have_are_refused(
    tmp_path: Path, name: str, options: list[str]
) -> None:
    (tmp_path / "parts").mkdir()
    animals().to_parquet(tmp_path / "parts" / "a.parquet")
    animals().to_parquet(tmp_path / "train.parquet")
    animals().to_feather(tmp_path / "train.feather")
    animals().to_json(tmp_path / "train.jsonl", orient="records", lines=True)
    option = options[-2]
    assert_refused(fit(tmp_path / name, *options), f"{option} is an option of text files")
    animals().to_csv(tmp_path / "train.csv", index=False)
    assert fit(tmp_path / "train.csv", "-q", *(["--na", "x", "--decimal", "."])).code == 0
    assert_refused(call("predict", tmp_path / "run", tmp_path / name, *options[-2:]), f"{option} is an option of text")
    assert call("predict", tmp_path / "run", tmp_path / name).code == 0  # options of training do not count


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("t.csv", b"PK\x03\x04" + bytes(30), "is a zip archive or a workbook, not text; unpack it, or rename it"),
        ("t.csv", b"\x1f\x8b\x08\x00" + bytes(30), "is compressed with gzip; rename it to t.csv.gz"),
        ("t.csv", b"PAR1" + bytes(30), "is a Parquet file, not text; rename it to t.parquet"),
        ("t.csv", b"%PDF-1.7\n\xff", "is a PDF document, not text"),
        ("t.csv", "a,kind\n1,ü\n".encode("utf-16-le") * 20, "or name its encoding: --encoding utf-16-le"),
        ("t.zip", b"PK", "got .zip; unpack it"),
        ("t.csv.bz2", b"BZ", "got .bz2; unpack it"),
        ("t.json", b"[]", "got .json; save it as .jsonl, one object a line"),
        ("t.xlsm", b"PK", "got .xlsm; save it as .xlsx"),
    ],
)  # fmt: skip
def test_files_that_are_no_text_are_told_apart(tmp_path: Path, name: str, content: bytes, words: str) -> None:
    (tmp_path / name).write_bytes(content)
    assert_refused(fit(tmp_path / name), words)


def test_a_folder_without_parquet_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "parts").mkdir()
    for words in ("holds no Parquet file", "holds no Parquet file but 'a.csv'"):
        assert_refused(fit(tmp_path / "parts"), words)
        animals().to_csv(tmp_path / "parts" / "a.csv", index=False)
