"""Estimators that keep the held-out rows their decision rules are learned from, all split alike."""

from typing import Any, Self

import numpy as np
from sklearn.base import BaseEstimator, ClassifierMixin, clone
from sklearn.utils import check_random_state

from evalign.blend import EASTBlend
from evalign.booster import EASTBooster
from evalign.comparison.aims import Codes, Floats, Validation
from evalign.decision import Rule
from evalign.estimator import EASTClassifier
from evalign.metric_classifier import MetricClassifier
from evalign.tables import TableEncoder
from evalign.tables.distinct import distinct_rows, divide_rows


class Keeps(MetricClassifier):
    """Leaves the rows behind that its decision was learned from, so that one training serves every decision."""

    validation_: Validation

    def _learn_decision(self, p: Floats, codes: Codes, weight: Floats) -> Rule:
        self.validation_ = Validation(p, codes, weight)
        return super()._learn_decision(p, codes, weight)


class KeepsValidation(Keeps, EASTClassifier):
    """`EASTClassifier` with the rows that it held out."""


class KeepsBooster(Keeps, EASTBooster):
    """`EASTBooster` with the rows that its folds held out."""


class KeepsBlend(Keeps, EASTBlend):
    """`EASTBlend` with the rows that all of its members held out."""


class HeldOut(ClassifierMixin, BaseEstimator):
    """Any classifier with `predict_proba`, fitted on the rows that `EASTClassifier` would train on, encoded alike.

    With one `random_state` both hold out the same rows. Equal rows are kept on one side of the split. Numbers are
    scaled only, without the ranks that a network may get beside them: trees do not care for either.

    >>> from sklearn.dummy import DummyClassifier
    >>> X, y = np.arange(20.0).reshape(-1, 1), np.array(["a", "b"] * 10)
    >>> model = HeldOut(DummyClassifier(), random_state=0).fit(X, y)
    >>> len(model.validation_.labels), model.predict_proba(X[:1])
    (4, array([[0.5, 0.5]]))
    """

    def __init__(self, estimator: Any, *, validation_fraction: float = 0.2, random_state: Any = None) -> None:
        self.estimator = estimator
        self.validation_fraction = validation_fraction
        self.random_state = random_state

    def fit(self, X: Any, y: Any) -> Self:
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        self.classes_, codes = np.unique(y, return_inverse=True)
        codes = codes.astype(np.int64)
        rows, weight = distinct_rows(X, codes, np.ones(len(codes)))
        division = divide_rows(codes[rows], weight, self.validation_fraction, seed)
        train, valid = rows[division.train], rows[division.valid]
        self.encoder_ = TableEncoder().fit(X, rows=train)
        again = np.repeat(train, np.rint(division.train_weight).astype(np.int64))  # as often as they were given
        self.estimator_ = clone(self.estimator).fit(self.encoder_.transform(X, rows=again), codes[again])
        p = self.estimator_.predict_proba(self.encoder_.transform(X, rows=valid))
        self.validation_ = Validation(np.asarray(p, dtype=np.float64), codes[valid], division.valid_weight)
        return self

    def predict_proba(self, X: Any) -> Floats:
        return np.asarray(self.estimator_.predict_proba(self.encoder_.transform(X)), dtype=np.float64)

    def predict(self, X: Any) -> Any:
        """The most probable class."""
        return self.classes_[self.predict_proba(X).argmax(axis=1)]
