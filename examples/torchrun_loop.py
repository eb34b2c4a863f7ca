"""MetricLoss under DDP: every rank has a part of each batch, and the loss is that of the whole batch.

torchrun --nproc-per-node 2 examples/torchrun_loop.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from evalign import MetricLoss


def main() -> None:
    dist.init_process_group("gloo")  # "nccl" with GPUs
    rank, ranks = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(0)
    y = (torch.rand(4096, generator=generator) < 0.05).long()
    x = torch.randn(4096, 8, generator=generator) + y[:, None]
    torch.manual_seed(0)
    network = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2)))
    # sync="auto", the default, sums the counts of all ranks; the memory is the same on all of them.
    loss = MetricLoss("f1", anchor=1.0, memory="auto")
    optimiser = torch.optim.AdamW(network.parameters(), lr=1e-2)
    for batch in torch.split(torch.arange(len(y)), 256) * 3:
        mine = batch[rank::ranks]
        value = loss(network(x[mine]), y[mine])
        optimiser.zero_grad()
        value.backward()
        optimiser.step()
    if rank == 0:
        print(f"{ranks} ranks: loss {value.item():.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
