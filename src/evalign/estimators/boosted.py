"""EASTBooster: boosted trees trained on the metric they are judged by, with scikit-learn's interface."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data

from evalign import _checks as checks
from evalign import metrics
from evalign.boosting.growth import Monitor, Rows, Trained, TreeOptions, Trees, train_folds
from evalign.boosting.libraries import LIBRARIES, Library, find_library
from evalign.boosting.objective import BoostRecipe, ScoreObjective, cooling, find_recipe
from evalign.boosting.tree_table import TreeTable
from evalign.confusion import Confusion
from evalign.decision import Rule
from evalign.estimators.base import BetaByLabel, Decision, MetricClassifier
from evalign.metrics import Average, MetricFunction
from evalign.tables.columns import as_table
from evalign.tables.split import distinct_rows, fold_rows
from evalign.training.history import Epoch

FEW = 5  # held-out rows: decided otherwise all one way, a sign test could not tell them from chance (2 x 2^-5 > 0.05)
MARGIN = 1e-4  # of the metric, below which two rules are one
MONITORS = ("score", "loss", "entropy")
SHARES = (1.0, 0.5)  # of columns a tree, to choose from
MANY = 4  # columns, below which half of them is not worth a try


class EASTBooster(MetricClassifier):
    """Gradient boosting on cross-entropy and a confusion-matrix metric, deciding for that metric.

    The rows are dealt into folds. Each fold grows trees on the others' rows, all side by side; after every round the
    held-out rows of all folds are judged together, which says when to stop and how to decide. Probabilities are the
    mean over the folds' trees. Tables may hold text, categories, booleans and gaps; the library splits on them.

    Parameters
    ----------
    metric, average, beta, pos_label, subject_to, class_weight: as in `EASTClassifier`.
    decision: as there, but "tuned" is the default: every row was held out once, which is enough to calibrate by. A
        tuned rule that decides otherwise than argmax for five held-out rows at most, or with the same score, gives
        way to it.
    recipe: "anchored" (cross-entropy + metric), "cross_entropy", "paper" or "btg" (the metric alone), or a
        `BoostRecipe`.
    library: "lightgbm" or "xgboost"; both come with the extra `boost`.
    folds: 1 holds out `validation_fraction` once, as `EASTClassifier` does, in a fifth of the time.
    rounds: at most so many trees for a score.
    patience: rounds without a better `monitor` on held-out rows after which growing ends.
    monitor: "score" (the metric of hard decisions), "loss" (what is minimised) or "entropy".
    learning_rate, leaves, l2: of the trees, as in LightGBM.
    min_rows: rows of a leaf at least; XGBoost, which counts second derivatives, gets a hundredth of it.
    columns, rows: shares of columns and rows that each tree sees; columns="auto" trains with all and with half of the
        columns and keeps what is better by the `monitor` on held-out rows (tables of four columns or more).
    floor: least second derivative of a row; see `ScoreObjective`.
    n_jobs: threads; -1 is all cores.

    Attributes: `classes_`, `n_features_in_`, `feature_names_in_`, `history_` (a row per round), `rounds_` (trees kept
    for each score), `columns_` (the share that was kept), `temperature_`, `decision_` (the rule), `encoder_`, `trees_`
    (one ensemble per fold), `start_` (the scores that trees add to: the classes' shares), and after `fit` only
    `held_out_` (positions of the held-out rows, fold after fold, equal rows by their first).

    >>> from sklearn.datasets import load_iris
    >>> X, y = load_iris(return_X_y=True)
    >>> model = EASTBooster("f1", rounds=20, random_state=0, n_jobs=1).fit(X, y)
    >>> model.predict(X).shape, model.predict_proba(X).shape, len(model.trees_)
    ((150,), (150, 3), 5)
    """

    def __init__(
        self,
        metric: str | MetricFunction = "f1",
        *,
        average: Average | None = None,
        beta: BetaByLabel = None,
        pos_label: Any = None,
        recipe: str | BoostRecipe = "anchored",
        decision: Decision = "tuned",
        subject_to: str | Sequence[str] | None = None,
        library: Literal["lightgbm", "xgboost"] = "lightgbm",
        folds: int = 5,
        rounds: int = 1000,
        patience: int = 30,
        monitor: Monitor = "loss",
        learning_rate: float = 0.1,
        leaves: int = 31,
        min_rows: int = 5,
        l2: float = 1.0,
        columns: float | Literal["auto"] = "auto",
        rows: float = 1.0,
        floor: float = 1e-3,
        validation_fraction: float = 0.2,
        class_weight: Any = None,
        random_state: int | np.random.RandomState | None = None,
        n_jobs: int = -1,
        verbose: int = 0,
    ) -> None:
        self.metric = metric
        self.average = average
        self.beta = beta
        self.pos_label = pos_label
        self.recipe = recipe
        self.decision = decision
        self.subject_to = subject_to
        self.library = library
        self.folds = folds
        self.rounds = rounds
        self.patience = patience
        self.monitor = monitor
        self.learning_rate = learning_rate
        self.leaves = leaves
        self.min_rows = min_rows
        self.l2 = l2
        self.columns = columns
        self.rows = rows
        self.floor = floor
        self.validation_fraction = validation_fraction
        self.class_weight = class_weight
        self.random_state = random_state
        self.n_jobs = n_jobs
        self.verbose = verbose

    def fit(
        self,
        X: Any,
        y: ArrayLike,
        sample_weight: ArrayLike | None = None,
        *,
        on_epoch: Callable[[Epoch], None] | None = None,
    ) -> Self:
        """Learn columns, trees and decision; `on_epoch` is called with every round's `Epoch`."""
        self._check_options()
        library = find_library(self.library)
        X = as_table(X)
        validate_data(self, X, skip_check_array=True)
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        codes, weight = self._labels_and_weights(X, y, sample_weight)
        kept, weight = distinct_rows(X, codes, weight)
        codes = codes[kept]
        self._check_classes(codes)
        self.encoder_ = TreeTable().fit(X, rows=kept)
        x = self.encoder_.transform(X, rows=kept)
        divisions = fold_rows(codes, weight, self.folds, seed, fraction=self.validation_fraction)

        def part(rows: NDArray[np.int64], weight: NDArray[np.float64]) -> Rows:
            return Rows(x[rows], codes[rows], weight, self.encoder_.categorical)

        folds = [(part(d.train, d.train_weight), part(d.valid, d.valid_weight)) for d in divisions]
        self.start_ = prior_scores(codes, weight, len(self.classes_))
        trained = self._grow(library, folds, seed, self._listener(on_epoch))
        self.rounds_ = trained.rounds
        self.history_ = [vars(epoch) for epoch in trained.history]
        self.temperature_ = trained.history[trained.rounds - 1].temperature
        valid = np.concatenate([d.valid for d in divisions])
        valid_weight = np.concatenate([d.valid_weight for d in divisions])
        self.held_out_ = kept[valid]
        p = _as_columns(self._objective().probabilities(trained.scores.astype(np.float64)))
        self.decision_ = self._learn_decision(p, codes[valid], valid_weight)
        return self

    def predict_proba(self, X: Any) -> NDArray[np.float64]:
        """Probabilities of the classes, in the order of `classes_`: the mean over the folds' trees."""
        check_is_fitted(self)
        X = as_table(X)
        validate_data(self, X, skip_check_array=True, reset=False)
        x, objective = self.encoder_.transform(X), self._objective()
        parts = [objective.probabilities(trees.scores(x).astype(np.float64) + self.start_) for trees in self.trees_]
        return np.ascontiguousarray(_as_columns(np.mean(parts, axis=0))[:, self._internal_order])

    def save(self, path: str | Path) -> Path:
        """One file: the trees in the library's own text, the rest as JSON; see `evalign.estimators.saving`."""
        from evalign.estimators.saving import save_booster

        check_is_fitted(self)
        return save_booster(self, Path(path))

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """The classifier that `save` wrote; nothing in the file is executed."""
        from evalign.estimators.saving import load_booster

        model: Self = load_booster(cls, Path(path))
        return model

    # -- the parts of fit ---------------------------------------------------------------------------------------

    def _check_options(self) -> None:
        self._check_metric_and_decision()
        checks.check_choice("library", self.library, LIBRARIES)
        checks.check_choice("monitor", self.monitor, MONITORS)
        find_recipe(self.recipe)
        for name, low in (("folds", 1), ("rounds", 1), ("patience", 1), ("leaves", 2), ("min_rows", 1)):
            checks.check_number(name, getattr(self, name), low=low)
        checks.check_number("learning_rate", self.learning_rate, low=0.0, open_low=True)
        checks.check_number("l2", self.l2, low=0.0)
        checks.check_number("floor", self.floor, low=0.0)
        for name in ("rows",) if self.columns == "auto" else ("columns", "rows"):
            checks.check_number(name, getattr(self, name), low=0.0, high=1.0, open_low=True)

    def _grow(
        self, library: Library, folds: list[tuple[Rows, Rows]], seed: int, on_round: Callable[[Epoch], None]
    ) -> Trained:
        """Train by every share of columns there is to choose from; sets the trees and the share of the best."""
        best: Trained | None = None
        choices: Sequence[float] = SHARES if folds[0][0].x.shape[1] >= MANY else SHARES[:1]
        if self.columns != "auto":
            choices = (self.columns,)
        for share in choices:
            growers = [library.grower(*fold, self._tree_options(seed + i, share)) for i, fold in enumerate(folds)]
            try:
                trained = train_folds(
                    growers, folds, self._objective(), self.start_, rounds=self.rounds, patience=self.patience,
                    monitor=self.monitor, learning_rate=self.learning_rate, on_round=on_round,
                )  # fmt: skip
            except KeyboardInterrupt:
                if best is None:
                    raise
                break
            if best is None or trained.value < best.value:
                best, self.columns_ = trained, share
                self.trees_: list[Trees] = [grower.finished(trained.rounds) for grower in growers]
            if trained.interrupted:
                break
        assert best is not None
        return best

    def _learn_decision(self, p: NDArray[np.float64], codes: NDArray[np.int64], weight: NDArray[np.float64]) -> Rule:
        rule = super()._learn_decision(p, codes, weight)
        if self.decision != "tuned" or self.subject_to is not None:
            return rule
        # A rule that looks slightly worse is often better on new rows (docs/research/boosting.md).
        plain = Rule("argmax", len(self.classes_))
        decided, most_probable = rule.predict(p), plain.predict(p)
        differs = np.count_nonzero(decided != most_probable) > FEW
        scores = [self._held_out_score(labels, codes, weight) for labels in (decided, most_probable)]
        return rule if differs and abs(scores[0] - scores[1]) > MARGIN else plain

    def _held_out_score(self, predicted: Any, codes: Any, weight: Any) -> float:
        labels, truth, weights = (torch.from_numpy(x) for x in (predicted, codes, weight))
        confusion = Confusion.hard(labels, truth, len(self.classes_), sample_weight=weights)
        return float(metrics.resolve(self.metric, average=self._average, beta=self._beta)(confusion))

    def _objective(self) -> ScoreObjective:
        recipe = find_recipe(self.recipe)
        cooled = recipe.temperature if recipe.cool_to is None else cooling(recipe.temperature, recipe.cool_to)
        return ScoreObjective(
            self.metric, task="binary" if len(self.classes_) == 2 else "multiclass", average=self._average,
            beta=self._beta, step=recipe.step, temperature=cooled, anchor=recipe.anchor, metric_weight=recipe.metric,
            floor=self.floor,
        )  # fmt: skip

    def _tree_options(self, seed: int, columns: float) -> TreeOptions:
        threads = self.n_jobs if self.n_jobs > 0 else max(1, (os.cpu_count() or 1) + 1 + self.n_jobs)
        return TreeOptions(
            self.learning_rate, self.leaves, self.min_rows, self.l2, columns, self.rows, threads,
            seed % 2**31, len(self.classes_),
        )  # fmt: skip

    def _listener(self, on_epoch: Callable[[Epoch], None] | None) -> Callable[[Epoch], None]:
        def listen(epoch: Epoch) -> None:
            if self.verbose:
                print(f"round {epoch.epoch}: {self._metric_name} {epoch.score:.4f}, loss {epoch.loss:.4f}")
            if on_epoch is not None:
                on_epoch(epoch)

        return listen


def prior_scores(codes: NDArray[np.int64], weight: NDArray[np.float64], classes: int) -> NDArray[np.float64]:
    """The scores that give every row the classes' shares as probabilities: one of two classes, C of more.

    >>> prior_scores(np.array([0, 0, 0, 1]), np.ones(4), 2).round(3)
    np.float64(-1.099)
    """
    share = np.bincount(codes, weight, minlength=classes) / weight.sum()
    logs = np.log(np.maximum(share, np.finfo(np.float64).tiny))
    return np.asarray(logs[1] - logs[0]) if classes == 2 else logs - logs.mean()


def _as_columns(p: NDArray[np.float64]) -> NDArray[np.float64]:
    """One probability of two classes as both."""
    return np.stack([1 - p, p], axis=1) if p.ndim == 1 else p
