"""Memory: running counts over batches, for batches that hold too few rows of a class.

With remembered counts R and batch counts c, the loss is 1 - M(R + c): value and slope depend on both, but the gradient
flows only through the batch. It is multiplied by (R + c) / c, so that steps are as long as without a memory and an
anchor keeps its relative weight.
"""

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from evalign import checks
from evalign._batch import Sums
from evalign.checks import represents, safe_divide

ROWS_OF_RAREST = 100.0  # removes the bias of the value; training was no better with 300 (docs/research/batches.md)
RECALLED = 16  # batches that may be pending for a backward pass that recomputes them
SAME_TEMPERATURE = 1.25  # counts at a temperature that differs by more than this factor are dropped

Decay = float | Literal["auto"]


class Memory(nn.Module):
    """Running counts R <- d R + c, the decay d derived from the batch and its rarest class.

    "auto" keeps `rows_of_rarest` rows of the rarest class: 1 - d = b pi / rows_of_rarest for a batch of b rows and the
    rarest share pi, and d = 0 (no memory) for a batch that holds as many by itself. Shares are those seen so far, so
    the first batches count fully. Counts from a temperature that differs by more than a fifth are dropped, and a batch
    that is not finite is not remembered. Ranks that sum their counts have equal memories. A batch that
    `torch.utils.checkpoint` recomputes counts once.

    Parameters
    ----------
    decay: "auto", or a number in [0, 1): the factor of earlier counts per batch.
    rows_of_rarest: number of rows of the rarest class that "auto" keeps.
    labels: label counts of the whole data set, one per class, if they are known (as the loss counts them: with weights,
        sums of weights). Then the counts of every class are scaled to them, and label counts have no noise.
    rows: number of rows in the whole data set; needed in addition to `labels` for multilabel problems.

    >>> from evalign import Confusion
    >>> memory = Memory(decay=0.5)
    >>> c = Confusion.soft(torch.tensor([[0.75, 0.25], [0.5, 0.5]]), torch.tensor([0, 1]))
    >>> sums = Sums(c, torch.tensor(0.0), torch.tensor(2.0))
    >>> memory(sums).confusion.total, memory(sums).confusion.total
    (tensor(2.), tensor(3.))
    """

    state: Tensor
    seen: Tensor
    temperature: Tensor
    labels: Tensor | None

    def __init__(
        self,
        decay: Decay = "auto",
        *,
        rows_of_rarest: float = ROWS_OF_RAREST,
        labels: Tensor | Sequence[float] | None = None,
        rows: float | None = None,
    ) -> None:
        super().__init__()
        if isinstance(decay, str):
            checks.check_choice("decay of a memory", decay, ["auto"])
        else:
            checks.check_number("decay of a memory", decay, low=0.0, high=1.0, open_high=True)
        checks.check_number("rows_of_rarest", rows_of_rarest, low=0.0, open_low=True)
        self.decay, self.rows_of_rarest, self.rows = decay, rows_of_rarest, rows
        # Counts of the last batches, and their sums with the memory: `checkpoint` recomputes them in the backward pass.
        self._recent: deque[tuple[Tensor, Tensor]] = deque(maxlen=RECALLED)
        # Counts with their weight, and rows of each class: in float64, since a long sum of small batches must not
        # stall; empty until the first batch gives the number of classes.
        for name in ("state", "seen"):
            self.register_buffer(name, checks.constant([], torch.float64))
        self.register_buffer("temperature", checks.constant(torch.nan, torch.float64))
        known = None if labels is None else checks.constant(labels, torch.float64)
        if known is not None and (known.dim() != 1 or bool((known < 0).any()) or float(known.sum()) <= 0):
            raise ValueError(f"labels must hold one count per class, all >= 0 and one above 0, got {known.tolist()}")
        self.register_buffer("labels", known, persistent=False)

    def forward(self, sums: Sums) -> Sums:
        """Remember a batch, and return its sums plus the remembered counts."""
        counts, rows = sums.counts, sums.rows_behind_classes
        if not torch.compiler.is_compiling() and checks.in_transform():
            raise RuntimeError(
                "a memory cannot be written inside a transform of torch.func or of forward mode; "
                "use torch.autograd, or say memory=None"
            )
        current = torch.cat([counts.detach(), sums.weight.detach().reshape(1)]).double()
        rows = rows.detach().double()
        self._make_room(current, rows)
        total = self._recalled(current)
        if total is None:
            total = current + self._kept(rows) * self.state
            self._note(current, total)
            # A batch that overflowed (a gradient scaler skips its step) would stay in the sums forever.
            sound = total.sum().isfinite()
            self.state.copy_(torch.where(sound, total, self.state))
            self.seen.copy_(torch.where(sound, self.seen + rows, self.seen))
        scale = total[-1] / current[-1].clamp_min(torch.finfo(torch.float64).tiny)
        combined = sums.with_counts(represents(total[:-1], counts, scale))
        if self.labels is None:
            return combined
        return _scaled_to(combined, self.labels.to(counts.dtype), self.rows)

    def remember(self, vector: NDArray[np.float64]) -> float:
        """The same in one compiled loop, in place, for an array of tp, actual and predicted of every class, the sum of
        cross-entropies and that of the weights, which are all 1. Returns the factor of the slopes by the counts.
        """
        from evalign.kernels.cpu.count_loops import remember

        counts = vector[:-2]
        rows = counts[counts.size // 3 : 2 * counts.size // 3]
        if self.state.numel() != counts.size + 1:
            self._make_room(torch.from_numpy(vector[:-1]), torch.from_numpy(rows))
        weight, current = vector[-1], torch.from_numpy(np.append(counts, vector[-1]))
        total = self._recalled(current)
        if total is not None:
            counts[:] = total[:-1].numpy()
            return float(total[-1]) / weight if weight else 1.0
        decay = -1.0 if isinstance(self.decay, str) else self.decay
        state, seen = self.state.numpy(), self.seen.numpy()
        factor = remember(counts, rows, weight, state, seen, decay, self.rows_of_rarest)
        self._note(current, torch.from_numpy(np.append(counts, factor * weight)))
        return factor

    def _recalled(self, current: Tensor) -> Tensor | None:
        """The earlier sums of a batch that `torch.utils.checkpoint` recomputes; None for a new batch."""
        if torch.compiler.is_compiling() or torch._C._current_graph_task_id() == -1:  # not in a backward pass
            return None
        same = (total for seen, total in reversed(self._recent) if seen.shape == current.shape
                and torch.allclose(seen, current, rtol=1e-6))  # fmt: skip
        return next(same, None)

    def _note(self, current: Tensor, total: Tensor) -> None:
        if not torch.compiler.is_compiling():
            self._recent.append((current, total))

    def reset(self) -> None:
        """Forget the counts, but not the class shares."""
        self.state.zero_()

    def at_temperature(self, temperature: float) -> None:
        """Drop counts from a very different temperature."""
        ratio = float(self.temperature) / temperature
        if not 1 / SAME_TEMPERATURE < ratio < SAME_TEMPERATURE:
            self.reset()
            self.temperature.fill_(temperature)

    def _kept(self, rows: Tensor) -> float | Tensor:
        """The decay of the remembered counts by this batch."""
        if not isinstance(self.decay, str):
            return self.decay
        known = self.seen + rows if self.labels is None or self.labels.numel() != rows.numel() else self.labels
        # A class not seen yet has no known share.
        rarest = safe_divide(torch.where(known > 0, known, torch.inf).amin(), known.sum())
        return (1 - rows.sum() * rarest / self.rows_of_rarest).clamp(min=0.0)

    def _make_room(self, current: Tensor, rows: Tensor) -> None:
        if self.state.numel() == 0:
            self.state, self.seen = torch.zeros_like(current), torch.zeros_like(rows)
        elif self.state.shape != current.shape or self.seen.shape != rows.shape:
            raise ValueError(
                f"the memory holds {self.seen.numel()} classes in {self.state.numel() - 1} counts, the batch has "
                f"{rows.numel()} in {current.numel() - 1}; use a separate memory for every loss"
            )

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> "Memory":
        checks.keep_buffers(self, partial(super()._apply, fn, recurse))
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
        for name in ("state", "seen"):  # a new memory does not know the number of classes
            stored = state_dict.get(prefix + name)
            if isinstance(stored, Tensor) and stored.shape != getattr(self, name).shape:
                setattr(self, name, torch.zeros_like(stored, dtype=torch.float64, device=self.seen.device))
        super()._load_from_state_dict(state_dict, prefix, *others)

    def extra_repr(self) -> str:
        known = "" if self.labels is None else f", labels={self.labels.tolist()}"
        return f"{self.decay!r}, rows_of_rarest={self.rows_of_rarest:g}{known}"


def _scaled_to(sums: Sums, labels: Tensor, rows: float | None) -> Sums:
    """The counts scaled to the label counts `labels`: the rows of each class keep their rates.

    tp_k keeps its share of the labels of k, fp_k its share of all others. A class without labels has no rates and
    stays absent.
    """
    c = sums.confusion
    if labels.numel() != c.num_classes:
        raise ValueError(f"labels must have one count per class, expected {c.num_classes}, got {labels.numel()}")
    if c.multilabel and c.outcomes == 2 and rows is None:
        raise ValueError("labels of a multilabel problem also need the number of rows; pass Memory(rows=...)")
    total = c.totals
    actual = labels / (labels.sum() if rows is None else rows) * total
    yes, no = safe_divide(actual, c.actual), safe_divide(total - actual, total - c.actual)
    tp = yes * c.tp
    matrix = None
    if isinstance(c._matrix, Tensor):
        matrix = yes.unsqueeze(-1) * c._matrix
    known = c.replaced(tp=tp, actual=torch.where(c.actual > 0, actual, 0.0), predicted=tp + no * c.fp, matrix=matrix)
    return Sums(known, sums.entropy, sums.weight, sums.rows)
