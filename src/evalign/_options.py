"""LossOptions: the options of a metric loss, with defaults and checks; `MetricLoss` documents them."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, fields
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar

import numpy as np
from torch import Tensor

from evalign import checks, curves, metrics
from evalign.confusion import TASKS, Task
from evalign.distributed import SyncChoice, resolve
from evalign.memory import Decay, Memory
from evalign.metrics import AVERAGES, Average, Beta, MetricFunction
from evalign.steps import Step, StepChoice

Backend = Literal["auto", "eager"]
BACKENDS: tuple[Backend, ...] = ("auto", "eager")
Reduction = Literal["mean", "none"]
Anchor = float | tuple[float, str | Callable[[Tensor, Tensor], Tensor]]
ANCHORS = ("cross_entropy", "focal")
OF_NAMED_METRICS = ("beta", "alpha", "at", "max_fpr", "smooth", "include_background")
NUMBERS = ("alpha", "at", "max_fpr", "delta", "k", "anchor", "label_smoothing", "smooth")
KINDS = {"include_background": bool, "per_image": bool, "from_logits": bool, "ignore_index": int, "class_dim": int}
PerClass = Tensor | Sequence[float]
Thresholds = float | tuple[float, ...] | None


@dataclass(frozen=True, eq=False)
class LossOptions:
    """Options of `MetricLoss`, `metric_loss` and the objectives of boosted trees.

    >>> LossOptions("f1", task="binary").averaging
    'binary'
    """

    metric: str | MetricFunction
    _: KW_ONLY
    task: Task = "multiclass"
    average: Average | None = None
    beta: Beta | None = None
    alpha: float | None = None
    at: float | None = None
    max_fpr: float | None = None
    step: str | Step = "annealed"
    temperature: float | Tensor = 0.2
    delta: float = 0.1
    k: float = 10.0
    threshold: float | Sequence[float] | None = None
    anchor: Anchor = 0.0
    offset: PerClass | None = None
    memory: Memory | Decay | None = None
    weight: PerClass | None = None
    pos_weight: float | PerClass | None = None
    ignore_index: int = -100
    label_smoothing: float = 0.0
    smooth: float = 0.0
    include_background: bool = True
    per_image: bool = False
    reduction: Reduction = "mean"
    class_dim: int = 1
    from_logits: bool = True
    sync: SyncChoice = "auto"
    backend: Backend = "auto"

    def __post_init__(self) -> None:
        for name in OPTION_NAMES:
            object.__setattr__(self, name, _as_number(name, getattr(self, name)))
        checks.check_choice("backend", self.backend, BACKENDS)
        checks.check_choice("task", self.task, TASKS)
        checks.check_choice("reduction", self.reduction, ["mean", "none"])
        checks.check_choice("average", self.averaging, AVERAGES)
        checks.check_temperature(self.temperature)
        if isinstance(self.temperature, Tensor) and self.temperature.numel() != 1:
            raise ValueError(f"temperature must be one number, got shape {tuple(self.temperature.shape)}")
        if isinstance(self.anchor, tuple):
            if len(self.anchor) != 2:
                raise ValueError(f"anchor must be a number, or a pair of a number and a term, got {self.anchor!r}")
            object.__setattr__(self, "anchor", (_as_number("anchor", self.anchor[0]), self.anchor[1]))
        checks.check_number("anchor", self.anchor_weight, low=0.0, open_high=True)
        if not callable(self.anchor_term):
            checks.check_choice("the term of an anchor", self.anchor_term, ANCHORS)
        checks.check_number("label_smoothing", self.label_smoothing, low=0.0, high=1.0, open_high=True)
        checks.check_number("smooth", self.smooth, low=0.0, open_high=True)
        for name in ("weight", "pos_weight"):
            checks.check_vector(name, getattr(self, name), low=0.0)
        checks.check_vector("offset", self.offset)
        for name, kind in KINDS.items():
            if type(getattr(self, name)) is not kind:
                expected = "True or False" if kind is bool else "a whole number"
                raise TypeError(f"{name} must be {expected}, got {getattr(self, name)!r}")
        resolve(self.sync, training=False)  # report a wrong value now, not at the first batch
        StepChoice(self.step, self.delta, self.k)
        for name, steps in {"delta": ("linear",), "k": ("sigmoid",)}.items():
            if self.is_given(name) and self.step not in steps:
                raise ValueError(f"{name} requires step {' or '.join(map(repr, steps))}, got step {self.step!r}")
        if not callable(self.metric):
            self._check_metric(self.metric)
        elif given := [n for n in OF_NAMED_METRICS if self.is_given(n)]:
            raise ValueError(f"{given[0]} requires a metric given by name; a metric function must handle it itself")
        self._check_thresholds()
        if self.pos_weight is not None and self.task == "multiclass":
            raise ValueError("pos_weight needs task='binary' or 'multilabel'; for classes use weight")
        if self.reduction == "none" and not self.per_image:
            raise ValueError("reduction='none' needs per_image=True: the metric of a batch is one number")
        if self.per_image and self.memory is not None:
            raise ValueError(
                "per_image=True computes one metric per image, which a memory cannot add to; use one of them"
            )

    def _check_metric(self, metric: str) -> None:
        checks.check_choice("metric", metric, [*metrics.METRICS, *curves.RANKINGS])
        averaged = metric in metrics.METRICS and metrics.is_averaged(metric)
        if metric == "quadratic_kappa" and self.task != "multiclass":
            raise ValueError(f"quadratic_kappa needs ordered classes, task='multiclass', got task {self.task!r}")
        if (metric == "top_k_accuracy") > (self.task == "multiclass"):
            raise ValueError(f"top_k_accuracy needs task='multiclass', got task {self.task!r}")
        if self.averaging == "binary" and self.task != "binary" and averaged:
            raise ValueError(
                f"average='binary' needs task='binary', got task {self.task!r}; use 'macro', 'micro' or 'weighted'"
            )
        for name, owners in {"beta": ("fbeta", "tversky"), "alpha": ("tversky",), "max_fpr": ("auroc",)}.items():
            if getattr(self, name) is not None and metric not in owners:
                raise ValueError(f"{name} requires metric {' or '.join(map(repr, owners))}, got metric {metric!r}")
        checks.check_beta(self.beta)
        curves.check_at(metric, self.at)
        if self.alpha is not None:
            checks.check_number("alpha", self.alpha, low=0.0, open_high=True)
        if self.max_fpr is not None:
            checks.check_number("max_fpr", self.max_fpr, low=0.0, high=1.0, open_low=True)
        if metric in curves.RANKINGS and self.average in ("micro", "weighted"):
            raise ValueError(f"{metric} is always the unweighted mean over classes; leave average out")
        for name in ("smooth", "include_background"):
            if self.is_given(name) and not averaged:
                raise ValueError(f"{name} requires a metric that averages over classes, got metric {metric!r}")
        if not self.include_background and self.task == "binary":
            raise ValueError(
                "include_background=False needs task='multiclass' or 'multilabel'; a binary task scores class 1 only"
            )
        if metric in curves.RANKINGS and self.memory is not None and not isinstance(self.thresholds, tuple):
            raise ValueError(
                f"{metric} ranks the rows within one batch, which a memory cannot add to; pass threshold=[...]"
            )

    def _check_thresholds(self) -> None:
        try:
            grid = self.thresholds
        except (TypeError, ValueError):
            raise TypeError(f"threshold must be a number or a sequence of numbers, got {self.threshold!r}") from None
        ranking = self.metric in curves.RANKINGS
        if ranking and isinstance(grid, float):
            raise ValueError(f"{self.metric} has no single threshold, got {grid!r}; leave it out")
        if ranking and isinstance(grid, tuple) and self.metric != "auroc":
            raise ValueError(f"{self.metric} takes its thresholds from the scores of the batch; leave threshold out")
        if isinstance(grid, tuple) and self.max_fpr is not None:
            raise ValueError("max_fpr takes its thresholds from the scores of the batch; leave threshold out")
        for tau in grid if isinstance(grid, tuple) else () if grid is None else (grid,):
            checks.check_threshold(tau)
        if isinstance(grid, tuple) and (len(grid) == 0 or list(grid) != sorted(grid)):
            raise ValueError(f"a grid of thresholds must be increasing and not empty, got {list(grid)}")
        if isinstance(grid, tuple) and self.task == "multiclass" and not ranking:
            raise ValueError(
                "a grid of thresholds needs task='binary' or 'multilabel'; multiclass takes one threshold or None"
            )

    def is_given(self, name: str) -> bool:
        """Whether an option differs from its default."""
        value, default = getattr(self, name), LossOptions.__dataclass_fields__[name].default
        return value is not default and not (isinstance(value, (int, float, str)) and value == default)

    @property
    def averaging(self) -> Average:
        """`average` with its default filled in."""
        return self.average or ("binary" if self.task == "binary" else "macro")

    @property
    def thresholds(self) -> Thresholds:
        """One threshold, a grid of them, or None for the default of the task."""
        given: Any = self.threshold.tolist() if isinstance(self.threshold, (Tensor, np.ndarray)) else self.threshold
        if given is None:
            return None
        return float(given) if isinstance(given, (int, float)) else tuple(map(float, given))

    @property
    def anchor_weight(self) -> float:
        return self.anchor[0] if isinstance(self.anchor, tuple) else self.anchor

    @property
    def anchor_term(self) -> str | Callable[[Tensor, Tensor], Tensor]:
        return self.anchor[1] if isinstance(self.anchor, tuple) else "cross_entropy"


def _as_number(name: str, value: Any) -> Any:
    """Numbers of numpy and torch as Python's, other values as they are; a number that is to be learned is refused."""
    if isinstance(value, Tensor):
        if name in (*NUMBERS, "threshold") and value.requires_grad:
            raise ValueError(f"{name} cannot be learned, got a tensor that requires a gradient; pass a number")
        return value.item() if name in NUMBERS and value.numel() == 1 else value
    return value.item() if isinstance(value, np.generic) else value


OPTION_NAMES = tuple(field.name for field in fields(LossOptions))
P = ParamSpec("P")
S = TypeVar("S")
R = TypeVar("R")


def signature_of(
    options: Callable[P, Any],
) -> Callable[[Callable[Concatenate[S, ...], R]], Callable[Concatenate[S, P], R]]:
    """Give a method the signature of `options`, for type checkers and `help`."""

    def decorate(method: Callable[Concatenate[S, ...], R]) -> Callable[Concatenate[S, P], R]:
        own, given = inspect.signature(method), inspect.signature(options)
        first = next(iter(own.parameters.values()))
        shown = own.replace(parameters=[first, *given.parameters.values()])
        method.__signature__ = shown  # type: ignore[attr-defined]
        return method

    return decorate
