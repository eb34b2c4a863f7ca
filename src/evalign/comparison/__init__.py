"""Compare classifiers by a metric: the same splits, the same held-out rows, every decision rule.

`compare` runs contenders over splits, `summarise` averages its rows, `bootstrap` gives intervals on one test set.
"""

from evalign.comparison.aims import DECISIONS, Aim, Judge
from evalign.comparison.contenders import OURS, RIVALS, Contender
from evalign.comparison.run import Comparison, Row, Table, Trial, compare, evaluate, split
from evalign.comparison.significance import Line, standard_error, summarise

__all__ = [
    "DECISIONS",
    "OURS",
    "RIVALS",
    "Aim",
    "Comparison",
    "Contender",
    "Judge",
    "Line",
    "Row",
    "Table",
    "Trial",
    "compare",
    "evaluate",
    "split",
    "standard_error",
    "summarise",
]
