"""Rules learned in batches equal the rules learned from all rows."""

import numpy as np
import pandas as pd
import pytest
from scipy.stats import binomtest
from sklearn.metrics import f1_score, matthews_corrcoef, precision_score, recall_score

from evalign import decision
from evalign.decision import out_of_core
from evalign.decision.out_of_core import learn_from_batches
from evalign.decision.search import frank_wolfe


def rows(n, classes, seed=0):
    rng = np.random.default_rng(seed)
    p = rng.dirichlet(np.linspace(2.0, 0.3, classes), size=n)
    tempered = p**0.7 / (p**0.7).sum(axis=1, keepdims=True)
    y = (tempered.cumsum(axis=1) < rng.random((n, 1))).sum(axis=1).clip(max=classes - 1)
    return p, y


def batches(p, y, size=777):
    return [(p[i : i + size], y[i : i + size]) for i in range(0, len(p), size)]


@pytest.mark.parametrize("name", ["plug_in", "tuned", "auto"])
@pytest.mark.parametrize("metric", ["f1", "mcc"])
def test_two_classes_equal_the_rule_in_memory(name, metric):
    p, y = rows(5000, 2)
    p = p.round(2)  # so that rows coincide
    p[:, 0] = 1 - p[:, 1]
    found = learn_from_batches(batches(p, y), metric, decision=name)
    expected = {
        "plug_in": lambda: decision.plug_in(p, metric),
        "tuned": lambda: decision.tuned(p, y, metric),
        "auto": lambda: decision.calibrated(p, y, metric),
    }[name]()
    tolerance = 1e-9 if name == "plug_in" else 0.03  # resampling draws rows, and these are fewer
    assert found.kind == expected.kind == "threshold"
    np.testing.assert_allclose(found.calibrate(p)[:, 1], expected.calibrate(p)[:, 1], atol=1e-4)
    assert (found.predict(p) != expected.predict(p)).mean() <= tolerance


def test_constraints_of_two_classes_hold():
    p, y = rows(5000, 2, seed=1)
    rule = learn_from_batches(batches(p, y), "precision", subject_to="recall >= 0.9")
    assert rule.feasible
    assert rule.predict(p)[y == 1].mean() >= 0.9 - 1e-9


def test_more_distinct_probabilities_than_are_told_apart(monkeypatch):
    monkeypatch.setattr(out_of_core, "DISTINCT", 500)
    p, y = rows(5000, 2, seed=2)
    found = learn_from_batches(batches(p, y), "f1", decision="plug_in")
    assert found.threshold == pytest.approx(decision.plug_in(p, "f1").threshold, abs=0.005)


@pytest.mark.parametrize("metric", ["f1", "mcc", "gmean"])
def test_more_classes_equal_the_rule_in_memory(metric, monkeypatch):
    monkeypatch.setattr(frank_wolfe, "POLISH", 0)  # as for large arrays
    p, y = rows(4000, 5)
    found = learn_from_batches(lambda: iter(batches(p, y)), metric, decision="plug_in")
    expected = decision.plug_in(p, metric)
    assert found.kind == expected.kind
    assert found.value == pytest.approx(expected.value, abs=1e-9)
    np.testing.assert_array_equal(found.predict(p), expected.predict(p))


def test_calibrated_first_with_more_classes(monkeypatch):
    monkeypatch.setattr(frank_wolfe, "POLISH", 0)
    p, y = rows(4000, 4)
    found = learn_from_batches(batches(p, y), "f1")
    q = decision.calibration.fit_calibration(p, y, np.ones(len(y)))(p)
    expected = decision.plug_in(q, "f1")
    np.testing.assert_allclose(found.calibrate(p), q, atol=1e-12)
    np.testing.assert_array_equal(found.predict(p), expected.predict(q))
    assert found.value == pytest.approx(f1_score(y, found.predict(p), average="macro"))  # on the labels
    assert found.shares == pytest.approx(np.bincount(y) / len(y))


@pytest.mark.parametrize("classes", [2, 4])
def test_weights_are_copies(classes):
    p, y = rows(900, classes)
    times = np.random.default_rng(3).integers(1, 4, 900)
    weighted = [(p[i : i + 100], y[i : i + 100], times[i : i + 100].astype(float)) for i in range(0, 900, 100)]
    found = learn_from_batches(weighted, "f1", decision="plug_in")
    copied = learn_from_batches([np.repeat(p, times, axis=0)], "f1", decision="plug_in")
    assert found.value == pytest.approx(copied.value, abs=1e-6)


def write(folder, p, y, names):
    folder.mkdir()
    for k, (some, labels) in enumerate(batches(p, y, 1100)):
        table = pd.DataFrame(some, columns=[f"probability_{name}" for name in names])
        table.assign(label=np.array(names)[labels]).to_parquet(folder / f"{k}.parquet")


@pytest.mark.parametrize("classes", [2, 3])
def test_folder_of_parquet_files(tmp_path, classes):
    p, y = rows(3000, classes)
    names = ["fine", "fraud", "odd"][:classes]
    write(tmp_path / "rows", p, y, names)
    for name in ("plug_in", "auto"):
        found = learn_from_batches(tmp_path / "rows", "f1", decision=name, target="label")
        expected = learn_from_batches(batches(p, y), "f1", decision=name)
        np.testing.assert_array_equal(found.predict(p), expected.predict(p))


def test_constraints_by_the_names_in_a_folder(tmp_path):
    p, y = rows(3000, 2)
    write(tmp_path / "rows", p, y, ["fine", "fraud"])
    found = learn_from_batches(tmp_path / "rows", "precision", target="label", subject_to="recall['fraud'] >= 0.8")
    expected = learn_from_batches(batches(p, y), "precision", subject_to="recall[1] >= 0.8")
    assert found.reached == expected.reached
    assert found.feasible


CONSTRAINTS = [
    "recall >= 0.45", "recall[3] >= 0.5", ["precision[2] >= 0.4", "recall[0] >= 0.6"], "flagged[3] <= 5%", "mcc >= 0.2",
]  # fmt: skip


@pytest.mark.parametrize("subject_to", CONSTRAINTS, ids=str)
@pytest.mark.parametrize("name", ["auto", "tuned", "plug_in"])
def test_constraints_of_more_classes_on_rows_that_fit_equal_those_in_memory(subject_to, name):
    p, y = rows(1500, 4)
    found = learn_from_batches(batches(p, y), "f1", decision=name, subject_to=subject_to)
    expected = decision.learned.learn_rule(name, p, y, "f1", subject_to=subject_to)
    assert found == expected


@pytest.mark.parametrize("subject_to", CONSTRAINTS, ids=str)
@pytest.mark.parametrize("name", ["auto", "plug_in"])
def test_constraints_of_more_classes_hold_on_all_rows(subject_to, name, monkeypatch):
    p, y = rows(6000, 4)
    whole = decision.learned.learn_rule(name, p, y, "f1", subject_to=subject_to)
    monkeypatch.setattr(out_of_core, "SAMPLE", 4 * 1000)  # a sixth of the rows
    found = learn_from_batches(batches(p, y), "f1", decision=name, subject_to=subject_to)
    assert found.feasible
    assert whole.feasible
    scores = {"recall": recall_score, "precision": precision_score}
    for text, reached in zip(found.subject_to, found.reached, strict=True):
        limit = decision.parse_constraint(text)
        decided = found.predict(p)
        if limit.metric == "mcc":
            value = matthews_corrcoef(y, decided)
        elif limit.metric == "flagged":
            value = (decided == limit.label).mean()
        else:
            by_class = scores[limit.metric](y, decided, average=None, zero_division=0)
            value = by_class.mean() if limit.label is None else by_class[limit.label]
        assert reached == pytest.approx(value)
        assert value >= limit.value - 1e-9 if limit.op == ">=" else value <= limit.value + 1e-9
    both = [f1_score(y, rule.predict(p), average="macro") for rule in (found, whole)]
    assert both[0] > both[1] - 0.02
    if name == "auto":
        assert found.value == pytest.approx(both[0])


def test_a_budget_of_three_classes_needs_no_labels(monkeypatch):
    p, _ = rows(4000, 3)
    monkeypatch.setattr(out_of_core, "SAMPLE", 3 * 500)
    found = learn_from_batches([p[:1500], p[1500:]], "f1", decision="plug_in", subject_to="flagged[2] <= 4%")
    assert found.feasible
    assert (found.predict(p) == 2).mean() <= 0.04 + 1e-9
    assert found.reached[0] == pytest.approx((found.predict(p) == 2).mean())


def test_constraints_that_no_rule_of_a_sample_meets(monkeypatch):
    p, y = rows(900, 3)
    monkeypatch.setattr(out_of_core, "SAMPLE", 3 * 300)
    monkeypatch.setattr(out_of_core, "CORRECTIONS", 2)
    with pytest.warns(UserWarning, match="no decision meets recall >= 0.99 .*nearest feasible") as caught:
        found = learn_from_batches(batches(p, y), "f1", subject_to=["recall >= 0.99", "precision >= 0.99"])
    assert len(caught) == 1
    assert not found.feasible


@pytest.mark.parametrize("size", [2**23, 4 * 800])
def test_certificates_of_more_classes(size, monkeypatch):
    p, y = rows(2400, 4)
    options = {"subject_to": "recall >= 0.4", "confidence": 0.9}
    expected = decision.calibrated(p, y, "f1", **options)
    monkeypatch.setattr(out_of_core, "SAMPLE", size)
    found = learn_from_batches(batches(p, y), "f1", **options)
    if size > p.size:
        assert found == expected
    assert found.feasible
    assert found.bounds[0] >= 0.4
    assert found.reached[0] == pytest.approx(recall_score(y, found.predict(p), average="macro"))
    assert found.value == pytest.approx(f1_score(y, found.predict(p), average="macro"))
    assert found.value > expected.value - 0.02
    # Rows of weight 2 are rows; other weights are refused.
    doubled = learn_from_batches([(a, b, np.full(len(b), 2.0)) for a, b in batches(p, y)], "f1", **options)
    assert doubled.bounds == pytest.approx(found.bounds)
    with pytest.raises(ValueError, match="equal weight"):
        learn_from_batches([(p, y, np.linspace(1, 2, len(p)))], "f1", **options)


def test_a_certificate_rests_on_rows_that_the_rule_was_not_learned_from(monkeypatch):
    p, y = rows(3000, 3)
    step = 4
    monkeypatch.setattr(out_of_core, "SAMPLE", -(-p.size // step))
    found = learn_from_batches([(p, y)], "f1", subject_to="recall[2] >= 0.3", confidence=0.9)
    rest = np.arange(len(p)) % step > 0
    decided = found.predict(p[rest])[y[rest] == 2] == 2
    # Clopper-Pearson at a level between that of the first candidate, half of 0.1, and all of it.
    low, high = (
        binomtest(decided.sum(), len(decided)).proportion_ci(1 - 2 * level, "exact").low for level in (0.05, 0.1)
    )
    assert low - 1e-9 <= found.bounds[0] <= high + 1e-9


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:no decision meets")
def test_certificates_of_batches_are_broken_no_more_often_than_promised(monkeypatch):
    everyone = rows(200_000, 3, seed=99)
    monkeypatch.setattr(out_of_core, "SAMPLE", 3 * 400)
    broken = certified = 0
    for seed in range(60):
        draw = np.random.default_rng(seed).integers(len(everyone[1]), size=1600)
        p, y = everyone[0][draw], everyone[1][draw]
        rule = learn_from_batches(batches(p, y, 500), "f1", subject_to="recall[2] >= 0.4", confidence=0.9)
        certified += rule.feasible
        broken += rule.feasible and (rule.predict(everyone[0])[everyone[1] == 2] == 2).mean() < 0.4
    assert certified >= 50
    assert broken <= 12  # 6 expected at most; more than 12 have probability .01


def test_errors(tmp_path):
    p, y = rows(50, 3)
    with pytest.raises(TypeError, match="got an iterator"):
        learn_from_batches(iter([p]), "f1")
    with pytest.raises(ValueError, match="needs labels"):
        learn_from_batches([p], "f1")
    with pytest.raises(ValueError, match="at least one row"):
        learn_from_batches([], "f1")
    with pytest.raises(ValueError, match="cannot meet constraints"):
        learn_from_batches([(p, y)], "f1", subject_to="recall >= 0.5", decision="argmax")
    with pytest.raises(ValueError, match="cannot be checked on probabilities alone"):
        learn_from_batches([p], "f1", subject_to="recall >= 0.5", decision="plug_in")
    write(tmp_path / "rows", p, y, ["a", "b", "c"])
    with pytest.raises(ValueError, match="no column 'truth'"):
        learn_from_batches(tmp_path / "rows", "f1", target="truth")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of Ray about itself
@pytest.mark.parametrize("classes", [2, 3])
def test_ray_dataset_on_two_workers(tmp_path, classes):
    ray = pytest.importorskip("ray")
    p, y = rows(4000, classes)
    names = ["a", "b", "c", "d"][:classes]
    write(tmp_path / "rows", p, y, names)
    ray.init(num_cpus=2, include_dashboard=False, ignore_reinit_error=True, logging_level="ERROR")
    try:
        data = ray.data.read_parquet(str(tmp_path / "rows"))
        found = learn_from_batches(data, "f1", decision="auto", target="label", rounds=1)
        expected = learn_from_batches(batches(p, y), "f1", decision="auto", rounds=1)
        np.testing.assert_array_equal(found.predict(p), expected.predict(p))
    finally:
        ray.shutdown()


def test_memory_is_that_of_a_sample_not_of_all_rows(monkeypatch):
    import tracemalloc

    monkeypatch.setattr(out_of_core, "SAMPLE", 2**15)
    p, y = np.random.default_rng(0).dirichlet(np.ones(50), size=2000), np.arange(2000) % 50
    learn_from_batches([(p, y)], "f1", rounds=1)  # imports and caches
    tracemalloc.start()
    learn_from_batches(lambda: ((p.copy(), y) for _ in range(40)), "f1", rounds=1)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 20 * p.nbytes  # of 40 batches


@pytest.mark.parametrize("classes", [2, 3])
def test_a_batch_may_have_no_weight(classes):
    p, y = rows(3000, classes)
    weight = np.ones(3000)
    weight[1000:2000] = 0
    parts = [(p[i : i + 1000], y[i : i + 1000], weight[i : i + 1000]) for i in range(0, 3000, 1000)]
    found, expected = learn_from_batches(parts, "f1"), learn_from_batches(parts[::2], "f1")
    assert (found.predict(p) == expected.predict(p)).mean() > 0.99
    with pytest.raises(ValueError, match="must not be 0 in all rows"):
        learn_from_batches(parts[1:2], "f1")


def test_certificates_count_rows_of_equal_probability():
    p, y = rows(3000, 2)
    p = p.round(2)
    p[:, 0] = 1 - p[:, 1]
    options = {"subject_to": "recall >= 0.8", "confidence": 0.9}
    found, expected = (
        learn_from_batches(batches(p, y), "precision", **options),
        decision.calibrated(p, y, "precision", **options),
    )
    assert found.feasible
    assert found.bounds == pytest.approx(expected.bounds)
    assert (found.predict(p) == expected.predict(p)).all()
    weighted = [(p, y, np.linspace(1, 2, len(p)))]
    with pytest.raises(ValueError, match="equal weight"):
        learn_from_batches(weighted, "precision", **options)


def test_decisions_without_labels():
    p, _ = rows(2000, 3)
    assert learn_from_batches([(p, p.argmax(1))], "f1", decision="argmax").kind == "argmax"
    with pytest.raises(ValueError, match="decision must be one of"):
        learn_from_batches([p], "f1", decision="best")
    with pytest.raises(ValueError, match="cannot be checked on probabilities alone"):
        learn_from_batches([rows(2000, 2)[0]], "precision", decision="plug_in", subject_to="recall >= 0.9")


def test_columns_of_labels_and_weights_are_looked_up(tmp_path):
    p, y = rows(500, 2)
    frame = pd.DataFrame({"probability_0": p[:, 0], "probability_1": p[:, 1], "y": y.astype(float)})
    frame.to_parquet(tmp_path / "part.parquet")
    expected = learn_from_batches([(p, y)], "f1")
    assert learn_from_batches(tmp_path, "f1", target="y") == expected
    with pytest.raises(ValueError, match="no column 'importance' of weights"):
        learn_from_batches(tmp_path, "f1", target="y", sample_weight="importance")
    frame.assign(y=2.0).to_parquet(tmp_path / "part.parquet")
    with pytest.raises(ValueError, match=r"label in column 'y' must be one of 0, 1, got '2\.0'"):
        learn_from_batches(tmp_path, "f1", target="y")
