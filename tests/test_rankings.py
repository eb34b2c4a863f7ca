"""Ranking and budget metrics: exact values against scikit-learn at any scale, and a gradient that raises them."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import average_precision_score, precision_recall_curve, roc_auc_score, top_k_accuracy_score

from evalign import MetricLoss, curves, metric_loss
from ranks import on_ranks

RANKED = [
    ("auroc", {}),
    ("auroc", {"max_fpr": 0.2}),
    ("average_precision", {}),
    ("precision_at", {"at": 20}),
    ("recall_at", {"at": 0.1}),
    ("recall_at_precision", {"at": 0.5}),
]


def reference(metric, y, scores, weight=None, at=None, max_fpr=None):
    """scikit-learn's value, or for budgets a loop that breaks ties by the mean over all orders."""
    if metric == "auroc":
        return roc_auc_score(y, scores, sample_weight=weight, max_fpr=max_fpr)
    if metric == "average_precision":
        return average_precision_score(y, scores, sample_weight=weight)
    if metric == "recall_at_precision":
        precision, recall, _ = precision_recall_curve(y, scores, sample_weight=weight)
        return max([r for p, r in zip(precision[:-1], recall[:-1], strict=True) if p >= at], default=0.0)
    weight = np.ones(len(y)) if weight is None else weight
    budget = left = min(at * weight.sum() if isinstance(at, float) else at, weight.sum())
    found = 0.0
    for score in sorted(set(scores), reverse=True):
        tied = scores == score
        share = min(1.0, left / weight[tied].sum())
        found += share * (weight * y)[tied].sum()
        left -= share * weight[tied].sum()
        if left <= 1e-12:
            break
    return found / (budget if metric == "precision_at" else (weight * y).sum())


rows = st.lists(st.tuples(st.integers(-3, 6), st.booleans(), st.integers(1, 4)), min_size=4, max_size=40).filter(
    lambda rows: len({y for _, y, _ in rows}) == 2
)


@settings(max_examples=80, deadline=None)
@given(rows=rows, weighted=st.booleans(), case=st.sampled_from([(m, o) for m, o in RANKED if o != {"at": 20}]))
def test_exact_rankings_are_scikit_learns_with_ties_and_weights(rows, weighted, case):
    metric, options = case
    scores, y, w = (np.array(x, dtype=float) for x in zip(*rows, strict=True))
    weight = w if weighted else None
    given_weight = None if weight is None else torch.tensor(weight)
    found = curves.exact_ranking(metric, torch.tensor(scores), torch.tensor(y), sample_weight=given_weight, **options)
    assert found.item() == pytest.approx(reference(metric, y, scores, weight, **options), abs=1e-9)


def one_percent(seed, n=2000, share=0.05):
    generator = np.random.default_rng(seed)
    y = (generator.random(n) < share).astype(int)
    return torch.tensor(generator.normal(size=n) + 2 * y), torch.tensor(y)


TRANSFORMS = [lambda z: z, lambda z: z - 3, lambda z: 0.01 * z, lambda z: 50 * z + 7, lambda z: z**3, torch.sinh]


@pytest.mark.parametrize(("metric", "options"), RANKED)
def test_the_loss_is_the_exact_metric_after_any_monotone_transform(metric, options):
    z, y = one_percent(0)
    expected = reference(metric, y.numpy(), z.numpy(), **options)
    loss = MetricLoss(metric, task="binary", **options)
    for transform in TRANSFORMS:
        moved = transform(z).clone().requires_grad_()
        value = loss(moved, y)
        assert 1 - value.item() == pytest.approx(expected, abs=1e-6)
        value.backward()
        assert moved.grad.isfinite().all()
        assert moved.grad.abs().sum() > 0


@pytest.mark.parametrize(("metric", "options"), RANKED)
def test_a_small_step_down_the_gradient_raises_the_metric(metric, options):
    z, y = one_percent(1)
    z.requires_grad_()
    loss = MetricLoss(metric, task="binary", **options)
    first = loss(z, y)
    for _ in range(30):
        (slope,) = torch.autograd.grad(loss(z, y), z)
        z = (z - 0.05 * slope / slope.abs().max()).detach().requires_grad_()
    assert loss(z, y) < first - 0.005


def test_multilabel_and_multiclass_are_means_over_columns():
    generator = torch.Generator().manual_seed(2)
    z, labels = torch.randn(60, 3, generator=generator), torch.randint(2, (60, 3), generator=generator)
    expected = roc_auc_score(labels, z, average="macro")
    assert 1 - metric_loss(z, labels, "auroc", task="multilabel").item() == pytest.approx(expected, abs=1e-6)
    expected = average_precision_score(labels, z, average="macro")
    assert 1 - metric_loss(z, labels, "average_precision", task="multilabel").item() == pytest.approx(
        expected, abs=1e-6
    )
    y = torch.randint(3, (60,), generator=generator)
    expected = roc_auc_score(y, z.softmax(1), multi_class="ovr", average="macro")
    assert 1 - metric_loss(z, y, "auroc").item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("k", [1, 2, 3])
def test_top_k_accuracy_is_scikit_learns(k):
    generator = torch.Generator().manual_seed(3)
    z, y = torch.randn(50, 5, generator=generator).requires_grad_(), torch.randint(5, (50,), generator=generator)
    loss = metric_loss(z, y, "top_k_accuracy", at=k)
    assert 1 - loss.item() == pytest.approx(top_k_accuracy_score(y, z.detach(), k=k, labels=range(5)))
    (slope,) = torch.autograd.grad(loss, z)
    assert (slope.gather(1, y[:, None]) <= 0).all()


def test_what_goes_with_rankings_is_checked():
    wrong = [
        {"metric": "precision_at"}, {"metric": "auroc", "at": 0.1}, {"metric": "recall_at", "at": 1.5},
        {"metric": "auroc", "memory": "auto"}, {"metric": "average_precision", "threshold": [0.5]},
        {"metric": "auroc", "average": "micro"}, {"metric": "top_k_accuracy", "at": 2, "task": "binary"},
    ]  # fmt: skip
    for options in wrong:
        with pytest.raises(ValueError):  # noqa: PT011 - each has its own message
            MetricLoss(**options)


@pytest.mark.parametrize(
    ("metric", "scores", "target", "options", "message"),
    [
        ("auc", [0.1, 0.2], [0, 1], {}, "metric must be one of auroc, .* did you mean 'auroc'"),
        ("f1", [0.1, 0.2], [0, 1], {}, "metric must be one of auroc"),
        ("auroc", [0.1, math.nan], [0, 1], {}, "scores must be numbers, got nan"),
        ("auroc", [0.1, 0.2], [0, 2], {}, r"target must lie in \[0, 1\], got 2"),
        ("auroc", [0.1, 0.2], [[0], [1]], {}, "scores and target must have the same shape"),
        ("auroc", [0.1, 0.2], [0, 1], {"max_fpr": 2.0}, r"max_fpr must lie in \(0, 1\], got 2"),
        ("top_k_accuracy", [[0.1, 0.2, 0.3]], [3], {"at": 1}, "target must lie in 0 to 2, got 3"),
    ],
)
def test_scores_and_labels_of_exact_rankings_are_checked(metric, scores, target, options, message):
    with pytest.raises(ValueError, match=message):
        curves.exact_ranking(metric, torch.tensor(scores), torch.tensor(target), **options)


def test_an_exact_ranking_of_no_rows_is_0():
    assert curves.exact_ranking("auroc", torch.zeros(0), torch.zeros(0).long()) == 0


def part_of_ranks(rank, ranks):
    z, y = one_percent(4, n=40, share=0.3)
    part = slice(0, 25) if rank == 0 else slice(25, 40)
    z = z[part].requires_grad_()
    loss = MetricLoss("auroc", task="binary")(z, y[part])
    loss.backward()
    return loss.item(), z.grad / ranks  # DDP averages gradients


@pytest.mark.slow
def test_ranks_rank_the_rows_of_all(tmp_path):
    z, y = one_percent(4, n=40, share=0.3)
    z.requires_grad_()
    loss = MetricLoss("auroc", task="binary")(z, y)
    loss.backward()
    (first, left), (second, right) = on_ranks(part_of_ranks, 2, tmp_path)
    assert first == second == pytest.approx(loss.item())
    torch.testing.assert_close(torch.cat([left, right]), z.grad)


@pytest.mark.parametrize("task", ["binary", "multiclass", "multilabel"])
@pytest.mark.parametrize("noise", [0.0, 1e-8, 1e-3])
@pytest.mark.parametrize(("metric", "options"), [*RANKED, ("top_k_accuracy", {"at": 2})])
def test_equal_scores_have_a_bounded_gradient_that_raises_the_metric(metric, options, noise, task):
    if metric == "top_k_accuracy" and task != "multiclass":
        return
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(160).reshape(40, 4) % 5 == 0  # a positive in every column
    y = y.long() if task == "multilabel" else torch.arange(40) % 4 if task == "multiclass" else y[:, 0].long()
    z = torch.ones(40) if task == "binary" else torch.ones(40, 4)
    z = (z + noise * torch.randn(z.shape, generator=generator)).requires_grad_()
    loss = MetricLoss(metric, task=task, **options)
    (gradient,) = torch.autograd.grad(loss(z, y), z)
    assert gradient.abs().max() < 20
    positive = torch.nn.functional.one_hot(y) if task == "multiclass" else y
    assert gradient[positive == 1].sum() < 0
    before, after = loss(z, y), loss(z - 0.1 * gradient / gradient.abs().max(), y)
    assert after < before or before == 0
