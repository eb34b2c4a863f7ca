"""The metric of an epoch, for losses that add up over batches and for those that do not."""

import pytest
import torch
from torch import nn

from evalign import Confusion, MetricLoss, metrics
from evalign.integrations.tracking import Tracker


@pytest.mark.parametrize("options", [{"anchor": (2.0, nn.CrossEntropyLoss())}, {"per_image": True}])
@pytest.mark.parametrize("metric", ["f1", "auroc"])
def test_losses_that_do_not_add_up_are_averaged_over_rows(metric, options):
    generator = torch.Generator().manual_seed(0)
    z, y = torch.randn(6, 3, 20, generator=generator), torch.randint(3, (6, 20), generator=generator)
    loss = MetricLoss(metric, **options)
    tracker = Tracker(loss)
    with tracker.listening(), torch.no_grad():
        values = [loss(z[part], y[part]).item() for part in (slice(0, 4), slice(4, 6))]
    found = tracker.scores()
    assert found["loss"] == pytest.approx((4 * values[0] + 2 * values[1]) / 6)
    if metric == "f1":
        assert found["f1"] == pytest.approx(metrics.f1(Confusion.hard(z.argmax(1), y, 3)).item())
    else:
        assert found["auroc"] == pytest.approx(1 - MetricLoss("auroc")(z, y).item())
