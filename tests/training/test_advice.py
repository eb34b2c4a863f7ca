"""Batch advice against simulations of what it predicts, and the command that gives it."""

import json

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import f1_score, matthews_corrcoef

from evalign.cli.app import main
from evalign.training.advice import _typical, advise

SKEWED = [800, 150, 50]
SCORES = {
    "f1": lambda y, p: f1_score(y, p, average="macro", labels=[0, 1, 2], zero_division=0),
    "mcc": matthews_corrcoef,
}


def drawn(matrix, n, rng):
    """Labels and predictions of n rows of a classifier with this confusion matrix."""
    cells = rng.choice(matrix.size, n, p=matrix.ravel())
    return cells // len(matrix), cells % len(matrix)


@pytest.mark.parametrize("metric", SCORES)
def test_the_standard_error_is_that_of_simulated_batches(metric):
    rng, advice = np.random.default_rng(0), advise(SKEWED, metric)
    matrix = _typical(torch.tensor(SKEWED, dtype=torch.float64) / 1000, 0.8).numpy()
    n = advice.for_error(0.02)
    scores = [SCORES[metric](*drawn(matrix, n, rng)) for _ in range(300)]
    assert advice.at(n).standard_error == pytest.approx(0.02, rel=0.01)
    assert np.std(scores) == pytest.approx(0.02, rel=0.15)


def test_the_guarantee_of_theorem_5_8_holds_in_simulations():
    rng, advice = np.random.default_rng(1), advise(SKEWED, "f1")
    matrix = _typical(torch.tensor(SKEWED, dtype=torch.float64) / 1000, 0.8).numpy()
    n = advice.guaranteed(0.2, delta=0.1)
    bound = np.sqrt(np.log(2 * 9 / 0.1) / (2 * n))
    errors = []
    for _ in range(200):
        y, p = drawn(matrix, n, rng)
        counts = np.bincount(3 * y + p, minlength=9).reshape(3, 3) / n
        errors.append(np.abs(counts - matrix).max())
    assert np.mean(np.array(errors) <= bound) >= 0.9
    assert advice.slope * bound == pytest.approx(0.2, rel=1e-3)


def test_batches_miss_a_class_as_often_as_drawn_ones_do():
    rng, advice = np.random.default_rng(2), advise([970, 30])
    lacking = [len(set(rng.choice(2, 64, p=[0.97, 0.03]))) < 2 for _ in range(4000)]
    assert advice.at(64).missing == pytest.approx(np.mean(lacking), abs=0.02)
    enough = advice.for_every_class
    assert advice.at(enough).missing <= 0.01 < advice.at(enough - 1).missing


@settings(max_examples=40)
@given(st.lists(st.integers(1, 1000), min_size=2, max_size=6), st.floats(0.3, 0.95))
def test_the_typical_classifier_is_one(counts, recall):
    shares = torch.tensor(counts, dtype=torch.float64) / sum(counts)
    matrix = _typical(shares, recall)
    assert (matrix >= -1e-12).all()
    torch.testing.assert_close(matrix.sum(1), shares)
    torch.testing.assert_close(matrix.sum(0), shares)
    rarest = int(shares.argmin())
    assert matrix[rarest, rarest] / shares[rarest] == pytest.approx(recall)


def test_a_memory_is_advised_only_for_small_batches():
    advice = advise([9000, 1000])
    assert advice.at(100).decay == pytest.approx(0.9)
    assert advice.at(1000).decay == 0
    with pytest.raises(ValueError, match="positive counts for at least two classes"):
        advise([5, 0])


@pytest.fixture
def table(tmp_path):
    y = ["no"] * 970 + ["yes"] * 30
    pd.DataFrame({"x": range(1000), "sick": y}).to_csv(tmp_path / "t.csv", index=False)
    return tmp_path / "t.csv"


def said(capsys, *words):
    with pytest.raises(SystemExit) as stopped:
        main([str(word) for word in words])
    return stopped.value.code, *capsys.readouterr()


def test_the_command_gives_the_same_advice(table, capsys):
    code, out, _ = said(capsys, "advise", table, "--target", "sick", "--json")
    result, advice = json.loads(out), advise([970, 30])
    assert code == 0
    assert result["classes"] == {"no": 970, "yes": 30}
    assert result["batch_with_every_class"] == advice.for_every_class
    assert result["batch_for_tolerance"] == advice.for_error(0.05)
    assert result["batches"][1]["missing"] == advice.at(64).missing
    code, out, _ = said(capsys, "advise", table, "--target", "sick", "--metric", "mcc")
    assert code == 0
    assert "the rarest is 'yes' with 30" in out
    assert "14.2%" in out  # 0.97^64
    assert 'memory="auto"' in out


def test_the_command_refuses_in_one_line(table, capsys):
    code, _, err = said(capsys, "advise", table, "--target", "sick", "--tolerance", "0")
    assert code == 2
    assert err.count("\n") == 1
    assert "--tolerance must lie in (0, 1)" in err
    assert said(capsys, "advise", table, "--target", "nothing")[0] == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "on_the_metric"),
    [(["--model", "network"], True), (["--decision", "argmax"], True), ([], False), (["--preset", "quick"], False)],
)
def test_fit_says_which_class_a_batch_will_usually_miss(tmp_path, capsys, options, on_the_metric):
    rng = np.random.default_rng(0)
    y = np.array(["common"] * 597 + ["rare"] * 3)
    pd.DataFrame({"x": rng.normal(size=600), "y": y}).to_csv(tmp_path / "t.csv", index=False)
    words = ("fit", tmp_path / "t.csv", "-t", "y", "-o", tmp_path / "run", "--epochs", 1, "--hidden", 4, *options)
    code, _, err = said(capsys, *words)
    assert code == 0, err
    assert ("will not contain the class 'rare'" in err) == on_the_metric
