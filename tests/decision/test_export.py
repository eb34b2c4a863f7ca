"""Rules outside of evalign: JSON that keeps its schema, a numpy function, an ONNX graph."""

import json

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evalign import decision
from evalign.decision.export import json_schema, numpy_source, onnx_decision
from evalign.decision.rule import Rule

TEMPERED = {"temperature": 1.7, "floor": 1e-3}
RULES = {
    "argmax": Rule("argmax", 3),
    "argmax rejecting": Rule("argmax", 3, reject=0.5),
    "threshold": Rule("threshold", 2, threshold=0.3),
    "threshold of 0": Rule("threshold", 2, threshold=0.0),
    "threshold calibrated": Rule("threshold", 2, threshold=0.4, offsets=(0.5, -0.5), **TEMPERED),
    "thresholds": Rule("thresholds", 3, thresholds=(0.2, 0.5, 0.7)),
    "thresholds calibrated": Rule("thresholds", 2, thresholds=(0.2, 0.5), temperature=(0.5, 2.0), offsets=(1.0, 0.0)),
    "offsets": Rule("offsets", 3, offsets=(0.0, -0.5, 1.0)),
    "affine": Rule("affine", 3, weights=(1.0, 0.5, 2.0), biases=(0.1, 0.0, -0.2), offsets=(0.0, 1.0, 0.0), **TEMPERED),
    "gain": Rule("gain", 3, gain=((1.0, 0.2, 0.0), (0.0, 1.0, 0.3), (-1.0, 0.0, 2.0)), metric="mcc", value=0.5),
    "gain rejecting": Rule("gain", 2, gain=((1.0, 0.2), (0.0, 1.0)), reject=0.6),
    "limited": Rule("threshold", 2, threshold=0.2, at_most=7, subject_to=("flagged <= 7",), reached=(7.0,)),
}


def probabilities(rule, n=200):
    """Draws from a grid, so that ties happen."""
    rng = np.random.default_rng(0)
    if rule.multilabel:
        return rng.integers(0, 11, (n, rule.columns)) / 10
    return rng.multinomial(10, np.full(rule.columns, 1 / rule.columns), size=n) / 10


@pytest.mark.parametrize("name", RULES)
def test_numpy_source_decides_as_the_rule(name):
    rule = RULES[name]
    source = numpy_source(rule, "decide")
    space = {}
    exec(source, space)
    p = probabilities(rule)
    np.testing.assert_array_equal(space["decide"](p), rule.predict(p))
    assert [line for line in source.splitlines() if "import" in line] == ["import numpy as np"]
    if rule.columns == 2 and not rule.multilabel:
        np.testing.assert_array_equal(space["decide"](p[:, 1].tolist()), rule.predict(p[:, 1]))


def test_numpy_source_with_costs_of_rows():
    rule, rng = Rule("row_costs", 2), np.random.default_rng(1)
    p, costs = probabilities(rule), rng.random((200, 2, 2))
    space = {}
    exec(numpy_source(rule), space)
    np.testing.assert_array_equal(space["predict"](p, costs), rule.predict(p, costs=costs))


@pytest.mark.parametrize("name", RULES)
def test_json_keeps_its_schema(name):
    jsonschema.Draft202012Validator.check_schema(json_schema())
    data = json.loads(json.dumps(RULES[name].to_json()))
    jsonschema.validate(data, json_schema())
    assert Rule.from_json(data) == RULES[name]


def test_schema_names_every_field_and_refuses_others():
    from dataclasses import fields

    assert set(json_schema()["properties"]) == {f.name for f in fields(Rule)} | {"version"}
    good = RULES["affine"].to_json()
    for wrong in ({**good, "spice": 1}, {k: v for k, v in good.items() if k != "biases"}, {**good, "kind": "magic"}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, json_schema())
        with pytest.raises(ValueError, match="rule"):
            Rule.from_json(wrong)


JUNK = st.one_of(
    st.none(), st.booleans(), st.sampled_from([-3, -1.0, 0, 0.0, 0.3, 0.7, 1, 2, 2.0, 3, 5.0, 1e300, 10**400]),
    st.floats(), st.sampled_from(["", "0.5", "f1", "threshold"]), st.dictionaries(st.just("a"), st.just(1)),
)  # fmt: skip
ENTRIES = st.one_of(JUNK, st.lists(JUNK, max_size=3), st.lists(st.lists(JUNK, max_size=3), max_size=3))


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(list(RULES)), st.sampled_from([*json_schema()["properties"], "spice"]), ENTRIES)
def test_json_is_accepted_only_within_its_schema(name, entry, value):
    data = RULES[name].to_json() | {entry: value}
    valid = jsonschema.Draft202012Validator(json_schema()).is_valid(data)
    try:
        rule = Rule.from_json(data)
    except ValueError as error:
        message = str(error)
        assert message
        assert "\n" not in message
        assert len(message) < 250
    else:
        assert valid
        assert Rule.from_json(json.loads(json.dumps(rule.to_json(), allow_nan=False))) == rule


@pytest.mark.parametrize("change", [
    {"confidence": 5}, {"confidence": -0.1}, {"coverage": -0.5}, {"coverage": 1.5}, {"shares": [-0.1, 1.1]},
    {"at_most": True}, {"at_most": None}, {"thresholds": None}, {"reached": None}, {"offsets": ["0.5", "0.1"]},
    {"offsets": [True, False]}, {"subject_to": [3], "reached": [0.5]}, {"columns": 10**400}, {"threshold": 10**400},
])  # fmt: skip
def test_json_outside_its_schema_names_the_entry(change):
    data = Rule("threshold", 2, threshold=0.3).to_json() | change
    assert not jsonschema.Draft202012Validator(json_schema()).is_valid(data) or 10**400 in change.values()
    with pytest.raises(ValueError, match=rf"\b{next(iter(change))}\b.* must be "):
        Rule.from_json(data)


@pytest.mark.parametrize("name", [name for name in RULES if name != "limited"])
@pytest.mark.parametrize("labels", [np.array([10, 20, 30]), np.array(["a", "b", "c"])])
def test_onnx_decides_as_the_rule(name, labels):
    onnxruntime = pytest.importorskip("onnxruntime")
    rule = RULES[name]
    labels = labels[: rule.columns]
    model = onnx_decision(rule, labels, dtype=np.float64)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    p = probabilities(rule)
    (found,) = session.run(None, {"probabilities": p})
    decided = rule.predict(p)
    if not rule.multilabel:
        rejected = "" if labels.dtype.kind == "U" else -1
        decided = np.where(decided == -1, rejected, labels[decided])
    np.testing.assert_array_equal(found, decided)


def test_onnx_refuses_what_is_no_function_of_a_row():
    with pytest.raises(ValueError, match="cannot be exported"):
        onnx_decision(RULES["limited"], [0, 1])


def test_a_learned_rule_is_exported():
    rng = np.random.default_rng(2)
    p = rng.dirichlet([4.0, 1.0, 0.5], size=300)
    rule = decision.plug_in(p, "f1")
    space = {}
    exec(numpy_source(rule), space)
    np.testing.assert_array_equal(space["predict"](p), rule.predict(p))


@pytest.mark.parametrize("change", [{"value": 1}, {"confidence": 1, "coverage": 0}, {"columns": 2.0}])
def test_json_of_other_programs_may_write_whole_numbers_either_way(change):
    data = Rule("threshold", 2, threshold=0.3).to_json() | change
    jsonschema.validate(data, json_schema())
    rule = Rule.from_json(data)
    assert rule.predict([[0.8, 0.2], [0.6, 0.4]]).tolist() == [0, 1]
    assert all(getattr(rule, name) == value for name, value in change.items())


def test_onnx_tells_a_rejected_row_from_the_class_minus_one():
    onnxruntime = pytest.importorskip("onnxruntime")
    rule = Rule("threshold", 2, threshold=0.5, reject=0.8)
    model = onnx_decision(rule, [-1, 1], dtype=np.float64)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {"probabilities": np.array([[0.9, 0.1], [0.5, 0.5], [0.1, 0.9]])})
    assert found.tolist() == ["-1", "", "1"]
