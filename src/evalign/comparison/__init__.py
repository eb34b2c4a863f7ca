"""Compare classifiers by a metric: the same splits, the same held-out rows, every decision rule.

`run.compare` runs contenders over splits, and `significance.summarise` averages its rows.
"""
