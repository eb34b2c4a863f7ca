"""scikit-learn's own checks of EASTBooster, every one of them, with both libraries."""

from typing import Any

import pytest
from sklearn.utils.estimator_checks import parametrize_with_checks

from evalign.estimators.boosted import EASTBooster

pytestmark = pytest.mark.slow

SMALL = {"rounds": 15, "n_jobs": 1}


@parametrize_with_checks([EASTBooster(folds=3, **SMALL), EASTBooster(library="xgboost", folds=1, **SMALL)])
@pytest.mark.filterwarnings("ignore:Estimator's parameters changed after set_params raised")
def test_scikit_learns_checks(estimator: Any, check: Any) -> None:
    if check.func.__name__ == "check_classifiers_train":  # also asks that labels be those of the largest probability
        estimator.set_params(decision="argmax")
    assert check(estimator) is None
