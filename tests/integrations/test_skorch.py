"""skorch's classifier with a metric as criterion: probabilities, history, annealing, parts, scikit-learn's tools."""

import pickle
from functools import partial

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from sklearn.metrics import f1_score
from sklearn.model_selection import GridSearchCV
from skorch import NeuralNetBinaryClassifier, NeuralNetClassifier
from skorch.dataset import ValidSplit
from skorch.helper import predefined_split
from torch import nn
from torch.utils.data import TensorDataset

from evalign import MetricLoss
from evalign.annealing import Geometric
from evalign.integrations.skorch import MetricCallback, MetricNetClassifier, binary_probabilities
from schedules import Linear

X, Y = load_digits(return_X_y=True)
X, Y = (X / 16).astype(np.float32)[:300], Y[:300]


class Network(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))

    def forward(self, x):
        return self.layers(x)


def net(**options):
    torch.manual_seed(0)
    options = {"max_epochs": 4, "batch_size": 64, "lr": 0.5, "verbose": 0, "criterion__metric": "f1"} | options
    return MetricNetClassifier(Network, **options)


def test_probabilities_are_softmax_of_the_logits():
    model = net(criterion__anchor=1.0).fit(X, Y)
    probabilities = model.predict_proba(X)
    np.testing.assert_allclose(probabilities.sum(1), 1, rtol=1e-5)
    np.testing.assert_array_equal(model.predict(X), probabilities.argmax(1))
    assert f1_score(Y, net(criterion__anchor=1.0, max_epochs=30).fit(X, Y).predict(X), average="macro") > 0.8


def test_history_has_the_metric_of_all_validation_rows():
    valid = TensorDataset(torch.from_numpy(X[200:]), torch.from_numpy(Y[200:]))
    model = net(callbacks=[MetricCallback()], train_split=predefined_split(valid), batch_size=16)
    model.fit(X[:200], Y[:200])
    expected = f1_score(Y[200:], model.predict(X[200:]), average="macro")
    assert model.history[-1, "valid_f1"] == pytest.approx(expected)
    logits = model.forward(X[200:])
    soft = 1 - MetricLoss("f1")(logits, torch.from_numpy(Y[200:])).item()
    assert model.history[-1, "valid_soft_f1"] == pytest.approx(soft, abs=1e-6)
    assert model.history[:, "temperature"] == [0.2] * 4
    assert not model.criterion_._forward_hooks


def test_the_schedule_cools_and_ends_training():
    callback = MetricCallback(partial(Linear, steps=3, start=0.2, end=0.05))
    model = net(callbacks=[("metric", callback)], max_epochs=20, train_split=ValidSplit(3)).fit(X, Y)
    assert len(model.history) == 3
    assert model.criterion_.temperature == pytest.approx(0.05)
    assert callback.state_dict()["taken"] == 3


@pytest.mark.parametrize("parts", [2, 5])
def test_parts_train_as_the_whole_batch(parts):
    whole, split = (net(train_split=None, parts=n, criterion__memory="auto").fit(X, Y) for n in (1, parts))
    for a, b in zip(whole.module_.parameters(), split.module_.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)
    assert split.history[:, "train_loss"] == pytest.approx(whole.history[:, "train_loss"], rel=1e-3)


def test_saved_parameters_have_temperature_and_memory(tmp_path):
    model = net(criterion__memory="auto", callbacks=[MetricCallback(partial(Geometric, patience=1))]).fit(X, Y)
    model.save_params(f_params=tmp_path / "net.pt", f_criterion=tmp_path / "loss.pt")
    fresh = net(criterion__memory="auto").initialize()
    fresh.load_params(f_params=tmp_path / "net.pt", f_criterion=tmp_path / "loss.pt")
    torch.testing.assert_close(fresh.criterion_.state_dict(), model.criterion_.state_dict(), rtol=0, atol=0)
    np.testing.assert_array_equal(fresh.predict(X), model.predict(X))
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(model)).predict(X), model.predict(X))


def test_a_grid_search_sets_the_options_of_the_loss():
    grid = {"criterion__anchor": [0.5, 2.0]}
    search = GridSearchCV(net(max_epochs=1, train_split=None), grid, cv=2, scoring="f1_macro")
    search.fit(X[:100], Y[:100])
    assert search.best_estimator_.criterion_.objective.anchor in (0.5, 2.0)


def test_what_does_not_fit_is_told():
    with pytest.raises(TypeError, match="criterion must be MetricLoss, got"):
        MetricCallback().on_train_begin(MetricNetClassifier(Network, criterion=nn.CrossEntropyLoss).initialize())
    with pytest.raises(TypeError, match="needs a tensor as input and a MetricLoss"):
        MetricNetClassifier(Network, criterion=nn.CrossEntropyLoss, parts=2, verbose=0, max_epochs=1).fit(X, Y)


RARE = (Y == 3).astype(np.int64)


class Head(nn.Module):
    def __init__(self, outputs=1, flat=False):
        super().__init__()
        self.layer, self.flat = nn.Linear(64, outputs), flat

    def forward(self, x):
        return self.layer(x)[:, 0] if self.flat else self.layer(x)


def head(kind=MetricNetClassifier, **options):
    torch.manual_seed(0)
    fixed = {"max_epochs": 40, "batch_size": 64, "lr": 2.0, "verbose": 0, "train_split": None}
    loss = {"criterion": MetricLoss, "criterion__metric": "f1", "criterion__anchor": 1.0}
    return kind(Head, **fixed | loss | options)


@pytest.mark.parametrize("shape", [{}, {"module__flat": True}, {"module__outputs": 2}])
def test_binary_heads_predict_through_a_sigmoid(shape):
    fitted = head(criterion__task="binary", **shape).fit(X, RARE)
    p = fitted.predict_proba(X)
    assert p.shape == (len(X), 2)
    np.testing.assert_allclose(p.sum(1), 1, atol=1e-6)
    np.testing.assert_array_equal(fitted.predict(X), p[:, 1] >= 0.5)
    assert f1_score(RARE, fitted.predict(X)) > 0.9


def test_the_metric_is_f1_unless_named():
    torch.manual_seed(0)
    fitted = MetricNetClassifier(nn.Linear(X.shape[1], 1), criterion__task="binary", max_epochs=40, lr=2.0, verbose=0)
    assert fitted.fit(X, RARE).criterion_.metric == "f1"
    assert f1_score(RARE, fitted.predict(X)) > 0.5


def test_skorchs_binary_classifier_takes_the_loss():
    options = {"criterion__task": "binary", "predict_nonlinearity": binary_probabilities}
    fitted = head(NeuralNetBinaryClassifier, **options).fit(X, RARE.astype(np.float32))
    assert f1_score(RARE, fitted.predict(X)) > 0.9


@pytest.mark.parametrize("kind", [NeuralNetClassifier, NeuralNetBinaryClassifier])
def test_skorchs_classifiers_may_not_return_logits_as_probabilities(kind):
    """Without a nonlinearity, `NeuralNetClassifier` with one output predicts 0 for every row, without a warning."""
    options = {"criterion__task": "binary", "callbacks": [MetricCallback()], "max_epochs": 1}
    target = RARE.astype(np.float32)
    with pytest.raises(TypeError, match="would return logits as probabilities: use MetricNetClassifier"):
        head(kind, **options).fit(X, target)
    p = head(kind, predict_nonlinearity=binary_probabilities, **options).fit(X, target).predict_proba(X)
    np.testing.assert_allclose(p.sum(1), 1, atol=1e-6)


def test_multilabel_heads_predict_every_label():
    labels = np.stack([Y == 3, Y % 2], 1).astype(np.int64)
    fitted = head(criterion__task="multilabel", module__outputs=2).fit(X, labels)
    assert fitted.predict(X).shape == labels.shape
    assert f1_score(labels, fitted.predict(X), average="macro") > 0.8
    split = ValidSplit(5, stratified=True)  # skorch's default, which refuses labels of many columns
    model = head(criterion__task="multilabel", module__outputs=2, train_split=split).fit(X, labels)
    assert len(model.history[0, "batches"]) > 0
    assert model.train_split is split
    assert split.stratified
