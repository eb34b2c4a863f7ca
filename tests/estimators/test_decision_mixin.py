"""`adapt` and `predict_jointly` of classifiers, after the class shares changed and where they did not."""

import numpy as np
import pandas as pd
import pytest
from sklearn.compose import make_column_transformer
from sklearn.ensemble import RandomForestClassifier
from sklearn.exceptions import NotFittedError
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import f1_score
from sklearn.multiclass import OneVsRestClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder

from evalign import EASTClassifier, MetricDecision
from evalign.estimators.decision_mixin import FeatureView


def rows(rng, n, share):
    y = (rng.random(n) < share).astype(int)
    X = rng.normal(size=(n, 3)) + np.outer(y, [2.0, 1.0, 0.0])
    return X, np.where(y == 1, "fraud", "fine")


@pytest.fixture(scope="module")
def model():
    X, y = rows(np.random.default_rng(0), 2000, 0.1)
    # The positive class is the last in the order of labels: fraud.
    return MetricDecision(LogisticRegression(), "f1", decision="tuned").fit(X, y)


def score(y, predicted):
    return f1_score(y, predicted, pos_label="fraud")


def test_regains_what_changed_shares_cost(model):
    X, y = rows(np.random.default_rng(1), 1500, 0.5)
    adapted = model.adapt(X)
    known = MetricDecision(LogisticRegression(), "f1").fit(X, y)  # knows the shares, and the labels
    assert adapted.shift_.kind == "shares"
    assert score(y, adapted.predict(X)) > score(y, model.predict(X)) + 0.02
    assert score(y, adapted.predict(X)) > score(y, known.predict(X)) - 0.01
    np.testing.assert_array_equal(adapted.predict(X), model.predict_jointly(X))
    np.testing.assert_array_equal(adapted.predict_proba(X), model.predict_proba(X))
    assert not hasattr(model, "shift_")


def test_decides_as_before_where_nothing_changed(model):
    X, _ = rows(np.random.default_rng(2), 1000, 0.1)
    adapted = model.adapt(X)
    assert adapted.shift_.kind == "none"
    assert adapted.decision_ == model.decision_


def test_refuses_other_changes(model):
    X, _ = rows(np.random.default_rng(3), 1000, 0.1)
    adapted = model.adapt(X[X[:, 2] > 0])  # a feature that says nothing about the class
    assert adapted.shift_.kind == "other"
    assert "feature 2" in adapted.shift_.reason
    assert adapted.decision_ == model.decision_


def test_refusal_names_the_column():
    rng = np.random.default_rng(3)
    X, y = rows(rng, 800, 0.2)
    table = pd.DataFrame(X, columns=["amount", "hour", "age"]).assign(kind=rng.choice(["u", "v"], 800))
    encoded = make_column_transformer((OneHotEncoder(), ["kind"]), remainder="passthrough")
    model = MetricDecision(make_pipeline(encoded, LogisticRegression()), "f1").fit(table, y)
    assert "feature age differs" in model.adapt(table[table.age > 0]).shift_.reason
    assert "feature kind = " in model.adapt(table[table.kind == "u"]).shift_.reason


def test_given_prevalence_moves_the_threshold(model):
    X, _ = rows(np.random.default_rng(4), 1000, 0.1)
    found = [(model.adapt(prevalence={"fraud": share}).predict(X) == "fraud").sum() for share in (0.01, 0.1, 0.5, 0.9)]
    assert found == sorted(found)
    assert found[0] < found[-1]
    # Training's own share changes next to nothing.
    assert abs(found[1] - (model.predict(X) == "fraud").sum()) <= 30


def test_constraints_hold_after_adapting():
    X, y = rows(np.random.default_rng(0), 4000, 0.1)
    careful = MetricDecision(LogisticRegression(), "recall", subject_to="precision >= 0.8").fit(X, y)
    new, labels = rows(np.random.default_rng(5), 4000, 0.02)
    adapted = careful.adapt(prevalence={"fraud": 0.02})
    flagged = adapted.predict(new) == "fraud"
    before = careful.predict(new) == "fraud"
    assert (labels[flagged] == "fraud").mean() > 0.7
    assert (labels[before] == "fraud").mean() < 0.6


def test_certificates_after_adapting():
    X, y = rows(np.random.default_rng(0), 4000, 0.1)
    options = {"subject_to": "recall['fraud'] >= 0.9", "confidence": 0.9}
    careful = MetricDecision(LogisticRegression(), "precision", **options).fit(X, y)
    adapted = careful.adapt(prevalence={"fraud": 0.4})
    assert adapted.decision_.confidence == 0.9
    assert adapted.decision_.bounds[0] >= 0.9
    new, labels = rows(np.random.default_rng(6), 4000, 0.4)
    assert (adapted.predict(new)[labels == "fraud"] == "fraud").mean() >= 0.88


def test_errors(model):
    with pytest.raises(ValueError, match="got neither"):
        model.adapt()
    with pytest.raises(ValueError, match="must be one of fine, fraud, got 'spam'"):
        model.adapt(prevalence={"spam": 0.1})
    for wrong in ({"fraud": 1.2}, {"fraud": -0.1}, {"fraud": 0.3, "fine": 0.3}, {"fraud": None}, {"fraud": "half"}):
        with pytest.raises(ValueError, match="shares must be"):
            model.adapt(prevalence=wrong)
    with pytest.raises(ValueError, match="shares must be"):
        model.adapt(prevalence={"fraud": float("nan")})
    with pytest.raises(TypeError, match="prevalence must map labels to shares"):
        model.adapt(prevalence=[0.5, 0.5])
    with pytest.raises(NotFittedError):
        MetricDecision(LogisticRegression()).adapt(np.zeros((2, 2)))
    X, y = rows(np.random.default_rng(0), 100, 0.5)
    with pytest.raises(ValueError, match="kept no held-out rows"):
        MetricDecision(LogisticRegression(), decision="argmax").fit(X, y).adapt(X)


def label_rows(rng, n, shares):
    """Two labels, each with an informative feature, and an uninformative feature."""
    y = (rng.random((n, 2)) < shares).astype(int)
    return np.column_stack([rng.normal(size=(n, 2)) + 2 * y, rng.normal(size=n)]), y


def test_labels_adapt_one_by_one():
    rng = np.random.default_rng(0)
    model = MetricDecision(OneVsRestClassifier(LogisticRegression()), "f1", average="macro")
    model.fit(*label_rows(rng, 2000, (0.1, 0.3)))
    X, y = label_rows(rng, 1000, (0.5, 0.3))
    adapted = model.adapt(X)
    assert adapted.shift_.kind == "shares"
    assert adapted.shift_.reason.startswith("Label 0: Class shares changed")
    assert "Label 1" not in adapted.shift_.reason  # its features did change, and label 0 explains it
    assert adapted.shift_.shares[0] == pytest.approx(0.5, abs=0.06)
    assert adapted.shift_.shares[1] == adapted.shift_.before[1]
    np.testing.assert_array_equal(adapted.predict(X)[:, 1], model.predict(X)[:, 1])
    known = MetricDecision(LogisticRegression(), "f1").fit(X, y[:, 0])  # knows the share, and the labels
    scores = [f1_score(y[:, 0], labels) for labels in (m.predict(X)[:, 0] for m in (model, adapted))]
    assert scores[1] > scores[0] + 0.01
    assert scores[1] > f1_score(y[:, 0], known.predict(X)) - 0.01
    np.testing.assert_array_equal(model.predict_jointly(X), adapted.predict(X))
    given = model.adapt(X, prevalence={0: 0.5})
    assert (given.predict(X) != adapted.predict(X)).mean() < 0.02
    with pytest.raises(ValueError, match="prevalence alone"):
        model.adapt(prevalence={0: 0.5})


def test_labels_without_a_change_decide_as_before():
    rng = np.random.default_rng(1)
    model = MetricDecision(OneVsRestClassifier(LogisticRegression()), "f1", average="micro")
    model.fit(*label_rows(rng, 1000, (0.2, 0.3)))
    X, _ = label_rows(rng, 500, (0.2, 0.3))
    assert model.adapt(X).shift_.kind == "none"
    assert model.adapt(X).decision_ == model.decision_
    assert model.adapt(X[X[:, 2] > 0]).shift_.kind == "other"
    with pytest.raises(ValueError, match="constraints on multilabel y"):
        model.set_params(subject_to="recall >= 0.5").adapt(X)


def test_view_of_mixed_columns():
    table = pd.DataFrame({"a": [1.0, np.nan, 3.0], "b": ["x", "y", "x"], "c": pd.Categorical(["u", "u", "v"])})
    view = FeatureView.of(table)
    assert view is not None
    assert view.columns == ((0, None), (1, "x"), (1, "y"), (2, "u"), (2, "v"))
    np.testing.assert_array_equal(view(table)[:, 1:], [[1, 0, 1, 0], [0, 1, 1, 0], [1, 0, 0, 1]])
    assert view(table)[1, 0] < -1e299


@pytest.mark.parametrize("text", [True, False])
def test_wrapped_pipeline_as_onnx(tmp_path, text):
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("skl2onnx")
    from sklearn.datasets import load_iris
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    X, y = load_iris(return_X_y=True)
    X = X.astype(np.float32)
    labels = np.array(["setosa", "versicolor", "virginica"])[y] if text else y * 10
    model = MetricDecision(
        make_pipeline(StandardScaler(), LogisticRegression(C=0.05)), "fbeta", beta=[1.0, 3.0, 1.0]
    ).fit(X, labels)
    path = model.export_onnx(tmp_path / "model.onnx", X)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    p, decided = session.run(["probabilities", "label"], {"X": X})
    np.testing.assert_allclose(p, model.predict_proba(X), atol=1e-5)
    assert (decided != model.predict(X)).sum() <= 1  # rounding to 32 bits


def test_positive_class_and_unknown_models_as_onnx(tmp_path):
    """The positive class comes first among the classes; a converter that is missing is told in one line."""
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("skl2onnx")
    from sklearn.base import BaseEstimator, ClassifierMixin

    X, y = rows(np.random.default_rng(0), 800, 0.3)
    X = X.astype(np.float32)
    model = MetricDecision(LogisticRegression(), "f1", pos_label="fine").fit(X, y)
    session = onnxruntime.InferenceSession(model.export_onnx(tmp_path / "model.onnx", X))
    p, decided = session.run(["probabilities", "label"], {"X": X})
    np.testing.assert_allclose(p, model.predict_proba(X), atol=1e-5)
    assert (decided != model.predict(X)).sum() <= 1

    class Own(ClassifierMixin, BaseEstimator):
        def fit(self, X, y):
            self.inner_ = LogisticRegression().fit(X, y)
            self.classes_ = self.inner_.classes_
            return self

        def predict_proba(self, X):
            return self.inner_.predict_proba(X)

    with pytest.raises(ValueError, match="skl2onnx cannot convert Own") as caught:
        MetricDecision(Own(), "f1").fit(X, y).export_onnx(tmp_path / "own.onnx", X)
    assert len(str(caught.value).splitlines()) == 1


def test_several_labels_as_onnx(tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("skl2onnx")
    X, y = label_rows(np.random.default_rng(0), 300, [0.3, 0.5])
    X, y = X.astype(np.float32), pd.DataFrame(y, columns=["spam", "urgent"])
    model = MetricDecision(OneVsRestClassifier(LogisticRegression()), "f1", average="macro").fit(X, y)
    session = onnxruntime.InferenceSession(model.export_onnx(tmp_path / "m.onnx", X))
    (decided,) = session.run(["label"], {"X": X})
    assert (decided != model.predict(X)).sum() <= 1
    trees = MetricDecision(RandomForestClassifier(3), "f1", average="macro").fit(X, y)
    with pytest.raises(ValueError, match="OneVsRestClassifier"):
        trees.export_onnx(tmp_path / "trees.onnx", X)
    networks = EASTClassifier("f1", hidden=(4,), epochs=1, folds=2, random_state=0).fit(X, y)
    with pytest.raises(ValueError, match="export those in label_models_"):
        networks.export_onnx(tmp_path / "networks.onnx")


def test_wrapped_pipeline_of_a_table_as_onnx(tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("skl2onnx")
    from sklearn.preprocessing import StandardScaler

    rng = np.random.default_rng(0)
    y = (rng.random(300) < 0.2).astype(int)
    table = pd.DataFrame({"a": rng.normal(y), "kind": np.where(rng.random(300) < 0.3 + 0.4 * y, "u", "v")})
    columns = make_column_transformer((StandardScaler(), ["a"]), (OneHotEncoder(), ["kind"]))
    model = MetricDecision(make_pipeline(columns, LogisticRegression()), "f1").fit(table, y)
    session = onnxruntime.InferenceSession(model.export_onnx(tmp_path / "m.onnx", table))
    rows = {"a": table[["a"]].to_numpy(), "kind": table[["kind"]].to_numpy(dtype=object)}
    (decided,) = session.run(["label"], rows)
    assert (decided != model.predict(table)).sum() <= 1


@pytest.fixture(scope="module")
def forest():
    from evalign.estimators.forest import EASTForest

    X, y = rows(np.random.default_rng(0), 1500, 0.2)
    return EASTForest("f1", pos_label="fine", trees=40, random_state=0).fit(X, y)


@pytest.mark.slow
def test_every_classifier_adapts_and_its_file_too(forest, tmp_path):
    from evalign.estimators.boosted import EASTBooster

    X, y = rows(np.random.default_rng(1), 800, 0.7)
    adapted = forest.adapt(X)
    assert adapted.shift_.kind == "shares"
    assert dict(zip(adapted.shift_.classes, adapted.shift_.shares, strict=True))["fraud"] == pytest.approx(
        0.7, abs=0.08
    )
    scores = [f1_score(y, m.predict(X), pos_label="fine") for m in (forest, adapted)]
    assert scores[1] >= scores[0] - 0.01
    np.testing.assert_array_equal(forest.predict_jointly(X), adapted.predict(X))
    booster = EASTBooster("f1", random_state=0, rounds=20).fit(X, y)
    again = EASTBooster.load(booster.save(tmp_path / "booster.evalign"))
    new, _ = rows(np.random.default_rng(2), 600, 0.2)
    np.testing.assert_array_equal(again.adapt(new).predict(new), booster.adapt(new).predict(new))
    assert again.adapt(new).shift_ == booster.adapt(new).shift_
    kept = booster.adapt(new)
    loaded = EASTBooster.load(kept.save(tmp_path / "adapted.evalign"))
    np.testing.assert_array_equal(loaded.predict(X), kept.predict(X))
    assert loaded.shift_ == kept.shift_


def test_adapt_on_the_command_line(forest, tmp_path):
    import json

    from typer.testing import CliRunner

    from evalign.cli.app import app
    from evalign.estimators.boosted import EASTBooster

    X, y = rows(np.random.default_rng(1), 1000, 0.2)
    names = ["a", "b", "c"]
    EASTBooster("f1", random_state=0, rounds=20).fit(pd.DataFrame(X, columns=names), y).save(tmp_path / "model.evalign")
    X, y = rows(np.random.default_rng(2), 600, 0.6)
    pd.DataFrame(X, columns=names).assign(label=y).to_csv(tmp_path / "new.csv", index=False)
    call = ["predict", str(tmp_path / "model.evalign"), str(tmp_path / "new.csv"), "--target", "label"]
    out = ["--out", str(tmp_path / "p.csv"), "--force"]
    shown = CliRunner().invoke(app, [*call, "--adapt", *out])
    assert shown.exit_code == 0, shown.output
    assert "Class shares changed" in shown.output
    results = [json.loads(CliRunner().invoke(app, [*call, *more, *out, "--json"]).stdout) for more in ([], ["--adapt"])]
    assert results[1]["shift"]["kind"] == "shares"
    assert "shift" not in results[0]
    assert results[1]["score"] > results[0]["score"]
