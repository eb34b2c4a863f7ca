"""A step that is recorded as a CUDA graph must make no tensor from Python numbers: that would be a copy."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from evalign.networks.mlp import mlp
from evalign.training.batches import Rows, plain_batches
from evalign.training.recipes import Recipe
from evalign.training.stacked import Stack, Trial
from evalign_papers.engine.config import read_config
from evalign_papers.engine.printed import find_papers
from evalign_papers.engine.scores import watch_cuts
from evalign_papers.engine.stacked_trials import WatchedStack
from evalign_papers.engine.terms import build_term, metric_score
from evalign_papers.rivals.cross_entropy import balanced_batches

PAPERS = find_papers()


def stacked_methods() -> dict[str, Path]:
    """One config for every method, set of options and kind of network that the tables train in stacks."""
    found: dict[str, Path] = {}
    for path in sorted(PAPERS.glob("*/*/*/*.json")):
        content = json.loads(path.read_text())
        if path.name.endswith(".report.json") or content["training"] is None or content["method"]["name"] == "ap_perf":
            continue
        if "darknet" in content["network"].get("kind", "mlp"):
            continue  # trained one by one
        key = json.dumps(
            [content["method"], content["network"]["outputs"], "mean_over_thresholds" in content["quirks"]]
        )
        found.setdefault(key, path)
    return found


METHODS = stacked_methods()


@pytest.mark.parametrize("path", METHODS.values(), ids=lambda path: "/".join(path.parts[-4:]))
def test_no_tensor_is_made_from_numbers(path, monkeypatch):
    config = read_config(path)
    assert config.training is not None
    assert config.network is not None
    one = config.network.outputs == "one"
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(60, 3, generator=generator), torch.arange(60) % 2
    stages = tuple(replace(stage, epochs=1) for stage in config.training.stages)
    rows = torch.arange(60)
    trials = [Trial(rows[:40], rows[40:50], Recipe("r", "", stages)) for _ in range(2)]
    squash = config.method.name != "cross_entropy"
    watch = {"watch": watch_cuts(squash), "watched": [rows[50:]] * 2}
    kind = partial(WatchedStack, **watch) if "mean_over_thresholds" in config.quirks else Stack
    stack = kind(
        lambda: mlp(3, 1 if one else 2, (4,), 0.5), Rows.of(x, y), trials,
        build_term(config.method, "binary" if one else "multiclass"), metric_score(config.decide_for, 2), batch_size=20,
        task="binary" if one else "multiclass",
        make_batches=balanced_batches(y) if config.training.oversample else plain_batches,
    )  # fmt: skip
    stack.networks.mlp, stack.fusible = None, False  # what only a CPU has
    stack.uses_metric = any(stage.metric for stage in stages)
    stack.temperature.fill_(0.2)

    def refuse(*args, **kwargs):
        raise AssertionError(f"a tensor was made from {args[0]!r}")

    real = torch.as_tensor
    monkeypatch.setattr(torch, "tensor", refuse)
    monkeypatch.setattr(
        torch, "as_tensor", lambda data, **kw: real(data, **kw) if isinstance(data, torch.Tensor) else refuse(data)
    )
    # As on a GPU: what `is_cuda` guards must be in force here too.
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda self: True))
    stack.step()
    stack.validate()
    assert bool(stack.values.isfinite().all())
