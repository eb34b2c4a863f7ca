"""EASTBooster: the contract of EASTClassifier with trees inside."""

import json
import warnings

import numpy as np
import pandas as pd
import pytest
from safetensors import safe_open
from sklearn.base import clone
from sklearn.datasets import load_breast_cancer, load_iris, make_classification
from sklearn.metrics import f1_score, fbeta_score, matthews_corrcoef
from sklearn.model_selection import GridSearchCV, cross_val_score

from evalign import EASTBooster, EASTClassifier, metrics
from evalign.boosting.score_objective import BoostRecipe
from evalign.estimators.blend import load_model
from evalign.tables.encode import TreeTable
from evalign.tables.split import fold_rows

FAST = {"rounds": 25, "n_jobs": 1, "random_state": 0, "folds": 3}


def small(metric="f1", **options):
    return EASTBooster(metric, **{**FAST, **options})


@pytest.fixture(scope="module")
def rare():
    return make_classification(700, 8, n_informative=5, weights=[0.85], flip_y=0.02, random_state=0)


@pytest.fixture(scope="module")
def frame():
    rng = np.random.default_rng(0)
    n = 400
    job = rng.choice(["cook", "smith", "nurse"], n)
    age = np.where(rng.random(n) < 0.1, np.nan, rng.normal(40, 10, n))
    pay = age + 20 * (job == "nurse") + rng.normal(0, 3, n)
    y = np.where(np.nan_to_num(pay, nan=30) > 60, "rich", np.where(job == "cook", "poor", "fair"))
    town = pd.Categorical(rng.choice(["A", "B"], n))
    return pd.DataFrame({"job": job, "age": age, "pay": pay, "town": town, "car": rng.random(n) < 0.5}), y


@pytest.mark.parametrize("library", ["lightgbm", "xgboost"])
def test_it_learns_and_its_score_is_scikit_learns(library, rare):
    X, y = rare
    model = small(library=library).fit(X[:500], y[:500])
    predicted = model.predict(X[500:])
    assert f1_score(y[500:], predicted) > 0.7
    assert model.score(X[500:], y[500:]) == pytest.approx(f1_score(y[500:], predicted))
    X, y = load_iris(return_X_y=True)
    model = small("mcc", library=library).fit(X, y)
    assert model.score(X, y) == pytest.approx(matthews_corrcoef(y, model.predict(X)))
    assert model.score(X, y) > 0.95
    np.testing.assert_allclose(model.predict_proba(X).sum(axis=1), 1.0)


@pytest.mark.parametrize("library", ["lightgbm", "xgboost"])
def test_data_frames_with_text_categories_booleans_gaps_and_unseen_categories(library, frame, tmp_path):
    table, y = frame
    model = small(library=library, min_rows=2).fit(table[:300], y[:300])
    assert model.score(table[300:], y[300:]) > 0.8
    assert list(model.feature_names_in_) == list(table.columns)
    unseen = table[:3].assign(job=["pilot", None, "cook"], pay=[np.nan, 3.0, np.nan])
    assert set(model.predict(unseen)) <= set(model.classes_)
    gap = table[:3].assign(job=[None, None, "cook"], pay=[np.nan, 3.0, np.nan])
    assert np.array_equal(model.predict_proba(unseen), model.predict_proba(gap))  # unseen is unknown
    again = EASTBooster.load(model.save(tmp_path / "m"))
    assert np.array_equal(again.predict_proba(table), model.predict_proba(table))
    with pytest.raises(ValueError, match="feature names should match"):
        model.predict(table.drop(columns="age"))
    with pytest.raises(ValueError, match=r"'when'.*dates"):
        small().fit(table.assign(when=pd.Timestamp("2020-01-01")), y)


def test_trees_see_numbers_as_they_are_and_categories_as_codes(frame):
    table, _ = frame
    encoder = TreeTable().fit(table)
    x = encoder.transform(table)
    assert encoder.categorical == [0, 3]
    assert encoder.feature_names_out == list(table.columns)
    np.testing.assert_array_equal(x[:, 1], table["age"])
    np.testing.assert_array_equal(x[:, 0], pd.Categorical(table["job"]).codes)  # in sorted order
    np.testing.assert_array_equal(x[:, 4], table["car"])
    again = TreeTable.from_json(json.loads(json.dumps(encoder.to_json())))
    np.testing.assert_array_equal(again.transform(table[::-1]), x[::-1])


def test_integer_weights_equal_copies_and_row_order_is_immaterial(rare):
    X, y = rare[0][:200], rare[1][:200]
    weight = np.random.default_rng(0).integers(0, 4, len(y))
    copies = np.repeat(np.arange(len(y)), weight)
    order = np.random.default_rng(1).permutation(len(copies))
    weighted = small().fit(X, y, sample_weight=weight)
    copied = small().fit(X[copies][order], y[copies][order])
    assert np.array_equal(weighted.predict_proba(X), copied.predict_proba(X))
    dropped = small().fit(X[weight > 0], y[weight > 0], sample_weight=weight[weight > 0])
    assert np.array_equal(weighted.predict_proba(X), dropped.predict_proba(X))


def test_class_weight_equals_the_sample_weight_it_stands_for(rare):
    X, y = rare
    by_class = small(class_weight={0: 1.0, 1: 3.0}).fit(X, y)
    by_sample = small().fit(X, y, sample_weight=np.where(y == 1, 3.0, 1.0))
    assert np.array_equal(by_class.predict_proba(X), by_sample.predict_proba(X))
    assert not np.array_equal(by_class.predict_proba(X), small().fit(X, y).predict_proba(X))


@pytest.mark.parametrize("library", ["lightgbm", "xgboost"])
def test_a_seed_decides_and_another_differs(library, rare):
    X, y = rare
    first, again, other = (small(library=library, random_state=s).fit(X, y).predict_proba(X) for s in (1, 1, 2))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


@pytest.mark.parametrize("monitor", ["score", "loss", "entropy"])
def test_growing_stops_at_the_best_round(monitor, rare):
    X, y = rare
    model = small(monitor=monitor, rounds=200, patience=10, learning_rate=0.3).fit(X, y)
    sign = -1 if monitor == "score" else 1
    values = [sign * row[monitor] for row in model.history_]
    assert model.rounds_ == int(np.argmin(values)) + 1 or monitor == "score"
    assert values[model.rounds_ - 1] == min(values)
    assert len(values) == model.rounds_ + 10
    assert [row["epoch"] for row in model.history_] == list(range(1, len(values) + 1))
    assert model.history_[model.rounds_ - 1]["best"]


def test_the_kept_trees_are_those_of_the_best_round(rare):
    X, y = rare
    longer = small(monitor="entropy", rounds=200, patience=10, learning_rate=0.3).fit(X, y)
    exact = small(monitor="entropy", rounds=longer.rounds_, patience=200, learning_rate=0.3).fit(X, y)
    assert np.array_equal(longer.predict_proba(X), exact.predict_proba(X))


def test_one_fold_holds_out_what_the_network_holds_out(rare):
    X, y = rare
    model = small(folds=1).fit(X, y)
    assert len(model.trees_) == 1
    assert len(small(folds=4).fit(X, y).trees_) == 4


def test_folds_hold_every_row_out_once_and_share_heavy_rows():
    labels = np.array([0] * 40 + [1] * 7 + [2])
    weight = np.ones(48)
    weight[0] = 100.0
    made = fold_rows(labels, weight, 5, seed=0)
    held_out = np.concatenate([fold.valid for fold in made])
    counts = np.bincount(held_out, minlength=48)
    assert counts.tolist() == [5] + [1] * 46 + [0]  # the heavy row everywhere, the lonely class never
    total = np.bincount(held_out, np.concatenate([fold.valid_weight for fold in made]), minlength=48)
    np.testing.assert_allclose(total[:47], weight[:47])
    for fold in made:
        assert set(labels[fold.train]) == {0, 1, 2}
        assert set(fold.train) | set(fold.valid) == set(range(48))
        assert set(fold.train) & set(fold.valid) == {0}
        assert fold.train_weight.sum() + fold.valid_weight.sum() == pytest.approx(weight.sum())


def test_labels_may_be_text_and_the_positive_one_is_ours_to_name(rare):
    X, y = rare
    names = np.where(y == 1, "a fraud", "z fine")
    model = small(pos_label="a fraud").fit(X, names)
    predicted = model.predict(X)
    assert model.score(X, names) == pytest.approx(f1_score(names, predicted, pos_label="a fraud"))
    assert list(model.classes_) == ["a fraud", "z fine"]
    assert model.predict_proba(X)[y == 1, 0].mean() > 0.5
    assert np.array_equal(predicted == "a fraud", small().fit(X, y).predict(X) == 1)


def test_beta_by_label_and_constraints_reach_the_objective_and_the_rule(rare):
    X, y = make_classification(600, 6, n_informative=4, n_classes=3, class_sep=0.7, random_state=1)
    names = np.array(["cat", "dog", "frog"])[y]
    keen = small("fbeta", beta={"dog": 5.0}).fit(X, names)
    each = [
        fbeta_score(names == c, keen.predict(X) == c, beta=b) for c, b in zip(keen.classes_, (1, 5, 1), strict=True)
    ]
    assert keen.score(X, names) == pytest.approx(np.mean(each))
    recall = [np.mean(m.predict(X)[names == "dog"] == "dog") for m in (small("fbeta", beta=1.0).fit(X, names), keen)]
    assert recall[1] >= recall[0]
    X, y = rare
    floor = small("recall", subject_to="precision >= 0.7").fit(X, y)
    assert small("recall").fit(X, y).predict(X).sum() > floor.predict(X).sum()
    assert small(decision="argmax").fit(X, y).decision_.kind == "argmax"


@pytest.mark.slow
def test_every_recipe_and_user_metrics_train():
    X, y = load_breast_cancer(return_X_y=True)
    for recipe in ("anchored", "paper", "btg", "cross_entropy", BoostRecipe("mine", "", anchor=0.1, metric=1.0)):
        assert small(recipe=recipe).fit(X, y).score(X, y) > 0.9, recipe
    assert small(lambda c: metrics.accuracy(c)).fit(X, y).score(X, y) > 0.9
    assert small("quadratic_kappa").fit(*load_iris(return_X_y=True)).rounds_ >= 1


def test_works_in_grid_searches_and_cross_validation(rare):
    X, y = rare
    search = GridSearchCV(small(rounds=5), {"leaves": [7, 31]}, cv=2).fit(X, y)
    assert search.best_params_["leaves"] in (7, 31)
    assert cross_val_score(small(rounds=5), X, y, cv=2, scoring="f1").shape == (2,)
    assert clone(small(beta={1: 2.0}, metric="fbeta")).get_params()["beta"] == {1: 2.0}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"metric": "f2"}, "did you mean 'fbeta'"),
        ({"recipe": "anchor"}, "did you mean 'anchored'"),
        ({"decision": "plugin"}, "did you mean 'plug_in'"),
        ({"library": "xgb"}, "did you mean 'xgboost'"),
        ({"monitor": "f1"}, "monitor must be one of"),
        ({"folds": 0}, "folds must lie in"),
        ({"leaves": 1}, "leaves must lie in"),
        ({"columns": 0.0}, "columns must lie in"),
        ({"l2": -1.0}, "l2 must lie in"),
        ({"pos_label": 1, "metric": "f1"}, "pos_label requires two classes"),
        ({"subject_to": "recall >= 0.5", "decision": "argmax"}, "subject_to needs"),
    ],
)
def test_wrong_options_are_named_at_fit(options, message):
    with pytest.raises(ValueError, match=message) as caught:
        small(**options).fit(*load_iris(return_X_y=True))
    assert "\n" not in str(caught.value)


def test_one_class_is_refused_and_a_class_with_one_row_is_kept():
    X, y = load_iris(return_X_y=True)
    with pytest.raises(ValueError, match="at least two classes"):
        small().fit(X, np.zeros(len(y)))
    lonely = y.copy()
    lonely[0] = 7
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert 7 in small().fit(X, lonely).classes_
    with pytest.raises(ValueError, match="labels seen in training"):
        small().fit(X, y).score(X, lonely)


def test_ctrl_c_leaves_a_fitted_classifier(rare):
    def stop(epoch):
        if epoch.epoch == 3:
            raise KeyboardInterrupt

    model = small().fit(*rare, on_epoch=stop)
    assert len(model.history_) == 3
    assert model.predict(rare[0]).shape == rare[1].shape


@pytest.mark.parametrize("noise", [0, 12])
def test_the_share_of_columns_is_the_one_with_the_lower_loss_on_held_out_rows(noise):
    rng = np.random.default_rng(3)
    X, y = load_iris(return_X_y=True)
    X = np.hstack([X, rng.normal(size=(len(X), noise))])
    fixed = {share: small(columns=share).fit(X, y) for share in (1.0, 0.5)}
    losses = {share: min(row["loss"] for row in model.history_) for share, model in fixed.items()}
    model = small().fit(X, y)
    assert model.columns_ == min(losses, key=lambda share: losses[share])
    assert model.history_[model.rounds_ - 1]["loss"] == min(losses.values())
    np.testing.assert_array_equal(model.predict_proba(X), fixed[model.columns_].predict_proba(X))
    assert small().fit(X[:, :3], y).columns_ == 1.0


def test_ctrl_c_while_the_second_share_is_tried_keeps_the_first(rare):
    X, y = np.hstack([rare[0]] * 4)[:, :8], rare[1]
    seen = []

    def stop(epoch):
        seen.append(epoch.epoch)
        if seen.count(1) == 2:
            raise KeyboardInterrupt

    model = small(rounds=10).fit(X, y, on_epoch=stop)
    assert seen == [*range(1, 11), 1]
    assert (model.columns_, len(model.history_)) == (1.0, 10)
    assert model.predict(X).shape == y.shape


@pytest.mark.parametrize("library", ["lightgbm", "xgboost"])
def test_a_saved_model_is_the_same_model(library, frame, tmp_path):
    table, y = frame
    model = small("fbeta", library=library, beta={"rich": 2.0}).fit(table, y)
    path = model.save(tmp_path / "model.safetensors")
    again = load_model(path)
    assert isinstance(again, EASTBooster)
    assert np.array_equal(again.predict_proba(table), model.predict_proba(table))
    assert np.array_equal(again.predict(table), model.predict(table))
    assert again.get_params() == model.get_params()
    assert (again.history_, again.rounds_, again.decision_) == (model.history_, model.rounds_, model.decision_)
    assert again.save(tmp_path / "second").read_bytes() == path.read_bytes()
    with safe_open(path, framework="np") as file:
        text = file.get_tensor("trees_0").tobytes().decode()
    assert text.startswith("tree\nversion=") if library == "lightgbm" else json.loads(text)["learner"]


def test_damaged_and_foreign_files_are_refused(rare, tmp_path):
    path = small(rounds=3).fit(*rare).save(tmp_path / "model")
    content = path.read_bytes()
    rng = np.random.default_rng(0)
    for position in [8, 20, len(content) - 1, *rng.integers(8, len(content), 20)]:
        damaged = bytearray(content)
        damaged[position] ^= 0x15
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"damaged|format version|not of the format|not an evalign"):
            EASTBooster.load(path)
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"not of the format evalign\.classifier"):
        EASTClassifier.load(path)
    with pytest.raises(ValueError, match="only a metric given by name"):
        small(lambda c: metrics.accuracy(c), rounds=3).fit(*rare).save(tmp_path / "other")


def test_a_tuned_rule_that_changes_nothing_is_argmax():
    X, y = load_iris(return_X_y=True)
    easy = y > 0
    assert small(decision="tuned").fit(X, easy).decision_.kind == "argmax"
