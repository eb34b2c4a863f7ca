"""Wrong input: a ValueError or TypeError in one sentence that names what was found and what is expected."""

import pytest
import torch

from evalign import Confusion, MetricLoss, membership, metric_loss, metrics, steps

Z, Y = torch.tensor([[2.0, -1.0, 0.5], [0.1, 1.3, -2.0], [0.0, -3.0, 1.0]]), torch.tensor([0, 1, 2])
Z1, Y1 = torch.tensor([0.5, -2.0, 3.0]), torch.tensor([0, 1, 1])
f1 = metrics.f1


def multiclass(z=Z, y=Y, metric="f1", **options):
    return metric_loss(z, y, metric, **options)


def binary(z=Z1, y=Y1, metric="f1", **options):
    return metric_loss(z, y, metric, task="binary", **options)


def multilabel(z=Z, y=torch.eye(3).long(), metric="f1", **options):  # noqa: B008
    return metric_loss(z, y, metric, task="multilabel", **options)


COUNTS = Confusion.hard(torch.tensor([0, 1, 2]), Y, 3)
TWO = Confusion.hard(torch.tensor([0, 1]), torch.tensor([0, 1]), 2)
LABELS = Confusion.hard(torch.eye(2).long(), torch.eye(2).long(), multilabel=True)

CASES = {
    # shapes
    "one dimension": (lambda: multiclass(Z1, Y), ValueError, ["(3,)", "binary"]),
    "one dimension of probabilities": (
        lambda: multiclass(Z1.sigmoid(), Y, from_logits=False),
        ValueError,
        ["(3,)", "binary"],
    ),
    "one class": (lambda: multiclass(Z[:, :1], Y), ValueError, ["(3, 1)", "C >= 2"]),
    "target too short": (lambda: multiclass(Z, Y[:2]), ValueError, ["(3,)", "(2,)"]),
    "target one-hot": (lambda: multiclass(Z, torch.eye(3).long()), ValueError, ["(3,)", "(3, 3)"]),
    "binary (n,) and (n, 1)": (lambda: binary(Z1, Y1[:, None]), ValueError, ["(3,)", "(3, 1)"]),
    "binary three columns": (lambda: binary(Z, Y1), ValueError, ["(3, 3)", "(3,)"]),
    "multilabel one dimension": (lambda: multilabel(Z1, Y1), ValueError, ["(3,)", "binary"]),
    "multilabel class labels": (lambda: multilabel(Z, Y), ValueError, ["(3, 3)", "(3,)"]),
    "sample_weight": (lambda: multiclass(sample_weight=torch.ones(2)), ValueError, ["sample_weight", "(2,)", "(3,)"]),
    "hard shapes": (lambda: Confusion.hard(Y[:2], Y), ValueError, ["predicted", "(2,)"]),
    "membership": (lambda: Confusion.soft(Z, Y[:1]), ValueError, ["membership", "(1,)"]),
    # types
    "input a list": (lambda: multiclass([[1.0, 2.0]]), TypeError, ["input", "list"]),
    "input of integers": (lambda: multiclass(Y, Z), TypeError, ["int64", "swapped"]),
    "target of floats": (lambda: multiclass(Z, Y.float()), TypeError, ["target", "float32", "long()"]),
    "target a list": (lambda: multiclass(Z, [0, 1, 2]), TypeError, ["target", "list"]),
    "sample_weight a list": (lambda: multiclass(sample_weight=[1.0, 1, 1]), TypeError, ["sample_weight", "list"]),
    "hard of floats": (lambda: Confusion.hard(Y.float(), Y), TypeError, ["float32"]),
    "soft of integers": (lambda: Confusion.soft(Y, Y), TypeError, ["membership", "int64"]),
    "metric a number": (lambda: multiclass(metric=1), TypeError, ["metric", "int"]),
    "temperature a string": (lambda: multiclass(temperature="hot"), TypeError, ["temperature", "str"]),
    "add a number": (lambda: COUNTS + 1, TypeError, ["Confusion"]),
    # labels
    "label too large": (lambda: multiclass(Z, Y + 1), ValueError, ["target", "0 to 2", "3"]),
    "label negative": (lambda: multiclass(Z, Y - 1), ValueError, ["target", "-1", "ignore_index"]),
    "label 100": (lambda: multiclass(Z, torch.tensor([0, 100, 255]).byte()), ValueError, ["100"]),
    "binary label 2": (lambda: binary(y=torch.tensor([0, 1, 2])), ValueError, ["0, 1", "2"]),
    "binary label 1.5": (lambda: binary(y=torch.tensor([0, 1, 1.5])), ValueError, ["share", "1.5"]),
    "multilabel label -1": (lambda: multilabel(y=-torch.eye(3).long()), ValueError, ["-1"]),
    "hard target": (lambda: Confusion.hard(Y, Y + 1, 3), ValueError, ["target", "3"]),
    "hard predicted": (lambda: Confusion.hard(Y + 1, Y, 3), ValueError, ["predicted", "0 to 2", "3"]),
    "soft target": (lambda: Confusion.soft(Z, Y + 1), ValueError, ["target", "3"]),
    "soft binary target": (lambda: Confusion.soft(Z1, Y1 + 1), ValueError, ["target", "2"]),
    "grid target": (lambda: Confusion.soft_grid(Z1[None], Y1 + 1, "binary"), ValueError, ["target", "2"]),
    # probabilities and logits
    "probabilities as logits": (lambda: multiclass(Z.softmax(1)), ValueError, ["probabilities", "from_logits=False"]),
    "logits as probabilities": (
        lambda: multiclass(from_logits=False),
        ValueError,
        ["[0, 1]", "-3 to 2", "from_logits"],
    ),
    "binary logits": (lambda: binary(from_logits=False), ValueError, ["[0, 1]", "-2 to 3"]),
    "not normalised": (lambda: multiclass(Z.sigmoid(), from_logits=False), ValueError, ["add up to 1", "softmax"]),
    # numbers
    "temperature 0": (lambda: multiclass(temperature=0.0), ValueError, ["temperature", "(0, 0.4]", "got 0"]),
    "temperature 0.5": (lambda: MetricLoss("f1", temperature=0.5), ValueError, ["temperature", "0.5"]),
    "temperature nan": (lambda: MetricLoss("f1", temperature=float("nan")), ValueError, ["temperature", "nan"]),
    "temperature set": (lambda: setattr(MetricLoss("f1"), "temperature", 0.41), ValueError, ["temperature", "0.41"]),
    "step temperature": (lambda: steps.annealed(Z1, 0.5, temperature=-1.0), ValueError, ["temperature", "-1"]),
    "threshold 0": (lambda: binary(threshold=0), ValueError, ["threshold", "(0, 1)", "got 0"]),
    "threshold 1": (lambda: multiclass(threshold=1.0), ValueError, ["threshold", "got 1"]),
    "threshold of a grid": (lambda: binary(threshold=[0.5, 1.5]), ValueError, ["threshold", "1.5"]),
    "grid falls": (lambda: binary(threshold=[0.5, 0.3]), ValueError, ["increasing", "0.3"]),
    "grid empty": (lambda: binary(threshold=[]), ValueError, ["not empty", "[]"]),
    "grid multiclass": (lambda: multiclass(threshold=[0.3, 0.5]), ValueError, ["grid", "multiclass"]),
    "auroc one threshold": (
        lambda: binary(metric="auroc", threshold=0.3),
        ValueError,
        ["auroc", "leave it out", "0.3"],
    ),
    "step threshold": (lambda: steps.linear(Z1, 1.2), ValueError, ["threshold", "1.2"]),
    "membership grid": (lambda: membership.grid(Z1, steps.linear, [0.5, -0.1]), ValueError, ["threshold", "-0.1"]),
    "delta": (lambda: multiclass(step="linear", delta=0.6), ValueError, ["delta", "[0, 0.5]", "0.6"]),
    "k": (lambda: multiclass(step="sigmoid", k=0.0), ValueError, ["k must", "got 0"]),
    "anchor": (lambda: multiclass(anchor=-1.0), ValueError, ["anchor", "-1"]),
    "label_smoothing 1": (lambda: multiclass(label_smoothing=1.0), ValueError, ["label_smoothing", "got 1"]),
    "label_smoothing -0.1": (lambda: multiclass(label_smoothing=-0.1), ValueError, ["label_smoothing", "-0.1"]),
    "beta negative": (lambda: multiclass(metric="fbeta", beta=-2.0), ValueError, ["beta", "-2"]),
    # names
    "metric typo": (lambda: multiclass(metric="acuracy"), ValueError, ["'acuracy'", "did you mean 'accuracy'"]),
    "metric case": (lambda: multiclass(metric="F1"), ValueError, ["did you mean 'f1'"]),
    "metric f-score": (lambda: multiclass(metric="f1_score"), ValueError, ["did you mean 'f1'"]),
    "metric iou": (lambda: MetricLoss("iou"), ValueError, ["did you mean 'jaccard'"]),
    "metric qwk": (lambda: MetricLoss("qwk"), ValueError, ["did you mean 'quadratic_kappa'"]),
    "metric dashes": (lambda: MetricLoss("balanced-accuracy"), ValueError, ["did you mean 'balanced_accuracy'"]),
    "metric unknown": (lambda: MetricLoss("zzz"), ValueError, ["'zzz'", "accuracy", "auroc"]),
    "resolve": (lambda: metrics.resolve("sensitivity"), ValueError, ["did you mean 'recall'"]),
    "task": (lambda: multiclass(task="multi"), ValueError, ["task", "'multi'", "multiclass"]),
    "soft task": (lambda: Confusion.soft(Z, Y, task="many"), ValueError, ["task", "'many'"]),
    "average": (lambda: multiclass(average="mean"), ValueError, ["average", "'mean'", "macro"]),
    "average of mcc": (lambda: multiclass(metric="mcc", average="mean"), ValueError, ["average", "'mean'"]),
    "average of counts": (lambda: f1(COUNTS, "samples"), ValueError, ["average", "'samples'"]),
    "step": (lambda: multiclass(step="anneal"), ValueError, ["step", "'anneal'", "did you mean 'annealed'"]),
    "backend": (lambda: multiclass(backend="cuda"), ValueError, ["backend", "'cuda'"]),
    # options that do not go together
    "beta with f1": (lambda: multiclass(beta=2.0), ValueError, ["beta", "fbeta", "'f1'"]),
    "beta with auroc": (lambda: binary(metric="auroc", beta=2.0), ValueError, ["beta", "'auroc'"]),
    "binary average": (lambda: multiclass(average="binary"), ValueError, ["average='binary'", "'multiclass'"]),
    "binary average of counts": (lambda: f1(COUNTS, "binary"), ValueError, ["average='binary'", "got 3"]),
    "binary average of labels": (lambda: f1(LABELS, "binary"), ValueError, ["average='binary'"]),
    "quadratic_kappa": (lambda: binary(metric="quadratic_kappa"), ValueError, ["quadratic_kappa", "'binary'"]),
    # one entry per class
    "beta length": (lambda: multiclass(metric="fbeta", beta=[1.0, 2.0]), ValueError, ["beta", "expected 3", "got 2"]),
    "weight length": (lambda: MetricLoss("f1", weight=[1.0] * 4)(Z, Y), ValueError, ["weight", "expected 3", "got 4"]),
    "offset length": (lambda: multiclass(offset=torch.ones(2)), ValueError, ["offset", "expected 3", "got 2"]),
    "binary weight": (lambda: binary(weight=[1.0]), ValueError, ["weight", "expected 2", "got 1"]),
    "weight a number": (lambda: multiclass(weight=2.0), ValueError, ["weight", "one entry per class", "2"]),
    "offset a number": (lambda: MetricLoss("f1", offset=0.5)(Z, Y), ValueError, ["offset", "0.5"]),
    "beta of counts": (lambda: metrics.fbeta(COUNTS, beta=[1.0, 2.0]), ValueError, ["beta", "expected 3", "got 2"]),
    # counts
    "other classes": (lambda: COUNTS + TWO, ValueError, ["3 and 2 classes"]),
    "other kind": (lambda: TWO + LABELS, ValueError, ["multilabel False and True"]),
    "no matrix in a sum": (lambda: (COUNTS + COUNTS).matrix, ValueError, ["matrix", "sum"]),
    "no matrix of labels": (lambda: LABELS.matrix, ValueError, ["matrix", "multilabel"]),
    # users' functions
    "function of a vector": (lambda: multiclass(metric=lambda c: c.tp), ValueError, ["scalar", "(3,)"]),
    "function of a float": (lambda: multiclass(metric=lambda c: 0.5), ValueError, ["scalar", "float"]),
    "function of a grid": (lambda: binary(metric=lambda c: c.tp, threshold=[0.5]), ValueError, ["scalar", "(2,)"]),
}


@pytest.mark.parametrize("case", CASES)
def test_wrong_input_is_refused_in_one_sentence_that_names_it(case):
    call, kind, parts = CASES[case]
    with pytest.raises(kind) as caught:
        call()
    assert type(caught.value) is kind
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 320  # the names of all metrics take 230
    for part in parts:
        assert part in message


def test_right_input_beside_the_edges_is_accepted():
    for temperature in (1e-6, 0.4):
        assert multiclass(temperature=temperature).isfinite()
    for threshold in (1e-6, 1 - 1e-6, [0.5]):
        assert binary(threshold=threshold).isfinite()
    assert multiclass(Z[:1].softmax(1), Y[:1]).isfinite()  # one row may lie on the simplex by chance
    assert multiclass(torch.eye(3), Y).isfinite()  # so may logits of 0 and 1
    assert multiclass(torch.cat([Z.softmax(1), Z]), torch.cat([Y, Y])).isfinite()
    assert multiclass(Z, torch.tensor([0, -100, 2])).isfinite()
    assert multiclass(Z, torch.tensor([0, 7, 2]), ignore_index=7).isfinite()
    assert binary(torch.tensor([0.2, 0.6, 0.9])).isfinite()  # scores in [0, 1] may well be logits
    assert multiclass(Z[:0], Y[:0]) == 0
