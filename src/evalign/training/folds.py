"""Networks trained on folds: every row is held out by one of them, and together they predict.

One division into training and validation rows is a lottery where a class is rare: few rows say which epoch is kept and
how to decide, and training loses as many. With folds every label serves both, and the mean of the networks'
probabilities varies less than one's.
"""

import numbers
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from evalign._objective import Objective
from evalign.networks.ensemble import Together
from evalign.tables.packed import Table
from evalign.tables.split import Division
from evalign.training.batches import Batches, Rows
from evalign.training.evaluation import Score, predict_logits
from evalign.training.history import Epoch
from evalign.training.loop import OnEpoch
from evalign.training.recipes import Recipe
from evalign.training.stacked import Trial, train_trials

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

FOLDS = 5
RARE = 100  # held-out rows of a class: a share of them of one half is known to within 0.05, of fewer to less
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
    """A whole number, or "auto"."""
    if folds != "auto" and (isinstance(folds, bool) or not isinstance(folds, numbers.Integral) or folds < 1):
        raise ValueError(f"folds must be 'auto' or a whole number from 1 on, got {folds!r}")


@dataclass(frozen=True)
class FoldedRows:
    """Rows on a device, and of every fold the places of its training and of its validation rows."""

    rows: Rows
    train: list[Tensor]
    valid: list[Tensor]

    @classmethod
    def of(
        cls, encode: Callable[[Ints], Table], labels: Ints, divisions: Sequence[Division], device: torch.device
    ) -> "FoldedRows":
        """A row with other weights in training and in validation, as heavy ones have, is there once for each.

        `encode` gives the columns of the rows at some places, on the device.
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
            # k folds have k - 1 times as many row numbers as there are rows; short ones take half the room on a CPU.
            short = torch.int32 if device.type == "cpu" and len(rows) < 2**31 else torch.int64
            return torch.from_numpy(places).to(device, short)

        return cls(rows, [numbers(d.train) for d in divisions], [numbers(place[d.valid]) for d in divisions])

    def batch_size(self, size: int) -> int:
        """The least size from `size` on that gives every fold as many batches, which stacked training asks for.

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
    """The networks as one, the history of each, and what each said of the rows it held out, fold after fold."""

    network: Together
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
    on_epoch: OnEpoch | None = None,
    deadline: float | None = None,
) -> TrainedFolds:
    """Train a network for every fold, fold i with the seed `seed` + i, as one stack; each stops by its own fold.

    `on_epoch` receives the epochs of the first network that still trains. Ctrl-C, or a `deadline` in seconds of
    `time.perf_counter`, ends training and keeps the best weights so far. With `refit` the networks are trained once
    more, each on all rows and each stage for as many epochs as were best.
    """

    def run(trials: list[Trial]) -> tuple[Together, list[list[Epoch]]]:
        heard = [0]

        def listen(member: int, epoch: Epoch) -> None:
            if on_epoch is not None and epoch.epoch > heard[0]:  # all began together, so that their epochs are one
                heard[0] = epoch.epoch
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
        return Together(members), [result.history for result in results]

    trials = [
        Trial(train, valid, recipe, seed=seed + i)
        for i, (train, valid) in enumerate(zip(folded.train, folded.valid, strict=True))
    ]
    network, histories = run(trials)
    held_out = [
        predict_logits(member, folded.rows.x, valid).double().softmax(1).cpu().numpy()
        for member, valid in zip(network, folded.valid, strict=True)
    ]
    if refit:
        network, _ = run(
            [
                Trial(torch.cat([trial.train, trial.valid]), trial.valid, recipe.repeated(history), seed=trial.seed)
                for trial, history in zip(trials, histories, strict=True)
            ]
        )
    return TrainedFolds(network, histories, np.concatenate(held_out))
