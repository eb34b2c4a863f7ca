"""CCS: convex calibrated surrogates for the F-measure of label sets, a rival in EAST's Tables 2 and 3.

Zhang, Ramaswamy and Agarwal 2020, "Convex calibrated surrogates for the multi-label F-measure" (ICML), with the
decoder of Dembczynski et al. 2011, "An exact algorithm for F-measure maximization" (NeurIPS).

EAST does not say how it made label sets of classes. Its CIFAR-10 row, macro F1 0.004 at an accuracy of 0.111, cannot
be one class per row: with ten balanced classes that accuracy gives a macro F1 of 0.020 (2 x 0.111 / 1.1 / 10) or more.
"""

from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import expit, log_expit
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.linear_model import LogisticRegression
from sklearn.utils.multiclass import check_classification_targets, type_of_target
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, column_or_1d, validate_data

from evalign import checks

Floats = NDArray[np.float64]
Indicators = NDArray[np.int64]


class _Regression(NamedTuple):
    coef: Floats
    intercept: float
    iterations: int


class CCSClassifier(ClassifierMixin, BaseEstimator):
    """Linear classifier for label sets that maximises the F_beta of a row's set, on average over rows.

    A row has a set of labels, y in {0, 1}^s, and is predicted one, h; with 0/0 = 1 a prediction earns

        F_beta(y, h) = (1 + b^2) sum_j y_j h_j / (b^2 |y| + |h|)

    Its expectation depends on s^2 + 1 probabilities only: P(y = 0 | x) and P(y_j = 1, |y| = k | x) for labels j and
    sizes k. Each is learned by its own logistic regression (a strictly proper composite loss, so that the sum of the
    losses is a convex calibrated surrogate), and `decode` finds the set with the largest expectation in O(s^3).

    `fit(X, Y)` with an indicator matrix Y (n, s) is this method. With class labels every row has one label, |y| = 1:
    the s probabilities P(y_j = 1) are left, one regression per class against the rest, and of all sets of one label
    the best is the most probable: `predict` is one-versus-rest argmax, for two classes a cut at 1/2. F of a row is then
    1 or 0, its mean is the accuracy, and beta is without effect: CCS does not aim at the F1 of a class over rows, nor
    at macro F1, in which EAST reports it. The paper's decoder may do better with several labels, since h = {1, 2}
    earns 2/3 (p_1 + p_2); `predict_sets` returns its sets for class labels too.

    Parameters
    ----------
    beta: 1 weighs a row's precision and recall alike, more favours recall.
    C, max_iter, tolerance: of `LogisticRegression`; C is the inverse strength of its penalty.

    Attributes: `classes_` (the labels, or 0 ... s - 1 for indicators), `multilabel_`, `sizes_` (the m set sizes k seen
    in training; others have probability 0), `coef_` (1 + s m, d) and `intercept_`, first of P(y = 0), then of label 0
    with each size, and so on; an event that never or always occurs has an infinite intercept; `n_iter_`
    (the most of any regression).

    Where {1}, {2} and the empty set are equally likely, the pair earns most, 2/3 of 2/3:

    >>> X, Y = [[0.0], [0.0], [0.0], [1.0], [1.0]], [[1, 0], [0, 1], [0, 0], [0, 0], [0, 0]]
    >>> CCSClassifier(C=1000.0).fit(X, Y).predict([[0.0], [1.0]]).tolist()
    [[1, 1], [0, 0]]
    """

    def __init__(self, beta: float = 1.0, *, C: float = 1.0, max_iter: int = 1000, tolerance: float = 1e-6) -> None:
        self.beta = beta
        self.C = C
        self.max_iter = max_iter
        self.tolerance = tolerance

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.classifier_tags.multi_label = True
        return tags

    def fit(self, X: Any, y: Any, sample_weight: ArrayLike | None = None) -> Self:
        """Learn one logistic regression per event; y holds indicators (n, s) or class labels (n,)."""
        checks.check_number("beta", self.beta, low=0.0, high=float("inf"), open_low=True, open_high=True)
        checks.check_number("C", self.C, low=0.0, open_low=True)
        X, y = validate_data(self, X, y, dtype=np.float64, multi_output=True)
        weight = _check_sample_weight(sample_weight, X, dtype=np.float64, ensure_non_negative=True)
        # A row of weight 0 is no row: without this its label or set size would still count as seen.
        X, y, weight = X[weight > 0], y[weight > 0], weight[weight > 0]
        sets = self._as_sets(y)
        size = sets.sum(axis=1)
        self.sizes_ = np.unique(size[size > 0])
        events = [size == 0, *((sets[:, j] == 1) & (size == k) for j in range(sets.shape[1]) for k in self.sizes_)]
        parts = [self._regression(X, event, weight) for event in events]
        self.coef_ = np.array([part.coef for part in parts])
        self.intercept_ = np.array([part.intercept for part in parts])
        self.n_iter_ = max(part.iterations for part in parts)
        return self

    def predict(self, X: Any) -> NDArray[Any]:
        """Indicators (n, s) of the best sets, or the best class of each row."""
        if self._is_multilabel():
            return self.predict_sets(X)
        predicted: NDArray[Any] = self.classes_[self.predict_proba(X).argmax(axis=1)]
        return predicted

    def predict_sets(self, X: Any) -> Indicators:
        """Indicators (n, s) of the sets with the largest expected F_beta, for class labels too."""
        joint, empty = self._events(expit(self._scores(X)))
        return decode(joint, empty, sizes=self.sizes_, beta=self.beta)

    def predict_proba(self, X: Any) -> Floats:
        """P(y_j = 1 | x) (n, s); for class labels they add up to 1.

        The regressions are learned one by one, so they are divided by the sum of P(|y| = k) = 1/k sum_j P(y_j = 1,
        |y| = k) and P(y = 0). A set is not found by cutting these at 1/2: it depends on how labels go together.
        """
        logs = log_expit(self._scores(X))
        # Far from the training rows all events can be improbable; only their ratios matter from here on.
        joint, empty = self._events(np.exp(logs - logs.max(axis=1, keepdims=True)))
        p: Floats = joint.sum(axis=2) / (empty + (joint / self.sizes_).sum(axis=(1, 2)))[:, None]
        # Regressions that disagree can add up to more than 1, and scikit-learn expects less than 1 of indicators.
        return np.minimum(p, np.nextafter(1.0, 0.0)) if self.multilabel_ else p

    def score(self, X: Any, y: Any, sample_weight: ArrayLike | None = None) -> float:
        """Mean F_beta of the rows; for class labels this is the accuracy."""
        if not self._is_multilabel():
            return float(super().score(X, y, sample_weight))
        weight = None if sample_weight is None else np.asarray(sample_weight, dtype=np.float64)
        return float(np.average(set_fbeta(_dense(y), self.predict(X), beta=self.beta), weights=weight))

    def _as_sets(self, y: Any) -> Indicators:
        check_classification_targets(y)
        self.multilabel_ = type_of_target(y) == "multilabel-indicator"
        if self.multilabel_:
            sets = _dense(y).astype(np.int64)
            self.classes_ = np.arange(sets.shape[1])
            return sets
        self.classes_, codes = np.unique(column_or_1d(y, warn=True), return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError("y must hold at least two classes with a positive weight, got one class")
        return np.eye(len(self.classes_), dtype=np.int64)[codes]

    def _regression(self, X: Floats, event: NDArray[np.bool_], weight: Floats) -> _Regression:
        if event.all() or not event.any():
            return _Regression(np.zeros(X.shape[1]), np.inf if event.all() else -np.inf, 1)
        model = LogisticRegression(C=self.C, max_iter=self.max_iter, tol=self.tolerance)
        model.fit(X, event, sample_weight=weight)
        return _Regression(model.coef_[0], float(model.intercept_[0]), int(model.n_iter_[0]))

    def _scores(self, X: Any) -> Floats:
        check_is_fitted(self)
        X = validate_data(self, X, dtype=np.float64, reset=False)
        scores: Floats = X @ self.coef_.T + self.intercept_
        return scores

    def _events(self, p: Floats) -> tuple[Floats, Floats]:
        """Columns of all events as P(y_j = 1, |y| = k) (n, s, m) and P(y = 0) (n,)."""
        return p[:, 1:].reshape(len(p), len(self.classes_), len(self.sizes_)), p[:, 0]

    def _is_multilabel(self) -> bool:
        check_is_fitted(self)
        return bool(self.multilabel_)


def decode(joint: Floats, empty: Floats, *, sizes: ArrayLike | None = None, beta: float = 1.0) -> Indicators:
    """The sets (n, s) with the largest expected F_beta, the smallest on a tie.

    joint (n, s, m) holds P(y_j = 1, |y| = k) for the m sizes k (by default 1 ... s), empty (n,) P(y = 0), which is
    what h = 0 earns. A set h of l labels earns the sum over its labels of
    sum_k (1 + b^2) P(y_j = 1, |y| = k) / (b^2 k + l), so for every l the l largest terms are best.

    >>> joint = np.array([[[0.2, 0.3], [0.1, 0.3], [0.1, 0.0]]])  # {1}: .2, {2}: .1, {3}: .1, {1, 2}: .3, {}: .3
    >>> decode(joint, np.array([0.3]), sizes=[1, 2]).tolist()
    [[1, 1, 0]]
    """
    n, s, m = joint.shape
    k = np.arange(1, s + 1) if sizes is None else np.asarray(sizes)
    if len(k) != m:
        raise ValueError(f"joint must have one last entry per size, expected {len(k)}, got {m}")
    b2 = beta**2
    best, chosen = np.array(empty, dtype=np.float64), np.zeros((n, s), dtype=np.int64)
    for count in range(1, s + 1):
        gain = joint @ ((1 + b2) / (b2 * k + count))
        top = np.argsort(-gain, axis=1, kind="stable")[:, :count]
        earned = np.take_along_axis(gain, top, axis=1).sum(axis=1)
        better = earned > best
        best[better], chosen[better] = earned[better], 0
        chosen[np.flatnonzero(better)[:, None], top[better]] = 1
    return chosen


def set_fbeta(y: Indicators, h: Indicators, *, beta: float = 1.0) -> Floats:
    """F_beta of each row's predicted set h against its set y, both (n, s) indicators; 1 where both are empty.

    >>> set_fbeta(np.array([[1, 1, 0], [0, 0, 0]]), np.array([[1, 0, 0], [0, 0, 0]])).round(3).tolist()
    [0.667, 1.0]
    """
    b2 = beta**2
    whole = b2 * y.sum(axis=1) + h.sum(axis=1)
    hit: Floats = (1 + b2) * (y * h).sum(axis=1)
    return np.where(whole == 0, 1.0, hit / np.where(whole == 0, 1.0, whole))


def _dense(y: Any) -> NDArray[Any]:
    return np.asarray(y.toarray() if hasattr(y, "toarray") else y)
