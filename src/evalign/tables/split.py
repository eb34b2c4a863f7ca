"""Training rows: deduplicated, divided into folds and encoded once; and their held-out predictions.

Equal rows with equal labels are merged first. A weight of 3 then equals three copies, and a weight of 0 equals
no row, to the last bit, whatever the order of the rows; and no copy of a training row can leak into validation.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Self

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.sparse import issparse
from sklearn.utils import assert_all_finite
from sklearn.utils.multiclass import type_of_target

from evalign.tables.columns import column_kind

Floats = NDArray[np.float64]
Codes = NDArray[np.int64]


def distinct_rows(X: Any, labels: Codes, weight: Floats) -> tuple[Codes, Floats]:
    """Positions of the distinct (row, label) pairs with a positive weight, and their summed weights.

    Pairs are ordered by label, then by a 64-bit hash of the row: an order that depends only on the content.

    >>> rows, weight = distinct_rows(np.array([[1.0], [2.0], [1.0]]), np.array([0, 0, 0]), np.ones(3))
    >>> sorted(weight.tolist())
    [1.0, 2.0]
    """
    frame = X if isinstance(X, pd.DataFrame) else pd.DataFrame(np.asarray(X))
    try:
        hashes = pd.util.hash_pandas_object(frame, index=False).to_numpy()
    except TypeError:  # lists, sets and mappings have no hash
        for position, name in enumerate(frame.columns):
            column_kind(frame.iloc[:, position], name if isinstance(name, str) else position)  # names the column
        raise
    order = np.lexsort((hashes, labels))
    order = order[weight[order] > 0]
    same = (np.diff(hashes[order].view(np.int64)) == 0) & (np.diff(labels[order]) == 0)
    if not len(order):
        return order, weight[order]
    starts = np.flatnonzero(np.r_[True, ~same])
    return order[starts], np.add.reduceat(weight[order], starts)


def scaled_weights(weight: Floats, total: float) -> Floats:
    """Weights unchanged if all are whole numbers, which count copies; else scaled to the sum `total`.

    Penalties and leaf sizes are measured in rows, so a model would otherwise depend on the unit of the weights.

    >>> scaled_weights(np.array([2.0, 4.0]), 2.0), scaled_weights(np.array([0.002, 0.004]), 3.0)
    (array([2., 4.]), array([1., 2.]))
    """
    whole = (weight == np.rint(weight)).all() or not weight.any()
    return weight if whole else weight * (total / weight.sum())


def split_rows(labels: Codes, fraction: float, seed: int) -> tuple[Codes, Codes]:
    """Positions of rows to keep and to hold out, stratified; every class keeps at least one row.

    >>> kept, held_out = split_rows(np.array([0] * 10 + [1] * 5 + [2]), 0.2, seed=0)
    >>> len(kept), len(held_out), 15 in kept
    (13, 3, True)
    """
    shuffled = np.random.default_rng(seed).permutation(len(labels))
    by_class = shuffled[np.argsort(labels[shuffled], kind="stable")]
    counts = np.bincount(labels)
    take = np.minimum(np.maximum(np.round(fraction * counts), counts >= 4), np.maximum(counts - 1, 0)).astype(np.int64)
    rank = np.concatenate([np.arange(c) for c in counts])
    held_out = rank < np.repeat(take, counts)
    return np.sort(by_class[~held_out]), np.sort(by_class[held_out])


class Division(NamedTuple):
    """Positions and weights of training and validation rows."""

    train: Codes
    train_weight: Floats
    valid: Codes
    valid_weight: Floats


HEAVY = 20  # times the mean weight of its class


def divide_rows(labels: Codes, weight: Floats, fraction: float, seed: int) -> Division:
    """Training and validation rows of a weighted table.

    A row with more than `HEAVY` times the mean weight of its class goes to both sides, with its weight divided: a third
    of Mammography is copies of one row, and a side without it would not represent the data. If no row can be spared for
    validation, the training rows serve as both.

    >>> division = divide_rows(np.zeros(41, dtype=int), np.array([100.0] + [1.0] * 40), 0.2, seed=0)
    >>> len(division.train), len(division.valid), float(division.train_weight[0]), float(division.valid_weight[0])
    (33, 9, 80.0, 20.0)
    """
    train, valid = split_rows(labels, fraction, seed)
    if not len(valid):
        return Division(train, weight[train], train, weight[train])
    heavy = weight > HEAVY * (np.bincount(labels, weight) / np.maximum(np.bincount(labels), 1))[labels]
    train, valid = np.union1d(train, np.flatnonzero(heavy)), np.union1d(valid, np.flatnonzero(heavy))
    return Division(
        train, np.where(heavy, 1 - fraction, 1.0)[train] * weight[train],
        valid, np.where(heavy, fraction, 1.0)[valid] * weight[valid],
    )  # fmt: skip


def fold_rows(labels: Codes, weight: Floats, folds: int, seed: int, *, fraction: float = 0.2) -> Sequence[Division]:
    """Training and validation rows of each fold; one fold is `divide_rows` with `fraction` held out.

    Folds are stratified by class. A class of one row is never held out, and a row of more than `HEAVY` times the mean
    weight of its class goes to both sides of every fold, with its weight divided, as in `divide_rows`.

    >>> made = fold_rows(np.array([0] * 6 + [1] * 3 + [2]), np.ones(10), 3, seed=0)
    >>> [len(fold.valid) for fold in made], sorted(np.concatenate([fold.valid for fold in made]).tolist())
    ([3, 3, 3], [0, 1, 2, 3, 4, 5, 6, 7, 8])
    """
    if folds == 1:
        return [divide_rows(labels, weight, fraction, seed)]
    counts = np.bincount(labels)
    shuffled = np.random.default_rng(seed).permutation(len(labels))
    by_class = shuffled[np.argsort(labels[shuffled], kind="stable")]
    fold = np.empty(len(labels), dtype=np.int32)
    fold[by_class] = np.arange(len(labels)) % folds  # continued from class to class, so that folds have equal sizes
    fold[counts[labels] == 1] = -1
    mean = np.bincount(labels, weight) / np.maximum(counts, 1)
    heavy = (weight > HEAVY * mean[labels]) & (fold >= 0)
    made = Folds(fold, heavy, weight, 1 / folds)
    return made if len(made) else [divide_rows(labels, weight, fraction, seed)]


class Folds(Sequence[Division]):
    """The divisions that hold out one fold each, computed on access.

    Storing k lists of rows and weights would take 16 k bytes per row; the number of a row's fold takes 4.
    """

    def __init__(self, fold: NDArray[np.int32], heavy: NDArray[np.bool_], weight: Floats, share: float) -> None:
        """`fold` is -1 for rows never held out; `share` is the part of a heavy row's weight that is held out."""
        self.fold, self.heavy, self.weight, self.share = fold, heavy, weight, share
        self.numbers = np.unique(fold[fold >= 0]).tolist()

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: Any) -> Any:
        held_out = self.fold == self.numbers[index]
        train, valid = np.flatnonzero(~held_out | self.heavy), np.flatnonzero(held_out | self.heavy)
        return Division(
            train, np.where(self.heavy[train], 1 - self.share, 1.0) * self.weight[train],
            valid, np.where(self.heavy[valid], self.share, 1.0) * self.weight[valid],
        )  # fmt: skip


@dataclass(frozen=True)
class HeldOutPredictions:
    """Probabilities of rows that the model was not trained on; decision rules are learned from them.

    `probabilities` (n, C) and `labels` (n,) number the classes as decision rules do (see `class_order`); multilabel
    ones are both (n, L). `rows` are positions in the table given to `fit`, equal rows by their first; `fold` says which
    fold held a row out; `costs` (n, C, C) are the rows' own, if columns hold them.
    """

    probabilities: Floats
    labels: Codes
    weight: Floats
    rows: Codes = field(default_factory=lambda: np.zeros(0, dtype=np.int64))  # empty for rows of a stream
    fold: Codes = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    costs: Floats | None = None

    def counted(self) -> Self:
        """Repeat equal rows instead of weighting them: certificates count rows."""
        at = np.repeat(np.arange(len(self.labels)), self.weight.astype(np.int64))
        own = {"weight": np.ones(len(at))} | {
            name: values[at] for name, values in vars(self).items() if name != "weight" and values is not None
        }
        return replace(self, **own)


@dataclass(frozen=True)
class TrainingRows:
    """A validated table: its distinct rows, their labels as codes, their weights, and their division.

    Members of a blend share one of these, so that rows are hashed and columns are encoded once for all.
    """

    X: Any
    rows: Codes
    codes: Codes
    weight: Floats
    divisions: Sequence[Division]
    seed: int
    fitted: dict[str, Any]  # classes_, n_features_in_, feature_names_in_
    labels: Codes | None = None  # 0/1 (n, L), if multilabel; codes then stratify the folds
    costs: Floats | None = None  # (n, C, C), if columns hold them
    _cache: dict[Any, Any] = field(default_factory=dict)

    @property
    def classes(self) -> int:
        return len(self.fitted["classes_"])

    @property
    def held_out(self) -> Codes:
        """Positions among the distinct rows, fold after fold."""
        return np.concatenate([division.valid for division in self.divisions])

    def encoder(self, make: Callable[..., Any], **options: Any) -> Any:
        """An encoder with these options, fitted once and cached; it does not see labels.

        Folds share it, so it learns from all rows; with a single division it learns from the training rows only.
        """
        key = (make, *sorted(options.items()))
        if key not in self._cache:
            rows = self.rows if len(self.divisions) > 1 else self.rows[self.divisions[0].train]
            self._cache[key] = make(**options).fit(self.X, rows=rows)
        return self._cache[key]

    def encoded(self, make: Callable[..., Any], **options: Any) -> NDArray[Any]:
        """The distinct rows encoded by that encoder, cached."""
        key = ("encoded", make, *sorted(options.items()))
        if key not in self._cache:
            self._cache[key] = self.encoder(make, **options).transform(self.X, rows=self.rows)
        found: NDArray[Any] = self._cache[key]
        return found

    def predictions(self, p: Floats) -> HeldOutPredictions:
        """Held-out predictions from probabilities (n, C) of all folds in order, with labels and weights."""
        at, labels = self.held_out, self.codes if self.labels is None else self.labels
        fold = np.repeat(np.arange(len(self.divisions)), [len(division.valid) for division in self.divisions])
        weight = np.concatenate([division.valid_weight for division in self.divisions])
        costs = None if self.costs is None else self.costs[at]
        return HeldOutPredictions(p, labels[at], weight, self.rows[at], fold, costs)

    def sample(self, places: Codes, folds: int, fraction: float) -> Self:
        """Some of the distinct rows, with a new division."""
        codes, weight = self.codes[places], self.weight[places]
        labels = None if self.labels is None else self.labels[places]
        costs = None if self.costs is None else self.costs[places]
        divisions = fold_rows(codes, weight, folds, self.seed, fraction=fraction)
        return replace(
            self, rows=self.rows[places], codes=codes, weight=weight, divisions=divisions, labels=labels, costs=costs,
            _cache={},
        )  # fmt: skip

    def of_label(self, k: int) -> Self | None:
        """The binary problem of one label on the same folds; None if a fold would train on a single class."""
        assert self.labels is not None
        codes = self.labels[:, k]
        if not all(0 < codes[d.train].sum() < len(d.train) for d in self.divisions):
            return None
        fitted = self.fitted | {"classes_": np.arange(2), "multilabel_": False}
        return replace(self, codes=codes, labels=None, fitted=fitted)


def is_multilabel(y: Any) -> bool:
    """Whether y is 0/1 of shape (n, L) with two labels or more."""
    y = y if issparse(y) else np.asarray(y)
    if len(shape := y.shape) != 2 or shape[1] < 2:
        return False
    if type_of_target(y) != "multilabel-indicator":
        raise ValueError(
            f"y should be a 1d array, or 0/1 of shape (n, L), got other values of shape {shape}; for multiclass "
            "outputs wrap the classifier in sklearn.multioutput.MultiOutputClassifier"
        )
    return True


def check_no_gaps(y: Any) -> None:
    """Refuse labels that are missing or infinite."""
    values = np.asarray(y)
    if values.dtype.kind == "f":
        assert_all_finite(values, input_name="y")
    if values.dtype == object and values.ndim and (missing := int(pd.isna(values).sum())):
        raise ValueError(f"y must hold a label in every row, but {missing} rows have none; drop them")


def indicator(y: Any) -> Codes:
    """Multilabel y as a dense 0/1 array (n, L)."""
    return np.asarray(y.toarray() if hasattr(y, "toarray") else y).astype(np.int64)


def rarest_label(labels: Codes) -> Codes:
    """The rarest label of each row, for stratifying folds; L for rows without labels."""
    order = np.argsort(labels.sum(0), kind="stable")
    found: Codes = np.where(labels.any(1), order[labels[:, order].argmax(1)], labels.shape[1]).astype(np.int64)
    return found
