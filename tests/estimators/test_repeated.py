"""Rows that repeat training rows: their labels beside the prediction of the blend, against a loop over rows."""

import numpy as np
import pandas as pd
import pytest

from evalign import EASTBlend
from evalign.estimators.blend import load_model

OPTIONS = {"members": ["linear", "forest"], "forest": {"trees": 10}, "folds": 3, "random_state": 0}


@pytest.fixture(scope="module")
def table():
    """Thirty persons with a label of their own, which no column but the whole row tells, met up to five times."""
    rng = np.random.default_rng(0)
    X = pd.DataFrame({"age": rng.integers(20, 60, 30).astype(float), "job": rng.choice(["cook", "smith", None], 30)})
    X.loc[3, "age"] = np.nan
    y = rng.choice(["a", "b", "c"], 30)
    met = rng.integers(0, 30, 120)
    return X.iloc[met].reset_index(drop=True), y[met], X, y


@pytest.fixture(scope="module")
def model(table):
    return EASTBlend("f1", **OPTIONS).fit(*table[:2])


def test_a_repeated_row_has_the_dirichlet_prediction_of_its_labels(model, table):
    X, y, persons, _ = table
    held_out, codes = model.held_out_predictions_, np.unique(y, return_inverse=True)[1]
    keys = [tuple(row) for row in X.astype(str).to_numpy()]
    found = model.predict_proba(persons)
    for row, p in zip(persons.astype(str).to_numpy(), found, strict=True):
        same = [i for i, key in enumerate(keys) if key == tuple(row)]
        if not same:
            continue
        counts = np.bincount(codes[same], minlength=3)
        own = [i for i, at in enumerate(held_out.rows) if at in same]  # a row for each label it has
        prior = np.average(held_out.probabilities[own], axis=0, weights=held_out.weight[own])
        np.testing.assert_allclose(p, (prior + counts) / (1 + len(same)), atol=1e-4)


def test_it_predicts_new_copies_better(model, table):
    _, _, persons, truth = table
    seen = persons.index[[tuple(row) in set(map(tuple, table[0].astype(str).to_numpy())) for row in
                          persons.astype(str).to_numpy()]]  # fmt: skip
    right = model.predict(persons.loc[seen]) == truth[seen]
    without = np.mean([m.predict_proba(persons.loc[seen]) for m in model.members_.values()], axis=0)
    assert right.mean() > (model.classes_[without.argmax(1)] == truth[seen]).mean() + 0.1


def test_decisions_and_explanations_never_see_a_recalled_row(model, table):
    held_out = model.held_out_predictions_
    members = list(model.members_)
    assert held_out.probabilities.shape == (len(held_out.rows), 3)
    mean = sum(model.weights_[name] * model._member_predictions[name] for name in members)
    np.testing.assert_allclose(held_out.probabilities, mean, atol=1e-12)
    for fold in range(3):
        parts = [model.weights_[name] * model.members_[name]._probabilities(table[0], fold) for name in members]
        np.testing.assert_allclose(model._probabilities(table[0], fold), sum(parts), atol=1e-12)


def test_it_is_saved_and_copies_are_weights(model, table, tmp_path):
    X, y, persons, _ = table
    loaded = load_model(model.save(tmp_path / "m"))
    np.testing.assert_array_equal(loaded.predict_proba(persons), model.predict_proba(persons))
    weight = np.arange(len(X)) % 3
    weighted = EASTBlend("f1", **OPTIONS).fit(X, y, sample_weight=weight)
    copies = EASTBlend("f1", **OPTIONS).fit(X.loc[X.index.repeat(weight)], np.repeat(y, weight))
    assert weighted.repeated_ is not None
    np.testing.assert_array_equal(weighted.predict_proba(persons), copies.predict_proba(persons))


def test_rows_are_not_recalled_without_a_reason(table):
    X, y = table[:2]
    rng = np.random.default_rng(1)
    distinct = X.assign(noise=rng.normal(size=len(X)))
    for rows, labels, options in (
        (distinct, y, {}),  # no row repeats
        (X, rng.permutation(y), {}),  # copies do not agree
        (X[:15], y[:15], {}),  # too few
        (X, y, {"folds": 1}),  # most rows have no held-out prediction
        (X, y, {"class_weight": {"a": 0.7, "b": 1.1, "c": 1.3}}),  # weights are no numbers of copies
    ):
        assert EASTBlend("f1", **{**OPTIONS, **options}).fit(rows, labels).repeated_ is None
