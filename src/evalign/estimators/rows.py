"""Rows that classifiers train on, divided into folds, and what the folds' models say of the rows they held out."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import issparse
from sklearn.utils.multiclass import type_of_target

from evalign.tables import TableEncoder
from evalign.tables.split import Division, fold_rows

Floats = NDArray[np.float64]
Codes = NDArray[np.int64]


@dataclass(frozen=True)
class HeldOutPredictions:
    """Probabilities of rows by a model that did not train on them: what a decision is learned from.

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
        """Equal rows one by one instead of by weight: certificates count rows."""
        at = np.repeat(np.arange(len(self.labels)), self.weight.astype(np.int64))
        own = {"weight": np.ones(len(at))} | {
            name: values[at] for name, values in vars(self).items() if name != "weight" and values is not None
        }
        return replace(self, **own)


@dataclass(frozen=True)
class TrainingRows:
    """A validated table: its distinct rows, their labels as codes, their weights, and how they are divided.

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
        """Places among the distinct rows, fold after fold."""
        return np.concatenate([division.valid for division in self.divisions])

    def encoder(self, make: Callable[..., TableEncoder], **options: Any) -> Any:
        """An encoder fitted once for all who ask for the same one; it sees no label.

        Folds share it, so it learns from all rows; with one division it learns from the training rows alone.
        """
        key = (make, *sorted(options.items()))
        if key not in self._cache:
            rows = self.rows if len(self.divisions) > 1 else self.rows[self.divisions[0].train]
            self._cache[key] = make(**options).fit(self.X, rows=rows)
        return self._cache[key]

    def encoded(self, make: Callable[..., TableEncoder], **options: Any) -> NDArray[Any]:
        """The distinct rows as that encoder writes them, once for all who ask."""
        key = ("encoded", make, *sorted(options.items()))
        if key not in self._cache:
            self._cache[key] = self.encoder(make, **options).transform(self.X, rows=self.rows)
        found: NDArray[Any] = self._cache[key]
        return found

    def predictions(self, p: Floats) -> HeldOutPredictions:
        """What folds said of the rows they held out, (n, C) fold after fold, with labels and weights."""
        at, labels = self.held_out, self.codes if self.labels is None else self.labels
        fold = np.repeat(np.arange(len(self.divisions)), [len(division.valid) for division in self.divisions])
        weight = np.concatenate([division.valid_weight for division in self.divisions])
        costs = None if self.costs is None else self.costs[at]
        return HeldOutPredictions(p, labels[at], weight, self.rows[at], fold, costs)

    def sample(self, places: Codes, folds: int, fraction: float) -> Self:
        """Some of the distinct rows, divided anew."""
        codes, weight = self.codes[places], self.weight[places]
        labels = None if self.labels is None else self.labels[places]
        costs = None if self.costs is None else self.costs[places]
        divisions = fold_rows(codes, weight, folds, self.seed, fraction=fraction)
        return replace(
            self, rows=self.rows[places], codes=codes, weight=weight, divisions=divisions, labels=labels, costs=costs,
            _cache={},
        )  # fmt: skip

    def of_label(self, k: int) -> Self | None:
        """The binary problem of one label on the same folds; None if a fold would train on one class alone."""
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
            f"y should be a 1d array, or 0/1 of shape (n, L), got other values of shape {shape}; for several classes a "
            "row wrap the classifier in sklearn.multioutput.MultiOutputClassifier"
        )
    return True


def indicator(y: Any) -> Codes:
    """Multilabel y as a dense 0/1 array (n, L)."""
    return np.asarray(y.toarray() if hasattr(y, "toarray") else y).astype(np.int64)


def rarest_label(labels: Codes) -> Codes:
    """The rarest label that each row has, by which folds are stratified; L for rows without any."""
    order = np.argsort(labels.sum(0), kind="stable")
    found: Codes = np.where(labels.any(1), order[labels[:, order].argmax(1)], labels.shape[1]).astype(np.int64)
    return found
