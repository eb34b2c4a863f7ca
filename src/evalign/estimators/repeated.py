"""Recall the labels of training rows that a new row repeats."""

from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray

from evalign.estimators.explain import LEAST
from evalign.tables.encode import TreeTable
from evalign.tables.split import Floats, TrainingRows

FEWEST_COPIES = 20  # rows that have an equal one, below which there is too little to judge by,
LEAST_SHARE = 0.2  # and share of the table, below which there is little to gain
# Nats a row. The members of a blend have seen copies of most rows that repeat a training row, which predictions of
# held-out rows give them no credit for, so that a small gain may be theirs already.
LEAST_GAIN = 0.2


@dataclass(frozen=True)
class RepeatedRows:
    """Class probabilities (b + c) / (1 + n) of a table's rows: n copies with the class counts c, held-out prediction b.

    It is the predictive distribution of a Dirichlet prior whose mean is b, as heavy as one row.
    """

    encoder: TreeTable
    keys: NDArray[np.uint64]  # hashes of the encoded rows, in ascending order
    probabilities: Floats

    @classmethod
    def learn(cls, data: TrainingRows, p: Floats) -> Self | None:
        """Recall the rows of `data`, whose held-out predictions are p, if that predicts left-out copies clearly better.

        None if not, if weights are not counts of copies, or if rows are divided only once.
        """
        if len(data.divisions) == 1 or (data.weight != np.rint(data.weight)).any():
            return None
        at = data.held_out
        weight = data.weight[at] / np.bincount(at, minlength=len(data.rows))[at]  # a heavy row is held out repeatedly
        found = predictive(hashed_rows(data.encoded(TreeTable)[at]), data.codes[at], weight, p)
        return None if found is None else cls(data.encoder(TreeTable), *found)

    def recalled(self, X: Any, p: Floats) -> Floats:
        """The predictions p of the rows X, with those of rows that repeat one of the table replaced."""
        keys = hashed_rows(self.encoder.transform(X))
        at = np.searchsorted(self.keys, keys).clip(max=len(self.keys) - 1)
        return np.where((self.keys[at] == keys)[:, None], self.probabilities[at], p)

    def content(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Arrays, and the encoder in JSON's types."""
        keys = torch.from_numpy(self.keys.view(np.int64))
        return {"keys": keys, "probabilities": torch.from_numpy(self.probabilities)}, self.encoder.to_json()

    @classmethod
    def from_content(cls, arrays: dict[str, torch.Tensor], encoder: dict[str, Any]) -> Self:
        keys = arrays["keys"].numpy().view(np.uint64)
        return cls(TreeTable.from_json(encoder), keys, arrays["probabilities"].numpy())


def predictive(
    keys: NDArray[np.uint64], labels: NDArray[np.int64], weight: Floats, p: Floats
) -> tuple[NDArray[np.uint64], Floats] | None:
    """Distinct keys and their class probabilities; None unless they predict each copy by the others clearly better.

    `weight` counts copies of rows (n,), and p (n, C) are their held-out predictions.
    """
    distinct, place = np.unique(keys, return_inverse=True)
    prior, counts = np.zeros((len(distinct), p.shape[1])), np.zeros((len(distinct), p.shape[1]))
    np.add.at(prior, place, weight[:, None] * np.maximum(p, LEAST))
    np.add.at(counts, (place, labels), weight)
    prior /= prior.sum(axis=1, keepdims=True)
    copies = counts.sum(axis=1, keepdims=True)
    again = copies[:, 0] > 1.5
    if copies[again].sum() < max(FEWEST_COPIES, LEAST_SHARE * copies.sum()):
        return None
    left_out = (prior + np.maximum(counts - 1, 0)) / copies
    gain = (counts * np.log(left_out / prior))[again].sum() / copies[again].sum()
    return None if gain < LEAST_GAIN else (distinct, (prior + counts) / (1 + copies))


def hashed_rows(x: Floats) -> NDArray[np.uint64]:
    """64-bit hashes of the rows of a matrix; gaps are equal, and so are 0.0 and -0.0.

    >>> first, second, other = hashed_rows(np.array([[0.0, np.nan], [-0.0, np.nan], [1.0, 2.0]]))
    >>> bool(first == second), bool(first == other)
    (True, False)
    """
    hashes = pd.util.hash_pandas_object(pd.DataFrame(x + 0.0), index=False)
    return np.asarray(hashes, dtype=np.uint64)
