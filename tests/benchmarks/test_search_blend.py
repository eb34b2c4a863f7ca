"""benchmarks/search_blend.py: what a report says of stored probabilities."""

import numpy as np
import pytest
from sklearn.metrics import f1_score

from reference.searches import benchmark, made_up_outputs


@pytest.fixture(scope="module")
def search():
    return benchmark("search_blend")


def test_a_report_has_paired_differences_from_the_booster(search, tmp_path):
    gaps = []
    for split in range(3):
        stored = {
            member: made_up_outputs(search, split, sharpness) for member, sharpness in (("booster", 2), ("network", 5))
        }
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
