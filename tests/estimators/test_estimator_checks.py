"""scikit-learn's own checks, every one of them."""

from typing import Any

import pytest
from sklearn.utils.estimator_checks import parametrize_with_checks

from evalign.estimators.network import EASTClassifier

pytestmark = pytest.mark.slow

# One asks that labels be those of the largest probability, the other that a class whose rows weigh next to nothing is
# hardly predicted; a rule for macro F1 may name it all the same, since each class counts alike.
DECIDED_BY_ARGMAX = ("check_classifiers_train", "check_class_weight_classifiers")
SMALL = {"hidden": (32,), "dropout": 0.0, "epochs": 40, "learning_rate": 1e-2}


@parametrize_with_checks(
    [
        EASTClassifier(**SMALL),
        EASTClassifier(**SMALL, network="embedding", ensemble=2),
        EASTClassifier(**SMALL, folds=2),
    ]
)
@pytest.mark.filterwarnings("ignore:Estimator's parameters changed after set_params raised")
def test_scikit_learns_checks(estimator: Any, check: Any) -> None:
    if check.func.__name__ in DECIDED_BY_ARGMAX:
        estimator.set_params(decision="argmax")
    assert check(estimator) is None
