"""The benchmarks' splits: held-out predictions keep their order, test predictions are means over folds."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from evalign import EASTClassifier
from evalign.training.recipes import find_recipe


@pytest.fixture
def splits(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    import stacked_splits

    return stacked_splits


@pytest.fixture(scope="module")
def table():
    x = np.random.default_rng(0).normal(size=(203, 2))
    return pd.DataFrame(x, columns=["a", "b"]), np.searchsorted([0.0, 0.8], x[:, 0]).astype(np.int64)


def test_every_fold_of_every_split_is_one_network_of_a_stack(splits, table):
    X, y = table
    options = {"hidden": (16,), "recipe": find_recipe("cross_entropy").limited(40).scaled(5.0), "dropout": 0.0}
    made = list(splits.parts(X, y, range(2), 3))
    assert [len(part.divisions) for part in made] == [3, 3]
    found = splits.network_probabilities(options, made, 3, "cpu")
    for part, (held_out, test) in zip(made, found, strict=True):
        assert sorted(part.held_out) == list(range(len(part.y)))
        assert np.mean(held_out.argmax(1) == part.y[part.held_out]) > 0.85  # in another order it would be a third
        assert np.mean(test.argmax(1) == part.test_y) > 0.85
        np.testing.assert_allclose(test.sum(1), 1.0)
    again = splits.network_probabilities(options, made[:1], 3, "cpu")  # a neighbour is not felt
    np.testing.assert_allclose(again[0][0], found[0][0], atol=2e-3)
    np.testing.assert_allclose(again[0][1], found[0][1], atol=2e-3)


def test_folds_are_those_of_the_classifier(splits, table):
    X, y = table
    (part,) = splits.parts(X, y, [0], EASTClassifier(folds="auto").folds)
    assert len(part.divisions) == 5
    (one,) = splits.parts(X, y, [0])
    assert len(one.divisions) == 1
    assert len(one.test) == len(part.test) == 41


def test_candidates_are_never_compared_on_test_rows(splits, table, monkeypatch):
    X, y = table
    seen = []
    monkeypatch.setattr(splits, "encoded", lambda X, y, dev, test, seed, folds: seen.append((set(dev), set(test))))
    list(splits.parts(X, y, [4]))
    list(splits.selections(X, y, [4]))
    (dev, test), (fit, select) = seen
    assert fit | select == dev
    assert not fit & select
    assert not (fit | select) & test
