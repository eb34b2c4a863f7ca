"""metric_loss and MetricLoss: 1 - metric of a batch's soft confusion, plus an anchor of cross-entropy."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from evalign import checks, curves, membership, metrics
from evalign.confusion import TASKS, Task
from evalign.metrics import AVERAGES, Average, Beta, MetricFunction
from evalign.numerics import counting_dtype
from evalign.objective import BACKENDS, Backend, Objective
from evalign.steps import Step, StepChoice

PerClass = Tensor | Sequence[float]


def metric_loss(
    input: Tensor,
    target: Tensor,
    metric: str | MetricFunction,
    *,
    task: Task = "multiclass",
    average: Average | None = None,
    beta: Beta | None = None,
    step: str | Step = "annealed",
    temperature: float | Tensor = 0.2,
    delta: float = 0.1,
    k: float = 10.0,
    threshold: float | Sequence[float] | None = None,
    anchor: float = 0.0,
    offset: PerClass | None = None,
    weight: PerClass | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    from_logits: bool = True,
    sample_weight: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """L = 1 - M(C) + anchor * cross-entropy, C the soft confusion of the batch; the function behind `MetricLoss`.

    Shapes: multiclass `input` (N, C) or (N, C, d1, ...) with integer `target` (N,) or (N, d1, ...); binary
    (N,) or (N, 1) with 0/1 targets (N,), or any one shape for both; multilabel (N, L) or (N, L, d1, ...) for
    both. The options are those of `MetricLoss`. A batch without a counted label gives 0, with gradient 0.

    >>> logits = torch.tensor([[2.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 3.0]])
    >>> metric_loss(logits, torch.tensor([0, 1, 2]), "f1")
    tensor(0.2108)
    """
    checks.check_temperature(temperature)
    objective = build_objective(
        metric, task=task, average=average, beta=beta, step=step, delta=delta, k=k, threshold=threshold,
        anchor=anchor, label_smoothing=label_smoothing, backend=backend,
    )  # fmt: skip
    vectors = {"beta": beta, "offset": offset, "weight": weight}
    return _evaluate(
        objective, input, target, vectors, temperature=temperature, sample_weight=sample_weight,
        ignore_index=ignore_index, from_logits=from_logits,
    )  # fmt: skip


class MetricLoss(nn.Module):
    """Any confusion-matrix metric as a loss; the module form of `metric_loss`, called as `loss(input, target)`.

    Parameters
    ----------
    metric: a name in `metrics.METRICS`, "auroc", or a function of a `Confusion` that returns a scalar tensor.
    task: "multiclass" (softmax), "binary" (one sigmoid) or "multilabel" (L sigmoids).
    average: "binary", "macro", "micro" or "weighted"; None is "binary" for binary tasks, "macro" otherwise. A
        class without a label in the batch is left out of a macro mean: its score would be a constant 0.
    beta: of "fbeta"; one number or one per class.
    step: "annealed" (EAST, by `temperature`), "linear" (BtG, by `delta`), "sigmoid" (by `k`), "lookup" (the
        linear one as a table), or a function of probabilities and threshold.
    temperature: 0 < T <= 0.4; settable, for schedules, and part of `state_dict`.
    threshold: None is 1/2, and the dynamic threshold for multiclass tasks; a sequence is a grid over which the
        metric is averaged (or, for "auroc", integrated; by default 0.1 … 0.9).
    anchor: weight of a cross-entropy term beside the metric.
    offset: one number per class, added to the logits before anything else, in training mode only.
    weight: one number per class; a sample counts with the weight of its label (multilabel: of its column).
    ignore_index: target value that does not count.
    label_smoothing: e in labels (1 - e) one-hot + e / C, for the metric and for the anchor.
    from_logits: False if `input` holds probabilities.
    backend: "auto" takes a fused form where there is one, "eager" the plain one (also for double backward).

    >>> loss = MetricLoss("f1")
    >>> logits = torch.tensor([[2.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 3.0]], requires_grad=True)
    >>> loss(logits, torch.tensor([0, 1, 2])).backward()
    >>> logits.grad.isfinite().all()
    tensor(True)
    >>> MetricLoss("fbeta", beta=2.0, task="binary", step="linear")
    MetricLoss('fbeta', task='binary', beta=2.0, step='linear')
    """

    _temperature: Tensor
    beta: Any
    offset: Any
    weight: Any

    def __init__(
        self,
        metric: str | MetricFunction,
        *,
        task: Task = "multiclass",
        average: Average | None = None,
        beta: Beta | None = None,
        step: str | Step = "annealed",
        temperature: float = 0.2,
        delta: float = 0.1,
        k: float = 10.0,
        threshold: float | Sequence[float] | None = None,
        anchor: float = 0.0,
        offset: PerClass | None = None,
        weight: PerClass | None = None,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        from_logits: bool = True,
        backend: Backend = "auto",
    ) -> None:
        super().__init__()
        self.objective = build_objective(
            metric, task=task, average=average, beta=beta, step=step, delta=delta, k=k, threshold=threshold,
            anchor=anchor, label_smoothing=label_smoothing, backend=backend,
        )  # fmt: skip
        self.metric, self.task, self.step = metric, task, step
        self.ignore_index, self.from_logits = ignore_index, from_logits
        self._given: dict[str, Any] = {
            "task": task, "average": average, "beta": beta, "step": step, "delta": delta, "k": k,
            "threshold": threshold, "anchor": anchor, "offset": offset, "weight": weight,
            "ignore_index": ignore_index, "label_smoothing": label_smoothing, "from_logits": from_logits,
            "backend": backend,
        }  # fmt: skip
        # Vectors are buffers so that they follow the module to a device; a number stays a number.
        for name, value in (("beta", beta), ("offset", offset), ("weight", weight)):
            vector = value if value is None or isinstance(value, (int, float)) else torch.as_tensor(value)
            if isinstance(vector, Tensor):
                self.register_buffer(name, vector.detach().clone().to(torch.get_default_dtype()))
            else:
                setattr(self, name, vector)
        # A tensor, not a number: a compiled graph is then not built anew for every temperature.
        self.register_buffer("_temperature", torch.tensor(0.2, dtype=torch.float64))
        self.temperature = temperature

    @property
    def temperature(self) -> float:
        return float(self._temperature)

    @temperature.setter
    def temperature(self, value: float) -> None:
        checks.check_temperature(float(value))
        self._temperature.fill_(value)

    def forward(self, input: Tensor, target: Tensor, sample_weight: Tensor | None = None) -> Tensor:
        vectors = {"beta": self.beta, "offset": self.offset if self.training else None, "weight": self.weight}
        return _evaluate(
            self.objective, input, target, vectors, temperature=self._temperature, sample_weight=sample_weight,
            ignore_index=self.ignore_index, from_logits=self.from_logits,
        )  # fmt: skip

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> "MetricLoss":
        temperature = self.temperature
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        # half() and to(bfloat16) are meant for weights; a rounded temperature would not survive a checkpoint.
        self._temperature = torch.tensor(temperature, dtype=torch.float64, device=self._temperature.device)
        return self

    def __repr__(self) -> str:
        metric = self.metric if isinstance(self.metric, str) else getattr(self.metric, "__name__", "metric")
        options = {**self._given, "temperature": self.temperature}
        defaults = {name: p.default for name, p in inspect.signature(MetricLoss).parameters.items()}
        shown = [f"{n}={_short(v)}" for n, v in options.items() if isinstance(v, (Tensor, list)) or v != defaults[n]]
        return f"MetricLoss({', '.join([repr(metric), *shown])})"


def _short(value: Any) -> str:
    return repr(value.tolist()) if isinstance(value, Tensor) else getattr(value, "__name__", repr(value))


def build_objective(
    metric: str | MetricFunction,
    *,
    task: Task = "multiclass",
    average: Average | None = None,
    beta: Beta | None = None,
    step: str | Step = "annealed",
    delta: float = 0.1,
    k: float = 10.0,
    threshold: float | Sequence[float] | None = None,
    anchor: float = 0.0,
    label_smoothing: float = 0.0,
    backend: Backend = "auto",
) -> Objective:
    """Check the options of a loss and bind them."""
    checks.check_choice("backend", backend, BACKENDS)
    checks.check_choice("task", task, TASKS)
    checks.check_number("anchor", anchor, low=0.0)
    checks.check_number("label_smoothing", label_smoothing, low=0.0, high=1.0, open_high=True)
    if isinstance(beta, (int, float)):
        checks.check_number("beta", beta, low=0.0)
    if average is None:
        average = "binary" if task == "binary" else "macro"
    checks.check_choice("average", average, AVERAGES)
    if not callable(metric):
        checks.check_choice("metric", metric, [*metrics.METRICS, *curves.CURVES])
        if metric in curves.CURVES and beta is not None:
            raise ValueError(f"beta goes with metric 'fbeta', got metric {metric!r}; leave beta out")
        if metric == "quadratic_kappa" and task != "multiclass":
            raise ValueError(f"quadratic_kappa needs ordered classes, task='multiclass', got task {task!r}")
        if metric not in curves.CURVES:
            metrics.resolve(metric, average=average, beta=beta)
    if average == "binary" and task != "binary" and metrics.is_averaged(str(metric)) and not callable(metric):
        raise ValueError(f"average='binary' needs task='binary', got task {task!r}; use 'macro', 'micro' or 'weighted'")
    thresholds = threshold if threshold is None or isinstance(threshold, (int, float)) else tuple(map(float, threshold))
    if metric in curves.CURVES and not isinstance(thresholds, tuple):
        if thresholds is not None:
            raise ValueError(f"{metric} integrates over a grid of thresholds, got only {thresholds!r}; leave it out")
        thresholds = membership.BTG_GRID
    for tau in thresholds if isinstance(thresholds, tuple) else () if thresholds is None else (thresholds,):
        checks.check_threshold(tau)
    if isinstance(thresholds, tuple) and (len(thresholds) == 0 or list(thresholds) != sorted(thresholds)):
        raise ValueError(f"a grid of thresholds must rise and hold at least one, got {list(thresholds)}")
    if isinstance(thresholds, tuple) and task == "multiclass" and metric not in curves.CURVES:
        raise ValueError(
            "a grid of thresholds needs task='binary' or 'multilabel'; multiclass takes one threshold or None"
        )
    return Objective(metric, task, StepChoice(step, delta, k), average, thresholds, anchor, label_smoothing, backend)


def _evaluate(
    objective: Objective,
    input: Tensor,
    target: Tensor,
    vectors: dict[str, Any],
    *,
    temperature: float | Tensor,
    sample_weight: Tensor | None,
    ignore_index: int,
    from_logits: bool,
) -> Tensor:
    """Check a batch, flatten it and hand it to the objective."""
    task = objective.task
    input, target, all_count = _checked(input, target, task, ignore_index, from_logits)
    dtype = counting_dtype(input.dtype)
    classes = 2 if task == "binary" else input.shape[1]
    beta, offset, weight = (_vector(name, vectors[name], classes, input.device, dtype) for name in vectors)

    if all_count:
        y, counted = target.long(), torch.ones(target.shape, dtype=dtype, device=target.device)
    else:
        valid = target != ignore_index
        y, counted = torch.where(valid, target, 0).long(), valid.to(dtype)
    if sample_weight is not None:
        counted = counted * checks.check_weights(sample_weight, tuple(target.shape)).to(dtype)
    logits = input.to(dtype)
    if task == "binary":
        y, counted, logits = y.reshape(-1), counted.reshape(-1), logits.reshape(-1)
    elif task == "multiclass":
        y, counted, logits = y.reshape(-1), counted.reshape(-1), _classes_last(logits)
    else:
        y, counted, logits = _classes_last(y), _classes_last(counted), _classes_last(logits)
    if not from_logits:
        logits = _to_logits(logits, task)
    if offset is not None:
        logits = logits + (offset[1] - offset[0] if task == "binary" else offset)
    if weight is not None:
        counted = counted * (weight if task == "multilabel" else weight[y])
    return objective(logits, y, counted, temperature, beta)


def _checked(
    input: Tensor, target: Tensor, task: Task, ignore_index: int, from_logits: bool
) -> tuple[Tensor, Tensor, bool]:
    """Input, target, and whether it is known, for free, that no label is ignored."""
    checks.check_floating("input", input)
    checks.check_labels(target, soft_allowed=task != "multiclass")
    if not target.is_floating_point():
        target = target.long()  # ignore_index -100 is 156 to an unsigned byte
    if task == "multiclass":
        checks.check_class_shapes(input, target)
    else:
        if task == "binary" and input.dim() == target.dim() + 1 and input.shape[1] == 1:
            input = input.squeeze(1)
        checks.check_same_shape("input", input, target)
        if task == "multilabel" and input.dim() < 2:
            raise ValueError(
                f"input must have shape (N, L) or (N, L, d1, ...), got {tuple(input.shape)}; "
                "for one label use task='binary'"
            )
        all_count = checks.check_binary_values(target, ignore_index)
    if task == "multiclass":
        all_count = checks.check_label_range(target, input.shape[1], ignore_index)
    if not from_logits:
        checks.check_probabilities(input, sum_to_one=task == "multiclass")
    elif task == "multiclass":
        checks.check_not_probabilities(input)
    return input, target, all_count


def _classes_last(x: Tensor) -> Tensor:
    return x if x.dim() == 2 else x.movedim(1, -1).reshape(-1, x.shape[1])


def _to_logits(p: Tensor, task: Task) -> Tensor:
    if task == "multiclass":
        return p.clamp_min(torch.finfo(p.dtype).tiny).log()
    return p.logit(eps=torch.finfo(p.dtype).eps)


def _vector(name: str, value: Any, classes: int, device: torch.device, dtype: torch.dtype) -> Any:
    """A per-class option as a tensor of the right length; beta alone may be one number."""
    if value is None or (name == "beta" and isinstance(value, (int, float))):
        return value
    vector = torch.as_tensor(value, dtype=dtype, device=device)
    checks.check_per_class(name, vector, classes, number_allowed=name == "beta")
    return vector
