"""Derivatives by raw score: equal to autograd through the loss and to finite differences, for every metric and task."""

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import f1_score, log_loss, matthews_corrcoef, roc_auc_score

from evalign import MetricLoss, metrics
from evalign._options import LossOptions
from evalign.boosting import gradients
from evalign.boosting.gradients import ScoredRows, metric_gradient
from evalign.boosting.score_objective import RoundCounter, ScoreObjective, cooling


def table(task, n=60, classes=4, seed=0):
    """Scores, labels of every class, and weights of which some are 0."""
    rng = np.random.default_rng(seed)
    shape = (n,) if task == "binary" else (n, classes)
    scores = rng.normal(size=shape) * 2
    y = rng.integers(0, classes, n) if task == "multiclass" else rng.integers(0, 2, shape)
    weight = rng.random(n) * (rng.random(n) < 0.8)
    return scores, y, weight


def rate_of_class_one(c):
    return c.tp[1] / c.actual[1] - 0.1 * c.matrix[0, 1] / c.total


CASES = [
    *((name, task, {}) for name in metrics.METRICS for task in ("binary", "multiclass", "multilabel")
      if not (name == "quadratic_kappa" and task != "multiclass")),
    *(("auroc", task, {"threshold": [0.25, 0.5, 0.75]}) for task in ("binary", "multiclass", "multilabel")),
    ("fbeta", "multiclass", {"beta": [1.0, 2.0, 0.5, 5.0]}),
    ("f1", "multiclass", {"average": "weighted", "label_smoothing": 0.1}),
    ("f1", "multiclass", {"threshold": 0.3}),
    ("f1", "binary", {"threshold": 0.3}),
    ("f1", "binary", {"threshold": 0.7, "step": "linear", "label_smoothing": 0.2}),
    ("mcc", "binary", {"threshold": [0.2, 0.5, 0.8]}),
    ("mcc", "multilabel", {"step": "sigmoid"}),
    ("f1", "multilabel", {"average": "micro", "weight": [1.0, 2.0, 3.0, 0.5]}),
    ("f1", "multiclass", {"step": "sigmoid", "weight": [1.0, 2.0, 3.0, 0.5]}),
    (rate_of_class_one, "binary", {}),
    (rate_of_class_one, "multiclass", {}),
]  # fmt: skip


@pytest.mark.parametrize("blocks", ["one block", "many blocks"])
@pytest.mark.parametrize(("metric", "task", "options"), CASES, ids=lambda x: getattr(x, "__name__", str(x)))
def test_gradient_is_autograds_through_the_loss(metric, task, options, blocks, monkeypatch):
    if blocks == "many blocks":
        monkeypatch.setattr(gradients, "FUSED", 28)
        monkeypatch.setattr(gradients, "EAGER", 28)
    scores, y, weight = table(task)
    z = torch.from_numpy(scores).requires_grad_()
    loss = MetricLoss(metric, task=task, anchor=0.7, temperature=0.15, **options)
    given = torch.from_numpy(weight)
    given = given[:, None].expand(z.shape) if task == "multilabel" else given
    value = loss(z, torch.from_numpy(y), given)
    expected = torch.autograd.grad(value, z)[0].numpy()
    objective = ScoreObjective(metric, task=task, anchor=0.7, temperature=0.15, **options)
    got, gradient, hessian = objective.value_and_gradient(scores, y, weight)
    total = objective._table(scores, y, weight).weight.sum().item()
    assert got == pytest.approx(value.item(), abs=1e-12)
    np.testing.assert_allclose(gradient, total * expected, atol=1e-11)
    assert got == pytest.approx(objective.loss(scores, y, weight), abs=1e-12)
    assert (hessian[weight > 0] > 0).all()
    assert (hessian[weight == 0] == 0).all()


@pytest.mark.parametrize("task", ["binary", "multiclass", "multilabel"])
def test_gradient_is_that_of_finite_differences(task):
    scores, y, weight = table(task, n=12)
    objective = ScoreObjective("f1", task=task, temperature=0.13)
    gradient, _ = objective.gradient(scores, y, weight)
    total = objective._table(scores, y, weight).weight.sum().item()
    for at in np.ndindex(scores.shape):
        up, down = scores.copy(), scores.copy()
        up[at] += 1e-6
        down[at] -= 1e-6
        slope = total * (objective.loss(up, y, weight) - objective.loss(down, y, weight)) / 2e-6
        assert gradient[at] == pytest.approx(slope, abs=1e-5)


@pytest.mark.parametrize("temperature", [0.4, 0.399, 0.01])
def test_gradients_stay_finite_at_the_ends_of_the_temperature_and_of_the_scores(temperature):
    scores, y, _ = table("binary")
    for z in (scores, np.full_like(scores, 800.0), np.full_like(scores, -800.0), np.zeros_like(scores)):
        gradient, hessian = ScoreObjective("f1", task="binary", temperature=temperature).gradient(z, y)
        assert np.isfinite(gradient).all()
        assert (hessian >= 1e-3).all()


@given(seed=st.integers(0, 10_000), task=st.sampled_from(["binary", "multiclass", "multilabel"]))
@settings(max_examples=30, deadline=None)
def test_a_weight_of_zero_is_no_row_and_of_two_is_two_rows(seed, task):
    scores, y, _ = table(task, n=20, seed=seed)
    weight = np.random.default_rng(seed).integers(0, 3, 20).astype(float)
    if not weight.any():
        return
    objective = ScoreObjective("f1", task=task)
    copies = np.repeat(np.arange(20), weight.astype(int))
    gradient, hessian = objective.gradient(scores, y, weight)
    each, each_hessian = objective.gradient(scores[copies], y[copies])
    shape = (-1, *[1] * (scores.ndim - 1))
    np.testing.assert_allclose(gradient[copies] / weight[copies].reshape(shape), each, atol=1e-12)
    np.testing.assert_allclose(hessian[copies] / weight[copies].reshape(shape), each_hessian, atol=1e-12)
    assert (gradient[weight == 0] == 0).all()


def test_memory_of_the_gradient_is_not_an_autograd_graph_of_the_table(monkeypatch):
    rows = []
    count = metric_gradient.__globals__["Objective"].confusion

    def counting(self, logits, *rest):
        rows.append((len(logits), logits.requires_grad))
        return count(self, logits, *rest)

    monkeypatch.setattr("evalign.objective.Objective.confusion", counting)
    scores, y, _ = table("multiclass", n=100_000)
    objective = ScoreObjective("f1", step="sigmoid").objective
    metric_gradient(objective, ScoredRows(torch.from_numpy(scores), torch.from_numpy(y), torch.ones(len(y))), 0.2)
    with_graph = [n for n, graph in rows if graph]
    assert sum(with_graph) == 100_000
    assert max(with_graph) <= gradients.EAGER // 4


def test_scores_are_those_of_scikit_learn():
    scores, y, weight = table("multiclass")
    objective = ScoreObjective("f1")
    assert objective.score(scores, y, weight) == pytest.approx(
        f1_score(y, scores.argmax(1), average="macro", sample_weight=weight)
    )
    assert ScoreObjective("mcc").score(scores, y) == pytest.approx(matthews_corrcoef(y, scores.argmax(1)))
    p = objective.probabilities(scores)
    assert ScoreObjective("f1", metric_weight=0.0).loss(scores, y) == pytest.approx(log_loss(y, p))
    scores, y, weight = table("binary")
    at_third = ScoreObjective("f1", task="binary", threshold=1 / 3)
    decided = at_third.probabilities(scores) >= 1 / 3
    assert at_third.score(scores, y, weight) == pytest.approx(f1_score(y, decided, sample_weight=weight))
    fine = ScoreObjective("auroc", task="binary", threshold=np.linspace(0.001, 0.999, 2000).tolist())
    assert fine.score(scores, y) == pytest.approx(roc_auc_score(y, scores), abs=2e-3)
    scores, y, _ = table("multilabel")
    multilabel = ScoreObjective("f1", task="multilabel")
    assert multilabel.score(scores, y) == pytest.approx(f1_score(y, scores >= 0, average="macro"))


def test_damping_bounds_the_steps_of_the_metric():
    y = (np.arange(5000) < 3).astype(int)
    scores = np.where(y == 1, 0.0, -9.0)  # nearly right: then F1 hangs on three rows of 5000
    metric_only = {"task": "binary", "anchor": 0.0}
    gradient, hessian = ScoreObjective("f1", **metric_only).gradient(scores, y)
    assert (np.abs(gradient / hessian) <= 1).all()
    gradient, hessian = ScoreObjective("f1", **metric_only, damping=0.0).gradient(scores, y)
    assert np.abs(gradient / hessian).max() > 100


def test_temperature_may_fall_by_round():
    scores, y, _ = table("binary")
    cooled = ScoreObjective("f1", task="binary", temperature=cooling(0.2, 0.05, rounds=10))
    for number, temperature in ((0, 0.2), (9, 0.05), (50, 0.05)):
        fixed = ScoreObjective("f1", task="binary", temperature=temperature)
        expected = fixed.gradient(scores, y)[0]
        np.testing.assert_allclose(cooled.gradient(scores, y, round=number)[0], expected, atol=1e-12)


def test_rounds_are_told_from_scores():
    counter = RoundCounter()
    grown = np.array([[0.1, 0.2], [0.3, 0.1]])
    start = np.full((2, 2), 0.5)
    assert [counter.next(z) for z in (start, grown, grown, start, grown, grown[:1])] == [0, 1, 2, 0, 1, 0]


@pytest.mark.parametrize(
    ("options", "scores", "y", "message"),
    [
        ({}, np.zeros(3), np.zeros(3), "pass task='binary'"),
        ({"task": "binary"}, np.zeros((3, 3)), np.zeros(3), "pass task='multiclass'"),
        ({}, np.zeros((3, 2)), np.array([0, 1, 2]), "target"),
        ({}, np.zeros((3, 2)), np.array([0, 1]), "labels must have shape"),
        ({"weight": [1.0, 2.0, 3.0]}, np.zeros((2, 2)), np.array([0, 1]), "weight"),
        ({"temperature": lambda r: 0.9, "task": "binary"}, np.zeros(2), np.array([0, 1]), "temperature"),
    ],
)
def test_what_does_not_fit_is_told_in_one_sentence(options, scores, y, message):
    with pytest.raises(ValueError, match=message) as caught:
        ScoreObjective("f1", **options).gradient(scores, y)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"anchor": 0.0, "metric_weight": 0.0}, "nothing would be learned"),
        ({"metric": "f2"}, "did you mean 'fbeta'"),
        ({"floor": -1.0}, "floor must lie"),
        ({"curvature": 0.0}, "curvature must lie"),
        ({"temperature": 0.5}, "temperature"),
    ],
)
def test_wrong_options_are_named_at_once(options, message):
    with pytest.raises(ValueError, match=message):
        ScoreObjective(**options)


@pytest.mark.parametrize(("metric", "task", "options"), CASES, ids=lambda x: getattr(x, "__name__", str(x)))
def test_float32_scores_give_the_same_in_float32(metric, task, options):
    """Which has loops of its own for two classes; float64 is held against autograd above."""
    scores, y, weight = table(task)
    scores, weight = scores.astype(np.float32), weight.astype(np.float32)
    objective = ScoreObjective(metric, task=task, anchor=0.7, metric_weight=1.3, floor=0.02, damping=0.6, **options)
    value, *exact = objective.value_and_gradient(scores.astype(np.float64), y, weight)
    got, *narrow = objective.value_and_gradient(scores, y, weight)
    assert got == pytest.approx(value, abs=1e-5)
    for ours, wide in zip(narrow, exact, strict=True):
        assert ours.dtype == np.float32
        np.testing.assert_allclose(ours, wide, atol=2e-4, rtol=1e-4)


def test_float32_scores_of_two_classes_without_anchor_and_of_ignored_rows():
    scores, y, weight = table("binary")
    scores[weight == 0] = np.nan
    objective = ScoreObjective("f1", task="binary", anchor=0.0, temperature=0.4)
    narrow = objective.value_and_gradient(scores.astype(np.float32), y, weight)
    kept = weight > 0
    exact = objective.value_and_gradient(scores[kept].astype(np.float32).astype(float), y[kept], weight[kept])
    assert narrow[0] == pytest.approx(exact[0], abs=1e-6)
    for ours, wide in zip(narrow[1:], exact[1:], strict=True):
        np.testing.assert_allclose(ours[kept], wide, atol=1e-4)
        assert (ours[~kept] == 0).all()


@pytest.mark.parametrize("weighted", [False, True])
def test_labels_that_change_between_rounds_are_seen_even_in_place(weighted):
    generator = np.random.default_rng(0)
    scores = generator.normal(size=60).astype(np.float32)
    y, weight = (generator.random(60) < 0.3).astype(np.float32), generator.random(60) if weighted else None
    kept = ScoreObjective("f1", task="binary")
    before = kept.gradient(scores, y, weight)[0]
    assert np.array_equal(before, kept.gradient(scores, y.copy(), weight)[0])
    y[:20] = 1 - y[:20]
    if weight is not None:
        weight[30:] *= 2
    changed = kept.gradient(scores, y, weight)[0]
    assert np.array_equal(changed, ScoreObjective("f1", task="binary").gradient(scores, y, weight)[0])
    assert not np.array_equal(changed, before)
    y[0] = 2
    with pytest.raises(ValueError, match="must lie in 0 to 1, got 2"):
        kept.gradient(scores, y, weight)
    with pytest.raises(ValueError, match="labels must have shape"):
        kept.gradient(scores[:50], y, weight)


@pytest.mark.parametrize(
    ("name", "value"),
    [("offset", [0.0, 1.0]), ("memory", "auto"), ("pos_weight", 2.0), ("ignore_index", 255), ("per_image", True),
     ("class_dim", -1), ("from_logits", False), ("sync", False)],
)  # fmt: skip
def test_options_that_trees_cannot_follow_are_refused(name, value):
    with pytest.raises(ValueError, match=f"{name} is supported by MetricLoss but not by boosted trees"):
        ScoreObjective("f1", task="binary", **{name: value})
    default = LossOptions.__dataclass_fields__[name].default
    assert ScoreObjective("f1", task="binary", **{name: default}).task == "binary"


def test_the_anchor_of_trees_is_cross_entropy_and_weights_are_not_negative():
    with pytest.raises(ValueError, match="the anchor of boosted trees must be cross-entropy, got 'focal'"):
        ScoreObjective("f1", anchor=(1.0, "focal"))
    with pytest.raises(ValueError, match=r"weight must lie in \[0, inf\), got -1"):
        ScoreObjective("f1", weight=[1.0, -1.0])


@pytest.mark.parametrize(("task", "value"), [("binary", 0.5), ("binary", np.nan), ("multiclass", 1.5)])
def test_labels_that_are_no_whole_numbers_are_refused(task, value):
    scores = np.zeros(3) if task == "binary" else np.zeros((3, 3))
    with pytest.raises(ValueError, match=f"labels must be whole numbers, got {value:g}"):
        ScoreObjective("f1", task=task).gradient(scores, np.array([0.0, value, 1.0]))


def test_the_score_of_several_classes_is_that_of_the_labels():
    scores, y = np.log([[0.3, 0.36, 0.34], [0.5, 0.3, 0.2]]), np.array([1, 0])
    objective = ScoreObjective("accuracy", threshold=0.4)  # of the steps that are trained with
    assert objective.labels(scores).tolist() == y.tolist()
    assert objective.score(scores, y) == 1


def test_an_objective_that_cools_can_be_pickled():
    copied = pickle.loads(pickle.dumps(ScoreObjective("f1", temperature=cooling(0.2, 0.05, rounds=3))))
    assert [round(copied.temperature_at(r), 3) for r in range(4)] == [0.2, 0.1, 0.05, 0.05]
