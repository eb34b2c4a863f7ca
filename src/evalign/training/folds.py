"""Networks cross-fitted on folds: every row is held out by one of them, and their mean predicts.

With a single division few rows of a rare class choose the epoch and the decision, and training loses as many. With
folds every label serves both purposes, and the mean of several networks varies less than one of them.
"""

import numbers
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from evalign._objective import Objective
from evalign.networks.mlp import MeanOfNetworks
from evalign.tables.packed import Table
from evalign.tables.split import Division
from evalign.training.batches import Batches, Rows
from evalign.training.evaluation import Score, predict_logits
from evalign.training.loop import Epoch, OnEpoch
from evalign.training.recipes import Recipe
from evalign.training.stacked import Trial, train_trials

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

FOLDS = 5
RARE = 100  # held-out rows of a class: the standard error of a share of one half is 0.05
MANY = 300_000  # rows; beyond about 200,000 a recipe's number of updates grows with the table


def automatic_folds(labels: Ints, fraction: float) -> int:
    """5 where a division that holds out `fraction` leaves the rarest class fewer than `RARE` validation rows, else 1.

    Tables of more than `MANY` rows get 1 in any case, since five trainings of them take hours on a CPU.

    >>> automatic_folds(np.repeat([0, 1], [9000, 400]), 0.2), automatic_folds(np.repeat([0, 1], [9000, 600]), 0.2)
    (5, 1)
    """
    counts = np.bincount(labels)
    rarest = int(counts[counts > 0].min())
    return FOLDS if fraction * rarest < RARE and len(labels) <= MANY else 1


def check_folds(folds: int | str) -> None:
    """Raise ValueError unless `folds` is a whole number or "auto"."""
    if folds != "auto" and (isinstance(folds, bool) or not isinstance(folds, numbers.Integral) or folds < 1):
        raise ValueError(f"folds must be 'auto' or a whole number from 1 on, got {folds!r}")


@dataclass(frozen=True)
class FoldedRows:
    """Rows on a device, and the positions of every fold's training and validation rows.

    All folds share one encoded table. Its encoder has seen the features of every row, held-out ones included, and no
    label: quantiles and categories of n rows instead of n (k - 1) / k carry nothing about the label of a held-out row,
    and k encoded tables would cost k times the time and memory.
    """

    rows: Rows
    train: list[Tensor]
    valid: list[Tensor]

    @classmethod
    def of(
        cls, encode: Callable[[Ints], Table], labels: Ints, divisions: Sequence[Division], device: torch.device
    ) -> "FoldedRows":
        """Encode the rows; `encode` maps positions to columns on the device.

        A row whose weights in training and validation differ, as those of heavy rows do, is there once for each.
        """
        trained, held_out = np.zeros(len(labels)), np.zeros(len(labels))
        for division in divisions:
            trained[division.train] = division.train_weight
            held_out[division.valid] = division.valid_weight
        both = np.flatnonzero((trained != held_out) & (trained > 0) & (held_out > 0))
        place = np.arange(len(labels))
        place[both] = len(labels) + np.arange(len(both))
        source = np.concatenate([np.arange(len(labels)), both])
        weight = np.concatenate([np.where(trained > 0, trained, held_out), held_out[both]])
        rows = Rows(
            encode(source), torch.from_numpy(labels[source] if len(both) else labels).to(device),
            torch.from_numpy(weight.astype(np.float32)).to(device),
        )  # fmt: skip

        def numbers(places: Ints) -> Tensor:
            # k folds hold k - 1 row numbers for every row; 32-bit ones halve that memory on a CPU.
            short = torch.int32 if device.type == "cpu" and len(rows) < 2**31 else torch.int64
            return torch.from_numpy(places).to(device, short)

        return cls(rows, [numbers(d.train) for d in divisions], [numbers(place[d.valid]) for d in divisions])

    def batch_size(self, size: int) -> int:
        """The smallest batch size from `size` on with equally many batches in every fold, as stacking requires.

        >>> labels = np.zeros(3, dtype=np.int64)
        >>> halves = [Division(np.arange(n), np.ones(n), np.arange(n, 3), np.ones(3 - n)) for n in (1, 2)]
        >>> columns = torch.zeros(3, 1)
        >>> FoldedRows.of(columns.__getitem__, labels, halves, torch.device("cpu")).batch_size(1)
        2
        """
        while len({Batches(len(train), size, seed=0).count for train in self.train}) > 1:
            size += 1
        return size


@dataclass(frozen=True)
class TrainedFolds:
    """The mean of the networks, the history of each, and probabilities of the held-out rows, fold after fold."""

    network: MeanOfNetworks
    histories: list[list[Epoch]]
    held_out: Floats


def train_folds(
    make_network: Callable[[], nn.Module],
    folded: FoldedRows,
    recipe: Recipe,
    objective: Objective,
    score: Score,
    *,
    batch_size: int,
    seed: int,
    stratified: bool = False,
    refit: bool = False,
    repeats: int = 1,
    on_epoch: OnEpoch | None = None,
    deadline: float | None = None,
) -> TrainedFolds:
    """Train a network for every fold, fold i with the seed `seed` + i, as one stack; each stops by its own fold.

    With `repeats` every fold has so many networks, which differ by their seeds; a held-out row gets the mean of their
    probabilities.

    `on_epoch` receives the epochs of the first network that still trains. Ctrl-C, or a `deadline` in seconds of
    `time.perf_counter`, ends training and keeps the best weights so far. With `refit` the networks are trained once
    more, each on all rows and each stage for as many epochs as were best.
    """

    def run(trials: list[Trial]) -> tuple[MeanOfNetworks, list[list[Epoch]]]:
        shown = [0]

        def listen(member: int, epoch: Epoch) -> None:
            if on_epoch is not None and epoch.epoch > shown[0]:  # all began together, so that their epochs agree
                shown[0] = epoch.epoch
                on_epoch(epoch)

        results = train_trials(
            make_network, folded.rows, trials, objective, score, batch_size=batch_size, stratified=stratified,
            on_epoch=listen, catch_interrupt=True, may_diverge=False, deadline=deadline,
        )  # fmt: skip
        with torch.random.fork_rng([]):  # the caller's random numbers are left as they were
            members = [make_network() for _ in results]
        for member, result in zip(members, results, strict=True):
            member.load_state_dict(result.state)
            member.to(folded.rows.x.device)
        return MeanOfNetworks(members), [result.history for result in results]

    trials = [
        Trial(train, valid, recipe, seed=seed + i)
        for i, (train, valid) in enumerate(repeats * list(zip(folded.train, folded.valid, strict=True)))
    ]
    network, histories = run(trials)
    found = [
        predict_logits(member, folded.rows.x, trial.valid).double().softmax(1).cpu().numpy()
        for member, trial in zip(network, trials, strict=True)
    ]
    held_out = [np.mean(found[i :: len(folded.valid)], axis=0) for i in range(len(folded.valid))]
    if refit:
        network, _ = run(
            [
                Trial(torch.cat([trial.train, trial.valid]), trial.valid, recipe.repeated(history), seed=trial.seed)
                for trial, history in zip(trials, histories, strict=True)
            ]
        )
    return TrainedFolds(network, histories, np.concatenate(held_out))
