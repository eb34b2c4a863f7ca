"""Training recipes as data: stages and their losses. docs/research/recipes.md has the measurements."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from evalign import checks

if TYPE_CHECKING:
    pass


@dataclass(frozen=True)
class Stage:
    """One phase of training with its own optimiser: 1 - soft metric (if `metric`) + `anchor` x cross-entropy.

    `epochs` is the maximum length of the stage. `patience` epochs without improvement end it, or, with a cooling
    `rate`, end one temperature; `cool_to` instead cools over `epochs` by the schedule `cooling`, independent of
    validation. `decay` "cosine" takes the learning rate to 0 over `epochs`. `monitor` names the validation value that
    chooses the weights to keep; "last" keeps the last epoch.

    With `offset` the class offsets of the metric (`training.offsets`), estimated from the validation confusion
    matrix at the start of the stage and multiplied by this number, are added to the logits in training only.
    """

    name: str
    metric: bool
    anchor: float
    learning_rate: float
    epochs: int
    patience: int
    monitor: Literal["loss", "score", "entropy", "last"] = "loss"
    decay: Literal["none", "cosine"] = "none"
    temperature: float = 0.2
    rate: float | None = None
    cool_to: float | None = None
    cooling: Literal["geometric", "linear", "cosine"] = "geometric"
    max_stale: int = 3
    step: str = "annealed"
    weight_decay: float = 1e-2
    offset: float = 0.0


@dataclass(frozen=True)
class Recipe:
    """Stages in order, each starting from the best weights of the one before, and the reason for the recipe.

    `updates` limits the number of batches on large tables, but not to fewer than 40 epochs.
    """

    name: str
    reason: str
    stages: tuple[Stage, ...]
    updates: int | None = None
    batch_size: int | None = None  # None: set by the size of the table

    @property
    def epochs(self) -> int:
        return sum(stage.epochs for stage in self.stages)

    @property
    def has_offsets(self) -> bool:
        return any(stage.offset for stage in self.stages)

    def limited(self, epochs: int | None) -> "Recipe":
        """The same recipe with at most `epochs` epochs, divided among the stages in proportion.

        An explicit number of epochs replaces `updates`.
        """
        if epochs is None:
            return self
        share = min(1.0, epochs / self.epochs)
        stages = tuple(replace(stage, epochs=max(1, round(stage.epochs * share))) for stage in self.stages)
        return replace(self, stages=stages, updates=None)

    def for_rows(self, n: int, batch_size: int) -> "Recipe":
        """The recipe for `n` training rows, with `updates` converted to epochs.

        >>> [find_recipe("anchored").for_rows(n, batch).epochs for n, batch in ((950, 128), (182_000, 2048))]
        [200, 45]
        """
        if self.updates is None:
            return self
        return self.limited(max(40, round(self.updates / max(1, round(n / batch_size)))))

    def stopping_early(self) -> "Recipe":
        """End cross-entropy after a fifth of its epochs, at least ten, without improvement.

        On eleven tables of the suite, 60 epochs, it halved the time and changed nothing beyond noise.

        >>> [stage.patience for stage in find_recipe("anchored").limited(100).stopping_early().stages]
        [12, 80]
        """

        def patience(stage: Stage) -> int:
            return min(stage.patience, max(10, round(0.2 * stage.epochs)))

        stages = (replace(s, patience=patience(s)) if s.monitor == "entropy" else s for s in self.stages)
        return replace(self, stages=tuple(stages))

    def scaled(self, factor: float) -> "Recipe":
        """The same recipe with every learning rate multiplied."""
        stages = tuple(replace(stage, learning_rate=stage.learning_rate * factor) for stage in self.stages)
        return replace(self, stages=stages)


# The numbers were chosen for F1 on held-out training data of six tables; docs/research/recipes.md has the measurements.
UPDATES = 4000  # 45 epochs of 182,000 rows; a table of that size gained nothing from 100 epochs over 40

CROSS_ENTROPY = Stage(
    # Cosine decay without early stopping: the epoch of the lowest validation cross-entropy is kept.
    "cross-entropy", metric=False, anchor=1.0, learning_rate=2e-3, epochs=120, patience=120, monitor="entropy",
    decay="cosine",
)  # fmt: skip

OFFSET_STAGE = Stage(
    "metric, offsets", metric=True, anchor=1.0, learning_rate=5e-4, epochs=40, patience=40, monitor="last",
    decay="cosine", cool_to=0.1, offset=1.0,
)  # fmt: skip

RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        Recipe(
            "anchored",
            "Cross-entropy finds features for every class; the metric alone forgets classes whose probability is "
            "near 0, where its step is flat. So start from cross-entropy and keep it as an anchor.",
            (
                CROSS_ENTROPY,
                # anchor 3: half the harm of anchor 1 to the probabilities, which the plug-in decision relies on, at
                # the same F1. Cooling is slow: by 0.8 after 5 epochs without improvement cost 0.006 on Adult, where a
                # temperature fixed at 0.1 or at 0.2 made no difference.
                Stage(
                    "metric", metric=True, anchor=3.0, learning_rate=5e-4, epochs=80, patience=80, monitor="loss",
                    decay="cosine", cool_to=0.1,
                ),
            ),
            updates=UPDATES,
        ),
        Recipe(
            "anchored_offset",
            "For networks that fit every training row, so that a metric of those rows has no gradient left: class "
            "offsets, estimated from the metric's gradient at the validation confusion matrix and again half way, "
            "keep the classes open that the metric gains most from.",
            (
                CROSS_ENTROPY,
                OFFSET_STAGE,
                replace(OFFSET_STAGE, name="metric, offsets anew", learning_rate=2e-4),
            ),
            updates=UPDATES,
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
            batch_size=1024,
        ),
        Recipe(
            "cross_entropy",
            "The rival: cross-entropy alone, decayed over as many epochs as both stages of `anchored` take.",
            (replace(CROSS_ENTROPY, epochs=200, patience=200),),
            updates=UPDATES,
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
