"""Networks on folds: none sees the rows that it is scored on, and all equal networks trained one by one."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.datasets import load_iris, make_classification
from sklearn.metrics import f1_score

from evalign import EASTClassifier, decision, metrics
from evalign.estimators.network import automatic_folds
from evalign.networks.mlp import MeanOfNetworks, mlp
from evalign.objective import Objective
from evalign.steps import StepChoice
from evalign.tables.split import fold_rows
from evalign.training.batches import Rows, argmax_score
from evalign.training.in_memory import train
from evalign.training.recipes import Recipe, find_recipe
from evalign.training.stacked import FoldedRows, train_folds

SMALL = {"hidden": (16,), "epochs": 12, "learning_rate": 1e-2, "random_state": 0, "folds": 3}


def small(metric="f1", **options) -> EASTClassifier:
    return EASTClassifier(metric, **{**SMALL, **options})


@pytest.fixture(scope="module")
def rare():
    return make_classification(300, 6, n_informative=4, weights=[0.85], class_sep=1.2, random_state=3)


def encoded_probabilities(model, network, X):
    with torch.no_grad():
        return network.eval()(torch.from_numpy(model.encoder_.transform(X))).double().softmax(1).numpy()


def test_held_out_rows_are_judged_by_the_network_that_never_saw_them():
    # Labels are noise and rows are wide: a network knows the label of every row that it saw, and of no other.
    generator = np.random.default_rng(0)
    X, y = generator.normal(size=(90, 150)), generator.permutation(np.arange(90) % 2)
    model = small(epochs=60, dropout=0.0, recipe="cross_entropy", hidden=(64,)).fit(X, y)
    assert sorted(model.held_out_predictions_.rows) == list(range(90))
    said = model.held_out_predictions_.probabilities[np.arange(90), model.held_out_predictions_.labels]
    assert np.array_equal(model.held_out_predictions_.labels, y[model.held_out_predictions_.rows])
    assert abs(np.mean(said > 0.5) - 0.5) < 0.2
    sizes = [30, 30, 30]
    for member, own in zip(
        model.network_, np.split(model.held_out_predictions_.rows, np.cumsum(sizes)[:-1]), strict=True
    ):
        p = encoded_probabilities(model, member, X)
        np.testing.assert_allclose(
            p[own], model.held_out_predictions_.probabilities[np.isin(model.held_out_predictions_.rows, own)], atol=1e-6
        )
        seen = np.setdiff1d(np.arange(90), own)
        assert np.mean(p[seen, y[seen]] > 0.5) > 0.9
    mean = np.mean([encoded_probabilities(model, member, X) for member in model.network_], axis=0)
    np.testing.assert_allclose(model.predict_proba(X), mean, atol=1e-6)


def test_stacked_members_are_those_trained_one_by_one(rare):
    x, y = rare[0].astype(np.float32), rare[1].astype(np.int64)
    weight = np.random.default_rng(0).integers(1, 4, len(y)).astype(np.float64)
    weight[3] = 300.0  # on both sides of every fold
    divisions = fold_rows(y, weight, 3, seed=5)
    folded = FoldedRows.of(torch.from_numpy(x).__getitem__, y, divisions, torch.device("cpu"))
    objective = Objective("f1", "multiclass", StepChoice("annealed"), average="binary")
    score, recipe = argmax_score(metrics.resolve("f1", average="binary")), find_recipe("anchored").limited(8)
    size = folded.batch_size(32)
    trained = train_folds(lambda: mlp(6, 2, (16,), 0.0), folded, recipe, objective, score, batch_size=size, seed=7)
    start = 0
    for i, (division, member) in enumerate(zip(divisions, trained.network, strict=True)):
        torch.manual_seed(7 + i)
        alone = mlp(6, 2, (16,), 0.0)
        rows = [
            Rows(torch.from_numpy(x[at]), torch.from_numpy(y[at]), torch.from_numpy(w.astype(np.float32)))
            for at, w in ((division.train, division.train_weight), (division.valid, division.valid_weight))
        ]
        history = train(alone, *rows, recipe, objective, score, batch_size=size, seed=7 + i)
        assert [epoch.best for epoch in history] == [epoch.best for epoch in trained.histories[i]]
        losses = [[epoch.loss for epoch in own] for own in (history, trained.histories[i])]
        assert losses[0] == pytest.approx(losses[1], rel=1e-3)
        with torch.no_grad():
            p = alone.eval()(rows[1].x).softmax(1).numpy()
        held_out = trained.held_out[start : start + len(division.valid)]
        start += len(division.valid)
        np.testing.assert_allclose(held_out, p, atol=2e-4)
        for name, value in alone.state_dict().items():
            torch.testing.assert_close(member.state_dict()[name], value, rtol=1e-3, atol=1e-3)


def folds_of(rare, **options):
    x, y = rare[0].astype(np.float32), rare[1].astype(np.int64)
    folded = FoldedRows.of(
        torch.from_numpy(x).__getitem__, y, fold_rows(y, np.ones(len(y)), 3, seed=5), torch.device("cpu")
    )
    objective = Objective("f1", "multiclass", StepChoice("annealed"), average="binary")
    score, recipe = argmax_score(metrics.resolve("f1", average="binary")), find_recipe("cross_entropy").limited(6)
    return folded, train_folds(
        lambda: mlp(6, 2, (16,), 0.2), folded, recipe, objective, score, batch_size=folded.batch_size(32), seed=7,
        **options,
    )  # fmt: skip


def test_an_interrupt_in_the_first_epoch_leaves_one_epoch(rare):
    def stop(epoch):
        raise KeyboardInterrupt

    _, trained = folds_of(rare, on_epoch=stop)
    assert [len(history) for history in trained.histories] == [1, 1, 1]


def test_the_decision_is_learned_on_every_label(rare):
    X, y = rare
    model = small(decision="tuned").fit(X, y)
    assert len(model.held_out_predictions_.labels) == len(np.unique(X, axis=0)) == len(y)
    expected = decision.tuned(
        model.held_out_predictions_.probabilities, y[model.held_out_predictions_.rows], "f1", average="binary"
    )
    assert model.decision_.to_json() == expected.to_json()
    one = small(decision="tuned", folds=1).fit(X, y)
    assert len(one.held_out_predictions_.labels) == pytest.approx(0.2 * len(y), abs=2)
    assert (one.folds_, model.folds_) == (1, 3)
    assert model.score(X, y) == pytest.approx(f1_score(y, model.predict(X)))


def test_a_seed_decides(rare):
    X, y = rare
    first, again, other = (small(random_state=s, dropout=0.3).fit(X, y).predict_proba(X) for s in (1, 1, 2))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)
    torch.manual_seed(0)
    before = torch.rand(1)
    torch.manual_seed(0)
    small(epochs=2).fit(X, y)
    assert torch.rand(1) == before  # the caller's random numbers are left alone


def test_weights_are_copies_and_none_is_no_row(rare):
    X, y = rare
    weight = np.random.default_rng(0).integers(0, 4, len(y))
    weight[np.flatnonzero(y == 0)[0]] = 90  # heavy: divided between both sides of every fold
    copies = np.repeat(np.arange(len(y)), weight)
    order = np.random.default_rng(1).permutation(len(copies))
    weighted = small().fit(X, y, sample_weight=weight)
    copied = small().fit(X[copies][order], y[copies][order])
    assert np.array_equal(weighted.predict_proba(X), copied.predict_proba(X))
    assert weighted.decision_.to_json() == copied.decision_.to_json()
    dropped = small().fit(X[weight > 0], y[weight > 0], sample_weight=weight[weight > 0])
    assert np.array_equal(weighted.predict_proba(X), dropped.predict_proba(X))
    heavy = np.flatnonzero(weighted.held_out_predictions_.rows == np.flatnonzero(y == 0)[0])
    assert len(heavy) == 3
    assert weighted.held_out_predictions_.weight[heavy].sum() == pytest.approx(90)
    assert weighted.held_out_predictions_.weight.sum() == pytest.approx(weight.sum())


@pytest.mark.parametrize("options", [{}, {"network": "embedding"}, {"ensemble": 2, "network": "embedding"}])
def test_what_was_saved_says_the_same(rare, tmp_path, options):
    X, y = rare
    model = EASTClassifier(**{**SMALL, "epochs": 3, **options}).fit(X, y)
    assert isinstance(model.network_, MeanOfNetworks)
    loaded = EASTClassifier.load(model.save(tmp_path / "model"))
    assert loaded.folds_ == 3
    assert np.array_equal(loaded.predict_proba(X), model.predict_proba(X))
    assert np.array_equal(loaded.predict(X), model.predict(X))
    assert loaded.history_ == model.history_


def test_onnx_says_the_same(rare, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    X, y = rare
    model = small(numeric="standard", epochs=3).fit(X, y)
    session = onnxruntime.InferenceSession(model.export_onnx(tmp_path / "model.onnx"))
    p, label = session.run(None, {"x": X.astype(np.float32)})
    np.testing.assert_allclose(p, model.predict_proba(X.astype(np.float32)), atol=1e-5)
    assert np.mean(model.classes_[label] == model.predict(X.astype(np.float32))) > 0.99


def test_five_folds_where_one_division_is_a_lottery():
    def counts(*sizes):
        return np.repeat(np.arange(len(sizes)), sizes)

    assert automatic_folds(counts(227_000, 394), 0.2) == 5  # Credit card
    assert automatic_folds(counts(300, 340, 4), 0.2) == 5
    assert automatic_folds(counts(587, 650), 0.2) == 1  # Letter
    assert automatic_folds(counts(500_000, 394), 0.2) == 1
    assert automatic_folds(counts(400, 0, 400), 0.5) == 1  # a class without rows is none


def test_automatic_folds_are_what_they_say(rare, capsys):
    X, y = rare
    options = {"epochs": 2, "folds": "auto"}
    loud = small(**options, verbose=1).fit(X, y)
    assert loud.folds_ == 5
    assert capsys.readouterr().out.splitlines()[0].startswith("training 5 networks")
    assert np.array_equal(loud.predict_proba(X), small(**options | {"folds": 5}).fit(X, y).predict_proba(X))
    many = np.arange(1200).reshape(-1, 1)
    assert small(**options).fit(many, many[:, 0] % 2).folds_ == 1
    assert small(**options, amp=True).fit(X, y).folds_ == 1
    assert small(lambda c: metrics.f1(c, "binary"), **options).fit(X, y).folds_ == 1
    assert small(**options, recipe="anchored_offset", decision="argmax").fit(X, y).folds_ == 1


def test_ctrl_c_keeps_the_best_of_every_network(rare):
    heard = []

    def stop(epoch) -> None:
        heard.append(epoch.epoch)
        if epoch.epoch == 3:
            raise KeyboardInterrupt

    model = small().fit(*rare, on_epoch=stop)
    assert heard == [1, 2, 3] == [row["epoch"] for row in model.history_]
    assert model.folds_ == len(model.network_) == 3
    assert model.predict(rare[0]).shape == rare[1].shape
    assert all(row["seconds"] > 0 for row in model.history_)


def test_the_listener_hears_of_a_network_as_long_as_one_trains(rare):
    heard = []
    stage = replace(find_recipe("paper").stages[0], patience=1, rate=None)  # each network ends at once after its best
    model = small(recipe=Recipe("short", "", (stage,)), epochs=None).fit(*rare, on_epoch=heard.append)
    assert [epoch.epoch for epoch in heard] == list(range(1, len(heard) + 1))
    assert len(heard) > len(model.history_)


def test_rare_classes_of_one_and_two_rows_are_learned_by_every_network():
    X, y = load_iris(return_X_y=True)
    y = y.copy()
    y[[0, 60, 61]] = 7, 8, 8
    model = small(folds=5).fit(X, y)
    assert list(model.classes_) == [0, 1, 2, 7, 8]
    assert 0 not in model.held_out_predictions_.rows  # alone in its class
    assert {60, 61} <= set(model.held_out_predictions_.rows)
    tiny = small().fit(X[[0, 1, 60, 61]], y[[1, 2, 60, 61]])
    assert tiny.predict(X).shape == y.shape


@pytest.mark.parametrize("metric", sorted(metrics.METRICS))
def test_every_metric_trains_on_folds(metric, rare):
    model = small(metric, epochs=2, folds=2).fit(*rare)
    assert 0 <= model.score(*rare) <= 1


def test_a_loss_that_is_no_number_is_refused(rare):
    with pytest.raises(FloatingPointError, match="lower the learning rate"):
        small(learning_rate=1e30).fit(*rare)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"folds": 0}, "folds must be 'auto' or a whole number of at least 1, got 0"),
        ({"folds": 2.5}, "folds must be 'auto' or a whole number"),
        ({"folds": "five"}, "got 'five'"),
        ({"folds": 2, "amp": True}, "does not support amp=True; use folds=1"),
        ({"folds": 2, "recipe": "anchored_offset", "decision": "argmax"}, "class offsets of recipe 'anchored_offset'"),
    ],
)
def test_what_cannot_be_folded_is_refused_in_one_sentence(options, message, rare):
    with pytest.raises(ValueError, match=message) as caught:
        small(**options).fit(*rare)
    assert "\n" not in str(caught.value)
