"""Compare classifiers by a metric: the same splits, the same held-out rows, every decision rule.

`compare` runs contenders over splits, and `summarise` averages its rows.
"""

from evalign.comparison.contenders import Contender
from evalign.comparison.goals import Aim, Judge
from evalign.comparison.run import Comparison, Table, compare, evaluate, split
from evalign.comparison.significance import standard_error, summarise

__all__ = [
    "Aim", "Comparison", "Contender", "Judge", "Table", "compare", "evaluate", "split", "standard_error", "summarise",
]  # fmt: skip
