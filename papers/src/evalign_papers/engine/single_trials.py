"""Trials trained one at a time: image networks, scikit-learn estimators, and AP-Perf, whose loss cannot be stacked."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from evalign.confusion import Task
from evalign.networks.mlp import mlp
from evalign.objective import Objective
from evalign.training.batches import Rows, predict_logits
from evalign.training.in_memory import InMemory, train
from evalign_papers.datasets import Dataset, Split, splits
from evalign_papers.datasets.longtail import tail_split
from evalign_papers.engine.config import Config
from evalign_papers.engine.recorded import RecordedRows
from evalign_papers.engine.scores import watch_cuts
from evalign_papers.engine.stacked_trials import OnEpoch, Point, Trained, recipe_of
from evalign_papers.engine.terms import build_term, metric_score
from evalign_papers.engine.trial_data import Part
from evalign_papers.networks import Pictures, darknet19, tiny_darknet
from evalign_papers.networks.image_input import channel_statistics
from evalign_papers.rivals.ap_perf import APPerfLoss
from evalign_papers.rivals.cross_entropy import class_weights

Floats = NDArray[np.float64]
NETWORKS = {"darknet19": darknet19, "tiny_darknet": tiny_darknet}
CHECKPOINTS = 3  # in a trial: a file of all weights and averages takes about a second


def takes_images(config: Config) -> bool:
    return config.network is not None and config.network.kind in NETWORKS


def image_splits(config: Config, dataset: Dataset, trials: list[int]) -> Iterator[tuple[int, Split]]:
    """The rows of every trial; the quirk "one_split" gives all of them the first one's."""
    if config.data.tail is not None:
        yield from ((trial, tail_split(dataset, config.data.tail, config.seed, trial)) for trial in trials)
        return
    one = "one_split" in config.quirks
    found = list(splits(dataset, 1 if one else max(trials) + 1, config.seed))
    yield from ((trial, found[0 if one else trial]) for trial in trials)


def image_network(config: Config, classes: int, pixels: Tensor) -> nn.Module:
    """The network of a config; its input is normalised by the mean and deviation of `pixels`."""
    assert config.network is not None
    outputs = 1 if config.network.outputs == "one" else classes
    first = Pictures(*channel_statistics(pixels), augment=config.network.augment)
    return nn.Sequential(first, NETWORKS[config.network.kind](outputs))


def train_images(
    config: Config,
    dataset: Dataset,
    pixels: Tensor,
    split: Split,
    trial: int,
    point: Point,
    checkpoint: Path | None = None,
    on_epoch: OnEpoch | None = None,
    catch_interrupt: bool = False,
) -> Trained:
    """Train one network; `pixels` are all images of the data set, on the device that trains.

    With `catch_interrupt` a KeyboardInterrupt, Ctrl-C's or that of `on_epoch`, ends training and keeps the best epoch.
    """
    assert config.network is not None
    assert config.training is not None
    device, classes = pixels.device, len(dataset.classes)
    y = torch.from_numpy(dataset.y).to(device)
    weights = torch.ones(classes, device=device)
    if config.training.class_weight:
        weights = class_weights(torch.from_numpy(dataset.y[split.train]), classes).float().to(device)
    rows = []
    for part in split:
        index = torch.from_numpy(np.asarray(part)).to(device)
        rows.append(Rows(pixels[index], y[index], weights[y[index]]))
    rows[2] = Rows.of(rows[2].x, rows[2].y)  # what is reported of test rows is never weighted
    seed, task = config.seed + trial, _task(config)
    with torch.random.fork_rng([]):
        torch.default_generator.manual_seed(seed)
        network = image_network(config, classes, rows[0].x[:]).to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    term = build_term(config.method, task)
    if isinstance(term, Objective) and isinstance(term.beta, Tensor):
        term = replace(term, beta=term.beta.to(device))  # copied once, not with every batch
    recipe, amp = recipe_of(config, point), device.type == "cuda"
    squash = config.method.name in ("metric", "released") or bool(config.method.options.get("squash"))
    history = train(
        network, rows[0], rows[1], recipe, term, metric_score(config.decide_for, classes), task=task, seed=seed,
        batch_size=int(point.get("batch_size", config.training.batch_size)), amp=amp, checkpoint=checkpoint,
        checkpoint_every=max(1, recipe.epochs // CHECKPOINTS), catch_interrupt=catch_interrupt,
        source=RecordedRows if amp else InMemory,
        watch=watch_cuts(squash) if "mean_over_thresholds" in config.quirks else None, watch_rows=rows[2],
        on_epoch=None if on_epoch is None else lambda epoch: on_epoch(trial, epoch),
    )  # fmt: skip
    valid, test = (predict_logits(network, part.x, amp=amp).cpu() for part in rows[1:])
    return Trained(trial, point, history, valid, test)


def _task(config: Config) -> Task:
    assert config.network is not None
    return "binary" if config.network.outputs == "one" else "multiclass"


def _svm_perf(options: dict[str, Any], seed: int) -> Any:
    from evalign_papers.rivals.svm_perf import SVMPerfClassifier

    return SVMPerfClassifier(**options)


def _ccs(options: dict[str, Any], seed: int) -> Any:
    from evalign_papers.rivals.ccs import CCSClassifier

    return CCSClassifier(**options)


def _random_forest(options: dict[str, Any], seed: int) -> Any:
    from sklearn.ensemble import RandomForestClassifier

    return RandomForestClassifier(**{"n_estimators": 300, **options}, random_state=seed, n_jobs=4)


def _gradient_boosting(options: dict[str, Any], seed: int) -> Any:
    from sklearn.ensemble import HistGradientBoostingClassifier

    return HistGradientBoostingClassifier(**options, random_state=seed)


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
