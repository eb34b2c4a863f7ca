"""Who is compared: a name and how to make an unfitted classifier from a seed. Add a rival by adding an entry."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sklearn.dummy import DummyClassifier

from evalign import checks
from evalign.baselines import trees
from evalign.comparison.aims import DECISIONS, Judge
from evalign.comparison.held_out import KeepsBlend, KeepsBooster, KeepsValidation
from evalign.comparison.stock import StockBooster
from evalign.training.recipes import Recipe, find_recipe

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


def ours(judge: Judge, *, recipe: str | Recipe = "anchored", decision: str = "plug_in", **options: Any) -> Contender:
    """`EASTClassifier` for a judge's metric; `options` are the classifier's other ones."""

    def make(seed: int) -> KeepsValidation:
        return KeepsValidation(
            **_aimed(judge),
            recipe=recipe,
            decision=decision,  # type: ignore[arg-type]
            random_state=seed,
            **options,
        )

    return Contender(OURS, f"ours ({find_recipe(recipe).name})", make)


def ours_boosted(
    judge: Judge, *, recipe: str = "anchored", decision: str = "tuned", name: str = OURS_BOOSTED, **options: Any
) -> Contender:
    """`EASTBooster` for a judge's metric; `options` are the booster's other ones."""

    def make(seed: int) -> KeepsBooster:
        return KeepsBooster(
            **_aimed(judge),
            recipe=recipe,
            decision=decision,  # type: ignore[arg-type]
            random_state=seed,
            **options,
        )

    return Contender(name, f"ours (boosted trees, {recipe})", make)


def ours_blended(judge: Judge, *, recipe: str = "anchored", decision: str = "plug_in", **options: Any) -> Contender:
    """`EASTBlend` for a judge's metric; `options` are the blend's other ones."""

    def make(seed: int) -> KeepsBlend:
        return KeepsBlend(
            **_aimed(judge),
            recipe=recipe,
            decision=decision,  # type: ignore[arg-type]
            random_state=seed,
            **options,
        )

    return Contender(OURS_BLENDED, f"ours (blend, {recipe})", make)


def blended_cross_entropy(judge: Judge, **options: Any) -> Contender:
    """The same members, folds and seed with cross-entropy alone."""
    contender = ours_blended(judge, recipe="cross_entropy", **options)
    return replace(contender, name="cross_entropy", title="cross-entropy, same blend")


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
    return Contender("random_forest", "random forest", trees.random_forest)


def gradient_boosting(judge: Judge) -> Contender:
    """Scikit-learn's histogram gradient boosting with its defaults."""
    return Contender("gradient_boosting", "gradient boosting", trees.gradient_boosting)


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
    "majority": majority,
}


def rival(name: str, judge: Judge) -> Contender:
    """A rival that needs no options, by name."""
    checks.check_choice("contender", name, RIVALS)
    return RIVALS[name](judge)


def _aimed(judge: Judge) -> dict[str, Any]:
    """A judge's metric as our classifiers' options."""
    return {
        "metric": judge.aim.metric,
        "average": judge.aim.average,
        "beta": judge.beta if judge.beta is None or isinstance(judge.beta, float | int) else by_label(judge),
        "pos_label": judge.positive,
        "subject_to": judge.subject_to or None,
    }


def by_label(judge: Judge) -> dict[Any, float]:
    """A judge's beta per class, as the classifier takes it."""
    assert isinstance(judge.beta, list)
    return dict(zip(judge.names, judge.beta, strict=True))
