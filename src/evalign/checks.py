"""Input checks with their messages (what was expected, what was found, what to do), and safe arithmetic.

Shapes and dtypes are checked always, since that is free. Values are read only where that is cheap: on the CPU, outside
of `torch.compile` and `vmap`. Reading them on a GPU would synchronise it.
"""

import difflib
import math
from collections.abc import Callable, Iterable
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

# Our name of a metric -> its names in other libraries.
_OTHER_NAMES = {
    "accuracy": "acc accuracy_score",
    "auroc": "auc roc_auc roc_auc_score",
    "average_precision": "ap auprc average_precision_score",
    "balanced_accuracy": "bacc balanced_accuracy_score",
    "cohen_kappa": "cohen_kappa_score kappa",
    "dice": "dice_score",
    "f1": "f1_macro f1_micro f1_score f1_weighted macro_f1 micro_f1 weighted_f1",
    "fbeta": "f2 f_beta fbeta_score",
    "jaccard": "iou jaccard_index jaccard_score miou",
    "mcc": "matthews matthews_corrcoef",
    "precision": "ppv precision_score",
    "quadratic_kappa": "qwk",
    "recall": "recall_score sensitivity tpr",
    "specificity": "tnr",
}
SYNONYMS = {other: name for name, others in _OTHER_NAMES.items() for other in others.split()}
_AVERAGE_WORDS = ("macro", "micro", "weighted")


def check_choice(name: str, value: object, choices: Iterable[str]) -> None:
    """Raise unless `value` is one of `choices`; the error suggests the closest."""
    options = list(choices)
    if not isinstance(value, str):
        raise TypeError(f"{name} must be one of {', '.join(options)}, got {type(value).__name__}")
    if value in options:
        return
    wanted = value.lower().replace("-", "_").replace(" ", "_")
    near = [wanted] if wanted in options else difflib.get_close_matches(wanted, options, n=1, cutoff=0.6)
    if SYNONYMS.get(wanted) in options:
        near = [SYNONYMS[wanted]]
    hint = f"; did you mean {near[0]!r}?" if near else ""
    average = next((word for word in _AVERAGE_WORDS if word in wanted.split("_")), None)
    if near and average and name == "metric":
        hint = f"; did you mean {near[0]!r} with average={average!r}?"
    raise ValueError(f"{name} must be one of {', '.join(options)}, got {value!r}{hint}")


def check_number(
    name: str,
    value: Any,
    *,
    low: float = float("-inf"),
    high: float = float("inf"),
    open_low: bool = False,
    open_high: bool = False,
    whole: bool = False,
) -> None:
    """Raise unless a number, numpy's included, is within bounds; values of tensors are not read."""
    if isinstance(value, Tensor):
        return
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a {'whole ' * whole}number, got {value!r} of type {type(value).__name__}")
    if whole and not isinstance(value, Integral):
        raise ValueError(f"{name} must be a whole number, got {value!r}")
    number: Any = value  # `Real` has no comparisons for type checkers
    above = number > low if open_low else number >= low
    below = number < high if open_high else number <= high
    if not (above and below):  # phrased so that nan fails too
        left, right = "(" if open_low else "[", ")" if open_high else "]"
        raise ValueError(f"{name} must lie in {left}{low:g}, {high:g}{right}, got {value:g}")


def is_number(x: Any, *, low: float = -1e308, high: float = 1e308) -> bool:
    """Whether `x` is a finite number, no truth value, between `low` and `high`."""
    return isinstance(x, (int, float)) and not isinstance(x, bool) and bool(low <= x <= high)  # False for nan


def is_whole(x: Any) -> bool:
    """Whether `x` is a number without decimals."""
    return is_number(x) and bool(x == int(x))


def all_numbers(x: Any) -> bool:
    """Whether `x` is a finite number or a list of such lists or numbers."""
    return all(map(all_numbers, x)) if isinstance(x, list) else is_number(x)


def shortened(value: Any) -> str:
    """Text of a value for an error message, at most 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def frozen_numbers(name: str, value: Any, shape: tuple[int, ...]) -> Any:
    """Finite numbers of a shape as nested tuples, which compare and hash by value."""
    try:
        array = np.asarray(value, dtype=np.float64)
    except (TypeError, ValueError, OverflowError):
        array = np.asarray(np.nan)
    if array.shape != shape or not np.isfinite(array).all():
        raise ValueError(f"{name} must be finite numbers of shape {shape}, got {shortened(value)}")
    return _tuples(array.tolist())


def _tuples(x: Any) -> Any:
    return tuple(_tuples(v) for v in x) if isinstance(x, list) else x


def check_temperature(temperature: Any) -> None:
    check_number("temperature", temperature, low=0.0, high=0.4, open_low=True)


def check_threshold(threshold: Any) -> None:
    check_number("threshold", threshold, low=0.0, high=1.0, open_low=True, open_high=True)


def in_transform() -> bool:
    """Whether `vmap`, `grad` or forward-mode differentiation is active; there is no public function for this."""
    return torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0


def can_read(*tensors: Tensor) -> bool:
    """Whether values may be read: cheap on the CPU, impossible in a traced or vmapped function."""
    return not torch.compiler.is_compiling() and not in_transform() and all(t.device.type == "cpu" for t in tensors)


def check_vector(name: str, value: Any, *, low: float = -math.inf, infinite: bool = False) -> None:
    """Raise unless a number, or one per class, is within bounds; values on a GPU are not read."""
    if value is None:
        return
    try:
        vector = torch.as_tensor(value, device=None if isinstance(value, Tensor) else "cpu").detach()
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"{name} must hold one number per class, got {value!r}") from None
    if vector.dim() > 1:
        raise ValueError(f"{name} must hold one number per class, got shape {tuple(vector.shape)}")
    check_bounds(name, vector, low=low, open_low=low == -math.inf, open_high=not infinite)


def check_bounds(name: str, x: Tensor, **bounds: Any) -> None:
    """`check_number` for all entries of a tensor; values on a GPU are not read."""
    if can_read(x) and x.numel():
        for extreme in x.detach().aminmax():
            check_number(name, float(extreme), **bounds)


def check_beta(beta: Any) -> None:
    """Raise unless beta >= 0, infinity included, as a number or one per class."""
    if isinstance(beta, (int, float)):  # also called by metrics, where a tensor would be expensive
        check_number("beta", beta, low=0.0)
    else:
        check_vector("beta", beta, low=0.0, infinite=True)


def constant(value: Any, dtype: torch.dtype) -> Tensor:
    """A buffer of numbers that the user gave; on the CPU where new tensors hold none (`torch.device("meta")`)."""
    device = "cpu" if torch.get_default_device().type == "meta" else None
    made = value if isinstance(value, Tensor) else torch.as_tensor(value, device=device)
    return made.detach().clone().to(dtype)


def keep_buffers(module: nn.Module, move: Callable[[], Any]) -> None:
    """Move a module without changing a digit of its buffers: `half()` and `to_empty()` are meant for weights."""
    exact = dict(module.named_buffers(recurse=False))
    move()
    for name, value in exact.items():
        nn.Module.__setattr__(module, name, value.to(module.get_buffer(name).device))


def check_floating(name: str, x: Any) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
    if not x.is_floating_point():
        raise TypeError(f"{name} must be floating point, got {x.dtype}; are input and target swapped?")


def check_labels(target: Any, *, soft_allowed: bool = False) -> None:
    if not isinstance(target, Tensor):
        raise TypeError(f"target must be a torch.Tensor, got {type(target).__name__}")
    if target.is_complex() or (target.is_floating_point() and not soft_allowed):
        raise TypeError(
            f"target must hold integer class labels, got {target.dtype}; use target.long(), or pass class "
            "probabilities in the shape of the input"
        )


def check_class_shapes(scores: Tensor, target: Tensor, *, name: str = "input") -> None:
    """(N, C) with (N,), or (N, C, d1, ...) with (N, d1, ...)."""
    if scores.dim() < 2 or scores.shape[1] < 2:
        raise ValueError(
            f"{name} must have shape (N, C) or (N, C, d1, ...) with C >= 2, got {tuple(scores.shape)}; "
            "for one score per sample use task='binary'"
        )
    expected = (scores.shape[0], *scores.shape[2:])
    if tuple(target.shape) != expected:
        one_hot, column = target.shape == scores.shape, tuple(target.shape) == (expected[0], 1, *expected[1:])
        remedy = "; pass one-hot labels as floats" if one_hot else "; use target.squeeze(1)" if column else ""
        raise ValueError(
            f"target must have shape {expected} for {name} {tuple(scores.shape)}, got {tuple(target.shape)}{remedy}"
        )


def check_same_shape(name: str, scores: Tensor, target: Tensor) -> None:
    if scores.shape != target.shape:  # (n, 1) against (n,) would silently broadcast to (n, n)
        raise ValueError(
            f"{name} and target must have the same shape, got {tuple(scores.shape)} and {tuple(target.shape)}"
        )


def check_label_range(target: Tensor, num_classes: int, ignore_index: int | None, *, name: str = "target") -> bool:
    """Raise unless labels lie in 0 … C - 1 or equal `ignore_index`, if given; True if surely none is ignored."""
    if not can_read(target) or target.numel() == 0:
        return False
    low, high = (int(x) for x in target.detach().aminmax())
    if low >= 0 and high < num_classes:
        return ignore_index is None or not low <= ignore_index <= high
    wrong = target[(target < 0) | (target >= num_classes)]
    if ignore_index is not None:
        wrong = wrong[wrong != ignore_index]
    if wrong.numel():
        ignored = "" if ignore_index is None else f" or equal ignore_index {ignore_index}"
        raise ValueError(f"{name} must lie in 0 to {num_classes - 1}{ignored}, got {wrong[0].item()}")
    return False


def check_probabilities(p: Tensor, *, sum_to_one: bool, name: str = "probabilities") -> None:
    """Raise unless values lie in [0, 1] and, with `sum_to_one`, add up to 1 along dimension 1."""
    if not can_read(p) or p.numel() == 0:
        return
    p = p.detach()
    total = p.float().sum(1) if sum_to_one else p
    low, high = float(p.amin()), float(total.amax())
    if high > 1 + 1e-6:  # no share exceeds the sum of its row, so that most batches are read twice, not three times
        high = float(p.amax())
    if not (low >= 0 and high <= 1 + 1e-6):  # phrased so that nan fails too
        remedy = "; for logits keep from_logits=True" if name == "probabilities" else ""
        raise ValueError(f"{name} must lie in [0, 1], got {low:.3g} to {float(p.amax()):.3g}{remedy}")
    if sum_to_one:
        off = float((total - 1).abs().max())
        if off > 1e-2:
            remedy = "; apply softmax first" if name == "probabilities" else "; for labels of 0 and 1 use multilabel"
            raise ValueError(f"{name} must add up to 1 over the classes, got sums off by {off:.3g}{remedy}")


def check_not_probabilities(logits: Tensor) -> None:
    """Refuse softmax outputs passed as logits, which would train badly without an error.

    A batch is refused only if every row lies on the simplex, which never happens to real logits.
    The first rows decide whether the others are read, so that the check is free for logits.
    """
    if not can_read(logits) or logits.shape[0] < 2 or logits.numel() == 0:
        return
    # A few entries of one row almost always suffice, with a tenth of the operations.
    few_of_one: tuple[int | slice, ...] = (0, slice(8), *(0,) * (logits.dim() - 2))
    few = logits.detach()[few_of_one].tolist()
    if any(not 0 <= p <= 1 for p in few) or (len(few) == logits.shape[1] and abs(sum(few) - 1) > 1e-3):
        return
    for rows in (logits[:4], logits):
        x = rows.detach().float()
        on_simplex = bool(((x >= 0) & (x <= 1)).all()) and bool(((x.sum(1) - 1).abs() < 1e-3).all())
        if not on_simplex or bool(((x == 0) | (x == 1)).all()):
            return
    raise ValueError(
        "input must be logits, got rows of probabilities that add up to 1; "
        "pass the network's raw scores, or set from_logits=False"
    )


def check_weights(weight: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Raise unless there is one weight per sample, (N,), or one per target entry."""
    if not isinstance(weight, Tensor):
        raise TypeError(f"sample_weight must be a torch.Tensor, got {type(weight).__name__}")
    if tuple(weight.shape) == shape:
        return weight
    if tuple(weight.shape) == shape[:1]:
        return weight.reshape(-1, *([1] * (len(shape) - 1))).expand(shape)
    expected = f"{shape}" if len(shape) == 1 else f"{shape[:1]} or {shape}"
    raise ValueError(f"sample_weight must have shape {expected}, got {tuple(weight.shape)}")


def check_per_class(name: str, value: Tensor, num_classes: int, *, number_allowed: bool = True) -> None:
    """A vector with one entry per class, or a number."""
    if value.dim() == 0 and not number_allowed:
        raise ValueError(f"{name} must have one entry per class, got the number {value.item():g}")
    if value.dim() > 0 and value.shape[-1] != num_classes:
        raise ValueError(f"{name} must have one entry per class, expected {num_classes}, got {value.shape[-1]}")


def check_binary_values(target: Tensor, ignore_index: int) -> bool:
    """Raise unless binary targets lie in [0, 1] or equal `ignore_index`; True if none is ignored."""
    if not can_read(target) or target.numel() == 0:
        return False
    low, high = (float(x) for x in target.detach().aminmax())
    if low >= 0 and high <= 1:
        return not (low <= ignore_index <= high and bool((target == ignore_index).any()))
    wrong = target[~((target >= 0) & (target <= 1)) & (target != ignore_index)]
    if wrong.numel():
        raise ValueError(f"target must be 0, 1, a share or ignore_index {ignore_index}, got {wrong[0].item():g}")
    return False


# Arithmetic that stays finite, in value and in gradient.


def safe_divide(a: Tensor, b: Tensor, *, at_zero: float | Tensor = 0.0) -> Tensor:
    """a / b, and `at_zero` where b is 0, or so close to it that the slope of the quotient would overflow.

    >>> safe_divide(torch.tensor([1.0, 0.0]), torch.tensor([2.0, 0.0]), at_zero=1.0)
    tensor([0.5000, 1.0000])
    """
    # Masking the result alone still sends nan back through the untaken branch, so the denominator is masked too.
    limits = torch.finfo(b.dtype)
    empty = b.abs() < limits.tiny / limits.eps
    return torch.where(empty, at_zero, a / torch.where(empty, 1.0, b))


def safe_sqrt(x: Tensor) -> Tensor:
    """sqrt(x) with gradient 0 at 0, where the true one is infinite; negative rounding errors count as 0."""
    empty = x <= 0  # not `x > 0`, so that a nan stays one
    return torch.where(empty, 0.0, torch.where(empty, 1.0, x).sqrt())


def sum_by_label(values: Tensor, y: Tensor, size: int) -> Tensor:
    """Sums of `values` (M, ...) over the rows of each label, (size, ...), in blocks of rows.

    One running float32 sum of a million equal terms is off by up to a percent; sums of sums are not.

    >>> sum_by_label(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([0, 1, 0]), 2)
    tensor([5., 2.])
    """
    rest = values.shape[1:]
    if torch.compiler.is_compiling():  # the number of blocks would specialise a graph to the number of rows
        wide = values.double()
        sums = wide.new_zeros(size, *rest)
        return (sums.index_add(0, y, wide) if rest else sums.scatter_add(0, y, wide)).to(values.dtype)
    rows = y.shape[0]
    block = max(256, rest.numel())  # so that the partial sums take no more memory than the values
    blocks = max(1, -(-rows // block))
    if blocks > 1:
        y = y + size * torch.arange(rows, device=y.device).div(block, rounding_mode="floor")
    sums = values.new_zeros(blocks * size, *rest)
    sums = sums.index_add(0, y, values) if rest else sums.scatter_add(0, y, values)
    return sums.reshape(blocks, size, *rest).sum(0)


def counting_dtype(dtype: torch.dtype) -> torch.dtype:
    """At least float32: a float16 sum overflows at 65504 samples, a bfloat16 sum stalls at 256."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def finite_gradient(x: Tensor) -> Tensor:
    """Identity whose backward turns nan and infinity into 0, for functions that divide by an absent class.

    >>> x = torch.zeros((), requires_grad=True)
    >>> (finite_gradient(x) / 0).backward()
    >>> x.grad
    tensor(0.)
    """
    if forward_ad._current_level >= 0:  # which needs `jvp`, while graphs do not support functions that have it
        return x
    return _FiniteGradient.apply(x)  # type: ignore[no-any-return, no-untyped-call]


class _FiniteGradient(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return torch.nan_to_num(grad, nan=0.0, posinf=0.0, neginf=0.0)


def represents(value: Tensor, source: Tensor, scale: float | Tensor = 1.0) -> Tensor:
    """`value` with the gradient of `scale * source`, for a part that represents a whole sum.

    >>> part = torch.tensor(2.0, requires_grad=True)
    >>> whole = represents(torch.tensor(10.0), part, 5.0)
    >>> (whole**2).backward()
    >>> whole.item(), part.grad.item()
    (10.0, 100.0)
    """
    change = scale * (source - source.detach())  # 0, with a gradient; nan where the source is infinite
    return (value.detach() + change.nan_to_num(0.0, 0.0, 0.0)).to(source.dtype)


def blank(logits: Tensor, weight: Tensor) -> Tensor:
    """Logits with 0 for ignored entries, which may be nan."""
    return torch.where((weight if weight.dim() == logits.dim() else weight[:, None]) == 0, 0.0, logits)


def is_soft(task: str, y: Tensor) -> bool:
    """Whether flat labels are class probabilities."""
    return task == "multiclass" and y.dim() > 1
