"""The `fit` template of every classifier: validate, divide into folds, cross-fit, keep held-out predictions, decide."""

import os
from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils import _safe_indexing, check_random_state
from sklearn.utils.class_weight import compute_sample_weight
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import (
    _check_sample_weight,
    check_array,
    check_consistent_length,
    check_is_fitted,
    column_or_1d,
    validate_data,
)

from evalign import _checks as checks
from evalign import decision, metrics
from evalign.confusion import Confusion
from evalign.decision import Rule
from evalign.estimators.adapting import Adapting
from evalign.estimators.explain import Explaining
from evalign.estimators.lanes import OnEpoch, few_threads
from evalign.metrics import Average, MetricFunction
from evalign.storage import container
from evalign.tables import TableEncoder
from evalign.tables.encode import as_table
from evalign.tables.split import Division, distinct_rows, fold_rows
from evalign.training.loop import Epoch

Floats = NDArray[np.float64]
Codes = NDArray[np.int64]
Arrays = dict[str, torch.Tensor]


@dataclass(frozen=True)
class HeldOutPredictions:
    """Probabilities of rows by a model that did not train on them: what a decision is learned from.

    `probabilities` (n, C) and `labels` (n,) number the classes as decision rules do (see `class_order`). `rows` are
    positions in the table given to `fit`, equal rows by their first; `fold` says which fold held a row out.
    """

    probabilities: Floats
    labels: Codes
    weight: Floats
    rows: Codes = field(default_factory=lambda: np.zeros(0, dtype=np.int64))  # empty for rows of a stream
    fold: Codes = field(default_factory=lambda: np.zeros(0, dtype=np.int64))

    def counted(self) -> Self:
        """Equal rows one by one instead of by weight: certificates count rows."""
        at = np.repeat(np.arange(len(self.labels)), self.weight.astype(np.int64))
        return type(self)(self.probabilities[at], self.labels[at], np.ones(len(at)), self.rows[at], self.fold[at])


@dataclass(frozen=True)
class TrainingRows:
    """A validated table: its distinct rows, their labels as codes, their weights, and how they are divided.

    Members of a blend share one of these, so that rows are hashed and columns are encoded once for all.
    """

    X: Any
    rows: Codes
    codes: Codes
    weight: Floats
    divisions: Sequence[Division]
    seed: int
    fitted: dict[str, Any]  # classes_, n_features_in_, feature_names_in_
    _cache: dict[Any, Any] = field(default_factory=dict)

    @property
    def classes(self) -> int:
        return len(self.fitted["classes_"])

    @property
    def held_out(self) -> Codes:
        """Places among the distinct rows, fold after fold."""
        return np.concatenate([division.valid for division in self.divisions])

    def encoder(self, make: Callable[..., TableEncoder], **options: Any) -> Any:
        """An encoder fitted once for all who ask for the same one; it sees no label.

        Folds share it, so it learns from all rows; with one division it learns from the training rows alone.
        """
        key = (make, *sorted(options.items()))
        if key not in self._cache:
            rows = self.rows if len(self.divisions) > 1 else self.rows[self.divisions[0].train]
            self._cache[key] = make(**options).fit(self.X, rows=rows)
        return self._cache[key]

    def encoded(self, make: Callable[..., TableEncoder], **options: Any) -> NDArray[Any]:
        """The distinct rows as that encoder writes them, once for all who ask."""
        key = ("encoded", make, *sorted(options.items()))
        if key not in self._cache:
            self._cache[key] = self.encoder(make, **options).transform(self.X, rows=self.rows)
        found: NDArray[Any] = self._cache[key]
        return found

    def predictions(self, p: Floats) -> HeldOutPredictions:
        """What folds said of the rows they held out, (n, C) fold after fold, with labels and weights."""
        at = self.held_out
        fold = np.repeat(np.arange(len(self.divisions)), [len(division.valid) for division in self.divisions])
        weight = np.concatenate([division.valid_weight for division in self.divisions])
        return HeldOutPredictions(p, self.codes[at], weight, self.rows[at], fold)


@dataclass(kw_only=True, eq=False, repr=False)
class MetricClassifier(Adapting, Explaining, ClassifierMixin, BaseEstimator):
    """Base of classifiers for a metric: a subclass trains on folds (`_cross_fit`) and predicts (`_probabilities`).

    Decision rules number the classes 0 to C - 1, and the positive one of two is 1, whatever `pos_label` is.

    Parameters
    ----------
    metric: a name in `metrics.METRICS`, or a function of a `Confusion`.
    average, beta, pos_label, decision, subject_to, confidence, random_state: as in `DecisionParameters`.
    folds: so many models, each trained on the other folds' rows, predict the mean of their probabilities, and the
        decision is learned on what each says of the rows it held out. 1 is one division.
    validation_fraction: share of every class that one division holds out.
    class_weight: None, "balanced" or a mapping, as in scikit-learn.
    device: "auto", "cpu", "cuda", ...: where networks run; all else runs on the CPU.
    n_jobs: cores that `fit` uses; -1 is all.
    verbose: 1 shows progress.
    """

    FORMAT: ClassVar[str]  # names the kind of a saved model

    metric: str | MetricFunction = field(default="f1", kw_only=False)
    folds: int | Literal["auto"] = 5
    validation_fraction: float = 0.2
    class_weight: Any = None
    device: str = "auto"
    n_jobs: int = -1
    verbose: int = 0

    # -- what a subclass has ------------------------------------------------------------------------------------

    @abstractmethod
    def _check_options(self) -> None:
        """Refuse options that make no sense, before any work."""

    @abstractmethod
    def _cross_fit(self, data: TrainingRows, on_epoch: OnEpoch | None) -> Floats:
        """Train a model for each fold; return what each says of the rows it held out, (n, C), fold after fold."""

    @abstractmethod
    def _probabilities(self, X: Any, fold: int | None = None) -> Floats:
        """Probabilities (n, C), classes in the order of decision rules; of all folds' models, or of one."""

    def _content(self) -> tuple[Arrays, dict[str, Any]]:
        """The learned state beyond what every classifier has: arrays, and the rest in JSON's types."""
        raise NotImplementedError(f"{type(self).__name__} cannot be saved")

    def _set_content(self, arrays: Arrays, fitted: dict[str, Any]) -> None:
        """Take what `_content` returned; nothing in it is executed."""
        raise NotImplementedError(f"{type(self).__name__} cannot be loaded")

    # -- scikit-learn's interface -------------------------------------------------------------------------------

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        tags.input_tags.string = True
        tags.input_tags.sparse = True
        return tags

    def fit(
        self, X: Any, y: ArrayLike, sample_weight: ArrayLike | None = None, *, on_epoch: OnEpoch | None = None
    ) -> Self:
        """Cross-fit on folds, then learn the decision from the held-out predictions.

        `on_epoch` is called with every `Epoch` (of trees: every round). Ctrl-C, or an `on_epoch` that raises
        KeyboardInterrupt, ends training and keeps the best so far.
        """
        self._check_options()  # before the table is looked at
        data = self._prepare(X, y, sample_weight)
        with nullcontext() if self.n_jobs == -1 else few_threads(self.cores):
            self.fit_prepared(data, on_epoch)
        held = self.held_out_predictions_
        self.learn_decision(held if self.confidence is None else held.counted())
        self._keep_reference(
            held.probabilities, held.labels, held.weight, lambda some: _safe_indexing(data.X, held.rows[some])
        )
        return self

    def fit_prepared(self, data: TrainingRows, on_epoch: OnEpoch | None = None) -> Self:
        """`fit` on rows that are validated and divided already, without learning a decision (argmax decides)."""
        self._check_options()
        for name, value in data.fitted.items():
            setattr(self, name, value)
        self.history_: list[dict[str, Any]] = []
        self.temperature_: float | None = None
        self.held_out_predictions_ = data.predictions(self._cross_fit(data, on_epoch))
        self.decision_ = Rule("argmax", len(self.classes_))
        return self

    def _listener(self, on_epoch: OnEpoch | None) -> OnEpoch:
        """`on_epoch`, and with `verbose` a line for every step of training."""

        def listen(epoch: Epoch) -> None:
            if self.verbose:
                known = {self.metric_name: epoch.score, "loss": epoch.loss}
                values = ", ".join(f"{name} {value:.4f}" for name, value in known.items() if value == value)
                print(f"{epoch.stage} {epoch.epoch}: {values or f'{epoch.seconds:.1f} s'}")
            if on_epoch is not None:
                on_epoch(epoch)

        return listen

    def learn_decision(self, held_out: HeldOutPredictions) -> Self:
        """Learn `decision_` from probabilities of rows that were held out of training."""
        self.held_out_predictions_ = held_out
        self.decision_ = self._rule(held_out)
        self._keep_reference(held_out.probabilities, held_out.labels, held_out.weight)
        return self

    def predict_proba(self, X: Any) -> Floats:
        """Probabilities of the classes, in the order of `classes_`."""
        check_is_fitted(self, "decision_")
        validate_data(self, X := as_table(X), skip_check_array=True, reset=False)
        return np.ascontiguousarray(self._probabilities(X)[:, self.class_order])

    def predict_log_proba(self, X: Any) -> Floats:
        """Logarithm of `predict_proba`."""
        with np.errstate(divide="ignore"):
            return np.log(self.predict_proba(X))

    def decision_function(self, X: Any) -> Floats:
        """Scores (n, C) whose largest is the prediction; of two classes (n,), positive for the second."""
        p = self.predict_proba(X)[:, self.class_order]
        scores = self.decision_.scores(p)[:, self.class_order]
        return scores[:, 1] - scores[:, 0] if scores.shape[1] == 2 else scores

    def predict(self, X: Any) -> NDArray[Any]:
        """Labels by the learned decision rule."""
        return self.decide(self.predict_proba(X))

    def predict_jointly(self, X: Any) -> NDArray[Any]:
        """Labels of all rows at once, by the plug-in rule of their own probabilities.

        A rule learned in `fit` expects new rows to resemble the held-out ones, which say little about a class with
        five of them; the probabilities of the new rows themselves tell which are likely to be of that class. The
        label of a row depends on the rows beside it, so pass all rows in one call. Where there is evidence that class
        shares changed, and nothing else, the rule is that of `adapt(X)`.
        """
        return self.decide(self.predict_proba(X), jointly=True, X=X)

    def decide(self, p: Floats, *, jointly: bool = False, X: Any = None) -> NDArray[Any]:
        """Labels for probabilities in the order of `classes_`, by `decision_` or, jointly, by the rows' own rule.

        `X` are the rows of a joint decision: they tell a change of class shares from other changes.
        """
        p = p[:, self.class_order]
        rule = self._joint_rule(p, X) if jointly else self.decision_
        return self.classes_[self.class_order][rule.predict(p)]

    def _decision_probabilities(self, X: Any) -> Floats:
        return self.predict_proba(X)[:, self.class_order]

    def _learned_rule(self, p: Floats, labels: Codes, weight: Floats) -> Rule:
        return self._rule(HeldOutPredictions(p, labels, weight))

    def _joint_plug_in(self, p: Floats) -> Rule:
        # Constraints never rest on probabilities alone: the rule that met them on held-out labels decides.
        if self.subject_to is not None:
            return self.decision_
        if self.decision == "auto":
            return decision.joint_rule(self.decision_, p, self.metric, average=self._average, beta=self._beta)
        return self._plug_in(p)

    def score(self, X: Any, y: ArrayLike, sample_weight: ArrayLike | None = None) -> float:
        """The metric the classifier was trained on."""
        return self.score_labels(self.predict(X), y, sample_weight)

    def score_labels(self, predicted: NDArray[Any], y: ArrayLike, sample_weight: ArrayLike | None = None) -> float:
        """The metric of predicted labels against the true ones `y`."""
        order = {label: i for i, label in enumerate(self.classes_[self.class_order].tolist())}
        truth = column_or_1d(y)
        if unknown := set(np.unique(truth).tolist()) - set(order):
            raise ValueError(f"y must hold labels seen in training, got {sorted(map(str, unknown))[:5]}")
        codes = [np.array([order[label] for label in labels.tolist()]) for labels in (predicted, truth)]
        weight = None if sample_weight is None else np.asarray(sample_weight, dtype=np.float64)
        return self._score_codes(codes[0], codes[1], weight)

    # -- files --------------------------------------------------------------------------------------------------

    def save(self, path: str | Path) -> Path:
        """Write one file: arrays as safetensors, the rest as JSON in its header; see `evalign.storage.container`."""
        check_is_fitted(self, "decision_")
        return container.write(Path(path), self.FORMAT, *self.content())

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read what `save` wrote; nothing in the file is executed."""
        return cls.from_content(*container.read(Path(path), cls.FORMAT))

    def content(self) -> tuple[Arrays, dict[str, Any]]:
        """The fitted model as arrays and JSON."""
        arrays, own = self._content()
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
            **own,
        }

    @classmethod
    def from_content(cls, arrays: Arrays, fitted: dict[str, Any]) -> Self:
        """The model that `content` was taken from; of held-out predictions a sample is kept, for `adapt`."""
        params: dict[str, Any] = {name: tuple(v) if name == "hidden" else v for name, v in fitted["params"].items()}
        model = cls(**params)
        model.classes_ = container.classes_from_json(fitted["classes"])
        model.n_features_in_ = fitted["n_features_in"]
        if fitted["feature_names_in"] is not None:
            model.feature_names_in_ = np.array(fitted["feature_names_in"], dtype=object)
        model.decision_ = Rule.from_json(fitted["decision"])
        # JSON has lists only; `watched` was a tuple.
        model.history_ = [{**row, "watched": tuple(row.get("watched", ()))} for row in fitted["history"]]
        model.temperature_ = fitted["temperature"]
        model._set_reference(
            {name: part.numpy() for name, part in arrays.items() if name.startswith("reference.")}, fitted
        )
        model._set_content({name: part for name, part in arrays.items() if not name.startswith("reference.")}, fitted)
        return model

    def to(self, device: str) -> Self:
        """Predict on another device; models without a network ignore it."""
        return self

    # -- the parts of fit ---------------------------------------------------------------------------------------

    def _prepare(self, X: Any, y: ArrayLike, sample_weight: ArrayLike | None) -> TrainingRows:
        X = as_table(X)
        validate_data(self, X, skip_check_array=True)
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        codes, weight = self._labels_and_weights(X, y, sample_weight)
        rows, weight = distinct_rows(X, codes, weight)
        codes = codes[rows]
        self._check_classes(codes)
        divisions = fold_rows(codes, weight, self._fold_count(codes), seed, fraction=self.validation_fraction)
        names = ("classes_", "n_features_in_", "feature_names_in_")
        fitted = {name: getattr(self, name) for name in names if hasattr(self, name)}
        return TrainingRows(X, rows, codes, weight, divisions, seed, fitted)

    def _fold_count(self, codes: Codes) -> int:
        return int(self.folds)

    def _check_metric_and_decision(self) -> None:
        if not callable(self.metric):
            checks.check_choice("metric", self.metric, metrics.METRICS)
        checks.check_choice("decision", self.decision, ("auto", "plug_in", "tuned", "argmax"))
        if self.n_jobs == 0:
            raise ValueError("n_jobs must be a number of cores, or -1 for all, got 0")
        checks.check_number(
            "validation_fraction", self.validation_fraction, low=0.0, high=1.0, open_low=True, open_high=True
        )
        if self.costs is not None:
            raise ValueError("costs go with MetricDecision(model, 'cost', costs=...)")
        if self.subject_to is not None and self.decision == "argmax":
            raise ValueError("subject_to needs decision='auto', 'plug_in' or 'tuned', got decision 'argmax'")
        if self.confidence is not None and self.subject_to is None:
            raise ValueError(f"confidence goes with subject_to, got confidence={self.confidence!r} and no constraint")

    def _labels_and_weights(self, X: Any, y: ArrayLike, sample_weight: ArrayLike | None) -> tuple[Codes, Floats]:
        if y is None:
            name = type(self).__name__
            raise ValueError(f"This {name} estimator requires y to be passed, but the target y is None.")
        if len(shape := np.asarray(y).shape) == 2 and shape[1] > 1:
            raise ValueError(
                f"y should be a 1d array, got an array of shape {shape} instead; for several labels a row wrap "
                "the classifier in sklearn.multioutput.MultiOutputClassifier"
            )
        labels: NDArray[Any] = column_or_1d(y, warn=True)
        check_array(labels, ensure_2d=False, dtype=None, input_name="y")
        check_classification_targets(labels)
        check_consistent_length(X, labels)
        self.classes_, codes = np.unique(labels, return_inverse=True)
        weight = np.asarray(_check_sample_weight(sample_weight, X, dtype=np.float64, ensure_non_negative=True))
        if self.class_weight is not None:
            weight = weight * compute_sample_weight(self.class_weight, labels)
        if self.confidence is not None:
            weight = decision.unit_weights(weight)
        return self.class_order[codes].astype(np.int64), weight

    def _check_classes(self, codes: Codes) -> None:
        seen = len(np.unique(codes))
        if seen < 2:
            raise ValueError(f"y must hold at least two classes with a positive weight, got {seen} class (one class)")

    def _rule(self, held_out: HeldOutPredictions) -> Rule:
        """The rule that `decision` asks for, learned from held-out predictions."""
        if self.decision == "argmax":
            return Rule("argmax", len(self.classes_))
        if self.decision == "plug_in" and self.subject_to is None:
            return self._plug_in(held_out.probabilities, held_out.weight)
        return decision.learn_rule(
            self.decision, held_out.probabilities, held_out.labels, self.metric, average=self._average, beta=self._beta,
            sample_weight=held_out.weight, confidence=self.confidence,
            subject_to=decision.parse_constraints(self.subject_to, self.classes_[self.class_order].tolist()) or None,
        )  # fmt: skip

    def _plug_in(self, p: Floats, weight: Floats | None = None) -> Rule:
        """The plug-in rule of probabilities in the order of decision rules."""
        # A rule that promises less than one row's worth over argmax is not worth leaving it.
        average, beta, margin = self._average, self._beta, 1 / len(p)
        return decision.plug_in(p, self.metric, average=average, beta=beta, sample_weight=weight, margin=margin)

    def _score_codes(self, predicted: Codes, truth: Codes, weight: Floats | None = None) -> float:
        labels, target = torch.from_numpy(predicted), torch.from_numpy(truth)
        weights = None if weight is None else torch.from_numpy(weight)
        confusion = Confusion.hard(labels, target, len(self.classes_), sample_weight=weights)
        return float(metrics.resolve(self.metric, average=self._average, beta=self._beta)(confusion))

    def _score_matrix(self, matrix: Floats) -> float:
        """The metric of a confusion matrix (C, C), rows by label."""
        cells = torch.from_numpy(matrix)
        counts = Confusion(cells.diagonal(), cells.sum(1), cells.sum(0), cells.sum(), matrix=cells)
        return float(metrics.resolve(self.metric, average=self._average, beta=self._beta)(counts))

    # -- what follows from the options --------------------------------------------------------------------------

    @property
    def _average(self) -> Average:
        return self.average or ("binary" if len(self.classes_) == 2 else "macro")

    @property
    def cores(self) -> int:
        """Cores that `n_jobs` allows; -1 is all, -2 all but one."""
        return self.n_jobs if self.n_jobs > 0 else max(1, (os.cpu_count() or 1) + 1 + self.n_jobs)

    @property
    def metric_name(self) -> str:
        return self.metric if isinstance(self.metric, str) else getattr(self.metric, "__name__", "metric")
