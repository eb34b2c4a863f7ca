"""scikit-learn's own checks of EASTBlend, EASTForest and EASTLinear, every one of them."""

from typing import Any

import pytest
from sklearn.utils.estimator_checks import parametrize_with_checks

from evalign.estimators.blend import EASTBlend
from evalign.estimators.forest import EASTForest
from evalign.estimators.linear import EASTLinear

pytestmark = pytest.mark.slow

# Leaves of ten rows: in pure ones no class weight has a say, and the checks give scikit-learn's forests large ones too.
SMALL = {"boost": {"rounds": 15}, "forest": {"trees": 15, "min_rows": 10, "columns": 1.0}, "n_jobs": 1}
NETWORK = {"hidden": (32,), "dropout": 0.0, "epochs": 40, "learning_rate": 1e-2}


@parametrize_with_checks(
    [
        EASTForest(trees=15, folds=2, min_rows=10, n_jobs=1),
        EASTLinear(folds=2),
        # By accuracy: of F1 the plug-in rule names a class even where its rows weigh next to nothing.
        EASTBlend("accuracy", folds=2, members=("boost", "forest"), **SMALL),
        EASTBlend(folds=2, members=("forest", "network"), network=NETWORK, **SMALL),
    ]
)
@pytest.mark.filterwarnings("ignore:Estimator's parameters changed after set_params raised")
def test_scikit_learns_checks(estimator: Any, check: Any) -> None:
    if check.func.__name__ == "check_classifiers_train":  # also asks that labels be those of the largest probability
        estimator.set_params(decision="argmax")
    assert check(estimator) is None
