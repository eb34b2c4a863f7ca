"""The step of BtG's lookup table against the slow loop that it rounds, and in a loss."""

import math
from functools import partial

import pytest
import torch

from evalign import metric_loss, steps
from evalign._options import LossOptions
from evalign.objective import Objective
from evalign_papers.engine.terms import LookupTable
from reference import loops
from test_losses import TASKS, batch


@pytest.mark.parametrize("tenth", range(1, 10))
@pytest.mark.parametrize("delta", [0.1, 0.2])
def test_lookup_table_is_within_its_documented_error(tenth, delta):
    tau, table = tenth / 10, LookupTable(lambda p, t: steps.linear(p, t, delta=delta))
    p = torch.rand(2000, dtype=torch.float64, generator=torch.Generator().manual_seed(tenth))
    p.requires_grad_()
    for threshold in (tau, torch.full((2000,), tau)):
        values = table(p, threshold)
        for x, value in zip(p.tolist(), values.tolist(), strict=True):
            rise = loops.linear(min(x + 0.01, 1), tau, delta) - loops.linear(max(x - 0.01, 0), tau, delta)
            assert abs(value - loops.linear(x, tau, delta)) <= rise + 1 / 510 + 1e-9
    # The slope over a hundredth, from two values that are each rounded to within 1/510.
    (slope,) = torch.autograd.grad(values.sum(), p)
    for x, s in zip(p.tolist(), slope.tolist(), strict=True):
        left = int(x * 100 + 1e-4) / 100
        exact = 100 * (loops.linear(min(left + 0.01, 1), tau, delta) - loops.linear(left, tau, delta))
        assert abs(s - exact) <= 100 / 255 + 1e-6


def test_lookup_table_takes_909_bytes_and_rounds_thresholds_to_tenths():
    table = LookupTable()
    assert table.bytes == 909
    p = torch.linspace(0, 1, 101)
    assert torch.equal(table(p, 0.33), table(p, 0.3))
    assert torch.equal(table(p, 0.001), table(p, 0.1))
    assert table(torch.tensor([0.0, 1.0]), 0.7).tolist() == [0, 1]


def test_a_nan_stays_a_nan():
    assert LookupTable()(torch.tensor([float("nan"), 0.5]), 0.5).isnan().tolist() == [True, False]


@pytest.mark.parametrize("task", TASKS)
def test_a_loss_with_the_table_is_close_to_that_of_the_linear_step(task):
    z, y = batch(task)
    table = metric_loss(z, y, "f1", task=task, step=LookupTable(), threshold=0.5)
    linear = metric_loss(z, y, "f1", task=task, step="linear", threshold=0.5)
    assert table.item() == pytest.approx(linear.item(), abs=0.02)
    z[0] = math.nan
    assert metric_loss(z, y, "f1", task=task, step=LookupTable()).isnan()


def test_vmap_takes_the_table():
    z, y = batch("multiclass")
    objective = Objective.of(LossOptions("fbeta", beta=1.0, step=LookupTable()))
    betas = torch.tensor([[1.0] * 4, [0.5, 1.0, 2.0, 4.0]], dtype=torch.float64)
    each = partial(objective, z, y, torch.ones(len(y), dtype=torch.float64), 0.2)
    torch.testing.assert_close(torch.func.vmap(each)(betas), torch.stack([each(beta) for beta in betas]))
