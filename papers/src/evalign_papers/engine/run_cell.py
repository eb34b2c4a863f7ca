"""Run a cell: train the trials missing from its report and save each when it ends."""

import time
from collections.abc import Callable, Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from evalign.training.batches import probabilities_of
from evalign_papers.engine.config import Config
from evalign_papers.engine.reports import Report, Scores, TrialReport, environment
from evalign_papers.engine.scores import WATCHED, Tail, auroc, hard_scores, honest_scores
from evalign_papers.engine.single_trials import (
    ESTIMATORS,
    fit_estimator,
    image_splits,
    takes_images,
    train_alone,
    train_images,
)
from evalign_papers.engine.stacked_trials import OnEpoch, Point, Trained, grid_points, train_points
from evalign_papers.engine.trial_data import Part, dataset_of, parts

Save = Callable[[Report], None]
Ints = NDArray[np.int64]
CHOSEN_BY_TEST = ("f1", "accuracy", "auroc")  # the released code keeps the best value of these


def run(
    config: Config,
    *,
    report: Report | None = None,
    data_dir: str | Path | None = None,
    device: str = "cpu",
    trials: int | None = None,
    save: Save | None = None,
    on_epoch: OnEpoch | None = None,
    checkpoints: Path | None = None,
    only: int | None = None,
) -> Report:
    """Complete `report`, or start one; `trials` limits their number, `only` selects a single trial.

    `save` gets the report after every step. Image networks keep checkpoints in the folder `checkpoints` until their
    trial is in the report.
    """
    report = Report(config) if report is None else report
    save = save or (lambda report: None)
    missing = [trial for trial in missing_trials(config, report, trials) if only is None or trial == only]
    if not missing:
        return report
    report.environment = environment("cpu" if trained_one_by_one(config) else device)
    if trained_one_by_one(config):
        _one_by_one(config, report, missing, data_dir, save, on_epoch)
    elif takes_images(config):
        _pictures(config, report, missing, data_dir, device, save, on_epoch, checkpoints)
    else:
        _stacked(config, report, missing, data_dir, device, save, on_epoch)
    return report


def missing_trials(config: Config, report: Report | None, trials: int | None = None) -> list[int]:
    wanted = config.trials if trials is None else min(trials, config.trials)
    done = set() if report is None else report.done
    return [trial for trial in range(wanted) if trial not in done]


def trained_one_by_one(config: Config) -> bool:
    """Whether trials run one by one on the CPU instead of in a stack."""
    return config.method.name in ESTIMATORS or config.method.name == "ap_perf"


def _one_by_one(
    config: Config,
    report: Report,
    missing: list[int],
    data_dir: str | Path | None,
    save: Save,
    on_epoch: OnEpoch | None,
) -> None:
    for part in parts(config, data_dir, missing):
        started = time.perf_counter()
        if config.method.name in ESTIMATORS:
            epochs, scores = 0, _estimator_scores(config, part)
        else:
            trained = train_alone(config, part, on_epoch)
            epochs, scores = len(trained.history), _network_scores(config, trained, part.valid_y, part.test_y)
        seconds = time.perf_counter() - started
        report.trials.append(TrialReport(part.trial, part.seed(config), {}, epochs, round(seconds, 3), scores))
        report.seconds += seconds
        save(report)


def _pictures(
    config: Config,
    report: Report,
    missing: list[int],
    data_dir: str | Path | None,
    device: str,
    save: Save,
    on_epoch: OnEpoch | None,
    checkpoints: Path | None,
) -> None:
    dataset, points = dataset_of(config, data_dir), grid_points(config.grid)
    torch.backends.cudnn.benchmark = True  # images of one size: the fastest algorithm is looked for once
    pixels = torch.from_numpy(np.ascontiguousarray(dataset.X)).to(device)

    def file_of(trial: int, point: Point) -> Path | None:
        if checkpoints is None or find_spec("safetensors") is None:  # without it a trial starts from scratch
            return None
        place = grid_points(config.grid).index(point)
        return checkpoints / f"{Path(config.cell).name}.{config.sha256[:8]}.{trial}.{place}.safetensors"

    if config.grid is not None and config.grid.search == "once":
        tried = [entry["point"] for entry in report.grid]
        [(_, split)] = image_splits(config, dataset, [0])
        for point in (point for point in points if point not in tried):
            started, file = time.perf_counter(), file_of(0, point)
            first = train_images(config, dataset, pixels, split, 0, point, file, on_epoch)
            report.grid.append(_validation(first))
            report.seconds += time.perf_counter() - started
            save(report)
            if file is not None:
                file.unlink(missing_ok=True)
        points = [_best_point(config, report.grid)]
    for trial, split in image_splits(config, dataset, missing):
        started, files, candidates = time.perf_counter(), list[Path](), list[Trained]()
        for point in points:
            file = file_of(trial, point)
            files += [] if file is None else [file]
            candidates.append(train_images(config, dataset, pixels, split, trial, point, file, on_epoch))
        one = candidates[0]
        if len(points) > 1:
            tried = [_validation(candidate) for candidate in candidates]
            report.grid = [entry for entry in report.grid if entry["trial"] != trial] + tried
            one = candidates[points.index(_best_point(config, tried))]
        y = dataset.y
        tail = Tail(np.bincount(y[split.train], minlength=len(dataset.classes))) if config.data.tail else None
        scores = _network_scores(config, one, y[split.valid], y[split.test], dataset.classes, tail)
        seconds = time.perf_counter() - started
        report.trials.append(
            TrialReport(trial, config.seed + trial, one.point, len(one.history), round(seconds, 3), scores)
        )
        report.seconds += seconds
        save(report)
        for file in files:
            file.unlink(missing_ok=True)


def _stacked(
    config: Config,
    report: Report,
    missing: list[int],
    data_dir: str | Path | None,
    device: str,
    save: Save,
    on_epoch: OnEpoch | None,
) -> None:
    started = time.perf_counter()
    points = grid_points(config.grid)
    if config.grid is not None and config.grid.search == "once":
        tried = [entry["point"] for entry in report.grid]
        first = list(parts(config, data_dir, [0]))
        for group in _by_batch_size(point for point in points if point not in tried):
            report.grid += [_validation(one) for one in train_points(config, first, group, device, on_epoch)]
            report.seconds += time.perf_counter() - started
            started = time.perf_counter()
            save(report)  # a killed run resumes with the next batch size
        points = [_best_point(config, report.grid)]
    own = {part.trial: part for part in parts(config, data_dir, missing)}
    trained = train_points(config, list(own.values()), points, device, on_epoch)
    seconds = time.perf_counter() - started
    for trial in missing:
        candidates = [one for one in trained if one.trial == trial]
        if len(points) > 1:
            report.grid += [_validation(one) for one in candidates]
            best = _best_point(config, [_validation(one) for one in candidates])
            candidates = [one for one in candidates if one.point == best]
        (one,) = candidates
        scores = _network_scores(config, one, own[trial].valid_y, own[trial].test_y)
        share = seconds / len(missing)
        report.trials.append(
            TrialReport(trial, own[trial].seed(config), one.point, len(one.history), round(share, 3), scores)
        )
    report.seconds += seconds
    save(report)


def _by_batch_size(points: Iterable[Point]) -> list[list[Point]]:
    """Points that can be trained as one stack; the largest batches, which are fastest, first."""
    groups: dict[float, list[Point]] = {}
    for point in points:
        groups.setdefault(point.get("batch_size", 0.0), []).append(point)
    return [groups[size] for size in sorted(groups, reverse=True)]


def _validation(one: Trained) -> dict[str, object]:
    return {"trial": one.trial, "point": one.point, "score": one.kept.score, "loss": one.kept.loss}


def _best_point(config: Config, tried: list[dict[str, object]]) -> Point:
    """The point of the best validation value; the first of equals."""
    assert config.grid is not None
    sign = -1.0 if config.grid.select == "score" else 1.0
    best = min(tried, key=lambda one: sign * float(one[config.grid.select]))  # type: ignore[union-attr, arg-type]
    return dict(best["point"])  # type: ignore[call-overload, no-any-return]


def _network_scores(
    config: Config,
    trained: Trained,
    valid_y: Ints,
    test_y: Ints,
    names: Sequence[str] = (),
    tail: Tail | None = None,
) -> Scores:
    """The scores of a network's outputs; each pair of a graph is a sample."""
    assert config.network is not None
    binary = config.network.outputs == "one"
    valid, test = (
        probabilities_of(z.double().flatten() if binary else z.double(), "binary" if binary else "multiclass").numpy()
        for z in (trained.valid, trained.test)
    )
    valid_y, test_y = valid_y.ravel(), test_y.ravel()
    if config.protocol == "honest":
        return honest_scores(valid, valid_y, test, test_y, config.decide_for, names, tail)
    if "mean_over_thresholds" in config.quirks:
        return paper_scores(config, trained, auroc(test[:, 1], test_y))
    scores = hard_scores(test.argmax(1), test_y, test.shape[1], names, tail)
    if test.shape[1] == 2:
        scores["auroc"] = auroc(test[:, 1], test_y)
    return {"paper": scores}


def paper_scores(config: Config, trained: Trained, ranking: float) -> Scores:
    """Scores of the released code from the epochs that improved validation, with all quirks and without each one."""
    kept = [epoch.watched for epoch in trained.history if epoch.best]

    def figures(quirks: set[str]) -> dict[str, float]:
        offset = len(WATCHED) if "cut_logits" in quirks else 0
        found = {}
        for i, name in enumerate(WATCHED):
            of_epochs = [watched[offset + i] for watched in kept]
            found[name] = of_epochs[-1]
            column = "auroc" if name == "balanced_accuracy" else name
            chosen = max(of_epochs) if "test_chooses" in quirks and column in CHOSEN_BY_TEST else of_epochs[-1]
            if column == "auroc":
                found["auroc"] = chosen if "auroc_of_cuts" in quirks else ranking
            else:
                found[name] = chosen
        return found

    quirks = set(config.quirks)
    scores = {"paper": figures(quirks)}
    for quirk in ("cut_logits", "test_chooses", "auroc_of_cuts"):
        if quirk in quirks:
            scores[f"paper-without-{quirk}"] = figures(quirks - {quirk})
    return scores


def _estimator_scores(config: Config, part: Part) -> Scores:
    valid, test, predicted = fit_estimator(config, part)
    classes = test.shape[1]
    if config.protocol == "honest":
        return honest_scores(valid, part.valid_y, test, part.test_y, config.decide_for, part.names)
    scores = hard_scores(predicted, part.test_y, classes, part.names)
    if classes == 2:
        scores["auroc"] = (
            scores["balanced_accuracy"] if "auroc_of_cuts" in config.quirks else auroc(test[:, 1], part.test_y)
        )
    variants = {"paper": scores}
    if "macro_f1" in config.quirks and classes == 2:
        variants = {"paper": {**scores, "f1": scores["macro_f1"]}, "paper-without-macro_f1": scores}
    return variants
