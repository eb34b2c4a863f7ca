"""EASTLinear: a cross-fitted regularised linear model with a decision rule for a metric."""

import time
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import softmax
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression

from evalign import checks
from evalign.estimators.base import Arrays, MetricClassifier
from evalign.estimators.explain import log_loss
from evalign.tables.encode import TableEncoder
from evalign.tables.split import Codes, Floats, TrainingRows
from evalign.training.loop import Epoch, OnEpoch

STRENGTHS = (0.2, 2.0, 0.02)  # inverse penalties, tried in this order
LARGE = 20_000  # with more rows only one strength is tried: the penalty no longer matters
BOUND = 20.0  # in standard deviations; an extreme value would otherwise stall the optimiser
ABSENT = -1e30  # logit of a class without rows


@dataclass(kw_only=True, eq=False, repr=False)
class EASTLinear(MetricClassifier):
    """Multinomial logistic regression (scikit-learn's) on the encoded table, with a decision rule for a metric.

    It is not trained on the metric: a fully optimised logistic regression with a good decision rule is level with a
    linear model trained on the metric.

    Parameters
    ----------
    metric and the other parameters of every classifier: see `MetricClassifier`.
    strength: inverse of the L2 penalty; "auto" takes the one of 0.02, 0.2 and 2 with the lowest held-out log-loss.
    iterations: maximum number of optimiser iterations.

    Attributes: `classes_`, `n_features_in_`, `feature_names_in_`, `decision_`, `encoder_`, `strength_` (the one kept),
    `coefficients_` (folds, C, columns), `intercepts_` (folds, C), and after `fit` only `held_out_predictions_`.

    >>> from sklearn.datasets import load_iris
    >>> X, y = load_iris(return_X_y=True)
    >>> EASTLinear("f1", random_state=0).fit(X, y).coefficients_.shape
    (5, 3, 8)
    """

    FORMAT = "evalign.linear"

    strength: float | str = "auto"
    iterations: int = 200

    def _check_options(self) -> None:
        self._check_metric_and_decision()
        for name in ("folds", "iterations"):
            checks.check_number(name, getattr(self, name), low=1, whole=True)
        if self.strength != "auto":
            checks.check_number("strength", self.strength, low=0.0, open_low=True)

    def _cross_fit(self, data: TrainingRows, on_epoch: OnEpoch | None) -> Floats:
        self.encoder_ = data.encoder(TableEncoder, numeric="both")
        x = np.clip(data.encoded(TableEncoder, numeric="both"), -BOUND, BOUND)
        held_out, best, kept = data.predictions(np.empty((0, data.classes))), np.inf, np.empty(0)
        tried = STRENGTHS[: 1 if len(x) > LARGE else None] if self.strength == "auto" else (float(self.strength),)
        started, listen = time.monotonic(), self._listener(on_epoch)
        for step, strength in enumerate(tried, start=1):
            try:
                parts = [
                    _fitted(x[d.train], data.codes[d.train], d.train_weight, strength, data.classes, self.iterations)
                    for d in data.divisions
                ]
            except KeyboardInterrupt:
                if not len(kept):
                    raise
                break
            coefficients, intercepts = (np.stack(part) for part in zip(*parts, strict=True))
            logits = [x[d.valid] @ c.T + b for d, c, b in zip(data.divisions, coefficients, intercepts, strict=True)]
            p = softmax(np.concatenate(logits), axis=1)
            loss = log_loss(p, held_out.labels, held_out.weight)
            better = loss < best
            if better:
                best, kept, self.strength_ = loss, p, strength
                self.coefficients_, self.intercepts_ = coefficients, intercepts
            unknown, seconds = float("nan"), time.monotonic() - started
            try:
                listen(Epoch(step, "linear", 0.0, 0.0, unknown, loss, loss, unknown, better, seconds))
            except KeyboardInterrupt:
                break
        return kept

    def _probabilities(self, X: Any, fold: int | None = None) -> Floats:
        x = np.clip(self.encoder_.transform(X), -BOUND, BOUND)
        folds = slice(None) if fold is None else slice(fold, fold + 1)
        pairs = zip(self.coefficients_[folds], self.intercepts_[folds], strict=True)
        return np.asarray(np.mean([softmax(x @ c.T + b, axis=1) for c, b in pairs], axis=0))

    def _content(self) -> tuple[Arrays, dict[str, Any]]:
        arrays = {name: torch.from_numpy(getattr(self, f"{name}_")) for name in ("coefficients", "intercepts")}
        return arrays, {"encoder": self.encoder_.to_json(), "strength": self.strength_}

    def _set_content(self, arrays: Arrays, fitted: dict[str, Any]) -> None:
        self.encoder_, self.strength_ = TableEncoder.from_json(fitted["encoder"]), fitted["strength"]
        self.coefficients_, self.intercepts_ = arrays["coefficients"].numpy(), arrays["intercepts"].numpy()


def _fitted(
    x: NDArray[np.float32], y: Codes, weight: Floats, strength: float, classes: int, max_iter: int
) -> tuple[Floats, Floats]:
    """Coefficients (C, columns) and intercepts (C,); weights are scaled to a mean of 1, as the penalty expects."""
    model = LogisticRegression(C=strength, max_iter=max_iter, tol=1e-3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # held-out rows evaluate the model as it is
        model.fit(x, y, sample_weight=weight / weight.mean())
    coefficients, intercepts = np.zeros((classes, x.shape[1])), np.full(classes, ABSENT)
    if len(model.classes_) == 2:  # one logit, that of the second class
        intercepts[model.classes_[0]] = 0.0
        coefficients[model.classes_[1]], intercepts[model.classes_[1]] = model.coef_[0], model.intercept_[0]
    else:
        coefficients[model.classes_], intercepts[model.classes_] = model.coef_, model.intercept_
    return coefficients, intercepts
