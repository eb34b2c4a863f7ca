"""A batch as a user has it -> flat arrays as `Objective` wants them: every check, then views."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from evalign import checks
from evalign.confusion import Task
from evalign.numerics import counting_dtype


class Flat(NamedTuple):
    """Logits (M, C), (M,) or (M, L), valid labels, and the weight of every label, 0 where it is ignored."""

    logits: Tensor
    y: Tensor
    weight: Tensor


def flatten(
    task: Task,
    input: Tensor,
    target: Tensor,
    *,
    offset: Any = None,
    weight: Any = None,
    sample_weight: Tensor | None = None,
    ignore_index: int = -100,
    from_logits: bool = True,
) -> Flat:
    """Check a batch, and bring it into the shape of one row a label.

    >>> flatten("multiclass", torch.zeros(2, 3, 4, 4), torch.zeros(2, 4, 4).long()).logits.shape
    torch.Size([32, 3])
    """
    input, target, all_count = _checked(input, target, task, ignore_index, from_logits)
    dtype = counting_dtype(input.dtype)
    classes = 2 if task == "binary" else input.shape[1]
    offset = per_class("offset", offset, classes, input.device, dtype)
    weight = per_class("weight", weight, classes, input.device, dtype)

    if all_count:
        y, counted = target.long(), torch.ones(target.shape, dtype=dtype, device=target.device)
    else:
        valid = target != ignore_index
        y, counted = torch.where(valid, target, 0).long(), valid.to(dtype)
    if sample_weight is not None:
        counted = counted * checks.check_weights(sample_weight, tuple(target.shape)).to(dtype)
    # On a GPU half precision is read as it is by a kernel that counts in float32: no copy of the batch.
    as_it_is = from_logits and offset is None and input.is_cuda
    logits = input if as_it_is else input.to(dtype)
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
    return Flat(logits, y, counted)


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


def per_class(name: str, value: Any, classes: int, device: torch.device, dtype: torch.dtype) -> Any:
    """A per-class option as a tensor of the right length; beta alone may be one number."""
    if value is None or (name == "beta" and isinstance(value, (int, float))):
        return value
    vector = torch.as_tensor(value, dtype=dtype, device=device)
    checks.check_per_class(name, vector, classes, number_allowed=name == "beta")
    return vector
