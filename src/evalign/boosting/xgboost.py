"""XGBoost: trees grown one round at a time, and a metric objective for its own interfaces."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import xgboost

from evalign.boosting.score_objective import Array, ChecksObjective, RoundObjective, TextTrees, check_objective
from evalign.boosting.score_objective import cooling as cooling

if TYPE_CHECKING:
    from evalign.boosting.growth import Gradient, TreeOptions, TreeRows

LARGEST = 3e38  # XGBoost holds float32


class XGBoostTrees(TextTrees):
    """Trees of XGBoost, as JSON."""

    @staticmethod
    def _read(text: str) -> xgboost.Booster:
        booster = xgboost.Booster()
        booster.load_model(bytearray(text, "utf-8"))
        return booster

    def scores(self, x: Array) -> Array:
        return np.asarray(self._booster.predict(_matrix(x, self._booster.feature_types, None), output_margin=True))


class XGBoostGrower:
    """A `Grower`; leaves are split best first, as in LightGBM, and scores start as in `LightGBMGrower`."""

    trees: type[TextTrees] = XGBoostTrees

    def __init__(
        self, train: "TreeRows", valid: "TreeRows", options: "TreeOptions", start: Array | None = None
    ) -> None:
        codes = set(options.categorical)
        types = ["c" if j in codes else "q" for j in range(train.x.shape[1])]
        self._train = xgboost.QuantileDMatrix(
            _bounded(train.x), train.y, weight=train.weight, feature_types=types, nthread=options.threads,
            enable_categorical=True,
        )  # fmt: skip
        self._valid = _matrix(valid.x, types, options.threads)
        params = {
            "base_score": 0.5 if start is not None else 0.0,  # a probability or a score: a margin of 0 either way
            "disable_default_eval_metric": True,
            "tree_method": "hist",
            "grow_policy": "lossguide",
            "eta": options.learning_rate,
            "max_depth": 0,
            "max_leaves": options.leaves,
            # XGBoost sums second derivatives instead of counting rows: an undecided row, p = 1/2, weighs a quarter.
            "min_child_weight": options.min_rows / 100,
            "lambda": options.l2,
            "colsample_bytree": options.columns,
            "subsample": options.rows,
            "nthread": options.threads,
            "seed": options.seed,
        }
        if options.outputs > 1:
            params["num_class"] = options.outputs
        if start is not None:
            params["objective"] = "multi:softprob" if options.outputs > 1 else "binary:logistic"
            for data, rows in ((self._train, train), (self._valid, valid)):
                data.set_base_margin(np.broadcast_to(start, (len(rows.y), *start.shape)).astype(np.float32))
        self._booster = xgboost.Booster(params, [self._train])
        self._rounds = 0

    @staticmethod
    def prepare_thread() -> None: ...

    def grow(self, gradient: "Gradient | None") -> None:
        if gradient is None:
            self._booster.update(self._train, self._rounds)
            self._rounds += 1
            return
        scores = self._booster.predict(self._train, output_margin=True, training=True)
        first, second = gradient(scores)
        self._booster.boost(self._train, iteration=self._rounds, grad=first, hess=second)
        self._rounds += 1

    def validation_scores(self) -> Array:
        return np.asarray(self._booster.predict(self._valid, output_margin=True))

    def finished(self, rounds: int) -> XGBoostTrees:
        # Copied through its file format, so that saving and loading does not change the model.
        return XGBoostTrees(self._booster[:rounds].save_raw("json").decode())


def _matrix(x: Array, types: Any, threads: int | None) -> xgboost.DMatrix:
    return xgboost.DMatrix(_bounded(x), feature_types=types, nthread=threads, enable_categorical=True)


def _bounded(x: Array) -> Array:
    return np.clip(x, -LARGEST, LARGEST).astype(np.float32)


class MetricObjective(RoundObjective):
    """`ScoreObjective` as XGBoost calls it: `objective(scores, data)`, or `objective(y, scores, sample_weight)`.

    All options are those of `ScoreObjective`; rounds are counted, so that `temperature=cooling()` works.

    >>> import numpy as np
    >>> X, y = np.arange(40.0).reshape(-1, 1), np.arange(40) % 20 > 15
    >>> objective, data = MetricObjective("f1", task="binary"), xgboost.DMatrix(X, y)
    >>> options = {"base_score": 0.0, "disable_default_eval_metric": True, "min_child_weight": 0, "nthread": 1}
    >>> booster = xgboost.train(options, data, num_boost_round=20, obj=objective)
    >>> objective.score(booster.predict(data, output_margin=True), y)
    1.0
    """

    def evaluate(self, scores: Array, data: xgboost.DMatrix) -> tuple[str, float]:
        """(name, the metric of hard decisions): for `custom_metric`, for early stopping with `maximize=True`."""
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


class MetricXGBClassifier(ChecksObjective, xgboost.XGBClassifier):
    """XGBoost's classifier for a `MetricObjective`, given as `objective`.

    XGBoost cannot interpret the scores of a custom objective, and its `predict` cuts them at 1/2. This one decides
    by the objective, and `predict_proba` returns probabilities. `base_score=0.5` is a score of 0 to start from.

    >>> X, y = np.arange(40.0).reshape(-1, 1), (np.arange(40) % 20 > 15).astype(int)
    >>> options = {"n_estimators": 20, "min_child_weight": 0, "base_score": 0.5, "n_jobs": 1}
    >>> model = MetricXGBClassifier(objective=MetricObjective("f1", task="binary"), **options).fit(X, y)
    >>> bool((model.predict(X) == y).all())
    True
    """

    def predict(self, X: Any, *, output_margin: bool = False, **options: Any) -> Any:
        """Labels; with `output_margin`, scores."""
        scores = super().predict(X, output_margin=True, **options)
        return scores if output_margin else self.classes_[check_objective(self.objective).labels(scores)]

    def predict_proba(self, X: Any, *args: Any, **options: Any) -> Any:
        """Probabilities of every class."""
        names = ("validate_features", "base_margin", "iteration_range")
        options |= dict(zip(names, args, strict=False))
        scores = super().predict(X, output_margin=True, **options)
        return check_objective(self.objective).class_probabilities(scores)
