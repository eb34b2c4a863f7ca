"""The switch of `kernels.private_apis`: with public interfaces only, losses and gradients are bit for bit the same."""

import os
import subprocess
import sys

import pytest
import torch

from evalign.kernels import private_apis

SCRIPT = """
import hashlib, torch
from evalign import MetricLoss
from evalign.kernels import private_apis
device = "cuda" if torch.cuda.is_available() else "cpu"
digest = hashlib.sha256()
for n, d in ((20, 7), (300, 130)):
    generator = torch.Generator().manual_seed(n)
    z, y = torch.randn(n, d, generator=generator).to(device), torch.randint(0, d, (n,), generator=generator).to(device)
    for metric, task in (("f1", "multiclass"), ("mcc", "multiclass"), ("f1", "multilabel")):
        loss = MetricLoss(metric, task=task, anchor=0.5).to(device)
        target = y if task == "multiclass" else (z > 0.3).long()
        for _ in range(2):
            x = z.clone().requires_grad_()
            value = loss(x, target)
            value.backward()
            digest.update(value.detach().cpu().numpy().tobytes() + x.grad.cpu().numpy().tobytes())
print(private_apis.ENABLED, digest.hexdigest())
"""


@pytest.mark.slow
def test_the_switch_off_gives_the_same_numbers():
    found = {}
    for choice in ("1", "0"):
        variables = {**os.environ, "EVALIGN_PRIVATE_APIS": choice}
        run = subprocess.run([sys.executable, "-c", SCRIPT], env=variables, capture_output=True, text=True, check=True)
        enabled, found[choice] = run.stdout.split()
        assert enabled == str(choice == "1")
    assert found["0"] == found["1"]


def test_the_switch_off_uses_public_interfaces(monkeypatch):
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return 2 * x

        @staticmethod
        def backward(ctx, gradient):
            return 2 * gradient

    monkeypatch.setattr(private_apis, "ENABLED", False)
    assert private_apis.fast_apply(Twice) == Twice.apply
    assert private_apis.raw_launch(object(), (1, 1, 1)) is None
    assert private_apis.allocator((2,), torch.float32, torch.device("cpu"), 0)().shape == (2,)
