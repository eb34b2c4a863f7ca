"""Explanations from held-out predictions, against scikit-learn on the same rows."""

import numpy as np
import pandas as pd
import pytest
from sklearn.calibration import calibration_curve
from sklearn.datasets import make_classification
from sklearn.exceptions import NotFittedError
from sklearn.metrics import f1_score, precision_score, recall_score

from evalign import EASTBlend, EASTBooster
from evalign.estimators.forest import EASTForest
from evalign.estimators.linear import EASTLinear


@pytest.fixture(scope="module")
def table():
    X, y = make_classification(400, 4, n_informative=2, n_redundant=0, shuffle=False, class_sep=2.0, random_state=0)
    return pd.DataFrame(X, columns=["signal", "signal2", "noise", "noise2"]), np.where(y == 1, "yes", "no")


@pytest.fixture(scope="module")
def model(table):
    options = {"members": ("linear", "forest"), "forest": {"trees": 10}, "folds": 3, "random_state": 0}
    return EASTBlend("f1", **options).fit(*table)


def test_class_scores_are_scikit_learns(model):
    held_out = model.held_out_predictions_
    predicted = model.decision_.predict(held_out.probabilities)
    found = model.class_scores()
    assert list(found.index) == ["no", "yes"]
    for name, score in (("precision", precision_score), ("recall", recall_score), ("f1", f1_score)):
        assert found.loc["yes", name] == pytest.approx(score(held_out.labels, predicted))
    assert found.rows.sum() == 400


def test_the_calibration_curve_is_scikit_learns(model):
    held_out = model.held_out_predictions_
    share, mean = calibration_curve(held_out.labels, held_out.probabilities[:, 1], n_bins=5, strategy="quantile")
    found = model.calibration(bins=5)
    np.testing.assert_allclose(found.share, share)
    np.testing.assert_allclose(found.probability, mean)
    np.testing.assert_allclose(model.calibration("no", bins=5).probability.sum() + mean.sum(), 5, atol=0.2)
    with pytest.raises(ValueError, match="label must be one of"):
        model.calibration("maybe")


@pytest.mark.parametrize("as_array", [False, True])
def test_importance_finds_the_columns_that_matter(model, table, as_array):
    X, y = table
    if as_array:
        model = EASTLinear("f1", folds=3, random_state=0).fit(X.to_numpy(), y)
        X = X.to_numpy()
    before = X.copy()
    found = model.importance(X).set_index("column").importance
    names = [0, 1, 2, 3] if as_array else list(before.columns)
    assert max(found[names[0]], found[names[1]]) > 0.1
    assert abs(found[names[2]]) < 0.05
    assert abs(found[names[3]]) < 0.05
    assert np.array_equal(np.asarray(before), np.asarray(X))  # the table is left as it was
    with pytest.raises(ValueError, match="the table passed to fit"):
        model.importance(X[:50])


def test_feature_importances_are_those_of_a_sample_in_the_order_of_the_columns(model, table):
    found = model.feature_importances_
    assert found.shape == (4,)
    assert found[:2].max() > 0.1
    assert np.abs(found[2:]).max() < 0.05
    assert model.feature_importances_ is found  # computed once
    assert not hasattr(EASTLinear(), "feature_importances_")
    sample = model.importance().set_index("column").importance[list(table[0].columns)]
    np.testing.assert_array_equal(found, sample)


def test_what_needs_held_out_predictions_says_so_without_them(model, tmp_path):
    loaded = EASTBlend.load(model.save(tmp_path / "m"))
    for explain in ("class_scores", "calibration", "importance"):
        with pytest.raises(AttributeError, match="available only after fit"):
            getattr(loaded, explain)()
        with pytest.raises(NotFittedError):
            getattr(EASTBlend(), explain)()
    with pytest.raises(NotFittedError):
        EASTBlend().leaderboard()
    assert loaded.leaderboard().score.isna().all()
    assert loaded.leaderboard().weight.equals(model.leaderboard().weight)


@pytest.mark.parametrize(("kind", "name"), [(EASTForest, "trees"), (EASTBooster, "rounds")])
def test_n_estimators_is_another_name(kind, name, table):
    one, other = kind(**{name: 7}, random_state=0), kind(n_estimators=7, random_state=0)
    np.testing.assert_array_equal(*(model.fit(*table).predict_proba(table[0]) for model in (one, other)))
    with pytest.raises(ValueError, match="must lie in"):
        kind(n_estimators=0).fit(*table)
