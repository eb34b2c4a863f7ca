"""Micro-batches in a plain loop: the gradient of a batch of 512 with the memory of a batch of 64.

python examples/accumulation.py
"""

import torch
from torch import nn

from evalign import MetricLoss
from evalign.accumulation import accumulate


def main() -> None:
    generator = torch.Generator().manual_seed(0)
    y = (torch.rand(4096, generator=generator) < 0.05).long()
    x = torch.randn(4096, 8, generator=generator) + y[:, None]
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
    loss = MetricLoss("f1", anchor=1.0)
    optimiser = torch.optim.AdamW(network.parameters(), lr=1e-2)
    for _ in range(5):
        for batch in torch.split(torch.arange(len(y)), 512):
            micro_batches = [(x[part], y[part]) for part in torch.split(batch, 64)]
            optimiser.zero_grad()
            value = accumulate(loss, network, micro_batches)  # calls backward
            optimiser.step()
    print(f"loss {value.item():.3f}")
    whole = torch.autograd.grad(loss(network(x[batch]), y[batch]), list(network.parameters()))
    optimiser.zero_grad()
    accumulate(loss, network, micro_batches)
    difference = max(
        float((p.grad - g).abs().max()) for p, g in zip(network.parameters(), whole, strict=True) if p.grad is not None
    )
    print(f"largest difference from the gradient of the whole batch {difference:.1e}")


if __name__ == "__main__":
    main()
