"""Explain a fitted classifier by its held-out predictions: no refit, and no row scored by a model that saw it."""

from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from sklearn.calibration import calibration_curve
from sklearn.metrics import precision_recall_fscore_support
from sklearn.utils import _safe_indexing
from sklearn.utils.validation import check_is_fitted

EXPLAINED = 500  # held-out rows kept for feature importances
LEAST = 1e-5  # floor of a probability: a tree may give 0, and a single such row would dominate the mean


def log_loss(p: NDArray[np.float64], labels: NDArray[np.int64], weight: NDArray[np.float64]) -> float:
    """Weighted mean of -log p at the label, with p of at least `LEAST`.

    >>> round(log_loss(np.array([[0.5, 0.5], [0.9, 0.1]]), np.array([0, 0]), np.ones(2)), 3)
    0.399
    """
    return float(weight @ -np.log(np.maximum(p[np.arange(len(labels)), labels], LEAST)) / weight.sum())


class Explaining:
    """Explanations of a classifier by its `held_out_predictions_`, which `fit` sets and saved models lack."""

    classes_: NDArray[Any]
    decision_: Any
    held_out_predictions_: Any
    class_order: Any
    _mean_probabilities: Any
    _score_codes: Any
    _explained_rows: tuple[NDArray[np.int64], Any]  # positions among the held-out rows, and their features
    _importances: tuple[Any, NDArray[np.float64]]

    def class_scores(self) -> pd.DataFrame:
        """Precision, recall and F1 of every class on the held-out rows, decided by the learned rule.

        `rows` is the weight of the class. The rule was learned on these rows, so scores are slightly too high.
        """
        held_out = self._held_out()
        predicted = self._decide_held_out(held_out.probabilities)
        options: Any = {"labels": range(len(self.classes_)), "sample_weight": held_out.weight, "zero_division": 0.0}
        values = precision_recall_fscore_support(held_out.labels, predicted, **options)
        table = pd.DataFrame(dict(zip(("precision", "recall", "f1", "rows"), values, strict=True)))
        return table.set_index(pd.Index(self.classes_[self.class_order], name="class"))

    def _held_out(self) -> Any:
        check_is_fitted(self, "decision_")
        if not hasattr(self, "held_out_predictions_"):
            raise AttributeError("held-out predictions are available only after fit; a saved model does not keep them")
        return self.held_out_predictions_

    def _decide_held_out(self, p: NDArray[np.float64], places: Any = slice(None)) -> Any:
        costs = self.held_out_predictions_.costs if self.decision_.kind == "row_costs" else None
        return self.decision_.predict(p, costs=None if costs is None else costs[places])

    def calibration(self, label: Any = None, *, bins: int = 10) -> pd.DataFrame:
        """Mean probability of a class and its share among the held-out rows, in bins of equally many rows.

        `label` is the class; None means the positive one of two. Probabilities are calibrated where both columns agree.
        """
        held_out, classes = self._held_out(), self.classes_[self.class_order].tolist()
        if label is None:
            if len(classes) > 2:
                raise ValueError(f"with {len(classes)} classes a label is required; give one of {classes[:20]}")
            label = classes[1]
        if label not in classes:
            raise ValueError(f"label must be one of {classes[:20]}, got {label!r}")
        at = classes.index(label)
        truth = held_out.labels[:, at] if held_out.labels.ndim == 2 else held_out.labels == at
        p = held_out.probabilities[:, at].clip(0, 1)
        share, mean = calibration_curve(truth, p, n_bins=bins, strategy="quantile")
        return pd.DataFrame({"probability": mean, "share": share})

    def importance(self, X: Any = None, *, repeats: int = 3, rows: int = 2000, random_state: int = 0) -> pd.DataFrame:
        """Permutation importance: drop of the metric when a column is shuffled among the held-out rows of a fold.

        `X` is the table passed to `fit`; None uses the sample of it that was kept. Rows are predicted by the model of
        the fold that held them out. `rows` is the maximum number of rows, `repeats` the number of shuffles per
        column. Returns the mean and the standard deviation, largest mean first.
        """
        held_out, generator = self._held_out(), np.random.default_rng(random_state)
        if X is None:
            looked_at, sample = self._explained_rows
        else:
            if not len(held_out.rows):
                raise ValueError(
                    "a model fitted on a stream keeps no rows; use sklearn.inspection.permutation_importance"
                )
            if len(X) <= held_out.rows.max():
                raise ValueError(f"X must be the table passed to fit, got {len(X)} rows")
            looked_at = np.sort(generator.permutation(len(held_out.rows))[:rows])
            sample = _safe_indexing(X, held_out.rows[looked_at])
        table = sample if isinstance(sample, pd.DataFrame) else pd.DataFrame(np.asarray(sample))
        folds = [(fold, np.flatnonzero(held_out.fold[looked_at] == fold)) for fold in np.unique(held_out.fold)]
        truth, weight = held_out.labels[looked_at], held_out.weight[looked_at]
        costs = None if held_out.costs is None else held_out.costs[looked_at]

        def score(column: int | None) -> float:
            predicted = np.zeros_like(truth)
            for fold, places in folds:
                part = table.iloc[places]
                if column is not None:
                    part = part.copy()
                    shuffled = part.iloc[generator.permutation(len(part)), column].set_axis(part.index)
                    part.isetitem(column, shuffled.array)
                given = part if isinstance(sample, pd.DataFrame) else part.to_numpy()
                predicted[places] = self._decide_held_out(self._mean_probabilities(given, fold), looked_at[places])
            return float(self._score_codes(predicted, truth, weight, costs))

        whole = score(None)
        drops = np.array([[whole - score(column) for _ in range(repeats)] for column in range(table.shape[1])])
        values = {"importance": drops.mean(axis=1), "deviation": drops.std(axis=1)}
        found = pd.DataFrame({"column": list(table.columns), **values})
        return found.sort_values("importance", ascending=False, ignore_index=True)

    @property
    def feature_importances_(self) -> NDArray[np.float64]:
        """`importance` of each column in the order of the table, on up to 500 held-out rows; only after `fit`."""
        if not hasattr(self, "_explained_rows"):
            raise AttributeError(
                "feature_importances_ is available only after fit; a saved model keeps no held-out rows"
            )
        if not hasattr(self, "_importances") or self._importances[0] is not self._explained_rows:
            columns = list(pd.DataFrame(self._explained_rows[1]).columns)
            values = self.importance().set_index("column").importance[columns].to_numpy()
            self._importances = self._explained_rows, values
        found: NDArray[np.float64] = self._importances[1]
        return found
