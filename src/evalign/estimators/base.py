"""The `fit` template of every classifier: validate, divide into folds, cross-fit, keep held-out predictions, decide."""

import os
from abc import abstractmethod
from contextlib import nullcontext
from dataclasses import dataclass, field
from numbers import Integral
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, ClassifierMixin, clone
from sklearn.utils import _safe_indexing, check_random_state
from sklearn.utils.class_weight import compute_sample_weight
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import (
    _check_sample_weight,
    check_consistent_length,
    check_is_fitted,
    column_or_1d,
    validate_data,
)
from threadpoolctl import threadpool_limits

from evalign import checks, decision, metrics
from evalign.decision import Rule
from evalign.decision.costs import cost_metric
from evalign.estimators.decision_mixin import Deciding
from evalign.estimators.explain import EXPLAINED, Explaining
from evalign.estimators.planning import few_threads, loud
from evalign.metrics import MetricFunction
from evalign.storage import container
from evalign.tables.encode import as_table
from evalign.tables.split import (
    Codes,
    Floats,
    HeldOutPredictions,
    TrainingRows,
    check_no_gaps,
    distinct_rows,
    fold_rows,
    indicator,
    is_multilabel,
    rarest_label,
    scaled_weights,
)
from evalign.training.loop import OnEpoch

Arrays = dict[str, torch.Tensor]


@dataclass(kw_only=True, eq=False, repr=False)
class MetricClassifier(Deciding, Explaining, ClassifierMixin, BaseEstimator):
    """Base of classifiers for a metric: a subclass trains on folds (`_cross_fit`) and predicts (`_probabilities`).

    Decision rules number the classes 0 to C - 1; of two classes the positive one is 1, whatever `pos_label` is.

    Parameters
    ----------
    metric: a name in `metrics.METRICS`, or a function of a `Confusion`.
        With metric "cost" the models train on the mean costs of each pair of classes.
    average, beta, pos_label, decision, subject_to, confidence, costs, random_state: as in `DecisionParameters`.
    folds: number of models, each trained on the rows of the other folds. Predictions are the mean of their
        probabilities; the decision is learned from held-out predictions. 1 is a single hold-out.
    validation_fraction: share of every class that a single hold-out sets aside.
    class_weight: None, "balanced" or a mapping, as in scikit-learn.
    device: "auto", "cpu", "cuda", ...: where networks run; everything else runs on the CPU.
    n_jobs: number of cores for `fit`; -1 is all.
    verbose: 1 shows progress.

    For multilabel y of 0/1 (n, L) there is a model per label, on the same folds, and thresholds are chosen jointly. The
    columns of a data frame name the labels: "recall['spam'] >= 0.9".
    """

    FORMAT: ClassVar[str]  # names the kind of a saved model

    metric: str | MetricFunction = field(default="f1", kw_only=False)
    folds: int | Literal["auto"] = 5
    validation_fraction: float = 0.2
    class_weight: Any = None
    device: str = "auto"
    n_jobs: int | None = -1
    verbose: int = 0

    # -- what a subclass implements ------------------------------------------------------------------------------------

    @abstractmethod
    def _check_options(self) -> None:
        """Raise for invalid options, before any work."""

    @abstractmethod
    def _cross_fit(self, data: TrainingRows, on_epoch: OnEpoch | None) -> Floats:
        """Train a model per fold; return predictions (n, C) of the rows it held out, fold after fold."""

    @abstractmethod
    def _probabilities(self, X: Any, fold: int | None = None) -> Floats:
        """Probabilities (n, C) with classes in the order of decision rules: mean of all fold models, or one fold's."""

    def _content(self) -> tuple[Arrays, dict[str, Any]]:
        """The learned state of a subclass: arrays, and the rest as JSON types."""
        raise NotImplementedError(f"{type(self).__name__} cannot be saved")

    def _set_content(self, arrays: Arrays, fitted: dict[str, Any]) -> None:
        """Restore what `_content` returned; nothing in it is executed."""
        raise NotImplementedError(f"{type(self).__name__} cannot be loaded")

    # -- scikit-learn's interface -------------------------------------------------------------------------------

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        tags.input_tags.string = True
        tags.input_tags.sparse = True
        tags.classifier_tags.multi_label = True
        return tags

    def fit(
        self, X: Any, y: ArrayLike, sample_weight: ArrayLike | None = None, *, on_epoch: OnEpoch | None = None
    ) -> Self:
        """Cross-fit on folds, then learn the decision from the held-out predictions.

        `on_epoch` is called with every `Epoch` (of trees: every round). Ctrl-C, or an `on_epoch` that raises
        KeyboardInterrupt, ends training and keeps the best so far.
        """
        self._check_options()  # before the table is read
        data = self._prepare(X, y, sample_weight)
        with nullcontext() if self.n_jobs == -1 else few_threads(self.cores):
            self.fit_prepared(data, on_epoch)
        held = self.held_out_predictions_
        with threadpool_limits(1):  # small products, which more threads would slow down
            self.learn_decision(held if self.confidence is None else held.counted())
        rows = self.held_out_predictions_.rows
        places = np.sort(np.random.default_rng(0).permutation(len(rows))[:EXPLAINED])
        self._explained_rows = places, _safe_indexing(data.X, rows[places])
        self._keep_reference(
            held.probabilities, held.labels, held.weight, lambda some: _safe_indexing(data.X, held.rows[some])
        )
        return self

    def fit_prepared(self, data: TrainingRows, on_epoch: OnEpoch | None = None) -> Self:
        """`fit` on validated and divided rows, without learning a decision rule (argmax is used)."""
        self._check_options()
        for name, value in data.fitted.items():
            setattr(self, name, value)
        self.history_: list[dict[str, Any]] = []
        self.temperature_: float | None = None
        fit = self._cross_fit if data.labels is None else self._fit_labels
        self.held_out_predictions_ = data.predictions(fit(data, on_epoch))
        self.decision_ = Rule("argmax", len(self.classes_))
        return self

    def _fit_labels(self, data: TrainingRows, on_epoch: OnEpoch | None) -> Floats:
        """Cross-fit a model per label; return their probabilities (n, L), the share of a label with a single class."""
        assert data.labels is not None
        self.label_models_: list[Self | float] = []
        parts = []
        for k in range(len(self.classes_)):
            own = data.of_label(k)
            if own is None:
                share = float(data.weight @ data.labels[:, k] / data.weight.sum())
                self.label_models_.append(share)
                parts.append(np.full(len(data.held_out), share))
                continue
            model = self._label_model(k).fit_prepared(own, on_epoch)
            parts.append(model.held_out_predictions_.probabilities[:, 1])
            del model.held_out_predictions_
            self.label_models_.append(model)
        return np.stack(parts, axis=1)

    def _label_model(self, k: int) -> Self:
        """Unfitted model of label k, with the binary form of the metric; a metric function affects only decisions."""
        beta = self._beta[k] if isinstance(self._beta, list) else self._beta
        metric = self.metric if isinstance(self.metric, str) else "f1"
        model: Self = clone(self).set_params(metric=metric, average=None, beta=beta, subject_to=None, confidence=None)
        return model

    def _mean_probabilities(self, X: Any, fold: int | None = None) -> Floats:
        """`_probabilities`, or those of all labels (n, L)."""
        if not self.multilabel_:
            return self._probabilities(X, fold)
        parts = [
            np.full(len(X), model) if isinstance(model, float) else model._probabilities(X, fold)[:, 1]
            for model in self.label_models_
        ]
        return np.stack(parts, axis=1)

    def _listener(self, on_epoch: OnEpoch | None) -> OnEpoch:
        """`on_epoch`, and with `verbose` a line for every step of training."""
        return loud(on_epoch, self.metric_name) if self.verbose else on_epoch or (lambda epoch: None)

    def learn_decision(self, held_out: HeldOutPredictions) -> Self:
        """Learn `decision_` from probabilities of rows that were held out of training."""
        self.held_out_predictions_ = held_out
        self.decision_ = self._rule(held_out)
        self._keep_reference(held_out.probabilities, held_out.labels, held_out.weight)
        return self

    def predict_proba(self, X: Any) -> Floats:
        """Probabilities (n, C) in the order of `classes_`; if multilabel, those of the labels (n, L)."""
        check_is_fitted(self, "decision_")
        validate_data(self, X := as_table(X), skip_check_array=True, reset=False)
        return np.ascontiguousarray(self._mean_probabilities(X)[:, self.class_order])

    def predict_log_proba(self, X: Any) -> Floats:
        """Logarithm of `predict_proba`."""
        with np.errstate(divide="ignore"):
            return np.log(self.predict_proba(X))

    def decision_function(self, X: Any) -> Floats:
        """Scores (n, C) whose largest is the prediction; for two classes (n,) and labels (n, L), the sign decides."""
        p = self.predict_proba(X)[:, self.class_order]
        if self.multilabel_:
            margin: Floats = self.decision_.calibrate(p) - np.asarray(self.decision_.thresholds)
            return margin
        scores = self.decision_.scores(p)[:, self.class_order]
        return scores[:, 1] - scores[:, 0] if scores.shape[1] == 2 else scores

    def predict(self, X: Any) -> NDArray[Any]:
        """Predict labels with the learned decision rule."""
        return self.decide(self.predict_proba(X), X=X)

    def predict_jointly(self, X: Any) -> NDArray[Any]:
        """Labels of all rows at once, by the plug-in rule of these rows' probabilities.

        Five held-out rows of a class say little about its threshold, but the probabilities of new rows show which are
        likely to be of that class. A row's label then depends on the other rows of the call, so pass all rows at once.
        If there is evidence that class shares changed, and nothing else, the rule is that of `adapt(X)`.
        """
        return self.decide(self.predict_proba(X), jointly=True, X=X)

    def decide(self, p: Floats, *, jointly: bool = False, X: Any = None) -> NDArray[Any]:
        """Labels for probabilities in the order of `classes_`, by `decision_` or, jointly, by the rows' own rule.

        `X` is needed if its columns hold costs, and for a joint decision, to distinguish a change of class shares from
        other changes.
        """
        p = p[:, self.class_order]
        rule = self._joint_rule(p, X) if jointly and self.costs is None else self.decision_
        return self._labels(self._decided(p, X, rule))

    def _decision_probabilities(self, X: Any) -> Floats:
        return self.predict_proba(X)[:, self.class_order]

    def _joint_plug_in(self, p: Floats) -> Rule:
        # Constraints are never checked on probabilities alone: use the rule that met them on held-out labels.
        if self.subject_to is not None:
            return self.decision_
        return super()._joint_plug_in(p) if self.decision == "auto" else self._plug_in(p)

    def score(self, X: Any, y: ArrayLike, sample_weight: ArrayLike | None = None) -> float:
        """The metric the classifier was trained on; for "cost", minus the mean cost."""
        return self.score_labels(self.predict(X), y, sample_weight, X)

    # -- files --------------------------------------------------------------------------------------------------

    def save(self, path: str | Path) -> Path:
        """Save to one file: arrays as safetensors, the rest as JSON in its header; see `evalign.storage.container`."""
        check_is_fitted(self, "decision_")
        return container.write(Path(path), self.FORMAT, *self.content())

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Load a file that `save` wrote; nothing in it is executed."""
        return container.load(Path(path), cls.FORMAT, cls.from_content)

    def content(self) -> tuple[Arrays, dict[str, Any]]:
        """The fitted model as arrays and JSON."""
        arrays, own = self._content() if not self.multilabel_ else self._label_content()
        reference, view = self._reference_content()
        arrays |= {name: torch.from_numpy(np.ascontiguousarray(part)) for name, part in reference.items()}
        return arrays, {
            **view,
            "params": container.saved_params(self),
            "classes": container.classes_to_json(self.classes_),
            "n_features_in": self.n_features_in_,
            "feature_names_in": list(self.feature_names_in_) if hasattr(self, "feature_names_in_") else None,
            "decision": self.decision_.to_json(),
            "history": self.history_,
            "temperature": self.temperature_,
            "cost_matrix": getattr(self, "cost_matrix_", None),
            **own,
        }

    @classmethod
    def from_content(cls, arrays: Arrays, fitted: dict[str, Any]) -> Self:
        """The model that `content` was taken from, with a sample of the held-out predictions for `adapt`."""
        params: dict[str, Any] = container.loaded_params(fitted["params"])
        if "hidden" in params:
            params["hidden"] = tuple(params["hidden"])
        model = cls(params.pop("metric"), **params)
        model.classes_ = np.array(fitted["classes"]["values"], dtype=fitted["classes"]["dtype"])
        model.n_features_in_ = fitted["n_features_in"]
        if fitted["feature_names_in"] is not None:
            model.feature_names_in_ = np.array(fitted["feature_names_in"], dtype=object)
        model.decision_ = Rule.from_json(fitted["decision"])
        # JSON has only lists; `watched` was a tuple.
        model.history_ = [{**row, "watched": tuple(row.get("watched", ()))} for row in fitted["history"]]
        model.temperature_ = fitted["temperature"]
        if fitted["cost_matrix"] is not None:
            model.cost_matrix_ = np.array(fitted["cost_matrix"])
        model._set_reference(
            {name: part.numpy() for name, part in arrays.items() if name.startswith("reference.")}, fitted
        )
        own = {name: part for name, part in arrays.items() if not name.startswith("reference.")}
        if "labels" in fitted:
            model.multilabel_ = True
            found = container.unpacked(
                {f"label{k}": type(model) for k in range(len(model.classes_))}, own, fitted["labels"]
            )
            model.label_models_ = [found.get(f"label{k}", share) for k, share in enumerate(fitted["label_shares"])]
        else:
            model._set_content(own, fitted)
        return model

    def _label_content(self) -> tuple[Arrays, dict[str, Any]]:
        models = {f"label{k}": model for k, model in enumerate(self.label_models_) if not isinstance(model, float)}
        arrays, labels = container.packed(models)
        shares = [model if isinstance(model, float) else 0.0 for model in self.label_models_]
        return arrays, {"labels": labels, "label_shares": shares}

    def to(self, device: str) -> Self:
        """Predict on another device; models without a network ignore it."""
        self.device = device
        for model in getattr(self, "label_models_", []):
            if not isinstance(model, float):
                model.to(device)
        return self

    # -- the parts of fit ---------------------------------------------------------------------------------------

    def _prepare(self, X: Any, y: ArrayLike, sample_weight: ArrayLike | None) -> TrainingRows:
        X = as_table(X)
        self._forget()
        validate_data(self, X, skip_check_array=True)
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        codes, labels, weight = self._labels_and_weights(X, y, sample_weight)
        rows, weight = distinct_rows(X, codes, weight)
        codes = codes[rows]
        if labels is not None:
            labels = labels[rows]
            codes = rarest_label(labels)
        if (seen := len(np.unique(codes))) < 2:
            raise ValueError(f"y must hold at least two classes with a positive weight, got {seen} class (one class)")
        self._check_goal()
        costs = self._costs() if self.costs is not None else None
        table = costs.rows(_safe_indexing(X, rows)) if costs is not None and costs.per_row else None
        if costs is not None:  # mean over the rows of each true class
            mean = costs.matrix() if table is None else [table[codes == k, k].mean(0) for k in range(len(table[0]))]
            self.cost_matrix_ = np.array(mean)
        divisions = fold_rows(codes, weight, self._fold_count(codes), seed, fraction=self.validation_fraction)
        names = ("classes_", "n_features_in_", "feature_names_in_", "multilabel_", "cost_matrix_")
        fitted = {name: getattr(self, name) for name in names if hasattr(self, name)}
        return TrainingRows(X, rows, codes, weight, divisions, seed, fitted, labels, table)

    def _fold_count(self, codes: Codes) -> int:
        return int(self.folds)

    def _check_metric_and_decision(self) -> None:
        self._check_decision()
        if self.n_jobs is not None and (not isinstance(self.n_jobs, Integral) or self.n_jobs == 0):
            raise ValueError(f"n_jobs must be a number of cores, or -1 for all, got {self.n_jobs!r}")
        checks.check_number(
            "validation_fraction", self.validation_fraction, low=0.0, high=1.0, open_low=True, open_high=True
        )

    def _labels_and_weights(
        self, X: Any, y: ArrayLike, sample_weight: ArrayLike | None
    ) -> tuple[Codes, Codes | None, Floats]:
        """Codes, equal for equal labels, the labels 0/1 (n, L) if multilabel, and weights."""
        if y is None:
            name = type(self).__name__
            raise ValueError(f"This {name} estimator requires y to be passed, but the target y is None.")
        self.multilabel_ = is_multilabel(y)
        if self.multilabel_:
            labels = indicator(y)
            check_consistent_length(X, labels)
            self.classes_ = np.asarray(y.columns) if hasattr(y, "columns") else np.arange(labels.shape[1])
            if self.costs is not None or self.class_weight is not None:
                raise ValueError("costs and class_weight do not support multilabel y; leave them out")
            codes = np.unique(labels, axis=0, return_inverse=True)[1].ravel()
        else:
            labels = column_or_1d(y, warn=True)
            check_no_gaps(labels)
            check_classification_targets(labels)
            check_consistent_length(X, labels)
            self.classes_, codes = np.unique(labels, return_inverse=True)
        weight = np.asarray(_check_sample_weight(sample_weight, X, dtype=np.float64, ensure_non_negative=True))
        weight = scaled_weights(weight, float(np.count_nonzero(weight)))
        if self.class_weight is not None:
            weight = scaled_weights(weight * compute_sample_weight(self.class_weight, labels), weight.sum())
        if self.confidence is not None:
            weight = decision.unit_weights(weight)
        if self.multilabel_:
            return codes.astype(np.int64), labels, weight
        return self.class_order[codes].astype(np.int64), None, weight

    def _rule(self, held_out: HeldOutPredictions) -> Rule:
        """The rule that `decision` names, learned from held-out predictions."""
        if self.decision == "plug_in" and self.subject_to is None and self.costs is None:
            return self._plug_in(held_out.probabilities, held_out.weight)
        return self._learned_rule(held_out.probabilities, held_out.labels, held_out.weight, held_out.costs)

    # -- what follows from the options --------------------------------------------------------------------------

    @property
    def _training_metric(self) -> str | MetricFunction:
        """The metric; for costs, their mean in units of the largest one, on the scale of a cross-entropy anchor."""
        if self.costs is None:
            return self.metric
        return cost_metric(self.cost_matrix_ / max(float(np.abs(self.cost_matrix_).max()), 1e-300))

    @property
    def cores(self) -> int:
        """Cores that `n_jobs` allows; -1 is all, -2 all but one."""
        wanted = self.n_jobs or 1  # None is 1, as in scikit-learn
        return wanted if wanted > 0 else max(1, (os.cpu_count() or 1) + 1 + wanted)

    @property
    def metric_name(self) -> str:
        return metrics.name_of(self.metric)
