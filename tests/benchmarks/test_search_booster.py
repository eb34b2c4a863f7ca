"""benchmarks/search_booster.py: what is passed on to LightGBM, and what a report says of stored probabilities."""

import lightgbm
import numpy as np
import pandas as pd
import pytest
from sklearn.metrics import f1_score, log_loss

from reference.searches import benchmark, made_up_outputs


@pytest.fixture(scope="module")
def search():
    return benchmark("search_booster")


def test_params_reach_lightgbm_and_leave_it_as_it_was(search):
    x, before = np.linspace(0, 1, 40)[:, None], (lightgbm.Booster, lightgbm.Dataset)
    with search.lightgbm_with({"max_bin": 7, "extra_trees": True}):
        data = lightgbm.Dataset(x, np.arange(40) % 2, params={"verbose": -1, "min_data_in_bin": 1})
        text = lightgbm.Booster({"verbose": -1, "min_data_in_bin": 1}, data).model_to_string()
    assert data.feature_num_bin(0) <= 7
    assert "[extra_trees: 1]" in text
    assert "[max_bin: 7]" in text
    assert (lightgbm.Booster, lightgbm.Dataset) == before


@pytest.mark.slow
def test_held_out_rows_are_in_one_order_whatever_the_folds(search):
    rng = np.random.default_rng(0)
    X = pd.DataFrame(rng.normal(size=(120, 2)))
    y = (X[0] + rng.normal(size=120) > 0).to_numpy(np.int64)
    one, other = (search.fit(f"all,150-rounds{more}", X, y, 0) for more in ("", ",again"))
    assert (one.labels == other.labels).all()
    assert (one.held_out != other.held_out).any()
    positive = one.labels == 1
    agreement = np.corrcoef(one.held_out[positive, 1], other.held_out[positive, 1])[0, 1]
    assert agreement > 0.6  # rows in another order would agree by chance only


def test_a_report_has_paired_differences_of_rows_put_aside(search, tmp_path):
    f1, loss = [], []
    for number in range(3):
        base, other = stored = [made_up_outputs(search, number, sharpness) for sharpness in (2, 5)]
        for name, own in zip(("half", "all,linear"), stored, strict=True):
            np.savez(tmp_path / f"adult-{name}-{number}.npz", **own._asdict())
        truth = base.select_labels
        f1.append(np.subtract(*(f1_score(truth, t.select.argmax(1)) for t in (other, base))))
        mean = (base.select + other.select) / 2
        loss.append(log_loss(truth, mean) - log_loss(truth, base.select))
    lines = list(search.report(tmp_path, "adult", "half", ["half+all,linear", "half+missing"]))
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    assert [row[0] for row in cells[2:]] == ["half", "all,linear", "half+all,linear"]
    gap, error = map(float, cells[3][cells[0].index("argmax")].split(" ± "))
    assert gap == pytest.approx(np.mean(f1), abs=1e-4)
    assert error == pytest.approx(np.std(f1, ddof=1) / 3**0.5, abs=1e-4)
    assert float(cells[4][cells[0].index("log-loss")].split(" ± ")[0]) == pytest.approx(np.mean(loss), abs=1e-4)


def test_class_shares_are_taken_off_as_far_as_held_out_rows_ask_for(search):
    held_out = np.array([[0.9, 0.1]] * 6 + [[0.7, 0.3]] * 2)
    valid = search.HeldOutPredictions(held_out, np.array([0] * 6 + [1] * 2), np.ones(8))
    aside = np.array([[0.7, 0.3], [0.9, 0.1]])
    assert search.off_prior(valid, aside, np.array([1, 0])) == 1.0
    never = search.HeldOutPredictions(held_out, np.array([1] + [0] * 6 + [1]), np.ones(8))
    assert search.off_prior(never, np.array([[0.4, 0.6]]), np.array([1])) == 1.0
