"""The rivals written out in bench_decisions, its simulated shifts, and its errors."""

import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from sklearn.metrics import f1_score

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import bench_decisions as bench


def test_one_against_rest_takes_the_best_threshold_of_each_class():
    rng = np.random.default_rng(0)
    p, y = rng.dirichlet([2.0, 1.0, 1.0], size=80), rng.integers(0, 3, 80)
    grid = np.linspace(0.01, 0.99, 99)
    best = [grid[np.argmax([f1_score(y == k, p[:, k] >= t, zero_division=0) for t in grid])] for k in range(3)]
    np.testing.assert_array_equal(bench.one_against_rest(p, y, p, "f1"), (p / best).argmax(axis=1))


@pytest.mark.parametrize(("kind", "share"), [("x4", 0.4), ("x1/4", 0.025), ("swap", 0.9)])
def test_shifts_have_the_shares_they_name(kind, share):
    z = np.repeat([0, 1], [900, 100])
    rows, shares = bench.shifted(kind, z, pd.DataFrame({"x": z}), np.random.default_rng(0))
    assert len(np.unique(rows)) == len(rows)
    assert z[rows].mean() == pytest.approx(share, abs=0.01)
    assert shares[1] == pytest.approx(z[rows].mean())


def test_errors_are_nadeau_and_bengios():
    scores = pd.DataFrame(
        [{"table": "t", "split": s, "rule": r, "score": v, "train_rows": 75, "test_rows": 25}
         for s, pair in enumerate([(0.5, 0.6), (0.5, 0.7), (0.5, 0.8)]) for r, v in zip("ab", pair, strict=True)]
    )  # fmt: skip
    (row,) = bench.differences(scores, "a").to_dict("records")
    assert row["difference"] == pytest.approx(0.2)
    assert row["error"] == pytest.approx(np.sqrt(0.01 * (1 / 3 + 1 / 3)))


@pytest.mark.slow
def test_a_cell_is_stored_once(tmp_path, capsys):
    rng = np.random.default_rng(0)
    y = (rng.random(300) < 0.3).astype(int)
    (tmp_path / "suite").mkdir()
    pd.DataFrame({"a": rng.normal(y), "b": rng.choice(["x", "y"], 300), "target": y}).to_parquet(
        tmp_path / "suite" / "made.parquet"
    )
    rows = []
    for part in ("rules", "shifts"):
        rows += bench.cell_rows(part, tmp_path / "suite" / "made.parquet", "logistic", 0)
        assert pd.isna(rows[-1].get("rule")), rows[-1]
    assert {row["scenario"] for row in rows} >= {"rules", "constraint", "none", "done"}
    bench.append(rows, tmp_path / "out.csv")
    bench.append(rows, tmp_path / "out.csv")
    assert len(pd.read_csv(tmp_path / "out.csv")) == 2 * len(rows)
    bench.summary([tmp_path / "out.csv"], tmp_path / "picture.png")
    assert "what adapt found" in capsys.readouterr().out
    assert (tmp_path / "picture.png").stat().st_size > 1000
