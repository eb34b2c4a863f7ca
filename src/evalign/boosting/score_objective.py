"""The metric objective of boosted trees: first and second derivatives with respect to the raw scores of a table."""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evalign import checks, metrics, steps
from evalign._options import LossOptions
from evalign.boosting.gradients import Bend, ScoredRows, compiled_derivatives, has_compiled_form, metric_gradient
from evalign.confusion import Confusion
from evalign.metrics import MetricFunction
from evalign.objective import Objective, cross_entropy
from evalign.steps import StepChoice


@dataclass(frozen=True)
class CheckedLabels:
    """Labels and weights as given (copied, since a caller may overwrite them) and as tensors."""

    shape: torch.Size
    dtype: torch.dtype
    given_labels: NDArray[Any]
    given_weights: NDArray[Any] | None
    labels: Tensor
    weights: Tensor

    def is_for(self, scores: Tensor, y: Any, weight: Any) -> bool:
        """Whether these equal the checked ones; nan never does."""
        if (scores.shape, scores.dtype) != (self.shape, self.dtype) or (weight is None) != (self.given_weights is None):
            return False
        same_weights = self.given_weights is None or np.array_equal(self.given_weights, weight)
        return same_weights and np.array_equal(self.given_labels, y)


@dataclass(frozen=True)
class BoostRecipe:
    """anchor x cross-entropy + metric x (1 - soft metric), with the temperature falling to `cool_to` if given."""

    name: str
    reason: str
    anchor: float
    metric: float
    temperature: float = 0.2
    cool_to: float | None = None
    step: str = "annealed"


ANCHORED = (
    "Cross-entropy and the metric together from the first round: a new tree corrects what the others got wrong, so "
    "there is nothing to warm up. Anchor 3 as for networks: probabilities stay usable."
)
LISTED = (
    BoostRecipe("anchored", ANCHORED, anchor=3.0, metric=1.0),
    BoostRecipe("paper", "The metric alone (EAST), cooled.", anchor=0.0, metric=1.0, cool_to=0.05),
    BoostRecipe("btg", "The metric alone, a linear step of fixed slope.", anchor=0.0, metric=1.0, step="linear"),
    BoostRecipe("cross_entropy", "The rival: the same trees on cross-entropy alone.", anchor=1.0, metric=0.0),
)
RECIPES = {recipe.name: recipe for recipe in LISTED}


def find_recipe(recipe: str | BoostRecipe) -> BoostRecipe:
    """A recipe by name, or the recipe itself.

    >>> find_recipe("cross_entropy").metric
    0.0
    """
    if isinstance(recipe, BoostRecipe):
        return recipe
    checks.check_choice("recipe", recipe, RECIPES)
    return RECIPES[recipe]


class RoundCounter:
    """Counts rounds; restarts at 0 when all rows have equal scores or their number changes.

    Training that continues from a model, where scores differ, continues the count.

    >>> import numpy as np
    >>> counter = RoundCounter()
    >>> [counter.next(scores) for scores in (np.zeros(2), np.array([0.1, 0.2]), np.array([0.2, 0.3]), np.zeros(2))]
    [0, 1, 2, 0]
    """

    def __init__(self) -> None:
        self.count, self.rows = 0, -1

    def next(self, scores: NDArray[Any]) -> int:
        """The number of this round, from 0."""
        if len(scores) != self.rows or bool((scores == scores[:1]).all()):
            self.count = 0
        self.rows = len(scores)
        self.count += 1
        return self.count - 1


Array = NDArray[Any]
Temperature = float | Callable[[int], float]
NOT_FOR_TREES = ("offset", "memory", "pos_weight", "ignore_index", "per_image", "class_dim", "from_logits", "sync")
CURVATURE = {"binary": 1.0, "multilabel": 1.0, "multiclass": 2.0}


def check_objective(objective: Any) -> "ScoreObjective":
    """The objective of a wrapped classifier, which must be one of ours."""
    if not isinstance(objective, ScoreObjective):
        raise TypeError(
            f"objective must be a MetricObjective, got {objective!r}; "
            "use objective=MetricObjective('f1', task='binary')"
        )
    return objective


class TextTrees:
    """A grown ensemble, read from `text` in its library's format; pickling stores the text."""

    def __init__(self, text: str) -> None:
        self.text, self._booster = text, self._read(text)

    @staticmethod
    @abstractmethod
    def _read(text: str) -> Any:
        """The library's booster."""

    @abstractmethod
    def scores(self, x: Array) -> Array:
        """Scores (n,) of two classes, (n, C) of more."""

    def __getstate__(self) -> dict[str, str]:
        return {"text": self.text}

    def __setstate__(self, state: dict[str, str]) -> None:
        self.text, self._booster = state["text"], self._read(state["text"])


class ChecksObjective:
    """Mixin of the wrapped classifiers: `fit` refuses an objective that is not ours."""

    objective: Any

    def fit(self, X: Any, y: Any, *args: Any, **options: Any) -> Self:
        check_objective(self.objective)
        super().fit(X, y, *args, **options)  # type: ignore[misc]
        return self


def cooling(start: float = 0.2, end: float = 0.05, rounds: int = 200) -> Callable[[int], float]:
    """A temperature that falls geometrically from `start` to `end` over `rounds` rounds and stays there.

    >>> falls = cooling(0.2, 0.05, rounds=3)
    >>> [round(falls(r), 3) for r in range(4)]
    [0.2, 0.1, 0.05, 0.05]
    """
    checks.check_temperature(start)
    checks.check_temperature(end)
    checks.check_number("rounds", rounds, low=1)
    return partial(_cooled, start, end, rounds)  # which can be pickled


def _cooled(start: float, end: float, rounds: int, number: int) -> float:
    return start * float((end / start) ** min(1.0, number / max(1, rounds - 1)))


class ScoreObjective:
    r"""sum_i w_i (anchor x cross-entropy_i) + n x metric_weight x (1 - M(C)), n the sum of the weights.

    Libraries expect a sum of losses, hence the factor n. The metric's second derivative may have either sign, so
    `gradient` returns that of cross-entropy plus the absolute derivative of the metric:

        h = w max(anchor x curvature x p (1 - p), floor) + damping x |n x metric_weight x dM/dz|.

    The last part bounds a step by the metric alone to 1 / damping: a row of a class with 6 of 40,000 rows has a slope
    in the hundreds.

    Scores are (n, C) for multiclass tasks, (n,) for binary ones and (n, L) for multilabel ones; labels are 0 to
    C - 1, or 0 and 1. A weight of 0 is the same as no row.

    Parameters
    ----------
    metric, and all options not listed below: as in `MetricLoss`, except its options for batches.
    temperature: of the annealed step; a number, or a function of the round such as `cooling()`.
    anchor: weight of cross-entropy. metric_weight: weight of the metric; 0 is cross-entropy alone.
    weight: one number per class; a row has the weight of its label (multilabel: one weight per column).
    curvature: factor of the second derivative; None is 1 if a single score decides about a class and 2 for
        multiclass tasks, where the diagonal alone is too small (LightGBM takes C / (C - 1), XGBoost 2).
    floor: smallest second derivative; without it the steps g / h of a tree would be unbounded where p is near 0 or 1.
    damping: see above.

    >>> objective = ScoreObjective("f1", task="binary")
    >>> gradient, hessian = objective.gradient(np.zeros(4), np.array([0, 0, 0, 1]))
    >>> gradient.round(3), hessian.round(3)
    (array([ 0.633,  0.633,  0.633, -1.167]), array([0.383, 0.383, 0.383, 0.917]))
    >>> objective.score(np.array([-1.0, -1.0, 1.0, 1.0]), np.array([0, 0, 0, 1]))
    0.6666666666666666
    """

    def __init__(
        self,
        metric: str | MetricFunction = "f1",
        *,
        temperature: Temperature = 0.2,
        anchor: float = 1.0,
        metric_weight: float = 1.0,
        weight: Any = None,
        curvature: float | None = None,
        floor: float = 1e-3,
        damping: float = 1.0,
        **options: Any,
    ) -> None:
        given = LossOptions(metric, anchor=anchor, weight=weight, **options)
        task = given.task
        for name in NOT_FOR_TREES:
            if given.is_given(name):
                raise ValueError(f"{name} is supported by MetricLoss but not by boosted trees; leave it out")
        if given.anchor_term != "cross_entropy":
            raise ValueError(f"the anchor of boosted trees must be cross-entropy, got {given.anchor_term!r}")
        checks.check_number("metric_weight", metric_weight, low=0.0)
        checks.check_number("floor", floor, low=0.0)
        checks.check_number("damping", damping, low=0.0)
        if anchor == 0 and metric_weight == 0:
            raise ValueError("anchor or metric_weight must be above 0, got 0 for both; nothing would be learned")
        if curvature is not None:
            checks.check_number("curvature", curvature, low=0.0, open_low=True)
        if not callable(temperature):
            checks.check_temperature(temperature)
        self.metric, self.task = metric, task
        self.objective = Objective.of(given)
        self.temperature, self.metric_weight = temperature, metric_weight
        self.floor, self.damping = floor, damping
        self.curvature = CURVATURE[task] if curvature is None else curvature
        self.weight = None if weight is None else torch.as_tensor(weight, dtype=torch.float64)
        self._checked: CheckedLabels | None = None

    @property
    def name(self) -> str:
        return metrics.name_of(self.metric)

    def gradient(self, scores: Array, y: Array, weight: Array | None = None, *, round: int = 0) -> tuple[Array, Array]:
        """First and second derivative with respect to every score, in the shape and precision of the scores."""
        return self._derivatives(self._table(scores, y, weight), round, np.shape(scores))[2:]

    def value_and_gradient(
        self, scores: Array, y: Array, weight: Array | None = None, *, round: int = 0
    ) -> tuple[float, Array, Array]:
        """`loss` and both derivatives, at little more than the cost of the derivatives."""
        table = self._table(scores, y, weight)
        lost, entropy, gradient, hessian = self._derivatives(table, round, np.shape(scores))
        anchor = self.objective.anchor
        if anchor:
            lost += anchor * (self._entropy(table) if entropy is None else entropy)
        return lost, gradient, hessian

    def _derivatives(
        self, table: ScoredRows, round: int, shape: tuple[int, ...]
    ) -> tuple[float, float | None, Array, Array]:
        """The metric's part of the loss, the cross-entropy if already computed, and both derivatives of the loss."""
        anchor, lost, temperature = self.objective.anchor, 0.0, self.temperature_at(round)
        if self.metric_weight and has_compiled_form(self.objective, table, temperature):
            bend = Bend(self.curvature, self.floor, self.damping)
            lost, entropy, *both = compiled_derivatives(self.objective, table, temperature, self.metric_weight, bend)
            return self.metric_weight * lost, entropy, both[0].reshape(shape), both[1].reshape(shape)
        p = self._probabilities(table.scores)
        w = table.weight[:, None] if self.task == "multiclass" else table.weight
        gradient = (p - self._targets(table)).mul_(w).mul_(anchor)
        hessian = (p * (1 - p)).mul_(self.curvature * (anchor or 1.0)).clamp_min_(self.floor).mul_(w)
        if self.metric_weight:
            value, by_metric = metric_gradient(self.objective, table, temperature)
            # Cross-entropy of a multilabel task is a mean over all labels, so n counts labels there.
            by_metric.mul_(self.metric_weight * float(table.weight.sum()))
            gradient += by_metric
            hessian.add_(by_metric.abs_(), alpha=self.damping)
            lost = self.metric_weight * float(value)
        return lost, None, gradient.numpy().reshape(shape), hessian.numpy().reshape(shape)

    def loss(self, scores: Array, y: Array, weight: Array | None = None, *, round: int = 0) -> float:
        """The minimised loss, as a mean: anchor x cross-entropy + metric_weight x (1 - soft metric)."""
        table = self._table(scores, y, weight)
        with torch.no_grad():
            value = 0.0
            if self.metric_weight:
                batch, temperature = (table.scores, table.y, table.weight), self.temperature_at(round)
                if self.objective.is_ranking:
                    lost = self.objective.ranked(*batch, temperature)
                else:
                    lost = self.objective.metric_term(self.objective.counts(*batch, temperature)[0])
                value += self.metric_weight * float(lost)
            if self.objective.anchor:
                value += self.objective.anchor * self._entropy(table)
        return value

    def score(self, scores: Array, y: Array, weight: Array | None = None) -> float:
        """The metric of hard decisions: the largest score, or probabilities at or above the threshold.

        Rankings such as "auroc" are exact.
        """
        table = self._table(scores, y, weight)
        with torch.no_grad():
            if self.objective.is_ranking:
                return 1 - float(self.objective.ranked(table.scores, table.y, table.weight))
            return float(self.objective.score(self._hard(table)))

    def probabilities(self, scores: Array) -> Array:
        """Softmax, or a sigmoid of each score."""
        return self._probabilities(torch.from_numpy(np.ascontiguousarray(scores))).numpy()

    def labels(self, scores: Array) -> Array:
        """Decisions: the largest score, or probabilities at or above the threshold."""
        threshold = self.objective.thresholds
        if self.task == "multiclass":
            chosen: Array = np.asarray(scores).argmax(1)
        else:
            chosen = self.probabilities(scores) >= (threshold if isinstance(threshold, float) else 0.5)
        return chosen.astype(np.int64)

    def class_probabilities(self, scores: Array) -> Array:
        """Probabilities of every class, (n, C), or (n, 2) for binary tasks."""
        p = self.probabilities(scores)
        return np.stack([1 - p, p], 1) if p.ndim == 1 else p

    def temperature_at(self, round: int) -> float:
        if not callable(self.temperature):
            return self.temperature
        value = float(self.temperature(round))
        checks.check_temperature(value)
        return value

    def _table(self, scores: Array, y: Array, weight: Array | None) -> ScoredRows:
        z = torch.from_numpy(np.ascontiguousarray(scores))
        checks.check_floating("scores", z)
        flat = self.task == "binary"
        if z.dim() == 2 and z.shape[1] == 1 and flat:
            z = z[:, 0]
        if z.dim() != (1 if flat else 2):
            remedy = "pass task='binary'" if z.dim() == 1 else "pass task='multiclass', or 'multilabel' for 0/1 labels"
            wanted = "(n,)" if flat else "(n, classes)"
            raise ValueError(f"scores of a {self.task} task must be {wanted}, got {tuple(z.shape)}; {remedy}")
        if self._checked is None or not self._checked.is_for(z, y, weight):
            labels = self._labels(z, y)
            given = np.array(y), None if weight is None else np.array(weight)
            self._checked = CheckedLabels(z.shape, z.dtype, *given, labels, self._weights(z, labels, weight))
        return ScoredRows(z, self._checked.labels, self._checked.weights)

    def _labels(self, z: Tensor, y: Array) -> Tensor:
        given = torch.from_numpy(np.ascontiguousarray(y))
        labels = given.long()  # the libraries keep whole numbers as float32
        if given.is_floating_point() and not torch.equal(labels.to(given.dtype), given):
            raise ValueError(f"labels must be whole numbers, got {given[labels != given].reshape(-1)[0].item():g}")
        if self.task == "multilabel" and labels.shape != z.shape:
            labels = labels.reshape(z.shape) if labels.numel() == z.numel() else labels
        expected = z.shape[:1] if self.task == "multiclass" else z.shape
        if labels.shape != expected:
            raise ValueError(f"labels must have shape {tuple(expected)} for these scores, got {tuple(labels.shape)}")
        checks.check_label_range(labels, z.shape[1] if self.task == "multiclass" else 2, None)
        return labels

    def _weights(self, z: Tensor, labels: Tensor, weight: Array | None) -> Tensor:
        w = torch.ones(labels.shape, dtype=z.dtype)
        if weight is not None:
            given = torch.from_numpy(np.ascontiguousarray(weight)).to(z.dtype)
            given = given[:, None] if self.task == "multilabel" and given.dim() == 1 else given
            w = w * checks.check_weights(given.expand(w.shape), tuple(w.shape))
        if self.weight is not None:
            classes = 2 if self.task == "binary" else z.shape[1]
            checks.check_per_class("weight", self.weight, classes, number_allowed=False)
            w = w * (self.weight if self.task == "multilabel" else self.weight[labels]).to(z.dtype)
        return w

    def _probabilities(self, z: Tensor) -> Tensor:
        return z.softmax(1) if self.task == "multiclass" else z.sigmoid()

    def _targets(self, table: ScoredRows) -> Tensor:
        """Labels as probabilities, smoothed."""
        e = self.objective.label_smoothing
        if self.task != "multiclass":
            return (1 - e) * table.y.to(table.scores.dtype) + e / 2
        spread = torch.full_like(table.scores, e / table.scores.shape[1])
        return spread.scatter_add_(1, table.y[:, None], torch.full_like(spread[:, :1], 1 - e))

    def _entropy(self, table: ScoredRows) -> float:
        smoothing = self.objective.label_smoothing
        return float(cross_entropy(table.scores, table.y, table.weight, self.task, smoothing))

    def _hard(self, table: ScoredRows) -> Confusion:
        thresholds, z = self.objective.thresholds, table.scores
        if isinstance(thresholds, tuple):
            hard = replace(self.objective, step=StepChoice(steps.hard))
            return hard.confusion(z, table.y, table.weight)
        if self.task == "multiclass":
            return Confusion.hard(z.argmax(1), table.y, z.shape[1], sample_weight=table.weight)
        decided = steps.hard(z.sigmoid(), 0.5 if thresholds is None else thresholds).long()
        multilabel = self.task == "multilabel"
        return Confusion.hard(decided, table.y, 2, sample_weight=table.weight, multilabel=multilabel)


class RoundObjective(ScoreObjective):
    """`ScoreObjective` as called by a library every round; it counts rounds, so `temperature=cooling()` works.

    A subclass reads scores, labels and weights from what its library passes.
    """

    def __init__(self, metric: Any = "f1", **options: Any) -> None:
        super().__init__(metric, **options)
        self._rounds = RoundCounter()

    def __call__(self, first: Any, second: Any, sample_weight: Any = None) -> tuple[Array, Array]:
        """First and second derivative."""
        scores, y, weight = self._read(first, second, sample_weight)
        return self.gradient(scores, y, weight, round=self._rounds.next(scores))

    @abstractmethod
    def _read(self, first: Any, second: Any, weight: Any) -> tuple[Array, Array, Array | None]:
        """Scores, labels and weights from the arguments of the library."""
