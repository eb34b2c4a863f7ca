"""The benchmark of trees by cells: what is stored is not run again, and one that fails does not end the others."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from sklearn.metrics import f1_score
from sklearn.model_selection import train_test_split


@pytest.fixture
def bench(monkeypatch):
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.setenv(name, "1")  # which the benchmark sets for good
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    import bench_trees

    bench_trees._loaded.cache_clear()
    return bench_trees


def test_cells_that_are_stored_are_left_out_and_the_longest_come_first(bench):
    cells = [
        bench.Cell(*cell) for cell in (("yeast", "booster", 0), ("letter", "booster", 0), ("letter", "booster", 1))
    ]
    stored = pd.DataFrame({"set": ["letter"], "method": ["booster"], "split": [1], "score": [0.9]})
    assert bench.missing(cells, stored) == [cells[1], cells[0]]
    assert len(bench.missing(cells, pd.DataFrame())) == 3


def test_new_rows_of_a_cell_take_the_place_of_the_stored(bench):
    stored = pd.DataFrame({"set": ["a", "a", "b"], "method": "m", "split": [0, 1, 0], "score": [0.1, 0.2, 0.3]})
    new = pd.DataFrame({"set": ["a"], "method": "m", "split": [1], "score": [0.9]})
    assert bench.merged(stored, new).score.tolist() == [0.1, 0.9, 0.3]
    assert bench.merged(pd.DataFrame(), new).score.tolist() == [0.9]


def test_a_cell_is_scored_on_the_test_rows_of_its_split(bench, tmp_path):
    x = np.random.default_rng(0).normal(size=(300, 2))
    frame = pd.DataFrame(x, columns=["a", "b"]).assign(target=np.where(x[:, 0] + 0.3 * x[:, 1] > 0.5, "yes", "no"))
    frame.to_parquet(tmp_path / "yeast.parquet")
    rules = ["argmax", "tuned", "plug-in", "together"]
    for method, more in (("stock LightGBM", []), ("random forest", []), ("booster, cross-entropy", ["own"])):
        cell, rows, problem = bench.scores(bench.Job(bench.Cell("yeast", method, 3), tmp_path))
        assert (cell.split, problem, [row["decision"] for row in rows]) == (3, "", rules + more)
        assert {row["split"] for row in rows} == {3}
        assert all(0.7 < row["score"] <= 1 for row in rows)
    _, test = train_test_split(np.arange(300), test_size=0.2, random_state=3, stratify=frame.target)
    nothing = f1_score(frame.target[test] == "yes", np.ones(60))  # what calling everything positive would give
    assert nothing < 0.7


def test_a_cell_that_fails_says_why(bench, tmp_path):
    cell, rows, problem = bench.scores(bench.Job(bench.Cell("yeast", "booster", 0), tmp_path))
    assert (cell.set, rows) == ("yeast", [])
    assert "FileNotFoundError" in problem
