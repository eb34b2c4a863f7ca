"""MetricLoss and metric_loss: 1 - metric of a batch's soft confusion, plus an anchor such as cross-entropy."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.compiler import is_compiling

from evalign import checks
from evalign._batch import FlatBatch, Sums, flatten
from evalign._options import OPTION_NAMES, LossOptions, signature_of
from evalign.checks import safe_divide
from evalign.distributed import Sync, gather_rows, is_up, resolve
from evalign.kernels import dispatch
from evalign.memory import Memory
from evalign.metrics import MetricFunction
from evalign.objective import Objective

VECTORS = ("beta", "offset", "weight", "pos_weight")  # options that may be one number per class


def metric_loss(
    input: Tensor,
    target: Tensor,
    metric: str | MetricFunction,
    *,
    sample_weight: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """L = 1 - M(C) + anchor * cross-entropy, C the soft confusion of the batch; the function behind `MetricLoss`.

    Shapes: multiclass `input` (N, C) or (N, C, d1, ...) with integer `target` (N,) or (N, d1, ...), or class
    probabilities in the shape of the input; binary (N,), (N, 1) or two logits (N, 2) with 0/1 targets (N,), or the same
    shape for both; multilabel (N, L) or (N, L, d1, ...) for both. Targets of binary and multilabel problems may be
    shares between 0 and 1. The options are those of `MetricLoss`. A batch without counted labels has loss 0 and
    gradient 0.

    >>> logits = torch.tensor([[2.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 3.0]])
    >>> metric_loss(logits, torch.tensor([0, 1, 2]), "f1")
    tensor(0.2108)
    """
    given = LossOptions(metric, **options)
    if given.memory is not None:
        raise ValueError("metric_loss keeps no memory of earlier batches; use MetricLoss(..., memory=...)")
    batch = _flatten(given, input, target, sample_weight, given.offset, given.weight, given.pos_weight)
    ranks = resolve(given.sync, training=torch.is_grad_enabled())
    loss = _loss(Objective.of(given), given, batch, _images(given, input, target), given.temperature, given.beta, ranks)
    return loss + _module_anchor(given, input, target)


class MetricLoss(nn.Module):
    """Any confusion-matrix metric as a loss, `MetricLoss("f1", anchor=1.0)`, called as `loss(input, target)`.

    The module form of `metric_loss`. Keep the anchor, a cross-entropy term, when you train a network from scratch: the
    metric alone has a small gradient where the network is confident but wrong (measured in docs/guides/batches.md). Its
    default is 0, so that the loss is exactly 1 - metric.

    Parameters
    ----------
    metric: a name in `metrics.METRICS`; a ranking in `curves.RANKINGS` ("auroc", "average_precision", "precision_at",
        "recall_at", "recall_at_precision", "top_k_accuracy"), whose value is exact and whose gradient is that of soft
        counts; or a function of a `Confusion` that returns a scalar tensor.
    task: "multiclass" (softmax), "binary" (one sigmoid, or two logits) or "multilabel" (L sigmoids).
    average: "binary", "macro", "micro" or "weighted"; None is "binary" for binary tasks, "macro" otherwise. A
        class without labels in the batch is left out of a macro mean: its score would be a constant 0.
    beta: for "fbeta", or the weight of misses in "tversky"; one number or one per class.
    alpha: weight of false alarms in "tversky".
    at: for "precision_at" and "recall_at" the rows that may be flagged (an int, or a share as a float), for
        "recall_at_precision" the precision, for "top_k_accuracy" the number of classes.
    max_fpr: for "auroc": the area up to this false positive rate, standardised as in scikit-learn.
    step: "annealed" (EAST, by `temperature`), "linear" (BtG, by `delta`), "sigmoid" (by `k`), "identity" (the
        probability itself, as in Dice losses), or a function of probabilities and threshold.
    temperature: 0 < T <= 0.4; settable by schedules, and part of `state_dict`.
    threshold: None means 1/2, or the dynamic threshold for multiclass tasks; a sequence is a grid over which the
        metric is averaged (or, for "auroc", integrated).
    anchor: weight of an additional cross-entropy term; or (weight, term), where the term is "cross_entropy", "focal"
        or a module that is called with `input` and `target`.
    offset: one number per class, added to the logits first, in training mode only. A `Parameter` is
        learned.
    memory: None, or a memory of earlier batches, for batches with few rows of a class: "auto" (as long as the rarest
        class needs, and none for large batches), a decay in [0, 1), or a `Memory`. Only in training mode with
        gradients; its state is part of `state_dict`.
    weight: one number per class; a sample has the weight of its label (multilabel: of its column).
    pos_weight: weight of a positive label of a binary problem, one number or one per column.
    ignore_index: target value to ignore.
    label_smoothing: e in labels (1 - e) one-hot + e / C, for the metric and for the anchor.
    smooth: added to both parts of every class's quotient, as in MONAI and SMP; classes without labels then count too.
    include_background: False leaves class 0 out of the average.
    per_image: one metric for each of the N images, by the eager form. reduction: their "mean" over images with a
        counted label, or "none".
    class_dim: dimension of the classes in the input; -1 for (N, T, C).
    from_logits: False if `input` holds probabilities.
    sync: sum the counts over all ranks: "auto" if there is a process group, only in training mode with gradients;
        True always, False never, or a `distributed.Sync` for a group or for summed gradients.
    backend: "auto" uses a fused form if there is one, "eager" always the plain one.

    Every option may be set later, as in `loss.anchor = 0.5`, with the same checks.

    >>> loss = MetricLoss("f1", anchor=1.0)
    >>> logits = torch.tensor([[2.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 3.0]], requires_grad=True)
    >>> loss(logits, torch.tensor([0, 1, 2])).backward()
    >>> logits.grad.isfinite().all()
    tensor(True)
    >>> MetricLoss("fbeta", beta=2.0, task="binary", step="linear")
    MetricLoss('fbeta', task='binary', beta=2.0, step='linear')
    """

    _launch_plans: dispatch.LaunchPlanCache
    _temperature: Tensor
    options: LossOptions
    objective: Objective
    metric: str | MetricFunction
    task: Any
    step: Any
    memory: Memory | None
    ignore_index: int
    class_dim: int
    from_logits: bool
    per_image: bool
    sync: Any
    beta: Any
    offset: Any
    weight: Any
    pos_weight: Any

    @signature_of(LossOptions)
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__()
        # A tensor, not a number, so that a compiled graph is not rebuilt for every temperature.
        self.register_buffer("_temperature", checks.constant(0.2, torch.float64))
        self.memory = None
        self._adopt(LossOptions(*args, **options), OPTION_NAMES)

    def _adopt(self, options: LossOptions, names: tuple[str, ...]) -> None:
        """Adopt checked options, of which `names` are new."""
        self.__dict__.update(options=options, objective=Objective.of(options), _launch_plans=dispatch.LaunchPlanCache())
        self.__dict__["_module_anchor"] = callable(options.anchor_term)
        for name in names:
            value = getattr(options, name)
            if name in VECTORS:
                self._keep_vector(name, value)
            elif name == "memory":
                memory: Any = value if value is None or isinstance(value, Memory) else Memory(value)
                super().__setattr__("memory", memory)
                if memory is not None:
                    memory.at_temperature(self.temperature)
            elif name == "temperature":
                self.temperature = value
            else:
                self.__dict__[name] = value
        if "anchor" in names:  # a submodule moves with the loss, and has parameters
            term: Any = options.anchor_term if isinstance(options.anchor_term, nn.Module) else None
            super().__setattr__("anchor_module", term)

    def _keep_vector(self, name: str, value: Any) -> None:
        """Register a vector as a buffer, which follows the module to a device; parameters are learned, numbers stay."""
        for place in (self.__dict__, self._buffers, self._parameters):
            place.pop(name, None)
        if value is None or isinstance(value, (int, float)):
            self.__dict__[name] = value
        elif isinstance(value, nn.Parameter):
            self.register_parameter(name, value)
        elif isinstance(value, Tensor) and value.requires_grad:
            raise ValueError(f"{name} requires a gradient: pass it as a torch.nn.Parameter, or detach() it")
        else:
            self.register_buffer(name, checks.constant(value, torch.get_default_dtype()))

    @property
    def temperature(self) -> float:
        return float(self._temperature)

    @temperature.setter
    def temperature(self, value: float | Tensor) -> None:
        if isinstance(value, Tensor) and value.requires_grad:
            raise ValueError("temperature of a module requires a gradient; use metric_loss, or detach() it")
        checks.check_temperature(float(value))
        self._temperature.fill_(float(value))
        if self.memory is not None:
            self.memory.at_temperature(float(value))

    def __setattr__(self, name: str, value: Any) -> None:
        if name in OPTION_NAMES and name != "temperature" and "options" in self.__dict__:
            self._adopt(replace(self.options, **{name: value}), (name,))
            return
        if name == "temperature":  # a property, also where the value is a Parameter
            object.__setattr__(self, name, value)
            return
        super().__setattr__(name, value)
        if name != "training":  # launch plans do not depend on it
            self.__dict__["_launch_plans"] = dispatch.LaunchPlanCache()

    def forward(self, input: Tensor, target: Tensor, sample_weight: Tensor | None = None) -> Tensor:
        key = dispatch.batch_key(input, target) if sample_weight is None else None
        plan = None if key is None else self._launch_plans.get(key)
        if plan is not None and (not is_up() or self._ranks() is None):  # a buffer is found faster than an attribute
            temperature = self._buffers["_temperature"] if self.step == "annealed" else None
            return plan.loss(input, target, None, temperature, self._eager_loss)
        loss = self._metric_loss(input, target, sample_weight, key)
        return loss + _module_anchor(self.options, input, target) if self._module_anchor else loss

    def _eager_loss(self, input: Tensor, target: Tensor, _: Any) -> tuple[Tensor]:
        """The loss of a launch plan, by operations that autograd can differentiate twice."""
        objective, batch = replace(self.objective, backend="eager"), self.flat(input, target, None)
        return (_loss(objective, self.options, batch, 0, self._temperature, self.beta, None),)

    def _metric_loss(
        self, input: Tensor, target: Tensor, sample_weight: Tensor | None, key: dispatch.BatchKey | None
    ) -> Tensor:
        ranks, memory = self._ranks() if is_up() or self.sync is True else None, self._remembers()
        if memory is None and (ranks is None or self.per_image or self.objective.is_ranking):
            flat = self.flat(input, target, sample_weight)
            if key is not None:
                self._cache_plan(key, flat, input, target)
            images = _images(self.options, input, target)
            return _loss(self.objective, self.options, flat, images, self._temperature, self.beta, ranks)
        in_one_node = input.device.type == "cpu" and not is_compiling()  # operators of a graph take no hook
        if in_one_node and self._counts_alone_matter(sample_weight, memory):
            flat = self.flat(input, target, sample_weight)
            takes = flat.smoothing_weights is None
            if takes and self.objective.is_whole(flat.logits, flat.y, flat.weight, self._temperature, self.beta):
                between = partial(_between, ranks=ranks, memory=memory)
                return self.objective.whole(*flat[:3], self._temperature, self.beta, between)
        return self.of_sums(self.sums(input, target, sample_weight))

    def _cache_plan(self, key: dispatch.BatchKey, flat: FlatBatch, input: Tensor, target: Tensor) -> None:
        """Cache the launch plan of this kind of batch if it needs no other work, in training or not."""
        as_it_is = self.options.class_dim == 1 and self.from_logits and self.offset is None and not self.per_image
        if as_it_is and self.memory is None and self.sync is not True and not self._module_anchor:
            plan = self.objective.launch_plan(input, target, flat, self._temperature, self.beta)
            if plan is not None:
                self._launch_plans.add(key, plan)

    def sums(self, input: Tensor, target: Tensor, sample_weight: Tensor | None = None) -> Sums:
        """Sums of a batch, which may be added over batches before `of_sums` (see `accumulation`)."""
        if self.per_image or self._module_anchor:
            what = "per_image=True" if self.per_image else "a module as the anchor"
            raise ValueError(
                f"a loss with {what} cannot be summed over batches; leave it out, or evaluate each batch separately"
            )
        logits, y, weight, apart = self.flat(input, target, sample_weight)
        weighted = self.weight is not None or sample_weight is not None or self.pos_weight is not None
        return self.objective.sums(
            logits, y, weight, self._temperature, rows=weighted and self._remembers() is not None,
            smoothing_weights=apart,
        )  # fmt: skip

    def of_sums(self, sums: Sums) -> Tensor:
        """The loss of summed batches, with other ranks and the memory: the second part of `forward`."""
        ranks, memory = self._ranks(), self._remembers()
        if ranks is not None:
            sums = ranks(sums)
        if memory is not None:
            sums = memory(sums)
        return self.objective.of_sums(sums, self.beta)

    def flat(self, input: Tensor, target: Tensor, sample_weight: Tensor | None) -> FlatBatch:
        """The batch in the form of `objective`."""
        offset = self.offset if self.training else None
        return _flatten(self.options, input, target, sample_weight, offset, self.weight, self.pos_weight)

    def _ranks(self) -> Sync | None:
        return resolve(self.sync, training=self.training and torch.is_grad_enabled())

    def _counts_alone_matter(self, sample_weight: Tensor | None, memory: Memory | None) -> bool:
        """Whether ranks and memory need only tp, actual and predicted of every class of a batch."""
        weighted = self.weight is not None or sample_weight is not None or self.pos_weight is not None
        return self.task != "multilabel" and (memory is None or (memory.labels is None and not weighted))

    def _remembers(self) -> Memory | None:
        # Validation must neither see the training batches nor be remembered.
        return self.memory if self.training and torch.is_grad_enabled() else None

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> "MetricLoss":
        checks.keep_buffers(self, partial(super()._apply, fn, recurse))
        return self

    def __repr__(self) -> str:
        options = {name: getattr(self.options, name) for name in OPTION_NAMES[1:]} | {"temperature": self.temperature}
        defaults = {name: field.default for name, field in LossOptions.__dataclass_fields__.items()}
        shown = [f"{n}={_short(v)}" for n, v in options.items() if isinstance(v, (Tensor, list)) or v != defaults[n]]
        metric = repr(self.metric) if isinstance(self.metric, str) else repr(_short(self.metric))
        return f"MetricLoss({', '.join([metric, *shown])})"


def _flatten(
    options: LossOptions, input: Tensor, target: Tensor, sample_weight: Any, offset: Any, weight: Any, pos_weight: Any
) -> FlatBatch:
    return flatten(
        options.task, input, target, offset=offset, weight=weight, pos_weight=pos_weight, sample_weight=sample_weight,
        ignore_index=options.ignore_index, label_smoothing=options.label_smoothing, from_logits=options.from_logits,
        class_dim=options.class_dim, images=True,
    )  # fmt: skip


def _images(options: LossOptions, input: Tensor, target: Tensor) -> int:
    """The number of images: the size of the first dimension that is not the classes'."""
    classes = options.task != "binary" and target.dim() == input.dim()
    return target.shape[1 if classes and options.class_dim % input.dim() == 0 else 0]


def _loss(
    objective: Objective,
    options: LossOptions,
    batch: FlatBatch,
    images: int,
    temperature: float | Tensor,
    beta: Any,
    ranks: Sync | None,
) -> Tensor:
    """The loss of a batch without a memory."""
    if options.per_image:
        each = objective.per_image(batch, images, temperature, beta)
        if options.reduction == "none":
            return each
        counted = (batch.split(images).weight != 0).flatten(1).any(1).to(each.dtype)  # type: ignore[union-attr]
        return safe_divide((each * counted).sum(), counted.sum())
    if ranks is not None and objective.is_ranking:
        batch, ranks = gather_rows(batch.rows(), ranks), None
    logits, y, weight, apart = batch  # the compiler of torch 2.8 takes no slice of a named tuple
    if ranks is not None:
        return objective.of_sums(ranks(objective.sums(logits, y, weight, temperature, smoothing_weights=apart)), beta)
    return objective(logits, y, weight, temperature, beta, smoothing_weights=apart)


def _module_anchor(options: LossOptions, input: Tensor, target: Tensor) -> Tensor | float:
    """The weighted value of a module or function as the anchor; 0 without one."""
    term = options.anchor_term
    if isinstance(term, str) or not options.anchor_weight:
        return 0.0
    value = term(input, target)
    if not isinstance(value, Tensor) or value.dim():
        got = f"shape {tuple(value.shape)}; use its mean" if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"the anchor must return a scalar tensor, got {got}")
    return options.anchor_weight * value


def _between(vector: NDArray[np.float64], *, ranks: Sync | None, memory: Memory | None) -> tuple[float, float]:
    """Add the counts of other ranks and of the memory to a batch's, in place; return the factors of their slopes."""
    by_ranks = 1.0 if ranks is None else ranks.add_up(vector)
    return by_ranks * (1.0 if memory is None else memory.remember(vector)), by_ranks


def _short(value: Any) -> str:
    return repr(value.tolist()) if isinstance(value, Tensor) else getattr(value, "__name__", repr(value))
