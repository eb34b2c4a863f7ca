"""XGBoost on a confusion-matrix metric: one object is its objective and its early-stopping score.

    objective = MetricObjective("f1", task="binary")
    booster = xgboost.train(
        {"base_score": 0.0, "disable_default_eval_metric": True}, train, 500, obj=objective, evals=[(valid, "valid")],
        custom_metric=objective.evaluate, early_stopping_rounds=50, maximize=True,
    )
    p = objective.probabilities(booster.predict(test, output_margin=True))

and with scikit-learn's interface, where early stopping must be told that more is better:

    stop = xgboost.callback.EarlyStopping(rounds=50, maximize=True, save_best=True)
    XGBClassifier(objective=objective, eval_metric=objective.evaluation, base_score=0.5, callbacks=[stop])

`XGBClassifier` takes `base_score` for a probability, so that 1/2 is a score of 0 there. For multiclass tasks
set `num_class` (`XGBClassifier` does so by itself); a multilabel task needs labels (n, L), which a `DMatrix` may have.
"""

from collections.abc import Callable
from typing import Any

import xgboost

from evalign.boosting.objective import Array, ScoreObjective
from evalign.boosting.objective import cooling as cooling
from evalign.boosting.rounds import RoundCounter


class MetricObjective(ScoreObjective):
    """`ScoreObjective` as XGBoost calls it: `objective(scores, data)`, or `objective(y, scores, sample_weight)`.

    All options are those of `ScoreObjective`. It counts rounds by itself, so that `temperature=cooling()` works.

    >>> import numpy as np
    >>> X, y = np.arange(40.0).reshape(-1, 1), np.arange(40) % 20 > 15
    >>> objective, data = MetricObjective("f1", task="binary"), xgboost.DMatrix(X, y)
    >>> options = {"base_score": 0.0, "disable_default_eval_metric": True, "min_child_weight": 0, "nthread": 1}
    >>> booster = xgboost.train(options, data, num_boost_round=20, obj=objective)
    >>> objective.score(booster.predict(data, output_margin=True), y)
    1.0
    """

    def __init__(self, metric: Any = "f1", **options: Any) -> None:
        super().__init__(metric, **options)
        self._rounds = RoundCounter()

    def __call__(self, first: Any, second: Any, sample_weight: Any = None) -> tuple[Array, Array]:
        """First and second derivative."""
        scores, y, weight = self._read(first, second, sample_weight)
        return self.gradient(scores, y, weight, round=self._rounds.next(scores))

    def evaluate(self, scores: Array, data: xgboost.DMatrix) -> tuple[str, float]:
        """(name, the metric of hard decisions): for `custom_metric`, to stop early by, with `maximize=True`."""
        return self.name, self.score(*self._read(scores, data, None))

    @property
    def evaluation(self) -> Callable[..., float]:
        """The metric as a function of labels and scores with a name, for `XGBClassifier`'s `eval_metric`."""

        def evaluation(y: Array, scores: Array, sample_weight: Array | None = None) -> float:
            return self.score(scores, y, sample_weight)

        evaluation.__name__ = self.name
        return evaluation

    def _read(self, first: Any, second: Any, weight: Any) -> tuple[Array, Array, Array | None]:
        if isinstance(second, xgboost.DMatrix):
            given = second.get_weight()
            return first, second.get_label(), given if given.size else None
        return second, first, weight
