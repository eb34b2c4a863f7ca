"""EASTBlend: a weighted mean of cross-fitted members with a decision rule for a metric; the default classifier."""

import math
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import pandas as pd
import torch
from numpy.typing import ArrayLike
from sklearn.utils.validation import check_is_fitted

from evalign import checks
from evalign.boosting.growth import LIBRARIES, is_installed
from evalign.estimators import planning
from evalign.estimators.base import Arrays, MetricClassifier
from evalign.estimators.boosted import EASTBooster
from evalign.estimators.explain import LEAST, log_loss
from evalign.estimators.forest import EASTForest
from evalign.estimators.linear import EASTLinear
from evalign.estimators.network import EASTClassifier
from evalign.estimators.planning import PRESETS, Preset, Shape, TimeBudget, clock, few_threads, side_by_side
from evalign.metrics import MetricFunction
from evalign.storage import container
from evalign.tables.encode import TableEncoder, TreeTable
from evalign.tables.split import Codes, Floats, TrainingRows, split_rows
from evalign.training.loop import OnEpoch

CLASSES: dict[str, type[MetricClassifier]] = {
    "linear": EASTLinear,
    "forest": EASTForest,
    "boost": EASTBooster,
    "network": EASTClassifier,
}
WEIGHTS = ("auto", "equal")
BLENDED = (
    "metric", "average", "beta", "pos_label", "folds", "random_state", "decision", "subject_to", "confidence",
    "costs", "class_weight",
)  # fmt: skip
PASSED_ON = ("metric", "average", "beta", "pos_label", "costs", "validation_fraction", "class_weight", "device")
PRIOR_ROWS = 100  # held-out rows at which weights are halfway between equal and optimal
NEGLIGIBLE = 0.03  # members of less weight are dropped: they take time to predict and change little
LARGE = 500_000  # rows x classes above which a product uses several threads
FEWEST = 1000  # rows of the sample that a time limit takes from a larger table


def blended(probabilities: Sequence[Floats], weights: Sequence[float]) -> Floats:
    """The weighted mean, (members of (n, C)) -> (n, C).

    >>> blended([np.array([[1.0, 0.0]]), np.array([[0.0, 1.0]])], [0.75, 0.25])
    array([[0.75, 0.25]])
    """
    total = sum(w * p for w, p in zip(weights, probabilities, strict=True))
    assert isinstance(total, np.ndarray)
    return total


def mixture_weights(
    probabilities: Sequence[Floats], labels: Codes, weight: Floats, *, prior_rows: float = PRIOR_ROWS
) -> tuple[float, ...]:
    """Weights of the lowest held-out log-loss of the mean, shrunk towards equal weights if rows are few.

    w = a w* + (1 - a) / k with a = n / (n + `prior_rows`). The optimum w* of this convex problem is found by
    expectation maximisation, w_j <- mean of w_j p_j(y) / sum_i w_i p_i(y).

    >>> sure, unsure = np.array([[0.9, 0.1], [0.2, 0.8]]), np.array([[0.5, 0.5], [0.5, 0.5]])
    >>> [round(w, 2) for w in mixture_weights([sure, unsure], np.array([0, 1]), np.ones(2), prior_rows=0)]
    [1.0, 0.0]
    >>> [round(w, 2) for w in mixture_weights([sure, unsure], np.array([0, 1]), np.ones(2))]
    [0.51, 0.49]
    """
    at_label = np.stack([np.maximum(p[np.arange(len(labels)), labels], LEAST) for p in probabilities])
    w = np.full(len(at_label), 1 / len(at_label))
    for _ in range(500):
        mixed = w @ at_label
        new = w * (at_label @ (weight / mixed)) / weight.sum()
        done = np.abs(new - w).max() < 1e-6
        w = new / new.sum()
        if done:
            break
    share = len(labels) / (len(labels) + prior_rows)
    return tuple((share * w + (1 - share) / len(w)).tolist())


def make_member(name: str, shared: Mapping[str, Any], given: Mapping[str, Any]) -> Any:
    """An unfitted member with the options `given` for it, and those of the `shared` ones that it has.

    >>> make_member("forest", {"metric": "mcc", "recipe": "anchored"}, {"trees": 50})
    EASTForest(metric='mcc', trees=50)
    """
    known = CLASSES[name]().get_params()
    for option in given:
        checks.check_choice(f"option of {name}", option, sorted(set(known) - set(BLENDED)))
    return CLASSES[name](**{option: value for option, value in shared.items() if option in known}, **given)


def fit(X: Any, y: ArrayLike, metric: str | MetricFunction = "f1", **options: Any) -> "EASTBlend":
    """Fit the default classifier: `EASTBlend(metric, **options).fit(X, y)`.

    >>> from sklearn.datasets import load_iris
    >>> model = fit(*load_iris(return_X_y=True), metric="mcc", preset="quick", random_state=0)
    >>> model.score(*load_iris(return_X_y=True)) > 0.9
    True
    """
    return EASTBlend(metric, **options).fit(X, y)


@dataclass(kw_only=True, eq=False, repr=False)
class EASTBlend(MetricClassifier):
    """Weighted mean of a linear model, randomised and boosted trees and a network, with a decision rule for a metric.

    All members are cross-fitted on the same folds. Their held-out predictions determine first the members' weights (by
    log-loss, shrunk towards equal weights where rows are few) and then the decision. Members train on cross-entropy:
    with a good decision rule, training on the metric has no measurable gain (docs/research/metric_training.md).

    Parameters
    ----------
    metric and the other parameters of every classifier: see `MetricClassifier`.
    preset: "quick" leaves the network out, "default" has all members, "best" grows more trees and trains two
        networks per fold for twice as long.
    time_limit: seconds that `fit` may take. Members are made smaller, stopped early or left out to meet it, and a table
        that is too large is replaced by a stratified sample. The model then depends on the speed of the machine;
        without a limit it depends only on the seed.
    recipe: "auto" is "cross_entropy", or "anchored" with decision="argmax", where training on the metric does help.
        Other recipes of `EASTBooster` and `EASTClassifier` are passed on to both.
    members: names of the members, from "linear", "forest", "boost" and "network"; None is those of the preset. Boosted
        trees need LightGBM or XGBoost (`pip install evalign[boost]`) and are left out if neither is installed.
    weights: "auto", or "equal" for the plain mean.
    folds: of every member; "auto" is 5, or 3 for more than 20,000 rows, or a single hold-out for more than 60,000 rows
        if it holds out at least 100 rows of each class.
    linear, forest, boost, network: further options of a member, such as {"rounds": 300}.
    n_jobs: with two or more cores, the network trains in parallel with the other members.

    Attributes: `classes_`, `n_features_in_`, `feature_names_in_`, `weights_` (by member), `members_` (those with a
    weight, fitted), `decision_`, `history_` (of the members, one after the other), `encoder_` and `temperature_` (of
    the first member that has one), and after `fit` only `held_out_predictions_`. `leaderboard()` has what each member
    is worth.

    >>> from sklearn.datasets import load_iris
    >>> X, y = load_iris(return_X_y=True)
    >>> model = EASTBlend("f1", members=["linear", "forest"], forest={"trees": 20}, random_state=0).fit(X, y)
    >>> round(sum(model.weights_.values()), 6), model.predict_proba(X).shape
    (1.0, (150, 3))
    """

    FORMAT = "evalign.blend"

    preset: Preset = "default"
    time_limit: float | None = None
    recipe: str = "auto"
    members: Sequence[str] | None = None
    weights: Literal["auto", "equal"] = "auto"
    folds: int | Literal["auto"] = "auto"
    linear: Mapping[str, Any] | None = None
    forest: Mapping[str, Any] | None = None
    boost: Mapping[str, Any] | None = None
    network: Mapping[str, Any] | None = None

    def fit(
        self, X: Any, y: ArrayLike, sample_weight: ArrayLike | None = None, *, on_epoch: OnEpoch | None = None
    ) -> Self:
        """Cross-fit every member, choose their weights and learn the decision; `on_epoch` gets every member's epochs.

        Members train in threads, so `on_epoch` may be called from another thread, but never twice at once. If it has a
        method `expect`, that is called first, with the estimated seconds. Ctrl-C ends training and keeps the members
        trained so far.
        """
        self._time = TimeBudget(self.time_limit or math.inf)
        try:
            return super().fit(X, y, sample_weight, on_epoch=on_epoch)
        finally:
            del self._time

    def _label_model(self, k: int) -> Self:
        model = super()._label_model(k)
        model._time = TimeBudget(self._time.left / (len(self.classes_) - k))
        return model

    def leaderboard(self) -> pd.DataFrame:
        """Members by weight: held-out log-loss, held-out score with a separate decision, and seconds to fit.

        The blend is the last row. Scores are available only after `fit`, since held-out predictions are not saved. A
        multilabel model has rows for the members of each label, named in column `label`, without scores.
        """
        check_is_fitted(self, "decision_")
        if self.multilabel_:
            models = zip(self.classes_, self.label_models_, strict=True)
            tables = [(label, model.leaderboard()) for label, model in models if not isinstance(model, float)]
            return pd.concat([table.assign(label=label) for label, table in tables], ignore_index=True)
        rows: list[dict[str, Any]] = [dict(row) for row in self.leaderboard_]
        held_out = getattr(self, "held_out_predictions_", None)
        for row in rows:
            p = None if held_out is None else self._member_predictions.get(row["member"], held_out.probabilities)
            row["score"] = float("nan") if p is None else self._held_out_score(p)
        return pd.DataFrame(rows)[["member", "weight", "score", "log_loss", "seconds"]]

    def _held_out_score(self, p: Floats) -> float:
        held_out = self.held_out_predictions_
        rule = self._rule(replace(held_out, probabilities=p))
        decided = rule.predict(p, costs=held_out.costs if rule.kind == "row_costs" else None)
        return self._score_codes(decided, held_out.labels, held_out.weight, held_out.costs)

    # -- the parts of fit ---------------------------------------------------------------------------------------

    def _check_options(self) -> None:
        self._check_metric_and_decision()
        checks.check_choice("preset", self.preset, PRESETS)
        checks.check_choice("weights", self.weights, WEIGHTS)
        if self.folds != "auto":
            checks.check_number("folds", self.folds, low=1, whole=True)
        if self.time_limit is not None:
            checks.check_number("time_limit", self.time_limit, low=0.0, open_low=True)
        names = self._member_names if self.members is None else self.members
        if isinstance(names, str) or not len(names) or len(set(names)) < len(names):
            raise ValueError(f"members must be distinct names of {', '.join(CLASSES)}, got {names!r}")
        for name in names:
            checks.check_choice("member", name, CLASSES)
            make_member(name, self._shared(0), getattr(self, name) or {})

    def _fold_count(self, codes: Codes) -> int:
        return planning.automatic_folds(codes, self.validation_fraction) if self.folds == "auto" else int(self.folds)

    def _shared(self, seed: int) -> dict[str, Any]:
        recipe = self.recipe if self.recipe != "auto" else "anchored" if self.decision == "argmax" else "cross_entropy"
        folds = 5 if self.folds == "auto" else self.folds  # checked here; members get the folds directly
        return {**{name: getattr(self, name) for name in PASSED_ON}, "recipe": recipe, "folds": folds,
                "random_state": seed, "verbose": 0}  # fmt: skip

    @property
    def _member_names(self) -> list[str]:
        names = list(PRESETS[self.preset] if self.members is None else self.members)
        if self.members is None and not any(map(is_installed, LIBRARIES)):
            names.remove("boost")
        return names

    def _prepare(self, X: Any, y: ArrayLike, sample_weight: ArrayLike | None) -> TrainingRows:
        """Rows to train on: a stratified sample if the time limit does not allow for all."""
        data = super()._prepare(X, y, sample_weight)
        labels, rows, whole = 1 if data.labels is None else data.classes, len(data.rows), data
        if len(data.divisions) == 1 and self._time.left < math.inf and "network" in self._member_names:
            # The first optimiser imports torch's compiler: half a second that the plan must include.
            torch.optim.AdamW([torch.zeros(1)])
        while rows > FEWEST:
            shape = self._shape(data, 2 * data.fitted["n_features_in_"])
            needed = labels * planning.least_seconds(self._member_names, self.preset, shape) * self._time.slowdown
            if needed <= self._time.left * (1.5 if self.cores > 1 else 1.0):
                break
            rows = max(FEWEST, rows // 2)
            keep = split_rows(whole.codes, 1 - rows / len(whole.rows), whole.seed)[0]
            data = whole.sample(keep, len(whole.divisions), self.validation_fraction)
        if self.verbose and data is not whole:
            print(f"time limit: training on {len(data.rows)} of {len(whole.rows)} rows")
        self._time.reserved += planning.decision_seconds(self._shape(data, 0))
        return data

    @staticmethod
    def _shape(data: TrainingRows, width: int) -> Shape:
        return Shape(len(data.rows), data.fitted["n_features_in_"], width, data.classes, len(data.divisions))

    def _planned(self, data: TrainingRows) -> dict[str, tuple[MetricClassifier, float]]:
        """Unfitted members in the order of training, with an estimate of their seconds on one core."""
        shape = self._shape(data, len(data.encoder(TableEncoder, numeric="both").feature_names_out))
        left = self._time.left / self._time.slowdown
        budget = None if left == math.inf else max(0.05, left * (0.8 if self.cores > 1 else 0.4))
        shared, planned = self._shared(data.seed), {}
        for name in self._member_names:
            options = planning.member_options(name, self.preset, shape, budget)
            if name == "boost" and not is_installed("lightgbm"):
                options["library"] = "xgboost"
            given = {**options, **(getattr(self, name) or {})}
            seconds = planning.estimated_seconds(name, given, shape)
            planned[name] = (make_member(name, shared, given), seconds)
        return planned

    def _lanes(self, planned: Mapping[str, tuple[Any, float]]) -> list[list[str]]:
        """Two lanes of members that train in parallel: the slowest one, and the others one after the other."""
        names = list(planned)
        if self.cores < 2 or len(names) < 2:
            return [names]
        slowest = max(names, key=lambda name: planned[name][1])
        return [[slowest], [name for name in names if name != slowest]]

    def _cross_fit(self, data: TrainingRows, on_epoch: OnEpoch | None) -> Floats:
        planned = self._planned(data)
        if self.verbose:
            parts = ", ".join(f"{name} {seconds:.1f} s" for name, (_, seconds) in planned.items())
            print(f"estimated time on one core: {parts}")
        data.encoded(TreeTable)  # before threads start
        data.encoded(TableEncoder, numeric="both")
        lanes = self._lanes(planned)
        if on_epoch is not None and hasattr(on_epoch, "expect"):
            total = max(sum(planned[name][1] for name in names) for names in lanes)
            on_epoch.expect(min(total, self._time.seconds))
        cores = max(1, self.cores // len(lanes))
        stop, lock, seconds = threading.Event(), threading.Lock(), dict[str, float]()

        def run(names: list[str]) -> None:
            torch.set_num_threads(cores)  # of this thread
            left = sum(planned[name][1] for name in names)
            for name in names:
                member, expected = planned[name]
                member.n_jobs = cores
                began = time.monotonic()
                until = began + (expected / left if left else 1.0) * self._time.left
                left -= expected
                if stop.is_set() or until < began:
                    continue
                try:
                    member.fit_prepared(data, clock(on_epoch, until, stop, lock))
                except KeyboardInterrupt:  # stopped before there was anything to keep
                    continue
                seconds[name] = time.monotonic() - began
                if self.verbose:
                    print(f"{name}: {seconds[name]:.1f} s; about {max(0.0, left):.0f} s left")

        with few_threads(cores if data.codes.size * data.classes > LARGE else 1):
            side_by_side([partial(run, names) for names in lanes], stop)
            fitted = {name: planned[name][0] for name in planned if name in seconds}
            if not fitted:
                if stop.is_set():
                    raise KeyboardInterrupt
                cheap = make_member("linear", self._shared(data.seed), {"strength": 0.2, "iterations": 20})
                fitted, seconds["linear"] = {"linear": cheap.fit_prepared(data)}, 0.0
        return self._weighted(fitted, seconds)

    def _weighted(self, fitted: dict[str, Any], seconds: Mapping[str, float]) -> Floats:
        """Choose weights, drop members without one, and return the mean predictions of the held-out rows."""
        held_out = {name: member.held_out_predictions_ for name, member in fitted.items()}
        first, p = next(iter(held_out.values())), {name: own.probabilities for name, own in held_out.items()}
        weights = [1 / len(p)] * len(p)
        if self.weights == "auto" and len(p) > 1:
            found = np.array(mixture_weights(list(p.values()), first.labels, first.weight))
            found[found < NEGLIGIBLE] = 0.0
            weights = (found / found.sum()).tolist()
        self.weights_ = dict(zip(fitted, weights, strict=True))
        self.members_ = {name: member for name, member in fitted.items() if self.weights_[name]}
        for member in fitted.values():
            del member.held_out_predictions_
        self.history_ = [row for member in self.members_.values() for row in member.history_]
        temperatures = [member.temperature_ for member in self.members_.values()]
        self.temperature_ = next((t for t in temperatures if t is not None), None)
        mean = blended(list(p.values()), weights)
        self._member_predictions = p
        losses = {name: log_loss(own, first.labels, first.weight) for name, own in [*p.items(), ("blend", mean)]}
        self.leaderboard_ = [
            {"member": name, "weight": self.weights_.get(name, 1.0), "log_loss": losses[name],
             "seconds": seconds.get(name, self._time.elapsed)}
            for name in sorted(losses, key=lambda name: (name == "blend", -self.weights_.get(name, 1.0)))
        ]  # fmt: skip
        return mean

    # -- the fitted blend ---------------------------------------------------------------------------------------

    def _probabilities(self, X: Any, fold: int | None = None) -> Floats:
        p = [member._probabilities(X, fold) for member in self.members_.values()]
        return blended(p, [self.weights_[name] for name in self.members_])

    @property
    def encoder_(self) -> Any:
        return next(iter(self.members_.values())).encoder_

    def to(self, device: str) -> Self:
        """Predict on another device."""
        for member in getattr(self, "members_", {}).values():
            member.to(device)
        return super().to(device)

    def _content(self) -> tuple[Arrays, dict[str, Any]]:
        arrays, members = container.packed(self.members_)
        return arrays, {"weights": self.weights_, "members": members, "leaderboard": self.leaderboard_}

    def _set_content(self, arrays: Arrays, fitted: dict[str, Any]) -> None:
        self.weights_, self.leaderboard_ = fitted["weights"], fitted["leaderboard"]
        self.members_ = container.unpacked(CLASSES, arrays, fitted["members"])


def load_model(path: str | Path) -> MetricClassifier:
    """Load a classifier of any kind that `save` wrote to `path`; nothing in the file is executed."""
    found: list[type[MetricClassifier]] = [EASTBlend, *CLASSES.values()]
    kinds = {kind.FORMAT: kind for kind in found}
    kind = kinds.get(container.format_of(Path(path)), EASTClassifier)  # which raises an error for other files
    return kind.load(path)
