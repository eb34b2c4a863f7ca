"""A model file gives the same model, or an error of one sentence."""

import json
import pickle

import numpy as np
import onnxruntime
import pandas as pd
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import save_file
from sklearn.base import clone
from sklearn.datasets import load_iris

from evalign import EASTClassifier, metrics
from evalign.estimators.linear import EASTLinear
from evalign.storage import container

FAST = {"hidden": (8,), "epochs": 4, "learning_rate": 1e-2, "random_state": 0}


@pytest.fixture(scope="module")
def mixed():
    rng = np.random.default_rng(0)
    table = pd.DataFrame({"x": rng.normal(size=120), "k": rng.choice(list("ab"), 120), "b": rng.random(120) < 0.5})
    table.loc[::9, "x"] = np.nan
    y = np.where(np.nan_to_num(table.x) + (table.k == "a") > 0.5, "yes", "no")
    return table, y


@pytest.fixture
def saved(mixed, tmp_path):
    model = EASTClassifier("fbeta", beta={"yes": 2.0}, **FAST).fit(*mixed)
    return model, model.save(tmp_path / "model.safetensors")


def test_a_saved_model_is_the_same_model(saved, mixed):
    model, path = saved
    again = EASTClassifier.load(path)
    assert np.array_equal(again.predict_proba(mixed[0]), model.predict_proba(mixed[0]))
    assert np.array_equal(again.predict(mixed[0]), model.predict(mixed[0]))
    assert again.get_params() == model.get_params()
    assert again.history_ == model.history_
    assert again.decision_ == model.decision_
    assert list(again.feature_names_in_) == list(model.feature_names_in_)
    assert again.classes_.dtype == model.classes_.dtype
    assert again.save(path.with_name("second.safetensors")).read_bytes() == path.read_bytes()


@pytest.mark.parametrize("kind", [EASTLinear, EASTClassifier])
def test_a_certified_rule_is_saved_with_its_confidence(kind, mixed, tmp_path):
    options = FAST if kind is EASTClassifier else {"random_state": 0}
    model = kind("precision", pos_label="yes", subject_to="recall >= 0.3", confidence=0.8, **options).fit(*mixed)
    again = kind.load(model.save(tmp_path / "m"))
    assert again.confidence == again.decision_.confidence == 0.8
    assert again.decision_ == model.decision_
    assert again.decision_.bounds is not None


@pytest.mark.parametrize(
    "labels", [np.array([3, 5, 9]), np.array([1.0, 2.0, 4.0]), np.array(["a", "b", "c"], dtype=object)]
)
def test_labels_of_any_plain_kind_survive(labels, tmp_path):
    X, y = load_iris(return_X_y=True)
    model = EASTClassifier(**FAST).fit(X, labels[y])
    again = EASTClassifier.load(model.save(tmp_path / "m"))
    assert again.predict(X).tolist() == model.predict(X).tolist()
    assert again.classes_.tolist() == sorted(labels.tolist())


def test_every_flipped_byte_is_noticed(saved):
    _, path = saved
    content = path.read_bytes()
    rng = np.random.default_rng(0)
    for position in [8, 9, 20, len(content) - 1, *rng.integers(8, len(content), 40)]:
        damaged = bytearray(content)
        damaged[position] ^= 0x15
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"damaged|format version|not an evalign") as caught:
            EASTClassifier.load(path)
        assert "\n" not in str(caught.value)


def test_truncated_foreign_and_future_files_are_refused(saved, tmp_path):
    _, path = saved
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match="damaged"):
        EASTClassifier.load(path)
    with pytest.raises(FileNotFoundError, match="no model file"):
        EASTClassifier.load(tmp_path / "nothing")
    foreign = tmp_path / "foreign.safetensors"
    save_file({"w": np.zeros(3, np.float32)}, foreign)
    with pytest.raises(ValueError, match="not an evalign classifier"):
        EASTClassifier.load(foreign)
    future = json.dumps({"format": "evalign.classifier", "version": 99})
    save_file({"w": np.zeros(3, np.float32)}, foreign, metadata={"evalign": future})
    with pytest.raises(ValueError, match=r"version 99.*reads version 1"):
        EASTClassifier.load(foreign)


def test_a_model_with_other_parts_is_refused_in_one_sentence(saved, tmp_path):
    _, path = saved
    arrays, fitted = container.read(path, EASTClassifier.FORMAT)
    params = fitted["params"]
    for changed in ({"params": {}}, {"params": {**params, "tomorrow": 1}}):
        container.write(tmp_path / "other.safetensors", EASTClassifier.FORMAT, arrays, fitted | changed)
        with pytest.raises(ValueError, match="was saved by another version of evalign") as caught:
            EASTClassifier.load(tmp_path / "other.safetensors")
        assert "\n" not in str(caught.value)


def test_a_pickle_is_not_executed(tmp_path):
    class Bomb:
        def __reduce__(self):
            return (open, (str(tmp_path / "exploded"), "w"))

    path = tmp_path / "model.safetensors"
    path.write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(ValueError, match="damaged or not a model file"):
        EASTClassifier.load(path)
    assert not (tmp_path / "exploded").exists()


def test_the_header_is_readable_json(saved):
    with safe_open(saved[1], framework="np") as file:
        header = json.loads(file.metadata()["evalign"])
    assert header["format"] == "evalign.classifier"
    assert json.loads(header["classifier"])["params"]["metric"] == "fbeta"


def test_what_json_cannot_hold_is_refused_and_nothing_is_written(mixed, tmp_path):
    model = EASTClassifier(lambda c: metrics.f1(c, "binary"), **FAST).fit(*mixed)
    with pytest.raises(ValueError, match="only a metric given by name"):
        model.save(tmp_path / "m")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("gaps", [False, True])
def test_onnx_takes_raw_numbers_and_agrees(gaps, tmp_path):
    X, y = load_iris(return_X_y=True)
    if gaps:
        X = X.copy()
        X[::7, 1] = np.nan
    weight = np.where(y == 0, 0.2, 1.0)
    model = EASTClassifier("balanced_accuracy", numeric="standard", **FAST).fit(X, y, sample_weight=weight)
    session = onnxruntime.InferenceSession(model.export_onnx(tmp_path / "m.onnx"))
    for rows in (1, 7, 150):
        p, label = session.run(None, {"x": X[:rows].astype(np.float32)})
        np.testing.assert_allclose(p, model.predict_proba(X[:rows]), atol=1e-5)
        assert (model.classes_[label] == model.predict(X[:rows])).mean() > 0.97
    names = {entry: json.loads(value) for entry, value in session.get_modelmeta().custom_metadata_map.items()}
    assert names["classes"] == [0, 1, 2]


def test_onnx_of_a_table_with_categories_takes_the_encoded_matrix(mixed, tmp_path):
    model = EASTClassifier(pos_label="no", **FAST).fit(*mixed)
    session = onnxruntime.InferenceSession(model.export_onnx(tmp_path / "m.onnx"))
    p, label = session.run(None, {"x": model.encoder_.transform(mixed[0])})
    np.testing.assert_allclose(p, model.predict_proba(mixed[0]), atol=1e-5)
    assert (model.classes_[label] == model.predict(mixed[0])).mean() > 0.97
    columns = json.loads(session.get_modelmeta().custom_metadata_map["columns"])
    assert columns == model.encoder_.feature_names_out


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_model_of_a_gpu_is_used_without_one(tmp_path):
    X, y = load_iris(return_X_y=True)
    model = EASTClassifier(hidden=(8,), epochs=4, random_state=0).fit(X, y)
    expected = model.predict_proba(X)
    model.device = "cuda:1"
    model.save(tmp_path / "m.safetensors")
    np.testing.assert_array_equal(EASTClassifier.load(tmp_path / "m.safetensors").predict_proba(X), expected)


@pytest.mark.parametrize(
    "options",
    [
        {"class_weight": {0: 1.0, 1: 3.0}},
        {"metric": "fbeta", "average": "macro", "beta": {0: 1.0, 1: 3.0}},
        {"metric": "cost", "costs": {(0, 1): 1.0, (1, 0): 5.0}},
        {"random_state": np.int64(3)},
    ],
)
def test_options_by_label_survive_and_fit_again(options, tmp_path):
    X, y = load_iris(return_X_y=True)
    X, y = X[:100], y[:100]
    model = EASTLinear(**{"random_state": 0, **options}).fit(X, y)
    again = EASTLinear.load(model.save(tmp_path / "m"))
    assert again.get_params() == model.get_params()
    assert (clone(again).fit(X, y).predict_proba(X) == model.predict_proba(X)).all()
