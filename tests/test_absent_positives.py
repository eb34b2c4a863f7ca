"""Batches without a positive label: false positives are pushed down, by every backend alike."""

import pytest
import torch

from evalign import MetricLoss, metric_loss, steps
from test_losses import BACKENDS, loss_and_gradient

ALARMED = ("f1", "fbeta", "dice", "jaccard", "precision", "tversky", "mcc", "cohen_kappa")
DTYPES = (torch.float32, torch.float64)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("metric", ALARMED)
def test_a_binary_batch_without_positives_pushes_false_positives_down(metric, backend, dtype):
    z, y = torch.tensor([3.0, 2.0, -1.0, 4.0], dtype=dtype), torch.zeros(4, dtype=torch.long)
    loss, gradient = loss_and_gradient(z, y, metric, task="binary", backend=backend)
    flagged = steps.annealed(z.sigmoid(), 0.5, temperature=0.2).mean()
    assert loss.item() == pytest.approx(flagged.item(), abs=1e-6)  # the share of rows that are flagged
    assert (gradient > 0).all()
    assert metric_loss(torch.full_like(z, -30.0), y, metric, task="binary", backend=backend).item() < 1e-6


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("average", ["macro", "micro", "weighted"])
@pytest.mark.parametrize("metric", ["f1", "jaccard", "precision"])
def test_backends_agree_on_labels_without_positives(metric, average, dtype):
    generator = torch.Generator().manual_seed(0)
    z, y = torch.randn(30, 5, generator=generator).to(dtype), torch.randint(2, (30, 5), generator=generator)
    options = {"task": "multilabel", "average": average, "label_smoothing": 0.1}
    for absent in ([2], [0, 1, 2, 3, 4]):
        y[:, absent] = 0
        fused, eager = (loss_and_gradient(z, y, metric, backend=b, **options) for b in BACKENDS)
        torch.testing.assert_close(fused, eager, rtol=1e-4, atol=1e-6)
        if average == "macro" or len(absent) == 5:
            assert (fused[1][:, absent] > 0).all()


def test_an_absent_label_adds_its_share_of_flagged_rows_to_the_mean_over_the_others():
    z, y = torch.randn(20, 2, generator=torch.Generator().manual_seed(1)), torch.zeros(20, 2, dtype=torch.long)
    y[::3, 0] = 1
    loss = MetricLoss("f1", task="multilabel", step="identity")
    alone = loss(z[:, :1], y[:, :1])
    assert loss(z, y).item() == pytest.approx((alone + z[:, 1].sigmoid().mean() / 2).item(), abs=1e-6)


def test_recall_has_no_false_positives_to_push():
    _, gradient = loss_and_gradient(torch.ones(4), torch.zeros(4).long(), "recall", task="binary")
    assert (gradient == 0).all()


@pytest.mark.parametrize("metric", ["mcc", "cohen_kappa", "quadratic_kappa"])
def test_labels_of_one_class_leave_an_agreement_with_accuracy(metric):
    z, y = torch.randn(6, 3, generator=torch.Generator().manual_seed(0)), torch.ones(6, dtype=torch.long)
    loss, gradient = loss_and_gradient(z, y, metric)
    expected, slope = loss_and_gradient(z, y, "accuracy")
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradient, slope)
    assert (gradient[:, 1] < 0).all()
