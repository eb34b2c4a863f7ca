"""Run a function on every rank of real gloo processes, and return its results."""

import os
import traceback
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def on_ranks(function, ranks, folder, *arguments, timeout=300, returning=None):
    """`function(rank, ranks, *arguments)` on `ranks` processes; what they return, or the first `returning` of them."""
    context = mp.get_context("spawn")
    processes = [
        context.Process(target=_enter, args=(function, rank, ranks, str(folder), arguments)) for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout)
    alive = [process for process in processes if process.is_alive()]
    for process in alive:
        process.kill()
    assert not alive, f"{len(alive)} of {ranks} ranks hang"
    results = [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(returning or ranks)]
    errors = [result["error"] for result in results if "error" in result]
    assert not errors, errors[0]
    return [result["value"] for result in results]


def _enter(function, rank, ranks, folder, arguments):
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank), GLOO_SOCKET_IFNAME="lo")
    store = dist.FileStore(f"{folder}/store", ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=120))
    try:
        result = {"value": function(rank, ranks, *arguments)}
    except BaseException:
        result = {"error": traceback.format_exc()}
    torch.save(result, f"{folder}/{rank}.pt")
    os._exit(0)  # not through the process group's own end, which waits for ranks that may be gone
