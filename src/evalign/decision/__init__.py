"""Decision rules: from the probabilities of any model to labels, optimised for a metric.

`calibrated` is the default and learns from held-out labels; `plug_in` needs none; `tuned` maximises the metric on the
labels. All take constraints and return a `Rule`, which predicts and is saved as JSON.
"""

from evalign.decision.certified import unit_weights
from evalign.decision.constraints import Constraint, parse_constraint, parse_constraints
from evalign.decision.export import json_schema, numpy_source
from evalign.decision.learned import calibrated, joint_rule, learn_rule, tuned
from evalign.decision.out_of_core import learn_from_batches
from evalign.decision.plug_in import plug_in
from evalign.decision.rule import REJECTED, Rule
from evalign.decision.rule_report import RuleReport, evaluate_rule
from evalign.decision.search.counts import expected_confusion
from evalign.decision.shift import Reference, Shift, find_shift

__all__ = [
    "REJECTED",
    "Constraint",
    "Reference",
    "Rule",
    "RuleReport",
    "Shift",
    "calibrated",
    "evaluate_rule",
    "expected_confusion",
    "find_shift",
    "joint_rule",
    "json_schema",
    "learn_from_batches",
    "learn_rule",
    "numpy_source",
    "parse_constraint",
    "parse_constraints",
    "plug_in",
    "tuned",
    "unit_weights",
]  # fmt: skip
