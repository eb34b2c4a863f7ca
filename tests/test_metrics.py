"""Metrics of hard counts equal scikit-learn's: absent classes, one class only, weights, every zero_division."""

import math
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn import metrics as sk

from evalign import Confusion, metrics
from reference import loops

# scikit-learn warns of one label only, and of predictions of classes without a label; we mean them.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:sklearn")
AVERAGES = ["macro", "micro", "weighted", None]
BETAS = [0.25, 0.5, 1.0, 2.0, 5.0]
zero_divisions = st.sampled_from([0.0, 1.0, math.nan])
betas = st.sampled_from(BETAS)


@st.composite
def labellings(draw, classes=None, labels=None):
    """(target, predicted, weights or None, C): few classes used of many, so that absent ones are common."""
    c = classes or draw(st.integers(2, 5))
    n = draw(st.integers(1, 25))
    used = draw(st.lists(st.integers(0, c - 1), min_size=1, max_size=c, unique=True))
    shape = {"min_size": n, "max_size": n}
    column = st.lists(st.sampled_from(used), **shape)
    if labels:
        column = st.lists(st.lists(st.integers(0, 1), min_size=labels, max_size=labels), **shape)
    y, predicted = np.array(draw(column)), np.array(draw(column))
    weights = draw(st.none() | st.lists(st.integers(0, 9), **shape).filter(any))
    return y, predicted, None if weights is None else np.array(weights) / 7, c


def counts(y, predicted, weights, c=None):
    w = None if weights is None else torch.tensor(weights)
    return Confusion.hard(torch.tensor(predicted), torch.tensor(y), c, sample_weight=w, multilabel=y.ndim == 2)


def assert_near(got, expected, tolerance=1e-9):
    np.testing.assert_allclose(got.numpy(), expected, atol=tolerance, rtol=0, equal_nan=True)


def scikit(name, y, predicted, *, beta=1.0, **options):
    """scikit-learn's class scores; specificity is the recall of the complement; Dice and Tversky (1/2, 1/2) are F1."""
    name = "f1" if name in ("dice", "tversky") else name
    if name == "fbeta":
        options["beta"] = beta
    if name != "specificity":
        return getattr(sk, f"{name}_score")(y, predicted, **options)
    average, w = options["average"], options["sample_weight"]
    others = np.stack([y != k for k in options["labels"]]), np.stack([predicted != k for k in options["labels"]])
    complement = {"sample_weight": w, "zero_division": options["zero_division"]}
    if average == "micro":
        complement["sample_weight"] = None if w is None else np.tile(w, len(others[0]))
        return sk.recall_score(*(x.ravel() for x in others), **complement)
    scores = np.array([sk.recall_score(*pair, **complement) for pair in zip(*others, strict=True)])
    if average is None:
        return scores
    if average == "binary":
        return scores[1]
    weight = np.bincount(y, w, minlength=len(scores)) if average == "weighted" else np.ones(len(scores))
    defined = ~np.isnan(scores)
    if not defined.any():
        return math.nan
    return np.average(scores[defined], weights=weight[defined] if weight[defined].any() else None)


@pytest.mark.parametrize("average", AVERAGES)
@pytest.mark.parametrize("name", loops.CLASS_SCORES)
@settings(max_examples=25)
@given(data=labellings(), zero_division=zero_divisions, beta=betas)
def test_class_scores_are_scikit_learns(name, average, data, zero_division, beta):
    y, predicted, w, c = data
    if name == "jaccard" and math.isnan(zero_division):
        zero_division = 0.0  # scikit-learn's takes no nan
    options = {"average": average, "zero_division": zero_division}
    expected = scikit(name, y, predicted, beta=beta, labels=range(c), sample_weight=w, **options)
    extra = {"beta": beta} if name == "fbeta" else {}
    assert_near(metrics.METRICS[name](counts(*data), **options, **extra), expected)


@pytest.mark.parametrize("name", loops.CLASS_SCORES)
@given(data=labellings(classes=2), zero_division=zero_divisions, beta=betas)
def test_the_binary_average_is_the_score_of_class_1(name, data, zero_division, beta):
    y, predicted, w, c = data
    if name == "jaccard" and math.isnan(zero_division):
        zero_division = 0.0
    options = {"average": "binary", "zero_division": zero_division}
    labels = {"labels": range(c)} if name == "specificity" else {}
    expected = scikit(name, y, predicted, beta=beta, sample_weight=w, **options, **labels)
    extra = {"beta": beta} if name == "fbeta" else {}
    assert_near(metrics.METRICS[name](counts(*data), **options, **extra), expected)


@given(data=labellings())
def test_accuracy_and_balanced_accuracy_are_scikit_learns(data):
    y, predicted, w, _ = data
    assert_near(metrics.accuracy(counts(*data)), sk.accuracy_score(y, predicted, sample_weight=w))
    expected = sk.balanced_accuracy_score(y, predicted, sample_weight=w)
    assert_near(metrics.balanced_accuracy(counts(*data)), expected)


@given(data=labellings())
def test_gmean_is_the_geometric_mean_of_scikit_learns_recalls(data):
    y, predicted, w, c = data
    present = np.bincount(y, weights=w, minlength=c) > 0
    recalls = sk.recall_score(y, predicted, labels=range(c), average=None, sample_weight=w, zero_division=0)[present]
    assert_near(metrics.gmean(counts(*data)), np.prod(recalls) ** (1 / len(recalls)))


@given(data=labellings())
def test_mcc_is_scikit_learns(data):
    y, predicted, w, _ = data
    # Where all predictions are of one class, rounding leaves the root of 1e-16.
    assert_near(metrics.mcc(counts(*data)), sk.matthews_corrcoef(y, predicted, sample_weight=w), 1e-7)


def kappa(y, predicted, undefined, **options):
    """scikit-learn's, whose older versions cannot replace an undefined one."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        value = sk.cohen_kappa_score(y, predicted, **options)
    return undefined if math.isnan(value) else value


@given(data=labellings(), undefined=st.sampled_from([0.0, 1.0, math.nan]))
def test_kappas_are_scikit_learns(data, undefined):
    y, predicted, w, c = data
    options = {"labels": range(c), "sample_weight": w}
    plain = kappa(y, predicted, undefined, **options)
    quadratic = kappa(y, predicted, undefined, weights="quadratic", **options)
    assert_near(metrics.cohen_kappa(counts(*data), zero_division=undefined), plain)
    assert_near(metrics.quadratic_kappa(counts(*data), zero_division=undefined), quadratic)


def test_undefined_correlations_are_0():
    alone = Confusion.hard(torch.ones(5, dtype=torch.long), torch.ones(5, dtype=torch.long), 3)
    for name in ("mcc", "cohen_kappa", "quadratic_kappa"):
        assert metrics.METRICS[name](alone) == 0


def test_one_class_with_weights_that_round_still_has_a_share_of_1():
    w = torch.rand(5000, generator=torch.Generator().manual_seed(0))
    y = torch.ones(5000, dtype=torch.long)
    soft = Confusion.soft(torch.tensor([[0.2, 0.7, 0.1]]).expand(5000, 3), y, sample_weight=w)
    hard = Confusion.hard(y, y, 3, sample_weight=w)
    for c in (soft, hard):
        assert metrics.mcc(c) == 0
        assert metrics.specificity(c, None)[1] == 0
        assert metrics.cohen_kappa(c).item() == pytest.approx(0, abs=1e-5)


@pytest.mark.parametrize("average", AVERAGES)
@pytest.mark.parametrize("name", ["f1", "fbeta", "precision", "recall", "jaccard"])
@settings(max_examples=25)
@given(data=labellings(labels=3), zero_division=zero_divisions, beta=betas)
def test_multilabel_class_scores_are_scikit_learns(name, average, data, zero_division, beta):
    y, predicted, w, _ = data
    if name == "jaccard" and math.isnan(zero_division):
        zero_division = 0.0
    options = {"average": average, "zero_division": zero_division}
    expected = scikit(name, y, predicted, beta=beta, sample_weight=w, **options)
    extra = {"beta": beta} if name == "fbeta" else {}
    assert_near(metrics.METRICS[name](counts(*data), **options, **extra), expected)


@given(data=labellings(labels=3))
def test_multilabel_accuracy_and_mcc_are_means_over_the_labels(data):
    y, predicted, w, _ = data
    columns = range(y.shape[1])
    assert_near(metrics.accuracy(counts(*data)), 1 - sk.hamming_loss(y, predicted, sample_weight=w))
    each = [sk.matthews_corrcoef(y[:, k], predicted[:, k], sample_weight=w) for k in columns]
    assert_near(metrics.mcc(counts(*data)), np.mean(each), 1e-7)
    kappas = [kappa(y[:, k], predicted[:, k], 0.0, labels=[0, 1], sample_weight=w) for k in columns]
    balanced = [sk.balanced_accuracy_score(y[:, k], predicted[:, k], sample_weight=w) for k in columns]
    assert_near(metrics.cohen_kappa(counts(*data)), np.mean(kappas))
    assert_near(metrics.balanced_accuracy(counts(*data)), np.mean(balanced))


@given(data=labellings(), beta=st.lists(betas, min_size=5, max_size=5))
def test_a_beta_per_class_is_each_class_with_its_own(data, beta):
    y, predicted, w, c = data
    options = {"labels": range(c), "average": None, "sample_weight": w, "zero_division": 0.0}
    expected = [sk.fbeta_score(y, predicted, beta=beta[k], **options)[k] for k in range(c)]
    for given_as in (beta[:c], torch.tensor(beta[:c])):
        assert_near(metrics.fbeta(counts(*data), None, beta=given_as), expected)
    assert_near(metrics.fbeta(counts(*data), "macro", beta=beta[:c]), np.mean(expected))


@given(data=labellings())
def test_the_slow_loops_agree_with_scikit_learn_too(data):
    """The loops are what soft counts are held against, so they are held against someone else's code first."""
    y, predicted, w, c = data
    table = sk.confusion_matrix(y, predicted, labels=range(c), sample_weight=w).tolist()
    assert loops.metric("mcc", table) == pytest.approx(sk.matthews_corrcoef(y, predicted, sample_weight=w), abs=1e-6)
    options = {"labels": range(c), "average": "macro", "sample_weight": w, "zero_division": 0.0}
    for name in ("f1", "precision", "recall", "jaccard"):
        assert loops.metric(name, table) == pytest.approx(getattr(sk, f"{name}_score")(y, predicted, **options))
    weighted = sk.fbeta_score(y, predicted, beta=2.0, **{**options, "average": "weighted"})
    assert loops.metric("fbeta", table, betas=[2.0] * c, average="weighted") == pytest.approx(weighted)
    assert loops.metric("accuracy", table) == pytest.approx(sk.accuracy_score(y, predicted, sample_weight=w))


def test_soft_macro_means_leave_out_a_class_without_a_label():
    g = torch.tensor([[0.8, 0.1, 0.1], [0.3, 0.6, 0.1]], dtype=torch.float64)
    soft, y = Confusion.soft(g, torch.tensor([0, 1])), [[1, 0, 0], [0, 1, 0]]
    table = loops.matrix(g.tolist(), y, [1, 1])
    for name in loops.CLASS_SCORES:
        expected = loops.metric(name, table, present=[0, 1])
        assert metrics.METRICS[name](soft).item() == pytest.approx(expected)


def test_a_nan_in_the_counts_is_not_taken_for_an_undefined_score():
    g = torch.tensor([[math.nan, math.nan, math.nan], [0.2, 0.6, 0.2], [0.1, 0.1, 0.8]])
    c = Confusion.soft(g, torch.tensor([0, 1, 2]))
    assert all(metric(c).isnan() for metric in metrics.METRICS.values())
    labels = Confusion.soft(g, torch.eye(3).long(), task="multilabel")
    assert all(metric(labels).isnan() for name, metric in metrics.METRICS.items() if name != "quadratic_kappa")


def test_resolve_binds_the_options_and_passes_functions_through():
    c = Confusion.hard(torch.tensor([0, 1, 1]), torch.tensor([0, 1, 0]))
    expected = sk.fbeta_score([0, 1, 0], [0, 1, 1], beta=2.0)
    assert metrics.resolve("fbeta", average="binary", beta=2.0)(c).item() == pytest.approx(expected)
    assert metrics.resolve(metrics.mcc) is metrics.mcc
    assert metrics.is_averaged("f1")
    assert not metrics.is_averaged("mcc")
