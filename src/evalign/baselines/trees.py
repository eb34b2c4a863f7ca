"""Tree ensembles as comparisons use them: one place for the settings, so that every table has the same forest.

EAST names its random forest (Tables 2 and 3) without any setting.
"""

from sklearn.ensemble import HistGradientBoostingClassifier, RandomForestClassifier


def random_forest(seed: int | None = None, *, jobs: int | None = -1) -> RandomForestClassifier:
    """Scikit-learn's forest, defaults but for 300 trees: votes in steps of 1/100 are coarse to cut for a metric.

    >>> random_forest(0).n_estimators
    300
    """
    return RandomForestClassifier(300, random_state=seed, n_jobs=jobs)


def gradient_boosting(seed: int | None = None) -> HistGradientBoostingClassifier:
    """Scikit-learn's histogram gradient boosting with its defaults.

    >>> gradient_boosting(0).random_state
    0
    """
    return HistGradientBoostingClassifier(random_state=seed)
