"""Long-tailed splits: training classes thinned exponentially, test part unchanged."""

import numpy as np
from numpy.typing import NDArray

from evalign_papers.datasets.dataset import Dataset
from evalign_papers.datasets.splits import Split

FIFTH = 0.2
Ints = NDArray[np.int64]


def tail_counts(largest: int, classes: int, imbalance: float) -> list[int]:
    """n_k = largest x imbalance^(-k / (C - 1)), the usual long tail (Cui et al. 2019), at least one row per class.

    >>> tail_counts(5000, 10, 100)
    [5000, 2997, 1796, 1077, 645, 387, 232, 139, 83, 50]
    """
    if classes < 2 or imbalance < 1:
        raise ValueError(f"a long tail needs two classes and an imbalance of 1 at least, got {classes} and {imbalance}")
    return [max(1, int(largest * imbalance ** (-k / (classes - 1)) + 1e-9)) for k in range(classes)]


def tail_split(dataset: Dataset, imbalance: int, seed: int, trial: int) -> Split:
    """Train and validation rows (4 : 1, class by class) of the thinned part, and the source's own test part.

    The rows kept are drawn for each trial and depend only on seed and trial.
    """
    if dataset.official_test is None:
        raise ValueError(f"a long tail needs a fixed test part, {dataset.name} has none; use cifar10")
    random = np.random.default_rng([seed, trial])
    rest = np.flatnonzero(~dataset.official_test)
    by_class = [rest[dataset.y[rest] == k] for k in range(len(dataset.classes))]
    wanted = tail_counts(min(map(len, by_class)), len(by_class), imbalance)
    train, valid = [], []
    for rows, count in zip(by_class, wanted, strict=True):
        drawn = random.permutation(rows)[:count]
        held = max(1, round(FIFTH * count))
        if count < 2:
            raise ValueError(
                f"every class of a long tail needs two rows, one to hold out; lower the imbalance {imbalance}"
            )
        valid.append(drawn[:held])
        train.append(drawn[held:])
    first, second = (np.sort(np.concatenate(part)).astype(np.int64) for part in (train, valid))
    return Split(first, second, np.flatnonzero(dataset.official_test).astype(np.int64))
