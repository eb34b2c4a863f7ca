"""Cross-fitted trees by the library's own objective: against LightGBM called directly, one fold after the other."""

from typing import Any

import lightgbm
import numpy as np
import pytest
from sklearn.metrics import confusion_matrix, log_loss

from evalign.boosting.growth import TreeOptions, cross_fit
from evalign.tables.split import Division, fold_rows
from evalign.training.loop import Epoch


def table(classes: int, n: int = 300) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    x = random.normal(size=(n, 4))
    cuts = np.quantile(x[:, 0], np.linspace(0, 1, classes + 1)[1:-1])
    return x, np.searchsorted(cuts, x[:, 0] + 0.5 * random.normal(size=n))


def options(classes: int, threads: int = 1, **more: Any) -> TreeOptions:
    more = {"patience": 15, **more}
    return TreeOptions(0.2, 7, 5, 1.0, 0.7, 1.0, threads=threads, seed=3, classes=classes, **more)


def by_hand(x: np.ndarray, y: np.ndarray, division: Division, classes: int, seed: int, rounds: int) -> np.ndarray:
    """Probabilities of a fold's held-out rows by `lightgbm.train`."""
    params = {
        "objective": "binary" if classes == 2 else "multiclass", "num_leaves": 7, "min_data_in_leaf": 5,
        "lambda_l2": 1.0, "feature_fraction": 0.7, "learning_rate": 0.2, "seed": seed, "deterministic": True,
        "force_row_wise": True, "min_data_in_bin": 1, "feature_pre_filter": False, "verbose": -1, "num_threads": 1,
        "boost_from_average": False,
    }  # fmt: skip
    if classes > 2:
        params["num_class"] = classes
    shares = np.log(np.bincount(y, minlength=classes) / len(y))
    start = shares[1] - shares[0] if classes == 2 else shares - shares.mean()
    rows = division.train
    data = lightgbm.Dataset(
        x[rows], y[rows], weight=division.train_weight,
        init_score=np.array(np.broadcast_to(start, (len(rows), *np.shape(start)))),
    )  # fmt: skip
    raw = lightgbm.train(params, data, rounds).predict(x[division.valid], raw_score=True) + start
    if classes == 2:
        p = 1 / (1 + np.exp(-raw))
        return np.stack([1 - p, p], 1)
    e = np.exp(raw - raw.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


@pytest.mark.parametrize("classes", [2, 4])
def test_held_out_probabilities_are_those_of_lightgbm_trained_without_the_fold(classes: int):
    x, y = table(classes)
    folds = fold_rows(y, np.ones(len(y)), 3, seed=1)
    fitted = cross_fit(x, y, folds, options(classes, rounds=60, patience=5), tolerance=0.0)
    alone = [by_hand(x, y, fold, classes, 3 + i, fitted.rounds) for i, fold in enumerate(folds)]
    np.testing.assert_allclose(fitted.held_out, np.concatenate(alone), rtol=1e-6, atol=1e-9)
    labels = y[np.concatenate([fold.valid for fold in folds])]
    losses = [
        log_loss(labels, np.concatenate([by_hand(x, y, fold, classes, 3 + i, r) for i, fold in enumerate(folds)]))
        for r in range(1, len(fitted.history) + 1)
    ]
    np.testing.assert_allclose([epoch.loss for epoch in fitted.history], losses, rtol=1e-5)
    assert fitted.rounds == 1 + int(np.argmin(losses))
    assert len(fitted.history) == fitted.rounds + 5


def test_threads_do_not_change_the_trees():
    x, y = table(3)
    folds = fold_rows(y, np.ones(len(y)), 3, seed=1)
    one, two = (cross_fit(x, y, folds, options(3, threads, rounds=30)) for threads in (1, 2))
    np.testing.assert_array_equal(one.held_out, two.held_out)
    for ours, theirs in zip(one.trees, two.trees, strict=True):
        np.testing.assert_array_equal(ours.scores(x), theirs.scores(x))


def test_the_score_is_that_of_the_confusion_matrix_of_all_held_out_rows():
    x, y = table(3)
    folds = fold_rows(y, np.ones(len(y)), 3, seed=1)
    fitted = cross_fit(x, y, folds, options(3, rounds=30), score=lambda matrix: float(np.trace(matrix) / matrix.sum()))
    labels = y[np.concatenate([fold.valid for fold in folds])]
    matrix = confusion_matrix(labels, fitted.held_out.argmax(1))
    assert fitted.history[fitted.rounds - 1].score == pytest.approx(np.trace(matrix) / len(y))


def test_xgboost_starts_from_the_classes_shares_too():
    x, y = table(3)
    folds = fold_rows(y, np.ones(len(y)), 3, seed=1)
    fitted = cross_fit(x, y, folds, options(3, library="xgboost", rounds=30))
    labels = y[np.concatenate([fold.valid for fold in folds])]
    assert log_loss(labels, fitted.held_out) == pytest.approx(fitted.history[fitted.rounds - 1].loss, rel=1e-4)
    assert fitted.history[0].loss < 1.05 * log_loss(y, np.tile(np.bincount(y) / len(y), (len(y), 1)))


def test_an_interrupt_keeps_the_best_so_far():
    x, y = table(3)
    folds = fold_rows(y, np.ones(len(y)), 3, seed=1)

    def stop(epoch: Epoch) -> None:
        if epoch.epoch == 4:
            raise KeyboardInterrupt

    assert 1 <= cross_fit(x, y, folds, options(3), on_round=stop).rounds <= 4
