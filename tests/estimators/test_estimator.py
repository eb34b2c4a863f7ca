"""EASTClassifier with data frames, pipelines, grid searches and unusual labels."""

import warnings

import numpy as np
import pandas as pd
import pytest
from sklearn.base import clone
from sklearn.datasets import load_breast_cancer, load_iris, make_classification
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import f1_score, fbeta_score, matthews_corrcoef
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from evalign import EASTClassifier, metrics

SMALL = {"hidden": (16,), "epochs": 12, "learning_rate": 1e-2, "random_state": 0}


def small(metric="f1", **options) -> EASTClassifier:
    return EASTClassifier(metric, **{**SMALL, **options})


@pytest.fixture(scope="module")
def rare():
    """Two classes, one in ten positive, with a signal that a linear model finds."""
    return make_classification(800, 6, n_informative=4, weights=[0.9], class_sep=1.2, flip_y=0.02, random_state=3)


@pytest.fixture(scope="module")
def frame():
    rng = np.random.default_rng(0)
    n = 300
    job = rng.choice(["cook", "smith", "clerk"], n)
    age = rng.normal(40, 10, n)
    pay = np.where(rng.random(n) < 0.1, np.nan, rng.lognormal(3, 1, n))
    y = np.where((job == "smith") & (age > 35), "rich", np.where(np.nan_to_num(pay) > 40, "fair", "poor"))
    table = pd.DataFrame(
        {
            "job": job,
            "age": age,
            "pay": pay,
            "town": pd.Categorical(rng.choice(["A", "B"], n)),
            "car": rng.random(n) < 0.5,
        }
    )
    return table, y


def test_it_learns_what_a_linear_model_learns(rare):
    X, y = rare
    model = small(epochs=30).fit(X[:600], y[:600])
    linear = f1_score(y[600:], LogisticRegression().fit(X[:600], y[:600]).predict(X[600:]))
    assert model.score(X[600:], y[600:]) > linear - 0.05
    assert model.score(X[600:], y[600:]) == pytest.approx(f1_score(y[600:], model.predict(X[600:])))


def test_scores_are_the_metrics_of_scikit_learn():
    X, y = load_iris(return_X_y=True)
    model = small().fit(X, y)
    assert model.score(X, y) == pytest.approx(f1_score(y, model.predict(X), average="macro"))
    weight = np.random.default_rng(0).random(len(y))
    expected = f1_score(y, model.predict(X), average="macro", sample_weight=weight)
    assert model.score(X, y, weight) == pytest.approx(expected)
    model = small("mcc").fit(X, y)
    assert model.score(X, y) == pytest.approx(matthews_corrcoef(y, model.predict(X)))
    assert small(lambda c: metrics.accuracy(c)).fit(X, y).score(X, y) > 0.8


def test_data_frames_with_text_categories_booleans_and_gaps(frame):
    table, y = frame
    model = small(epochs=40).fit(table[:200], y[:200])
    assert model.score(table[200:], y[200:]) > 0.6
    assert list(model.feature_names_in_) == list(table.columns)
    assert model.n_features_in_ == 5
    assert list(model.classes_) == ["fair", "poor", "rich"]
    unseen = table[:3].assign(job=["pilot", None, "cook"], pay=[np.nan, 3.0, np.nan])
    assert set(model.predict(unseen)) <= set(model.classes_)
    with pytest.raises(ValueError, match="feature names should match"):
        model.predict(table.drop(columns="age"))
    with pytest.raises(ValueError, match=r"'when'.*dates"):
        small().fit(table.assign(when=pd.Timestamp("2020-01-01")), y)


def test_works_in_pipelines_grid_searches_and_cross_validation(rare):
    X, y = rare
    pipeline = make_pipeline(StandardScaler(), small(epochs=4))
    assert pipeline.fit(X, y).predict(X).shape == y.shape
    search = GridSearchCV(small(epochs=4), {"metric": ["f1", "mcc"], "dropout": [0.0, 0.3]}, cv=2).fit(X[:200], y[:200])
    assert search.best_params_["metric"] in ("f1", "mcc")
    assert cross_val_score(small(epochs=4), X[:200], y[:200], cv=2, scoring="f1").shape == (2,)
    copy = clone(small(beta={1: 2.0}, metric="fbeta"))
    assert copy.get_params()["beta"] == {1: 2.0}


def test_labels_may_be_text_and_the_positive_one_is_ours_to_name(rare):
    X, y = rare
    names = np.where(y == 1, "a fraud", "z fine")  # sorts first, so it is class 0 unless told otherwise
    model = small(pos_label="a fraud", epochs=30).fit(X, names)
    predicted = model.predict(X)
    assert model.score(X, names) == pytest.approx(f1_score(names, predicted, pos_label="a fraud"))
    proba = model.predict_proba(X)
    assert list(model.classes_) == ["a fraud", "z fine"]
    assert proba[y == 1, 0].mean() > proba[y == 0, 0].mean()  # columns follow classes_
    plain = small(epochs=30).fit(X, y)
    assert (plain.predict(X) == (predicted == "a fraud")).mean() > 0.97
    with pytest.raises(ValueError, match="pos_label must be one of"):
        small(pos_label="fraud").fit(X, names)


def test_beta_by_label_moves_that_class_towards_recall():
    X, y = make_classification(600, 6, n_informative=4, n_classes=3, class_sep=0.7, random_state=1)
    names = np.array(["cat", "dog", "frog"])[y]
    base = small("fbeta", beta=1.0, epochs=30).fit(X, names)
    keen = small("fbeta", beta={"dog": 5.0}, epochs=30).fit(X, names)
    recall = [np.mean(model.predict(X)[names == "dog"] == "dog") for model in (base, keen)]
    assert recall[1] > recall[0]
    betas = np.array([1.0, 5.0, 1.0])
    each = [fbeta_score(names == c, keen.predict(X) == c, beta=b) for c, b in zip(keen.classes_, betas, strict=True)]
    assert keen.score(X, names) == pytest.approx(np.mean(each))
    with pytest.raises(ValueError, match="did you mean 'dog'"):
        small("fbeta", beta={"dogs": 5.0}).fit(X, names)


def test_class_weight_equals_the_sample_weight_it_stands_for(rare):
    X, y = rare
    by_class = small(class_weight={0: 1.0, 1: 3.0}).fit(X, y)
    by_sample = small().fit(X, y, sample_weight=np.where(y == 1, 3.0, 1.0))
    assert np.array_equal(by_class.predict_proba(X), by_sample.predict_proba(X))
    assert not np.array_equal(by_class.predict_proba(X), small().fit(X, y).predict_proba(X))


def test_integer_weights_equal_copies_and_row_order_is_immaterial(rare):
    X, y = rare[0][:200], rare[1][:200]
    weight = np.random.default_rng(0).integers(0, 4, len(y))
    copies = np.repeat(np.arange(len(y)), weight)
    order = np.random.default_rng(1).permutation(len(copies))
    weighted = small().fit(X, y, sample_weight=weight)
    copied = small().fit(X[copies][order], y[copies][order])
    assert np.array_equal(weighted.predict_proba(X), copied.predict_proba(X))


def test_history_temperature_and_decision_are_there_to_look_at(rare):
    model = small("mcc").fit(*rare)
    assert [row["epoch"] for row in model.history_] == list(range(1, len(model.history_) + 1))
    assert {"stage", "temperature", "train_loss", "loss", "entropy", "score", "best", "seconds"} <= set(
        model.history_[0]
    )
    assert 0 < model.temperature_ <= 0.4
    assert model.decision_.metric == "mcc"


def test_decision_and_constraints_reach_the_rule(rare):
    X, y = rare
    assert small(decision="argmax").fit(X, y).decision_.kind == "argmax"
    floor = small("recall", subject_to="precision >= 0.9", epochs=30).fit(X, y)
    free = small("recall", epochs=30).fit(X, y)
    assert free.predict(X).mean() > floor.predict(X).mean()
    with pytest.raises(ValueError, match="subject_to needs"):
        small(decision="argmax", subject_to="precision >= 0.9").fit(X, y)


def test_a_seed_decides_and_another_differs(rare):
    X, y = rare
    first, again, other = (small(random_state=s).fit(X, y).predict_proba(X) for s in (1, 1, 2))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


def test_every_recipe_trains():
    X, y = load_breast_cancer(return_X_y=True)
    for recipe in ("anchored", "paper", "btg", "cross_entropy"):
        model = small(recipe=recipe, epochs=20).fit(X, y)
        assert model.score(X, y) > 0.9, recipe


def test_ctrl_c_leaves_a_fitted_classifier(rare):
    def stop(epoch) -> None:
        if epoch.epoch == 3:
            raise KeyboardInterrupt

    model = small().fit(*rare, on_epoch=stop)
    assert len(model.history_) == 3
    assert model.predict(rare[0]).shape == rare[1].shape


def test_verbose_trains_as_quietly_does(rare, capsys):
    loud, quiet = small(verbose=1, epochs=3).fit(*rare), small(epochs=3).fit(*rare)
    assert np.array_equal(loud.predict_proba(rare[0]), quiet.predict_proba(rare[0]))
    lines = capsys.readouterr().out.splitlines()
    shown = [f"{row['stage']} {row['epoch']}: f1 {row['score']:.4f}, loss {row['loss']:.4f}" for row in loud.history_]
    assert [line for line in lines if not line.startswith("training")] == shown


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"metric": "f2"}, "did you mean 'fbeta'"),
        ({"recipe": "anchor"}, "did you mean 'anchored'"),
        ({"decision": "plugin"}, "did you mean 'plug_in'"),
        ({"dropout": 1.5}, r"dropout must lie in \[0, 1\)"),
        ({"validation_fraction": 0.0}, "validation_fraction must lie in"),
        ({"batch_size": 0}, "batch_size must lie in"),
        ({"epochs": 0}, "epochs must lie in"),
        ({"beta": 2.0}, "beta requires metric 'fbeta'"),
        ({"pos_label": 1, "metric": "f1"}, "pos_label requires two classes"),
    ],
)
def test_wrong_options_are_named_at_fit(options, message):
    X, y = load_iris(return_X_y=True)
    with pytest.raises(ValueError, match=message) as caught:
        EASTClassifier(**{**SMALL, **options}).fit(X, y)
    assert "\n" not in str(caught.value)


def test_one_class_is_refused_and_a_class_with_one_row_is_kept():
    X, y = load_iris(return_X_y=True)
    with pytest.raises(ValueError, match="at least two classes"):
        small().fit(X, np.zeros(len(y)))
    with pytest.raises(ValueError, match="at least two classes"):
        small().fit(X, y, sample_weight=(y == 0).astype(float))
    lonely = y.copy()
    lonely[0] = 7
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert 7 in small().fit(X, lonely).classes_
    with pytest.raises(ValueError, match="labels seen in training"):
        small().fit(X, y).score(X, lonely)
