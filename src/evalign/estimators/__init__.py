"""Scikit-learn estimators trained and tuned for a metric."""
