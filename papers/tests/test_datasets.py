"""Data sets: cards, files and their checks, what both protocols make of them, splits, and the command.

Real files are read only where $EVALIGN_DATA names their folder; everything else is generated here, in miniature.
"""

import json
import os
import sys
from dataclasses import replace
from types import SimpleNamespace
from urllib.error import URLError

import numpy as np
import pandas as pd
import pytest
import sklearn.datasets
from typer.testing import CliRunner

from evalign_papers import datasets
from evalign_papers.commands import datasets as command
from evalign_papers.datasets import DataError, check_split, load, registry, splits
from evalign_papers.datasets.base import Card, Dataset, File, equitability
from evalign_papers.datasets.fingerprint import fingerprint
from evalign_papers.datasets.folders import VARIABLE, digest_of
from evalign_papers.datasets.image_files import read_folder, read_npz, write_npz
from evalign_papers.datasets.sources import (
    adult,
    caltech101,
    caltech256,
    cifar10,
    cocktailparty,
    creditcard,
    letter,
    mammography,
    shuttle,
    yeast,
)

REAL = os.environ.get(VARIABLE)
needs_real = pytest.mark.skipif(
    not REAL, reason=f"the real files are not part of a clone; ${VARIABLE} names their folder"
)
PAPERS = {  # rows and positives as the papers print them
    "synthetic_5": (5250, 250),
    "synthetic_33": (7500, 2500),
    "cocktailparty": (4800, 1454),
    "adult": (48842, 11687),
    "mammography": (11183, 260),
    "creditcard": (284807, 492),
    "cifar10_transportation": (60000, 24000),
    "cifar10_frog": (60000, 6000),
}
RARE = {"cocktailparty": "different group"}
TABLES = (adult, mammography, creditcard, letter, shuttle, yeast)


def no_network(*_, **__):
    raise OSError("Name or service not known")


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """No real files and no network, whatever the machine has."""
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr("pooch.retrieve", no_network)

    def offline(**_):
        raise URLError("Name or service not known")

    monkeypatch.setattr(sklearn.datasets, "fetch_openml", offline)


def sentence(error) -> str:
    text = str(error.value)
    assert "\n" not in text
    assert len(text) < 700
    return text


def put_card(monkeypatch, module, **changes) -> Card:
    """Give a module a card that fits a miniature."""
    card = replace(module.CARD, **changes)
    monkeypatch.setattr(module, "CARD", card)
    if hasattr(module, "SOURCE"):
        monkeypatch.setattr(module, "SOURCE", replace(module.SOURCE, card=card))
    monkeypatch.setitem(registry.ENTRIES, card.name, registry.ENTRIES[card.name]._replace(card=card))
    return card


def known(path) -> File:
    return File(path.name, path.stat().st_size, digest_of(path, "sha256"))


def with_files(card, *paths):
    """The versions of a card, the files at `paths` with their own size and checksum."""
    facts = {path.name: known(path) for path in paths}
    return tuple(
        replace(version, files=tuple(facts.get(file.name, file) for file in version.files)) for version in card.versions
    )


class Mini:
    """A small table of one of the sources: `raw` has its columns, a label and a split as the original has them."""

    def __init__(self, module, rows=60):
        self.module, source, rng = module, module.SOURCE, np.random.default_rng(3)
        columns = {}
        for name in source.columns:
            if name in source.text:
                columns[name] = rng.choice(["?", "Private", "State-gov", "Other"], rows)
            elif module in (adult, letter, shuttle):
                columns[name] = rng.integers(-3 if module is shuttle else 0, 90, rows)
            elif module is creditcard and name == "Amount":
                columns[name] = (rng.integers(0, 400000, rows) / 100).round(2)
            else:
                columns[name] = rng.normal(size=rows).round(5)
        labels = {mammography: ["-1", "1"]}.get(module) or list(source.labels)
        self.labels = [labels[i] for i in np.arange(rows) % len(labels)]
        self.raw = pd.DataFrame(columns)
        self.test = np.arange(rows) >= rows * 2 // 3
        names = [source.labels[label] for label in self.labels]
        self.counts = {name: names.count(name) for name in dict.fromkeys(source.labels.values())}
        numbers = {
            name: self.raw[name].astype(np.float32) if module is creditcard else self.raw[name] for name in self.raw
        }
        self.facts = {
            "rows": rows,
            "counts": self.counts,
            "fingerprint": fingerprint(pd.DataFrame(numbers), np.array(names, dtype=object)),
        }

    def parquet(self, folder):
        frame, name = self.raw.copy(), self.module.CARD.name
        if self.module is adult:
            frame["income"], frame["split"], frame["target"] = self.labels, np.where(self.test, "test", "train"), 0
        elif self.module is creditcard:
            frame = frame.astype(np.float32).assign(Time=0, Class=[int(label) for label in self.labels])
        elif self.module is shuttle:
            frame["split"], frame["target"] = (
                np.where(self.test, "test", "train"),
                [int(label) for label in self.labels],
            )
        else:
            frame["target"] = self.labels if self.module is not mammography else [int(x == "1") for x in self.labels]
        path = folder / f"{name}.parquet"
        frame.to_parquet(path)
        return [path]

    def original(self, folder):
        frame, label = self.raw.copy(), pd.Series(self.labels)
        if self.module is adult:
            lines = frame.assign(y=label).astype(str).agg(", ".join, axis=1)
            (folder / "adult.data").write_text("\n".join(lines[~self.test]) + "\n\n")
            (folder / "adult.test").write_text("|1x3 Cross validator\n" + ".\n".join(lines[self.test]) + ".\n\n")
            return [folder / "adult.data", folder / "adult.test"]
        if self.module is creditcard:
            frame.insert(0, "Time", 0.0)
            lines = frame.astype(str).agg(",".join, axis=1) + ',"' + label + '"'
            header = ",".join(f'"{name}"' for name in [*frame.columns, "Class"])
            (folder / "creditcard.csv").write_text("\n".join([header, *lines]) + "\n")
            return [folder / "creditcard.csv"]
        if self.module is shuttle:
            for name, rows in (("shuttle.trn", ~self.test), ("shuttle.tst", self.test)):
                frame.assign(y=label)[rows].to_csv(folder / name, sep=" ", header=False, index=False)
            return [folder / "shuttle.trn", folder / "shuttle.tst"]
        if self.module is letter:
            frame.insert(0, "y", label)
        elif self.module is yeast:
            frame.insert(0, "sequence", "ADT1_YEAST")
            frame["y"] = label
        else:
            frame["class"] = "'" + label + "'"
        name = {letter: "letter-recognition.data", yeast: "yeast.data", mammography: "mammography.csv"}[self.module]
        sep = "  " if self.module is yeast else ","
        lines = frame.astype(str).agg(sep.join, axis=1)
        (folder / name).write_text("\n".join([",".join(frame)] * (self.module is mammography) + [*lines]) + "\n")
        return [folder / name]

    def openml(self):
        """As scikit-learn's parser gives it: "?" is missing, labels are categories, the label's column is the last."""
        frame = self.raw.replace("?", np.nan).rename(columns=lambda name: name.replace("_", "-"))
        return frame.assign(**{"class": pd.Categorical(self.labels)}).iloc[::-1].reset_index(drop=True)


# The cards


@pytest.mark.parametrize("name", PAPERS)
def test_cards_have_the_papers_counts(name):
    card = datasets.find_card(name)
    assert (card.rows, card.counts[RARE.get(name, list(card.counts)[-1])]) == PAPERS[name]


@pytest.mark.parametrize("name", datasets.names())
def test_cards_are_whole(name):
    card = datasets.find_card(name)
    assert card.source
    assert card.citation
    assert card.licence
    if card.counts:
        assert len(card.counts) == card.num_classes
        assert sum(card.counts.values()) == card.rows * (15 if card.kind == "graphs" else 1)
    for version in card.versions:
        for file in version.files:
            assert file.sha256 is None or len(file.sha256) == 64
            assert file.md5 is None or len(file.md5) == 32


def test_equitability_is_scipys_entropy_over_its_largest_value():
    from scipy.stats import entropy

    counts = [789, 3, 40, 40]
    assert equitability(counts) == pytest.approx(entropy(counts, base=4), abs=1e-12)
    assert equitability([7, 7, 7]) == pytest.approx(1.0)
    assert equitability([7, 0]) == 0.0


@pytest.mark.parametrize("module", TABLES)
def test_fingerprint_sees_values_labels_and_columns_but_not_the_order_of_rows(module):
    mini = Mini(module)
    frame, y = mini.raw, np.array(mini.labels, dtype=object)
    expected = fingerprint(frame, y)
    order = np.random.default_rng(0).permutation(len(frame))
    assert fingerprint(frame.iloc[order], y[order]) == expected
    changed = frame.copy()
    changed.iloc[7, 0] = changed.iloc[7, 0] + 1
    assert fingerprint(changed, y) != expected
    assert fingerprint(frame.iloc[:, ::-1], y) != expected
    assert fingerprint(frame, y[::-1]) != expected
    assert fingerprint(pd.concat([frame, frame[:1]]), np.append(y, y[:1])) != expected


# Tables


@pytest.mark.parametrize("protocol", datasets.PROTOCOLS)
@pytest.mark.parametrize("module", TABLES)
def test_every_form_of_a_table_loads_the_same(module, protocol, tmp_path, monkeypatch):
    mini, name = Mini(module), module.CARD.name
    folders = [tmp_path / form for form in ("parquet", "original")]
    for folder in folders:
        folder.mkdir()
    paths = [*mini.parquet(folders[0]), *mini.original(folders[1])]
    put_card(monkeypatch, module, **mini.facts, versions=with_files(module.CARD, *paths))
    ours, original = (load(name, folder, protocol) for folder in folders)
    pd.testing.assert_frame_equal(ours.X, original.X)
    np.testing.assert_array_equal(ours.y, original.y)
    assert ours.counts == mini.counts
    assert ours.classes == original.classes
    if module in (adult, shuttle):
        np.testing.assert_array_equal(ours.official_test, mini.test)
        np.testing.assert_array_equal(original.official_test, mini.test)
    else:
        assert ours.official_test is None
    monkeypatch.setattr(sklearn.datasets, "fetch_openml", lambda **_: SimpleNamespace(frame=mini.openml()))
    fetched = load(name, None, protocol)
    pd.testing.assert_frame_equal(fetched.X[::-1].reset_index(drop=True), ours.X)
    np.testing.assert_array_equal(fetched.y[::-1], ours.y)
    assert fetched.official_test is None


def test_adult_as_the_protocols_want_it(tmp_path, monkeypatch):
    from sklearn.preprocessing import OrdinalEncoder

    mini = Mini(adult)
    put_card(monkeypatch, adult, **mini.facts, versions=with_files(adult.CARD, *mini.parquet(tmp_path)))
    honest, paper = (load("adult", tmp_path, protocol).X for protocol in datasets.PROTOCOLS)
    assert "fnlwgt" not in honest
    assert honest.shape[1] == paper.shape[1] == 13
    texts = list(adult.CATEGORIES)
    np.testing.assert_array_equal(honest[texts].isna(), mini.raw[texts] == "?")
    assert set(honest["workclass"].dropna()) == {"Private", "State-gov", "Other"}
    np.testing.assert_array_equal(paper[texts], OrdinalEncoder().fit_transform(mini.raw[texts]))


def test_creditcard_drops_time_and_takes_the_logarithm_of_cents(tmp_path, monkeypatch):
    mini = Mini(creditcard)
    put_card(monkeypatch, creditcard, **mini.facts, versions=with_files(creditcard.CARD, *mini.parquet(tmp_path)))
    X = load("creditcard", tmp_path).X
    assert list(X) == [f"V{i}" for i in range(1, 29)] + ["log_amount"]
    np.testing.assert_array_equal(X["log_amount"], np.log(mini.raw["Amount"] + 0.001).astype(np.float32))


def test_mammography_reads_arff(tmp_path, monkeypatch):
    mini = Mini(mammography)
    put_card(monkeypatch, mammography, **mini.facts)
    [path] = mini.original(tmp_path)
    rows = path.read_text().splitlines()[1:]
    path.unlink()
    head = ["% a comment", "@RELATION mammography", "@ATTRIBUTE attr1 REAL", "", "@DATA"]
    (tmp_path / "mammography.arff").write_text("\n".join(head + rows))
    assert load("mammography", tmp_path).counts == mini.counts


@pytest.mark.parametrize(
    ("module", "label", "expected", "code"),
    [
        (mammography, "-1", "other", 0),
        (mammography, "1", "calcification", 1),
        (creditcard, "1", "fraud", 1),
        (adult, ">50K", ">50K", 1),
        (shuttle, "1", "Rad Flow", 0),  # shuttle.doc
        (shuttle, "4", "High", 3),
        (shuttle, "7", "Bpv Open", 6),
    ],
)
def test_labels_stand_for_the_right_class(module, label, expected, code):
    assert module.SOURCE.labels[label] == expected
    assert list(module.CARD.counts).index(expected) == code


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1,2,3\n", "line 1 must have 17 fields, it has 3"),
        ("A" + ",1" * 16 + "\nA" + ",1" * 15 + ",x\n", "must have numbers in column 'yegvx'"),
        ("a" + ",1" * 16 + "\n", "must have the labels A, B"),
        ("A" + ",1" * 16 + "\n", "some of its values differ"),
        ("\n", "holds no rows"),
        (b"\xff\xfe\x00", "cannot be read"),
    ],
)
def test_a_damaged_original_without_a_checksum_is_told_in_one_sentence(text, message, tmp_path):
    path = tmp_path / "letter-recognition.data"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(DataError) as error:
        load("letter", tmp_path)
    assert message in sentence(error)
    assert str(path) in sentence(error)


def test_wrong_counts_are_told(tmp_path, monkeypatch):
    mini = Mini(letter)
    mini.parquet(tmp_path)
    put_card(monkeypatch, letter, versions=with_files(letter.CARD, tmp_path / "letter.parquet"))
    with pytest.raises(DataError, match="letter must have 20000 rows of 26 classes, got 60 of 26"):
        load("letter", tmp_path)
    put_card(monkeypatch, letter, rows=60)
    with pytest.raises(DataError, match="must have 789 labels of class 'A', got 3"):
        load("letter", tmp_path)


# Places and files


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


@pytest.fixture
def two_files(tmp_path, monkeypatch):
    """letter.parquet and yeast.parquet in miniature, with cards that know them."""
    for module in (letter, yeast):
        mini = Mini(module)
        put_card(monkeypatch, module, **mini.facts, versions=with_files(module.CARD, *mini.parquet(tmp_path)))
        load(module.CARD.name, tmp_path)
    return tmp_path


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


# Synthetic


@pytest.mark.parametrize(
    ("name", "expected"), [("synthetic_5", "8ec6ae04874a1402"), ("synthetic_33", "79f76f9a0d087ebf")]
)
def test_synthetic_sets_are_the_authors_rows(name, expected):
    """These fingerprints were taken from imbalanced-learn's make_imbalance, called as the authors' code does."""
    blobs = load(name)
    assert (len(blobs), blobs.counts["positive"]) == PAPERS[name]
    assert fingerprint(blobs.X, blobs.y) == expected
    pd.testing.assert_frame_equal(blobs.X, load(name, protocol="paper").X)


# CocktailParty


def people(frames=40, seed=0):
    """Frames as cocktailparty.parquet has them."""
    rng = np.random.default_rng(seed)
    index = pd.MultiIndex.from_product([range(frames), range(1, 7)], names=["frame", "person"])
    frame = pd.DataFrame(rng.normal(size=(len(index), 3)), columns=["x", "y", "theta"], index=index).reset_index()
    return frame.assign(group=rng.integers(0, 3, len(frame)))


def slow_pairs(frame, swapped):
    """One pair after the other, in plain Python."""
    rows = []
    for number, six in frame.groupby("frame"):
        six = six.set_index("person")
        for i in range(1, 7):
            for j in range(i + 1, 7):
                a, b = (j, i) if swapped[len(rows)] else (i, j)
                axis = complex(six.x[a] - six.x[b], six.y[a] - six.y[b])
                middle = complex(six.x[a] + six.x[b], six.y[a] + six.y[b]) / 2
                row = []
                for k in [a, b, *sorted({1, 2, 3, 4, 5, 6} - {a, b})]:
                    z = (complex(six.x[k], six.y[k]) - middle) * axis.conjugate() / abs(axis)
                    angle = np.exp(1j * six.theta[k]) * axis.conjugate() / abs(axis)
                    row += [z.real, *([] if k in (a, b) else [z.imag]), angle.real, angle.imag]
                rows.append([*row, six.group[a] == six.group[b], number, a, b])
    return np.array(rows, dtype=np.float64)


def test_pairs_are_those_of_a_slow_loop():
    frame = people(8)
    table = cocktailparty.pairs_of_frames(frame.sample(frac=1, random_state=0))
    expected = slow_pairs(frame, np.random.default_rng(0).random(8 * 15) < 0.5)
    np.testing.assert_allclose(table.to_numpy(dtype=np.float64), expected, atol=1e-6)


def test_pairs_do_not_depend_on_where_the_room_is():
    frame = people(8)
    z = (frame.x + 1j * frame.y) * np.exp(0.7j) + (3 - 2j)
    moved = frame.assign(x=z.to_numpy().real, y=z.to_numpy().imag, theta=frame.theta + 0.7)
    left, right = (cocktailparty.pairs_of_frames(each)[list(cocktailparty.FEATURES)] for each in (frame, moved))
    np.testing.assert_allclose(left, right, atol=1e-5)


@pytest.fixture
def party(tmp_path, monkeypatch):
    """Both files in miniature."""
    frame = people()
    pairs = cocktailparty.pairs_of_frames(frame)
    frame.to_parquet(tmp_path / "cocktailparty.parquet")
    pairs.to_parquet(tmp_path / "cocktailparty_pairs.parquet")
    same = int(pairs["same_group"].sum())
    counts = {cocktailparty.DIFFERENT: 600 - same, cocktailparty.SAME: same}
    paths = [tmp_path / "cocktailparty.parquet", tmp_path / "cocktailparty_pairs.parquet"]
    put_card(monkeypatch, cocktailparty, rows=600, counts=counts, versions=with_files(cocktailparty.CARD, *paths))
    graph = replace(cocktailparty.GRAPH_CARD, rows=40, counts=counts)
    monkeypatch.setattr(cocktailparty, "GRAPH_CARD", replace(graph, versions=with_files(graph, *paths)))
    return tmp_path


def test_cocktailparty_pairs(party):
    honest, paper = load("cocktailparty", party), load("cocktailparty", party, "paper")
    assert honest.X.shape == (600, 22)
    assert honest.classes[1] == "same group"
    assert paper.classes[1] == "different group"
    np.testing.assert_array_equal(honest.y, 1 - paper.y)
    np.testing.assert_array_equal(honest.groups, np.repeat(np.arange(40), 15))
    np.testing.assert_array_equal(load("cocktailparty", party, positive="different").y, paper.y)
    np.testing.assert_array_equal(load("cocktailparty", party, block=4).groups, np.repeat(np.arange(10), 60))
    (party / "cocktailparty_pairs.parquet").unlink()
    derived = load("cocktailparty", party)
    pd.testing.assert_frame_equal(derived.X, honest.X)
    np.testing.assert_array_equal(derived.y, honest.y)
    with pytest.raises(ValueError, match="block must lie in"):
        load("cocktailparty", party, block=9)
    with pytest.raises(ValueError, match="positive must be one of same, different"):
        load("cocktailparty", party, positive="sme")


def test_cocktailparty_graphs(party):
    graphs, pairs = load("cocktailparty_graph", party), load("cocktailparty", party)
    assert graphs.X.nodes.shape == (40, 6, 4)
    assert graphs.X.pairs.shape == (40, 15, 1)
    np.testing.assert_array_equal(graphs.y.ravel(), pairs.y)
    frame = people()
    first, second = graphs.X.index[7]
    at = frame[frame.frame == 11].reset_index()
    assert graphs.X.pairs[11, 7, 0] == pytest.approx(
        np.hypot(at.x[first] - at.x[second], at.y[first] - at.y[second]), rel=1e-6
    )
    np.testing.assert_allclose(
        graphs.X.nodes[11, 2], [at.x[2], at.y[2], np.cos(at.theta[2]), np.sin(at.theta[2])], rtol=1e-6
    )
    part, y = graphs.take(np.array([3, 1]))
    np.testing.assert_array_equal(part.nodes[0], graphs.X.nodes[3])
    np.testing.assert_array_equal(y, graphs.y[[3, 1]])


def test_a_frame_that_lacks_a_person_is_told(party):
    people()[:-1].to_parquet(party / "cocktailparty.parquet")
    with pytest.raises(DataError, match="every frame must have the people 1 to 6 once"):
        load("cocktailparty_graph", party, verify=False)


# Pictures


def pictures(n, side=32, seed=0):
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (n, side, side, 3), dtype=np.uint8), np.arange(n, dtype=np.uint8) % 10


@pytest.mark.parametrize("side", [1, 5, 32])
def test_npz_files_give_back_what_was_written(side, tmp_path):
    X, y = pictures(4, side)
    write_npz(tmp_path / "x.npz", X, y, classes=np.array(["a", "b"]))
    again, labels, more = read_npz(tmp_path / "x.npz", ("classes",))
    np.testing.assert_array_equal(again, X)
    np.testing.assert_array_equal(labels, y)
    assert more["classes"].tolist() == ["a", "b"]


def test_npz_files_are_decoded_as_their_readme_says(tmp_path):
    """The loader that comes with the files, against ours."""
    X, y = pictures(6)
    write_npz(tmp_path / "x.npz", X, y)

    def summed(a):
        return np.cumsum(np.cumsum(a, 1, dtype=np.uint8), 2, dtype=np.uint8)

    with np.load(tmp_path / "x.npz") as z:
        green = summed(z["g"])
        expected = np.stack([summed(z["rg"]) + green, green, summed(z["bg"]) + green], -1)
    np.testing.assert_array_equal(expected, X)
    np.testing.assert_array_equal(read_npz(tmp_path / "x.npz")[0], X)


def test_a_pickle_in_an_npz_file_is_refused(tmp_path):
    np.savez(tmp_path / "x.npz", g=np.array([{"a": 1}], dtype=object))
    with pytest.raises(DataError) as error:
        read_npz(tmp_path / "x.npz")
    assert "x.npz cannot be read" in sentence(error)


@pytest.fixture
def cifar(tmp_path, monkeypatch):
    """Six parts of twenty pictures, as npz files and in the binary version."""
    monkeypatch.setattr(cifar10, "PART_ROWS", 20)
    X, y = pictures(120)
    (tmp_path / "npz").mkdir()
    (tmp_path / "bin" / "cifar-10-batches-bin").mkdir(parents=True)
    paths = []
    for i, part in enumerate(cifar10.PARTS):
        rows = slice(20 * i, 20 * (i + 1))
        write_npz(tmp_path / "npz" / f"cifar10_{part}.npz", X[rows], y[rows])
        # A record is a label, then all of red, all of green, all of blue.
        records = b"".join(
            bytes([label]) + x.transpose(2, 0, 1).tobytes() for x, label in zip(X[rows], y[rows], strict=True)
        )
        path = tmp_path / "bin" / "cifar-10-batches-bin" / cifar10._binary_name(part)
        path.write_bytes(records)
        paths += [tmp_path / "npz" / f"cifar10_{part}.npz", path]
    versions = with_files(cifar10.CARD, *paths)
    put_card(monkeypatch, cifar10, rows=120, counts=dict.fromkeys(cifar10.CLASSES, 12), versions=versions)
    for attribute, counts in (
        ("TRANSPORT_CARD", {"other": 72, "transportation": 48}),
        ("FROG_CARD", {"other": 108, "frog": 12}),
    ):
        card = getattr(cifar10, attribute)
        monkeypatch.setattr(cifar10, attribute, replace(card, rows=120, counts=counts, versions=versions))
    return tmp_path, X, y.astype(np.int64)


def test_cifar10_in_both_versions(cifar):
    folder, X, y = cifar
    for form in ("npz", "bin"):
        loaded = load("cifar10", folder / form)
        assert loaded.X.dtype == np.uint8
        np.testing.assert_array_equal(loaded.X, X)
        np.testing.assert_array_equal(loaded.y, y)
        np.testing.assert_array_equal(loaded.official_test, np.arange(120) >= 100)
        assert loaded.classes[5:7] == ("dog", "frog")


def test_cifar10_asked_yes_or_no(cifar):
    folder, _, y = cifar
    transport, frog = (load(f"cifar10_{name}", folder / "npz").y for name in ("transportation", "frog"))
    np.testing.assert_array_equal(transport, np.isin(y, [0, 1, 8, 9]))
    np.testing.assert_array_equal(frog, y == 6)


def test_parts_of_cifar10_need_only_their_files(cifar):
    folder, X, y = cifar
    (folder / "npz" / "cifar10_batch5.npz").unlink()
    some = load("cifar10", folder / "npz", parts=["batch2", "test"])
    np.testing.assert_array_equal(some.X, np.concatenate([X[20:40], X[100:]]))
    np.testing.assert_array_equal(some.y, np.concatenate([y[20:40], y[100:]]))
    np.testing.assert_array_equal(some.official_test, np.arange(40) >= 20)
    with pytest.raises(DataError, match=r"lacks cifar10_batch5.npz of them"):
        load("cifar10", folder / "npz")
    for wrong in ([], ["test", "test"]):
        with pytest.raises(DataError, match="parts must name some of batch1"):
            load("cifar10", folder / "npz", parts=wrong)
    with pytest.raises(ValueError, match="did you mean 'batch1'"):
        load("cifar10", folder / "npz", parts=["batch_1"])


@pytest.mark.parametrize("name", ["cifar-10-batches-py", "cifar-10-python.tar.gz", "data_batch_1"])
def test_the_pickled_version_of_cifar10_is_refused(name, tmp_path):
    (tmp_path / name).touch()
    with pytest.raises(DataError) as error:
        load("cifar10", tmp_path)
    assert "it is pickled, and a pickle can run anything" in sentence(error)
    assert "binary version, cifar-10-binary.tar.gz" in sentence(error)


def test_damaged_parts_of_cifar10(cifar):
    folder, _, _ = cifar
    path = folder / "bin" / "cifar-10-batches-bin" / "test_batch.bin"
    content = path.read_bytes()
    path.write_bytes(b"\x0b" + content[1:])  # no class has code 11
    with pytest.raises(DataError, match=r"test_batch.bin must have sha256"):
        load("cifar10", folder / "bin")
    with pytest.raises(DataError, match="with labels 0 to 9"):
        load("cifar10", folder / "bin", verify=False)
    for damaged in (content[:-3073], content[:-1]):
        path.write_bytes(damaged)
        with pytest.raises(DataError, match="it is truncated"):
            load("cifar10", folder / "bin")
        with pytest.raises(DataError, match=r"test_batch.bin"):
            load("cifar10", folder / "bin", verify=False)


def save(path, X, mode="RGB"):
    from PIL import Image

    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(X).convert(mode).save(path)


@pytest.fixture
def caltech(tmp_path):
    """Eighty classes with the archive's numbers, two of them as EAST names them, and some litter."""
    X, _ = pictures(81, 16)
    special = {56: "dog", 80: "frog"}
    for i in range(1, 81):
        name = f"{i:03d}.{special.get(i, f'class-{i}')}"
        save(tmp_path / "256_ObjectCategories" / name / f"{i:03d}_0001.png", X[i])
    root = tmp_path / "256_ObjectCategories"
    save(root / "056.dog" / "056_0002.png", X[0], "L")
    save(root / "056.dog" / "056_0003.PNG", X[0], "RGBA")
    (root / "056.dog" / "greg").mkdir()
    (root / "080.frog" / "RENAME2").write_text("litter")
    (root / "README").touch()
    return tmp_path, X


def test_caltech256_from_its_folder(caltech, monkeypatch):
    folder, X = caltech
    put_card(monkeypatch, caltech256, rows=82, num_classes=80)
    loaded = load("caltech256", folder, size=16)
    assert loaded.X.shape == (82, 16, 16, 3)
    assert (loaded.classes[55], loaded.classes[79]) == ("dog", "frog")  # EAST, appendix D
    dogs = loaded.X[loaded.y == 55]
    np.testing.assert_array_equal(dogs[0], X[56])
    assert (dogs[1] == dogs[1][..., :1]).all()  # grey in three channels
    np.testing.assert_array_equal(dogs[2], X[0])
    assert loaded.notes == ("3 entries that are no pictures were skipped: 056.dog/greg, 080.frog/RENAME2, README",)
    assert load("caltech256", folder, size=8).X.shape[1:] == (8, 8, 3)
    np.testing.assert_array_equal(load("caltech256", folder, size=8).X, load("caltech256", folder, size=8).X)


def test_caltech256_that_is_not_whole(caltech):
    folder, _ = caltech
    with pytest.raises(DataError, match="caltech256 must have 30607 pictures of 257 classes, got 82 of 80"):
        load("caltech256", folder, size=16)
    assert len(load("caltech256", folder, size=16, verify=False)) == 82
    with pytest.raises(ValueError, match="size must lie in"):
        load("caltech256", folder, size=2)


def test_folders_that_cannot_be_read(caltech, tmp_path, monkeypatch):
    root = caltech[0] / "256_ObjectCategories"
    damaged = root / "001.class-1" / "001_0001.png"
    damaged.write_bytes(damaged.read_bytes()[:200])
    with pytest.raises(DataError) as error:
        read_folder(root, 8)
    assert f"{damaged} cannot be read" in sentence(error)
    damaged.unlink()
    with pytest.raises(DataError, match=r"001.class-1 must hold pictures .* it has none"):
        read_folder(root, 8)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="it has no folder"):
        read_folder(tmp_path / "empty", 8)
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(DataError, match="need Pillow to be read; install it with pip install pillow"):
        read_folder(root, 8)


def test_a_packed_caltech256_is_told(tmp_path):
    (tmp_path / "256_ObjectCategories.tar").touch()
    with pytest.raises(DataError, match="it is packed: unpack it there with tar xf"):
        load("caltech256", tmp_path)


def test_caltech101_from_npz_and_from_its_folder(tmp_path, monkeypatch):
    names = ["Faces", "accordion", "BACKGROUND_Google"]  # in the order of the codes, the background last
    X, _ = pictures(6, 48)
    y = np.array([0, 0, 1, 1, 2, 2], dtype=np.uint8)
    for form in ("npz", "folder"):
        (tmp_path / form).mkdir()
    write_npz(tmp_path / "npz" / "caltech101_48.npz", X, y, classes=np.array(names), split=y)
    for i, label in enumerate(y):
        save(tmp_path / "folder" / "101_ObjectCategories" / names[label] / f"image_{i:04d}.png", X[i])
    versions = with_files(caltech101.CARD, tmp_path / "npz" / "caltech101_48.npz")
    put_card(monkeypatch, caltech101, rows=4, num_classes=2, counts={"Faces": 2, "accordion": 2}, versions=versions)
    monkeypatch.setattr(caltech101, "BACKGROUND_ROWS", 2)
    for form in ("npz", "folder"):
        loaded = load("caltech101", tmp_path / form)
        assert loaded.classes == ("Faces", "accordion")
        np.testing.assert_array_equal(loaded.X, X[:4])
        np.testing.assert_array_equal(loaded.y, y[:4])
        everything = load("caltech101", tmp_path / form, background=True)
        assert everything.classes == tuple(names)
        np.testing.assert_array_equal(everything.X, X)
    assert load("caltech101", tmp_path / "folder", size=24).X.shape == (4, 24, 24, 3)
    with pytest.raises(DataError, match="caltech101 needs the folder 101_ObjectCategories"):
        load("caltech101", tmp_path / "npz", size=24)


# Splits


def generated(kind="rows", seed=0):
    """A data set with three uneven classes, with groups, with graphs, or with a test part of its own."""
    rng = np.random.default_rng(seed)
    card = replace(datasets.find_card("letter"), name=kind)
    if kind == "graphs":
        card = datasets.find_card("cocktailparty_graph")
        y = (rng.random((100, 15)) < rng.random((100, 1))).astype(np.int64)
        X = datasets.Graphs(
            np.zeros((100, 6, 4), np.float32), np.zeros((100, 15, 1), np.float32), np.zeros((15, 2), np.int64)
        )
        return Dataset(card, X, y, ("a", "b"))
    if kind == "groups":
        share = np.repeat(rng.random(120), 10)
        y = (rng.random(1200) < share).astype(np.int64)
        return Dataset(card, pd.DataFrame({"x": y}), y, ("a", "b"), groups=np.repeat(rng.permutation(120), 10))
    y = rng.choice(3, 1007, p=[0.85, 0.14, 0.01])
    official = np.arange(1007) % 3 == 0 if kind == "official" else None
    card = replace(card, paper_test="official" if kind == "official" else "random")
    return Dataset(card, pd.DataFrame({"x": y}), y, ("a", "b", "c"), official_test=official)


@pytest.mark.parametrize("kind", ["rows", "groups", "graphs", "official"])
@pytest.mark.parametrize("protocol", datasets.PROTOCOLS)
def test_splits_have_every_row_once_in_parts_of_64_16_20(kind, protocol):
    data = generated(kind)
    found = list(splits(data, trials=3, seed=5, protocol=protocol))
    assert len(found) == 3
    for split in found:
        together = np.concatenate(split)
        assert len(together) == len(data)
        assert len(set(together.tolist())) == len(data)
        test = data.official_test.mean() if (kind, protocol) == ("official", "paper") else 0.2
        shares = [len(part) / len(data) for part in split]
        np.testing.assert_allclose(shares, [(1 - test) * 0.8, (1 - test) * 0.2, test], atol=0.02)
    assert not np.array_equal(found[0].train, found[1].train)


def test_honest_splits_keep_the_shares_of_the_classes():
    data = generated()
    whole = np.bincount(data.y)
    for split in splits(data, trials=5):
        for part, share in zip(split, (0.64, 0.16, 0.2), strict=True):
            np.testing.assert_allclose(np.bincount(data.y[part], minlength=3), whole * share, atol=1.5)


@pytest.mark.parametrize("kind", ["groups", "graphs"])
def test_honest_splits_of_groups_keep_the_shares_roughly(kind):
    data = generated(kind)
    tests = [data.y[split.test].mean() for split in splits(data, trials=20)]
    unstratified = (
        [data.y[split.test].mean() for split in splits(data, trials=20, protocol="paper")] if kind == "graphs" else []
    )
    assert np.std(tests) < 0.03
    assert not unstratified or np.std(tests) < np.std(unstratified)


def test_groups_never_straddle_in_honest_splits_and_do_in_the_papers():
    data = generated("groups")
    for split in splits(data, trials=5):
        parts = [set(data.groups[part].tolist()) for part in split]
        assert sum(map(len, parts)) == 120
        assert len(set.union(*parts)) == 120
    split = next(splits(data, trials=1, protocol="paper"))
    assert set(data.groups[split.train].tolist()) & set(data.groups[split.test].tolist())


def test_the_papers_split_of_a_source_with_a_test_part_is_that_part():
    data = generated("official")
    for split in splits(data, trials=3, protocol="paper"):
        np.testing.assert_array_equal(split.test, np.flatnonzero(data.official_test))
    assert not np.array_equal(next(splits(data, 1)).test, np.flatnonzero(data.official_test))


def test_a_trial_depends_on_seed_and_number_alone():
    data = generated()
    four, two = list(splits(data, 4, seed=1)), list(splits(data, 2, seed=1))
    for left, right in zip(four[:2], two, strict=True):
        for a, b in zip(left, right, strict=True):
            np.testing.assert_array_equal(a, b)
    assert not np.array_equal(next(splits(data, 1, seed=2)).test, two[0].test)


def test_the_protocol_of_splits_is_the_data_sets():
    data = replace(generated("official"), protocol="paper")
    np.testing.assert_array_equal(next(splits(data, 1)).test, np.flatnonzero(data.official_test))
    with pytest.raises(ValueError, match="protocol must be one of"):
        next(splits(data, 1, protocol="honnest"))


def test_a_class_too_small_to_split_is_told():
    data = generated()
    data = replace(data, y=np.where(np.arange(len(data)) < 3, 2, data.y % 2))
    with pytest.raises(DataError, match="every class must have 5 rows to be split in three, 'c' of rows has 3"):
        next(splits(data, 1))


def test_wrong_splits_are_caught():
    data, grouped = generated(), generated("groups")
    train, valid, test = next(splits(data, 1))
    wrong = {
        "every row once": (data, (train, valid, np.append(test[1:], train[0]))),
        "must have 64%": (data, (valid, train, test)),
        "must have the shares": (data, np.split(np.argsort(data.y), [len(train), len(train) + len(valid)])),
        "in two parts": (grouped, np.split(np.random.default_rng(0).permutation(1200), [768, 960])),
    }
    for message, (of, parts) in wrong.items():
        with pytest.raises(AssertionError, match=message):
            check_split(of, datasets.Split(*parts), "honest")


# The command


def run(*arguments):
    import typer

    app = typer.Typer()
    app.command()(command.command)
    return CliRunner().invoke(app, list(arguments))


def test_the_command_lists_all_and_downloads_nothing(two_files, monkeypatch):
    monkeypatch.setenv(VARIABLE, str(two_files))
    result = run()
    assert result.exit_code == 0, result.output
    for name in datasets.names():
        assert name in result.output
    assert str(two_files) in result.output


def test_the_command_in_json(two_files):
    result = run("--data-dir", str(two_files), "--json")
    assert result.exit_code == 0, result.output
    answer = json.loads(result.output)
    rows = {row["name"]: row for row in answer["datasets"]}
    assert list(rows) == datasets.names()
    assert rows["yeast"]["present"]
    assert rows["yeast"]["files"] == [str(two_files / "yeast.parquet")]
    assert not rows["adult"]["present"]
    assert rows["synthetic_5"]["state"] == "generated"
    assert rows["creditcard"]["imbalance"] == pytest.approx(284315 / 492)
    assert rows["creditcard"]["equitability"] == pytest.approx(0.0183, abs=1e-4)
    assert rows["cifar10"]["equitability"] == pytest.approx(1.0)
    assert rows["caltech256"]["counts"] is None
    assert answer["places"] == [{"folder": str(two_files), "named_by": "--data-dir"}]


def test_the_command_checks_what_is_there(two_files):
    assert run("yeast", "--data-dir", str(two_files), "--check").exit_code == 0
    path = two_files / "letter.parquet"
    path.write_bytes(path.read_bytes()[:-1])
    result = run("--data-dir", str(two_files), "--check")
    assert result.exit_code == 2
    assert "letter: " in result.output
    assert "it is truncated" in result.output
    answer = json.loads(run("--data-dir", str(two_files), "--check", "--json").output)
    states = {row["name"]: row["state"] for row in answer["datasets"]}
    assert (states["letter"], states["yeast"], states["adult"]) == ("damaged", "checked", "absent")
    assert states["synthetic_33"] == "checked"


def test_the_command_shows_a_card():
    result = run("adult")
    assert result.exit_code == 0
    for text in ("CC BY 4.0", "Kohavi", "adult.data and adult.test", ">50K 11687"):
        assert text in result.output
    assert isinstance(run("adlt").exception, ValueError)


# The real files


@needs_real
@pytest.mark.parametrize(
    "name", [name for name in datasets.names() if name not in ("caltech256", "cifar10_transportation")]
)
def test_real_files(name):
    loaded = load(name, REAL, fetch=False)
    assert len(loaded) == datasets.find_card(name).rows
    if name in PAPERS:
        assert (len(loaded), loaded.counts[RARE.get(name, loaded.classes[-1])]) == PAPERS[name]
    if loaded.card.kind != "images":
        paper = load(name, REAL, "paper", fetch=False)
        assert paper.counts == loaded.counts
        assert next(splits(paper, 1))
    assert next(splits(loaded, 1))


@needs_real
def test_real_pairs_are_those_of_the_frames():
    frames, pairs = (pd.read_parquet(f"{REAL}/cocktailparty{name}.parquet") for name in ("", "_pairs"))
    derived = cocktailparty.pairs_of_frames(frames)
    for name in (*cocktailparty.FEATURES, "same_group", "frame", "person1", "person2"):
        np.testing.assert_array_equal(derived[name].to_numpy(), pairs[name].to_numpy(), err_msg=name)


@needs_real
def test_real_tables_have_the_fingerprints_of_their_cards():
    for module in TABLES:
        raw = module.SOURCE.load(datasets.open_store(REAL))
        assert fingerprint(raw.frame, np.array(raw.classes, dtype=object)[raw.y]) == module.CARD.fingerprint


# -- Adult as the released code reads it ------------------------------------------------------------------------------


def released_ages(folder):
    """Age codes as the authors' loader makes them from adult.data and adult.test (nathantsoi/btg, src/datasets.py)."""
    columns = [*adult.COLUMNS, "label"]
    train = pd.read_csv(folder / "adult.data", names=columns, skipinitialspace=True)
    test = pd.read_csv(folder / "adult.test", names=columns, skipinitialspace=True)
    joined = pd.concat([train, test.drop(test.index[0])], ignore_index=True)["age"]
    return joined.astype("category").cat.codes if joined.dtype == object else joined


@pytest.mark.parametrize("form", ["original", "without the line", "parquet"])
def test_the_first_line_of_adult_test_gives_test_rows_ages_of_their_own(tmp_path, monkeypatch, form):
    mini = Mini(adult)
    (tmp_path / "released").mkdir()
    mini.original(tmp_path / "released")
    expected = released_ages(tmp_path / "released").to_numpy()
    paths = mini.parquet(tmp_path) if form == "parquet" else mini.original(tmp_path)
    if form == "without the line":
        paths[1].write_text(paths[1].read_text().partition("\n")[2])
    put_card(monkeypatch, adult, versions=with_files(adult.CARD, *paths), **mini.facts)
    clean, quirky = (load("adult", tmp_path, "paper", first_line=quirk) for quirk in (False, True))
    test = quirky.official_test
    order = np.concatenate([np.flatnonzero(~test), np.flatnonzero(test)])  # the released code has training rows first
    np.testing.assert_array_equal(quirky.X["age"].to_numpy()[order], expected)
    assert not set(quirky.X["age"][test]) & set(quirky.X["age"][~test])
    assert set(clean.X["age"][test]) & set(clean.X["age"][~test])
    pd.testing.assert_frame_equal(clean.X.drop(columns="age"), quirky.X.drop(columns="age"))
