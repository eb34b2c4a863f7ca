"""Tables for libraries that ask for data frames with categories, and the order of the tables."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from sklearn.base import clone
from sklearn.linear_model import LogisticRegression


@pytest.fixture
def bench(monkeypatch):
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.setenv(name, "1")  # which the benchmark sets for good
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    import bench_quality

    return bench_quality


class Model(LogisticRegression):
    def fit(self, X, y):
        self.seen = X.copy()
        return super().fit(X, y)


def test_gaps_of_categories_are_a_category_and_others_are_medians_of_training(bench):
    rng = np.random.default_rng(0)
    x, y = np.column_stack([rng.normal(size=40), rng.integers(0, 3, 40)]), np.arange(40) % 2
    x[:4, 0] = x[2:6, 1] = np.nan
    model = bench.Framed(lambda seed, categorical: Model(), 0, [1]).fit(x, y)
    seen = model.model_.seen
    assert list(seen[:4]["0"]) == [np.nanmedian(x[:, 0])] * 4
    assert isinstance(seen["1"].dtype, pd.CategoricalDtype)
    assert list(seen["1"][2:6]) == [-1] * 4
    again = clone(model).fit(x, y)
    np.testing.assert_allclose(again.predict_proba(x), Model().fit(seen, y).predict_proba(seen))


def test_small_tables_come_first(bench, tmp_path):
    (tmp_path / "suite").mkdir()
    for name, rows in (("suite/large", 9000), ("yeast", 900), ("suite/small", 9), ("unknown", 5)):
        table = pd.DataFrame({"target": np.random.default_rng(0).normal(size=rows)})
        table.to_parquet(tmp_path / f"{name}.parquet")
    assert bench.tables(tmp_path) == ["suite/small", "yeast", "suite/large"]


def test_the_best_rival_in_hindsight_and_the_one_of_the_other_splits(bench):
    score = np.random.default_rng(0).random((3, 4, 3))  # tables, splits, methods
    names = ["evalign", "a", "b"]
    rows = [
        {"table": f"t{i}", "split": j, "method": names[k], "score": score[i, j, k], "rows": 500 * (i + 1)}
        for i, j, k in np.ndindex(score.shape)
    ]
    hindsight = [score[i, :, 0].mean() - max(score[i, :, 1].mean(), score[i, :, 2].mean()) for i in range(3)]
    unseen = []
    for i in range(3):
        gaps = []
        for j in range(4):
            others = np.delete(score[i], j, axis=0)[:, 1:].mean(0)
            gaps.append(score[i, j, 0] - score[i, j, 1 + others.argmax()])
        unseen.append(np.mean(gaps))
    said = bench.summary(table := pd.DataFrame(rows).assign(cpu_seconds=1.0))
    assert f"on the test rows of each table: {np.mean(hindsight):+.4f}" in said
    assert f"1 tables below 600 rows: {hindsight[0]:+.4f}" in said
    assert f"on the other splits of each table: {np.mean(unseen):+.4f}" in said
    partial = table[:-1]
    assert "evalign minus b, 11 splits of 3 tables" in bench.summary(partial)
    assert "3 tables, 11 splits" in bench.summary(partial, common=True)
