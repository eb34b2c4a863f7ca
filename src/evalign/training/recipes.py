"""Recipes: what is minimised when, as data. docs/recipes.md tells what was tried and measured."""

from dataclasses import dataclass, replace
from typing import Literal

from evalign import checks


@dataclass(frozen=True)
class Stage:
    """One optimiser's life: 1 - soft metric (if `metric`) + `anchor` x cross-entropy, until it stops paying.

    `epochs` bounds the stage. `patience` epochs without a better validation value end it, or, with a cooling
    `rate`, end one temperature. `decay` "cosine" takes the learning rate to 0 over `epochs`.
    """

    name: str
    metric: bool
    anchor: float
    learning_rate: float
    epochs: int
    patience: int
    monitor: Literal["loss", "score", "entropy"] = "loss"
    decay: Literal["none", "cosine"] = "none"
    temperature: float = 0.2
    rate: float | None = None
    max_stale: int = 3
    step: str = "annealed"
    weight_decay: float = 1e-2
    batch_size: int | None = None  # None takes the classifier's


@dataclass(frozen=True)
class Recipe:
    """Stages in order, each starting from the best weights of the one before, and the reason for them."""

    name: str
    reason: str
    stages: tuple[Stage, ...]

    @property
    def epochs(self) -> int:
        return sum(stage.epochs for stage in self.stages)

    def limited(self, epochs: int | None) -> "Recipe":
        """The same recipe in at most `epochs` epochs, shared among the stages in proportion."""
        if epochs is None or epochs >= self.epochs:
            return self
        share = epochs / self.epochs
        stages = tuple(replace(stage, epochs=max(1, round(stage.epochs * share))) for stage in self.stages)
        return replace(self, stages=stages)

    def scaled(self, factor: float) -> "Recipe":
        """The same recipe with every learning rate multiplied."""
        stages = tuple(replace(stage, learning_rate=stage.learning_rate * factor) for stage in self.stages)
        return replace(self, stages=stages)


CROSS_ENTROPY = Stage(
    "cross-entropy", metric=False, anchor=1.0, learning_rate=1e-3, epochs=100, patience=30, monitor="entropy"
)

RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        Recipe(
            "anchored",
            "Cross-entropy finds features for every class; the metric alone forgets classes whose probability is "
            "near 0, where its step is flat. So start from cross-entropy and keep it beside the metric.",
            (
                CROSS_ENTROPY,
                Stage(
                    "metric", metric=True, anchor=1.0, learning_rate=3e-4, epochs=100, patience=10, rate=0.8,
                    monitor="loss",
                ),
            ),
        ),
        Recipe(
            "paper",
            "EAST as printed (Sec. 4.3): the metric alone, from scratch, geometric cooling.",
            (
                Stage(
                    "metric", metric=True, anchor=0.0, learning_rate=1e-3, epochs=1000, patience=50, rate=0.9,
                    monitor="loss",
                ),
            ),
        ),
        Recipe(
            "btg",
            "Bridging the Gap as printed: the metric alone, from scratch, a linear step of fixed slope.",
            (
                Stage(
                    "metric", metric=True, anchor=0.0, learning_rate=1e-3, epochs=1000, patience=100, monitor="loss",
                    step="linear", weight_decay=0.0,
                ),
            ),
        ),
        Recipe(
            "cross_entropy",
            "The rival: cross-entropy, for as many epochs as `anchored` may take.",
            (replace(CROSS_ENTROPY, epochs=200),),
        ),
    )
}  # fmt: skip


def find_recipe(recipe: "str | Recipe") -> Recipe:
    """A recipe by name, or the recipe itself.

    >>> [stage.name for stage in find_recipe("anchored").stages]
    ['cross-entropy', 'metric']
    """
    if isinstance(recipe, Recipe):
        return recipe
    checks.check_choice("recipe", recipe, RECIPES)
    return RECIPES[recipe]
