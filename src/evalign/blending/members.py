"""Members of a blend by name: our classifiers, which remember what they said of the rows that they held out."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evalign import checks
from evalign.booster import EASTBooster
from evalign.decision import Rule
from evalign.estimator import EASTClassifier
from evalign.forest import EASTForest
from evalign.metric_classifier import MetricClassifier

BLENDED = ("metric", "average", "beta", "pos_label", "folds", "random_state", "decision", "subject_to", "class_weight")


@dataclass(frozen=True)
class HeldOut:
    """Probabilities (n, C) in the order used inside, labels as codes, weights."""

    probabilities: NDArray[np.float64]
    codes: NDArray[np.int64]
    weight: NDArray[np.float64]


class Member(MetricClassifier):
    """Keeps what its decision would be learned from, and learns none: the blend does."""

    told_: HeldOut

    def _learn_decision(self, p: NDArray[np.float64], codes: NDArray[np.int64], weight: NDArray[np.float64]) -> Rule:
        self.told_ = HeldOut(p, codes, weight)
        return Rule("argmax", len(self.classes_))


class BlendedBooster(Member, EASTBooster):
    """`EASTBooster` in a blend."""


class BlendedForest(Member, EASTForest):
    """`EASTForest` in a blend."""


class BlendedNetwork(Member, EASTClassifier):
    """`EASTClassifier` in a blend."""


CLASSES: dict[str, type[Any]] = {"boost": BlendedBooster, "forest": BlendedForest, "network": BlendedNetwork}
DEFAULTS: dict[str, dict[str, Any]] = {"boost": {}, "forest": {}, "network": {"network": "embedding"}}


def make_member(name: str, shared: Mapping[str, Any], given: Mapping[str, Any]) -> Any:
    """An unfitted member with the options `given` for it, and those of the `shared` ones that it has.

    >>> make_member("forest", {"metric": "mcc", "recipe": "anchored"}, {"trees": 50})
    BlendedForest(metric='mcc', trees=50)
    """
    known = CLASSES[name]().get_params()
    for option in given:
        checks.check_choice(f"option of {name}", option, sorted(set(known) - set(BLENDED)))
    options = {**DEFAULTS[name], **{option: value for option, value in shared.items() if option in known}, **given}
    return CLASSES[name](**options)
