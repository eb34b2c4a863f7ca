"""Joint prediction: the labels of the best expected metric, found by brute force."""

import itertools

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.datasets import make_classification
from sklearn.model_selection import train_test_split

from evalign import EASTBooster, EASTClassifier
from reference.searches import benchmark

X, Y = make_classification(200, 5, n_informative=4, n_redundant=0, n_classes=3, random_state=0)
NAMES = np.array(["ant", "bee", "cow"])[Y]


@pytest.fixture(scope="module")
def two() -> EASTClassifier:
    # Of the batch's own probabilities alone: "auto" also weighs what held-out labels said.
    options = {"hidden": (4,), "epochs": 2, "folds": 1, "random_state": 0, "decision": "plug_in"}
    return EASTClassifier("f1", **options).fit(X, np.where(Y == 0, "yes", "no"))


@pytest.fixture(scope="module")
def three() -> EASTClassifier:
    return EASTClassifier("f1", hidden=(4,), epochs=2, folds=1, random_state=0).fit(X, NAMES)


def with_probabilities(model, p, decide):
    """What the model decides where these are its probabilities, in the order of its classes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(model), "predict_proba", lambda self, X: np.asarray(p))
        return decide(np.zeros((len(p), 5)))


def expected_f1(p, labels):
    """2 E[TP] / (E[positives] + named), the mean over classes (columns of p)."""
    scores = [2 * p[labels == k, k].sum() / (p[:, k].sum() + (labels == k).sum()) for k in range(p.shape[1])]
    return float(np.mean(scores))


@settings(max_examples=40)
@given(st.lists(st.floats(0.01, 0.99), min_size=2, max_size=8))
def test_two_classes_get_the_labels_of_largest_expected_f1(two, positive):
    p = np.column_stack([1 - np.array(positive), positive])
    labels = with_probabilities(two, p, two.predict_jointly)

    def score(chosen):
        return 2 * (p[:, 1] * chosen).sum() / (p[:, 1].sum() + chosen.sum())

    best = max(score(np.array(chosen)) for chosen in itertools.product((0, 1), repeat=len(p)))
    # Rows that are named for less than one row's worth are not.
    assert score((labels == "yes").astype(int)) >= best - 1 / len(p) - 1e-12
    if score(p[:, 1] > 0.5) < best - 1 / len(p):
        assert score((labels == "yes").astype(int)) == pytest.approx(best)


def test_a_rare_class_is_found_by_the_rows_that_it_may_be(three):
    """One of ten rows may be a cow and no other resembles it, a case that held-out rows never showed."""
    p = np.full((10, 3), [0.55, 0.44, 0.01])
    p[3:7] = [0.2, 0.79, 0.01]
    p[9] = [0.35, 0.3, 0.35 - 1e-6]
    p /= p.sum(1, keepdims=True)
    labels = with_probabilities(three, p, three.predict_jointly)
    codes = np.searchsorted(three.classes_, labels)
    assert labels[9] == "cow"
    assert p[9].argmax() == 0
    assert expected_f1(p, codes) > expected_f1(p, p.argmax(1)) + 0.1


def test_order_does_not_matter_and_one_row_alone_is_its_likeliest_class(three):
    p = np.random.default_rng(0).dirichlet([0.5, 0.5, 0.1], 40)
    labels, turn = with_probabilities(three, p, three.predict_jointly), np.random.default_rng(1).permutation(40)
    assert (with_probabilities(three, p[turn], three.predict_jointly) == labels[turn]).all()
    for row in p[:5]:
        assert with_probabilities(three, row[None], three.predict_jointly) == three.classes_[row.argmax()]


def test_the_positive_class_may_be_the_first_and_constraints_hold():
    y = np.where(Y == 0, "a", "b")
    model = EASTClassifier(
        "precision", pos_label="a", subject_to="recall >= 0.8", hidden=(4,), epochs=2, folds=1, random_state=0
    ).fit(X, y)
    p = np.column_stack([np.linspace(0.05, 0.95, 19), 1 - np.linspace(0.05, 0.95, 19)])  # of a and of b
    named = with_probabilities(model, p, model.predict_jointly) == "a"
    # A constraint never rests on probabilities alone: jointly, the rule that met it on held-out labels decides.
    assert (named == (with_probabilities(model, p, model.predict) == "a")).all()
    assert p[named, 0].min() > p[~named, 0].max()


def test_boosted_trees_decide_together_too():
    pytest.importorskip("lightgbm")
    model = EASTBooster("f1", rounds=5, folds=2, random_state=0).fit(X, Y)
    p = model.predict_proba(X[:30])
    together = model.predict_jointly(X[:30])
    assert expected_f1(p, together) >= max(expected_f1(p, p.argmax(1)), expected_f1(p, model.predict(X[:30]))) - 1 / 30


def test_probabilities_that_are_not_honest_are_refused():
    model = EASTClassifier("f1", recipe="anchored_offset", decision="argmax", hidden=(4,), epochs=2, random_state=0)
    with pytest.raises(ValueError, match="class offsets"):
        model.fit(X, Y).predict_jointly(X)


def test_the_search_reads_no_test_row(monkeypatch):
    search = benchmark("search_together")
    table = pd.DataFrame(X)
    monkeypatch.setattr(search, "load", lambda name, folder: (table, Y.astype(np.int64)))
    _, test = train_test_split(np.arange(len(Y)), test_size=0.2, random_state=3, stratify=Y)
    before = search.division("yeast", "random forest", 3, None)
    table = table.copy()
    table.iloc[test] = 0.0
    assert search.division("yeast", "random forest", 3, None) == before
    table.iloc[: len(table)] = 0.0
    assert search.division("yeast", "random forest", 3, None) != before
