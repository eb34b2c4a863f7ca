"""A table's profile against counts by pandas, and the notes made of it."""

import json

import numpy as np
import pandas as pd
import pytest

from evalign.tables.profile import profile_table


def table(n=60):
    rng = np.random.default_rng(0)
    y = np.where(np.arange(n) % 3 == 0, "yes", "no")
    X = pd.DataFrame({"x": rng.normal(size=n), "c": rng.choice(["a", "b"], n), "flag": rng.random(n) < 0.5})
    X.loc[:1, "x"] = np.nan
    X.loc[:1, "flag"] = [True, False]
    return X, y


def test_counts_are_those_of_pandas():
    X, y = table()
    profile = profile_table(X, y)
    assert {column.name: column.missing for column in profile.columns} == X.isna().sum().to_dict()
    assert {column.name: column.distinct for column in profile.columns} == X.nunique().to_dict()
    assert [column.kind for column in profile.columns] == ["number", "text", "bool"]
    assert profile.classes == pd.Series(y).value_counts().sort_index().to_dict()
    assert profile.notes() == []
    twice = profile_table(pd.concat([X, X], ignore_index=True), np.r_[y, y])
    assert twice.duplicate_rows == 60 == int(pd.concat([X, X]).assign(y=np.r_[y, y]).duplicated().sum())
    assert twice.conflicting_rows == 0


def test_json_has_shares_and_plain_types():
    X, y = table()
    found = json.loads(json.dumps(profile_table(X.assign(one=1), y).to_json()))
    assert found["class_shares"] == {"no": pytest.approx(2 / 3), "yes": pytest.approx(1 / 3)}
    assert [column["constant"] for column in found["columns"]] == [False, False, False, True]


def test_constants_ids_and_conflicts_are_noted():
    X, y = table(200)
    notes = profile_table(X.assign(one=1, name=[f"row {i}" for i in range(200)]), y).notes()
    assert "constant columns carry no information: 'one'" in notes
    assert any(note.startswith("nearly every row has a different text in 'name'") for note in notes)
    same = pd.DataFrame({"x": [1.0] * 10, "z": [2.0, 3.0] * 5})
    notes = profile_table(same, np.array(["a", "a", "b", "b", "a"] * 2)).notes()
    assert "10 rows equal another row with a different label" in notes


@pytest.mark.parametrize(
    ("leak", "said"),
    [
        (lambda y: y, "column 'leak' is a copy of the target"),
        (lambda y: np.where(y == "yes", 1, 0), "column 'leak' determines the target: all rows with the same value"),
        (lambda y: np.where(y == "yes", 5, -5) + np.linspace(0, 1, len(y)), "the ranges of its values"),
    ],
)
def test_a_leak_is_noted(leak, said):
    X, y = table()
    notes = profile_table(X.assign(leak=leak(y)), y).notes()
    assert len(notes) == 1
    assert said in notes[0]
    assert "--drop 'leak'" in notes[0]


def test_chance_is_no_leak():
    rng = np.random.default_rng(1)
    y = np.array(["a"] * 50 + ["b"] * 2)
    assert profile_table(pd.DataFrame({"x": np.r_[np.zeros(50), 9, 9]}), y).notes() == []  # two rows prove nothing
    ids = pd.DataFrame({"id": rng.permutation(100)})
    assert profile_table(ids, np.array(["a", "b"] * 50)).notes() == []
