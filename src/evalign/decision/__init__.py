"""Decision rules: probabilities of any model -> labels, chosen for a metric.

`plug_in` needs no labels and is the default; `tuned` learns from held-out ones. Both take constraints and return
a `Rule`, which predicts and travels as JSON.
"""

from evalign.decision.calibration import fit_temperature
from evalign.decision.constraints import Constraint, parse_constraint
from evalign.decision.export import json_schema, numpy_source
from evalign.decision.plug_in import expected_confusion, plug_in
from evalign.decision.rule import Rule
from evalign.decision.shift import Reference, Shift, find_shift
from evalign.decision.tuned import tuned

__all__ = [
    "Constraint", "Reference", "Rule", "Shift", "expected_confusion", "find_shift", "fit_temperature", "json_schema",
    "numpy_source", "parse_constraint", "plug_in", "tuned",
]  # fmt: skip
