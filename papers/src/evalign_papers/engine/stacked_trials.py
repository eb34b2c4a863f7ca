"""Networks of a cell, trained as stacks: all trials at once, and all points of a grid where there is one."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.func import vmap

from evalign.confusion import Task
from evalign.networks.mlp import mlp
from evalign.training.batches import Batches, Rows, Watch, flat, plain_batches, predict_logits
from evalign.training.loop import Epoch, Run, Values
from evalign.training.recipes import Recipe
from evalign.training.stacked import Stack, Trial, train_trials
from evalign.training.stacked_networks import padded
from evalign_papers.datasets.sources.cocktailparty import PEOPLE
from evalign_papers.engine.config import Config, Grid
from evalign_papers.engine.scores import watch_cuts
from evalign_papers.engine.terms import build_term, metric_score
from evalign_papers.engine.trial_data import Part
from evalign_papers.networks.graph import pair_network
from evalign_papers.rivals.cross_entropy import balanced_batches, class_weights

LARGEST_STACK = 80
Point = dict[str, float]
OnEpoch = Callable[[int, Epoch], None]


@dataclass
class Trained:
    """One network of one trial at one point of the grid, with its logits."""

    trial: int
    point: Point
    history: list[Epoch]
    valid: Tensor  # logits
    test: Tensor

    @property
    def kept(self) -> Epoch:
        """The epoch whose weights were kept, of the last stage that kept one."""
        return [epoch for epoch in self.history if epoch.best][-1]


class WatchedStack(Stack):
    """A stack that records numbers on other rows in every epoch, which influence no choice."""

    def __init__(self, *args: Any, watch: Watch, watched: Sequence[Tensor], **options: Any) -> None:
        super().__init__(*args, **options)
        self.watch, self.watched = watch, padded(watched, self.rows.x.device)
        self.found = self._watched_values()

    def validate(self) -> None:
        super().validate()
        self.found.copy_(self._watched_values())

    def epoch(self, runs: Sequence[Run]) -> list[Values]:
        values = super().epoch(runs)
        return [own._replace(watched=tuple(found)) for own, found in zip(values, self.found.tolist(), strict=True)]

    @torch.no_grad()
    def _watched_values(self) -> Tensor:
        """Values (S, k) of the watched rows."""
        watch, (index, mask), found = self.watch, self.watched, []
        for own in self.networks.all_groups:
            places = index[own]
            batch = self.networks.logits(own, places), self.rows.y[places], self.rows.weight[places] * mask[own]
            found.append(vmap(lambda z, y, weight: watch(*flat(z, y, weight, self.task)))(*batch))
        return torch.cat(found)


def grid_points(grid: Grid | None) -> list[Point]:
    """
    >>> len(grid_points(Grid((1e-2, 1e-3), (0.25, 0.5), (0.9,), (512,), "score", "each")))
    4
    """
    if grid is None:
        return [{}]
    axes = {name: getattr(grid, name) for name in ("learning_rate", "dropout", "rate", "batch_size", "offset")}
    axes = {name: values for name, values in axes.items() if values}
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


def train_points(
    config: Config, parts: Sequence[Part], points: Sequence[Point], device: str, on_epoch: OnEpoch | None = None
) -> list[Trained]:
    """Train every trial at every point; those with equal numbers and sizes of batches form a stack."""
    assert config.training is not None
    groups: dict[tuple[int, int], list[tuple[Part, Point]]] = {}
    for part, point in itertools.product(parts, points):
        size = int(point.get("batch_size", config.training.batch_size))
        count = Batches(len(part.train_y), size, seed=0).count
        groups.setdefault((size, count), []).append((part, point))
    found = []
    for (size, _), members in groups.items():
        for start in range(0, len(members), LARGEST_STACK):
            found += _stack(config, members[start : start + LARGEST_STACK], size, device, on_epoch)
    return found


def _stack(
    config: Config, members: list[tuple[Part, Point]], batch_size: int, device: str, on_epoch: OnEpoch | None
) -> list[Trained]:
    network, training = config.network, config.training
    assert network is not None
    assert training is not None
    own = {part.trial: part for part, _ in members}
    width = max(part.train.shape[1] for part in own.values())
    classes = 1 + max(int(part.train_y.max()) for part in own.values())
    task: Task = "binary" if network.outputs == "one" else "multiclass"
    tables: list[Any] = [[], [], []]
    places: dict[int, list[Tensor]] = {}
    rows = 0
    for trial, part in own.items():
        places[trial] = []
        for table, labels in ((part.train, part.train_y), (part.valid, part.valid_y), (part.test, part.test_y)):
            tables[0].append(np.pad(table, ((0, 0), (0, width - table.shape[1]))))
            tables[1].append(labels)
            tables[2].append(
                np.ones(len(labels), np.float32) if labels is part.test_y else _weights(config, part, labels)
            )
            places[trial].append(torch.arange(rows, rows + len(labels)))
            rows += len(labels)
    x, y, weight = (torch.from_numpy(np.concatenate(table)).to(device) for table in tables)
    made, tests = [], []
    for part, point in members:
        train, valid, test = places[part.trial]
        made.append(Trial(train, valid, recipe_of(config, point), part.seed(config), point.get("dropout")))
        tests.append(test)
    watches = "mean_over_thresholds" in config.quirks
    squash = config.method.name in ("metric", "released") or bool(config.method.options.get("squash"))

    def make() -> torch.nn.Module:
        if network.kind == "graph":
            return pair_network(PEOPLE, width, network.hidden)
        return mlp(width, 1 if task == "binary" else classes, network.hidden, network.dropout)

    results = train_trials(
        make, Rows(x, y, weight), made, build_term(config.method, task), metric_score(config.decide_for, classes),
        batch_size=batch_size, task=task,
        kind=partial(WatchedStack, watch=watch_cuts(squash), watched=tests) if watches else None,
        make_batches=balanced_batches(y) if training.oversample else plain_batches,
        on_epoch=None if on_epoch is None else lambda s, epoch: on_epoch(members[s][0].trial, epoch),
    )  # fmt: skip
    found = []
    for (part, point), result in zip(members, results, strict=True):
        alone = make().to(device)
        alone.load_state_dict(result.state)
        logits = [predict_logits(alone, x[i.to(device)]).cpu() for i in places[part.trial][1:]]
        found.append(Trained(part.trial, point, result.history, logits[0], logits[1]))
    return found


def _weights(config: Config, part: Part, y: Any) -> Any:
    assert config.training is not None
    if not config.training.class_weight:
        return np.ones(len(y), np.float32)
    return class_weights(torch.from_numpy(part.train_y)).numpy()[y].astype(np.float32)


def recipe_of(config: Config, point: Point) -> Recipe:
    assert config.training is not None
    stages = config.training.stages
    if "learning_rate" in point:
        stages = tuple(replace(stage, learning_rate=point["learning_rate"]) for stage in stages)
    if "rate" in point:
        stages = tuple(replace(stage, rate=point["rate"]) if stage.rate is not None else stage for stage in stages)
    if "offset" in point:
        stages = tuple(replace(stage, offset=point["offset"]) if stage.offset else stage for stage in stages)
    return Recipe(config.cell, "", stages)
