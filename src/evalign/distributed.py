"""Many ranks: counts are summed over them before the metric is applied, with the right gradient.

Every rank then has the loss of all rows, and its backward pass gives the contribution of its own rows to the gradient.
The contributions add up to the gradient of one process with all rows. DDP and FSDP average instead of adding, so each
is multiplied by the number of ranks; the backward pass sends nothing.
"""

import gc
import itertools
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from evalign import checks
from evalign._batch import FlatBatch, Sums, dense
from evalign.checks import represents

Gradients = Literal["averaged", "summed"]
GRADIENTS: tuple[Gradients, ...] = ("averaged", "summed")


@dataclass(frozen=True)
class Sync:
    """How to sum over ranks: the group, and the treatment of gradients.

    `gradients` is "averaged" for DDP, FSDP, Lightning and Accelerate, "summed" for a loop that adds the gradients of
    all ranks itself. `group` is the process group of the ranks that hold different rows; None is all of them.

    >>> Sync(gradients="summed")
    Sync(group=None, gradients='summed')
    """

    group: "dist.ProcessGroup | None" = None
    gradients: Gradients = "averaged"

    def __post_init__(self) -> None:
        checks.check_choice("gradients", self.gradients, GRADIENTS)

    @property
    def ranks(self) -> int:
        """Number of ranks to sum over; 1 without a process group."""
        return dist.get_world_size(self.group) if is_up() else 1

    def __call__(self, sums: Sums) -> Sums:
        """The sums of all ranks: one message of 3 C + 2 numbers (4 C + 2 for a memory with weights)."""
        vector = sums.vector
        total = all_summed(vector.detach(), self.group)
        return sums.with_vector(represents(total, vector, self.ranks if self.gradients == "averaged" else 1.0))

    def add_up(self, vector: NDArray[np.float64]) -> float:
        """The same in place for sums that are not tensors; returns the factor of their slopes."""
        # As float32, like ranks that take the other path.
        vector[:] = all_summed(torch.from_numpy(vector).float(), self.group).numpy()
        return self.ranks if self.gradients == "averaged" else 1.0


SyncChoice = bool | Literal["auto"] | Sync


def resolve(sync: SyncChoice, *, training: bool) -> Sync | None:
    """The sum over ranks requested by the option `sync`, in training or outside of it; None for no sum.

    Outside of training only True sums: ranks often validate different numbers of batches, or one of them alone, and
    would wait for each other forever.

    >>> resolve("auto", training=True) is None  # no process group is up
    True
    """
    if sync == "auto" and not is_up():
        return None
    if not isinstance(sync, (bool, Sync)):
        checks.check_choice("sync", sync, ["auto"])
    if sync is False or (sync is not True and not training):
        return None
    chosen = sync if isinstance(sync, Sync) else Sync()
    if sync is True and training and not is_up():
        raise RuntimeError(
            "sync=True needs a process group, got none; start with torchrun and call "
            "torch.distributed.init_process_group, or set sync='auto'"
        )
    return chosen if chosen.ranks > 1 else None


AVAILABLE = dist.is_available()  # depends on the build of torch


# torch's own function, since a loss asks in every batch.
is_up: Callable[[], bool] = dist.is_initialized if AVAILABLE else bool


_calls = itertools.count()
_joinables: "weakref.WeakSet[Any]" = weakref.WeakSet()  # models and optimisers that may be in a join
_found = 0  # how many there were


def refuse_join() -> None:
    """Raise inside `DistributedDataParallel.join()`, where a rank that has ended answers only messages of DDP.

    The sizes of its answers and of our counts differ, and the process group aborts the process. Only the modules in a
    join reveal it. Finding them takes milliseconds, so they are searched for at the first message, at growing intervals
    after it, and when one of them is gone.
    """
    global _found
    call = next(_calls)
    if not call & (call - 1) or call % 1000 == 0 or len(_joinables) < _found:
        from torch.distributed.algorithms.join import Joinable  # not in every build of torch

        _joinables.update(item for item in gc.get_objects() if issubclass(type(item), Joinable))
        _found = len(_joinables)
    if any(item._join_config.enable for item in _joinables):
        raise RuntimeError(
            "counts cannot be summed over ranks inside DistributedDataParallel.join(): ranks that have ended "
            "do not take part; give every rank the same number of batches (empty ones are fine), or set sync=False"
        )


def all_summed(vector: Tensor, group: "dist.ProcessGroup | None" = None) -> Tensor:
    """The sum of all ranks' vectors; raises an error with advice if one of them does not answer."""
    total = vector.clone()
    if torch.compiler.is_compiling():  # graphs cannot catch exceptions
        dist.all_reduce(total, group=group)
        return total
    refuse_join()
    try:
        dist.all_reduce(total, group=group)
    except RuntimeError as error:
        raise RuntimeError(
            f"rank {dist.get_rank()} could not sum its counts with the other ranks: one has ended, or has fewer "
            "batches; give every rank the same number of batches (empty ones are fine), or set sync=False"
        ) from error
    return total


def gather_rows(batch: FlatBatch, sync: Sync) -> FlatBatch:
    """The rows of all ranks, for metrics that rank them; the rank's own rows keep their gradient, scaled for `sync`.

    Ranks may have different numbers of rows; shorter ones are padded with rows of weight 0.
    """
    y, weight = dense(batch.y, batch.weight, batch.logits.dtype)
    ranks, own = sync.ranks, dist.get_rank(sync.group)
    rows = torch.zeros(ranks, dtype=torch.long, device=y.device)
    rows[own] = len(y)
    most = int(all_summed(rows, sync.group).max())

    def gathered(x: Tensor) -> Tensor:
        padded = torch.cat([x.detach(), x.new_zeros(most - len(x), *x.shape[1:])]).contiguous()
        parts = [torch.empty_like(padded) for _ in range(ranks)]
        dist.all_gather(parts, padded, group=sync.group)
        return torch.cat(parts)

    z = batch.logits
    if sync.gradients == "averaged":
        z = represents(z.detach(), z, float(ranks))
    all_z = gathered(z)
    return FlatBatch(torch.cat([all_z[: own * most], z, all_z[own * most + len(y) :]]), gathered(y), gathered(weight))
