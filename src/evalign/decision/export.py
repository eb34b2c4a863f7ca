"""Export: a rule as a JSON schema, as Python source that needs only numpy, and as nodes of an ONNX graph."""

from typing import TYPE_CHECKING, Any

import numpy as np

from evalign.decision.rule import FLOOR, PARAMETERS, REJECTED, TIE, VERSION, Rule

if TYPE_CHECKING:
    import onnx


def json_schema() -> dict[str, Any]:
    """JSON schema (draft 2020-12) of `Rule.to_json`.

    >>> sorted(json_schema()["required"])
    ['columns', 'kind', 'version']
    """
    number, text = {"type": "number"}, {"type": "string"}
    vector = {"type": "array", "items": number}
    positive, share = {**number, "exclusiveMinimum": 0}, {**number, "minimum": 0, "maximum": 1}
    shares = {"type": "array", "items": {**number, "minimum": 0}}
    properties: dict[str, Any] = {
        "version": {"const": VERSION, "description": "Version of this format."},
        "kind": {"enum": list(PARAMETERS), "description": "How labels follow from calibrated probabilities."},
        "columns": {"type": "integer", "minimum": 1, "description": "Classes, or labels of a multilabel rule."},
        "threshold": {**number, "description": "Smallest probability of class 1 that is positive."},
        "thresholds": {**vector, "description": "The same for each label."},
        "offsets": {**vector, "description": "Added to log p / temperature (multilabel: to its logit)."},
        "weights": {**vector, "description": "Score of class j: weights[j] q[j] + biases[j]."},
        "biases": {**vector, "description": "See weights."},
        "gain": {"type": "array", "items": vector, "description": "Score of class j: sum_i q[i] gain[i][j]."},
        "temperature": {
            "anyOf": [positive, {"type": "array", "items": positive}],
            "default": 1.0,
            "description": "Divides log p (multilabel: the logit, one number per label).",
        },
        "floor": {**number, "exclusiveMinimum": 0, "exclusiveMaximum": 0.5, "default": FLOOR,
                  "description": "Smaller probabilities are raised to it."},
        "reject": {**number, "description": "Rows whose best score is below it get label -1."},
        "at_most": {"type": "integer", "minimum": 0, "description": "Maximum number of positives per call."},
        "feasible": {"type": "boolean", "description": "Whether the constraints are met on the rows learned from."},
        "metric": {**text, "description": "The maximised metric."},
        "value": {**number, "description": "Its value on the rows the rule was learned from."},
        "coverage": {**share, "description": "Share of these rows that was not rejected."},
        "shares": {**shares, "description": "Share of each class in these rows."},
        "subject_to": {"type": "array", "items": text, "description": "Constraints."},
        "reached": {**vector, "description": "Their values on the rows the rule was learned from."},
        "bounds": {**vector, "description": "Their certified bounds."},
        "confidence": {**share, "description": "Confidence of the bounds."},
    }  # fmt: skip
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "evalign decision rule",
        "type": "object",
        "required": ["version", "kind", "columns"],
        "additionalProperties": False,
        "properties": properties,
        "allOf": [
            {"if": {"properties": {"kind": {"const": kind}}}, "then": {"required": list(parts)}}
            for kind, parts in PARAMETERS.items()
            if parts
        ],
    }


def numpy_source(rule: Rule, name: str = "predict") -> str:
    """Python source of a function of probabilities that decides like `rule.predict` and imports only numpy.

    >>> space = {}
    >>> exec(numpy_source(Rule("threshold", 2, threshold=0.3)), space)
    >>> space["predict"]([[0.8, 0.2], [0.7, 0.3]])
    array([0, 1])
    """
    multilabel, costs = rule.multilabel, rule.kind == "row_costs"
    lines = [
        f"def {name}(probabilities{', costs' if costs else ''}):",
        f'    """{_describe(rule)}"""',
        "    p = np.clip(np.asarray(probabilities, dtype=np.float64), 0.0, 1.0)",
    ]
    if not multilabel:
        lines.append("    p = np.stack([1 - p, p], axis=1) if p.ndim == 1 else p")
    lines.append("    q = p")
    if rule.temperature != 1.0 or rule.offsets is not None:
        low = f"np.maximum(p, {rule.floor!r})"
        if multilabel:
            lines += [f"    q = np.clip(p, {rule.floor!r}, 1 - {rule.floor!r})", "    z = np.log(q) - np.log1p(-q)"]
        else:
            lines.append(f"    z = np.log({low})")
        lines.append(f"    z = z / np.asarray({rule.temperature!r})")
        if rule.offsets is not None:
            lines.append(f"    z = z + np.array({list(rule.offsets)!r})")
        if multilabel:
            lines.append("    q = 0.5 * (1 + np.tanh(0.5 * z))")
        else:
            lines += ["    z = np.exp(z - z.max(axis=1, keepdims=True, initial=-np.inf))",
                      "    q = z / z.sum(axis=1, keepdims=True)"]  # fmt: skip
    scores = "q"
    if rule.kind == "thresholds":
        lines.append(f"    return (q >= np.array({list(rule.thresholds or ())!r})).astype(np.int64)")
        return _module(lines)
    if rule.kind == "threshold":
        lines.append(f"    decided = (q[:, 1] >= {rule.threshold!r}).astype(np.int64)")
    else:
        if rule.kind == "affine":
            scores = f"q * np.array({list(rule.weights or ())!r}) + np.array({list(rule.biases or ())!r})"
        elif rule.kind == "gain":
            scores = f"q @ np.array({[list(row) for row in rule.gain or ()]!r})"
        elif costs:
            scores = '-np.einsum("ni,nij->nj", q, np.asarray(costs, dtype=np.float64))'
        lines += [
            f"    scores = {scores}",
            "    best = scores.max(axis=1, keepdims=True, initial=-np.inf)",
            f"    tied = scores >= best - {TIE!r} * np.maximum(np.abs(best), 1.0)",
            "    decided = np.where(tied, p, -1.0).argmax(axis=1)  # ties go to the larger probability",
        ]
        scores = "scores"
    if rule.reject is not None:
        lines.append(f"    best = {scores}[np.arange(len(p)), decided]")
        lines.append(f"    decided = np.where(best < {rule.reject - TIE!r}, -1, decided)")
    if rule.at_most is not None:
        lines += [
            "    positive = np.flatnonzero(decided == 1)",
            f'    decided[positive[np.argsort(-p[positive, 1], kind="stable")][{rule.at_most}:]] = 0',
        ]
    return _module([*lines, "    return decided"])


def _module(lines: list[str]) -> str:
    return "\n".join(["import numpy as np", "", "", *lines, ""])


def _describe(rule: Rule) -> str:
    aim = f" for {rule.metric}" if rule.metric and rule.metric.isidentifier() else ""
    limits = f", subject to {', '.join(rule.subject_to)}" if rule.subject_to else ""
    return f"Labels{aim}{limits} from probabilities of {rule.columns} columns.".replace('"', "'").replace("\\", "")


def onnx_decision(rule: Rule, labels: Any, *, order: Any = None, dtype: Any = np.float32) -> "onnx.ModelProto":
    """ONNX graph: "probabilities" (n, C) -> "label" (n,), one of `labels`; (n, L) of 0/1 for a multilabel rule.

    `order` are the columns in the order of the rule. Rejected rows have label -1, or "" if labels are text; if -1
    is a label, all labels become text.
    A limit on the positives of a call (`at_most`) and row costs are not functions of a single row, and are refused.
    """
    from onnx import TensorProto, helper, numpy_helper

    if rule.kind == "row_costs" or rule.at_most is not None:
        raise ValueError("a rule with row costs or a limit on flagged rows cannot be exported; use rule.to_json()")
    nodes: list[Any] = []
    constants: list[Any] = []

    def constant(value: Any, kind: Any = np.float64) -> str:
        constants.append(numpy_helper.from_array(np.asarray(value, dtype=kind), f"rule_c{len(constants)}"))
        return str(constants[-1].name)

    def node(operator: str, *inputs: str, **attributes: Any) -> str:
        nodes.append(helper.make_node(operator, list(inputs), [f"rule_{len(nodes)}"], **attributes))
        return str(nodes[-1].output[0])

    p = node("Cast", "probabilities", to=TensorProto.DOUBLE)
    names = np.asarray(labels)
    if order is not None:
        p = node("Gather", p, constant(order, np.int64), axis=1)
        names = names[np.asarray(order)]
    if rule.reject is not None and REJECTED in names.tolist():
        names = names.astype(str)
    q = p
    if rule.temperature != 1.0 or rule.offsets is not None:
        if rule.multilabel:
            safe = node("Min", node("Max", p, constant(rule.floor)), constant(1 - rule.floor))
            z = node("Sub", node("Log", safe), node("Log", node("Sub", constant(1.0), safe)))
        else:
            z = node("Log", node("Max", p, constant(rule.floor)))
        z = node("Div", z, constant(rule.temperature))
        z = z if rule.offsets is None else node("Add", z, constant(rule.offsets))
        q = node("Sigmoid", z) if rule.multilabel else node("Softmax", z, axis=1)
    if rule.multilabel:
        decided = node("Cast", node("GreaterOrEqual", q, constant(rule.thresholds)), to=TensorProto.INT64)
        return _onnx_model(nodes, constants, decided, rule, TensorProto.INT64, dtype)
    scores = q
    if rule.kind == "threshold":
        positive = node("Gather", q, constant(1, np.int64), axis=1)
        decided = node("Cast", node("GreaterOrEqual", positive, constant(rule.threshold)), to=TensorProto.INT64)
    else:
        if rule.kind == "affine":
            scores = node("Add", node("Mul", q, constant(rule.weights)), constant(rule.biases))
        elif rule.kind == "gain":
            scores = node("MatMul", q, constant(rule.gain))
        best = node("ReduceMax", scores, constant([1], np.int64), keepdims=1)
        slack = node("Mul", constant(TIE), node("Max", node("Abs", best), constant(1.0)))
        tied = node("GreaterOrEqual", scores, node("Sub", best, slack))
        decided = node("ArgMax", node("Where", tied, p, constant(-1.0)), axis=1, keepdims=0)
    label = node("Gather", _names(constants, names), decided)
    text = names.dtype.kind not in "iub"
    if rule.reject is not None:
        column = node("Unsqueeze", decided, constant([1], np.int64))
        best = node("Squeeze", node("GatherElements", scores, column, axis=1), constant([1], np.int64))
        low = node("Less", best, constant(rule.reject - TIE))
        label = node("Where", low, _names(constants, np.array("" if text else -1)), label)
    kind = TensorProto.STRING if text else TensorProto.INT64
    return _onnx_model(nodes, constants, label, rule, kind, dtype)


def with_decision(model: "onnx.ModelProto", rule: Rule, labels: Any, *, order: Any = None) -> "onnx.ModelProto":
    """A model with output "probabilities" (n, C) and an additional output "label"; an existing label is dropped."""
    outputs = {output.name: output for output in model.graph.output}
    kind = outputs["probabilities"].type.tensor_type.elem_type
    from onnx import helper

    decision = onnx_decision(rule, labels, order=order, dtype=helper.tensor_dtype_to_np_dtype(kind))
    for node in model.graph.node:  # a name in use
        for names in (node.input, node.output):
            names[:] = ["own_label" if name == "label" else name for name in names]
    del model.graph.output[:]
    model.graph.node.extend(decision.graph.node)
    model.graph.initializer.extend(decision.graph.initializer)
    model.graph.output.extend([outputs["probabilities"], decision.graph.output[0]])
    model.metadata_props.extend(decision.metadata_props)
    return model


def _names(constants: list[Any], names: Any) -> str:
    from onnx import TensorProto, helper

    text = names.dtype.kind not in "iub"
    values: Any = [str(x).encode() for x in names.ravel()] if text else names.astype(np.int64).ravel().tolist()
    kind = TensorProto.STRING if text else TensorProto.INT64
    constants.append(helper.make_tensor(f"rule_c{len(constants)}", kind, names.shape, values))
    return str(constants[-1].name)


def _onnx_model(
    nodes: list[Any], constants: list[Any], last: str, rule: Rule, kind: int, dtype: Any
) -> "onnx.ModelProto":
    import json

    import onnx
    from onnx import helper

    nodes[-1].output[0] = "label"
    width = onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    shape: list[Any] = ["n", rule.columns] if rule.multilabel else ["n"]
    graph = helper.make_graph(
        nodes, "decision", [helper.make_tensor_value_info("probabilities", width, ["n", rule.columns])],
        [helper.make_tensor_value_info("label", kind, shape)], constants,
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)])
    model.ir_version = min(model.ir_version, 10)  # runtimes lag behind the library
    entry = model.metadata_props.add()
    entry.key, entry.value = "rule", json.dumps(rule.to_json())
    onnx.checker.check_model(model)
    return model
