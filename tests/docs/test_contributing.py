"""The worked example of CONTRIBUTING.md is right."""

import re
from pathlib import Path

import torch
from sklearn.metrics import multilabel_confusion_matrix

from evalign import Confusion

PAGE = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text()


def test_the_metric_of_the_example_is_what_its_name_says():
    names: dict[str, object] = {}
    [block] = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    exec(compile(block, "CONTRIBUTING.md", "exec"), names)
    generator = torch.Generator().manual_seed(0)
    predicted, target = torch.randint(0, 3, (2, 50), generator=generator)
    cells = multilabel_confusion_matrix(target, predicted)
    expected = [tn / (tn + fn) for ((tn, _), (fn, _)) in cells]
    found = names["npv"](Confusion.hard(predicted, target, 3), None)
    torch.testing.assert_close(found, torch.tensor(expected, dtype=found.dtype))
