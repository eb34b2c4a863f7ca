"""metric_loss and MetricLoss: 1 - metric of a batch's soft confusion, plus an anchor of cross-entropy."""

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from evalign import _checks as checks
from evalign import curves, membership, metrics
from evalign._batch import Flat, Sums, flatten
from evalign._objective import BACKENDS, Backend, Objective
from evalign.confusion import TASKS, Task
from evalign.distributed import Sync, SyncChoice, is_up, resolve
from evalign.kernels import dispatch
from evalign.memory import Decay, Memory
from evalign.metrics import AVERAGES, Average, Beta, MetricFunction
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
    sync: SyncChoice = "auto",
) -> Tensor:
    """L = 1 - M(C) + anchor * cross-entropy, C the soft confusion of the batch; the function behind `MetricLoss`.

    Shapes: multiclass `input` (N, C) or (N, C, d1, ...) with integer `target` (N,) or (N, d1, ...); binary
    (N,) or (N, 1) with 0/1 targets (N,), or any one shape for both; multilabel (N, L) or (N, L, d1, ...) for
    both. The options are those of `MetricLoss`, less its memory, which a function does not have. A batch without a
    counted label gives 0, with gradient 0.

    >>> logits = torch.tensor([[2.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 3.0]])
    >>> metric_loss(logits, torch.tensor([0, 1, 2]), "f1")
    tensor(0.2108)
    """
    checks.check_temperature(temperature)
    objective = build_objective(
        metric, task=task, average=average, beta=beta, step=step, delta=delta, k=k, threshold=threshold,
        anchor=anchor, label_smoothing=label_smoothing, backend=backend,
    )  # fmt: skip
    batch = flatten(
        task, input, target, offset=offset, weight=weight, sample_weight=sample_weight, ignore_index=ignore_index,
        from_logits=from_logits,
    )  # fmt: skip
    ranks = resolve(sync, training=torch.is_grad_enabled())
    if ranks is None:
        return objective(*batch, temperature, beta)
    return objective.of_sums(ranks(objective.sums(*batch, temperature)), beta)


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
    memory: None, or what is remembered of earlier batches, for batches that hold few of a class: "auto" (as long as
        the rarest class needs, not at all where a batch is large enough), a decay in [0, 1), or a `Memory`. In
        training mode with gradients only; its state is part of `state_dict`.
    weight: one number per class; a sample counts with the weight of its label (multilabel: of its column).
    ignore_index: target value that does not count.
    label_smoothing: e in labels (1 - e) one-hot + e / C, for the metric and for the anchor.
    from_logits: False if `input` holds probabilities.
    sync: sum the counts over all ranks: "auto" where a process group is up, in training mode with gradients only;
        True always, False never, or a `distributed.Sync` for a group or for gradients that are summed.
    backend: "auto" takes a fused form where there is one, "eager" the plain one (also for double backward).

    >>> loss = MetricLoss("f1")
    >>> logits = torch.tensor([[2.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 3.0]], requires_grad=True)
    >>> loss(logits, torch.tensor([0, 1, 2])).backward()
    >>> logits.grad.isfinite().all()
    tensor(True)
    >>> MetricLoss("fbeta", beta=2.0, task="binary", step="linear")
    MetricLoss('fbeta', task='binary', beta=2.0, step='linear')
    """

    _launch_plans: dispatch.LaunchPlanCache
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
        memory: Memory | Decay | None = None,
        weight: PerClass | None = None,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        from_logits: bool = True,
        sync: SyncChoice = "auto",
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
            "threshold": threshold, "anchor": anchor, "offset": offset, "memory": memory, "weight": weight,
            "ignore_index": ignore_index, "label_smoothing": label_smoothing, "from_logits": from_logits,
            "sync": sync, "backend": backend,
        }  # fmt: skip
        resolve(sync, training=False)  # a wrong one is told now, not at the first batch
        self.sync = sync
        self.memory = memory if memory is None or isinstance(memory, Memory) else Memory(memory)
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
        if self.memory is not None:
            self.memory.at_temperature(value)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name not in ("training", "temperature"):  # no launch plan depends on these
            self.__dict__["_launch_plans"] = dispatch.LaunchPlanCache()

    def forward(self, input: Tensor, target: Tensor, sample_weight: Tensor | None = None) -> Tensor:
        key = dispatch.batch_key(input, target) if sample_weight is None else None
        plan = None if key is None else self._launch_plans.get(key)
        if plan is not None and (not is_up() or self._ranks() is None):  # a buffer is found faster than an attribute
            return plan.loss(input, target, None, self._buffers["_temperature"] if self.step == "annealed" else None)
        ranks, memory = self._ranks(), self._remembers()
        if ranks is None and memory is None:
            flat = self._flat(input, target, sample_weight)
            if key is not None:
                self._cache_plan(key, flat, input, target)
            return self.objective(*flat, self._temperature, self.beta)
        if input.device.type == "cpu" and self._counts_alone_matter(sample_weight, memory):
            flat = self._flat(input, target, sample_weight)
            if self.objective.is_whole(flat.logits, flat.weight, self._temperature, self.beta):
                between = partial(_between, ranks=ranks, memory=memory)
                return self.objective.whole(*flat, self._temperature, self.beta, between)
        return self.of_sums(self.sums(input, target, sample_weight))

    def _cache_plan(self, key: dispatch.BatchKey, flat: Flat, input: Tensor, target: Tensor) -> None:
        """Cache the launch plan of this kind of batch if it needs no other work, in training or not."""
        as_it_is = flat.logits is input and flat.y is target and self.offset is None
        if as_it_is and self.memory is None and self.sync is not True:
            plan = self.objective.launch_plan(*flat, self._temperature, self.beta)
            if plan is not None:
                self._launch_plans.add(key, plan)

    def sums(self, input: Tensor, target: Tensor, sample_weight: Tensor | None = None) -> Sums:
        """What a batch adds to the loss: sums that may be added up before `of_sums` (see `accumulation`)."""
        flat = self._flat(input, target, sample_weight)
        weighted = self.weight is not None or sample_weight is not None
        return self.objective.sums(*flat, self._temperature, rows=weighted and self._remembers() is not None)

    def of_sums(self, sums: Sums) -> Tensor:
        """The loss of what was summed, over all ranks and with what is remembered; `forward` in two parts."""
        ranks, memory = self._ranks(), self._remembers()
        if ranks is not None:
            sums = ranks(sums)
        if memory is not None:
            sums = memory(sums)
        return self.objective.of_sums(sums, self.beta)

    def _flat(self, input: Tensor, target: Tensor, sample_weight: Tensor | None) -> Flat:
        return flatten(
            self.task, input, target, offset=self.offset if self.training else None, weight=self.weight,
            sample_weight=sample_weight, ignore_index=self.ignore_index, from_logits=self.from_logits,
        )  # fmt: skip

    def _ranks(self) -> Sync | None:
        return resolve(self.sync, training=self.training and torch.is_grad_enabled())

    def _counts_alone_matter(self, sample_weight: Tensor | None, memory: Memory | None) -> bool:
        """Whether tp, actual and predicted of every class are all that ranks and memory need to know of a batch."""
        weighted = self.weight is not None or sample_weight is not None
        return self.task != "multilabel" and (memory is None or (memory.labels is None and not weighted))

    def _remembers(self) -> Memory | None:
        # Validation must neither see the training batches nor be remembered.
        return self.memory if self.training and torch.is_grad_enabled() else None

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


def _between(vector: NDArray[np.float64], *, ranks: Sync | None, memory: Memory | None) -> tuple[float, float]:
    """What happens between the counts of a batch and the metric of them, in place; the factors of their slopes."""
    by_ranks = 1.0 if ranks is None else ranks.add_up(vector)
    return by_ranks * (1.0 if memory is None else memory.remember(vector)), by_ranks


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
