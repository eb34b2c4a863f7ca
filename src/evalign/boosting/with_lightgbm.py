"""Trees of LightGBM, one round at a time."""

from typing import Any, Self

import lightgbm
import numpy as np

from evalign.boosting.trees import Array, Gradient, Rows, TreeOptions


class LightGBMGrower:
    """A `Grower`; the model starts from scores of 0."""

    def __init__(self, train: Rows, valid: Rows, options: TreeOptions) -> None:
        params: dict[str, Any] = {
            "objective": "none",
            "learning_rate": options.learning_rate,
            "num_leaves": options.leaves,
            "min_data_in_leaf": options.min_rows,
            "lambda_l2": options.l2,
            "feature_fraction": options.columns,
            "bagging_fraction": options.rows,
            "bagging_freq": int(options.rows < 1),
            "num_threads": options.threads,
            "seed": options.seed,
            # Reproducible, and without a trial of both ways to build histograms, which chooses by the clock.
            "deterministic": True,
            "force_row_wise": True,
            # A column that only a rare class needs has few values that differ; it must not be thrown away.
            "feature_pre_filter": False,
            "min_data_in_bin": 1,
            "verbose": -1,
        }
        if options.outputs > 1:
            params["num_class"] = options.outputs
        binning = {name: params[name] for name in ("verbose", "feature_pre_filter", "min_data_in_bin", "num_threads")}
        data = lightgbm.Dataset(
            train.x, train.y, weight=train.weight, categorical_feature=train.categorical, params=dict(binning)
        )
        # Made first: a booster adds its own options to the data set, and a differing set then warns of them.
        held_out = data.create_valid(valid.x, valid.y, weight=valid.weight, params=dict(binning)).construct()
        self._booster = lightgbm.Booster(params, data)
        self._booster.add_valid(held_out, "valid")

    def grow(self, gradient: Gradient) -> None:
        self._booster.update(fobj=lambda scores, _: gradient(scores.astype(np.float32)))

    def validation_scores(self) -> Array:
        seen: list[Array] = []

        def look(scores: Array, _: Any) -> tuple[str, float, bool]:  # the one public way to LightGBM's running scores
            seen.append(scores)
            return "look", 0.0, True

        self._booster.eval_valid(look)
        return seen[0]

    def finished(self, rounds: int) -> "LightGBMTrees":
        return LightGBMTrees.from_text(self._booster.model_to_string(num_iteration=rounds))


class LightGBMTrees:
    """`Trees` read from LightGBM's text, whose numbers have all their digits."""

    def __init__(self, booster: lightgbm.Booster, text: str) -> None:
        self._booster, self._text = booster, text

    def scores(self, x: Array) -> Array:
        return np.asarray(self._booster.predict(x, raw_score=True))

    def to_text(self) -> str:
        return self._text

    @classmethod
    def from_text(cls, text: str) -> Self:
        return cls(lightgbm.Booster(model_str=text), text)

    def __getstate__(self) -> dict[str, str]:
        return {"text": self._text}

    def __setstate__(self, state: dict[str, str]) -> None:
        again = self.from_text(state["text"])
        self._booster, self._text = again._booster, again._text
