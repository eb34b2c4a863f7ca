"""Methods that users of scikit-learn expect, against `predict` and `predict_proba`."""

import numpy as np
import pandas as pd
import pytest
import scipy.sparse
from sklearn.datasets import load_iris, make_classification
from sklearn.linear_model import LogisticRegression

from evalign import EASTBooster, EASTClassifier, MetricDecision
from evalign.estimators.forest import EASTForest
from evalign.estimators.linear import EASTLinear

MODELS = {
    "network": lambda **options: EASTClassifier("f1", hidden=(8,), epochs=5, folds=1, random_state=0, **options),
    "boost": lambda **options: EASTBooster("f1", rounds=10, random_state=0, **options),
}
DATA = {
    "two": make_classification(300, 6, weights=[0.8], random_state=0),
    "three": load_iris(return_X_y=True),
    "flipped": (make_classification(300, 6, weights=[0.8], random_state=0)),
}


@pytest.mark.parametrize("decision", ["plug_in", "tuned", "argmax"])
@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize("name", MODELS)
def test_decision_function_leads_to_the_prediction(name, data, decision):
    X, y = DATA[data]
    model = MODELS[name](decision=decision, pos_label=0 if data == "flipped" else None).fit(X, y)
    scores = model.decision_function(X)
    by_scores = model.classes_[(scores > 0).astype(int) if scores.ndim == 1 else scores.argmax(axis=1)]
    assert (by_scores == model.predict(X)).all()
    np.testing.assert_allclose(np.exp(model.predict_log_proba(X)), model.predict_proba(X))


@pytest.mark.parametrize("name", MODELS)
def test_sparse_features_are_the_same_as_dense_ones(name):
    X, y = DATA["two"]
    X = np.where(np.abs(X) < 1, 0, X)
    dense, sparse = MODELS[name]().fit(X, y), MODELS[name]().fit(scipy.sparse.csr_array(X), y)
    np.testing.assert_array_equal(sparse.predict_proba(scipy.sparse.csc_matrix(X)), dense.predict_proba(X))


def test_several_classes_a_row_are_refused_with_a_hint():
    X, y = DATA["two"]
    with pytest.raises(ValueError, match="MultiOutputClassifier"):
        MODELS["boost"]().fit(X, np.c_[y, np.where(y == y[0], 2, 3)])


@pytest.mark.parametrize(
    "labels", [pd.Series(["a", None, "b"] * 40, dtype="string"), np.array(["a", None] * 60, object)]
)
@pytest.mark.parametrize("model", [EASTLinear("f1"), MetricDecision(LogisticRegression())])
def test_rows_without_a_label_are_refused(model, labels):
    with pytest.raises(ValueError, match="y must hold a label in every row"):
        model.fit(np.zeros((120, 1)), labels)


@pytest.mark.parametrize("data", ["two", "three"])
@pytest.mark.parametrize("name", [*MODELS, "xgboost", "forest", "linear"])
def test_a_table_without_rows_has_no_predictions(name, data):
    X, y = DATA[data]
    more = {
        "xgboost": lambda: EASTBooster("f1", rounds=3, library="xgboost", random_state=0),
        "forest": lambda: EASTForest("f1", trees=3),
        "linear": lambda: EASTLinear("f1"),
    }
    model = (MODELS | more)[name]().fit(X, y)
    assert model.predict_proba(X[:0]).shape == (0, len(np.unique(y)))
    assert model.predict(X[:0]).shape == model.predict_jointly(X[:0]).shape == (0,)


def test_no_jobs_are_one():
    X, y = DATA["two"]
    one, none = (EASTBooster("f1", rounds=3, random_state=0, n_jobs=n_jobs).fit(X, y) for n_jobs in (1, None))
    assert (one.predict_proba(X) == none.predict_proba(X)).all()
    with pytest.raises(ValueError, match=r"n_jobs must be a number of cores, or -1 for all, got 1\.5"):
        EASTLinear("f1", n_jobs=1.5).fit(X, y)


def test_a_second_fit_forgets_the_first():
    X, y = DATA["two"]
    named = pd.DataFrame(X, columns=list("abcdef"))
    model = MetricDecision(LogisticRegression(), "f1").fit(named, y).adapt(named)
    model.set_params(decision="argmax").fit(X, y)
    assert not hasattr(model, "shift_")
    assert not hasattr(model, "feature_names_in_")
    with pytest.raises(ValueError, match="kept no held-out rows"):
        model.adapt(X)
    trees = EASTLinear("f1").fit(X, y).adapt(prevalence={1: 0.5})
    assert not hasattr(trees.fit(X, y), "shift_")


@pytest.mark.parametrize("model", [EASTLinear, EASTForest, EASTBooster, EASTClassifier])
def test_numpys_numbers_are_numbers_and_half_a_fold_is_none(model, tmp_path):
    X, y = load_iris(return_X_y=True)
    small = {"epochs": 2} if model is EASTClassifier else {}
    given, plain = (model("f1", folds=folds, random_state=0, **small).fit(X, y) for folds in (np.int64(2), 2))
    np.testing.assert_array_equal(given.predict_proba(X), plain.predict_proba(X))
    given.save(tmp_path / "model.safetensors")
    np.testing.assert_array_equal(model.load(tmp_path / "model.safetensors").predict_proba(X), plain.predict_proba(X))
    with pytest.raises((TypeError, ValueError), match=r"folds must be .*whole number.*, got 2\.5"):
        model("f1", folds=2.5).fit(X, y)
