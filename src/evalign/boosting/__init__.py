"""Boosted trees on a metric: the objective and its derivatives, growth on folds, LightGBM and XGBoost."""
