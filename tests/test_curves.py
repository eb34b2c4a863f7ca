"""Curves: the AUROC trapezoid of BtG Eq. 18, its limit in scikit-learn's, and means over a grid."""

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score

from evalign import Confusion, curves, membership, metric_loss, metrics, steps
from reference import loops

GRID = [i / 10 for i in range(1, 10)]


def areas(p, y, step, taus=GRID, task="binary", **options):
    return curves.auroc(Confusion.soft_grid(membership.grid(p, step, taus), y, task, **options))


def slow_area(p, y, step, taus=GRID, weights=None):
    weights = weights or [1.0] * len(y)
    labels = [[1 - t, t] for t in y]
    return loops.auroc([loops.matrix([[1 - step(x, t), step(x, t)] for x in p], labels, weights) for t in taus])


mixed = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 1)), min_size=2, max_size=25).filter(
    lambda rows: len({y for _, y in rows}) == 2
)


@given(rows=mixed, weights=st.lists(st.integers(1, 5), min_size=25, max_size=25))
def test_soft_auroc_is_the_slow_trapezoid(rows, weights):
    p, y = [a / 20 for a, _ in rows], [b for _, b in rows]
    got = areas(torch.tensor(p, dtype=torch.float64), torch.tensor(y), partial(steps.linear, delta=0.2))
    assert got.item() == pytest.approx(slow_area(p, y, partial(loops.linear, delta=0.2)), abs=1e-9)
    w = weights[: len(y)]
    step = partial(steps.annealed, temperature=0.1)
    got = areas(torch.tensor(p, dtype=torch.float64), torch.tensor(y), step, sample_weight=torch.tensor(w))
    assert got.item() == pytest.approx(slow_area(p, y, partial(loops.annealed, temperature=0.1), weights=w), abs=1e-9)


@given(rows=mixed)
def test_a_grid_between_all_scores_gives_scikit_learns_auroc(rows):
    p, y = [(a + 0.5) / 21 for a, _ in rows], [b for _, b in rows]
    taus = [i / 21 for i in range(1, 21)]  # one between any two scores that differ
    expected = roc_auc_score(y, p)
    assert areas(torch.tensor(p, dtype=torch.float64), torch.tensor(y), steps.hard, taus).item() == pytest.approx(
        expected
    )


def test_one_class_only_has_no_area_and_a_finite_gradient():
    p = torch.tensor([0.2, 0.7], requires_grad=True)
    area = areas(p, torch.ones(2, dtype=torch.long), steps.linear)
    area.backward()
    assert area == 0
    assert (p.grad == 0).all()


def test_multilabel_auroc_is_the_mean_over_labels_with_both_outcomes():
    generator = torch.Generator().manual_seed(0)
    p = torch.rand(30, 3, dtype=torch.float64, generator=generator)
    y = torch.randint(2, (30, 3), generator=generator)
    y[:, 2] = 1
    step = partial(loops.linear, delta=0.1)
    each = [slow_area(p[:, k].tolist(), y[:, k].tolist(), step) for k in (0, 1)]
    assert areas(p, y, steps.linear, task="multilabel").item() == pytest.approx(sum(each) / 2)


def test_multiclass_auroc_is_one_against_the_rest():
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(30, 3, dtype=torch.float64, generator=generator)
    y = torch.randint(3, (30,), generator=generator)
    step = partial(loops.annealed, temperature=0.2)
    each = [slow_area(logits.softmax(1)[:, k].tolist(), (y == k).int().tolist(), step) for k in range(3)]
    assert 1 - metric_loss(logits, y, "auroc", threshold=GRID).item() == pytest.approx(sum(each) / 3)


@pytest.mark.parametrize("name", ["f1", "mcc", "accuracy", "specificity"])
def test_a_grid_of_thresholds_averages_the_metric(name):
    generator = torch.Generator().manual_seed(2)
    z, y = torch.randn(20, dtype=torch.float64, generator=generator), torch.randint(2, (20,), generator=generator)
    step = partial(loops.linear, delta=0.1)
    each = [loops.loss(name, "binary", z.tolist(), y.tolist(), step, tau=tau) for tau in GRID]
    options = {"task": "binary", "step": "linear", "threshold": GRID}
    assert metric_loss(z, y, name, **options).item() == pytest.approx(sum(each) / 9)
    # A user's function sees one threshold at a time, so that it may index classes.
    function = partial(metrics.METRICS[name], **({"average": "binary"} if metrics.is_averaged(name) else {}))
    assert metric_loss(z, y, lambda c: function(c), **options).item() == pytest.approx(sum(each) / 9)
