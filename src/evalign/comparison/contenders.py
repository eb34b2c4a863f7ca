"""LightGBM and XGBoost as they come: their own objective and defaults, stopped by log-loss on held-out rows."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
from sklearn.base import BaseEstimator, ClassifierMixin, clone
from sklearn.dummy import DummyClassifier
from sklearn.ensemble import HistGradientBoostingClassifier, RandomForestClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.utils import check_random_state

from evalign import _checks as checks
from evalign.boosting.growth import LIBRARIES, find_library
from evalign.comparison.aims import DECISIONS, Judge
from evalign.estimators.base import MetricClassifier
from evalign.estimators.blend import EASTBlend
from evalign.estimators.boosted import EASTBooster
from evalign.estimators.network import EASTClassifier
from evalign.estimators.rows import Codes, Floats, HeldOutPredictions
from evalign.tables import TableEncoder
from evalign.tables.encode import TreeTable
from evalign.tables.split import distinct_rows, divide_rows
from evalign.training.recipes import Recipe, find_recipe

ROUNDS, PATIENCE = 1000, 50


class StockBooster(ClassifierMixin, BaseEstimator):
    """A library's classifier on the rows that `EASTClassifier` would train on, for labels 0 to C - 1.

    Early stopping is the one thing that is not the library's default: a hundred rounds are too few for some tables
    and too many for others, and a rival with a wrong number of them would prove nothing.

    >>> X, y = np.arange(60.0).reshape(-1, 1), np.arange(60) // 30
    >>> model = StockBooster("lightgbm", random_state=0, n_jobs=1).fit(X, y)
    >>> model.predict_proba(X[:2]).shape, len(model.held_out_predictions_.labels)
    ((2, 2), 12)
    """

    def __init__(
        self, library: str = "lightgbm", *, validation_fraction: float = 0.2, random_state: Any = None, n_jobs: int = -1
    ) -> None:
        self.library = library
        self.validation_fraction = validation_fraction
        self.random_state = random_state
        self.n_jobs = n_jobs

    def fit(self, X: Any, y: Codes) -> Self:
        checks.check_choice("library", self.library, LIBRARIES)
        find_library(self.library)  # says what to install where it is missing
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        codes = np.asarray(y, dtype=np.int64)
        self.classes_ = np.unique(codes)
        rows, weight = distinct_rows(X, codes, np.ones(len(codes)))
        division = divide_rows(codes[rows], weight, self.validation_fraction, seed)
        train, valid = rows[division.train], rows[division.valid]
        self.encoder_ = TreeTable().fit(X, rows=train)
        x, held_out = (self.encoder_.transform(X, rows=part) for part in (train, valid))
        fit = self._lightgbm if self.library == "lightgbm" else self._xgboost
        self.estimator_ = fit(x, codes[train], division.train_weight, held_out, codes[valid], seed)
        self.held_out_predictions_ = _predictions(self._probabilities(held_out), codes, valid, division.valid_weight)
        return self

    def predict_proba(self, X: Any) -> Floats:
        return self._probabilities(self.encoder_.transform(X))

    def predict(self, X: Any) -> Any:
        """The most probable class."""
        return self.classes_[self.predict_proba(X).argmax(axis=1)]

    def _probabilities(self, x: Floats) -> Floats:
        return np.asarray(self.estimator_.predict_proba(x), dtype=np.float64)

    def _lightgbm(self, x: Floats, y: Codes, weight: Floats, held_out: Floats, truth: Codes, seed: int) -> Any:
        import lightgbm

        model = lightgbm.LGBMClassifier(n_estimators=ROUNDS, random_state=seed, n_jobs=self.n_jobs, verbose=-1)
        stop = lightgbm.early_stopping(PATIENCE, verbose=False)
        # Held-out rows of all classes may be lacking, but none that training lacks is among them.
        return model.fit(
            x, y, sample_weight=weight, eval_X=held_out, eval_y=truth, categorical_feature=self.encoder_.categorical,
            callbacks=[stop],
        )  # fmt: skip

    def _xgboost(self, x: Floats, y: Codes, weight: Floats, held_out: Floats, truth: Codes, seed: int) -> Any:
        import xgboost

        codes = set(self.encoder_.categorical)
        types = ["c" if j in codes else "q" for j in range(x.shape[1])]
        model = xgboost.XGBClassifier(
            n_estimators=ROUNDS, early_stopping_rounds=PATIENCE, random_state=seed, n_jobs=self.n_jobs,
            enable_categorical=True, feature_types=types,
        )  # fmt: skip
        return model.fit(x, y, sample_weight=weight, eval_set=[(held_out, truth)], verbose=False)


class HeldOut(ClassifierMixin, BaseEstimator):
    """Any classifier with `predict_proba`, fitted on the rows that `EASTClassifier` would train on, encoded alike.

    With one `random_state` both hold out the same rows. Equal rows are kept on one side of the split. Numbers are
    scaled only, without the ranks that a network may get beside them: trees do not care for either.

    >>> from sklearn.dummy import DummyClassifier
    >>> X, y = np.arange(20.0).reshape(-1, 1), np.array(["a", "b"] * 10)
    >>> model = HeldOut(DummyClassifier(), random_state=0).fit(X, y)
    >>> len(model.held_out_predictions_.labels), model.predict_proba(X[:1])
    (4, array([[0.5, 0.5]]))
    """

    def __init__(self, estimator: Any, *, validation_fraction: float = 0.2, random_state: Any = None) -> None:
        self.estimator = estimator
        self.validation_fraction = validation_fraction
        self.random_state = random_state

    def fit(self, X: Any, y: Any) -> Self:
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        self.classes_, codes = np.unique(y, return_inverse=True)
        codes = codes.astype(np.int64)
        rows, weight = distinct_rows(X, codes, np.ones(len(codes)))
        division = divide_rows(codes[rows], weight, self.validation_fraction, seed)
        train, valid = rows[division.train], rows[division.valid]
        self.encoder_ = TableEncoder().fit(X, rows=train)
        again = np.repeat(train, np.rint(division.train_weight).astype(np.int64))  # as often as they were given
        self.estimator_ = clone(self.estimator).fit(self.encoder_.transform(X, rows=again), codes[again])
        p = self.estimator_.predict_proba(self.encoder_.transform(X, rows=valid))
        self.held_out_predictions_ = _predictions(p, codes, valid, division.valid_weight)
        return self

    def predict_proba(self, X: Any) -> Floats:
        return np.asarray(self.estimator_.predict_proba(self.encoder_.transform(X)), dtype=np.float64)

    def predict(self, X: Any) -> Any:
        """The most probable class."""
        return self.classes_[self.predict_proba(X).argmax(axis=1)]


def _predictions(p: Any, codes: Codes, rows: Codes, weight: Floats) -> HeldOutPredictions:
    """Of one division."""
    return HeldOutPredictions(np.asarray(p, dtype=np.float64), codes[rows], weight, rows, np.zeros_like(rows))


def stock_forest(seed: int | None = None, *, jobs: int | None = -1) -> RandomForestClassifier:
    """Scikit-learn's forest, defaults but for 300 trees: votes in steps of 1/100 are coarse to cut for a metric.

    >>> stock_forest(0).n_estimators
    300
    """
    return RandomForestClassifier(300, random_state=seed, n_jobs=jobs)


def stock_boosting(seed: int | None = None) -> HistGradientBoostingClassifier:
    """Scikit-learn's histogram gradient boosting with its defaults.

    >>> stock_boosting(0).random_state
    0
    """
    return HistGradientBoostingClassifier(random_state=seed)


OURS, OURS_BOOSTED, OURS_BLENDED = "ours", "ours_boosted", "ours_blended"


@dataclass(frozen=True)
class Contender:
    """A classifier to compare, and the decision rules to give it.

    `make(seed)` returns an estimator with `fit` and `predict_proba`; one that does not hold rows out by itself is
    wrapped in `HeldOut`. `title` is for readers.
    """

    name: str
    title: str
    make: Callable[[int], Any]
    decisions: Sequence[str] = DECISIONS


def ours(judge: Judge, *, recipe: str | Recipe = "anchored", decision: str = "auto", **options: Any) -> Contender:
    """`EASTClassifier` for a judge's metric; `options` are the classifier's other ones."""

    options |= {"recipe": recipe, "decision": decision}
    return Contender(OURS, f"ours ({find_recipe(recipe).name})", _maker(EASTClassifier, judge, options))


def ours_boosted(
    judge: Judge, *, recipe: str = "anchored", decision: str = "auto", name: str = OURS_BOOSTED, **options: Any
) -> Contender:
    """`EASTBooster` for a judge's metric; `options` are the booster's other ones."""

    options |= {"recipe": recipe, "decision": decision}
    return Contender(name, f"ours (boosted trees, {recipe})", _maker(EASTBooster, judge, options))


def ours_blended(judge: Judge, *, recipe: str = "auto", decision: str = "auto", **options: Any) -> Contender:
    """`EASTBlend` for a judge's metric; `options` are the blend's other ones."""

    title = "ours (blend)" if recipe == "auto" else f"ours (blend, {recipe})"
    return Contender(OURS_BLENDED, title, _maker(EASTBlend, judge, options | {"recipe": recipe, "decision": decision}))


def boosted_cross_entropy(judge: Judge, **options: Any) -> Contender:
    """The same trees, folds and seed with cross-entropy alone."""
    contender = ours_boosted(judge, recipe="cross_entropy", **options)
    return replace(contender, name="cross_entropy", title="cross-entropy, same trees")


def cross_entropy(judge: Judge, *, rival_of: str | Recipe = "anchored", **options: Any) -> Contender:
    """The same network, split and seed with plain cross-entropy, for as long as the recipe it is a rival of."""
    contender = ours(judge, recipe=as_long_as(find_recipe(rival_of)), **options)
    return replace(contender, name="cross_entropy", title="cross-entropy")


def as_long_as(recipe: Recipe) -> Recipe:
    """Cross-entropy for as many epochs as a recipe may take: else longer training would pass for a better loss.

    >>> as_long_as(find_recipe("paper")).epochs
    1000
    """
    plain = find_recipe("cross_entropy")
    stages = (replace(plain.stages[0], epochs=recipe.epochs, patience=recipe.epochs),)
    return replace(plain, stages=stages, updates=recipe.updates)


def majority(judge: Judge) -> Contender:
    """Always the most frequent class: what a score must be above to mean anything."""
    return Contender("majority", "majority class", lambda seed: DummyClassifier(strategy="most_frequent"), ("argmax",))


def random_forest(judge: Judge) -> Contender:
    """Scikit-learn's forest with 300 trees and its defaults otherwise."""
    return Contender("random_forest", "random forest", stock_forest)


def gradient_boosting(judge: Judge) -> Contender:
    """Scikit-learn's histogram gradient boosting with its defaults."""
    return Contender("gradient_boosting", "gradient boosting", stock_boosting)


def logistic_regression(judge: Judge) -> Contender:
    """Scikit-learn's logistic regression with its defaults."""
    return Contender("logistic_regression", "logistic regression", lambda seed: LogisticRegression(max_iter=1000))


def stock_lightgbm(judge: Judge) -> Contender:
    """LightGBM with its own objective and defaults, stopped by held-out log-loss."""
    return Contender("lightgbm", "LightGBM", lambda seed: StockBooster("lightgbm", random_state=seed))


def stock_xgboost(judge: Judge) -> Contender:
    """XGBoost with its own objective and defaults, stopped by held-out log-loss."""
    return Contender("xgboost", "XGBoost", lambda seed: StockBooster("xgboost", random_state=seed))


# Those that need the extra `boost`, by the package that each needs.
BOOSTED: dict[str, Callable[[Judge], Contender]] = {"lightgbm": stock_lightgbm, "xgboost": stock_xgboost}

RIVALS: dict[str, Callable[[Judge], Contender]] = {
    "random_forest": random_forest,
    "gradient_boosting": gradient_boosting,
    "logistic_regression": logistic_regression,
    "majority": majority,
}


def rival(name: str, judge: Judge) -> Contender:
    """A rival that needs no options, by name."""
    checks.check_choice("contender", name, RIVALS)
    return RIVALS[name](judge)


def _maker(kind: type[MetricClassifier], judge: Judge, options: dict[str, Any]) -> Callable[[int], MetricClassifier]:
    """A classifier of this kind for a judge's metric, by its seed."""
    return lambda seed: kind(**_aimed(judge), random_state=seed, **options)


def _aimed(judge: Judge) -> dict[str, Any]:
    """A judge's metric as our classifiers' options."""
    return {
        "metric": judge.aim.metric,
        "average": judge.aim.average,
        "beta": judge.beta if judge.beta is None or isinstance(judge.beta, float | int) else by_label(judge),
        "pos_label": judge.positive,
        "subject_to": judge.subject_to or None,
        "confidence": judge.aim.confidence,
    }


def by_label(judge: Judge) -> dict[Any, float]:
    """A judge's beta per class, as the classifier takes it."""
    assert isinstance(judge.beta, list)
    return dict(zip(judge.names, judge.beta, strict=True))
