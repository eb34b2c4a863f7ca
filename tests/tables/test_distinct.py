import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evalign.tables.split import distinct_rows, divide_rows, split_rows

rows = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 2), st.integers(0, 1), st.integers(0, 3)), min_size=1, max_size=40
)


@given(rows, st.randoms(use_true_random=False))
def test_weights_equal_copies_in_any_order(table, random):
    x = np.array([(a, b) for a, b, _, _ in table], dtype=float)
    y = np.array([label for *_, label, _ in table])
    weight = np.array([w for *_, w in table])
    order = np.array(random.sample(range(len(y)), len(y)))
    once, summed = distinct_rows(x[order], y[order], weight[order].astype(float))
    copies = np.repeat(np.arange(len(y)), weight)
    twice, counted = distinct_rows(x[copies], y[copies], np.ones(len(copies)))
    assert np.array_equal(x[order][once], x[copies][twice])
    assert np.array_equal(y[order][once], y[copies][twice])
    assert np.array_equal(summed, counted)
    # Against a dictionary, which knows nothing of hashes or orders.
    expected: dict[tuple[float, ...], float] = {}
    for a, b, label, w in table:
        if w:
            expected[a, b, label] = expected.get((a, b, label), 0) + w
    found = {(*pair, label): w for pair, label, w in zip(x[order][once], y[order][once], summed, strict=True)}
    assert found == expected


def test_frames_with_text_and_missing_values_are_compared_by_content():
    frame = pd.DataFrame({"a": ["x", "y", "x", None, None], "b": [1.0, 2.0, 1.0, np.nan, np.nan]})
    kept, weight = distinct_rows(frame, np.zeros(5, dtype=np.int64), np.ones(5))
    assert sorted(weight.tolist()) == [1, 2, 2]
    assert len(kept) == 3


@given(st.lists(st.integers(0, 5), min_size=1, max_size=200), st.floats(0.05, 0.5), st.integers(0, 3))
def test_split_is_a_partition_that_keeps_every_class_in_training(labels, fraction, seed):
    y = np.unique(np.array(labels), return_inverse=True)[1]
    train, valid = split_rows(y, fraction, seed)
    counts = np.bincount(y)
    assert set(y[train]) == set(y)
    assert sorted([*train, *valid]) == list(range(len(y)))
    held = np.bincount(y[valid], minlength=len(counts))
    assert (np.abs(held - fraction * counts) <= 1).all()
    assert (held[counts >= 4] >= 1).all()


@given(st.integers(1, 60), st.integers(0, 3), st.sampled_from([1.0, 7.5, 1e4]))
def test_dividing_conserves_weight_and_shares_heavy_rows(n, seed, scale):
    y = np.arange(n) % 3
    weight = np.ones(n)
    weight[0] = 1000.0
    division = divide_rows(np.unique(y, return_inverse=True)[1], weight * scale, 0.2, seed)
    if len(division.valid) == len(division.train) == n:
        return  # too few rows to spare one
    total = np.zeros(n)
    np.add.at(total, division.train, division.train_weight)
    np.add.at(total, division.valid, division.valid_weight)
    np.testing.assert_allclose(total, weight * scale)
    alone = (y == 0).sum() <= 20  # among so few rows none has twenty times the mean
    assert alone or (0 in division.train and 0 in division.valid)
    assert not set(division.train[1:]) & set(division.valid[1:]) - {0}


@pytest.mark.parametrize("value", [[1], {"a": 1}, {1}])
def test_values_without_a_hash_name_their_column(value):
    table = pd.DataFrame({"a": [1.0, 2.0], "tags": [value, value]})
    kind = type(value).__name__
    with pytest.raises(ValueError, match=f"column 'tags' holds {kind} values, but every argument must be a string or"):
        distinct_rows(table, np.array([0, 1]), np.ones(2))
