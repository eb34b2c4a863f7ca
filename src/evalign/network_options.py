"""What may be asked of an `EASTClassifier`, and what follows from it: its recipe, and how many networks it trains."""

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from evalign import checks
from evalign.folds import automatic_folds, check_folds
from evalign.networks.ensemble import SHARING
from evalign.networks.tabular import CURVES
from evalign.training.recipes import Recipe, find_recipe

if TYPE_CHECKING:
    from evalign.estimator import EASTClassifier


def checked_recipe(model: "EASTClassifier") -> Recipe:
    """The recipe for the epochs and the learning rate that are asked for, once every option is known to make sense."""
    _check_network(model)
    check_folds(model.folds)
    if model.batch_size != "auto":
        checks.check_number("batch_size", model.batch_size, low=1)
    if model.epochs is not None:
        checks.check_number("epochs", model.epochs, low=1)
    recipe = find_recipe(model.recipe).limited(model.epochs)
    if model.decision == "plug_in":
        check_plug_in(recipe)
    if model.learning_rate is not None:
        checks.check_number("learning_rate", model.learning_rate, low=0.0, open_low=True)
        recipe = recipe.scaled(model.learning_rate / recipe.stages[0].learning_rate)
    return recipe


def check_plug_in(recipe: Recipe) -> None:
    """Refuse a plug-in decision for probabilities that are not honest."""
    if _has_offsets(recipe):
        raise ValueError(
            f"recipe {recipe.name!r} has class offsets, which move the probabilities to where argmax serves the "
            "metric; a plug-in decision would count them twice: use decision='argmax' or 'tuned'"
        )


def _check_network(model: "EASTClassifier") -> None:
    checks.check_number("dropout", model.dropout, low=0.0, high=1.0, open_high=True)
    checks.check_choice("network", model.network, CURVES)
    checks.check_choice("sharing", model.sharing, SHARING)
    checks.check_number("ensemble", model.ensemble, low=1)
    if model.ensemble != int(model.ensemble):
        raise ValueError(f"ensemble must be a whole number of networks, got {model.ensemble}")
    if model.network == "embedding" and model.numeric == "standard":
        raise ValueError(
            "network 'embedding' cuts numbers at their quantiles, which numeric 'standard' does not learn; "
            "use numeric='both' or 'quantile', or network='periodic'"
        )


def fold_count(model: "EASTClassifier", codes: NDArray[np.int64], recipe: Recipe) -> int:
    """How many folds are asked for; "auto" does not ask for what cannot be stacked."""
    alone = _trains_alone(model, recipe)
    if model.folds != "auto":
        if alone and model.folds > 1:
            raise ValueError(f"folds train as one stack, which does not go with {alone}; use folds=1")
        return int(model.folds)
    return 1 if alone or callable(model.metric) else automatic_folds(codes, model.validation_fraction)


def _trains_alone(model: "EASTClassifier", recipe: Recipe) -> str | None:
    """What keeps a network from being trained in a stack, in a word or two."""
    if model.amp:
        return "amp=True"
    return f"the class offsets of recipe {recipe.name!r}" if _has_offsets(recipe) else None


def _has_offsets(recipe: Recipe) -> bool:
    return any(stage.offset for stage in recipe.stages)
