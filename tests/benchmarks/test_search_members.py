"""benchmarks/search_members.py: its default blend is EASTBlend's, fitted without test and selection rows."""

import pytest
from sklearn.datasets import load_wine
from sklearn.metrics import f1_score, log_loss

from evalign import EASTBlend
from evalign.tables.split import split_rows
from reference.searches import benchmark


def test_the_default_is_the_blend(tmp_path, monkeypatch):
    search = benchmark("search_members")
    names = ["linear", "forest"]
    monkeypatch.setattr(search, "MEMBERS", {name: search.MEMBERS[name] for name in names})
    X, y = load_wine(return_X_y=True, as_frame=True)
    (tmp_path / "suite").mkdir()
    X.assign(target=y).to_parquet(tmp_path / "suite" / "wine.parquet")
    stored = search.fit(tmp_path, "suite/wine", 3, 1, 2000, {})
    found = search.blended(stored, names, 1, 100.0)

    train, test = split_rows(y.to_numpy(), 0.25, search.FIRST_SEED + 3)
    inner, select = split_rows(y.to_numpy()[train], 0.25, 3)
    rows, select = train[inner], train[select]
    assert not set(test) & {*rows, *select}
    model = EASTBlend("f1", members=names, n_jobs=1, random_state=3).fit(X.iloc[rows], y.iloc[rows])
    p = model.predict_proba(X.iloc[select])
    assert found["loss"] == pytest.approx(log_loss(y.iloc[select], p), abs=1e-3)
    assert found["f1"] == pytest.approx(f1_score(y.iloc[select], model.predict(X.iloc[select]), average="macro"))
    own = model.held_out_predictions_
    assert found["held_out"] == pytest.approx(log_loss(own.labels, own.probabilities), abs=1e-3)
