"""Splits of both protocols."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from evalign_papers import datasets
from evalign_papers.datasets import DataError, check_split, splits
from evalign_papers.datasets.dataset import Dataset


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
