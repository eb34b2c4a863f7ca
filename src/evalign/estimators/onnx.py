"""Export a fitted classifier as an ONNX graph: numbers in, probabilities and the decided class out.

A table of numbers goes in as it is: scaling and missing values are part of the graph. A table with categories or
quantile scaling goes in as `encoder_.transform` makes it, since ONNX has no data frame.
"""

import json
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from evalign.decision.export import with_decision
from evalign.storage.atomic import write_atomically
from evalign.tables.columns import BOUND, NumberColumn

if TYPE_CHECKING:
    from evalign.estimators.metric_decision import MetricDecision
    from evalign.estimators.network import EASTClassifier


def export_classifier(model: "EASTClassifier", path: Path) -> Path:
    """Write inputs "x" (n, F) float32 -> outputs "probabilities" (n, C) and "label" (n,), an index into the classes.

    The graph's metadata hold the classes and the names of the input's columns, as JSON.
    """
    try:
        import onnx  # noqa: F401  torch's exporter is built on both
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise ImportError("export_onnx needs onnx and onnxscript; pip install 'evalign[onnx]'") from error

    if model.multilabel_:
        raise ValueError(
            "a multilabel model has a network per label; export those in label_models_, and decision_.to_json()"
        )
    columns = model.encoder_.columns_
    plain = [c for c in columns if isinstance(c, NumberColumn) and c.quantiles is None]
    scaling = _Scale(plain) if len(plain) == len(columns) else None
    names = (
        [str(name) for name in getattr(model, "feature_names_in_", range(model.n_features_in_))]
        if scaling is not None
        else model.encoder_.feature_names_out
    )
    order = model.class_order.tolist()
    graph = nn.Sequential(scaling or nn.Identity(), model.network_, _Probabilities(order)).to("cpu").eval()
    try:
        with warnings.catch_warnings(), _quiet("torch.onnx", "onnxscript", "onnx_ir"):
            warnings.simplefilter("ignore")
            program = torch.onnx.export(
                graph, (torch.zeros(2, len(names)),), input_names=["x"], output_names=["probabilities"],
                dynamo=True, dynamic_shapes=({0: torch.export.Dim("n")},), verbose=False,
            )  # fmt: skip
    finally:
        model.network_.to(model.torch_device)
    assert program is not None
    proto = with_decision(program.model_proto, model.decision_, np.arange(len(order)), order=order)
    for key, value in (("classes", model.classes_.tolist()), ("columns", names)):
        entry = proto.metadata_props.add()
        entry.key, entry.value = key, json.dumps(value)
    return write_atomically(path, proto.SerializeToString())


def export_decided(model: "MetricDecision", path: Path, X: Any) -> Path:
    """Write a wrapped scikit-learn classifier or pipeline with its rule: "probabilities" (n, C) and "label" (n,).

    The columns and types of `X` define the inputs: one input "X" for an array, one per column for a table.
    """
    try:
        from skl2onnx import to_onnx
    except ImportError as error:
        raise ImportError("export_onnx needs skl2onnx; pip install 'evalign[onnx]'") from error
    if model.multilabel_ and isinstance(model.estimator_.predict_proba(X[:2]), list):
        raise ValueError(
            f"{type(model.estimator_).__name__} returns one array of probabilities per label, which cannot be "
            "exported; wrap it in sklearn.multiclass.OneVsRestClassifier"
        )
    if not model.multilabel_ and not np.array_equal(model.classes_, model.estimator_.classes_):
        raise ValueError("the classifier was not fitted on every class of the rule; fit it on all classes")
    sample = X[:2] if hasattr(X, "columns") else np.asarray(X, dtype=np.float32)[:2]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            proto = to_onnx(model.estimator_, sample, options={"zipmap": False}, target_opset=18)
        except Exception as error:  # its messages may contain all nodes of all trees
            raise ValueError(
                f"skl2onnx cannot convert {type(model.estimator_).__name__}: {str(error).splitlines()[0][:200]}; "
                "register a converter, or save decision_.to_json() next to the model"
            ) from None
    labels = model.classes_ if model.classes_.dtype.kind in "iub" else model.classes_.astype(str)
    return write_atomically(
        path, with_decision(proto, model.decision_, labels, order=model.class_order).SerializeToString()
    )


class _Scale(nn.Module):
    """The numeric part of `TableEncoder`, for a matrix."""

    shift: Tensor
    scale: Tensor
    fill: Tensor
    order: Tensor

    def __init__(self, columns: list[NumberColumn]) -> None:
        super().__init__()
        for name in ("shift", "scale", "fill"):
            self.register_buffer(name, torch.tensor([getattr(c, name) for c in columns], dtype=torch.float64))
        # Values come first, then all missing-value indicators; `order` restores their order in training.
        marks = iter(range(len(columns), 2 * len(columns)))
        pairs = [(i, next(marks) if c.indicator else None) for i, c in enumerate(columns)]
        self.marked = [i for i, c in enumerate(columns) if c.indicator]
        self.register_buffer("order", torch.tensor([j for pair in pairs for j in pair if j is not None]))

    def forward(self, x: Tensor) -> Tensor:
        missing = x.isnan()
        wide = x.double()
        scaled = ((wide - self.shift) / torch.where(self.scale == 0, 1.0, self.scale)).clamp(-BOUND, BOUND)
        scaled = torch.where(missing, self.fill, scaled)
        scaled = torch.where(self.scale == 0, 0.0, scaled)
        both = torch.cat([scaled, missing[:, self.marked].double()], 1) if self.marked else scaled
        return both[:, self.order].float()


class _Probabilities(nn.Module):
    """Logits -> probabilities in the order of the classes."""

    def __init__(self, order: list[int]) -> None:
        super().__init__()
        self.order = order

    def forward(self, logits: Tensor) -> Tensor:
        return logits.double().softmax(1)[:, self.order]


@contextmanager
def _quiet(*names: str) -> Iterator[None]:
    """Silence the exporter, which logs its progress."""
    before = {logging.getLogger(name): logging.getLogger(name).level for name in names}
    for log in before:
        log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for log, level in before.items():
            log.setLevel(level)
