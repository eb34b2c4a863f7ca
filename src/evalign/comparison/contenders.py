"""Classifiers to compare: ours, and those of other libraries with their defaults."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import ArrayLike
from sklearn.base import clone
from sklearn.dummy import DummyClassifier
from sklearn.ensemble import HistGradientBoostingClassifier, RandomForestClassifier
from sklearn.linear_model import LogisticRegression
from threadpoolctl import threadpool_limits

from evalign import checks
from evalign.boosting.growth import LIBRARIES, find_library
from evalign.comparison.goals import DECISIONS, Judge
from evalign.estimators.base import MetricClassifier
from evalign.estimators.blend import EASTBlend
from evalign.estimators.boosted import EASTBooster
from evalign.estimators.network import EASTClassifier
from evalign.tables.encode import TableEncoder, TreeTable
from evalign.tables.split import Codes, Floats, TrainingRows
from evalign.training.loop import OnEpoch
from evalign.training.recipes import Recipe, find_recipe

ROUNDS, PATIENCE = 1000, 50
# Up to this many rows, boosting gets one thread: several would wait for each other in every round.
ONE_THREAD_ROWS = 5000


@dataclass(kw_only=True, eq=False, repr=False)
class HeldOut(MetricClassifier):
    """Any classifier with `predict_proba`, fitted on the encoded rows that `EASTClassifier` would train on.

    With one `random_state` both hold out the same rows. Equal rows are kept on one side of the split. Numbers are
    only scaled, without the additional ranks of a network: trees need neither.

    >>> X, y = np.arange(20.0).reshape(-1, 1), np.array(["a", "b"] * 10)
    >>> model = HeldOut(estimator=DummyClassifier(), random_state=0).fit(X, y)
    >>> len(model.held_out_predictions_.labels), model.predict_proba(X[:1])
    (4, array([[0.5, 0.5]]))
    """

    ENCODER: ClassVar[type[TableEncoder]] = TableEncoder

    estimator: Any = None
    folds: int = 1

    def fit(
        self, X: Any, y: ArrayLike, sample_weight: ArrayLike | None = None, *, on_epoch: OnEpoch | None = None
    ) -> Self:
        """Fit, and predict the held-out rows; the judge learns the decisions."""
        self._check_options()
        return self.fit_prepared(self._prepare(X, y, sample_weight), on_epoch)

    def _check_options(self) -> None:
        self._check_metric_and_decision()

    def _cross_fit(self, data: TrainingRows, on_epoch: OnEpoch | None) -> Floats:
        (division,) = data.divisions
        self.encoder_, x = data.encoder(self.ENCODER), data.encoded(self.ENCODER)
        # Equal rows are repeated as often as they were given.
        train = np.repeat(division.train, np.rint(division.train_weight).astype(np.int64))
        held_out = x[division.valid]
        with threadpool_limits(1 if len(train) <= ONE_THREAD_ROWS else None, "openmp"):
            self.estimator_ = self._fitted(x[train], data.codes[train], held_out, data.codes[division.valid], data.seed)
        return np.asarray(self.estimator_.predict_proba(held_out), dtype=np.float64)

    def _fitted(self, x: Any, y: Codes, held_out: Any, truth: Codes, seed: int) -> Any:
        return clone(self.estimator).fit(x, y)

    def _probabilities(self, X: Any, fold: int | None = None) -> Floats:
        return np.asarray(self.estimator_.predict_proba(self.encoder_.transform(X)), dtype=np.float64)


@dataclass(kw_only=True, eq=False, repr=False)
class StockBooster(HeldOut):
    """LightGBM or XGBoost with default parameters, stopped early by held-out log-loss.

    Early stopping is not the libraries' default, but their hundred rounds are too few for some tables and too many for
    others, which would make the comparison unfair.

    >>> X, y = np.arange(60.0).reshape(-1, 1), np.arange(60) // 30
    >>> model = StockBooster(library="lightgbm", random_state=0, n_jobs=1).fit(X, y)
    >>> model.predict_proba(X[:2]).shape, len(model.held_out_predictions_.labels)
    ((2, 2), 12)
    """

    ENCODER = TreeTable

    library: str = "lightgbm"

    def _check_options(self) -> None:
        super()._check_options()
        checks.check_choice("library", self.library, LIBRARIES)
        find_library(self.library)  # raises an error that says what to install

    def _fitted(self, x: Any, y: Codes, held_out: Any, truth: Codes, seed: int) -> Any:
        jobs = 1 if len(x) <= ONE_THREAD_ROWS else self.n_jobs
        options: dict[str, Any] = {"n_estimators": ROUNDS, "random_state": seed, "n_jobs": jobs}
        codes = self.encoder_.categorical
        # Held-out rows may lack classes, but have none that training lacks.
        if self.library == "lightgbm":
            import lightgbm

            stop = lightgbm.early_stopping(PATIENCE, verbose=False)
            model = lightgbm.LGBMClassifier(**options, verbose=-1)
            watched: dict[str, Any] = {"eval_X": held_out, "eval_y": truth}
            if "eval_X" not in inspect.signature(model.fit).parameters:  # before LightGBM 4.7
                watched = {"eval_set": [(held_out, truth)]}
            return model.fit(x, y, **watched, categorical_feature=codes, callbacks=[stop])
        import xgboost

        types = ["c" if j in codes else "q" for j in range(x.shape[1])]
        options |= {"early_stopping_rounds": PATIENCE, "enable_categorical": True, "feature_types": types}
        return xgboost.XGBClassifier(**options).fit(x, y, eval_set=[(held_out, truth)], verbose=False)


OURS, OURS_BOOSTED, OURS_BLENDED = "ours", "ours_boosted", "ours_blended"


@dataclass(frozen=True)
class Contender:
    """A classifier to compare, and the decision rules to give it.

    `make(seed)` returns an estimator with `fit` and `predict_proba`; one that does not hold out rows itself is
    wrapped in `HeldOut`. `title` is its display name.
    """

    name: str
    title: str
    make: Callable[[int], Any]
    decisions: Sequence[str] = DECISIONS


def ours(judge: Judge, *, recipe: str | Recipe = "anchored", **options: Any) -> Contender:
    """`EASTClassifier` for a judge's metric; `options` are further options of the classifier."""
    return Contender(OURS, f"ours ({find_recipe(recipe).name})", _maker(EASTClassifier, judge, recipe, options))


def ours_boosted(judge: Judge, *, recipe: str = "anchored", **options: Any) -> Contender:
    """`EASTBooster` for a judge's metric; `options` are further options of the booster."""
    return Contender(OURS_BOOSTED, f"ours (boosted trees, {recipe})", _maker(EASTBooster, judge, recipe, options))


def ours_blended(judge: Judge, *, recipe: str = "auto", **options: Any) -> Contender:
    """`EASTBlend` for a judge's metric; `options` are further options of the blend."""
    title = "ours (blend)" if recipe == "auto" else f"ours (blend, {recipe})"
    return Contender(OURS_BLENDED, title, _maker(EASTBlend, judge, recipe, options))


def boosted_cross_entropy(judge: Judge, **options: Any) -> Contender:
    """The same trees, folds and seed with cross-entropy alone."""
    contender = ours_boosted(judge, recipe="cross_entropy", **options)
    return replace(contender, name="cross_entropy", title="cross-entropy, same trees")


def cross_entropy(judge: Judge, *, rival_of: str | Recipe = "anchored", **options: Any) -> Contender:
    """The same network, split and seed with plain cross-entropy, for as many epochs as the compared recipe."""
    contender = ours(judge, recipe=as_long_as(find_recipe(rival_of)), **options)
    return replace(contender, name="cross_entropy", title="cross-entropy")


def as_long_as(recipe: Recipe) -> Recipe:
    """Cross-entropy for as many epochs as a recipe may take, so that longer training is not mistaken for a better loss.

    >>> as_long_as(find_recipe("paper")).epochs
    1000
    """
    plain = find_recipe("cross_entropy")
    stages = (replace(plain.stages[0], epochs=recipe.epochs, patience=recipe.epochs),)
    return replace(plain, stages=stages, updates=recipe.updates)


MAJORITY = Contender("majority", "majority class", lambda seed: DummyClassifier(strategy="most_frequent"), ("argmax",))
# Libraries with their defaults, but 300 trees in a forest: votes in steps of 1/100 are too coarse for thresholds.
RIVALS = {
    contender.name: contender
    for contender in (
        Contender(
            "random_forest", "random forest", lambda seed: RandomForestClassifier(300, random_state=seed, n_jobs=-1)
        ),
        Contender(
            "gradient_boosting", "gradient boosting", lambda seed: HistGradientBoostingClassifier(random_state=seed)
        ),
        Contender("logistic_regression", "logistic regression", lambda seed: LogisticRegression(max_iter=1000)),
    )
}
BOOSTED = {  # these need the extra `boost`; the names are those of their packages
    "lightgbm": Contender("lightgbm", "LightGBM", lambda seed: StockBooster(library="lightgbm", random_state=seed)),
    "xgboost": Contender("xgboost", "XGBoost", lambda seed: StockBooster(library="xgboost", random_state=seed)),
}


def _maker(
    kind: type[MetricClassifier], judge: Judge, recipe: Any, options: dict[str, Any]
) -> Callable[[int], MetricClassifier]:
    """A function of the seed that makes a classifier of this kind for a judge's metric."""
    aim, beta = judge.aim, judge.beta
    by_label = dict(zip(judge.names, beta, strict=True)) if isinstance(beta, list) else beta
    aimed = {
        "metric": aim.metric, "average": aim.average, "beta": by_label, "pos_label": judge.positive,
        "subject_to": judge.subject_to or None, "confidence": aim.confidence, "costs": aim.costs, "recipe": recipe,
    }  # fmt: skip
    return lambda seed: kind(**aimed, random_state=seed, **options)
