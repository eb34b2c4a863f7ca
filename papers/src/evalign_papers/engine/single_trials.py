"""Trials that cannot be stacked: scikit-learn estimators, and AP-Perf, whose loss does not support vmap."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evalign.networks import mlp
from evalign.training.batches import Rows, predict_logits
from evalign.training.in_memory import train
from evalign_papers.engine.config import Config
from evalign_papers.engine.scores import watch_cuts
from evalign_papers.engine.stacked_trials import OnEpoch, Trained, recipe_of
from evalign_papers.engine.terms import metric_score
from evalign_papers.engine.trial_data import Part
from evalign_papers.rivals.ap_perf import APPerfLoss

Floats = NDArray[np.float64]


def _svm_perf(options: dict[str, Any], seed: int) -> Any:
    from evalign_papers.rivals.svm_perf import SVMPerfClassifier

    return SVMPerfClassifier(**options)


def _ccs(options: dict[str, Any], seed: int) -> Any:
    from evalign_papers.rivals.ccs import CCSClassifier

    return CCSClassifier(**options)


def _random_forest(options: dict[str, Any], seed: int) -> Any:
    from evalign.comparison.contenders import stock_forest

    return stock_forest(seed, jobs=4).set_params(**options)


def _gradient_boosting(options: dict[str, Any], seed: int) -> Any:
    from evalign.comparison.contenders import stock_boosting

    return stock_boosting(seed).set_params(**options)


ESTIMATORS: dict[str, Callable[[dict[str, Any], int], Any]] = {
    "svm_perf": _svm_perf,
    "ccs": _ccs,
    "random_forest": _random_forest,
    "gradient_boosting": _gradient_boosting,
}


def fit_estimator(config: Config, part: Part) -> tuple[Floats, Floats, NDArray[np.int64]]:
    """Validation and test probabilities, and the estimator's own predictions of the test rows.

    Margins without probabilities go through a sigmoid, which keeps their order and sign; decisions need no more.
    """
    model = ESTIMATORS[config.method.name](dict(config.method.options), part.seed(config))
    model.fit(part.train, part.train_y)
    classes = 1 + int(part.train_y.max())

    def probabilities(x: Any) -> Floats:
        if hasattr(model, "predict_proba"):
            found = np.zeros((len(x), classes))
            found[:, model.classes_] = model.predict_proba(x)
            return found
        p = 1 / (1 + np.exp(-np.clip(model.decision_function(x), -30, 30)))
        return np.stack([1 - p, p], axis=1)

    predicted = np.asarray(model.predict(part.test), dtype=np.int64)
    return probabilities(part.valid), probabilities(part.test), predicted


def train_alone(config: Config, part: Part, on_epoch: OnEpoch | None = None) -> Trained:
    """Train with AP-Perf: one game per batch on the CPU; validation rows in games of the same size."""
    assert config.network is not None
    assert config.training is not None
    size, seed = config.training.batch_size, part.seed(config)
    train_rows, valid_rows, test_rows = (
        Rows.of(torch.from_numpy(x), torch.from_numpy(y))
        for x, y in ((part.train, part.train_y), (part.valid, part.valid_y), (part.test, part.test_y))
    )
    loss_of = APPerfLoss(**{"max_rows": size, **config.method.options})

    def term(logits: Tensor, y: Tensor, weight: Tensor, temperature: Tensor) -> Any:
        return loss_of(logits, y)

    with torch.random.fork_rng([]):
        torch.default_generator.manual_seed(seed)
        network = mlp(part.train.shape[1], 1, config.network.hidden, config.network.dropout)
    history = train(
        network, train_rows, valid_rows, recipe_of(config, {}), term, metric_score(config.decide_for, 2),
        batch_size=size, task="binary", seed=seed, watch=watch_cuts(squash=False),
        watch_rows=test_rows, catch_interrupt=False,
        on_epoch=None if on_epoch is None else lambda epoch: on_epoch(part.trial, epoch),
    )  # fmt: skip
    valid, test = (predict_logits(network, rows.x) for rows in (valid_rows, test_rows))
    return Trained(part.trial, {}, history, valid, test)
