"""SVM-perf: a linear classifier trained on F1, the error rate or the ROC area of the whole sample.

Joachims 2005, "A support vector method for multivariate performance measures" (ICML); `cutting_planes` has the solver.
BtG compares with it in Table 7 of its supplement.
"""

import warnings
from functools import partial
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data

from evalign import checks
from evalign_papers.rivals.cutting_planes import Floats, Violated, minimise

Loss = Literal["f1", "fbeta", "error", "roc"]


class SVMPerfClassifier(ClassifierMixin, BaseEstimator):
    """Linear SVM whose margin is set by a loss of all predictions at once; two classes, the second one positive.

    For rows x_i (with a 1 appended), labels y in {-1, 1}^n and a loss Delta in [0, 1], it minimises

        1/2 |w|^2 + C n xi,   xi = max over y' in {-1, 1}^n of  Delta(y', y) - 1/(2n) sum_i (y_i - y'_i) w.x_i

    by cutting planes: solve for the label vectors y' collected so far, add one that is violated most, and stop once the
    objective is within C n `tolerance` of the minimum. Delta is 1 - F_beta, the share of errors, or the share of
    swapped pairs (for "roc" y' orders each positive against each negative row, and 1/(P N) stands for 1/n).

    DIFFERS in scale only: with C n in front, C means what it means in `LinearSVC`. loss="error" is then exactly
    LinearSVC(loss="hinge", C=C), 1/2 |w|^2 + C sum_i max(0, 1 - y_i w.x_i), whose intercept is regularised too, and
    loss="roc" is that hinge on the differences of pairs with C n / (P N). Joachims has C xi and no 1/(2n): his C is
    C / 2 for Delta = 2 x errors, with the same w, and 25 C / n for Delta = 100 (1 - F1), with 50 w / n.

    Parameters
    ----------
    C: weight of the loss against the norm; the features should be on one scale.
    loss: "f1", "fbeta" (with `beta`), "error" or "roc".
    tolerance: how precisely xi is minimised, in units of Delta: 0.001 is 0.1 % of F1.
    max_iter: most label vectors to collect.
    fit_intercept: append the feature 1.

    Attributes: `classes_`, `coef_` (1, d), `intercept_` (1,), `n_iter_`, `objective_` (the minimum reached),
    `dual_gap_` (how far at most from the true minimum, divided by C n; at most `tolerance`).

    An `objective_` near C n says that hardly any w beats w = 0, where all rows score 0; with F1 this happens when the
    classes overlap and positives are few. A score of 0 and above is positive. With loss="roc" only the order of scores
    is learned, the intercept stays 0 and that cut means nothing: choose one, for instance with scikit-learn's
    TunedThresholdClassifierCV (BtG prints an accuracy of 0.32 for it on Adult).

    >>> X, y = [[0.0], [1.0], [2.0], [3.0], [4.0]], ["no", "no", "yes", "no", "yes"]
    >>> SVMPerfClassifier(C=10.0).fit(X, y).predict(X).tolist()
    ['no', 'no', 'yes', 'yes', 'yes']
    """

    def __init__(
        self,
        C: float = 1.0,
        *,
        loss: Loss = "f1",
        beta: float = 1.0,
        tolerance: float = 1e-3,
        max_iter: int = 1000,
        fit_intercept: bool = True,
    ) -> None:
        self.C = C
        self.loss = loss
        self.beta = beta
        self.tolerance = tolerance
        self.max_iter = max_iter
        self.fit_intercept = fit_intercept

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.classifier_tags.multi_class = False
        return tags

    def fit(self, X: Any, y: ArrayLike) -> Self:
        """Collect violated label vectors until none is violated by more than `tolerance`."""
        self._check_options()
        X, y = validate_data(self, X, y, dtype=np.float64)
        check_classification_targets(y)
        self.classes_, codes = np.unique(y, return_inverse=True)
        if len(self.classes_) != 2:
            kind = "one class" if len(self.classes_) == 1 else f"{len(self.classes_)} classes"
            raise ValueError(f"Only binary classification is supported, got {kind}")
        constant = self.fit_intercept and self.loss != "roc"  # it cancels in the difference of a pair
        rows = np.column_stack([X, np.ones(len(X))]) if constant else X
        beta = self.beta if self.loss == "fbeta" else 1.0
        w = self._solve(rows, partial(most_violated, positive=codes == 1, loss=self.loss, beta=beta))
        self.coef_ = w[None, : X.shape[1]]
        self.intercept_ = w[X.shape[1] :] if constant else np.zeros(1)
        return self

    def decision_function(self, X: Any) -> Floats:
        """Scores w.x, one per row."""
        check_is_fitted(self)
        X = validate_data(self, X, dtype=np.float64, reset=False)
        scores: Floats = X @ self.coef_[0] + self.intercept_[0]
        return scores

    def predict(self, X: Any) -> NDArray[Any]:
        """Labels, cutting at 0; a tie is positive. For loss="roc" see above."""
        positive = self.decision_function(X) >= 0
        predicted: NDArray[Any] = self.classes_[positive.astype(int)]
        return predicted

    def _check_options(self) -> None:
        checks.check_choice("loss", self.loss, ("f1", "fbeta", "error", "roc"))
        checks.check_number("C", self.C, low=0.0, high=float("inf"), open_low=True, open_high=True)
        checks.check_number("beta", self.beta, low=0.0, high=float("inf"), open_low=True, open_high=True)
        checks.check_number("tolerance", self.tolerance, low=0.0, open_low=True)
        checks.check_number("max_iter", self.max_iter, low=1)

    def _solve(self, rows: Floats, violated: Violated) -> Floats:
        total = self.C * len(rows)
        w, objective, gap, iterations = minimise(
            rows, violated, total, gap=total * self.tolerance, max_iter=int(self.max_iter)
        )
        self.objective_, self.dual_gap_, self.n_iter_ = objective, gap / total, iterations
        if self.dual_gap_ > self.tolerance:
            warnings.warn(
                f"SVMPerfClassifier stopped after max_iter={self.max_iter} with a gap of {self.dual_gap_:.2g}; "
                "scale the features, lower C, or raise max_iter or tolerance",
                ConvergenceWarning,
                stacklevel=3,
            )
        return w


def most_violated(
    scores: Floats, positive: NDArray[np.bool_], loss: Loss, *, beta: float = 1.0
) -> tuple[float, Floats]:
    """The label vector that scores violate most: its Delta, and t (n,) with xi >= Delta - sum_i t_i score_i.

    >>> delta, turn = most_violated(np.array([2.0, 0.5, -3.0]), np.array([True, True, False]), "error")
    >>> round(delta, 3), turn.round(3).tolist()
    (0.333, [0.0, 0.333, 0.0])
    """
    if loss == "roc":
        return _most_swapped(scores, positive)
    return _most_wrong(scores, positive) if loss == "error" else _most_flipped(scores, positive, beta)


def _most_wrong(scores: Floats, positive: NDArray[np.bool_]) -> tuple[float, Floats]:
    """Each row is on its own: 1/n for an error is worth it where the row is less than 1 on its side of 0."""
    label = np.where(positive, 1 / len(scores), -1 / len(scores))
    turn = np.where(np.where(positive, scores, -scores) < 1, label, 0.0)
    return float(np.count_nonzero(turn) / len(scores)), turn


def _most_flipped(scores: Floats, positive: NDArray[np.bool_], beta: float) -> tuple[float, Floats]:
    """Joachims' Algorithm 2: for a given table the lowest positives and the highest negatives are the wrong ones.

    DIFFERS: he tries every table, P N of them. For a given number of true positives both the loss and the scores are
    concave in the number of false positives, so halving finds their best number: O(n log n), the same maximum.
    """
    n, (p, q) = len(scores), (np.flatnonzero(positive), np.flatnonzero(~positive))
    low, others = p[np.argsort(scores[p], kind="stable")], scores[q]
    high = np.sort(others)[::-1]  # sorting values takes half the time of argsort
    missed, false = (np.concatenate([[0.0], np.cumsum(s)]) / n for s in (-scores[low], high))
    fn = np.arange(len(p) + 1)
    tp, b2 = len(p) - fn, beta**2

    def delta(fp: NDArray[np.int64]) -> Floats:
        return 1 - (1 + b2) * tp / (tp + fp + b2 * len(p))

    # The first fp from which one more does not raise the value; the differences only fall.
    left, right = np.zeros_like(fn), np.full_like(fn, len(q))
    while np.any(left < right):
        middle = (left + right) // 2
        after = np.minimum(middle + 1, len(q))
        rises = (after > middle) & (delta(after) + false[after] > delta(middle) + false[middle])
        left, right = np.where(rises, after, left), np.where(rises, right, middle)
    deltas = delta(left)
    best = int(np.argmax(deltas + missed + false[left]))
    turn = np.zeros(n)
    turn[low[:best]] = 1 / n
    if fp := int(left[best]):
        over, tied = others > high[fp - 1], np.flatnonzero(others == high[fp - 1])
        turn[q[over]] = -1 / n
        turn[q[tied[: fp - np.count_nonzero(over)]]] = -1 / n
    return float(deltas[best]), turn


def _most_swapped(scores: Floats, positive: NDArray[np.bool_]) -> tuple[float, Floats]:
    """Joachims' Algorithm 3: a pair is worth swapping where the positive is less than 1 above the negative."""
    lowered, others = scores[positive] - 1, scores[~positive]
    order = np.argsort(lowered)
    # How many positives each negative is above; counting these counts the negatives above each positive as well.
    below = np.searchsorted(lowered[order], others, side="left")
    above = np.empty(len(lowered))
    above[order] = np.cumsum(np.bincount(below, minlength=len(lowered) + 1)[::-1])[::-1][1:]
    pairs = len(lowered) * len(others)
    turn = np.empty(len(scores))
    turn[positive], turn[~positive] = above / pairs, -below / pairs
    return float(above.sum()) / pairs, turn
