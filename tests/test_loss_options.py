"""Options of a loss: soft targets, images one by one, forms of other libraries, anchors, options that are set later."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from evalign import Confusion, MetricLoss, metric_loss, metrics
from reference import loops
from test_losses import BACKENDS, TASKS, batch, loss_and_gradient

DTYPES = (torch.float32, torch.float64)


def one_hot(task, y):
    return F.one_hot(y, 4).double() if task == "multiclass" else y.double()


# --- soft targets


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("metric", ["f1", "auroc"])
def test_one_hot_targets_are_labels(metric, task, weighted, smoothing, dtype, backend):
    z, y = batch(task)
    z = z.to(dtype)
    weight = [1.0, 2.0, 0.5, 3.0][: 2 if task == "binary" else 4] if weighted else None
    options = {"task": task, "backend": backend, "anchor": 0.5, "label_smoothing": smoothing, "weight": weight}
    expected = loss_and_gradient(z, y, metric, **options)
    found = loss_and_gradient(z, one_hot(task, y).to(dtype), metric, **options)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("metric", ["f1", "mcc", "gmean", "jaccard"])
def test_soft_targets_are_rows_split_by_their_shares(metric, task, dtype, backend):
    """A row with shares q of labels counts as one row for every label, with weight q."""
    z, _ = batch(task)
    z, generator = z.to(dtype), torch.Generator().manual_seed(3)
    options = {"task": task, "anchor": 0.7, "backend": backend}
    if task == "multiclass":
        q = torch.rand(len(z), 4, dtype=dtype, generator=generator).softmax(1)
        rows, y, w = z.repeat_interleave(4, 0), torch.arange(4).repeat(len(z)), q.reshape(-1)
    else:
        q = torch.rand(z.shape, dtype=dtype, generator=generator)
        rows, y = torch.cat([z, z]), torch.cat([torch.zeros_like(q), torch.ones_like(q)]).long()
        w = torch.cat([1 - q, q])
    found = metric_loss(z, q, metric, **options)
    torch.testing.assert_close(found, metric_loss(rows, y, metric, sample_weight=w, **options), rtol=1e-5, atol=1e-6)
    if task == "multiclass":
        anchor = found - metric_loss(z, q, metric, task=task, backend=backend)
        torch.testing.assert_close(anchor, 0.7 * F.cross_entropy(z, q), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("task", "shape"), [("binary", (4,)), ("multilabel", (4, 3)), ("multiclass", (4, 3))])
def test_a_nan_in_the_target_is_refused(task, shape):
    q = torch.full(shape, 1 / 3)
    q[(1,) * len(shape)] = torch.nan
    with pytest.raises(ValueError, match=r"target must .* got .*nan"):
        metric_loss(torch.randn(shape), q, "f1", task=task)


def test_soft_targets_of_pictures_pass_gradcheck_and_reject_what_adds_up_to_more():
    generator = torch.Generator().manual_seed(4)
    z = torch.randn(2, 3, 2, 2, dtype=torch.float64, generator=generator).requires_grad_()
    q = torch.rand(2, 3, 2, 2, dtype=torch.float64, generator=generator).softmax(1)
    assert torch.autograd.gradcheck(lambda z: metric_loss(z, q, "f1", anchor=0.5), z)
    with pytest.raises(ValueError, match="target must add up to 1"):
        metric_loss(z, 2 * q / 2.5, "f1")
    with pytest.raises(TypeError, match="class probabilities in the shape of the input"):
        metric_loss(torch.randn(3, 4), torch.rand(3), "f1")


# --- images one by one


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1}, {"label_smoothing": 0.1, "weight": [1.0, 3.0]}])
@pytest.mark.parametrize("task", TASKS)
def test_per_image_is_a_loop_over_images(task, options):
    if "weight" in options and task != "binary":
        options = options | {"weight": [1.0, 3.0, 0.5, 2.0]}
    generator = torch.Generator().manual_seed(5)
    shape = (3, 5, 4) if task == "binary" else (3, 4, 5, 4)
    z = torch.randn(shape, generator=generator)
    y = torch.randint(4, (3, 5, 4), generator=generator) if task == "multiclass" else (z > 0.5).long()
    y[0, :2] = -100
    options = options | {"task": task, "anchor": 0.5}
    expected = torch.stack([metric_loss(z[i : i + 1], y[i : i + 1], "jaccard", **options) for i in range(3)])
    loss = MetricLoss("jaccard", per_image=True, reduction="none", **options)
    torch.testing.assert_close(loss(z, y), expected, rtol=1e-4, atol=1e-5)
    loss.reduction = "mean"
    torch.testing.assert_close(loss(z, y), expected.mean(), rtol=1e-4, atol=1e-5)
    y[1] = -100  # an image without a label is not in the mean
    torch.testing.assert_close(loss(z, y), (expected[0] + expected[2]) / 2, rtol=1e-4, atol=1e-5)


def test_what_goes_with_images_is_checked():
    for wrong in ({"reduction": "none"}, {"per_image": True, "memory": "auto"}, {"reduction": "sum"}):
        with pytest.raises(ValueError, match=r"per_image|reduction"):
            MetricLoss("f1", **wrong)


# --- other forms of a metric


@pytest.mark.parametrize("task", TASKS)
def test_tversky_weighs_false_alarms_and_misses(task):
    z, y = batch(task)
    p = z.softmax(1) if task == "multiclass" else z.sigmoid()
    t = one_hot(task, y)
    tp, fp, fn = ((a * b).sum(0) for a, b in ((p, t), (p, 1 - t), (1 - p, t)))
    expected = (tp / (tp + 0.3 * fp + 0.7 * fn)).mean()
    for backend in BACKENDS:
        options = {"task": task, "step": "identity", "backend": backend}
        found = metric_loss(z, y, "tversky", alpha=0.3, beta=0.7, **options)
        assert 1 - found.item() == pytest.approx(expected.item())
        fused = {"task": task, "backend": backend}
        dice, half = metric_loss(z, y, "dice", **fused), metric_loss(z, y, "tversky", **fused)
        torch.testing.assert_close(dice, metric_loss(z, y, "f1", **fused))
        torch.testing.assert_close(half, dice)
        whole = metric_loss(z, y, "tversky", alpha=1.0, beta=1.0, **fused)
        torch.testing.assert_close(whole, metric_loss(z, y, "jaccard", **fused))


def test_include_background_false_leaves_class_0_out():
    z, y = batch("multiclass")
    for average in ("macro", "micro", "weighted"):
        scores, keep = [], torch.tensor([1, 2, 3])

        def f1_of_others(c):
            top, bottom = 2 * c.tp[keep], c.actual[keep] + c.predicted[keep]
            if average == "micro":
                return top.sum() / bottom.sum()
            weight = c.actual[keep] if average == "weighted" else torch.ones(3)
            return (weight * top / bottom).sum() / weight.sum()

        scores = [
            metric_loss(z, y, "f1", average=average, include_background=False),
            metric_loss(z, y, f1_of_others),
        ]
        torch.testing.assert_close(*scores)
    with pytest.raises(ValueError, match="include_background"):
        MetricLoss("mcc", include_background=False)


@pytest.mark.parametrize("backend", BACKENDS)
def test_binary_heads_may_have_two_logits_and_weigh_positives(backend):
    z, y = batch("binary")
    two = torch.stack([0.5 * z.flip(0), z + 0.5 * z.flip(0)], 1)
    options = {"task": "binary", "anchor": 1.0, "backend": backend}
    expected = metric_loss(z, y, "f1", **options)
    torch.testing.assert_close(metric_loss(two, y, "f1", **options), expected)
    torch.testing.assert_close(metric_loss(two.softmax(1), y, "f1", from_logits=False, **options), expected)
    pictures = two.reshape(6, 2, 2, 2).transpose(1, 2), y.reshape(6, 2, 2)
    pictures = two.reshape(6, 4, 2).transpose(1, 2).reshape(6, 2, 2, 2), y.reshape(6, 2, 2)
    torch.testing.assert_close(metric_loss(*pictures, "f1", **options), expected)
    weighted = metric_loss(z, y, "f1", weight=[1.0, 3.0], **options)
    torch.testing.assert_close(metric_loss(z, y, "f1", pos_weight=3.0, **options), weighted)
    labels = torch.stack([y, 1 - y], 1)
    each = torch.where(labels == 1, torch.tensor([2.0, 0.5]), 1.0).double()
    options["task"] = "multilabel"
    by_row = metric_loss(two, labels, "f1", sample_weight=each, **options)
    torch.testing.assert_close(metric_loss(two, labels, "f1", pos_weight=[2.0, 0.5], **options), by_row)


def test_class_dim_reads_classes_from_any_dimension():
    generator = torch.Generator().manual_seed(6)
    z, y = torch.randn(2, 4, 4, generator=generator), torch.randint(4, (2, 4), generator=generator)
    expected = metric_loss(z.reshape(-1, 4), y.reshape(-1), "f1")
    torch.testing.assert_close(metric_loss(z, y, "f1", class_dim=-1), expected)
    assert metric_loss(z, y, "f1") != expected
    torch.testing.assert_close(metric_loss(z, F.one_hot(y, 4).float(), "f1", class_dim=2), expected)
    each = {"per_image": True, "reduction": "none"}
    for shares in (False, True):
        first, second = (F.one_hot(y, 4).float().movedim(-1, dim) if shares else y for dim in (0, 1))
        found = metric_loss(z.movedim(-1, 0), first, "f1", class_dim=0, **each)
        torch.testing.assert_close(found, metric_loss(z.movedim(-1, 1), second, "f1", **each))


@pytest.mark.parametrize("shape", [(6,), (2, 3), (2, 3, 3)])
def test_class_dim_leaves_one_logit_an_entry_alone(shape):
    z, y = torch.randn(shape), torch.rand(shape)
    torch.testing.assert_close(
        metric_loss(z, y, "f1", task="binary", class_dim=-1), metric_loss(z, y, "f1", task="binary")
    )


# --- anchors


@pytest.mark.parametrize("backend", ["auto", "eager"])
def test_a_class_of_weight_0_has_its_part_of_the_smoothing(backend):
    generator = torch.Generator().manual_seed(0)
    z, y, weight = torch.randn(40, 5, generator=generator), torch.arange(40) % 5, torch.tensor([0.0, 1, 2, 3, 4])
    options = {"weight": weight, "label_smoothing": 0.1, "backend": backend}
    found = []
    for anchor in (1.0, 0.0):
        x = z.clone().requires_grad_()
        value = MetricLoss("f1", anchor=anchor, **options)(x, y)
        found.append([value, *torch.autograd.grad(value, x)])
    x = z.clone().requires_grad_()
    expected = F.cross_entropy(x, y, weight, label_smoothing=0.1)
    wanted = [expected, *torch.autograd.grad(expected, x)]
    torch.testing.assert_close([a - b for a, b in zip(*found, strict=True)], wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_focal_term_takes_p_without_class_weights(smoothing):
    generator = torch.Generator().manual_seed(0)
    z, y, weight = torch.randn(40, 5, generator=generator), torch.arange(40) % 5, torch.tensor([0.5, 1, 2, 3, 4])
    shares = F.one_hot(y, 5).float()

    def term(target, **options):
        with_term, alone = (metric_loss(z, target, "f1", anchor=a, **options) for a in ((1.0, "focal"), 0.0))
        return with_term - alone

    if not smoothing:
        entropy = F.cross_entropy(z, y, reduction="none")
        expected = ((1 - (-entropy).exp()) ** 2 * entropy * weight[y]).sum() / weight[y].sum()
        torch.testing.assert_close(term(y, weight=weight), expected)
    options = {"label_smoothing": smoothing}
    torch.testing.assert_close(term(shares, weight=weight, **options), term(y, weight=weight, **options))
    torch.testing.assert_close(term(y, weight=[2.0] * 5, **options), term(y, **options))


def test_an_anchor_may_be_focal_or_any_module():
    z, y = batch("multiclass")
    metric = metric_loss(z, y, "f1")
    entropy = F.cross_entropy(z, y, reduction="none")
    focal = ((1 - (-entropy).exp()) ** 2 * entropy).mean()
    torch.testing.assert_close(metric_loss(z, y, "f1", anchor=(0.5, "focal")), metric + 0.5 * focal)
    torch.testing.assert_close(MetricLoss("f1", anchor=(0.5, "focal"), memory="auto")(z, y), metric + 0.5 * focal)
    module = nn.MultiMarginLoss()
    for loss in (MetricLoss("f1", anchor=(0.5, module)), lambda z, y: metric_loss(z, y, "f1", anchor=(0.5, module))):
        torch.testing.assert_close(loss(z, y), metric + 0.5 * module(z, y))
    with pytest.raises(ValueError, match="cannot be summed over batches"):
        MetricLoss("f1", anchor=(0.5, module)).sums(z, y)
    with pytest.raises(ValueError, match="one of cross_entropy, focal"):
        MetricLoss("f1", anchor=(0.5, "hinge"))


# --- options that are set later


@pytest.mark.parametrize(
    ("name", "value"),
    [("anchor", 5.0), ("label_smoothing", 0.2), ("average", "micro"), ("weight", [1.0, 2.0, 3.0, 4.0]),
     ("step", "linear"), ("threshold", 0.3), ("offset", torch.tensor([1.0, 0.0, 0.0, -1.0])), ("backend", "eager"),
     ("ignore_index", 0),
     ("metric", "mcc"), ("memory", 0.5), ("smooth", 1.0)],
)  # fmt: skip
def test_an_option_set_later_is_an_option_given(name, value):
    z, y = batch("multiclass")
    changed = MetricLoss("f1")
    changed(z, y)
    setattr(changed, name, value)
    given = MetricLoss(value) if name == "metric" else MetricLoss("f1", **{name: value})
    assert repr(changed).startswith(repr(given)[:20])
    z.requires_grad_()
    for _ in range(2):  # a memory shows in the second batch
        assert torch.equal(changed(z, y), given(z, y))
    if name not in ("backend", "memory"):
        assert changed(z, y) != MetricLoss("f1")(z, y)


def test_a_wrong_option_set_later_is_refused():
    loss = MetricLoss("f1")
    for name, value in (("anchor", -1.0), ("average", "binary"), ("task", "regression"), ("metric", "f3")):
        with pytest.raises(ValueError, match=name):
            setattr(loss, name, value)
    assert repr(loss) == "MetricLoss('f1')"


def test_an_offset_that_is_a_parameter_is_learned():
    z, y = batch("multiclass")
    offset = nn.Parameter(torch.zeros(4))
    loss = MetricLoss("f1", offset=offset)
    loss(z.float(), y).backward()
    assert offset.grad.abs().sum() > 0
    assert list(loss.parameters()) == [offset]
    with pytest.raises(ValueError, match="Parameter"):
        MetricLoss("f1", offset=torch.zeros(4, requires_grad=True))


# --- small numbers and hints


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("metric", ["f1", "mcc", "gmean", "auroc"])
@pytest.mark.parametrize("task", TASKS)
def test_nan_in_an_ignored_row_is_ignored(metric, task, backend, dtype):
    z, y = batch(task)
    z = z.to(dtype)
    y[3] = -100
    expected, slope = loss_and_gradient(z, y, metric, task=task, anchor=1.0, backend=backend)
    z[3] = math.nan
    found, gradient = loss_and_gradient(z, y, metric, task=task, anchor=1.0, backend=backend)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(gradient, slope)
    assert (gradient[3] == 0).all()


def test_beta_without_bound_is_recall_and_a_negative_one_is_refused():
    c = Confusion.hard(torch.tensor([0, 1, 1, 2, 2]), torch.tensor([0, 1, 2, 2, 1]), 3)
    for average in ("macro", "micro", "weighted", None):
        torch.testing.assert_close(metrics.fbeta(c, average, beta=math.inf), metrics.recall(c, average))
    torch.testing.assert_close(metrics.fbeta(c, None, beta=[math.inf] * 3), metrics.recall(c, None))
    z, y = batch("multiclass")
    for dtype in DTYPES:
        found = metric_loss(z.to(dtype), y, "fbeta", beta=math.inf)
        torch.testing.assert_close(found, metric_loss(z.to(dtype), y, "recall"))
    for beta in (-1.0, [1.0, -1.0, 1.0]):
        with pytest.raises(ValueError, match="beta must lie in"):
            MetricLoss("fbeta", beta=beta)


@pytest.mark.parametrize("scale", [1e-22, 1e-3, 1e20])
def test_quadratic_kappa_does_not_depend_on_the_scale_of_weights(scale):
    z, y = batch("multiclass")
    z = z.float()
    expected = metric_loss(z, y, "quadratic_kappa")
    found = metric_loss(z, y, "quadratic_kappa", sample_weight=torch.full((len(y),), scale))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "hint"),
    [("f1_score", "'f1'"), ("matthews_corrcoef", "'mcc'"), ("macro_f1", "'f1' with average='macro'"),
     ("Tversky", "'tversky'"), ("average-precision", "'average_precision'"), ("roc_auc_score", "'auroc'"),
     ("f1_weighted", "'f1' with average='weighted'"), ("Dice", "'dice'"), ("IoU", "'jaccard'")],
)  # fmt: skip
def test_names_of_other_libraries_are_hinted_at(name, hint):
    with pytest.raises(ValueError, match=f"did you mean {hint}"):
        MetricLoss(name)


# --- MONAI and segmentation-models-pytorch, as slow loops


@pytest.mark.parametrize("smooth", [1e-5, 1.0])
@pytest.mark.parametrize("empty", [False, True])
def test_dice_and_tversky_losses_of_monai_and_smp(smooth, empty):
    generator = torch.Generator().manual_seed(7)
    z = torch.randn(2, 3, 4, 4, dtype=torch.float64, generator=generator)
    y = torch.randint(1 if empty else 3, (2, 4, 4), generator=generator)  # empty: classes 1 and 2 have no pixel
    p, labels = z.softmax(1).tolist(), y.tolist()
    options = {"step": "identity", "smooth": smooth}
    monai = loops.monai_dice(p, labels, smooth, include_background=False)
    found = metric_loss(z, y, "dice", per_image=True, include_background=False, **options)
    assert found.item() == pytest.approx(monai)
    found = metric_loss(z, y, "dice", step="identity", smooth=2 * smooth)
    assert found.item() == pytest.approx(loops.smp_dice(p, labels, smooth))
    tversky = loops.smp_tversky(p, labels, smooth, alpha=0.3, beta=0.7)
    found = metric_loss(z, y, "tversky", alpha=0.3, beta=0.7, **options)
    assert found.item() == pytest.approx(tversky)
