"""Values against torchmetrics, which comes with Lightning, where definitions agree."""

import pytest
import torch

from evalign import Confusion, curves, metrics

functional = pytest.importorskip("torchmetrics.functional.classification")
pytestmark = pytest.mark.filterwarnings("ignore")
CLASSES = 4
AVERAGED = {
    "f1": functional.multiclass_f1_score,
    "precision": functional.multiclass_precision,
    "recall": functional.multiclass_recall,
    "specificity": functional.multiclass_specificity,
    "jaccard": functional.multiclass_jaccard_index,
}
WHOLE = {
    "mcc": lambda p, y, **o: functional.multiclass_matthews_corrcoef(p, y, CLASSES, **o),
    "cohen_kappa": lambda p, y, **o: functional.multiclass_cohen_kappa(p, y, CLASSES, **o),
    "quadratic_kappa": lambda p, y, **o: functional.multiclass_cohen_kappa(p, y, CLASSES, weights="quadratic", **o),
    "accuracy": lambda p, y, **o: functional.multiclass_accuracy(p, y, CLASSES, average="micro", **o),
    "balanced_accuracy": lambda p, y, **o: functional.multiclass_accuracy(p, y, CLASSES, average="macro", **o),
}
MULTILABEL = {
    "f1": functional.multilabel_f1_score,
    "precision": functional.multilabel_precision,
    "recall": functional.multilabel_recall,
    "jaccard": functional.multilabel_jaccard_index,
    "specificity": functional.multilabel_specificity,
}


def labels(seed=0, n=60, classes=CLASSES):
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(classes, (n,), generator=generator)
    return torch.where(torch.rand(n, generator=generator) < 0.6, y, (y + 1) % classes), y


@pytest.mark.parametrize("ignored", [None, 255])
@pytest.mark.parametrize("average", ["macro", "micro", "weighted"])
@pytest.mark.parametrize("name", AVERAGED)
def test_multiclass_averages(name, average, ignored):
    predicted, y = labels()
    if ignored is not None:
        y[::7] = ignored
    c = Confusion.hard(predicted, y, CLASSES, ignore_index=-100 if ignored is None else ignored)
    expected = AVERAGED[name](predicted, y, num_classes=CLASSES, average=average, ignore_index=ignored)
    assert metrics.METRICS[name](c, average).item() == pytest.approx(expected.item(), abs=1e-6)


@pytest.mark.parametrize("name", WHOLE)
def test_metrics_of_the_whole_matrix(name):
    predicted, y = labels(1)
    c = Confusion.hard(predicted, y, CLASSES)
    assert metrics.METRICS[name](c).item() == pytest.approx(WHOLE[name](predicted, y).item(), abs=1e-6)


@pytest.mark.parametrize("average", ["macro", "micro", "weighted"])
@pytest.mark.parametrize("name", MULTILABEL)
def test_multilabel_averages(name, average):
    generator = torch.Generator().manual_seed(2)
    p, y = torch.rand(50, 3, generator=generator), torch.randint(2, (50, 3), generator=generator)
    c = Confusion.hard((p >= 0.5).long(), y, multilabel=True)
    expected = MULTILABEL[name]((p >= 0.5).long(), y, num_labels=3, average=average)
    assert metrics.METRICS[name](c, average).item() == pytest.approx(expected.item(), abs=1e-6)


@pytest.mark.parametrize("beta", [0.5, 2.0])
def test_binary_fbeta(beta):
    predicted, y = labels(3, classes=2)
    c = Confusion.hard(predicted, y, 2)
    expected = functional.binary_fbeta_score(predicted, y, beta=beta)
    assert metrics.fbeta(c, "binary", beta=beta).item() == pytest.approx(expected.item(), abs=1e-6)


@pytest.mark.parametrize(
    ("name", "options", "theirs"),
    [
        ("auroc", {}, functional.binary_auroc),
        ("auroc", {"max_fpr": 0.3}, functional.binary_auroc),
        ("average_precision", {}, functional.binary_average_precision),
        ("recall_at_precision", {"at": 0.6}, None),
    ],
)
def test_rankings(name, options, theirs):
    generator = torch.Generator().manual_seed(4)
    y = torch.randint(2, (80,), generator=generator)
    p = ((torch.rand(80, generator=generator) + y).mul(5).round() / 10).double()  # with ties
    if theirs is None:
        expected, _ = functional.binary_recall_at_fixed_precision(p, y, min_precision=options["at"])
    else:
        expected = theirs(p, y, **options)
    assert curves.exact_ranking(name, p, y, **options).item() == pytest.approx(expected.item(), abs=1e-6)
