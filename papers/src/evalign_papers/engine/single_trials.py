"""What is not stacked: scikit-learn's estimators, and losses that are too slow or too odd for it, trial by trial."""

import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from evalign.networks import mlp
from evalign.training.batches import Batches
from evalign.training.evaluation import predict_logits
from evalign.training.loop import Epoch
from evalign_papers.engine.config import Config
from evalign_papers.engine.scores import watch_cuts
from evalign_papers.engine.stacked_trials import OnEpoch, Trained
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

    A margin without a probability goes through a sigmoid: its order and its sign stay, and a decision reads no more.
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
    """AP-Perf: batches of 20 solved one after the other; the stopping is that of the one stage the config has."""
    assert config.network is not None
    assert config.training is not None
    (stage,) = config.training.stages
    watch = watch_cuts(squash=False)
    x, y = torch.from_numpy(part.train), torch.from_numpy(part.train_y)
    valid, test = torch.from_numpy(part.valid), torch.from_numpy(part.test)
    valid_y, test_y = torch.from_numpy(part.valid_y), torch.from_numpy(part.test_y)
    loss_of = APPerfLoss(**config.method.options)
    batches = Batches(len(y), config.training.batch_size, seed=part.seed(config))
    held_out = Batches(len(valid_y), config.training.batch_size, seed=0)
    with torch.random.fork_rng([]):
        torch.default_generator.manual_seed(part.seed(config))
        network = mlp(x.shape[1], 1, config.network.hidden, config.network.dropout)
        optimiser = torch.optim.AdamW(
            network.parameters(), stage.learning_rate, weight_decay=stage.weight_decay, fused=True
        )
        best, waited, history = math.inf, 0, list[Epoch]()
        state = {name: value.clone() for name, value in network.state_dict().items()}
        while waited < stage.patience and len(history) < stage.epochs:
            started = time.perf_counter()
            network.train()
            losses = [_update(network, optimiser, loss_of, x[rows], y[rows]) for rows in batches.epoch()]
            logits = predict_logits(network, valid).squeeze(1)
            loss = float(np.mean([float(loss_of(logits[rows], valid_y[rows])) for rows in held_out.epoch()]))
            improved = loss < best
            best, waited = min(best, loss), 0 if improved else waited + 1
            if improved:
                state = {name: value.clone() for name, value in network.state_dict().items()}
            seen = predict_logits(network, test).squeeze(1)
            watched = tuple(watch(seen, test_y, torch.ones_like(seen)).tolist())
            epoch = Epoch(
                len(history) + 1, stage.name, 0.0, stage.learning_rate, float(np.mean(losses)), loss, 0.0, 0.0,
                improved, time.perf_counter() - started, watched,
            )  # fmt: skip
            history.append(epoch)
            if on_epoch is not None:
                on_epoch(part.trial, epoch)
    network.load_state_dict(state)
    return Trained(part.trial, {}, history, predict_logits(network, valid), predict_logits(network, test))


def _update(network: nn.Module, optimiser: torch.optim.Optimizer, loss_of: nn.Module, x: Any, y: Any) -> float:
    loss = loss_of(network(x).squeeze(1), y)
    optimiser.zero_grad(set_to_none=True)
    loss.backward()
    optimiser.step()
    return float(loss.detach())
