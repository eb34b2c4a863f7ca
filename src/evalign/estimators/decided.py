"""MetricDecision: any scikit-learn classifier, deciding for the metric it is judged by."""

import warnings
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, ClassifierMixin, MetaEstimatorMixin, clone
from sklearn.model_selection import ShuffleSplit, StratifiedKFold, StratifiedShuffleSplit, check_cv
from sklearn.utils import _safe_indexing, assert_all_finite, get_tags, indexable
from sklearn.utils.metadata_routing import MetadataRouter, MethodMapping, process_routing
from sklearn.utils.metaestimators import available_if
from sklearn.utils.multiclass import check_classification_targets, type_of_target
from sklearn.utils.parallel import Parallel, delayed
from sklearn.utils.validation import (
    _check_method_params,
    _check_sample_weight,
    check_is_fitted,
    column_or_1d,
    has_fit_parameter,
)

from evalign import _checks as checks
from evalign import decision as decisions
from evalign import metrics
from evalign.confusion import Confusion
from evalign.decision.rule import Floats
from evalign.estimators.adapting import Adapting
from evalign.metrics import Average, Beta, MetricFunction

DECISIONS = ("plug_in", "tuned", "argmax")
FOLDS = 5
MARGIN = 1e-4  # expected gain below which `predict` stays with the largest probability


def _gives_probabilities(self: "MetricDecision") -> bool:
    return hasattr(getattr(self, "estimator_", self.estimator), "predict_proba")


class MetricDecision(Adapting, ClassifierMixin, MetaEstimatorMixin, BaseEstimator):
    """Wrap a classifier so that `predict` maximises a metric: thresholds for two classes, a gain matrix for more.

    `fit` gets probabilities of rows the classifier has not seen by cross-validation, learns a rule from them
    (`decision.plug_in` or `decision.tuned`), and fits the classifier on all rows. What
    `TunedThresholdClassifierCV` does for two classes, for any number of them, with constraints, and by default
    without spending labels on it.

    Parameters
    ----------
    estimator: a classifier with `predict_proba`.
    metric: a name in `metrics.METRICS`, or a function of a `Confusion`.
    average: None is "binary" for two classes (the second of `classes_` is positive), "macro" otherwise.
    beta: of "fbeta".
    decision: "plug_in" (label-free; it believes the probabilities), "tuned" (on the held-out labels, for classifiers
        with class weights, resampling or other reasons to be poorly calibrated), "argmax".
        Where a rule is not expected to gain 0.0001 over the largest probability, that decides.
    subject_to: constraints such as "recall >= 0.9", or a list; see `decision.plug_in`.
    folds: None is 5 stratified folds; an int, a splitter or a list of splits as in scikit-learn; a number between 0
        and 1 is the share of rows held out; "prefit" takes the fitted estimator as it is and all rows as held out.
    calibrate: True or "auto" rescales probabilities by a temperature first; see `decision.plug_in`.
    random_state: of the held-out share.
    n_jobs: folds fitted at a time.

    Attributes
    ----------
    estimator_, classes_, decision_ (the `decisions.Rule`), n_features_in_, feature_names_in_.

    >>> from sklearn.datasets import make_classification
    >>> from sklearn.linear_model import LogisticRegression
    >>> X, y = make_classification(600, weights=[0.9], flip_y=0.1, random_state=0)
    >>> model = MetricDecision(LogisticRegression(), "f1").fit(X, y)
    >>> bool(model.decision_.threshold < 0.5)
    True
    >>> careful = MetricDecision(LogisticRegression(), "recall", subject_to="precision >= 0.8").fit(X, y)
    >>> careful.decision_.feasible
    True
    """

    def __init__(
        self,
        estimator: Any,
        metric: str | MetricFunction = "f1",
        *,
        average: Average | None = None,
        beta: Beta | None = None,
        decision: str = "plug_in",
        subject_to: Any = None,
        folds: Any = None,
        calibrate: Any = False,
        random_state: Any = None,
        n_jobs: int | None = None,
    ) -> None:
        self.estimator = estimator
        self.metric = metric
        self.average = average
        self.beta = beta
        self.decision = decision
        self.subject_to = subject_to
        self.folds = folds
        self.calibrate = calibrate
        self.random_state = random_state
        self.n_jobs = n_jobs

    def fit(self, X: Any, y: Any, sample_weight: Any = None, **params: Any) -> "MetricDecision":
        """Learn the rule, then fit the classifier; `sample_weight` counts in both, `params` go to the classifier."""
        self._check_parameters()
        X, y = indexable(X, y)
        if np.asarray(y).dtype.kind == "f":
            assert_all_finite(y, input_name="y")
        check_classification_targets(y)
        if type_of_target(y).startswith(("multilabel", "multiclass-multioutput")):
            raise ValueError(
                f"y must hold one label a row, got {type_of_target(y)}; use decisions.plug_in(task='multilabel')"
            )
        y = column_or_1d(y, warn=True)
        weight = None if sample_weight is None else _check_sample_weight(sample_weight, X)
        fit_params = self._fit_params(weight, params)
        if isinstance(self.folds, str):
            check_is_fitted(self.estimator)
            self.estimator_ = self.estimator
        else:
            self.estimator_ = clone(self.estimator).fit(X, y, **fit_params)
        self.classes_: NDArray[Any] = np.asarray(self.estimator_.classes_)
        for name in ("n_features_in_", "feature_names_in_"):
            if hasattr(self.estimator_, name):
                setattr(self, name, getattr(self.estimator_, name))
        self.decision_ = self._learn_rule(X, y, weight, fit_params)
        return self

    def predict(self, X: Any) -> NDArray[Any]:
        """Labels that the rule decides."""
        check_is_fitted(self)
        return np.asarray(self.classes_[self.decision_.predict(self._decision_probabilities(X))])

    def predict_jointly(self, X: Any) -> NDArray[Any]:
        """Labels of all rows at once, by the plug-in rule of their own probabilities; see `EASTBlend`.

        Where there is evidence that class shares changed, and nothing else, the rule is that of `adapt(X)`.
        """
        p = self._decision_probabilities(X)
        return np.asarray(self.classes_[self._joint_rule(p, X).predict(p)])

    @available_if(_gives_probabilities)  # type: ignore[untyped-decorator]
    def predict_proba(self, X: Any) -> Floats:
        """The classifier's own probabilities."""
        check_is_fitted(self)
        return np.asarray(self.estimator_.predict_proba(X))

    def export_onnx(self, path: str | Path, X: Any) -> Path:
        """Write classifier and decision as one ONNX graph (`pip install evalign[onnx]`).

        `X` are a few rows that say what goes in; out come "probabilities" (n, C) and "label" (n,).
        """
        from evalign.estimators.onnx import export_decided

        check_is_fitted(self)
        return export_decided(self, Path(path), X)

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """The metric of `predict`, over all of `classes_`."""
        predicted, y = self.predict(X), column_or_1d(y)
        # Labels that were not there in `fit` come after those that were, so that class numbers stay.
        unseen = np.setdiff1d(y, self.classes_)
        known = [*self.classes_.tolist(), *unseen.tolist()]
        index = {label: k for k, label in enumerate(known)}
        decided, target = (torch.tensor([index[label] for label in labels.tolist()]) for labels in (predicted, y))
        weight = None if sample_weight is None else torch.as_tensor(np.asarray(sample_weight, dtype=np.float64))
        c = Confusion.hard(decided, target, max(2, len(known)), sample_weight=weight)
        average = self.average or ("binary" if len(self.classes_) <= 2 and not len(unseen) else "macro")
        return float(metrics.resolve(self.metric, average=average, beta=self.beta)(c))

    def get_metadata_routing(self) -> MetadataRouter:
        """The classifier's `fit` gets what it asks for."""
        mapping = MethodMapping().add(caller="fit", callee="fit")
        return MetadataRouter(owner=self).add_self_request(self).add(estimator=self.estimator, method_mapping=mapping)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        inner = get_tags(self.estimator)
        tags.input_tags.sparse = inner.input_tags.sparse
        tags.input_tags.allow_nan = inner.input_tags.allow_nan
        tags.input_tags.pairwise = inner.input_tags.pairwise
        return tags

    def _check_parameters(self) -> None:
        checks.check_choice("decision", self.decision, DECISIONS)
        if not hasattr(self.estimator, "predict_proba"):
            raise ValueError(
                f"estimator must have predict_proba, and {type(self.estimator).__name__} has none; "
                "wrap it in sklearn.calibration.CalibratedClassifierCV"
            )
        if isinstance(self.folds, str) and self.folds != "prefit":
            raise ValueError(f"folds must be None, a number, a splitter, splits or 'prefit', got {self.folds!r}")
        if self.decision == "argmax" and self.subject_to is not None:
            raise ValueError(
                "decision 'argmax' cannot meet constraints; use 'plug_in' or 'tuned', or leave out subject_to"
            )
        if self.decision != "plug_in" and self.calibrate is not False:
            raise ValueError(f"calibrate goes with decision 'plug_in', got {self.decision!r}; leave it out")

    def _fit_params(self, weight: Floats | None, params: dict[str, Any]) -> dict[str, Any]:
        """What the classifier's `fit` is given beside X and y."""
        from sklearn import get_config

        if get_config()["enable_metadata_routing"]:
            given = params if weight is None else {**params, "sample_weight": weight}
            return dict(process_routing(self, "fit", **given).estimator.fit)
        if weight is None:
            return params
        if has_fit_parameter(self.estimator, "sample_weight"):
            return {**params, "sample_weight": weight}
        warnings.warn(
            f"{type(self.estimator).__name__}.fit takes no sample_weight: the weights count in the decision rule only",
            UserWarning,
            stacklevel=3,
        )
        return params

    def _learn_rule(self, X: Any, y: NDArray[Any], weight: Floats | None, fit_params: dict[str, Any]) -> decisions.Rule:
        size = len(self.classes_)
        if self.decision == "argmax" or size < 2:
            return decisions.Rule("argmax", size)
        p, rows = self._held_out(X, y, fit_params)
        target = np.searchsorted(self.classes_, y[rows])
        if not np.isin(y[rows], self.classes_).all():
            raise ValueError(
                "y holds labels that the fitted estimator does not know; fit it anew, without folds='prefit'"
            )
        own = None if weight is None else weight[rows]
        self._keep_reference(p, target, own, lambda some: _safe_indexing(X, rows[some]))
        if self.decision == "plug_in" and self.calibrate is False:
            _warn_if_dishonest(p, target, own)
        return self._learned_rule(p, target, own)

    def _decision_probabilities(self, X: Any) -> Floats:
        check_is_fitted(self)
        return _probabilities(self.estimator_, X, self.classes_)

    def _plug_in(self, p: Floats) -> decisions.Rule:
        return decisions.plug_in(p, self.metric, average=self.average, beta=self.beta, subject_to=self.subject_to)

    def _learned_rule(self, p: Floats, target: NDArray[np.int64], weight: Floats | None) -> decisions.Rule:
        options: dict[str, Any] = {
            "average": self.average,
            "beta": self.beta,
            "subject_to": self.subject_to,
            "sample_weight": weight,
        }
        if self.decision == "tuned":
            return decisions.tuned(p, target, self.metric, **options)
        return decisions.plug_in(p, self.metric, target=target, calibrate=self.calibrate, margin=MARGIN, **options)

    def _held_out(self, X: Any, y: NDArray[Any], fit_params: dict[str, Any]) -> tuple[Floats, NDArray[np.int64]]:
        """Probabilities of rows that their model was not fitted on, and which rows these are."""
        everything = np.arange(len(y))
        if isinstance(self.folds, str):
            return _probabilities(self.estimator_, X, self.classes_), everything
        splits = self._splits(X, y)
        if not splits:  # no class has two rows: nothing can be held out
            return _probabilities(self.estimator_, X, self.classes_), everything
        parts = Parallel(n_jobs=self.n_jobs)(
            delayed(_fold)(clone(self.estimator), X, y, fit_params, train, test, self.classes_)
            for train, test in splits
        )
        return np.concatenate(parts), np.concatenate([everything[test] for _, test in splits])

    def _splits(self, X: Any, y: NDArray[Any]) -> list[tuple[Any, Any]]:
        counts = np.unique(y, return_counts=True)[1]
        if self.folds is None:
            folds = min(FOLDS, int(counts.max()))
            if folds < 2:
                return []
            with warnings.catch_warnings():
                # A class with fewer rows than folds is missing from some of them, which is as good as it gets.
                warnings.filterwarnings("ignore", "The least populated class", UserWarning)
                return list(StratifiedKFold(folds).split(np.zeros(len(y)), y))
        if isinstance(self.folds, Real) and not isinstance(self.folds, bool) and 0 < float(self.folds) < 1:
            kind = StratifiedShuffleSplit if counts.min() > 1 else ShuffleSplit
            return list(kind(1, test_size=float(self.folds), random_state=self.random_state).split(np.zeros(len(y)), y))
        return list(check_cv(self.folds, y, classifier=True).split(X, y))


def _warn_if_dishonest(p: Floats, target: NDArray[np.int64], weight: Floats | None) -> None:
    """The plug-in rule believes the probabilities: say so if they promise quite other class counts than there are."""
    w = np.ones(len(p)) if weight is None else weight
    expected, actual = w @ p, np.bincount(target, w, p.shape[1])
    surprise = np.abs(expected - actual) / np.sqrt(np.maximum((w**2) @ (p * (1 - p)), 1e-12))
    worst = int(np.where(np.maximum(expected, actual) > 1.5 * np.minimum(expected, actual), surprise, 0.0).argmax())
    if surprise[worst] > 6 and max(expected[worst], actual[worst]) > 1.5 * min(expected[worst], actual[worst]):
        warnings.warn(
            f"held-out probabilities add up to {expected[worst]:.4g} rows of class {worst}, and there are "
            f"{actual[worst]:.4g}: they are not calibrated (class weights or resampling?); use decision='tuned'",
            UserWarning,
            stacklevel=4,
        )


def _fold(
    estimator: Any, X: Any, y: NDArray[Any], fit_params: dict[str, Any], train: Any, test: Any, classes: NDArray[Any]
) -> Floats:
    """Probabilities of the rows `test` by a model of the rows `train`."""
    labels = _safe_indexing(y, train)
    weight = fit_params.get("sample_weight")
    seen = np.unique(labels if weight is None else labels[np.asarray(weight)[train] > 0])
    if len(seen) < 2:  # many classifiers refuse a single class; all it can say is known anyway
        certain = (classes == seen[0]).astype(np.float64) if len(seen) else np.full(len(classes), 1 / len(classes))
        return np.tile(certain, (len(y[test]), 1))
    params = _check_method_params(X, fit_params, indices=train)
    estimator.fit(_safe_indexing(X, train), labels, **params)
    return _probabilities(estimator, _safe_indexing(X, test), classes)


def _probabilities(estimator: Any, X: Any, classes: NDArray[Any]) -> Floats:
    """predict_proba with one column for each of `classes`; a class the estimator has not seen gets 0."""
    p = np.asarray(estimator.predict_proba(X), dtype=np.float64)
    if p.ndim != 2 or p.shape[1] != len(estimator.classes_):
        raise ValueError(
            f"predict_proba must give one column for each of {len(estimator.classes_)} classes, got {p.shape}"
        )
    if np.array_equal(estimator.classes_, classes):
        return p
    full = np.zeros((len(p), len(classes)))
    full[:, np.searchsorted(classes, estimator.classes_)] = p
    return full
