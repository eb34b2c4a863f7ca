"""LightGBM on a confusion-matrix metric: one object is its objective and its early-stopping score.

    objective = MetricObjective("f1", task="binary")
    booster = lightgbm.train(
        {"objective": objective, "metric": "None", "learning_rate": 0.1}, train, 500, valid_sets=[valid],
        feval=objective.evaluate, callbacks=[lightgbm.early_stopping(50)],
    )
    p = objective.probabilities(booster.predict(X, raw_score=True))

and with scikit-learn's interface, where `metric="None"` keeps LightGBM from stopping by log-loss as well:

    LGBMClassifier(objective=MetricObjective("f1", task="binary"), metric="None").fit(
        X, y, eval_set=[(X_valid, y_valid)], eval_metric=objective.evaluate, callbacks=[lightgbm.early_stopping(50)]
    )

LightGBM starts a custom objective from scores of 0; an `init_score` in the data set changes that. For multiclass and
multilabel tasks set `num_class`. Set `feature_pre_filter=False` where classes are rare: else columns whose few
values only a small leaf could use are thrown away before training.
"""

from typing import Any
from weakref import WeakKeyDictionary

import lightgbm
import numpy as np

from evalign.boosting.objective import Array, ScoreObjective
from evalign.boosting.objective import cooling as cooling
from evalign.boosting.rounds import RoundCounter

_labels: "WeakKeyDictionary[lightgbm.Dataset, Array]" = WeakKeyDictionary()


def with_labels(data: lightgbm.Dataset, labels: Any) -> lightgbm.Dataset:
    """Give a data set yes/no labels (n, L) for a multilabel objective: LightGBM's own have one column only.

    The data set's own label may be anything, such as zeros.

    >>> data = lightgbm.Dataset(np.zeros((2, 1)), np.zeros(2))
    >>> with_labels(data, [[0, 1], [1, 1]]) is data
    True
    """
    table = np.asarray(labels)
    if table.ndim != 2:
        raise ValueError(f"labels of a multilabel task must have shape (n, L), got {table.shape}")
    _labels[data] = table
    return data


class MetricObjective(ScoreObjective):
    """`ScoreObjective` as LightGBM calls it: `objective(scores, data)`, or `objective(y, scores, weight)`.

    All options are those of `ScoreObjective`. It counts rounds by itself, so that `temperature=cooling()` works.

    >>> X, y = np.arange(40.0).reshape(-1, 1), np.arange(40) % 20 > 15
    >>> objective = MetricObjective("f1", task="binary")
    >>> small = {"min_data_in_leaf": 2, "min_data_in_bin": 1, "verbose": -1, "num_threads": 1}
    >>> params = {"objective": objective, **small}
    >>> booster = lightgbm.train(params, lightgbm.Dataset(X, y), num_boost_round=20)
    >>> objective.score(booster.predict(X, raw_score=True), y)
    1.0
    """

    def __init__(self, metric: Any = "f1", **options: Any) -> None:
        super().__init__(metric, **options)
        self._rounds = RoundCounter()

    def __call__(self, first: Any, second: Any, sample_weight: Any = None) -> tuple[Array, Array]:
        """First and second derivative."""
        scores, y, weight = self._read(first, second, sample_weight)
        # LightGBM keeps derivatives in float32, and float32 scores take two thirds of the time.
        return self.gradient(scores.astype(np.float32), y, weight, round=self._rounds.next(scores))

    def evaluate(self, first: Any, second: Any, sample_weight: Any = None) -> tuple[str, float, bool]:
        """(name, the metric of hard decisions, True): for `feval` and `eval_metric`, to stop early by."""
        scores, y, weight = self._read(first, second, sample_weight)
        return self.name, self.score(scores, y, weight), True

    def _read(self, first: Any, second: Any, weight: Any) -> tuple[Array, Array, Array | None]:
        if isinstance(second, lightgbm.Dataset):
            labels, weight = _labels.get(second), second.get_weight()
            y = np.asarray(second.get_label() if labels is None else labels)
            return first, y, None if weight is None else np.asarray(weight)
        return second, first, weight
