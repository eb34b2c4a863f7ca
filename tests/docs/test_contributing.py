"""The worked examples of CONTRIBUTING.md run and do what they claim."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.datasets import load_iris
from sklearn.metrics import balanced_accuracy_score, multilabel_confusion_matrix

from evalign import Confusion, decision, metrics

PAGE = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text()
EXAMPLES = dict(re.findall(r"### ([^\n]*)\n(?:(?!###).)*?```python\n(.*?)```", PAGE, re.DOTALL))


def defined(title, **names):
    """What the example below a heading defines."""
    names["__name__"] = "contributing"
    exec(compile(EXAMPLES[title], "<CONTRIBUTING.md>", "exec"), names)  # no file, so numba caches nothing beside it
    return names


@pytest.mark.parametrize("multilabel", [False, True])
def test_the_metric_is_what_its_name_says(multilabel):
    npv = defined("A metric", **vars(metrics))["npv"]
    generator = torch.Generator().manual_seed(0)
    shape, values = ((50, 3), 2) if multilabel else ((50,), 3)
    predicted, target = torch.randint(0, values, (2, *shape), generator=generator)
    expected = [tn / (tn + fn) for ((tn, _), (fn, _)) in multilabel_confusion_matrix(target, predicted)]
    found = npv(Confusion.hard(predicted, target, 3, multilabel=multilabel), None)
    torch.testing.assert_close(found, torch.tensor(expected, dtype=found.dtype))


def test_the_rule_maximises_expected_balanced_accuracy():
    rule = defined("A decision rule")["against_prior"](np.eye(3)[[0, 0, 1, 2]] * 0.4 + 0.2)
    assert decision.Rule.from_json(rule.to_json()) == rule
    # Calibrated probabilities: each row stands for one label of every class, weighted by its probability.
    p = np.random.default_rng(0).dirichlet([6, 2, 1], size=12)
    found = defined("A decision rule")["against_prior"](p).predict(p)
    labels, weight = np.tile(np.arange(3), len(p)), p.ravel()

    def score(labels_of_rows):
        return balanced_accuracy_score(labels, np.repeat(labels_of_rows, 3), sample_weight=weight)

    for row in range(len(p)):
        for other in range(3):
            changed = found.copy()
            changed[row] = other
            assert score(changed) <= score(found) + 1e-12


def test_the_member_is_a_classifier_whose_held_out_predictions_are_held_out():
    X, y = load_iris(return_X_y=True)
    make = defined("A member of the blend")["EASTBayes"]
    assert make("f1", random_state=0).fit(X, y).score(X, y) > 0.9
    noise = np.random.default_rng(0)
    own = noise.normal(size=(120, 1))  # says nothing of the labels, which only a row that was trained on could know
    model = make("f1", random_state=0).fit(own, noise.integers(0, 2, 120))
    held = model.held_out_predictions_
    assert len(held.probabilities) == 120
    assert (held.probabilities.argmax(1) == held.labels).mean() < 0.65


def test_the_kernel_agrees_with_torch():
    pytest.importorskip("numba")
    thresholds = defined("A kernel")["thresholds"]
    p = torch.rand(40, 7, generator=torch.Generator().manual_seed(0)).softmax(1)
    p[0, :2] = p[0].max()  # a tie
    tau = torch.empty(40)
    thresholds(p.numpy(), tau.numpy())
    torch.testing.assert_close(tau, p.topk(2, 1).values.mean(1))
