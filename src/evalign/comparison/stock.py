"""LightGBM and XGBoost as they come: their own objective and defaults, stopped by log-loss on held-out rows."""

from typing import Any, Self

import numpy as np
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils import check_random_state

from evalign import checks
from evalign.boosting.libraries import LIBRARIES, find_library
from evalign.boosting.table import TreeTable
from evalign.comparison.aims import Codes, Floats, Validation
from evalign.tables.distinct import distinct_rows, divide_rows

ROUNDS, PATIENCE = 1000, 50


class StockBooster(ClassifierMixin, BaseEstimator):
    """A library's classifier on the rows that `EASTClassifier` would train on, for labels 0 to C - 1.

    Early stopping is the one thing that is not the library's default: a hundred rounds are too few for some tables
    and too many for others, and a rival with a wrong number of them would prove nothing.

    >>> X, y = np.arange(60.0).reshape(-1, 1), np.arange(60) // 30
    >>> model = StockBooster("lightgbm", random_state=0, n_jobs=1).fit(X, y)
    >>> model.predict_proba(X[:2]).shape, len(model.validation_.labels)
    ((2, 2), 12)
    """

    def __init__(
        self, library: str = "lightgbm", *, validation_fraction: float = 0.2, random_state: Any = None, n_jobs: int = -1
    ) -> None:
        self.library = library
        self.validation_fraction = validation_fraction
        self.random_state = random_state
        self.n_jobs = n_jobs

    def fit(self, X: Any, y: Codes) -> Self:
        checks.check_choice("library", self.library, LIBRARIES)
        find_library(self.library)  # says what to install where it is missing
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        codes = np.asarray(y, dtype=np.int64)
        self.classes_ = np.unique(codes)
        rows, weight = distinct_rows(X, codes, np.ones(len(codes)))
        division = divide_rows(codes[rows], weight, self.validation_fraction, seed)
        train, valid = rows[division.train], rows[division.valid]
        self.encoder_ = TreeTable().fit(X, rows=train)
        x, held_out = (self.encoder_.transform(X, rows=part) for part in (train, valid))
        fit = self._lightgbm if self.library == "lightgbm" else self._xgboost
        self.estimator_ = fit(x, codes[train], division.train_weight, held_out, codes[valid], seed)
        self.validation_ = Validation(self._probabilities(held_out), codes[valid], division.valid_weight)
        return self

    def predict_proba(self, X: Any) -> Floats:
        return self._probabilities(self.encoder_.transform(X))

    def predict(self, X: Any) -> Any:
        """The most probable class."""
        return self.classes_[self.predict_proba(X).argmax(axis=1)]

    def _probabilities(self, x: Floats) -> Floats:
        return np.asarray(self.estimator_.predict_proba(x), dtype=np.float64)

    def _lightgbm(self, x: Floats, y: Codes, weight: Floats, held_out: Floats, truth: Codes, seed: int) -> Any:
        import lightgbm

        model = lightgbm.LGBMClassifier(n_estimators=ROUNDS, random_state=seed, n_jobs=self.n_jobs, verbose=-1)
        stop = lightgbm.early_stopping(PATIENCE, verbose=False)
        # Held-out rows of all classes may be lacking, but none that training lacks is among them.
        return model.fit(
            x, y, sample_weight=weight, eval_X=held_out, eval_y=truth, categorical_feature=self.encoder_.categorical,
            callbacks=[stop],
        )  # fmt: skip

    def _xgboost(self, x: Floats, y: Codes, weight: Floats, held_out: Floats, truth: Codes, seed: int) -> Any:
        import xgboost

        codes = set(self.encoder_.categorical)
        types = ["c" if j in codes else "q" for j in range(x.shape[1])]
        model = xgboost.XGBClassifier(
            n_estimators=ROUNDS, early_stopping_rounds=PATIENCE, random_state=seed, n_jobs=self.n_jobs,
            enable_categorical=True, feature_types=types,
        )  # fmt: skip
        return model.fit(x, y, sample_weight=weight, eval_set=[(held_out, truth)], verbose=False)
