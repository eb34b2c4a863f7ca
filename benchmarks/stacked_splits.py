"""Splits of a table, encoded as `EASTClassifier` encodes them, and networks of all splits and folds as one stack."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from sklearn.model_selection import train_test_split

from evalign import EASTClassifier, metrics
from evalign.estimators.network import automatic_folds
from evalign.metrics import Average
from evalign.networks.embedding import Fields
from evalign.networks.mlp import MeanOfNetworks, fields_of, table_network
from evalign.objective import Objective
from evalign.steps import StepChoice
from evalign.tables.encode import TableEncoder
from evalign.tables.split import Division, distinct_rows, fold_rows
from evalign.training.batches import Batches, Rows, argmax_score, default_batch_size, predict_logits
from evalign.training.recipes import find_recipe
from evalign.training.stacked import FoldedRows, Trial, train_trials

AT_ONCE = 60  # networks of a stack: 60 on Credit card fill half of a GPU's 140 GB in validation
Matrix = NDArray[np.float32]
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Folds = int | Literal["auto"]


@dataclass
class Part:
    """One split: distinct development rows, their folds, and the rows to score."""

    x: Matrix
    y: Ints
    divisions: Sequence[Division]
    test: Matrix
    test_y: Ints
    fields: Fields
    seed: int

    @property
    def held_out(self) -> Ints:
        """Positions of the rows held out by each division."""
        return np.concatenate([division.valid for division in self.divisions])

    @property
    def held_out_weight(self) -> Floats:
        return np.concatenate([division.valid_weight for division in self.divisions])


def parts(X: pd.DataFrame, y: Ints, seeds: Iterable[int], folds: Folds = 1) -> Iterator[Part]:
    """Four fifths of the rows for development, one fifth for testing."""
    for seed in seeds:
        dev, test = train_test_split(np.arange(len(y)), test_size=0.2, random_state=seed, stratify=y)
        yield encoded(X, y, dev, test, seed, folds)


def selections(X: pd.DataFrame, y: Ints, seeds: Iterable[int], folds: Folds = 1) -> Iterator[Part]:
    """Splits without the test rows: candidates are compared on a fifth of the others."""
    for seed in seeds:
        dev, _ = train_test_split(np.arange(len(y)), test_size=0.2, random_state=seed, stratify=y)
        fit, select = train_test_split(dev, test_size=0.2, random_state=seed, stratify=y[dev])
        yield encoded(X, y, fit, select, seed, folds)


def encoded(X: pd.DataFrame, y: Ints, dev: Ints, test: Ints, seed: int, folds: Folds) -> Part:
    """Encoded as in `EASTClassifier`: scaling is learned on the training rows, or with folds on all rows."""
    model, own = EASTClassifier(), X.iloc[dev]
    rows, weight = distinct_rows(own, y[dev], np.ones(len(dev)))
    labels = y[dev][rows]
    count = automatic_folds(labels, model.validation_fraction) if folds == "auto" else folds
    divisions = fold_rows(labels, weight, count, seed, fraction=model.validation_fraction)
    learned_on = divisions[0].train if len(divisions) == 1 else np.arange(len(rows))
    encoder = TableEncoder(numeric=model.numeric).fit(own, rows=rows[learned_on])
    return Part(
        encoder.transform(own, rows=rows), labels, divisions, encoder.transform(X.iloc[test]), y[test],
        fields_of(encoder), seed,
    )  # fmt: skip


@dataclass
class _Member:
    """One network to train: its part, its fold, and its rows in the table of the part."""

    part: int
    fold: int
    train: torch.Tensor
    valid: torch.Tensor
    seed: int


def network_probabilities(
    options: dict[str, Any], made: list[Part], classes: int, device: str
) -> list[tuple[Floats, Floats]]:
    """Held-out and test probabilities of every split, the networks of one batch count trained as one stack."""
    model = EASTClassifier(**options)
    average, _ = average_and_labels(classes)
    plain = model.network == "mlp"
    widest = max(part.x.shape[1] for part in made)

    def padded(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.pad(x, (0, widest - x.shape[1] if plain else 0)).to(device)

    def network(part: Part) -> torch.nn.Module:
        fields = replace(part.fields, features=widest) if plain else part.fields
        return table_network(model.network, fields, classes, model.hidden, model.dropout, ensemble=model.ensemble)

    size = default_batch_size(min(len(d.train) for part in made for d in part.divisions))
    groups: dict[Any, list[_Member]] = {}
    for i, part in enumerate(made):
        alike = None if plain else (part.fields.features, part.fields.numbers, part.fields.categories)
        folded = FoldedRows.of(torch.from_numpy(part.x).__getitem__, part.y, part.divisions, torch.device("cpu"))
        for fold, (train, valid) in enumerate(zip(folded.train, folded.valid, strict=True)):
            count = Batches(len(train), size, seed=0).count
            groups.setdefault((count, alike), []).append(_Member(i, fold, train, valid, part.seed + 1000 * fold))
    trained: dict[tuple[int, int], tuple[torch.nn.Module, Floats]] = {}
    for group in groups.values():
        for at in range(0, len(group), AT_ONCE):
            trained |= _trained(group[at : at + AT_ONCE], made, model, network, padded, average, size, device)
    found = []
    for i, part in enumerate(made):
        own = [trained[i, fold] for fold in range(len(part.divisions))]
        together = MeanOfNetworks([network for network, _ in own])
        found.append(
            (np.concatenate([p for _, p in own]), _probabilities(together, padded(torch.from_numpy(part.test))))
        )
    return found


def _trained(
    members: list[_Member],
    made: list[Part],
    model: EASTClassifier,
    network: Callable[[Part], torch.nn.Module],
    padded: Callable[[torch.Tensor], torch.Tensor],
    average: Average,
    size: int,
    device: str,
) -> dict[tuple[int, int], tuple[torch.nn.Module, Floats]]:
    """Networks of one stack by part and fold, with their held-out predictions."""
    tables, starts, start = [], {}, 0
    for i in dict.fromkeys(member.part for member in members):
        part = made[i]
        tables.append(
            FoldedRows.of(torch.from_numpy(part.x).__getitem__, part.y, part.divisions, torch.device("cpu")).rows
        )
        starts[i] = start
        start += len(tables[-1])
    rows = Rows(
        torch.cat([padded(own.x[:]) for own in tables]), torch.cat([own.y for own in tables]).to(device),
        torch.cat([own.weight for own in tables]).to(device),
    )  # fmt: skip
    places = [(starts[m.part] + m.train, starts[m.part] + m.valid) for m in members]
    trials = [Trial(*at, find_recipe(model.recipe), seed=m.seed) for at, m in zip(places, members, strict=True)]
    results = train_trials(
        partial(_next_network, network, iter([made[m.part] for m in members])), rows, trials,
        Objective("f1", "multiclass", StepChoice("annealed"), average=average),
        argmax_score(metrics.resolve("f1", average=average)), batch_size=size,
    )  # fmt: skip
    found = {}
    for member, result, (_, valid) in zip(members, results, places, strict=True):
        own = network(made[member.part]).to(device)
        own.load_state_dict(result.state)
        found[member.part, member.fold] = (own, _probabilities(own, rows.x[valid.to(device)]))
    return found


def _next_network(network: Callable[[Part], torch.nn.Module], parts: Iterator[Part]) -> torch.nn.Module:
    """Networks are made in the order of the trials."""
    return network(next(parts))


def _probabilities(network: torch.nn.Module, x: torch.Tensor) -> Floats:
    p: Floats = predict_logits(network, x).double().softmax(1).cpu().numpy()
    return p


def average_and_labels(classes: int) -> tuple[Average, list[int] | None]:
    return ("binary", None) if classes == 2 else ("macro", list(range(classes)))
