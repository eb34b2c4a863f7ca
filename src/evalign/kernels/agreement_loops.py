"""1 - Matthews' correlation or Cohen's kappa, and its slopes by the counts, as one compiled loop over the classes.

With p_k predictions and t_k labels of class k, of n in all, c of them right: MCC is (c n - sum p_k t_k) /
sqrt(sum p_k (n - p_k) sum t_k (n - t_k)), kappa the same over n^2 - sum p_k t_k. Squares of counts, and what is left of
them where one class is nearly all, need the digits of a float64.
"""

import math

import numpy as np
from numpy.typing import NDArray

from evalign.kernels.closed_forms import FORMS
from evalign.kernels.compiled import loop
from evalign.kernels.metric_loops import form

Doubles = NDArray[np.float64]
MCC = FORMS.index("mcc")


@loop(exact=True)
def value_and_slopes(counts: Doubles, totals: Doubles, forms: Doubles, metric: int, slopes: Doubles) -> float:
    """As `metric_loops.value_and_slopes`; the `forms` are tp, predicted and actual."""
    d = counts.shape[1]
    if totals.shape[0] == 0:
        totals = np.array([counts[1].sum()])
    n = totals[0]
    slopes[:] = 0.0
    if n == 0:
        return 0.0
    right, chance, of_guesses, of_labels = 0.0, 0.0, 0.0, 0.0
    for k in range(d):
        guesses, labels = form(forms[1], counts, totals, k), form(forms[2], counts, totals, k)
        right += form(forms[0], counts, totals, k)
        chance += guesses * labels
        of_guesses += guesses * (n - guesses)
        of_labels += labels * (n - labels)
    bottom = n * n - chance
    if metric == MCC:
        bottom = 0.0 if of_guesses <= 0 or of_labels <= 0 else math.sqrt(of_guesses) * math.sqrt(of_labels)
    if bottom == 0:
        return 1.0
    value: float = (right * n - chance) / bottom
    for k in range(d):
        guesses, labels = form(forms[1], counts, totals, k), form(forms[2], counts, totals, k)
        # How the bottom grows with the predictions of class k.
        growth = bottom * (n - 2 * guesses) / (2 * of_guesses) if metric == MCC else -labels
        by_hits, by_guesses = -n / bottom, (labels + value * growth) / bottom
        slopes[0, k] = by_hits * forms[0, 0] + by_guesses * forms[1, 0]
        slopes[1, k] = by_hits * forms[0, 2] + by_guesses * forms[1, 2]
    return 1 - value
