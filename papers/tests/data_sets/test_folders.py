"""Where data sets are searched, and files that are damaged, packed or missing."""

from types import SimpleNamespace

import pytest
import sklearn.datasets
from miniature_data import (
    Mini,
    put_card,
    sentence,
)

from evalign_papers import datasets
from evalign_papers.datasets import DataError, load
from evalign_papers.datasets.folders import VARIABLE
from evalign_papers.datasets.sources import (
    creditcard,
    yeast,
)


def test_data_dir_comes_before_the_variable(tmp_path, monkeypatch):
    first, second = tmp_path / "first", tmp_path / "second"
    for folder, seed in ((first, 0), (second, 1)):
        folder.mkdir()
        mini = Mini(yeast)
        mini.raw.iloc[0, 0] = seed
        mini.parquet(folder)
    put_card(monkeypatch, yeast, rows=60, counts=mini.counts)
    monkeypatch.setenv(VARIABLE, str(second))
    assert load("yeast", first, verify=False).X.iloc[0, 0] == 0
    assert load("yeast", verify=False).X.iloc[0, 0] == 1
    (first / "yeast.parquet").unlink()
    assert load("yeast", first, verify=False).X.iloc[0, 0] == 1
    assert "not verified" in load("yeast", verify=False).notes[-1]


def test_a_place_that_is_not_there_is_told(tmp_path, monkeypatch):
    with pytest.raises(DataError, match=r"--data-dir must name a folder, .*nowhere is not there"):
        load("yeast", tmp_path / "nowhere")
    (tmp_path / "file").touch()
    monkeypatch.setenv(VARIABLE, str(tmp_path / "file"))
    with pytest.raises(DataError, match=r"\$EVALIGN_DATA must name a folder, .*file is a file"):
        load("yeast")


@pytest.mark.parametrize("name", [name for name in datasets.names() if not name.startswith("synthetic")])
def test_offline_the_error_names_file_place_and_source(name, tmp_path):
    card = datasets.find_card(name)
    with pytest.raises(DataError) as error:
        load(name, tmp_path)
    text = sentence(error)
    assert card.versions[0].files[0].name in text
    assert str(tmp_path) in text
    assert card.source in text
    assert (f"OpenML's data set {card.openml} cannot be fetched" in text) == (card.openml is not None)
    with pytest.raises(DataError, match=r"neither --data-dir nor \$EVALIGN_DATA names a folder"):
        load(name, fetch=False)


def test_openml_is_not_asked_where_it_must_not_be(tmp_path, monkeypatch):
    def forbidden(**_):
        raise AssertionError("a download")

    monkeypatch.setattr(sklearn.datasets, "fetch_openml", forbidden)
    with pytest.raises(DataError, match=r"yeast needs yeast.parquet, or yeast.data"):
        load("yeast", tmp_path, fetch=False)


def test_what_openml_sends_is_checked(monkeypatch):
    mini = Mini(yeast)
    put_card(monkeypatch, yeast, **mini.facts)
    frame = mini.openml()
    monkeypatch.setattr(sklearn.datasets, "fetch_openml", lambda **_: SimpleNamespace(frame=frame.iloc[:, 1:]))
    with pytest.raises(DataError, match="OpenML's data set 181 has 8 columns"):
        load("yeast")
    changed = frame.copy()
    changed.iloc[3, 2] += 0.5
    monkeypatch.setattr(sklearn.datasets, "fetch_openml", lambda **_: SimpleNamespace(frame=changed))
    with pytest.raises(DataError, match="OpenML's data set 181 must hold the rows of yeast"):
        load("yeast")
    assert len(load("yeast", verify=False)) == 60


def test_a_time_column_of_openml_is_left_out(monkeypatch):
    mini = Mini(creditcard)
    put_card(monkeypatch, creditcard, **mini.facts)
    frame = mini.openml()
    frame.insert(0, "Time", 1.0)
    monkeypatch.setattr(sklearn.datasets, "fetch_openml", lambda **_: SimpleNamespace(frame=frame))
    assert len(load("creditcard")) == 60


def test_a_truncated_file(two_files):
    path = two_files / "letter.parquet"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(DataError) as error:
        load("letter", two_files)
    assert f"{path} must have" in sentence(error)
    assert "it is truncated; get it again from https://" in sentence(error)


def test_a_damaged_file(two_files):
    path = two_files / "letter.parquet"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError) as error:
        load("letter", two_files)
    assert f"{path} must have sha256" in sentence(error)
    assert "it is damaged or another file; get it again" in sentence(error)


def test_a_file_under_another_name(two_files):
    (two_files / "letter.parquet").rename(two_files / "letter (1).parquet")
    with pytest.raises(DataError) as error:
        load("letter", two_files)
    assert "letter (1).parquet is letter.parquet under another name, rename it" in sentence(error)


def test_a_file_with_the_content_of_another(two_files):
    (two_files / "letter.parquet").write_bytes((two_files / "yeast.parquet").read_bytes())
    with pytest.raises(DataError) as error:
        load("letter", two_files)
    assert "namely yeast.parquet" in sentence(error)


def test_garbage_that_nobody_verifies_is_still_one_sentence(two_files):
    for content in (b"PAR1" + b"\0" * 100, b""):
        (two_files / "letter.parquet").write_bytes(content)
        with pytest.raises(DataError) as error:
            load("letter", two_files, verify=False)
        assert "letter.parquet" in sentence(error)
    (two_files / "letter.parquet").write_bytes((two_files / "yeast.parquet").read_bytes())
    with pytest.raises(DataError, match="must have the column 'x_box'"):
        load("letter", two_files, verify=False)


def test_a_part_of_the_files(tmp_path):
    (tmp_path / "adult.data").touch()
    with pytest.raises(DataError, match=r"lacks adult.test of them, put it there"):
        load("adult", tmp_path)


def test_wrong_arguments_are_told():
    with pytest.raises(ValueError, match=r"data set must be one of .* got 'adlt'; did you mean 'adult'"):
        load("adlt")
    with pytest.raises(ValueError, match="protocol must be one of honest, paper, got 'papers'"):
        load("synthetic_5", protocol="papers")
    with pytest.raises(TypeError, match="synthetic_5 has no options, got 'size'"):
        load("synthetic_5", size=3)
    with pytest.raises(TypeError, match="cocktailparty has the options positive, block, got 'size'"):
        load("cocktailparty", size=3)
