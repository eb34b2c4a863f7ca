"""benchmarks/search_blend.py: what a report says of stored probabilities."""

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest
from sklearn.metrics import f1_score

FOLDER = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture(scope="module")
def search():
    sys.path.insert(0, str(FOLDER))
    try:
        spec = importlib.util.spec_from_file_location("search_blend", FOLDER / "search_blend.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(FOLDER))
    return module


def told(search, seed, sharpness):
    rng = np.random.default_rng(seed)
    labels, select_labels = rng.integers(0, 2, 200), rng.integers(0, 2, 50)
    noise = np.random.default_rng([seed, sharpness])

    def said(y):
        p = 1 / (1 + np.exp(-sharpness * (y - 0.5) - noise.normal(0, 1, len(y))))
        return np.stack([1 - p, p], axis=1)

    return search.Told(said(labels), labels, np.ones(200), said(select_labels), select_labels)


def test_a_report_has_paired_differences_from_the_booster(search, tmp_path):
    gaps = []
    for split in range(3):
        stored = {member: told(search, split, sharpness) for member, sharpness in (("booster", 2), ("network", 5))}
        for member, own in stored.items():
            np.savez(tmp_path / f"yeast-{member}-{split}.npz", **own._asdict())
        scores = {
            member: f1_score(
                np.r_[own.labels, own.select_labels], np.r_[own.held_out.argmax(1), own.select.argmax(1)]
            )
            for member, own in stored.items()
        }  # fmt: skip
        gaps.append(scores["network"] - scores["booster"])
    lines = list(search.report(tmp_path, "yeast", ["booster+network", "booster+forest"]))
    assert [line.split("|")[1].strip() for line in lines[2:]] == ["booster", "network", *["booster+network"] * 2]
    found = lines[3].split("|")[3].split()
    assert float(found[0]) == pytest.approx(np.mean(gaps), abs=1e-4)
    assert float(found[2]) == pytest.approx(np.std(gaps, ddof=1) / 3**0.5, abs=1e-4)
    assert lines[3].rstrip(" |").endswith("3")
