"""MetricDecision: a decision rule for a metric, around any scikit-learn classifier."""

import warnings
from dataclasses import dataclass, field
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, ClassifierMixin, MetaEstimatorMixin, clone
from sklearn.model_selection import ShuffleSplit, StratifiedKFold, StratifiedShuffleSplit, check_cv
from sklearn.utils import _safe_indexing, get_tags, indexable
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

from evalign import metrics
from evalign.confusion import Confusion
from evalign.decision.rule import Floats, Rule
from evalign.estimators.decision_mixin import Deciding
from evalign.metrics import MetricFunction
from evalign.tables.split import check_no_gaps, indicator, rarest_label

FOLDS = 5


def _gives_probabilities(self: "MetricDecision") -> bool:
    return hasattr(getattr(self, "estimator_", self.estimator), "predict_proba")


@dataclass(kw_only=True, eq=False, repr=False)
class MetricDecision(Deciding, ClassifierMixin, MetaEstimatorMixin, BaseEstimator):
    """Classifier whose `predict` maximises a metric, around any classifier with `predict_proba`.

    `fit` computes held-out probabilities by cross-validation, learns a decision rule from them, and fits the classifier
    on all rows. It generalises `TunedThresholdClassifierCV` to any number of classes or labels, with constraints,
    budgets and costs.

    Parameters
    ----------
    estimator: a classifier with `predict_proba`; for multilabel `y` (n, L) one that supports it, such as a forest.
    metric: a name in `metrics.METRICS`, a function of a `Confusion`, or "cost" with `costs`.
    average, beta, pos_label, decision, subject_to, confidence, costs: as in `DecisionParameters`.
    folds: None is 5 stratified folds, of shuffled rows from 100 rows on; an int (not shuffled), a splitter or a list
        of splits as in scikit-learn (groups: `list(GroupKFold().split(X, y, groups))`); a number between 0
        and 1 holds out this share of the rows and fits the classifier on the others only; "prefit" uses the fitted
        estimator and treats all rows as held out. A certificate is exact for the last two. With folds, the final
        classifier differs from those that were certified; on real tables constraints were met as often
        (docs/research/decisions.md).
    random_state: seed of the folds, or of the held-out share.
    n_jobs: number of folds fitted in parallel.

    Attributes
    ----------
    estimator_, classes_, decision_ (the `decision.Rule`), n_features_in_, feature_names_in_. There is no `save`, as
    loading an arbitrary classifier would execute code: save `decision_.to_json()` next to the classifier's file.

    >>> from sklearn.datasets import make_classification
    >>> from sklearn.linear_model import LogisticRegression
    >>> X, y = make_classification(1000, weights=[0.9], flip_y=0.1, random_state=0)
    >>> model = MetricDecision(LogisticRegression(), "f1").fit(X, y)
    >>> bool(model.decision_.threshold < 0.5)
    True
    >>> careful = MetricDecision(LogisticRegression(), "recall", subject_to="precision >= 0.8").fit(X, y)
    >>> careful.decision_.feasible
    True
    """

    estimator: Any = field(kw_only=False)
    metric: str | MetricFunction = field(default="f1", kw_only=False)
    folds: Any = None
    n_jobs: int | None = None

    def fit(self, X: Any, y: Any, sample_weight: Any = None, **params: Any) -> "MetricDecision":
        """Learn the rule and fit the classifier; both use `sample_weight`, and `params` go to the classifier."""
        self._check_parameters()
        self._forget()
        X, y = indexable(X, y)
        check_no_gaps(y)
        check_classification_targets(y)
        kind = type_of_target(y)
        if kind == "multiclass-multioutput":
            raise ValueError("y must hold one label per row, or 0/1 of shape (n, L), got multiclass outputs")
        self.multilabel_ = kind == "multilabel-indicator"
        names = getattr(y, "columns", None)
        y = indicator(y) if self.multilabel_ else column_or_1d(y, warn=True)
        if self.multilabel_ and (self.costs is not None or self.pos_label is not None):
            raise ValueError("costs and pos_label do not support multilabel y; leave them out")
        weight = None if sample_weight is None else _check_sample_weight(sample_weight, X)
        fit_params = self._fit_params(weight, params)
        splits = None if isinstance(self.folds, str) else self._splits(X, y)
        if splits is None:
            check_is_fitted(self.estimator)
        if self.multilabel_:
            self.classes_ = np.arange(y.shape[1]) if names is None else np.asarray(names)
        else:
            self._set_classes(np.unique(y) if splits is not None else self.estimator.classes_)
        self._check_goal()
        if splits is not None and self.confidence is not None:
            _check_held_out_once(len(y), splits)
        if splits is None:
            self.estimator_ = self.estimator
        elif _is_share(self.folds) and splits:  # held-out rows stay out: the certified model is the one used
            train = splits[0][0]
            own = _check_method_params(X, fit_params, indices=train)
            self.estimator_ = clone(self.estimator).fit(_safe_indexing(X, train), _safe_indexing(y, train), **own)
        else:
            self.estimator_ = clone(self.estimator).fit(X, y, **fit_params)
        if not self.multilabel_:
            self._set_classes(self.estimator_.classes_)
        for name in ("n_features_in_", "feature_names_in_"):
            if hasattr(self.estimator_, name):
                setattr(self, name, getattr(self.estimator_, name))
        self.decision_ = self._learn_rule(X, y, weight, fit_params, splits)
        return self

    def predict(self, X: Any) -> NDArray[Any]:
        """Predict labels by the rule; a rejected row gets -1, or None if labels are text or include -1."""
        return self._labels(self._decided(self._decision_probabilities(X), X))

    def predict_jointly(self, X: Any) -> NDArray[Any]:
        """Labels of all rows at once, by the plug-in rule of their own calibrated probabilities; see `EASTBlend`.

        If there is evidence that class shares changed, and nothing else, the rule is that of `adapt(X)`. Rules with
        constraints that need labels, and those of costs, decide as in `predict`.
        """
        p = self._decision_probabilities(X)
        if self.costs is not None:
            return self.predict(X)
        return self._labels(self._joint_rule(p, X).predict(p))

    @available_if(_gives_probabilities)  # type: ignore[untyped-decorator]
    def predict_proba(self, X: Any) -> Floats:
        """The classifier's own probabilities; (n, L) if multilabel."""
        check_is_fitted(self)
        if self.multilabel_:
            return _probabilities(self.estimator_, X, self.classes_, multilabel=True)
        return np.asarray(self.estimator_.predict_proba(X))

    def export_onnx(self, path: str | Path, X: Any) -> Path:
        """Write classifier and decision as one ONNX graph (`pip install evalign[onnx]`).

        `X` are a few rows that define the inputs; the outputs are "probabilities" (n, C) and "label" (n,).
        """
        from evalign.estimators.onnx import export_decided

        check_is_fitted(self)
        return export_decided(self, Path(path), X)

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """The metric of `predict`, over all of `classes_`; for "cost", minus the mean cost."""
        check_is_fitted(self)
        unseen = np.setdiff1d([] if self.multilabel_ else column_or_1d(y), self.classes_)
        if not len(unseen):
            return self.score_labels(self.predict(X), y, sample_weight, X)
        if self.costs is not None:
            raise ValueError(f"y holds the label {unseen[0]!r}, for which there are no costs")
        # Labels that `fit` has not seen come last, so that class numbers stay the same.
        known = [*self._decision_classes().tolist(), *unseen.tolist()]
        index = {label: k for k, label in enumerate(known)}
        predicted, target = (torch.tensor([index[x] for x in np.asarray(xs).tolist()]) for xs in (self.predict(X), y))
        weight = None if sample_weight is None else torch.as_tensor(sample_weight, dtype=torch.float64)
        c = Confusion.hard(predicted, target, len(known), sample_weight=weight)
        return float(metrics.resolve(self.metric, average=self.average or "macro", beta=self._beta)(c))

    def get_metadata_routing(self) -> MetadataRouter:
        """Route metadata to the `fit` of the classifier."""
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
        self._check_decision()
        if not hasattr(self.estimator, "predict_proba"):
            raise ValueError(
                f"estimator must have predict_proba, and {type(self.estimator).__name__} has none; "
                "wrap it in sklearn.calibration.CalibratedClassifierCV"
            )
        folds = self.folds
        count = isinstance(folds, Integral) and int(folds) >= 2
        if isinstance(folds, (str, Real)) and not (folds == "prefit" or count or _is_share(folds)):
            raise ValueError(
                "folds must be None, a number of at least 2, a share between 0 and 1, a splitter, a list of splits or "
                f"'prefit', got {folds!r}"
            )

    def _set_classes(self, classes: Any) -> None:
        self.classes_ = np.asarray(classes)
        if len(self.classes_) < 2:
            raise ValueError(f"y must hold at least two classes, got only {self.classes_.tolist()} (one class)")

    def _fit_params(self, weight: Floats | None, params: dict[str, Any]) -> dict[str, Any]:
        """Keyword arguments of the classifier's `fit`."""
        from sklearn import get_config

        if get_config()["enable_metadata_routing"]:
            given = params if weight is None else {**params, "sample_weight": weight}
            return dict(process_routing(self, "fit", **given).estimator.fit)
        if weight is None:
            return params
        if has_fit_parameter(self.estimator, "sample_weight"):
            return {**params, "sample_weight": weight}
        warnings.warn(
            f"{type(self.estimator).__name__}.fit takes no sample_weight: the weights affect only the decision rule",
            UserWarning,
            stacklevel=3,
        )
        return params

    def _learn_rule(
        self, X: Any, y: NDArray[Any], weight: Floats | None, fit_params: dict[str, Any], splits: Any
    ) -> Rule:
        p, rows = self._held_out(X, y, fit_params, splits)
        target = y[rows]
        if not self.multilabel_:
            target = pd.Index(self._decision_classes()).get_indexer(target)
            known = target >= 0
            if _is_share(self.folds):  # the only row of a class may be held out
                p, rows, target = p[known], rows[known], target[known]
            elif not known.all():
                raise ValueError(
                    "y holds labels that the fitted estimator has not seen; fit it again, without folds='prefit'"
                )
            p = p[:, self.class_order]
        own = None if weight is None else weight[rows]
        if self.decision != "argmax":
            self._keep_reference(p, target, own, lambda some: _safe_indexing(X, rows[some]))
        if self.decision == "plug_in" and not self.multilabel_:
            _warn_if_uncalibrated(p, target, own)
        per_row = self.costs is not None and self._costs().per_row
        return self._learned_rule(p, target, own, self._costs().rows(_safe_indexing(X, rows)) if per_row else None)

    def _decision_probabilities(self, X: Any) -> Floats:
        check_is_fitted(self)
        p = _probabilities(self.estimator_, X, self.classes_, multilabel=self.multilabel_)
        return p if self.multilabel_ else p[:, self.class_order]

    def _held_out(
        self, X: Any, y: NDArray[Any], fit_params: dict[str, Any], splits: Any
    ) -> tuple[Floats, NDArray[np.int64]]:
        """Probabilities of rows that their model was not fitted on, and which rows these are."""
        everything = np.arange(len(y))
        if not splits:  # already fitted, or no class has two rows
            return _probabilities(self.estimator_, X, self.classes_, multilabel=self.multilabel_), everything
        if _is_share(self.folds):
            held_out = everything[splits[0][1]]
            rest = _safe_indexing(X, held_out)
            return _probabilities(self.estimator_, rest, self.classes_, multilabel=self.multilabel_), held_out
        parts = Parallel(n_jobs=self.n_jobs)(
            delayed(_fold)(clone(self.estimator), X, y, fit_params, train, test, self.classes_, self.multilabel_)
            for train, test in splits
        )
        return np.concatenate(parts), np.concatenate([everything[test] for _, test in splits])

    def _splits(self, X: Any, y: NDArray[Any]) -> list[tuple[Any, Any]]:
        if self.folds is not None and not _is_share(self.folds):
            splits = list(check_cv(self.folds, y, classifier=True).split(X, y))
            if not splits:
                raise ValueError("folds must hold at least one split into training and held-out rows, got none")
            return splits
        codes = rarest_label(y) if self.multilabel_ else y
        rows, counts = np.zeros(len(y)), np.unique(codes, return_counts=True)[1]
        if self.folds is not None:
            stratified = not self.multilabel_ and counts.min() > 1
            kind = StratifiedShuffleSplit if stratified else ShuffleSplit
            return list(kind(1, test_size=float(self.folds), random_state=self.random_state).split(rows, y))
        folds = min(FOLDS, int(counts.max(initial=0)))
        if folds < 2:
            return []
        with warnings.catch_warnings():
            # A class with fewer rows than folds is missing from some of them.
            warnings.filterwarnings("ignore", "The least populated class", UserWarning)
            # Many tables are sorted, and contiguous folds would hold out values that no other row has.
            # A handful of rows stays in order, for which scikit-learn's check holds that weights equal copies.
            shuffle = len(y) >= 100
            seed = 0 if self.random_state is None else self.random_state
            splitter = StratifiedKFold(folds, shuffle=shuffle, random_state=seed if shuffle else None)
            return list(splitter.split(rows, codes))


def _warn_if_uncalibrated(p: Floats, target: NDArray[np.int64], weight: Floats | None) -> None:
    """Warn if held-out probabilities imply class counts far from the observed ones."""
    w = np.ones(len(p)) if weight is None else weight
    expected, actual = w @ p, np.bincount(target, w, p.shape[1])
    surprise = np.abs(expected - actual) / np.sqrt(np.maximum((w**2) @ (p * (1 - p)), 1e-12))
    worst = int(np.where(np.maximum(expected, actual) > 1.5 * np.minimum(expected, actual), surprise, 0.0).argmax())
    if surprise[worst] > 6 and max(expected[worst], actual[worst]) > 1.5 * min(expected[worst], actual[worst]):
        warnings.warn(
            f"held-out probabilities add up to {expected[worst]:.4g} rows of class {worst}, but there are "
            f"{actual[worst]:.4g}: they are not calibrated (class weights or resampling?); use decision='auto'",
            UserWarning,
            stacklevel=4,
        )


def _check_held_out_once(rows: int, splits: list[tuple[Any, Any]]) -> None:
    """Raise if a certificate would count a row twice, or one that its model was fitted on."""
    if not splits:
        raise ValueError("certified constraints need rows that are held out, but no class has two rows; add rows")
    everything = np.arange(rows)
    if np.bincount(np.concatenate([everything[test] for _, test in splits])).max() > 1:
        raise ValueError("certified constraints count every row once, but folds hold some out repeatedly; use 5 folds")
    if any(np.isin(everything[test], everything[train]).any() for train, test in splits):
        raise ValueError("certified constraints need held-out rows, but folds hold out rows of training; use 5 folds")


def _is_share(folds: Any) -> bool:
    return isinstance(folds, Real) and not isinstance(folds, bool) and 0 < float(folds) < 1


def _fold(
    estimator: Any, X: Any, y: NDArray[Any], fit_params: dict[str, Any], train: Any, test: Any, classes: NDArray[Any],
    multilabel: bool,
) -> Floats:  # fmt: skip
    """Probabilities of the rows `test` by a model of the rows `train`."""
    labels = _safe_indexing(y, train)
    params = _check_method_params(X, fit_params, indices=train)
    if multilabel:
        fitted = estimator.fit(_safe_indexing(X, train), labels, **params)
        return _probabilities(fitted, _safe_indexing(X, test), classes, multilabel=True)
    weight = fit_params.get("sample_weight")
    seen = np.unique(labels if weight is None else labels[np.asarray(weight)[train] > 0])
    if len(seen) < 2:  # many classifiers refuse a single class, and its prediction is known
        certain = (classes == seen[0]).astype(np.float64) if len(seen) else np.full(len(classes), 1 / len(classes))
        return np.tile(certain, (len(y[test]), 1))
    estimator.fit(_safe_indexing(X, train), labels, **params)
    return _probabilities(estimator, _safe_indexing(X, test), classes)


def _probabilities(estimator: Any, X: Any, classes: NDArray[Any], *, multilabel: bool = False) -> Floats:
    """predict_proba with one column for each of `classes`; a class the estimator has not seen gets 0."""
    given = estimator.predict_proba(X)
    if multilabel:
        # One array (n, 2) a label (forests, neighbours) or one (n, L) (networks, one-vs-rest).
        if isinstance(given, list):
            seen = [np.asarray(own).tolist() for own in estimator.classes_]
            given = [q[:, own.index(1)] if 1 in own else np.zeros(len(q)) for q, own in zip(given, seen, strict=True)]
            given = np.stack(given, axis=1)
        p = np.asarray(given, dtype=np.float64)
        if p.ndim != 2 or p.shape[1] != len(classes):
            raise ValueError(f"predict_proba must give one column for each of {len(classes)} labels, got {p.shape}")
        return p
    p = np.asarray(given, dtype=np.float64)
    if p.ndim != 2 or p.shape[1] != len(estimator.classes_):
        raise ValueError(
            f"predict_proba must give one column for each of {len(estimator.classes_)} classes, got {p.shape}"
        )
    if np.array_equal(estimator.classes_, classes):
        return p
    full = np.zeros((len(p), len(classes)))
    full[:, pd.Index(classes).get_indexer(estimator.classes_)] = p
    return full
