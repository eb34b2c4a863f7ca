"""Counts of constraints in bench_certified against scikit-learn's scores, and a run over one made-up table."""

import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from sklearn.metrics import precision_score, recall_score

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import bench_certified as bench


def test_hits_are_scikit_learns_scores():
    rng = np.random.default_rng(0)
    y, decided = rng.integers(0, 2, 90), rng.integers(0, 2, 90)
    expected = {
        "recall >= 0.9": recall_score(y, decided),
        "specificity >= 0.9": recall_score(y, decided, pos_label=0),
        "precision >= 0.9": precision_score(y, decided),
        "flagged <= 10%": 1 - decided.mean(),
    }
    for constraint, value in expected.items():
        met, rows = bench.hits(constraint, decided, y)
        assert met / rows == pytest.approx(value)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:no decision meets")
def test_a_table_with_known_classes_keeps_its_constraints(tmp_path, capsys):
    """Classes that are far apart: recall and specificity are certified on 200 rows, and are not missed."""
    rng = np.random.default_rng(0)
    y = np.arange(400) % 2
    X = pd.DataFrame({"a": rng.normal(12 * y), "b": rng.normal(size=400)})
    rows = pd.DataFrame(bench.cell(X, y, "logistic", 0))
    certified = rows[rows.certified]
    separable = certified[certified.constraint.isin(["recall >= 0.9", "specificity >= 0.9"])]
    assert len(separable) == 4
    assert not separable.missed.any()
    rows.assign(table="made", model="logistic", split=0).to_csv(tmp_path / "out.csv", index=False)
    bench.summary(tmp_path / "out.csv")
    assert "recall >= 0.9" in capsys.readouterr().out
