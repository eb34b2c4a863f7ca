"""The loss of flat arrays, without checks or reading values, so that it can be compiled, vmapped and fused.

`logits` are (M, C) for multiclass, (M,) for binary and (M, L) for multilabel problems; `y` holds labels that
are all valid, `weight` the weight of every label (0 where it was ignored), both (M,) or (M, L); soft labels of classes
are (M, C). If the weight is a number, it is the label to ignore, and all others have weight 1.
"""

import math
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from torch.compiler import is_compiling

from evalign import checks, curves, membership, metrics
from evalign._batch import FlatBatch, Sums, Weight, as_rows, confusion_mass, dense, rows_behind
from evalign._options import Backend, LossOptions
from evalign.checks import blank, counting_dtype, finite_gradient, is_soft, represents, safe_divide
from evalign.confusion import Confusion, Task
from evalign.kernels import dispatch
from evalign.kernels.dispatch import CountsHook, column_counts, fused_loss, row_counts
from evalign.kernels.plan import AGREEMENTS, CLOSED_FORMS, FivePoints, KernelSettings, LaunchPlan, Plan, closed_form
from evalign.metrics import Average, Beta, MetricFunction
from evalign.steps import StepChoice

SmoothingWeights = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Objective:
    """1 - M(C) + anchor * cross-entropy, as a function of the batch, the temperature and beta."""

    metric: str | MetricFunction
    task: Task
    step: StepChoice
    average: Average = "macro"
    thresholds: float | tuple[float, ...] | None = None  # a tuple is a grid; None is dynamic for multiclass
    anchor: float = 0.0
    label_smoothing: float = 0.0
    backend: Backend = "auto"
    beta: Beta | None = None
    alpha: float | None = None
    at: float | None = None
    max_fpr: float | None = None
    smooth: float = 0.0
    include_background: bool = True
    anchor_term: str = "cross_entropy"
    # Derived once for all batches; and the launch plans of earlier batches.
    _fusible: bool = field(init=False, repr=False, compare=False)
    _closed: bool = field(init=False, repr=False, compare=False)
    _taus: tuple[float, ...] = field(init=False, repr=False, compare=False)
    _plans: dict[Any, Plan] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        auto, given = self.backend == "auto", self.thresholds
        taus = () if self.task == "multiclass" else given if isinstance(given, tuple) else (given or 0.5,)
        any_threshold = self.task != "multiclass" or self.thresholds is None
        named = isinstance(self.metric, str) and not self.is_ranking and self.anchor_term == "cross_entropy"
        plain = self.alpha is None and not self.smooth and self.include_background
        closed = named and plain and self.metric in CLOSED_FORMS[self.task]
        fusible = auto and any_threshold and self.step.step in ("annealed", "linear")
        self.__dict__.update(_fusible=fusible, _closed=auto and closed, _taus=taus, _plans={})

    @classmethod
    def of(cls, options: LossOptions) -> "Objective":
        """The objective of checked options; the caller adds an anchor that is a module."""
        term = options.anchor_term
        beta: Any = options.beta
        if beta is not None and not isinstance(beta, (int, float)):
            beta = torch.as_tensor(beta, dtype=torch.float64)
        return cls(
            options.metric, options.task, StepChoice(options.step, options.delta, options.k), options.averaging,
            options.thresholds, options.anchor_weight if isinstance(term, str) else 0.0, options.label_smoothing,
            options.backend, beta, options.alpha, options.at, options.max_fpr, options.smooth,
            options.include_background, term if isinstance(term, str) else "cross_entropy",
        )  # fmt: skip

    @property
    def is_ranking(self) -> bool:
        """Whether the metric depends on the order of scores in a batch, not on additive counts."""
        return self.metric in curves.RANKINGS and not isinstance(self.thresholds, tuple)

    def __call__(
        self, logits: Tensor, y: Tensor, weight: Weight, temperature: float | Tensor = 0.2, beta: Beta | None = None,
        *, smoothing_weights: SmoothingWeights | None = None,
    ) -> Tensor:  # fmt: skip
        beta = self.beta if beta is None else beta
        if self.anchor and smoothing_weights is not None:  # which only cross-entropy separates
            loss = replace(self, anchor=0.0)(logits, y, weight, temperature, beta)
            logits, y, weight = as_rows(logits, y, weight)
            y, weight = dense(y, weight, logits.dtype)
            return loss + self.anchor * self.cross_entropy(logits, y, weight, smoothing_weights)
        if self.is_whole(logits, y, weight, temperature, beta):
            return self.whole(logits, y, weight, temperature, beta)
        logits, y, weight = as_rows(logits, y, weight)
        y, weight = dense(y, weight, logits.dtype)
        if self.is_ranking:
            loss, entropy = self.ranked(logits, y, weight, temperature), None
        else:
            confusion, entropy = self.counts(logits, y, weight, temperature)
            loss = self.metric_term(confusion, beta)
        if self.anchor:
            loss = loss + self.anchor * (self.cross_entropy(logits, y, weight) if entropy is None else entropy)
        return loss

    def per_image(self, batch: FlatBatch, images: int, temperature: float | Tensor, beta: Beta | None) -> Tensor:
        """The loss of every image, (N,), by the eager form; 0 for an image without counted labels."""
        if images == 0:
            return batch.logits.reshape(0).to(counting_dtype(batch.logits.dtype))
        batch, eager = batch.split(images), replace(self, backend="eager")
        if self.task == "multiclass" and torch.compiler.is_exporting() and not self.is_ranking:
            batch = batch.with_shares()  # a vmap of gather or scatter makes the number of images a constant
        logits, y, weight, apart = batch

        def each(logits: Tensor, y: Tensor, weight: Weight, *counted: Tensor) -> Tensor:
            smoothing_weights = None if apart is None else (counted[0], apart[1])
            return eager(logits, y, weight, temperature, beta, smoothing_weights=smoothing_weights)

        return torch.func.vmap(each)(logits, y, weight, *(() if apart is None else apart[:1]))

    def cross_entropy(
        self, logits: Tensor, y: Tensor, weight: Tensor, smoothing_weights: SmoothingWeights | None = None
    ) -> Tensor:
        """The anchor's mean over the batch."""
        focal = self.anchor_term == "focal"
        return cross_entropy(logits, y, weight, self.task, self.label_smoothing, smoothing_weights, focal=focal)

    def ranked(self, logits: Tensor, y: Tensor, weight: Tensor, temperature: float | Tensor = 0.2) -> Tensor:
        """1 - a ranking metric, and 0 for a batch without counted labels."""
        z = logits.to(counting_dtype(logits.dtype))
        if z.shape[0] == 0:
            return z.sum()
        if self.metric == "top_k_accuracy":
            if is_soft(self.task, y):
                raise ValueError("top_k_accuracy needs integer labels, got class probabilities; use their argmax")
        elif self.task == "multiclass":  # one class against the rest, by probability
            z = blank(z, weight).log_softmax(1)
            if is_soft(self.task, y):  # shares times class weights: their sum is the weight of the row
                mass = y.sum(1)
                y, weight = safe_divide(y, mass[:, None]), weight * mass
            else:
                y = y[:, None] == torch.arange(z.shape[1], device=y.device)
            weight = weight[:, None].expand_as(z)
        elif self.task == "binary":
            z, y, weight = z[:, None], y[:, None], weight[:, None]
        options: dict[str, Any] = {"at": self.at, "max_fpr": self.max_fpr, "temperature": temperature}
        score = curves.ranking(str(self.metric), z, y, weight, **options)
        return torch.where(weight.sum() == 0, 0.0 * score, 1 - score)

    def is_whole(
        self, logits: Tensor, y: Tensor, weight: Weight, temperature: float | Tensor, beta: Beta | None = None
    ) -> bool:
        """Whether the whole loss is one autograd node: the time of a small batch is operations, not arithmetic."""
        return (
            self._has_closed_form(beta)
            and not isinstance(self.thresholds, tuple)
            and self._may_fuse(y, weight, temperature, shares=dispatch.takes_shares(logits))
            and dispatch.is_fused_whole(logits)
        )

    def whole(
        self, logits: Tensor, y: Tensor, weight: Weight, temperature: Any, beta: Any, hook: CountsHook | None = None
    ) -> Tensor:
        """The whole loss as one node; on a CPU `hook` may change the counts before the metric is computed."""
        given, ignored = (weight, None) if isinstance(weight, Tensor) else (None, weight)
        if self.task == "binary" and (logits.is_cuda or is_compiling()):  # CPU loops take a single column unchanged
            logits, y, given = logits[:, None], y[:, None], None if given is None else given[:, None]
        if is_compiling():
            follows = self.step.step == "annealed" and isinstance(temperature, Tensor)
            low, reach, _ = self.points(0.2 if follows else temperature)
            question = dispatch.Question(
                str(self.metric), self.average, beta, float(self.anchor), float(self.label_smoothing),
                list(self._taus), self.task == "binary", ignored or 0, low, reach,
            )  # fmt: skip
            return dispatch.loss_in_graph(logits, y, given, temperature if follows else None, question)
        plan = self.plan(logits.shape[1] if self.task == "multiclass" else 2, beta, ignored)
        recorded: list[Any] = []
        eager = partial(self._eager_loss, temperature=temperature, beta=beta, ignored=ignored, recorded=recorded)
        hooked = None if hook is None else partial(_recording, hook, recorded)
        return fused_loss(logits, y, given, self.settings(temperature), plan, hooked, eager)

    def _eager_loss(
        self, logits: Tensor, y: Tensor, weight: Any, temperature: Any, beta: Any, ignored: Any, recorded: list[Any]
    ) -> tuple[Tensor]:
        """The output of `fused_loss`, by operations that can be differentiated twice.

        `recorded` holds the sums that a hook returned, and its scales of the gradients by counts and cross-entropies.
        """
        weight = ignored if weight is None else weight
        if self.task == "binary" and logits.dim() == 2:
            logits, y, weight = (x[:, 0] if isinstance(x, Tensor) else x for x in (logits, y, weight))
        eager = replace(self, backend="eager")
        if not recorded:
            return (eager(logits, y, weight, temperature, beta),)
        sums = eager.sums(logits, y, weight, temperature)
        total, by_counts, by_losses = recorded
        scale = torch.full(total.shape, by_counts)
        scale[-2:] = by_losses
        return (eager.of_sums(sums.with_vector(represents(torch.from_numpy(total), sums.vector, scale)), beta),)

    def _eager_counts(
        self, logits: Tensor, y: Tensor, weight: Tensor, temperature: float | Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """tp, predicted and the summed cross-entropies in the same way; counts in the shapes of `column_counts`."""
        if self.task == "binary":
            logits, y, weight = logits[:, 0], y[:, 0], weight[:, 0]
        c = self.confusion(logits, y, weight, temperature)
        losses = self.cross_entropy(logits, y, weight) * weight.sum()
        grid = self.task == "multiclass" or isinstance(self.thresholds, tuple)
        return (c.tp, c.predicted, losses) if grid else (c.tp[None], c.predicted[None], losses)

    def launch_plan(
        self, input: Tensor, target: Tensor, flat: FlatBatch, temperature: Tensor, beta: Beta | None
    ) -> LaunchPlan | None:
        """Launch plan of a GPU batch and of all others with its `dispatch.batch_key`; None if there is none.

        There is no plan for a temperature on the CPU: kernels take it as a number, which may change between batches.
        """
        beta = self.beta if beta is None else beta
        logits, y, weight, _ = flat
        whole = temperature.is_cuda and self.is_whole(logits, y, weight, temperature, beta)
        if isinstance(weight, Tensor) or not whole:
            return None
        plan = self.plan(logits.shape[1] if self.task == "multiclass" else 2, beta, weight)
        return dispatch.launch_plan(input, target, self.settings(temperature), plan)

    def plan(self, classes: int = 2, beta: Any = None, ignored: int | None = None) -> Plan:
        """Plan of `fused_loss`, if `is_whole` allows it; `classes` is the number of classes of a multiclass problem.

        Without weights, labels equal to `ignored` do not count.
        """
        key = classes, beta, ignored
        if key not in self._plans:
            form = closed_form(str(self.metric), self.average, classes, beta, self.label_smoothing)
            self._plans[key] = Plan(form, self.anchor, self.task == "binary", ignored or 0)
        return self._plans[key]

    def sums(
        self, logits: Tensor, y: Tensor, weight: Weight, temperature: float | Tensor = 0.2, *, rows: bool = False,
        smoothing_weights: SmoothingWeights | None = None,
    ) -> Sums:  # fmt: skip
        """Sums of a batch for the loss of many; `rows` adds the unweighted row counts that a memory needs."""
        if self.is_ranking:
            raise ValueError(
                f"{self.metric} ranks the rows within one batch and cannot be summed over batches; "
                "give 'auroc' a grid of thresholds, threshold=[...]"
            )
        logits, y, weight = as_rows(logits, y, weight)
        y, weight = dense(y, weight, logits.dtype)
        confusion, entropy = self.counts(logits, y, weight, temperature)
        self._build_matrix(confusion)
        mass = confusion_mass(y, weight) if is_soft(self.task, y) else weight.sum()
        if not self.anchor:
            entropy = torch.zeros_like(mass)
        elif entropy is None or smoothing_weights is not None:
            entropy = self.cross_entropy(logits, y, weight, smoothing_weights)
        classes = 2 if self.task == "binary" else logits.shape[1]
        return Sums(confusion, entropy * mass, mass, rows_behind(y, weight, self.task, classes) if rows else None)

    def of_sums(self, sums: Sums, beta: Beta | None = None) -> Tensor:
        """The loss of summed batches; `__call__` is this on the sums of one batch."""
        loss = self.metric_term(sums.confusion, beta)
        return loss + self.anchor * safe_divide(sums.entropy, sums.weight) if self.anchor else loss

    def _build_matrix(self, confusion: Confusion) -> None:
        """Build the matrix if the metric reads it: a sum drops matrices that were not built."""
        if isinstance(self.thresholds, tuple) or confusion.multilabel:
            return  # no metric of these reads one
        if self.metric == "quadratic_kappa":
            _ = confusion.matrix
        elif callable(self.metric):  # builds the matrix if it reads it
            self.metric(confusion)

    def counts(
        self, logits: Tensor, y: Tensor, weight: Tensor, temperature: float | Tensor = 0.2
    ) -> tuple[Confusion, Tensor | None]:
        """The soft counts of a batch, and its cross-entropy if the kernel computed it too."""
        takes = dispatch.is_fused(logits) or (self.task == "multiclass" and checks.can_read(logits))
        if takes and self._may_fuse(y, weight, temperature):
            return self._fused(logits, y, weight, temperature)
        return self.confusion(logits, y, weight, temperature), None

    def _may_fuse(self, y: Tensor, weight: Weight, temperature: float | Tensor, *, shares: bool = False) -> bool:
        """Whether there is a fused form (with `shares`, also of soft labels) and only the logits require a gradient."""
        if not self._fusible or (isinstance(weight, Tensor) and weight.requires_grad):
            return False
        if y.requires_grad or (not shares and is_soft(self.task, y)):
            return False
        return not (isinstance(temperature, Tensor) and temperature.requires_grad)

    def _fused(
        self, logits: Tensor, y: Tensor, weight: Tensor, temperature: float | Tensor
    ) -> tuple[Confusion, Tensor | None]:
        settings = self.settings(temperature)
        if not dispatch.is_fused(logits):  # torch's operations also read ignored rows
            logits = blank(logits, weight)
        eager = partial(self._eager_counts, temperature=temperature)
        if self.task == "multiclass":
            tp, predicted, losses, actual = row_counts(logits, y, weight, settings, eager)
            total = actual.sum()  # rounded like its parts, so that the share of a single class is exactly 1
        else:
            two = self.task == "binary"
            columns = (logits[:, None], y[:, None], weight[:, None]) if two else (logits, y, weight)
            tp, predicted, losses, actual, total = column_counts(*columns, settings, two_classes=two, eager=eager)
            if not isinstance(self.thresholds, tuple):
                tp, predicted = tp[0], predicted[0]
        entropy = safe_divide(losses, total.sum()) if settings.losses else None
        if isinstance(self.thresholds, tuple):  # labels are counted as often as predictions: for each threshold
            actual, total = actual.expand_as(tp), total.expand(tp.shape[0], *total.shape)
        multilabel = self.task == "multilabel"
        confusion = Confusion(
            tp, actual, predicted, total, present=actual > 0, multilabel=multilabel,
            matrix=None if multilabel else lambda: self.confusion(logits, y, weight, temperature).matrix,
        )  # fmt: skip
        return confusion, entropy

    def settings(self, temperature: float | Tensor) -> KernelSettings:
        """What kernels need besides the batch and the metric."""
        losses = bool(self.anchor) and self.anchor_term == "cross_entropy"
        return KernelSettings(self.points(temperature), self.label_smoothing, losses, self._taus)

    def points(self, temperature: float | Tensor) -> FivePoints:
        if self.step.step == "annealed" and isinstance(temperature, Tensor) and temperature.is_cuda:
            return FivePoints(0.0, 0.0, temperature)
        if self.step.step == "annealed":
            low = float(temperature)
            return FivePoints(low, 2.5 * low)
        return FivePoints(self.step.delta, 0.5)

    def confusion(self, logits: Tensor, y: Tensor, weight: Tensor, temperature: float | Tensor = 0.2) -> Confusion:
        """The soft counts of a batch, by the eager form; with a grid of thresholds, one set of counts for each."""
        step = self.step.at(temperature)
        logits = blank(logits.to(counting_dtype(logits.dtype)), weight)
        p = logits.softmax(-1) if self.task == "multiclass" else logits.sigmoid()
        if isinstance(self.thresholds, tuple):
            s = membership.grid(p, step, self.thresholds)
            return Confusion.soft_grid(s, y, self.task, sample_weight=weight)
        if self.task == "multiclass":
            s = membership.dynamic(p, step, self.thresholds)
            return Confusion.soft(s, y, sample_weight=weight, task=self.task)
        s = membership.fixed(p, step, 0.5 if self.thresholds is None else self.thresholds)
        return Confusion.soft(s, y, sample_weight=weight, task=self.task)

    def metric_term(self, confusion: Confusion, beta: Beta | None = None) -> Tensor:
        """1 - M(C), and 0 for a batch without counted labels.

        If the labels leave the metric without a gradient, another term replaces it. A binary problem without a
        positive label has the share of flagged rows, if its metric counts false alarms; in a macro mean over labels
        this share is divided by the number of labels and added. An agreement (mcc, kappas) with labels of one class has
        1 - accuracy.
        """
        beta = self.beta if beta is None else beta
        tp = confusion.tp
        if tp.is_cuda and tp.dim() == 1 and self._has_closed_form(beta) and dispatch.is_fused(tp):
            form = closed_form(str(self.metric), self.average, confusion.outcomes, beta, self.label_smoothing)
            return dispatch.loss_of_counts(confusion, form, partial(self._eager_term, beta=beta))
        return self._eager_term(confusion, beta)

    def _eager_term(self, confusion: Confusion, beta: Beta | None) -> Tensor:
        score = self.score(confusion.smoothed(self.label_smoothing), beta)
        lost = self._with_alarms(confusion, 1 - score, beta)
        return torch.where(confusion.total.sum() == 0, 0.0 * lost, lost)

    def _with_alarms(self, c: Confusion, lost: Tensor, beta: Beta | None) -> Tensor:
        """The loss, with the replacements described in `metric_term`."""
        if self.metric in (*AGREEMENTS, "quadratic_kappa") and not c.multilabel:
            single = (c.actual.amax(-1) == c.total).all()
            return torch.where(single, 1 - safe_divide(c.tp.sum(-1), c.total).mean(), lost)
        counts_alarms = self.metric in ("f1", "fbeta", "dice", "jaccard", "precision") or self.metric in AGREEMENTS
        counts_alarms = counts_alarms or (self.metric == "tversky" and self.alpha != 0)
        of_class_1 = self.average == "binary" and not c.multilabel
        only_recall = isinstance(beta, float) and beta == math.inf
        if not counts_alarms or only_recall or self.smooth or not (of_class_1 or self.task == "multilabel"):
            return lost
        if of_class_1:
            flagged = safe_divide(c.predicted[..., 1], c.total).mean()
            return torch.where((c.actual[..., 1] == 0).all(), flagged, lost)
        absent = (c.actual == 0) & (c.total > 0)
        rates = torch.where(absent, safe_divide(c.predicted, c.total), 0.0)
        if self.average == "macro" or self.metric in AGREEMENTS:
            lost = lost + rates.mean()
        flagged = safe_divide(c.predicted.sum(-1), c.total.sum(-1)).mean()
        return torch.where((c.actual == 0).all(), flagged, lost)

    def _has_closed_form(self, beta: Beta | None) -> bool:
        """Whether kernels can compute the metric and its slopes: see `kernels.plan`."""
        return self._closed and (beta is None or isinstance(beta, (int, float)))

    def score(self, c: Confusion, beta: Beta | None = None) -> Tensor:
        """The metric of counts, hard or soft."""
        if self.metric == "auroc":
            return curves.auroc(c)
        metric: MetricFunction = self._user_metric
        if isinstance(self.metric, str):
            metric = metrics.resolve(
                self.metric, average=self.average, beta=self.beta if beta is None else beta, alpha=self.alpha,
                smooth=self.smooth, include_background=self.include_background,
            )  # fmt: skip
        if isinstance(self.thresholds, tuple):
            return curves.mean_over_grid(c, metric, vectorised=not callable(self.metric))
        return metric(c)

    def _user_metric(self, c: Confusion) -> Tensor:
        """Apply a user's function, which may divide by the count of a class that the batch lacks.

        The resulting nan becomes score 1 with gradient 0. A nan in the counts (a diverged network) stays nan.
        """
        assert callable(self.metric)
        score = self.metric(c.replaced(tp=finite_gradient(c.tp), predicted=finite_gradient(c.predicted)))
        if not isinstance(score, Tensor) or score.dim():
            got = f"shape {tuple(score.shape)}" if isinstance(score, Tensor) else type(score).__name__
            raise ValueError(f"a metric function must return one scalar tensor, got {got}; average over the classes")
        sound = c.tp.isfinite().all() & c.predicted.isfinite().all()
        return torch.where(score.isnan() & sound, 1.0, score)


def _recording(hook: CountsHook, recorded: list[Any], vector: NDArray[np.float64]) -> tuple[float, float]:
    """Call a hook, and record the resulting counts and scales."""
    scales = hook(vector)
    recorded[:] = vector.copy(), *scales
    return scales


def cross_entropy(
    logits: Tensor, y: Tensor, weight: Tensor, task: Task, label_smoothing: float = 0.0,
    smoothing_weights: SmoothingWeights | None = None, *, focal: bool = False,
) -> Tensor:  # fmt: skip
    """Weighted mean of the cross-entropy (multiclass) or the binary one; `focal` times (1 - p)^2 (Lin et al. 2017)."""
    mass, inside, (factor, classes) = weight.sum(), weight.new_ones(()), smoothing_weights or (weight, None)
    logits = blank(logits.to(counting_dtype(logits.dtype)), factor)  # smoothing reads rows of a class of weight 0
    if is_soft(task, y):
        mass = confusion_mass(y, weight)
        spread = y.sum(1, keepdim=True) if classes is None else classes
        soft = (1 - label_smoothing) * y + label_smoothing / y.shape[1] * spread
        each, inside = F.cross_entropy(logits, soft, reduction="none"), soft.sum(1)
    elif task == "multiclass":
        each = F.cross_entropy(logits, y, classes, reduction="none", label_smoothing=label_smoothing)
        inside = inside if classes is None else (1 - label_smoothing) * classes[y] + label_smoothing * classes.mean()
    else:
        soft = (1 - label_smoothing) * y.to(logits.dtype) + label_smoothing / 2
        each = F.binary_cross_entropy_with_logits(logits, soft, reduction="none")
    if focal:
        each = (1 - (-safe_divide(each, inside)).exp()) ** 2 * each  # p of the loss per class weight
    # An ignored row counts for nothing, even if its loss is infinite.
    return safe_divide(torch.where(factor == 0, 0.0, each * factor).sum(), mass)
