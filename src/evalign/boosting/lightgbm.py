"""LightGBM: trees grown one round at a time, and a metric objective for its own interfaces."""

from typing import TYPE_CHECKING, Any

import lightgbm
import numpy as np

from evalign.boosting.score_objective import Array, ChecksObjective, RoundObjective, TextTrees, check_objective
from evalign.boosting.score_objective import cooling as cooling

if TYPE_CHECKING:
    from evalign.boosting.growth import Gradient, TreeOptions, TreeRows

TINY = np.finfo(np.float64).tiny


class LightGBMTrees(TextTrees):
    """Trees of LightGBM, stored as text with all digits of numbers."""

    @staticmethod
    def _read(text: str) -> lightgbm.Booster:
        return lightgbm.Booster(model_str=text)

    def scores(self, x: Array) -> Array:
        return np.asarray(self._booster.predict(x, raw_score=True))


class LightGBMGrower:
    """A `Grower`; the trees' scores start from 0, or from `start` in the library's own objective."""

    trees: type[TextTrees] = LightGBMTrees

    def __init__(
        self, train: "TreeRows", valid: "TreeRows", options: "TreeOptions", start: Array | None = None
    ) -> None:
        own = "none" if start is None else "multiclass" if options.outputs > 1 else "binary"
        params: dict[str, Any] = {
            "objective": own,
            "metric": "none",
            "boost_from_average": False,
            "learning_rate": options.learning_rate,
            "num_leaves": options.leaves,
            "min_data_in_leaf": options.min_rows,
            "lambda_l2": options.l2,
            "feature_fraction": options.columns,
            "bagging_fraction": options.rows,
            "bagging_freq": int(options.rows < 1),
            "num_threads": options.threads,
            "seed": options.seed,
            # Reproducible: by default LightGBM times both ways to build histograms and takes the faster one.
            "deterministic": True,
            "force_row_wise": True,
            # A column that only a rare class needs has few distinct values and must not be dropped.
            "feature_pre_filter": False,
            "min_data_in_bin": 1,
            "verbose": -1,
        }
        if options.outputs > 1:
            params["num_class"] = options.outputs
        binning = {name: params[name] for name in ("verbose", "feature_pre_filter", "min_data_in_bin", "num_threads")}
        data = lightgbm.Dataset(
            train.x, train.y, weight=train.weight, categorical_feature=list(options.categorical), params=dict(binning),
            init_score=None if start is None else np.array(np.broadcast_to(start, (len(train.y), *start.shape))),
        )  # fmt: skip
        # Built first: a booster adds its options to the data set, which would warn of differing ones later.
        held_out = data.create_valid(
            valid.x, valid.y, weight=valid.weight, params=dict(binning),
            init_score=None if start is None else np.array(np.broadcast_to(start, (len(valid.y), *start.shape))),
        ).construct()  # fmt: skip
        self._own_objective = start is not None
        self._booster = lightgbm.Booster(params, data)
        self._booster.add_valid(held_out, "valid")

    @staticmethod
    def prepare_thread() -> None:
        # LightGBM's log level is per thread, set by the options of a data set or booster in the thread that builds it.
        lightgbm.Dataset(np.zeros((1, 1)), params={"verbose": -1}).construct()

    def grow(self, gradient: "Gradient | None") -> None:
        self._booster.update(fobj=None if gradient is None else lambda scores, _: gradient(scores.astype(np.float32)))

    def validation_scores(self) -> Array:
        seen: list[Array] = []

        def keep(scores: Array, _: Any) -> tuple[str, float, bool]:  # the one public way to LightGBM's running scores
            seen.append(scores)
            return "none", 0.0, True

        self._booster.eval_valid(keep)
        if not self._own_objective:
            return seen[0]
        logs = np.log(np.maximum(seen[0], TINY))  # with its own objective LightGBM passes probabilities
        return logs if logs.ndim == 2 else logs - np.log(np.maximum(1 - seen[0], TINY))

    def finished(self, rounds: int) -> LightGBMTrees:
        return LightGBMTrees(self._booster.model_to_string(num_iteration=rounds))


class MetricObjective(RoundObjective):
    """`ScoreObjective` as LightGBM calls it: `objective(scores, data)`, or `objective(y, scores, weight)`.

    All options are those of `ScoreObjective`; rounds are counted, so that `temperature=cooling()` works.

    >>> X, y = np.arange(40.0).reshape(-1, 1), np.arange(40) % 20 > 15
    >>> objective = MetricObjective("f1", task="binary")
    >>> small = {"min_data_in_leaf": 2, "min_data_in_bin": 1, "verbose": -1, "num_threads": 1}
    >>> params = {"objective": objective, **small}
    >>> booster = lightgbm.train(params, lightgbm.Dataset(X, y), num_boost_round=20)
    >>> objective.score(booster.predict(X, raw_score=True), y)
    1.0
    """

    def evaluate(self, first: Any, second: Any, sample_weight: Any = None) -> tuple[str, float, bool]:
        """(name, the metric of hard decisions, True): for `feval` and `eval_metric`, for early stopping."""
        scores, y, weight = self._read(first, second, sample_weight)
        return self.name, self.score(scores, y, weight), True

    def _read(self, first: Any, second: Any, weight: Any) -> tuple[Array, Array, Array | None]:
        if isinstance(second, lightgbm.Dataset):
            weight = second.get_weight()
            return _short(first), np.asarray(second.get_label()), None if weight is None else np.asarray(weight)
        return _short(second), first, weight


class MetricLGBMClassifier(ChecksObjective, lightgbm.LGBMClassifier):
    """LightGBM's classifier for a `MetricObjective`, given as `objective`.

    LightGBM cannot interpret the scores of a custom objective, and its `predict` returns them unchanged. This
    one returns labels, and `predict_proba` probabilities.

    >>> X, y = np.arange(40.0).reshape(-1, 1), np.where(np.arange(40) % 20 > 15, "yes", "no")
    >>> options = {"n_estimators": 20, "min_child_samples": 2, "min_data_in_bin": 1, "verbose": -1, "n_jobs": 1}
    >>> model = MetricLGBMClassifier(objective=MetricObjective("f1", task="binary"), **options).fit(X, y)
    >>> bool((model.predict(X) == y).all())
    True
    """

    def _process_params(self, stage: str) -> dict[str, Any]:
        """LightGBM's options without its default metric, which takes raw scores for probabilities and ends training."""
        named = {"metric", "metrics", "metric_types"} & self.get_params().keys()
        return super()._process_params(stage) | ({} if named else {"metric": "None"})

    def predict(self, X: Any, raw_score: bool = False, *args: Any, **options: Any) -> Any:
        """Labels; with `raw_score`, `pred_leaf` or `pred_contrib` scores, leaves or contributions."""
        found: Any = super().predict_proba(X, True, *args, **options)
        if raw_score or _asks_for_more(*args, **options):
            return found
        return self.classes_[check_objective(self.objective).labels(found)]

    def predict_proba(self, X: Any, raw_score: bool = False, *args: Any, **options: Any) -> Any:
        """Probabilities of every class; with `raw_score`, `pred_leaf` or `pred_contrib` as `predict`."""
        found: Any = super().predict_proba(X, True, *args, **options)
        if raw_score or _asks_for_more(*args, **options):
            return found
        return check_objective(self.objective).class_probabilities(found)


def _asks_for_more(
    start_iteration: int = 0, num_iteration: int | None = None, pred_leaf: bool = False, pred_contrib: bool = False,
    *args: Any, **options: Any,
) -> bool:  # fmt: skip
    """Whether the options of LightGBM's `predict` request leaves or contributions."""
    return pred_leaf or pred_contrib


def _short(scores: Array) -> Array:
    """Scores in float32, as LightGBM stores derivatives; this takes two thirds of the time."""
    return np.asarray(scores, dtype=np.float32)
