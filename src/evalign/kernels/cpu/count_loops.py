"""Compiled loops over classes: the metric of a batch's counts with its slopes, and the memory.

The formulas are those of `gpu.device_functions`; both are tested against autograd for every metric and average.
"""

import math

import numpy as np

from evalign.kernels.cpu.block_loops import Doubles, Floats
from evalign.kernels.cpu.compilation import ORDERED, loop
from evalign.kernels.plan import FORMS

MACRO, MICRO, WEIGHTED, BINARY = range(4)  # indices in `plan.FORMS`


@loop(ORDERED)
def form(numbers: Doubles, counts: Doubles, totals: Doubles, k: int) -> float:
    """A linear form of the counts of class k."""
    total = totals[k] if totals.shape[0] > 1 else totals[0]
    value: float = numbers[0] * counts[0, k] + numbers[1] * counts[1, k] + numbers[2] * counts[2, k]
    value += numbers[3] * total
    return value


@loop(ORDERED)
def share(weight: Doubles, counts: Doubles, totals: Doubles, average: int, k: int) -> float:
    """Weight of class k in the mean, before normalisation."""
    if average == BINARY:
        return 1.0 if k == 1 else 0.0
    if average == WEIGHTED:
        return form(weight, counts, totals, k)
    return 1.0 if counts[1, k] > 0 else 0.0


@loop(ORDERED)
def value_and_slopes(counts: Doubles, totals: Doubles, forms: Doubles, average: int, slopes: Doubles) -> float:
    """1 - the averaged metric of `counts` (3, C), which are tp, actual and predicted; 0 for empty counts.

    `totals` has one entry for every label, one entry for all classes, or none where it is the sum of the label counts;
    `forms` (3, 4) has the numbers of `ClosedForm`. The derivatives by tp and predicted are written to
    `slopes` (2, C).
    """
    d = counts.shape[1]
    top, bottom, weight = forms[0], forms[1], forms[2]
    per_label = totals.shape[0] == d
    if totals.shape[0] == 0:
        totals = np.array([counts[1].sum()])
    slopes[:] = 0.0
    if totals.sum() == 0:
        return 0.0
    # Binary problems without a positive label: the share of flagged rows; see `Objective.metric_term`.
    alarms = bottom[2] > 0 and (average == BINARY or per_label)
    labelled = counts[1, 1] if average == BINARY else counts[1].sum()
    if alarms and labelled == 0:
        mass = totals.sum()
        for k in range(d):
            if average != BINARY or k == 1:
                slopes[1, k] = 1 / mass
        flagged: float = (counts[2, 1] if average == BINARY else counts[2].sum()) / mass
        return flagged
    if average == MICRO:
        above, below = 0.0, 0.0
        for k in range(d):
            above += form(top, counts, totals, k)
            below += form(bottom, counts, totals, k)
        if below == 0:
            return 1.0
        slopes[0] = above / below**2 * bottom[0] - top[0] / below
        slopes[1] = above / below**2 * bottom[2] - top[2] / below
        return 1 - above / below
    added, otherwise = 0.0, 1.0 / d if average == WEIGHTED else 0.0
    for k in range(d):
        added += share(weight, counts, totals, average, k)
    value = 0.0
    for k in range(d):
        if alarms and average == MACRO and counts[1, k] == 0:
            if totals[k] > 0:
                slopes[1, k] = 1 / (d * totals[k])
                value -= counts[2, k] / (d * totals[k])
            continue
        part = share(weight, counts, totals, average, k) / added if added != 0 else otherwise
        divisor = form(bottom, counts, totals, k)
        if divisor == 0:
            continue
        score, slope = form(top, counts, totals, k) / divisor, part / divisor
        if part != 0:  # a class outside the mean is skipped even if its score is nan
            value += part * score
        slopes[0, k] = slope * (score * bottom[0] - top[0])
        slopes[1, k] = slope * (score * bottom[2] - top[2])
    return 1 - value


@loop(ORDERED)
def scaled_slopes(slopes: Doubles, by_loss: float, two_classes: bool) -> Floats:
    """Slopes with respect to tp, predicted and the cross-entropies times dL/dloss, in float32.

    With `two_classes` the slopes of the counts of both classes become those of the single column. A gradient scaler
    may try factors that are too large, which overflow here without a warning.
    """
    if two_classes:
        slopes = np.array([slopes[1] + slopes[0], slopes[3] - slopes[2] - slopes[0], slopes[4]])
    return (by_loss * slopes).astype(np.float32)


MCC = FORMS.index("mcc")


@loop(ORDERED)
def agreement_and_slopes(counts: Doubles, totals: Doubles, forms: Doubles, metric: int, slopes: Doubles) -> float:
    """As `value_and_slopes`; the `forms` are tp, predicted and actual."""
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
    if counts[1].max() == n:  # labels of a single class: accuracy
        slopes[0] = -1 / n
        wrong: float = 1 - counts[0].sum() / n
        return wrong
    bottom = n * n - chance
    if metric == MCC:
        bottom = 0.0 if of_guesses <= 0 or of_labels <= 0 else math.sqrt(of_guesses) * math.sqrt(of_labels)
    if bottom == 0:
        return 1.0
    value: float = (right * n - chance) / bottom
    for k in range(d):
        guesses, labels = form(forms[1], counts, totals, k), form(forms[2], counts, totals, k)
        # Derivative of the bottom with respect to the predictions of class k.
        growth = bottom * (n - 2 * guesses) / (2 * of_guesses) if metric == MCC else -labels
        by_hits, by_guesses = -n / bottom, (labels + value * growth) / bottom
        slopes[0, k] = by_hits * forms[0, 0] + by_guesses * forms[1, 0]
        slopes[1, k] = by_hits * forms[0, 2] + by_guesses * forms[1, 2]
    return 1 - value


@loop(ORDERED)
def remember(
    counts: Doubles, rows: Doubles, weight: float, state: Doubles, seen: Doubles, decay: float, rows_of_rarest: float
) -> float:
    """Add the remembered counts to `counts`, remember the batch, and return the ratio of the sum to the batch.

    `state` has the remembered counts and their weight, `seen` the rows of each class. A `decay` below 0 is "auto".
    """
    rows = rows.copy()  # copied, since it is part of the counts, which change
    kept = decay
    if decay < 0:
        rarest, everything = np.inf, 0.0
        for k in range(rows.size):
            known = seen[k] + rows[k]
            everything += known
            if known > 0:
                rarest = min(rarest, known)
        kept = max(0.0, 1 - rows.sum() * (rarest / everything) / rows_of_rarest) if everything > 0 else 1.0
    mass = weight + kept * state[-1]
    sound = mass
    for i in range(counts.size):
        counts[i] += kept * state[i]
        sound += counts[i]
    if np.isfinite(sound):
        state[:-1] = counts
        state[-1] = mass
        for k in range(rows.size):
            seen[k] += rows[k]
    return mass / weight if weight > 0 else 1.0
