"""Several processes that read one data set: who this one is, and what the others have."""

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from evalign.distributed import is_up


def own_rank() -> int:
    return dist.get_rank() if is_up() else 0


def rank_count() -> int:
    return dist.get_world_size() if is_up() else 1


def gathered(value: Any) -> list[Any]:
    """What every rank has, in the order of the ranks.

    >>> gathered("alone")
    ['alone']
    """
    if rank_count() == 1:
        return [value]
    found: list[Any] = [None] * rank_count()
    dist.all_gather_object(found, value)
    return found


@contextlib.contextmanager
def process_group(device: str) -> Iterator[None]:
    """The group that torchrun started this process in, up for as long as it is needed; alone, nothing at all."""
    if is_up() or int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield
        return
    on_gpu = device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())
    if on_gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()
