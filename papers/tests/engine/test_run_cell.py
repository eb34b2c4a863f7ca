"""Configs, losses, scores and splits of the papers' experiments."""

import json
from dataclasses import replace

import numpy as np
import pytest
import sklearn.metrics as sk
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.func import vmap

from evalign.steps import linear
from evalign.training.loop import Epoch
from evalign_papers.engine.config import Config, Method, from_json, read_config, to_json
from evalign_papers.engine.printed import find_papers
from evalign_papers.engine.reports import Report, TrialReport, load_report, report_path, save_report
from evalign_papers.engine.run_cell import paper_scores
from evalign_papers.engine.scores import WATCHED, hard_scores, honest_scores, watch_cuts
from evalign_papers.engine.single_trials import train_alone
from evalign_papers.engine.stacked_trials import Trained, grid_points
from evalign_papers.engine.terms import build_term, released_counts, three_points
from evalign_papers.engine.trial_data import Part, dataset_of, parts, thinned
from evalign_papers.rivals import dice_loss, wmw_loss
from evalign_papers.rivals.ap_perf import ap_perf_loss

PAPERS = find_papers()
CONFIGS = [path for path in sorted(PAPERS.glob("*/*/*/*.json")) if not path.name.endswith(".report.json")]
EXAMPLE = PAPERS / "btg/s5/honest/synthetic_5.f1-linear-b1024.json"


def example(**changes) -> Config:
    return replace(read_config(EXAMPLE), **changes)


def test_every_config_is_read_and_names_its_place():
    assert len(CONFIGS) > 400
    for path in CONFIGS:
        config = read_config(path)
        assert PAPERS / f"{config.cell}.json" == path
        assert from_json(to_json(config)) == config


def test_every_report_matches_the_config_beside_it():
    reports = sorted(PAPERS.glob("*/*/*/*.report.json"))
    assert len(reports) > 100
    for path in reports:
        report = load_report(path)
        assert len(report.trials) <= report.config.trials
        assert report.trials or report.grid  # a search that is done before the trials are
        # Trials of a cell may run at once, and be stopped in any order.
        done = [trial.trial for trial in report.trials]
        assert done == sorted(set(done) & set(range(report.config.trials)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"colour": "red"}, "unknown key 'colour'"),
        ({"trials": "ten"}, "trials must be int"),
        ({"trials": 0}, "trials must be at least 1"),
        ({"protocol": "fair"}, "protocol must be one of 'honest', 'paper'"),
        ({"quirks": ["lucky"]}, "quirk"),
        ({"version": 7}, "version 1"),
        ({"decide_for": "luck"}, "decide_for"),
        ({"data": {"name": "adult"}}, "key 'protocol' is missing"),
    ],
)
def test_a_config_that_is_wrong_is_refused(change, message):
    content = {**json.loads(EXAMPLE.read_text()), **change}
    with pytest.raises(ValueError, match=message):
        from_json(json.dumps(content))


def test_ap_perf_is_trained_by_the_one_loop():
    """One epoch: its validation loss is that of the network it leaves, in games as large as a batch."""
    pytest.importorskip("highspy")
    config = read_config(PAPERS / "btg/1/paper/cocktailparty.ap_perf@released.json")
    assert config.training is not None
    (stage,) = config.training.stages
    assert (stage.patience, stage.epochs, stage.learning_rate, config.training.batch_size) == (100, 5000, 3e-4, 20)
    config = replace(config, training=replace(config.training, stages=(replace(stage, epochs=1),)))
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((100, 3)).astype(np.float32), (rng.random(100) < 0.3).astype(np.int64)
    part = Part(0, x[:50], y[:50], x[50:80], y[50:80], x[80:], y[80:])
    seen = []
    trained = train_alone(config, part, lambda trial, epoch: seen.append((trial, epoch)))
    assert seen == [(0, trained.history[0])]
    expected = ap_perf_loss(trained.valid, torch.from_numpy(y[50:80]), max_rows=20)
    assert trained.history[0].loss == pytest.approx(float(expected), abs=1e-6)
    watched = watch_cuts(squash=False)(trained.test.squeeze(1), torch.from_numpy(y[80:]), torch.ones(20))
    assert trained.history[0].watched == pytest.approx(tuple(watched.tolist()), abs=1e-6)


def test_a_report_of_another_config_is_refused(tmp_path):
    config, path = example(), tmp_path / "cell.json"
    path.write_text(to_json(config))
    report = Report(config, [TrialReport(0, 0, {}, 3, 0.1, {"argmax": {"f1": 0.5}})])
    save_report(report, report_path(path))
    assert load_report(report_path(path)).trials == report.trials
    path.write_text(to_json(replace(config, seed=1)))
    with pytest.raises(ValueError, match="a config other"):
        load_report(report_path(path))
    tampered = json.loads(report_path(path).read_text())
    tampered["config"]["seed"] = 1
    report_path(path).write_text(json.dumps(tampered))
    with pytest.raises(ValueError, match="a config other"):
        load_report(report_path(path))
    report_path(path).write_text("{")
    with pytest.raises(ValueError, match="is not a report"):
        load_report(report_path(path))


def batch(n: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(n, generator=generator, dtype=torch.float64)
    y = (torch.rand(n, generator=generator) < 0.3).long()
    return logits, y, torch.rand(n, generator=generator, dtype=torch.float64) + 0.5


@pytest.mark.parametrize("of_positives", [False, True])
@given(seed=st.integers(0, 1000), n=st.integers(2, 40))
@settings(max_examples=40, deadline=None)
def test_stacked_wmw_is_the_pairwise_one(of_positives, seed, n):
    logits, y, weight = batch(n, seed)
    logits.requires_grad_()
    term = build_term(Method("wmw", {"gamma": 0.2, "p": 3.0, "of_positives": of_positives}), "binary")
    temperature = torch.tensor(0.2)
    ours = vmap(lambda z: term(z, y, weight, temperature))(logits.unsqueeze(0))[0]
    theirs = wmw_loss(logits, y, reduction="mean", as_published=of_positives, sample_weight=weight)
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
    slope, expected = (
        torch.autograd.grad(loss, logits)[0] for loss in (ours + 0 * logits.sum(), theirs + 0 * logits.sum())
    )
    torch.testing.assert_close(slope, expected, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("squash", [False, True])
def test_stacked_dice_is_the_loss_of_the_baseline(squash):
    logits, y, weight = batch(30, 1)
    temperature = torch.tensor(0.2)
    over_batch = build_term(Method("dice", {"squash": squash, "per_sample": False}), "binary")
    expected = dice_loss(logits, y, task="binary", squash=squash, sample_weight=weight)
    assert float(over_batch(logits, y, weight, temperature)) == pytest.approx(float(expected))
    # The released one leaves out the factor 2: its value is (1 + L) / 2.
    within = build_term(Method("dice", {"squash": squash, "per_sample": True}), "binary")
    expected = dice_loss(logits, y, task="binary", squash=squash, per_sample=True, sample_weight=weight)
    assert float(within(logits, y, weight, temperature)) == pytest.approx((1 + float(expected)) / 2, abs=1e-6)


@pytest.mark.parametrize("tau", [0.1, 0.5, 0.9])
def test_a_step_of_three_points_joins_them_by_lines(tau):
    p = np.linspace(0, 1, 41)
    expected = np.interp(p, [0, tau, 1], [0, 0.5, 1])
    np.testing.assert_allclose(three_points(torch.from_numpy(p), tau).numpy(), expected, atol=1e-12)


def test_released_counts_by_a_loop_over_the_authors_rules():
    logits, y, _ = batch(50, 3)
    p = logits.sigmoid()
    tau = 0.1

    def step(x: float, t: float) -> float:  # BtG Eq. 5, delta 0.2
        m = min(t, 1 - t)
        if x < t - m / 2:
            return 0.2 / (t - m / 2) * x
        if x > t + m / 2:
            return 0.2 / (1 - t - m / 2) * x + 1 - 0.2 - 0.2 / (1 - t - m / 2) * (t + m / 2)
        return 0.6 / m * (x - t) + 0.5

    expected = np.zeros(4)
    for one, label in zip(p.tolist(), y.tolist(), strict=True):
        if label == 1:
            expected[0] += step(one, tau if one > tau else 1 - tau)
            expected[1] += step(1 - one, 1 - tau if one < tau else tau)
        else:
            expected[2] += step(one, tau if one < tau else 1 - tau)
            expected[3] += step(1 - one, 1 - tau if one < tau else tau)
    counts = released_counts(p, y, torch.ones_like(p), torch.full_like(p, tau), lambda x, t: linear(x, t, delta=0.2))
    np.testing.assert_allclose([float(count) for count in counts], expected, rtol=1e-9)
    assert float(counts[0] + counts[1]) > 1.2 * int(y.sum())  # positives are not conserved away from 0.5


def test_a_released_metric_at_one_half_alone_is_the_right_one():
    """At tau = 0.5 nothing is swapped: the mean over the grid differs from ours only through the other thresholds."""
    logits, y, weight = batch(40, 5)
    p, half = logits.sigmoid(), torch.full((40,), 0.5, dtype=torch.float64)
    tp, fn, fp, tn = released_counts(p, y, weight, half, lambda x, t: linear(x, t, delta=0.2))
    s = linear(p, 0.5, delta=0.2)
    assert float(tp) == pytest.approx(float((weight * s)[y == 1].sum()))
    assert float(fp) == pytest.approx(float((weight * s)[y == 0].sum()))
    assert float(tp + fn) == pytest.approx(float(weight[y == 1].sum()))
    assert float(fp + tn) == pytest.approx(float(weight[y == 0].sum()))


def test_means_over_thresholds_are_scikit_learns():
    logits, y, _ = batch(80, 7)
    found = vmap(watch_cuts(squash=False))(logits[None], y[None], torch.ones(1, 80, dtype=torch.float64))[0].reshape(
        2, -1
    )
    for row, output in zip(found.tolist(), (logits.sigmoid(), logits), strict=True):
        cuts = [(output > t / 10).long() for t in range(1, 10)]
        expected = {
            "f1": [sk.f1_score(y, c, zero_division=0) for c in cuts],
            "f3": [sk.fbeta_score(y, c, beta=3, zero_division=0) for c in cuts],
            "precision": [sk.precision_score(y, c, zero_division=0) for c in cuts],
            "accuracy": [sk.accuracy_score(y, c) for c in cuts],
            "balanced_accuracy": [sk.balanced_accuracy_score(y, c) for c in cuts],
            "mcc": [sk.matthews_corrcoef(y, c) for c in cuts],
            "macro_f1": [sk.f1_score(y, c, average="macro", zero_division=0) for c in cuts],
        }
        for name, values in expected.items():
            assert row[WATCHED.index(name)] == pytest.approx(np.mean(values), abs=1e-9), name


def test_honest_scores_are_scikit_learns_and_no_decision_sees_test_labels():
    random = np.random.default_rng(0)
    y = random.integers(0, 2, 400)
    p = np.clip(0.5 * y + 0.6 * random.random(400), 0.01, 0.99)
    p = np.stack([1 - p, p], axis=1)
    scores = honest_scores(p[:200], y[:200], p[200:], y[200:], "f1")
    predicted = p[200:].argmax(1)
    assert scores["argmax"]["f1"] == pytest.approx(sk.f1_score(y[200:], predicted))
    assert scores["argmax"]["mcc"] == pytest.approx(sk.matthews_corrcoef(y[200:], predicted))
    assert scores["tuned"]["auroc"] == pytest.approx(sk.roc_auc_score(y[200:], p[200:, 1]))
    flipped = honest_scores(p[:200], y[:200], p[200:], 1 - y[200:], "f1")
    for rule in ("tuned", "plug_in"):  # the same predictions: accuracies against flipped labels add up to 1
        assert scores[rule]["accuracy"] + flipped[rule]["accuracy"] == pytest.approx(1)


def test_hard_scores_of_many_classes():
    random = np.random.default_rng(1)
    y, predicted = random.integers(0, 4, 100), random.integers(0, 4, 100)
    scores = hard_scores(predicted, y, 4)
    assert scores["f1"] == pytest.approx(sk.f1_score(y, predicted, average="macro"))
    assert scores["recall"] == pytest.approx(sk.recall_score(y, predicted, average="macro"))


def test_the_papers_reporting_takes_the_best_checkpoint_by_test_and_says_what_it_is_worth():
    k = len(WATCHED)
    at = {name: WATCHED.index(name) for name in ("f1", "balanced_accuracy", "mcc")}

    def watched(f1: float, balanced: float, cut_f1: float, cut_balanced: float) -> tuple[float, ...]:
        numbers = [0.0] * (2 * k)
        numbers[at["f1"]], numbers[at["balanced_accuracy"]] = f1, balanced
        numbers[k + at["f1"]], numbers[k + at["balanced_accuracy"]] = cut_f1, cut_balanced
        return tuple(numbers)

    history = [
        Epoch(1, "m", 0.2, 1e-3, 0, 0, 0, 0, best=True, watched=watched(0.5, 0.6, 0.3, 0.4)),
        Epoch(2, "m", 0.2, 1e-3, 0, 0, 0, 0, best=False, watched=watched(0.9, 0.9, 0.9, 0.9)),
        Epoch(3, "m", 0.2, 1e-3, 0, 0, 0, 0, best=True, watched=watched(0.45, 0.7, 0.2, 0.5)),
    ]
    quirks = ("cut_logits", "mean_over_thresholds", "test_chooses", "auroc_of_cuts")
    scores = paper_scores(example(quirks=quirks), Trained(0, {}, history, torch.empty(0), torch.empty(0)), 0.95)
    assert (scores["paper"]["f1"], scores["paper"]["auroc"]) == (0.3, 0.5)
    assert scores["paper-without-test_chooses"]["f1"] == 0.2
    assert scores["paper-without-cut_logits"]["f1"] == 0.5
    assert scores["paper-without-auroc_of_cuts"]["auroc"] == 0.95


def test_parts_are_scaled_by_training_rows_and_trials_have_rows_of_their_own():
    config = example()
    first, second = parts(config, None, [0, 1])
    np.testing.assert_allclose(first.train.mean(0), 0, atol=1e-5)
    np.testing.assert_allclose(first.train.std(0), 1, atol=1e-4)
    assert np.abs(first.test.mean(0)).max() > 1e-3
    assert not np.array_equal(first.test_y, second.test_y) or not np.array_equal(first.test, second.test)
    one, other = parts(replace(config, quirks=("one_split",)), None, [0, 3])
    assert (one.trial, other.trial) == (0, 3)
    np.testing.assert_array_equal(one.test, other.test)
    assert one.seed(config) != other.seed(config)


def test_thinning_reaches_the_ratio_from_either_side():
    whole = dataset_of(example(), None)  # 5000 to 250
    for ratio, positives, negatives in ((10, 250, 2500), (100, 50, 5000)):
        counts = thinned(whole, ratio).counts
        assert (counts["positive"], counts["negative"]) == (positives, negatives)


def test_a_grid_is_every_combination_once():
    config = read_config(PAPERS / "east/1/honest/adult.f1.json")
    points = grid_points(config.grid)
    assert len(points) == 8
    assert len({tuple(point.items()) for point in points}) == 8
