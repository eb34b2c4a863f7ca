"""EASTBlend: members on the same folds, their mean, its weights and its decision; EASTForest's trees as arrays."""

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize
from sklearn.base import clone
from sklearn.datasets import load_iris, load_wine, make_classification
from sklearn.ensemble import ExtraTreesClassifier
from sklearn.metrics import f1_score, matthews_corrcoef

from evalign import EASTBlend, EASTBooster, EASTClassifier
from evalign.estimators.blend import load_model, mixture_weights
from evalign.estimators.forest import EASTForest, TreeArrays
from evalign.storage.container import read, write

SMALL = {"boost": {"rounds": 15}, "forest": {"trees": 15}, "network": {"epochs": 4, "hidden": (8,)}, "n_jobs": 1}


def small(metric="f1", **options):
    return EASTBlend(metric, **{"random_state": 0, "folds": 3, "members": ("boost", "forest"), **SMALL, **options})


@pytest.fixture(scope="module")
def rare():
    return make_classification(500, 6, n_informative=4, weights=[0.85], flip_y=0.02, random_state=0)


@pytest.fixture(scope="module")
def frame():
    rng = np.random.default_rng(0)
    n = 300
    job = rng.choice(["cook", "smith", "nurse"], n)
    age = np.where(rng.random(n) < 0.1, np.nan, rng.normal(40, 10, n))
    y = np.where(np.nan_to_num(age, nan=50) + 10 * (job == "nurse") > 45, "rich", "poor")
    return pd.DataFrame({"job": job, "age": age, "car": rng.random(n) < 0.5}), y


# -- trees as arrays --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gaps", [0.0, 0.2])
def test_arrays_say_what_scikit_learns_forest_says(gaps):
    X, y = load_wine(return_X_y=True)
    X = np.where(np.random.default_rng(0).random(X.shape) < gaps, np.nan, X).astype(np.float32)
    forest = ExtraTreesClassifier(30, max_features=1.0, random_state=0).fit(X[::2], y[::2] + 2)
    trees = TreeArrays.of(forest, 5)  # 0 and 1 were not among its rows
    trees.check(X.shape[1])
    p = trees.probabilities(X)
    assert not p[:, :2].any()
    np.testing.assert_allclose(p[:, 2:], forest.predict_proba(X), atol=1e-12)
    assert trees.probabilities(X[:0]).shape == (0, 5)


def test_trees_that_point_elsewhere_are_refused():
    X, y = load_iris(return_X_y=True)
    trees = TreeArrays.of(ExtraTreesClassifier(3, random_state=0).fit(X, y), 3)
    inner = int(np.flatnonzero(trees.feature >= 0)[0])
    leaf = int(np.flatnonzero(trees.feature < 0)[0])
    for name, place, value in [
        ("left", inner, inner), ("right", inner, len(trees.feature)), ("feature", inner, 4),
        ("left", leaf, len(trees.shares)), ("roots", 0, -1),
    ]:  # fmt: skip
        array = getattr(trees, name).copy()
        array[place] = value
        with pytest.raises(ValueError, match="nodes out of range"):
            TreeArrays(**{**vars(trees), name: array}).check(4)


# -- weights ----------------------------------------------------------------------------------------------------


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 1000))
def test_weights_without_a_prior_have_the_least_log_loss(seed):
    """Against scipy's constrained optimiser on the same convex problem."""
    rng = np.random.default_rng(seed)
    p = [rng.dirichlet(np.ones(3), 40) for _ in range(3)]
    y, weight = rng.integers(0, 3, 40), rng.random(40) + 0.1

    def loss(w):
        mixed = sum(wi * np.clip(q[np.arange(40), y], 1e-5, None) for wi, q in zip(w, p, strict=True))
        return np.average(-np.log(mixed), weights=weight)

    found = mixture_weights(p, y, weight, prior_rows=0)
    simplex = {"type": "eq", "fun": lambda w: w.sum() - 1}
    best = minimize(loss, np.full(3, 1 / 3), method="SLSQP", bounds=[(0, 1)] * 3, constraints=simplex)
    assert sum(found) == pytest.approx(1)
    assert loss(found) <= best.fun + 1e-4


def test_few_rows_shrink_the_weights_to_equal_ones():
    sure, unsure = np.full((50, 2), [0.9, 0.1]), np.full((50, 2), 0.5)
    few = mixture_weights([sure, unsure], np.zeros(50, dtype=int), np.ones(50))
    many = mixture_weights([np.tile(sure, (40, 1)), np.tile(unsure, (40, 1))], np.zeros(2000, dtype=int), np.ones(2000))
    assert few[0] == pytest.approx(50 / 150 + 100 / 150 / 2, abs=1e-3)
    assert many[0] > 0.97


# -- the classifier ---------------------------------------------------------------------------------------------


def test_it_is_the_mean_of_its_members_and_decides_on_the_mean(rare):
    X, y = rare
    model = small(members=("boost", "forest", "network"), weights="equal").fit(X, y)
    alone = [clone(member).set_params(folds=3, random_state=0) for member in model.members_.values()]
    for member in alone:
        member.fit(X, y)
        assert np.array_equal(member.held_out_predictions_.rows, model.held_out_predictions_.rows)
    np.testing.assert_allclose(
        model.predict_proba(X), np.mean([member.predict_proba(X) for member in alone], axis=0), atol=1e-9
    )
    told = np.mean([member.held_out_predictions_.probabilities for member in alone], axis=0)
    np.testing.assert_allclose(model.held_out_predictions_.probabilities, told, atol=1e-9)
    assert np.array_equal(model.held_out_predictions_.labels, y[model.held_out_predictions_.rows])
    assert len(model.history_) == sum(len(member.history_) for member in alone)


def test_it_learns_and_its_score_is_scikit_learns(rare):
    X, y = rare
    model = small().fit(X[:400], y[:400])
    predicted = model.predict(X[400:])
    assert f1_score(y[400:], predicted) > 0.6
    assert model.score(X[400:], y[400:]) == pytest.approx(f1_score(y[400:], predicted))
    X, y = load_iris(return_X_y=True)
    model = small("mcc").fit(X, y)
    assert model.score(X, y) == pytest.approx(matthews_corrcoef(y, model.predict(X)))
    np.testing.assert_allclose(model.predict_proba(X).sum(axis=1), 1.0)


def test_the_mean_is_weighted_and_columns_are_those_of_the_classes(frame):
    table, y = frame
    for label in ("poor", "rich"):
        model = small(weights="equal", pos_label=label).fit(table, y)
        model.weights_ = {"boost": 0.25, "forest": 0.75}
        p = [member.predict_proba(table) for member in model.members_.values()]
        np.testing.assert_allclose(model.predict_proba(table), np.average(p, axis=0, weights=[0.25, 0.75]))
        for own in p:
            assert np.mean(model.classes_[own.argmax(axis=1)] == y) > 0.9


def test_a_member_that_adds_nothing_is_dropped():
    X = np.random.default_rng(0).random((4000, 4))
    # One threshold says all, and the forest has leaves too large to find it.
    model = small(forest={"trees": 5, "min_rows": 1500}, boost={"rounds": 60}).fit(X, X[:, 0] > 0.7)
    assert model.weights_ == {"boost": 1.0, "forest": 0.0}
    assert list(model.members_) == ["boost"]


@pytest.mark.parametrize("members", [("boost", "forest", "network"), ("forest",), ("network", "forest")])
def test_a_saved_blend_says_the_same(members, frame, tmp_path):
    table, y = frame
    model = small(members=members, weights="equal", pos_label="poor").fit(table, y)
    unseen = table[:4].assign(job=["pilot", None, "cook", "smith"], age=[np.nan, 3.0, 1e300, -np.inf])
    for loaded in (EASTBlend.load(model.save(tmp_path / "m")), load_model(tmp_path / "m")):
        for rows in (table, unseen.replace(-np.inf, -1e300)):
            assert np.array_equal(loaded.predict_proba(rows), model.predict_proba(rows))
            assert np.array_equal(loaded.predict(rows), model.predict(rows))
        assert loaded.score(table, y) == model.score(table, y)
        assert repr(loaded.history_) == repr(model.history_)  # nan where a member has no score
        assert loaded.weights_ == model.weights_
        assert clone(loaded).get_params()["members"] == list(members)
    with pytest.raises(ValueError, match=r"not of the format evalign\.classifier"):
        EASTClassifier.load(tmp_path / "m")
    with pytest.raises(ValueError, match=r"not of the format evalign\.blend"):
        EASTBlend.load(EASTBooster(rounds=3, n_jobs=1).fit(table, y).save(tmp_path / "b"))


def test_a_file_with_wrong_trees_is_refused(frame, tmp_path):
    path = small(members=("forest",)).fit(*frame).save(tmp_path / "m")
    arrays, fitted = read(path, "evalign.blend")
    arrays["forest.0.left"][0] = 0  # a root that leads to itself
    with pytest.raises(ValueError, match="nodes out of range"):
        EASTBlend.load(write(path, "evalign.blend", arrays, fitted))


def test_the_same_seed_gives_the_same_blend(rare):
    X, y = rare
    first, second, other = (small(random_state=seed).fit(X, y).predict_proba(X) for seed in (3, 3, 4))
    assert np.array_equal(first, second)
    assert not np.array_equal(first, other)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"members": ()}, "members must be distinct names"),
        ({"members": "boost"}, "members must be distinct names"),
        ({"members": ("boost", "boost")}, "members must be distinct names"),
        ({"members": ("boost", "forrest")}, "did you mean 'forest'"),
        ({"weights": "even"}, "weights must be one of"),
        ({"boost": {"round": 3}}, "did you mean 'rounds'"),
        ({"boost": {"folds": 3}}, "option of boost must be one of"),
        ({"decision": "plugin"}, "did you mean 'plug_in'"),
        ({"forest": {"trees": 0}}, "trees must"),
        ({"forest": {"columns": 2}}, "columns must"),
    ],
)
def test_wrong_options_are_told(options, message, rare):
    with pytest.raises(ValueError, match=message):
        small(**options).fit(*rare)


def test_a_class_without_weight_does_not_count(rare):
    X, y = rare
    with pytest.raises(ValueError, match="at least two classes with a positive weight"):
        small().fit(X, y, sample_weight=(y == 0).astype(float))


def test_a_forest_grown_in_steps_is_the_one_grown_at_once(rare):
    X, y = rare
    seen = []
    model = EASTForest("f1", trees=60, folds=1, n_jobs=1, random_state=0).fit(X, y, on_epoch=seen.append)
    assert [(epoch.epoch, epoch.stage) for epoch in seen] == [(step, "trees") for step in range(1, 7)]
    (arrays,) = model.forests_
    train = np.setdiff1d(np.arange(len(y)), model.held_out_predictions_.rows)
    seed = int(np.random.RandomState(0).randint(2**31 - 1))
    once = ExtraTreesClassifier(60, max_features=1.0, random_state=seed).fit(X[train].astype(np.float32), y[train])
    assert np.allclose(arrays.probabilities(X), once.predict_proba(X.astype(np.float32)))


def test_a_forest_that_is_interrupted_keeps_its_trees(rare):
    X, y = rare

    def end(epoch):
        raise KeyboardInterrupt

    model = EASTForest("f1", trees=60, folds=3, n_jobs=1, random_state=0).fit(X, y, on_epoch=end)
    assert [len(forest.roots) for forest in model.forests_] == [10, 10, 10]
    assert model.predict_proba(X).shape == (len(y), 2)
