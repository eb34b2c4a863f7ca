"""Data sets of tables: cards, what both protocols make of their files, Adult as the released code reads it.

Real files are read only where $EVALIGN_DATA names their folder; everything else is generated, in miniature.
"""

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import sklearn.datasets
from miniature_data import (
    PAPERS,
    RARE,
    REAL,
    TABLES,
    Mini,
    needs_real,
    put_card,
    sentence,
    with_files,
)

from evalign_papers import datasets
from evalign_papers.datasets import DataError, load, splits
from evalign_papers.datasets.dataset import equitability
from evalign_papers.datasets.fingerprint import fingerprint
from evalign_papers.datasets.sources import (
    adult,
    cocktailparty,
    creditcard,
    letter,
    mammography,
    shuttle,
)


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


@pytest.mark.parametrize(
    ("name", "expected"), [("synthetic_5", "8ec6ae04874a1402"), ("synthetic_33", "79f76f9a0d087ebf")]
)
def test_synthetic_sets_are_the_authors_rows(name, expected):
    """These fingerprints were taken from imbalanced-learn's make_imbalance, called as the authors' code does."""
    blobs = load(name)
    assert (len(blobs), blobs.counts["positive"]) == PAPERS[name]
    assert fingerprint(blobs.X, blobs.y) == expected
    pd.testing.assert_frame_equal(blobs.X, load(name, protocol="paper").X)


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
