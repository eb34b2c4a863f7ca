"""Trees of XGBoost, one round at a time."""

from typing import Any, Self

import numpy as np
import xgboost

from evalign.boosting.trees import Array, Gradient, Rows, TreeOptions

LARGEST = 3e38  # XGBoost holds float32


class XGBoostGrower:
    """A `Grower`; leaves are split best first, as LightGBM does, and the model starts from scores of 0."""

    def __init__(self, train: Rows, valid: Rows, options: TreeOptions) -> None:
        codes = set(train.categorical)
        types = ["c" if j in codes else "q" for j in range(train.x.shape[1])]
        self._train = xgboost.QuantileDMatrix(
            _bounded(train.x), train.y, weight=train.weight, feature_types=types, nthread=options.threads,
            enable_categorical=True,
        )  # fmt: skip
        self._valid = _matrix(valid.x, types, options.threads)
        params = {
            "base_score": 0.0,
            "disable_default_eval_metric": True,
            "tree_method": "hist",
            "grow_policy": "lossguide",
            "eta": options.learning_rate,
            "max_depth": 0,
            "max_leaves": options.leaves,
            # XGBoost counts second derivatives, not rows: a row in doubt, p = 1/2, weighs a quarter.
            "min_child_weight": options.min_rows / 100,
            "lambda": options.l2,
            "colsample_bytree": options.columns,
            "subsample": options.rows,
            "nthread": options.threads,
            "seed": options.seed,
        }
        if options.outputs > 1:
            params["num_class"] = options.outputs
        self._booster = xgboost.Booster(params, [self._train])
        self._rounds = 0

    def grow(self, gradient: Gradient) -> None:
        scores = self._booster.predict(self._train, output_margin=True, training=True)
        first, second = gradient(scores)
        self._booster.boost(self._train, iteration=self._rounds, grad=first, hess=second)
        self._rounds += 1

    def validation_scores(self) -> Array:
        return np.asarray(self._booster.predict(self._valid, output_margin=True))

    def finished(self, rounds: int) -> "XGBoostTrees":
        # Copied through its format, so that a model is the same whether it was saved and loaded or not.
        return XGBoostTrees.from_text(self._booster[:rounds].save_raw("json").decode())


class XGBoostTrees:
    """`Trees` read from XGBoost's JSON."""

    def __init__(self, booster: xgboost.Booster, text: str) -> None:
        self._booster, self._text = booster, text

    def scores(self, x: Array) -> Array:
        return np.asarray(self._booster.predict(_matrix(x, self._booster.feature_types, None), output_margin=True))

    def to_text(self) -> str:
        return self._text

    @classmethod
    def from_text(cls, text: str) -> Self:
        booster = xgboost.Booster()
        booster.load_model(bytearray(text, "utf-8"))
        return cls(booster, text)

    def __getstate__(self) -> dict[str, str]:
        return {"text": self._text}

    def __setstate__(self, state: dict[str, str]) -> None:
        again = self.from_text(state["text"])
        self._booster, self._text = again._booster, again._text


def _matrix(x: Array, types: Any, threads: int | None) -> xgboost.DMatrix:
    return xgboost.DMatrix(_bounded(x), feature_types=types, nthread=threads, enable_categorical=True)


def _bounded(x: Array) -> Array:
    return np.clip(x, -LARGEST, LARGEST).astype(np.float32)
