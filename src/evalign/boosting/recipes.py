"""What boosting minimises, by the names that a network's recipes have; docs/boosting.md tells what was measured."""

from dataclasses import dataclass

from evalign import checks


@dataclass(frozen=True)
class BoostRecipe:
    """anchor x cross-entropy + metric x (1 - soft metric), the temperature falling to `cool_to` if that is given."""

    name: str
    reason: str
    anchor: float
    metric: float
    temperature: float = 0.2
    cool_to: float | None = None
    step: str = "annealed"


RECIPES: dict[str, BoostRecipe] = {
    recipe.name: recipe
    for recipe in (
        BoostRecipe(
            "anchored",
            "Cross-entropy and the metric together from the first round: a new tree corrects what the others got "
            "wrong, so there is nothing to warm up. Anchor 3 as for networks: probabilities stay usable.",
            anchor=3.0,
            metric=1.0,
        ),
        BoostRecipe("paper", "The metric alone (EAST), cooled.", anchor=0.0, metric=1.0, cool_to=0.05),
        BoostRecipe("btg", "The metric alone, a linear step of fixed slope.", anchor=0.0, metric=1.0, step="linear"),
        BoostRecipe("cross_entropy", "The rival: the same trees on cross-entropy alone.", anchor=1.0, metric=0.0),
    )
}


def find_recipe(recipe: str | BoostRecipe) -> BoostRecipe:
    """A recipe by name, or the recipe itself.

    >>> find_recipe("cross_entropy").metric
    0.0
    """
    if isinstance(recipe, BoostRecipe):
        return recipe
    checks.check_choice("recipe", recipe, RECIPES)
    return RECIPES[recipe]
