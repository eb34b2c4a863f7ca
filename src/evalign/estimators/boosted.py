"""EASTBooster: boosted trees trained on the metric they are judged by, with scikit-learn's interface."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from evalign import checks, metrics
from evalign.boosting.growth import (
    LIBRARIES,
    Grown,
    Monitor,
    TreeOptions,
    as_probabilities,
    cross_fit,
    find_library,
    grow_on_metric,
    prior_scores,
)
from evalign.boosting.score_objective import BoostRecipe, ScoreObjective, cooling, find_recipe
from evalign.confusion import Confusion
from evalign.decision import Rule
from evalign.estimators.base import Arrays, MetricClassifier
from evalign.tables.encode import TreeTable
from evalign.tables.split import Floats, HeldOutPredictions, TrainingRows
from evalign.training.loop import OnEpoch

FEW = 5  # rows: even if a rule improves all five, a sign test cannot tell that from chance (2 x 2^-5 > 0.05)
MARGIN = 1e-4  # difference in the metric below which two rules are equal
MONITORS = ("score", "loss", "entropy")
SHARES = (1.0, 0.5)  # shares of columns per tree to choose from
STOCK_COLUMNS = 0.7  # what columns="auto" means with the library's own objective
MANY = 4  # number of columns below which half of them is not tried


@dataclass(kw_only=True, eq=False, repr=False)
class EASTBooster(MetricClassifier):
    """Gradient boosting on cross-entropy and a confusion-matrix metric, with a decision rule for that metric.

    The rows are divided into folds. For each fold, trees are grown on the rows of the other folds, all in parallel.
    After every round the held-out rows of all folds are scored together, to decide when to stop and to learn the
    decision rule. Probabilities are the mean over the folds' trees. Tables may hold text, categories, booleans and
    missing values, which the library splits on.

    Parameters
    ----------
    metric and the other parameters of every classifier: see `MetricClassifier`. A "tuned" rule that differs from
        argmax on at most five held-out rows, or has the same score, is replaced by argmax.
    recipe: "anchored" (cross-entropy + metric), "cross_entropy", "paper" or "btg" (the metric alone), or a
        `BoostRecipe`. "cross_entropy" uses the library's own objective, which is several times as fast, without `floor`
        and the choice of `columns`.
    library: "lightgbm" or "xgboost"; both come with the extra `boost`.
    rounds: maximum number of trees per score; `n_estimators` is an alias.
    patience: rounds without a better `monitor` on held-out rows after which growing ends.
    monitor: "score" (the metric of hard decisions), "loss" (what is minimised) or "entropy".
    learning_rate, leaves, l2: parameters of the trees, as in LightGBM.
    min_rows: minimum rows per leaf; XGBoost, which sums second derivatives, gets a hundredth of it.
    columns, rows: shares of columns and rows that each tree sees; columns="auto" trains with all and with half of the
        columns and keeps the better one by the `monitor` on held-out rows (tables with at least four columns).
    floor: smallest second derivative of a row; see `ScoreObjective`.

    Attributes: `classes_`, `n_features_in_`, `feature_names_in_`, `history_` (a row per round), `rounds_` (trees kept
    for each score), `columns_` (the share that was kept), `temperature_`, `decision_` (the rule), `encoder_`, `trees_`
    (one ensemble per fold), `start_` (the scores that trees add to: the classes' shares), and after `fit` only
    `held_out_predictions_`.

    >>> from sklearn.datasets import load_iris
    >>> X, y = load_iris(return_X_y=True)
    >>> model = EASTBooster("f1", rounds=20, random_state=0, n_jobs=1).fit(X, y)
    >>> model.predict(X).shape, model.predict_proba(X).shape, len(model.trees_)
    ((150,), (150, 3), 5)
    """

    FORMAT = "evalign.booster"

    recipe: str | BoostRecipe = "anchored"
    library: Literal["lightgbm", "xgboost"] = "lightgbm"
    rounds: int = 1000
    n_estimators: int | None = None
    patience: int = 30
    monitor: Monitor = "loss"
    learning_rate: float = 0.1
    leaves: int = 31
    min_rows: int = 5
    l2: float = 1.0
    columns: float | Literal["auto"] = "auto"
    rows: float = 1.0
    floor: float = 1e-3

    def _cross_fit(self, data: TrainingRows, on_epoch: OnEpoch | None) -> Floats:
        self.encoder_ = data.encoder(TreeTable)
        plain = find_recipe(self.recipe).metric == 0 and self.monitor != "score"
        return (self._grow_on_entropy if plain else self._grow_on_metric)(data, self._listener(on_epoch))

    def _grow_on_entropy(self, data: TrainingRows, on_round: OnEpoch) -> Floats:
        """Train with the library's own objective, which is several times as fast as external gradients."""
        self.columns_ = STOCK_COLUMNS if self.columns == "auto" else float(self.columns)
        metric = metrics.resolve(self._training_metric, average=self._average, beta=self._beta)
        grown = cross_fit(
            data.encoded(TreeTable), data.codes, data.divisions, self._tree_options(data, self.columns_),
            on_round=on_round,
            score=lambda matrix: float(metric(Confusion.of_matrix(torch.from_numpy(matrix)))),
        )  # fmt: skip
        return self._keep(grown)

    def _grow_on_metric(self, data: TrainingRows, on_round: OnEpoch) -> Floats:
        """Train with each candidate share of columns, and keep the best."""
        x, best = data.encoded(TreeTable), None
        self.start_ = prior_scores(np.bincount(data.codes, data.weight, minlength=data.classes))
        choices: Sequence[float] = SHARES if x.shape[1] >= MANY else SHARES[:1]
        for share in choices if self.columns == "auto" else (self.columns,):
            try:
                grown = grow_on_metric(
                    x, data.codes, data.divisions, self._tree_options(data, share), self._objective(), self.start_,
                    monitor=self.monitor, on_round=on_round,
                )  # fmt: skip
            except KeyboardInterrupt:
                if best is None:
                    raise
                break
            if best is None or grown.value < best.value:
                best, self.columns_ = grown, share
            if grown.interrupted:
                break
        assert best is not None
        self.temperature_ = best.history[best.rounds - 1].temperature
        return self._keep(best)

    def _keep(self, grown: Grown) -> Floats:
        self.trees_, self.start_, self.rounds_ = grown.trees, grown.start, grown.rounds
        self.history_ = [vars(epoch) for epoch in grown.history]
        return grown.held_out

    def _probabilities(self, X: Any, fold: int | None = None) -> Floats:
        x, kept = self.encoder_.transform(X), self.trees_ if fold is None else [self.trees_[fold]]
        if not len(x):  # the libraries return scores of another shape
            return np.empty((0, len(self.classes_)))
        return np.asarray(np.mean([as_probabilities(trees.scores(x) + self.start_) for trees in kept], axis=0))

    def _content(self) -> tuple[Arrays, dict[str, Any]]:
        texts = [np.frombuffer(trees.text.encode(), dtype=np.uint8).copy() for trees in self.trees_]
        arrays = {f"trees_{i}": torch.from_numpy(text) for i, text in enumerate(texts)}
        own = {"rounds": self.rounds_, "columns": self.columns_, "start": self.start_}
        return arrays, {"encoder": self.encoder_.to_json(), **own}

    def _set_content(self, arrays: Arrays, fitted: dict[str, Any]) -> None:
        self.encoder_ = TreeTable.from_json(fitted["encoder"])
        self.rounds_, self.columns_, self.start_ = fitted["rounds"], fitted["columns"], np.array(fitted["start"])
        read = find_library(self.library).trees
        self.trees_ = [read(arrays[f"trees_{i}"].numpy().tobytes().decode()) for i in range(len(arrays))]

    # -- the parts of fit ---------------------------------------------------------------------------------------

    def _check_options(self) -> None:
        self._check_metric_and_decision()
        checks.check_choice("library", self.library, LIBRARIES)
        checks.check_choice("monitor", self.monitor, MONITORS)
        find_recipe(self.recipe)
        for name, low in (("folds", 1), ("_most_rounds", 1), ("patience", 1), ("leaves", 2), ("min_rows", 1)):
            checks.check_number(name.removeprefix("_most_"), getattr(self, name), low=low, whole=True)
        checks.check_number("learning_rate", self.learning_rate, low=0.0, open_low=True)
        checks.check_number("l2", self.l2, low=0.0)
        checks.check_number("floor", self.floor, low=0.0)
        for name in ("rows",) if self.columns == "auto" else ("columns", "rows"):
            checks.check_number(name, getattr(self, name), low=0.0, high=1.0, open_low=True)

    def _rule(self, held_out: HeldOutPredictions) -> Rule:
        rule = super()._rule(held_out)
        if self.decision != "tuned" or self.subject_to is not None or self.costs is not None or self.multilabel_:
            return rule
        # Without a constraint: a rule that looks worse by a little is often better on new rows.
        plain, p = Rule("argmax", len(self.classes_)), held_out.probabilities
        decided, most_probable = rule.predict(p), plain.predict(p)
        differs = np.count_nonzero(decided != most_probable) > FEW
        scores = [self._score_codes(labels, held_out.labels, held_out.weight) for labels in (decided, most_probable)]
        return rule if differs and abs(scores[0] - scores[1]) > MARGIN else plain

    def _objective(self) -> ScoreObjective:
        recipe = find_recipe(self.recipe)
        cooled = recipe.temperature if recipe.cool_to is None else cooling(recipe.temperature, recipe.cool_to)
        return ScoreObjective(
            self._training_metric, task="binary" if len(self.classes_) == 2 else "multiclass", average=self._average,
            beta=self._beta, step=recipe.step, temperature=cooled, anchor=recipe.anchor, metric_weight=recipe.metric,
            floor=self.floor,
        )  # fmt: skip

    @property
    def _most_rounds(self) -> int:
        return self.rounds if self.n_estimators is None else self.n_estimators

    def _tree_options(self, data: TrainingRows, columns: float) -> TreeOptions:
        return TreeOptions(
            self.learning_rate, self.leaves, self.min_rows, self.l2, columns, self.rows, self.cores, data.seed % 2**31,
            len(self.classes_), self._most_rounds, self.patience, self.library, self.encoder_.categorical,
        )  # fmt: skip
