"""Reading in passes: rows are numbered, partitioned, summarised and shuffled as in a slow form on the whole table."""

import itertools
import math

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from evalign.streaming import source as sources
from evalign.streaming.fit_stream import Stream, StreamBatches, fit_stream
from evalign.streaming.source import ParquetRows, Parts, hashed
from evalign.streaming.statistics import CategorySummary, HeldOutRows, Sample, Statistics, survey
from evalign.tables.columns import ColumnTypeError
from evalign.tables.encode import TableEncoder
from evalign.tables.files import TableError
from evalign.training.batches import Rows
from streams import people, write

FEATURES = ["age", "income", "job", "owner", "rooms", "always"]


@pytest.fixture
def folder(tmp_path):
    return write(tmp_path / "data", people(1000))


def splitmix64(seed, place):
    """The generator as its authors print it, stepped to a place."""
    mask = (1 << 64) - 1
    state = seed
    for _ in range(place + 1):
        state = (state + 0x9E3779B97F4A7C15) & mask
        z = state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        z ^= z >> 31
    return z


@given(st.integers(0, 2**32), st.integers(0, 300))
def test_rows_are_hashed_by_splitmix64(seed, place):
    assert int(hashed(np.array([place], dtype=np.uint64), seed)[0]) == splitmix64(seed, place)


@given(st.floats(0.05, 0.5), st.floats(0.05, 0.5), st.integers(0, 1000))
def test_every_row_is_in_one_part(test, valid, seed):
    parts, numbers = Parts(test, valid, seed), np.arange(2000, dtype=np.uint64)
    masks = [parts.test_rows(numbers), parts.valid_rows(numbers), parts.train_rows(numbers)]
    assert (np.sum(masks, axis=0) == 1).all()
    for mask, share in zip(masks, (test, valid, 1 - test - valid), strict=True):
        assert abs(mask.mean() - share) < 5 * math.sqrt(share * (1 - share) / 2000) + 1e-9
    assert np.array_equal(parts.train_rows(numbers[500:700]), masks[2][500:700])


def test_few_rows_of_a_long_stream_are_held_out():
    parts = Parts.for_rows(20_000_000, 0.2, 0.2, seed=0)
    assert parts.test * 20_000_000 == parts.valid * 20_000_000 == pytest.approx(100_000)
    assert Parts.for_rows(1000, 0.25, 0.2, 0) == Parts(0.25, pytest.approx(0.15), 0)


def test_rows_come_numbered_in_the_order_of_files(folder, monkeypatch):
    monkeypatch.setattr(sources, "CHUNK", 30)
    source, frame = ParquetRows(folder, "sick"), people(1000)
    seen = {}
    for chunk in source.chunks(source.groups, lanes=3):
        assert chunk.batch.num_rows <= 30
        rows = chunk.frame(np.ones(chunk.batch.num_rows, dtype=bool))
        seen.update(zip(chunk.numbers.tolist(), rows["age"].tolist(), strict=True))
    assert [seen[i] for i in range(1000)] == frame["age"].tolist()
    assert source.features == FEATURES


def test_ranks_share_out_row_groups(folder):
    source = ParquetRows(folder, "sick")
    shares = [source.share(rank, 4) for rank in range(4)]
    assert sorted((group for share in shares for group in share), key=lambda g: g.first) == source.groups
    assert len(source.groups) == 12
    with pytest.raises(TableError, match="12 row groups, fewer than the 13 ranks"):
        source.share(0, 13)


def assert_same_encoder(found, wanted):
    found, wanted = found.to_json(), wanted.to_json()
    for one, other in zip(found["columns"], wanted["columns"], strict=True):
        for name in ("shift", "scale", "fill"):
            if name in one:
                assert one.pop(name) == pytest.approx(other.pop(name), rel=1e-12)
    assert found == wanted


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(1, 399), max_size=6), st.sampled_from(["standard", "quantile", "both"]), st.booleans())
def test_statistics_are_those_of_the_whole_table(cuts, numeric, two_ranks):
    frame, numbers = people(400)[FEATURES], np.arange(400, dtype=np.uint64)
    ranks = [Statistics(FEATURES, seed=0), Statistics(FEATURES, seed=0)]
    bounds = [0, *sorted(set(cuts)), 400]
    for i, (start, end) in enumerate(itertools.pairwise(bounds)):
        ranks[i % 2 if two_ranks else 0].add(frame.iloc[start:end], numbers[start:end])
    ranks[0].merge(ranks[1])
    assert_same_encoder(ranks[0].encoder(numeric), TableEncoder(numeric=numeric).fit(frame))


def test_a_column_that_is_blank_for_long_counts_as_missing_there():
    statistics, numbers = Statistics(["owner"], seed=0), np.arange(3, dtype=np.uint64)
    whole = pd.DataFrame({"owner": pd.Series([None, None, None, True, False, True], dtype=object)})
    for start in (0, 3):
        statistics.add(whole.iloc[start : start + 3], numbers + np.uint64(start))
    assert_same_encoder(statistics.encoder("both"), TableEncoder(numeric="both").fit(whole))


def test_files_that_disagree_are_told_apart():
    statistics, numbers = Statistics(["x"], seed=0), np.arange(2, dtype=np.uint64)
    statistics.add(pd.DataFrame({"x": [1.0, 2.0]}), numbers)
    with pytest.raises(ColumnTypeError, match="number values in one file and text values in another"):
        statistics.add(pd.DataFrame({"x": ["a", "b"]}), numbers)


def test_a_sample_is_the_rows_with_the_smallest_hashes_whatever_their_order():
    numbers = np.arange(500, dtype=np.uint64)
    values = numbers.astype(float)[:, None]
    samples = [Sample(1, seed=3, size=50) for _ in range(3)]
    samples[0].add(numbers, values)
    for part in np.array_split(np.random.default_rng(0).permutation(500), 7):
        samples[1].add(numbers[part], values[part])
    samples[2].add(numbers[:250], values[:250])
    other = Sample(1, seed=3, size=50)
    other.add(numbers[250:], values[250:])
    samples[2].merge(other)
    wanted = sorted(range(500), key=lambda i: splitmix64(3 + 0x5A3, i))[:50]
    assert all(sample.values[:, 0].tolist() == wanted for sample in samples)


def test_names_of_rows_do_not_fill_memory():
    summary, rng = CategorySummary(text=True, most=100), np.random.default_rng(0)
    for i in range(20):
        names = pd.Series([f"id{i}-{j}" for j in range(90)] + ["often"] * 10).sample(frac=1, random_state=rng)
        summary.add(names)
        assert len(summary.counts) <= 100
    column = summary.column("name", max_categories=64)
    assert column.id_like
    assert column.other
    assert "often" in column.values


def numbered(frame):
    """A row's age as its only feature: who was in which batch."""
    return Rows.of(
        torch.tensor(frame["age"].tolist(), dtype=torch.float64)[:, None], torch.zeros(len(frame), dtype=torch.long)
    )


@pytest.fixture
def batches(folder, monkeypatch):
    monkeypatch.setattr(sources, "CHUNK", 20)
    source = ParquetRows(folder, "sick")
    return StreamBatches(source, source.groups, Parts(0.2, 0.16, seed=1), numbered, size=25, buffer=150)


def test_a_pass_has_every_training_row_once(batches):
    train = batches.parts.train_rows(np.arange(1000, dtype=np.uint64))
    wanted = people(1000)["age"][train].tolist()
    passes, seen = [], []
    for batch in batches.start_at(0):
        assert 15 <= len(batch) <= 35
        seen += batch.x[:, 0].tolist()
        if len(seen) >= len(wanted):
            passes.append(seen)
            seen = []
        if len(passes) == 2:
            break
    assert sorted(passes[0]) == sorted(passes[1]) == sorted(wanted)
    assert passes[0] != passes[1]  # another order, pass by pass
    assert passes[0] != wanted


def test_a_pass_has_its_own_order_of_row_groups_and_a_bounded_buffer(batches):
    orders = []
    for number in (0, 1):
        blocks = list(batches._blocks(number))
        assert all(sum(chunk.batch.num_rows for chunk in block) < 150 + 20 for block in blocks)
        orders.append([chunk.first for block in blocks for chunk in block])
    assert sorted(orders[0]) == sorted(orders[1])
    assert orders[0] != orders[1]


@pytest.mark.parametrize("place", [0, 1, 7, 30, 65])
def test_a_place_in_the_stream_is_found_again(batches, place):
    whole = [batch.x for batch in itertools.islice(batches.start_at(0), 70)]
    rest = [batch.x for batch in itertools.islice(batches.start_at(place), 70 - place)]
    assert all(torch.equal(a, b) for a, b in zip(whole[place:], rest, strict=True))


def test_rows_are_mixed_across_row_groups(batches):
    first = next(iter(batches.start_at(0))).x[:, 0].tolist()
    group = {age: i // 100 for i, age in enumerate(people(1000)["age"].tolist())}
    assert len({group[age] for age in first}) > 4


def test_the_survey_counts_labels_of_all_rows_and_keeps_those_held_out(folder):
    source, frame, parts = ParquetRows(folder, "sick"), people(1000), Parts(0.2, 0.1, seed=0)
    frame["rooms"] = frame["rooms"].astype(int)  # Parquet keeps categories of text only
    found = survey(source, source.groups, parts)
    assert dict(found.labels) == frame["sick"].value_counts().to_dict()
    numbers = np.arange(1000, dtype=np.uint64)
    assert pd.concat(found.test)["age"].tolist() == frame["age"][parts.test_rows(numbers)].tolist()
    assert pd.concat(found.valid)["age"].tolist() == frame["age"][parts.valid_rows(numbers)].tolist()
    assert_same_encoder(
        found.statistics.encoder("both"),
        TableEncoder(numeric="both").fit(frame.loc[parts.train_rows(numbers), FEATURES]),
    )


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=12), st.integers(1, 5), st.integers(0, 100))
def test_rows_that_are_kept_stay_as_they_are_and_in_few_tables(sizes, most, seed):
    rng, held, expected = np.random.default_rng(seed), HeldOutRows(most), []
    for first, (size, as_text) in enumerate(sizes):
        names = rng.choice(["ash", "oak", "yew"], size)
        column = pa.array(names) if as_text else pa.array(names).dictionary_encode()  # other codes in every chunk
        mark = rng.random(size) < 0.5
        batch = pa.record_batch({"tree": column}).replace_schema_metadata({"file": str(first)})
        held.add(sources.Chunk(first, batch), mark)
        expected += [(name, as_text) for name in names[mark]]
        assert len(held.tables) <= max(most, 1 + sum(a != b for (_, a), (_, b) in itertools.pairwise(expected)))
    frames = held.frames()
    kept = [(name, frame["tree"].dtype != "category") for frame in frames for name in frame["tree"]]
    assert kept == expected
    changes = sum(a != b for (_, a), (_, b) in itertools.pairwise(expected))
    assert len(frames) == (changes + 1 if expected else 0)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (["yes"] * 10, "at least two classes, but has only 'yes'"),
        (["yes"] * 5 + ["no"] * 4 + ["so"], "must have at least 2 rows, but 'so' has fewer"),
        ([0.5, 1.5] * 5, "looks like a regression target"),
        (["yes", None] * 5, "5 of 10 consecutive rows have none"),
    ],
)
def test_labels_that_cannot_be_learned_are_told(tmp_path, target, message):
    source = ParquetRows(write(tmp_path / "d", pd.DataFrame({"x": range(10), "y": target}), files=1), "y")
    with pytest.raises(TableError, match=message):
        survey(source, source.groups, Parts(0.2, 0.2, 0))


def test_files_must_have_the_same_columns(folder):
    people(10).rename(columns={"age": "years"}).to_parquet(folder / "part-9.parquet")
    with pytest.raises(TableError, match=r"same columns.* differ in 'age', 'years'"):
        ParquetRows(folder, "sick")


def test_what_is_no_data_is_left_out(folder):
    (folder / "_SUCCESS.parquet").write_bytes(b"")
    (folder / ".part.parquet").write_bytes(b"")
    assert ParquetRows(folder, "sick").rows == 1000
    (folder / "broken.parquet").write_bytes(b"no")
    with pytest.raises(TableError, match=r"broken.parquet is not a Parquet file or is damaged"):
        ParquetRows(folder, "sick")
    with pytest.raises(TableError, match=r"no column 'sock'.*did you mean 'sick'"):
        ParquetRows(folder / "part-0.parquet", "sock")


@pytest.mark.parametrize("recipe", ["anchored", "anchored_offset", "paper"])
def test_a_streamed_classifier_learns_as_one_in_memory_does(tmp_path, recipe):
    from sklearn.metrics import f1_score

    from evalign import EASTClassifier

    source = ParquetRows(write(tmp_path / "data", people(3000), row_group=500), "sick")
    options = {
        "hidden": (32,),
        "epochs": 30,
        "recipe": recipe,
        "random_state": 0,
        "device": "cpu",
        "learning_rate": 5e-3,
    }
    options["decision"] = "argmax" if recipe == "anchored_offset" else "plug_in"
    streamed = fit_stream(EASTClassifier("f1", **options), Stream.open(source, seed=0))
    new = people(3000, seed=1)
    before = EASTClassifier("f1", **options).fit(people(3000)[FEATURES], people(3000)["sick"])
    scores = [f1_score(new["sick"], m.predict(new[FEATURES]), pos_label="yes") for m in (streamed, before)]
    assert scores[0] == pytest.approx(streamed.score(new[FEATURES], new["sick"]))
    assert scores[0] > 0.8
    assert scores[0] > scores[1] - 0.04
    path = streamed.save(tmp_path / "model.safetensors")
    assert np.array_equal(EASTClassifier.load(path).predict(new[FEATURES]), streamed.predict(new[FEATURES]))
