"""Scikit-learn estimators that train and decide for a metric."""
