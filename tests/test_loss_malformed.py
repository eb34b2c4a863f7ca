"""Options of a loss that are refused or normalised."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from evalign import MetricLoss, metric_loss, metrics
from test_losses import batch


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("weight", [1.0, -1.0, 1.0], r"weight must lie in \[0, inf\), got -1"),
        ("weight", torch.tensor([1.0, math.nan, 1.0]), "weight must lie in .* got nan"),
        ("weight", [[1.0, 1.0, 1.0]], r"weight must hold one number per class, got shape \(1, 3\)"),
        ("weight", "balanced", "weight must hold one number per class, got 'balanced'"),
        ("weight", {0: 1.0}, "weight must hold one number per class"),
        ("offset", [0.0, math.inf, 0.0], "offset must lie in"),
        ("offset", ["a"], "offset must hold one number per class"),
        ("beta", [[1.0, 2.0, 3.0]], "beta must hold one number per class"),
        ("beta", [1, 2, "x"], "beta must hold one number per class"),
        ("alpha", math.inf, "alpha must lie in"),
        ("anchor", math.inf, "anchor must lie in"),
        ("anchor", (1.0,), "anchor must be a number, or a pair"),
        ("anchor", (1.0, "focal", 2), "anchor must be a number, or a pair"),
        ("smooth", math.inf, "smooth must lie in"),
        ("k", math.inf, "k must lie in"),
        ("temperature", torch.tensor([0.1, 0.2]), "temperature must be one number"),
        ("threshold", "0.5", "threshold must be a number or a sequence of numbers, got '0.5'"),
        ("threshold", ["a"], "threshold must be a number or a sequence of numbers"),
        ("ignore_index", None, "ignore_index must be a whole number, got None"),
        ("ignore_index", 1.5, "ignore_index must be a whole number, got 1.5"),
        ("class_dim", "last", "class_dim must be a whole number"),
        ("per_image", "no", "per_image must be True or False, got 'no'"),
        ("from_logits", "no", "from_logits must be True or False"),
        ("include_background", None, "include_background must be True or False"),
        ("delta", 0.3, "delta requires step 'linear', got step 'annealed'"),
    ],
)
def test_malformed_options_are_refused_in_one_sentence(name, value, message):
    owner = {"beta": "fbeta", "alpha": "tversky"}.get(name, "f1")
    with pytest.raises((TypeError, ValueError), match=message):
        MetricLoss(owner, **{name: value, "step": "sigmoid" if name == "k" else "annealed"})


@pytest.mark.parametrize("value", [-1.0, math.nan, [1.0, -2.0]])
def test_a_weight_of_positives_is_a_number_from_0(value):
    with pytest.raises(ValueError, match=r"pos_weight must lie in \[0, inf\)"):
        MetricLoss("f1", task="multilabel", pos_weight=value)


@pytest.mark.parametrize("name", ["beta", "alpha", "at", "max_fpr", "smooth", "include_background"])
def test_a_function_takes_no_options_of_named_metrics(name):
    with pytest.raises(ValueError, match=f"{name} requires a metric given by name"):
        MetricLoss(metrics.f1, **{name: False if name == "include_background" else 2.0})


def test_numbers_may_be_those_of_numpy():
    z, y = batch("binary")
    given = {"temperature": np.float32(0.25), "threshold": np.float64(0.25), "anchor": np.float32(0.5)}
    plain = {name: value.item() for name, value in given.items()}
    torch.testing.assert_close(
        metric_loss(z, y, "fbeta", task="binary", beta=np.int64(2), ignore_index=np.int64(-1), **given),
        metric_loss(z, y, "fbeta", task="binary", beta=2, ignore_index=-1, **plain),
    )
    grid = metric_loss(z, y, "f1", task="binary", threshold=[0.25, 0.5])
    for thresholds in (np.array([0.25, 0.5]), torch.tensor([0.25, 0.5])):
        torch.testing.assert_close(metric_loss(z, y, "f1", task="binary", threshold=thresholds), grid)


@pytest.mark.parametrize("step", ["identity", lambda p, threshold: p])
@pytest.mark.parametrize("task", ["binary", "multilabel"])
def test_a_step_without_a_threshold_takes_a_grid(task, step):
    z, y = batch(task)
    one = metric_loss(z, y, "f1", task=task, step=step)
    torch.testing.assert_close(metric_loss(z, y, "f1", task=task, step=step, threshold=[0.25, 0.5, 0.75]), one)


def test_an_anchor_that_is_replaced_leaves_no_parameters():
    loss = MetricLoss("f1", anchor=(1.0, nn.Linear(2, 2)))
    loss.anchor = 0.5
    assert list(loss.parameters()) == []


@pytest.mark.parametrize(("value", "got"), [(3.0, "float"), (None, "NoneType"), (torch.zeros(2), r"shape \(2,\)")])
def test_an_anchor_returns_a_tensor_of_one_number(value, got):
    loss = MetricLoss("f1", anchor=(1.0, lambda input, target: value))
    with pytest.raises(ValueError, match=f"the anchor must return a scalar tensor, got {got}"):
        loss(*batch("multiclass"))


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
def test_sample_weights_are_finite_and_not_negative(value):
    z, y = batch("multiclass")
    weight = torch.ones(len(y))
    weight[3] = value
    with pytest.raises(ValueError, match=r"sample_weight must lie in \[0, inf\), got"):
        MetricLoss("f1")(z, y, weight)


@pytest.mark.parametrize("given", [torch.tensor(0.5), nn.Parameter(torch.tensor(0.5))], ids=["tensor", "parameter"])
@pytest.mark.parametrize(
    "make", [MetricLoss, lambda *a, **o: metric_loss(*batch("binary"), *a, **o)], ids=["class", "function"]
)
@pytest.mark.parametrize("name", ["anchor", "label_smoothing", "alpha", "delta", "k", "smooth", "threshold", "max_fpr"])
def test_a_number_may_be_a_tensor_but_is_not_learned(name, make, given):
    owner = {"alpha": "tversky", "max_fpr": "auroc"}.get(name, "f1")
    options = {"task": "binary", "step": {"delta": "linear", "k": "sigmoid"}.get(name, "annealed"), name: given}
    if given.requires_grad:
        with pytest.raises(ValueError, match=f"{name} cannot be learned, got a tensor that requires a gradient"):
            make(owner, **options)
        return
    made = metric_loss(*batch("binary"), owner, **options)
    torch.testing.assert_close(made, metric_loss(*batch("binary"), owner, **options | {name: 0.5}))


def test_the_weight_of_an_anchor_is_not_learned_beside_a_term():
    with pytest.raises(ValueError, match="anchor cannot be learned"):
        MetricLoss("f1", anchor=(nn.Parameter(torch.tensor(1.0)), "focal"))


def test_a_module_does_not_learn_its_temperature():
    loss = MetricLoss("f1")
    with pytest.raises(ValueError, match=r"temperature .* requires a gradient; use metric_loss"):
        loss.temperature = nn.Parameter(torch.tensor(0.1))
    with pytest.raises(ValueError, match=r"temperature .* requires a gradient; use metric_loss"):
        MetricLoss("f1", temperature=torch.tensor(0.1, requires_grad=True))


def test_labels_in_another_shape_are_told_what_to_do():
    z, y = torch.randn(2, 3, 4, 4), torch.zeros(2, 4, 4, dtype=torch.long)
    with pytest.raises(ValueError, match=r"got \(2, 1, 4, 4\); use target.squeeze\(1\)"):
        metric_loss(z, y[:, None], "f1")
    with pytest.raises(ValueError, match=r"got \(2, 3, 4, 4\); pass one-hot labels as floats"):
        metric_loss(z, y[:, None].expand(-1, 3, -1, -1), "f1")
    with pytest.raises(ValueError, match=r"sample_weight must have shape \(5,\), got \(5, 1\)"):
        metric_loss(torch.randn(5, 3), torch.zeros(5, dtype=torch.long), "f1", sample_weight=torch.ones(5, 1))
