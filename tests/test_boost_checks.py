"""scikit-learn's own checks of EASTBooster, every one of them, with both libraries."""

from typing import Any

import pytest
from sklearn.utils.estimator_checks import parametrize_with_checks

from evalign.booster import EASTBooster

SMALL = {"rounds": 15, "n_jobs": 1, "folds": 3}


# One fold holds out too few rows to tune on; a tuned rule may then differ from argmax where scikit-learn forbids it.
ONE_FOLD = {**SMALL, "folds": 1, "decision": "plug_in"}


@parametrize_with_checks([EASTBooster(**SMALL), EASTBooster(library="xgboost", **ONE_FOLD)])
@pytest.mark.filterwarnings("ignore:Estimator's parameters changed after set_params raised")
def test_scikit_learns_checks(estimator: Any, check: Any) -> None:
    assert check(estimator) is None
