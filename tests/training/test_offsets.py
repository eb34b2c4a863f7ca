"""Class offsets of a metric, against closed forms, finite differences and the best possible offsets."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import f1_score, matthews_corrcoef
from torch import nn

from evalign import Confusion, EASTClassifier, metrics
from evalign.decision import learn_rule
from evalign.networks.mlp import mlp
from evalign.objective import Objective
from evalign.steps import StepChoice
from evalign.training.batches import Rows, argmax_score, predict_logits
from evalign.training.in_memory import Phase, batch_loss, train, validate
from evalign.training.offsets import class_gains, estimate_offset, gain_matrix, metric_offset, of_matrix
from evalign.training.recipes import Recipe, Stage, find_recipe
from evalign_papers.rivals import logit_adjusted_loss

MATRICES = st.integers(2, 5).flatmap(
    lambda n: st.lists(st.lists(st.integers(0, 50), min_size=n, max_size=n), min_size=n, max_size=n)
).filter(lambda rows: all(sum(row) for row in rows))  # fmt: skip


def log_prior(matrix: torch.Tensor) -> torch.Tensor:
    prior = (matrix.sum(1) / matrix.sum()).log()
    return prior - prior.mean()


@given(MATRICES, st.floats(0.1, 2.0))
def test_balanced_accuracy_asks_for_log_prior_and_accuracy_for_nothing(rows, strength):
    matrix = torch.tensor(rows, dtype=torch.float64)
    found = metric_offset(matrix, metrics.balanced_accuracy, strength)
    if matrix.sum(1).max() / matrix.sum(1).min() < 900:  # beyond, the smallest gain is held up
        torch.testing.assert_close(found, strength * log_prior(matrix), rtol=1e-9, atol=1e-9)
    assert metric_offset(matrix, metrics.accuracy, strength).abs().max() < 1e-9


def counted(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Labels and predictions that have this matrix."""
    y, predicted = np.indices(matrix.shape)
    times = matrix.ravel()
    return y.ravel().repeat(times), predicted.ravel().repeat(times)


@pytest.mark.parametrize(
    ("metric", "reference"),
    [(metrics.f1, lambda y, p: f1_score(y, p, average="macro")), (metrics.mcc, matthews_corrcoef)],
)
def test_gains_are_what_scikit_learn_gains_from_a_few_more_samples(metric, reference):
    matrix = np.array([[500, 40, 10], [30, 90, 20], [20, 10, 30]]) * 100
    gain = gain_matrix(torch.tensor(matrix), metric)
    for k in range(3):
        for j in range(3):
            changed = [matrix.copy(), matrix.copy()]
            changed[0][k, j] += 50
            changed[1][k, j] -= 50
            up, down = (reference(*counted(one)) for one in changed)
            assert float(gain[k, j]) == pytest.approx((up - down) / 100, rel=1e-3)


def test_class_gains_weigh_errors_by_where_they_go():
    matrix = torch.tensor([[50.0, 30.0, 0.0], [1.0, 40.0, 9.0], [0.0, 0.0, 20.0]])
    gain, found = gain_matrix(matrix, metrics.f1), class_gains(matrix, metrics.f1)
    # Errors go to columns 0, 1, 2: 1, 30 and 9; one more error is spread like that, without a class's own column.
    first = np.array([0, 30 + 30 / 39, 9 / 39]) / 31
    third = np.array([1, 30, 0]) / 31
    assert float(found[0]) == pytest.approx(float(gain[0, 0]) - float(first @ gain[0].numpy()))
    assert float(found[2]) == pytest.approx(float(gain[2, 2]) - float(third @ gain[2].numpy()))


def test_no_errors_at_all_and_a_class_without_rows_still_have_offsets():
    perfect = metric_offset(torch.diag(torch.tensor([90.0, 9.0, 1.0])), metrics.balanced_accuracy)
    torch.testing.assert_close(perfect, log_prior(torch.diag(torch.tensor([90.0, 9.0, 1.0]).double())))
    absent = metric_offset(torch.tensor([[90.0, 0, 0], [1, 9, 0], [0, 0, 0]]), metrics.f1)
    assert absent.isfinite().all()
    assert absent[2] == absent[1] == absent.min()


def test_what_has_no_offset_is_refused():
    with pytest.raises(ValueError, match="confusion matrix of shape \\(C, C\\)"):
        metric_offset(torch.ones(2, 3), metrics.f1)
    with pytest.raises(ValueError, match="improves when errors are corrected"):
        metric_offset(torch.ones(2, 2), lambda c: 0.0 * c.tp.sum())


def test_the_offset_of_f1_is_near_the_best_one_there_is():
    """Calibrated probabilities of two classes: argmax (log p - offset) against all other thresholds, by brute force."""
    random = np.random.default_rng(0)
    p = random.beta(0.3, 3.0, 20000)
    y = (random.random(20000) < p).astype(int)
    z = torch.tensor(np.log(p / (1 - p)))
    f1 = metrics.resolve("f1", average="binary")
    offset = torch.zeros(2, dtype=torch.float64)
    for _ in range(30):  # the matrix answers to the offset, so half way each time
        predicted = (z - (offset[1] - offset[0]) > 0).long()
        matrix = Confusion.hard(predicted, torch.tensor(y), 2).matrix
        offset = (offset + metric_offset(matrix, f1)) / 2
    ours = f1_score(y, (z > offset[1] - offset[0]).numpy())
    best = max(f1_score(y, p >= t) for t in np.linspace(0.02, 0.9, 89))
    assert f1_score(y, p >= 0.5) < best - 0.02
    assert ours > best - 0.003


STAGE = Stage("s", metric=False, anchor=1.0, learning_rate=0.01, epochs=3, patience=3, offset=1.5, monitor="last")
BALANCED = Objective("balanced_accuracy", "multiclass", StepChoice("annealed"))


def tailed(n: int = 120) -> Rows:
    generator = torch.Generator().manual_seed(0)
    y = torch.tensor([0] * (n - 30) + [1] * 24 + [2] * 6)
    return Rows.of(torch.randn(n, 4, generator=generator) + torch.eye(3, 4)[y], y)


def test_cross_entropy_with_the_offset_of_balanced_accuracy_is_logit_adjusted():
    rows, network = tailed(), mlp(4, 3, (8,), 0.0)
    offset = estimate_offset(network, rows, BALANCED, STAGE, None)
    ours = batch_loss(network, rows, Phase(STAGE, BALANCED, 0.2, offset))
    theirs = logit_adjusted_loss(network(rows.x), rows.y, rows.y.bincount(), tau=1.5)
    torch.testing.assert_close(ours, theirs)
    values = validate(network, rows, Phase(STAGE, BALANCED, 0.2, offset), argmax_score(metrics.balanced_accuracy))
    assert values["loss"] == pytest.approx(float(theirs.detach()), rel=1e-5)
    plain = nn.functional.cross_entropy(network(rows.x), rows.y)
    assert values["entropy"] == pytest.approx(float(plain.detach()), rel=1e-5)


def test_training_with_offsets_serves_the_rare_and_prediction_has_none():
    rows, recalls = tailed(600), []
    for strength in (0.0, 1.0):
        torch.manual_seed(0)
        network = mlp(4, 3, (), 0.0)
        stage = Stage("s", metric=True, anchor=1.0, learning_rate=0.05, epochs=15, patience=15, offset=strength)
        train(network, rows, rows, Recipe("r", "", (stage,)), BALANCED, argmax_score(metrics.balanced_accuracy),
              batch_size=100)  # fmt: skip
        predicted = predict_logits(network, rows.x).argmax(1)
        recalls.append(float((predicted == rows.y)[rows.y == 2].float().mean()))
    assert recalls[1] > recalls[0] + 0.3


def test_a_stage_finds_the_offset_anew_and_goes_half_way():
    rows, network = tailed(), mlp(4, 3, (8,), 0.0)
    first = estimate_offset(network, rows, BALANCED, STAGE, None)
    again = estimate_offset(network, rows, BALANCED, STAGE, torch.zeros(3))
    torch.testing.assert_close(again, first / 2)


def test_binary_offsets_move_one_logit():
    rows = Rows.of(torch.randn(40, 3), torch.tensor([0] * 30 + [1] * 10))
    network, objective = mlp(3, 1, (), 0.0), Objective("balanced_accuracy", "binary", StepChoice("linear"))
    offset = estimate_offset(network, rows, objective, STAGE, None)
    ours = batch_loss(network, rows, Phase(STAGE, objective, 0.2, offset))
    theirs = logit_adjusted_loss(network(rows.x).squeeze(1), rows.y, [30, 10], task="binary", tau=1.5)
    torch.testing.assert_close(ours, theirs)


def test_the_recipe_for_large_networks_has_offsets_after_cross_entropy():
    stages = find_recipe("anchored_offset").stages
    assert [bool(stage.offset) for stage in stages] == [False, True, True]
    assert of_matrix(torch.eye(2)).present.all()


def test_the_classifier_does_not_count_offsets_twice():
    x, y = np.random.default_rng(0).normal(size=(60, 2)), np.arange(60) % 3
    with pytest.raises(ValueError, match="count them twice: use decision='auto', 'tuned' or 'argmax'"):
        EASTClassifier("f1", recipe="anchored_offset", decision="plug_in").fit(x, y)
    model = EASTClassifier("f1", recipe="anchored_offset", decision="argmax", hidden=(4,), epochs=6, random_state=0)
    assert {row["stage"] for row in model.fit(x, y).history_} == {
        "cross-entropy", "metric, offsets", "metric, offsets anew"
    }  # fmt: skip


@pytest.mark.slow
def test_the_default_decision_takes_offsets_back_by_calibration():
    generator = np.random.default_rng(0)
    honest = generator.dirichlet((6.0, 2.0, 1.0), size=6000)
    y = (honest.cumsum(1) < generator.random((6000, 1))).sum(1)
    moved = honest * np.array([0.3, 1.0, 2.0])  # as offsets do, towards the rare classes
    moved /= moved.sum(1, keepdims=True)
    wanted, believed = (learn_rule(d, honest, y, "f1").decide(honest) for d in ("auto", "plug_in"))
    assert (wanted == believed).mean() > 0.95
    assert (learn_rule("auto", moved, y, "f1").decide(moved) == wanted).mean() > 0.95
    assert (learn_rule("plug_in", moved, y, "f1").decide(moved) == wanted).mean() < 0.9


@pytest.mark.slow
def test_a_network_with_offsets_adapts_by_its_calibrated_probabilities():
    generator = np.random.default_rng(0)
    x = generator.normal(size=(1200, 2))
    y = (x[:, 0] + 0.5 * generator.normal(size=1200) > 0.8).astype(int)
    options = {"recipe": "anchored_offset", "hidden": (4,), "epochs": 6, "random_state": 0}
    model, later = EASTClassifier("f1", **options).fit(x, y), np.r_[np.flatnonzero(y), np.flatnonzero(y == 0)[:80]]
    adapted = model.adapt(x[later])
    assert adapted.shift_.adapts
    np.testing.assert_array_equal(adapted.predict(x[later]), model.predict_jointly(x[later]))
    plain = EASTClassifier("f1", decision="argmax", **options).fit(x, y)
    with pytest.raises(ValueError, match="count them twice"):
        plain.predict_jointly(x)
