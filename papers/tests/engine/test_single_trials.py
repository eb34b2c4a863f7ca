"""Cells of images and graphs, end to end on a few made-up ones: trained, killed, resumed, scored."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import sklearn.metrics as sk
import torch
from sklearn.decomposition import PCA

from evalign import metrics
from evalign.training.recipes import Stage
from evalign_papers.analysis.filled import fill
from evalign_papers.datasets import Card, Dataset
from evalign_papers.datasets.dataset import Graphs
from evalign_papers.datasets.longtail import tail_counts, tail_split
from evalign_papers.engine import run_cell as run_module
from evalign_papers.engine import trial_data
from evalign_papers.engine.cells import Cell
from evalign_papers.engine.config import Config, Data, Grid, Method, Network, Training, from_json, read_config, to_json
from evalign_papers.engine.printed import find_papers, load_table
from evalign_papers.engine.reports import Report, TrialReport, load_report, report_path, save_report
from evalign_papers.engine.run_cell import run
from evalign_papers.engine.scheduler import run_cells
from evalign_papers.engine.scores import Tail, hard_scores, honest_scores
from evalign_papers.engine.single_trials import image_splits, train_images
from evalign_papers.engine.terms import build_term
from evalign_papers.engine.trial_data import components, graph_rows, parts

NAMES = ("bird", "dog", "frog")
METRIC = {"metric": "f1", "average": "macro", "step": "annealed", "delta": 0.2, "k": 10.0, "threshold": None,
          "beta": None}  # fmt: skip
STAGE = Stage("metric", metric=True, anchor=1.0, learning_rate=1e-3, epochs=2, patience=2)


def made_up(classes: int = 3, n: int = 60, official: bool = False) -> Dataset:
    random = np.random.default_rng(0)
    y = np.arange(n) % classes
    x = (random.integers(0, 150, (n, 16, 16, 3)) + 40 * y[:, None, None, None]).astype(np.uint8)
    card = Card("made_up", "made up", "images", "here", "none", "none", n, classes)
    return Dataset(
        card, x, y.astype(np.int64), NAMES[:classes], official_test=np.arange(n) >= n // 2 if official else None
    )


def config(**changes) -> Config:
    given = Config(
        version=1, cell="x/1/honest/made_up.f1", protocol="honest",
        data=Data("made_up", "honest", {}, None, "standard"), method=Method("metric", METRIC),
        network=Network((), 0.0, "classes", kind="tiny_darknet", augment=True),
        training=Training((STAGE,), 16, class_weight=False, oversample=False), grid=None, decide_for="f1", quirks=(),
        trials=2, seed=0,
    )  # fmt: skip
    return replace(given, **changes)


@pytest.fixture(autouse=True)
def loaded(monkeypatch):
    """Data sets by name, without files."""

    def find(config, _data_dir):
        data = config.data
        return {"made_up": made_up(), "two": made_up(2), "tailed": made_up(3, 240, True), "graphs": frames()}[data.name]

    monkeypatch.setattr(trial_data, "dataset_of", find)
    monkeypatch.setattr(run_module, "dataset_of", find)


def frames() -> Dataset:
    random = np.random.default_rng(0)
    y = random.integers(0, 2, (40, 15))
    nodes = random.normal(3, 5, (40, 6, 4)).astype(np.float32)
    pairs = (y[..., None] + random.normal(0, 0.3, (40, 15, 1))).astype(np.float32)
    card = Card("graphs", "made up", "graphs", "here", "none", "none", 40, 2)
    return Dataset(card, Graphs(nodes, pairs, np.empty((0, 2), np.int64)), y.astype(np.int64), ("no", "yes"))


@pytest.mark.slow
def test_a_cell_of_pictures_is_trained_and_scored_for_every_class():
    report = run(config())
    assert [trial.trial for trial in report.trials] == [0, 1]
    scores = report.trials[0].scores
    assert set(scores) == {"argmax", "tuned", "plug_in"}
    assert {"f1", "accuracy", "mcc", "precision_dog", "recall_dog", "precision_frog", "recall_frog"} <= set(
        scores["argmax"]
    )
    assert report.trials[0].epochs == 2
    again = run(config(trials=1))
    assert again.trials[0].scores == scores  # a seed decides


class Killed(Exception):
    pass


def test_killed_within_a_trial_it_goes_on_from_its_checkpoint(tmp_path):
    own = config(training=replace(config().training, stages=(replace(STAGE, epochs=3),)))
    whole, seen = run(own), []

    def kill(trial, epoch):
        if (trial, epoch.epoch) == (1, 2):
            raise Killed

    path = report_path(tmp_path / "made_up.f1.json")
    (tmp_path / "made_up.f1.json").write_text(to_json(own))
    with pytest.raises(Killed):
        run(own, checkpoints=tmp_path, save=lambda report: save_report(report, path), on_epoch=kill)
    assert len(load_report(path).trials) == 1
    assert [file.name.split(".")[-3:] for file in tmp_path.glob("*.safetensors")] == [["1", "0", "safetensors"]]
    report = run(own, report=load_report(path), checkpoints=tmp_path, save=lambda report: save_report(report, path),
                 on_epoch=lambda trial, epoch: seen.append((trial, epoch.epoch)))  # fmt: skip
    assert seen == [(1, 3)]  # the first two epochs are not done again
    assert not list(tmp_path.glob("*.safetensors"))
    assert report.trials[1].scores == whole.trials[1].scores


def test_ctrl_c_does_not_pass_for_a_finished_trial(tmp_path):
    def stop(_trial, _epoch):
        raise KeyboardInterrupt

    report = Report(config())
    with pytest.raises(KeyboardInterrupt):
        run(config(), report=report, on_epoch=stop)
    assert not report.trials


def test_yes_or_no_on_the_papers_terms():
    """One output, the released soft sets, the mean over thresholds of watched test rows."""
    quirks = ("released_soft_sets", "mean_over_thresholds", "test_chooses")
    data = Data("two", "paper", {}, None, "standard")
    released = Method("released", {"metric": "f1", "step": "linear", "beta": None})
    network = Network((), 0.0, "one", kind="tiny_darknet")
    own = config(protocol="paper", data=data, method=released, network=network, quirks=quirks, trials=1)
    (trial,) = run(own).trials
    assert {"paper", "paper-without-test_chooses"} <= set(trial.scores)
    honest = replace(own, protocol="honest", quirks=(), method=Method("dice", {"squash": True, "per_sample": False}))
    (trial,) = run(honest).trials
    assert 0 <= trial.scores["argmax"]["auroc"] <= 1


def test_a_grid_of_offsets_is_chosen_from_on_validation_rows():
    stage = replace(STAGE, metric=False, offset=1.0, monitor="last", epochs=1)
    own = config(
        data=Data("tailed", "honest", {}, None, "standard", tail=5), decide_for="balanced_accuracy", trials=1,
        method=Method("metric", {**METRIC, "metric": "balanced_accuracy"}),
        training=Training((stage,), 16, class_weight=True, oversample=False),
        grid=Grid((), (), (), (), "score", "each", offset=(0.5, 2.0)),
    )  # fmt: skip
    report = run(own)
    assert [entry["point"] for entry in report.grid] == [{"offset": 0.5}, {"offset": 2.0}]
    best = max(report.grid, key=lambda entry: entry["score"])
    assert report.trials[0].chosen == best["point"]
    assert set(report.trials[0].scores) == {"argmax", "tuned", "plug_in", "tuned_f1", "plug_in_f1"}
    assert {"rare_recall", "f1_train", "balanced_accuracy"} <= set(report.trials[0].scores["argmax"])


def test_a_grid_that_is_searched_once_is_searched_on_the_first_trial_and_resumed():
    grid = Grid((1e-3, 1e-2), (), (), (16, 24), "loss", "once")
    own = config(trials=2, grid=grid)
    whole = run(own)
    assert len(whole.grid) == 4
    assert {entry["trial"] for entry in whole.grid} == {0}
    best = min(whole.grid, key=lambda entry: entry["loss"])["point"]
    assert [trial.chosen for trial in whole.trials] == [best, best]
    begun, saved = Report(own), []

    def killed_after_two(report):
        saved.append(len(report.grid))
        if len(saved) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(own, report=begun, save=killed_after_two)
    resumed = run(own, report=begun)
    assert saved == [1, 2]
    assert resumed.grid == whole.grid
    assert [trial.scores for trial in resumed.trials] == [trial.scores for trial in whole.trials]


def test_per_class_scores_are_scikit_learns():
    random = np.random.default_rng(1)
    y, predicted = random.integers(0, 3, 200), random.integers(0, 3, 200)
    scores = hard_scores(predicted, y, 3, NAMES)
    for i, name in enumerate(NAMES):
        assert scores[f"precision_{name}"] == pytest.approx(sk.precision_score(y, predicted, average=None)[i])
        assert scores[f"recall_{name}"] == pytest.approx(sk.recall_score(y, predicted, average=None)[i])
    assert "precision_dog" not in hard_scores(predicted, y, 3)


def test_scores_of_a_long_tail_are_scikit_learns():
    random = np.random.default_rng(2)
    y = np.repeat(np.arange(5), 40)
    predicted = np.where(random.random(200) < 0.6, y, random.integers(0, 5, 200))
    counts = np.array([500, 200, 100, 20, 5])
    scores = hard_scores(predicted, y, 5, tail=Tail(counts))
    assert scores["rare_recall"] == pytest.approx(sk.recall_score(y, predicted, average=None)[2:].mean())
    weight = counts[y] / 40
    assert scores["f1_train"] == pytest.approx(sk.f1_score(y, predicted, average="macro", sample_weight=weight))
    assert scores["balanced_accuracy"] == pytest.approx(sk.balanced_accuracy_score(y, predicted))
    p = random.dirichlet(np.ones(5), 200)
    decided = honest_scores(p, y, p, y, "balanced_accuracy", tail=Tail(counts))
    assert decided["tuned_f1"] != decided["tuned"]


def test_a_long_tail_has_the_printed_counts_and_an_untouched_test_part():
    # Cui et al. 2019, CIFAR-10-LT at an imbalance of 100: 12406 images, 5000 down to 50.
    assert tail_counts(5000, 10, 100) == [5000, 2997, 1796, 1077, 645, 387, 232, 139, 83, 50]
    assert sum(tail_counts(5000, 10, 100)) == 12406
    dataset = made_up(3, 240, True)
    split = tail_split(dataset, 10, seed=0, trial=1)
    assert np.bincount(dataset.y[np.concatenate([split.train, split.valid])]).tolist() == tail_counts(40, 3, 10)
    assert np.bincount(dataset.y[split.valid]).tolist() == [8, 2, 1]
    np.testing.assert_array_equal(split.test, np.flatnonzero(dataset.official_test))
    assert not set(split.train) & set(split.valid)
    assert not set(split.train) & set(split.test)
    np.testing.assert_array_equal(split.train, tail_split(dataset, 10, 0, 1).train)
    assert set(split.train) != set(tail_split(dataset, 10, 0, 2).train)
    with pytest.raises(ValueError, match="test part"):
        tail_split(made_up(), 10, 0, 0)
    with pytest.raises(ValueError, match="two rows"):
        tail_split(dataset, 40, 0, 0)


def test_all_trials_of_the_paper_share_a_split():
    own = config(quirks=("one_split",))
    (_, first), (_, second) = image_splits(own, made_up(), [0, 1])
    np.testing.assert_array_equal(first.train, second.train)
    (_, first), (_, second) = image_splits(config(), made_up(), [0, 1])
    assert not np.array_equal(first.train, second.train)


def test_components_hold_the_share_of_the_variance_that_was_asked_for():
    dataset = made_up(3, 40)
    split = next(image_splits(config(), dataset, [0]))[1]
    found = components(dataset.X, split)
    flat = dataset.X[split.train].reshape(len(split.train), -1) / 255.0
    expected = PCA(0.8, svd_solver="full").fit(flat)
    assert found[0].shape[1] == expected.n_components_
    test = expected.transform(dataset.X[split.test].reshape(-1, 768) / 255)
    np.testing.assert_allclose(np.abs(found[2]), np.abs(test), atol=1e-3)
    assert found[0].var(0, ddof=1).sum() >= 0.8 * flat.var(0, ddof=1).sum()


def test_a_forest_sees_components_and_a_table_has_none():
    data = Data("made_up", "honest", {}, None, "components")
    forest = config(
        data=data, method=Method("random_forest", {"n_estimators": 5}), network=None, training=None, trials=1
    )
    assert "recall_frog" in run(forest).trials[0].scores["argmax"]
    with pytest.raises(ValueError, match="need a network for images"):
        run(replace(forest, data=replace(data, inputs="standard")))


def test_graphs_are_scaled_over_all_people_and_scored_pair_by_pair():
    dataset = frames()
    rows = graph_rows(dataset.X, np.arange(20))
    assert rows.shape == (40, 39)
    people = rows[:20, :24].reshape(-1, 4)
    np.testing.assert_allclose(people.mean(0), 0, atol=1e-5)
    np.testing.assert_allclose(people.std(0), 1, atol=1e-4)
    np.testing.assert_allclose(rows[:20, 24:].std(), 1, atol=1e-4)
    stage = replace(STAGE, epochs=30, patience=30, learning_rate=1e-2, step="linear")
    own = config(
        data=Data("graphs", "honest", {}, None, "standard"), network=Network((8,), 0.0, "one", kind="graph"),
        method=Method("metric", {**METRIC, "average": "binary", "step": "linear", "threshold": 0.5}),
        training=Training((stage,), 16, class_weight=False, oversample=False),
    )  # fmt: skip
    report = run(own)
    assert len(report.trials) == 2
    for trial in report.trials:
        assert trial.scores["argmax"]["f1"] > 0.85  # distances tell the pairs apart
        assert trial.scores["argmax"]["auroc"] > 0.9
    (part,) = parts(own, None, [0])
    assert part.train_y.shape == (len(part.train), 15)


def test_dice_of_many_classes_and_a_beta_for_each():
    z, y, w = torch.randn(20, 3), torch.arange(20) % 3, torch.ones(20)
    from evalign_papers.rivals import dice_loss

    term = build_term(Method("dice", {"squash": True, "per_sample": False}), "multiclass")
    assert float(term(z, y, w, torch.tensor(0.2))) == pytest.approx(float(dice_loss(z, y)))
    objective = build_term(Method("metric", {**METRIC, "metric": "fbeta", "beta": [1.0, 5.0, 1.0]}), "multiclass")
    c = objective.confusion(z, y, w, 0.2)
    assert float(objective(z, y, w, 0.2)) == pytest.approx(1 - float(metrics.fbeta(c, beta=[1.0, 5.0, 1.0])), rel=1e-5)


def test_new_fields_left_at_their_defaults_change_no_checksum():
    text = json.loads(to_json(config(network=Network((8,), 0.1, "one"))))
    assert set(text["network"]) == {"hidden", "dropout", "outputs"}
    assert "tail" not in text["data"]
    assert from_json(to_json(config())) == config()


PAPERS = find_papers()


@pytest.mark.slow
def test_every_cell_of_pictures_and_graphs_runs_for_an_epoch(tmp_path):
    """One config of every method, stage and protocol that is planned, on made-up images and the smallest network."""
    tried: dict[str, Path] = {}
    for path in sorted(PAPERS.glob("*/*/*/*.json")):
        if path.name.endswith(".report.json") or "@" in path.name:  # the same cells at another budget
            continue
        own = read_config(path)
        if own.network is None or own.network.kind == "mlp":
            continue
        assert own.training is not None
        forms = [(stage.metric, stage.rate is None, stage.step, bool(stage.offset)) for stage in own.training.stages]
        key = [own.method.name, own.method.options.get("metric"), own.network.outputs, own.network.kind == "graph",
               own.training.class_weight, own.quirks, forms]  # fmt: skip
        tried.setdefault(json.dumps(key), path)
    assert len(tried) > 20
    for path in tried.values():
        own = read_config(path)
        assert own.training is not None
        assert own.network is not None
        graph = own.network.kind == "graph"
        name = (
            "graphs" if graph else "tailed" if own.data.tail else "two" if own.network.outputs == "one" else "made_up"
        )
        options = dict(own.method.options)
        if isinstance(options.get("beta"), list):
            options["beta"] = options["beta"][4:7]  # the classes about dog, of three
        short = replace(
            own, trials=1, data=replace(own.data, name=name, tail=5 if own.data.tail else None),
            method=replace(own.method, options=options),
            network=own.network if graph else replace(own.network, kind="tiny_darknet"),
            grid=None if own.grid is None else replace(own.grid, offset=(1.0,)),
            training=replace(own.training, batch_size=24, stages=tuple(
                replace(stage, epochs=1) for stage in own.training.stages)),
        )  # fmt: skip
        (trial,) = run(short).trials
        assert trial.epochs == len(own.training.stages), path
        for scores in trial.scores.values():
            assert np.isfinite(list(scores.values())).all(), path


def test_a_row_may_have_a_decision_of_its_own(tmp_path):
    table = load_table(PAPERS, "checks-longtail")
    by_label = {row.label: row for row in table.rows}
    own = replace(read_config(PAPERS / "checks/longtail/honest/cifar10-100.ce.json"), trials=1)
    folder = tmp_path / "checks/longtail/honest"
    folder.mkdir(parents=True)
    (folder / "cifar10-100.ce.json").write_text(to_json(own))
    scores = {
        name: {"balanced_accuracy": value} for name, value in (("argmax", 0.5), ("tuned", 0.6), ("plug_in_f1", 0.4))
    }
    save_report(Report(own, [TrialReport(0, 0, {}, 60, 1.0, scores)]), folder / "cifar10-100.ce.report.json")
    filled = fill(tmp_path, table)
    for label, expected in (("cross-entropy", 0.5), ("cross-entropy, offsets tuned for balanced accuracy", 0.6),
                            ("cross-entropy, plug-in for macro F1", 0.4)):  # fmt: skip
        assert filled.cell(by_label[label], "cifar10-100", "balanced_accuracy").measured["honest"].mean == expected


def test_a_beta_is_for_the_class_its_cell_names():
    for cell, place, beta in (("4/honest/cifar10.precision-dog", 5, 0.25), ("4/honest/cifar10.recall-frog", 6, 5.0),
                              ("6/paper/cifar10.dog-beta-2_5", 5, 2.5)):  # fmt: skip
        found = read_config(PAPERS / f"east/{cell}.json").method.options["beta"]
        assert found == [beta if i == place else 1.0 for i in range(10)]
    found = read_config(PAPERS / "east/4/paper/caltech256.recall-frog.json").method.options["beta"]
    assert found == [5.0 if i == 79 else 1.0 for i in range(257)]  # folder 080.frog


def test_reproduce_keeps_checkpoints_beside_the_config_until_a_trial_is_done(tmp_path, monkeypatch):
    folder = tmp_path / "x/1/honest"
    folder.mkdir(parents=True)
    path = folder / "made_up.f1.json"
    path.write_text(to_json(config(trials=1)))
    seen: list[list[str]] = []

    def noting(*args, **options):
        found = train_images(*args, **options)
        seen.append([file.name for file in folder.glob("*.safetensors")])
        return found

    monkeypatch.setattr(run_module, "train_images", noting)
    (done,) = run_cells([Cell(path)])
    assert done.error is None
    assert len(seen[0]) == 1
    assert seen[0][0].startswith("made_up.f1.")
    assert sorted(file.name for file in folder.iterdir()) == ["made_up.f1.json", "made_up.f1.report.json"]
    assert load_report(report_path(path)).complete


def test_a_cell_that_diverges_is_told_and_the_others_go_on(tmp_path):
    folder = tmp_path / "x/1/honest"
    folder.mkdir(parents=True)
    stage = replace(STAGE, learning_rate=1e30, metric=False, epochs=5, patience=5)
    wild = config(trials=1, cell="x/1/honest/made_up.wild", training=replace(config().training, stages=(stage,)))
    calm = config(trials=1)
    for own in (wild, calm):
        (tmp_path / f"{own.cell}.json").write_text(to_json(own))
    first, second = run_cells([Cell(tmp_path / f"{own.cell}.json") for own in (wild, calm)])
    assert "lower the learning rate" in (first.error or "")
    assert second.error is None
    assert second.trials == 1
