"""Train, validation and test rows: 64/16/20, a fresh split for every trial.

honest: every part has the classes in the shares of the whole, and rows of one group (CocktailParty's frames) stay
together. paper: as the authors' code does it, a random fifth for testing, a random fifth of the rest for validation,
neither stratified nor by group; where the source's own test part was the papers' (`card.paper_test`), that one.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from evalign.checks import check_choice, check_number
from evalign_papers.datasets.dataset import PROTOCOLS, DataError, Dataset, Protocol

FIFTH = 0.2
SMALLEST_CLASS = 5  # rows of a class that suffice for one in each part
SMALLEST_STRATUM = 10  # groups that are stratified together
Rows = NDArray[np.int64]


class Split(NamedTuple):
    train: Rows
    valid: Rows
    test: Rows


def splits(dataset: Dataset, trials: int = 10, seed: int = 0, protocol: Protocol | None = None) -> Iterator[Split]:
    """One split for each trial, rows ascending; trial t depends only on `seed` and t, not on their number.

    `protocol` is the data set's unless given.

    >>> from evalign_papers.datasets import load
    >>> [len(part) for split in splits(load("synthetic_5"), trials=1) for part in split]
    [3360, 840, 1050]
    """
    protocol = dataset.protocol if protocol is None else protocol
    check_choice("protocol", protocol, PROTOCOLS)
    check_number("trials", trials, low=0)
    if protocol == "honest":
        _check_classes(dataset)
    for trial in range(trials):
        split = _honest(dataset, seed, trial) if protocol == "honest" else _paper(dataset, seed, trial)
        check_split(dataset, split, protocol)
        yield split


def _honest(dataset: Dataset, seed: int, trial: int) -> Split:
    """Split units: rows, or groups if there are any."""
    strata, members = _units(dataset)
    first, second = _seeds(seed, trial)
    rest, test = _parted(np.arange(len(strata)), strata, first)
    train, valid = _parted(rest, strata, second)
    return Split(*(_rows(part, members) for part in (train, valid, test)))


def _paper(dataset: Dataset, seed: int, trial: int) -> Split:
    first, second = _seeds(seed, trial)
    everything = np.arange(len(dataset))
    if dataset.card.paper_test == "official" and dataset.official_test is not None:
        rest, test = everything[~dataset.official_test], everything[dataset.official_test]
    else:
        rest, test = _parted(everything, None, first)
    train, valid = _parted(rest, None, second)
    return Split(np.sort(train), np.sort(valid), np.sort(test))


def _seeds(seed: int, trial: int) -> tuple[int, int]:
    first, second = np.random.SeedSequence([seed, trial]).generate_state(2)
    return int(first), int(second)


def _parted(units: Rows, strata: NDArray[Any] | None, seed: int) -> tuple[Rows, Rows]:
    from sklearn.model_selection import train_test_split

    by = None if strata is None else strata[units]
    larger, fifth = train_test_split(units, test_size=FIFTH, stratify=by, random_state=seed)
    return larger, fifth


def _units(dataset: Dataset) -> tuple[NDArray[np.int64], NDArray[np.int64] | None]:
    """The stratum of every unit, and the unit of every row (None if rows are units)."""
    if dataset.groups is None:
        return (dataset.y if dataset.y.ndim == 1 else _binned(dataset.y.mean(axis=1))), None
    _, members = np.unique(dataset.groups, return_inverse=True)
    return _binned(np.bincount(members, dataset.y) / np.bincount(members)), members


def _rows(units: Rows, members: NDArray[np.int64] | None) -> Rows:
    return np.sort(units) if members is None else np.flatnonzero(np.isin(members, units))


def _binned(share: NDArray[np.float64]) -> NDArray[np.int64]:
    """Bin groups by their share of positives, so that each part gets some of every kind."""
    values, which, counts = np.unique(share, return_inverse=True, return_counts=True)
    stratum = np.zeros(len(values), dtype=np.int64)
    inside = 0
    for i, count in enumerate(counts):
        if i and inside >= SMALLEST_STRATUM and counts[i:].sum() >= SMALLEST_STRATUM:
            stratum[i:] += 1
            inside = 0
        inside += int(count)
    return stratum[which]


def _check_classes(dataset: Dataset) -> None:
    name, count = min(dataset.counts.items(), key=lambda item: item[1])
    if count < SMALLEST_CLASS:
        raise DataError(
            f"every class must have {SMALLEST_CLASS} rows to be split in three, {name!r} of {dataset.name} has {count}"
            "; merge or drop the class"
        )


def check_split(dataset: Dataset, split: Split, protocol: Protocol) -> None:
    """Assert that parts are disjoint and complete, have the right sizes and class shares, and keep groups together."""
    n = len(dataset)
    if not np.array_equal(np.sort(np.concatenate(split)), np.arange(n)):
        raise AssertionError(f"the parts of {dataset.name} must have every row once")
    official = protocol == "paper" and dataset.card.paper_test == "official" and dataset.official_test is not None
    test = float(dataset.official_test.mean()) if official and dataset.official_test is not None else FIFTH
    groups = dataset.groups if protocol == "honest" else None
    # Groups stay whole: if they differ in size, so do the parts.
    slack = 2.0 / n if groups is None else 0.02 + 2.0 * float(np.unique(groups, return_counts=True)[1].max()) / n
    for part, share in zip(split, ((1 - test) * (1 - FIFTH), (1 - test) * FIFTH, test), strict=True):
        if abs(len(part) / n - share) > slack:
            raise AssertionError(f"a part of {dataset.name} must have {share:.0%} of {n} rows, it has {len(part)}")
    if groups is not None and sum(len(np.unique(groups[part])) for part in split) != len(np.unique(groups)):
        raise AssertionError(f"a group of {dataset.name} is in two parts")
    if protocol == "honest":
        whole = np.bincount(dataset.y.ravel()) / dataset.y.size
        for part in split:
            shares = np.bincount(dataset.y[part].ravel(), minlength=len(whole)) / dataset.y[part].size
            if np.abs(shares - whole).max() > _share_slack(dataset, part):
                raise AssertionError(f"a part of {dataset.name} must have the shares {whole}, it has {shares}")


def _share_slack(dataset: Dataset, part: Rows) -> float:
    """Tolerance of class shares: two rows, or the sampling error of whole groups."""
    if dataset.groups is None and dataset.y.ndim == 1:
        return 2.0 / len(part)
    _, members = _units(dataset)
    if members is None:
        share, units = dataset.y.mean(axis=1), len(part)
    else:
        share = np.bincount(members, dataset.y) / np.bincount(members)
        units = len(np.unique(members[part]))
    return 0.02 + 3.0 * float(share.std()) / float(np.sqrt(units))
