"""MetricClassifier: what our classifiers share, whatever they train: labels, weights, decision and score."""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils.class_weight import compute_sample_weight
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import _check_sample_weight, check_array, check_consistent_length, column_or_1d

from evalign import _checks as checks
from evalign import decision, metrics
from evalign.confusion import Confusion
from evalign.decision import Rule
from evalign.metrics import Average, MetricFunction

BetaByLabel = float | Sequence[float] | Mapping[Any, float] | None
Decision = Literal["plug_in", "tuned", "argmax"]
Event = TypeVar("Event")


class MetricClassifier(ClassifierMixin, BaseEstimator):
    """Base of classifiers for a metric; one that derives from it has these options and fits `predict_proba`.

    Inside, classes are 0 to C - 1 and the positive one of two is 1, whatever `pos_label` is.
    """

    metric: str | MetricFunction
    average: Average | None
    beta: BetaByLabel
    pos_label: Any
    decision: Decision
    subject_to: str | Sequence[str] | None
    validation_fraction: float
    class_weight: Any
    classes_: NDArray[Any]
    decision_: Rule

    @abstractmethod
    def predict_proba(self, X: Any) -> NDArray[np.float64]:
        """Probabilities of the classes, in the order of `classes_`."""

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        tags.input_tags.string = True
        return tags

    def predict(self, X: Any) -> NDArray[Any]:
        """Labels by the learned decision rule."""
        p = self.predict_proba(X)[:, self._internal_order]
        return self.classes_[self._internal_order][self.decision_.predict(p)]

    def predict_together(self, X: Any) -> NDArray[Any]:
        """Labels of rows that are decided together: by the plug-in rule of their own probabilities, without a label.

        The rule that `fit` learned expects of new rows what it saw of those held out, which say little about a class
        that has five of them. Which of these very rows are likely to be of that class, their probabilities tell. What
        a row gets depends on the rows beside it, so give all of them at once (docs/research/recipes.md).
        """
        p = self.predict_proba(X)[:, self._internal_order]
        return self.classes_[self._internal_order][self._rule_of(p).predict(p)]

    def score(self, X: Any, y: ArrayLike, sample_weight: ArrayLike | None = None) -> float:
        """The metric the classifier was trained on."""
        return self._score_of(self.predict(X), y, sample_weight)

    def _score_of(self, predicted: NDArray[Any], y: ArrayLike, sample_weight: ArrayLike | None = None) -> float:
        order = {label: i for i, label in enumerate(self.classes_[self._internal_order].tolist())}
        truth = column_or_1d(y)
        if unknown := set(np.unique(truth).tolist()) - set(order):
            raise ValueError(f"y must hold labels seen in training, got {sorted(map(str, unknown))[:5]}")
        codes = [torch.tensor([order[label] for label in labels.tolist()]) for labels in (predicted, truth)]
        weight = None if sample_weight is None else torch.as_tensor(np.asarray(sample_weight, dtype=np.float64))
        confusion = Confusion.hard(codes[0], codes[1], len(order), sample_weight=weight)
        return float(metrics.resolve(self.metric, average=self._average, beta=self._beta)(confusion))

    # -- the parts of fit ---------------------------------------------------------------------------------------

    def _check_metric_and_decision(self) -> None:
        if not callable(self.metric):
            checks.check_choice("metric", self.metric, metrics.METRICS)
        checks.check_choice("decision", self.decision, ("plug_in", "tuned", "argmax"))
        checks.check_number(
            "validation_fraction", self.validation_fraction, low=0.0, high=1.0, open_low=True, open_high=True
        )
        if self.subject_to is not None and self.decision == "argmax":
            raise ValueError("subject_to needs decision='plug_in' or 'tuned', got decision 'argmax'")

    def _labels_and_weights(
        self, X: Any, y: ArrayLike, sample_weight: ArrayLike | None
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        if y is None:
            name = type(self).__name__
            raise ValueError(f"This {name} estimator requires y to be passed, but the target y is None.")
        labels: NDArray[Any] = column_or_1d(y, warn=True)
        check_array(labels, ensure_2d=False, dtype=None, input_name="y")
        check_classification_targets(labels)
        check_consistent_length(X, labels)
        self.classes_, codes = np.unique(labels, return_inverse=True)
        weight = np.asarray(_check_sample_weight(sample_weight, X, dtype=np.float64, ensure_non_negative=True))
        if self.class_weight is not None:
            weight = weight * compute_sample_weight(self.class_weight, labels)
        return self._internal_order[codes].astype(np.int64), weight

    def _check_classes(self, codes: NDArray[np.int64]) -> None:
        seen = len(np.unique(codes))
        if seen < 2:
            raise ValueError(f"y must hold at least two classes with a positive weight, got {seen} class (one class)")
        if self.pos_label is not None and len(self.classes_) != 2:
            raise ValueError(f"pos_label goes with two classes, got {len(self.classes_)}; leave it out")

    def _learn_decision(self, p: NDArray[np.float64], codes: NDArray[np.int64], weight: NDArray[np.float64]) -> Rule:
        """The rule for probabilities of held-out rows."""
        if self.decision == "plug_in":
            return self._rule_of(p, weight)
        if self.decision == "tuned":
            options: dict[str, Any] = {"average": self._average, "beta": self._beta, "sample_weight": weight}
            return decision.tuned(p, codes, self.metric, subject_to=self.subject_to, **options)
        return Rule("argmax", len(self.classes_))

    def _rule_of(self, p: NDArray[np.float64], weight: NDArray[np.float64] | None = None) -> Rule:
        """The plug-in rule of probabilities, classes inside."""
        # A rule that promises less than one row's worth over argmax is not worth leaving it.
        return decision.plug_in(
            p, self.metric, average=self._average, beta=self._beta, sample_weight=weight, subject_to=self.subject_to,
            margin=1 / len(p),
        )  # fmt: skip

    # -- what follows from the options --------------------------------------------------------------------------

    @property
    def _internal_order(self) -> NDArray[np.int64]:
        """Column of each class inside: the positive one of two is always the second. Its own inverse."""
        count = len(self.classes_)
        if self.pos_label is None or count != 2:
            return np.arange(count)
        matches = np.flatnonzero(self.classes_ == self.pos_label)
        if not len(matches):
            raise ValueError(f"pos_label must be one of {self.classes_.tolist()}, got {self.pos_label!r}")
        return np.arange(2) if matches[0] == 1 else np.array([1, 0])

    @property
    def _average(self) -> Average:
        return self.average or ("binary" if len(self.classes_) == 2 else "macro")

    @property
    def _beta(self) -> float | list[float] | None:
        if self.beta is None or isinstance(self.beta, (int, float)):
            return self.beta
        if not isinstance(self.beta, Mapping):
            return [float(b) for b in np.asarray(self.beta, dtype=float)[self._internal_order]]
        by_name = {str(label): label for label in self.classes_.tolist()}
        for label in self.beta:
            checks.check_choice("label of beta", str(label), by_name)
        given = {str(label): float(value) for label, value in self.beta.items()}
        return [given.get(str(label), 1.0) for label in self.classes_[self._internal_order].tolist()]

    @property
    def _metric_name(self) -> str:
        return self.metric if isinstance(self.metric, str) else getattr(self.metric, "__name__", "metric")


def both(first: Callable[[Event], None], second: Callable[[Event], None] | None) -> Callable[[Event], None]:
    """One call for two listeners."""

    def call(event: Event) -> None:
        first(event)
        if second is not None:
            second(event)

    return call
