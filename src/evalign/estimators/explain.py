"""What a fitted classifier does, from its held-out predictions: no refit, and no row judged by a model that saw it."""

from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from sklearn.calibration import calibration_curve
from sklearn.inspection import permutation_importance
from sklearn.metrics import precision_recall_fscore_support

LEAST = 1e-5  # of a probability: trees give 0 to what they have not seen, and one such row would decide alone


def log_loss(p: NDArray[np.float64], labels: NDArray[np.int64], weight: NDArray[np.float64]) -> float:
    """Weighted mean of -log p at the label, with p of at least `LEAST`.

    >>> round(log_loss(np.array([[0.5, 0.5], [0.9, 0.1]]), np.array([0, 0]), np.ones(2)), 3)
    0.399
    """
    return float(weight @ -np.log(np.maximum(p[np.arange(len(labels)), labels], LEAST)) / weight.sum())


class Explaining:
    """Explanations of a classifier that has `held_out_predictions_`, which `fit` leaves and files do not keep."""

    classes_: NDArray[Any]
    decision_: Any
    held_out_predictions_: Any
    class_order: Any
    _mean_probabilities: Any
    _score_codes: Any

    def class_scores(self) -> pd.DataFrame:
        """Precision, recall and F1 of every class on the held-out rows, decided by the learned rule.

        `rows` is the weight of the class. The rule was learned on these rows, so scores are a little too high.
        """
        held_out = self.held_out_predictions_
        predicted = self._decide_held_out(held_out.probabilities)
        values = precision_recall_fscore_support(
            held_out.labels,
            predicted,
            labels=range(len(self.classes_)),
            sample_weight=held_out.weight,
            zero_division=0.0,
        )
        table = pd.DataFrame(dict(zip(("precision", "recall", "f1", "rows"), values, strict=True)))
        return table.set_index(pd.Index(self.classes_[self.class_order], name="class"))

    def _decide_held_out(self, p: NDArray[np.float64], places: Any = slice(None)) -> Any:
        costs = self.held_out_predictions_.costs if self.decision_.kind == "row_costs" else None
        return self.decision_.predict(p, costs=None if costs is None else costs[places])

    def calibration(self, label: Any = None, *, bins: int = 10) -> pd.DataFrame:
        """Mean probability of a class and its share among the held-out rows, in bins of as many rows each.

        `label` is the class; None is the positive one of two. Probabilities are honest where both columns agree.
        """
        classes = self.classes_[self.class_order].tolist()
        if label is None:
            if len(classes) > 2:
                raise ValueError(f"with {len(classes)} classes a label is needed; give one of {classes[:20]}")
            label = classes[1]
        if label not in classes:
            raise ValueError(f"label must be one of {classes[:20]}, got {label!r}")
        held_out, at = self.held_out_predictions_, classes.index(label)
        truth = held_out.labels[:, at] if held_out.labels.ndim == 2 else held_out.labels == at
        share, mean = calibration_curve(
            truth, held_out.probabilities[:, at].clip(0, 1), n_bins=bins, strategy="quantile"
        )
        return pd.DataFrame({"probability": mean, "share": share})

    def importance(self, X: Any, *, repeats: int = 3, rows: int = 2000, random_state: int = 0) -> pd.DataFrame:
        """How much the held-out metric falls when a column is shuffled among the held-out rows of a fold.

        `X` is the table that `fit` was given. Rows are predicted by the model of the fold that held them out. `rows`
        bounds how many are looked at, `repeats` is how often a column is shuffled. The mean and the standard deviation
        are returned, largest mean first.
        """
        held_out, generator = self.held_out_predictions_, np.random.default_rng(random_state)
        if not len(held_out.rows):
            raise ValueError("rows of a stream are not kept; use sklearn.inspection.permutation_importance")
        table = X if isinstance(X, pd.DataFrame) else pd.DataFrame(np.asarray(X))
        if len(table) <= held_out.rows.max():
            raise ValueError(f"X must be the table that fit was given, got {len(table)} rows")
        looked_at = np.sort(generator.permutation(len(held_out.rows))[:rows])
        folds = [looked_at[held_out.fold[looked_at] == fold] for fold in np.unique(held_out.fold)]
        names = list(table.columns)

        def score(column: int | None) -> float:
            predicted = np.zeros_like(held_out.labels)
            for fold, places in enumerate(folds):
                part = table.iloc[held_out.rows[places]]
                if column is not None:
                    shuffled = part.iloc[generator.permutation(len(part)), column].set_axis(part.index)
                    part = part.assign(**{str(names[column]): shuffled}) if isinstance(X, pd.DataFrame) else part.copy()
                    if not isinstance(X, pd.DataFrame):
                        part[names[column]] = shuffled
                given = part if isinstance(X, pd.DataFrame) else part.to_numpy()
                predicted[places] = self._decide_held_out(self._mean_probabilities(given, fold), places)
            at = looked_at
            costs = None if held_out.costs is None else held_out.costs[at]
            return float(self._score_codes(predicted[at], held_out.labels[at], held_out.weight[at], costs))

        whole = score(None)
        drops = np.array([[whole - score(column) for _ in range(repeats)] for column in range(len(names))])
        found = pd.DataFrame({"column": names, "importance": drops.mean(axis=1), "deviation": drops.std(axis=1)})
        return found.sort_values("importance", ascending=False, ignore_index=True)

    def permutation_importances(
        self, X: Any, y: Any, *, repeats: int = 5, random_state: int = 0
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Mean loss of `score` when a column is shuffled, and its standard error, for each column."""
        found = permutation_importance(self, X, y, n_repeats=repeats, random_state=random_state)
        return found.importances_mean, found.importances_std / np.sqrt(repeats)
