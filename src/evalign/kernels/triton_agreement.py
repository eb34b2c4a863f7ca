"""1 - Matthews' correlation or Cohen's kappa, and its slopes by the counts; the formulas are in `agreement_loops`."""

import triton
import triton.language as tl

from evalign.kernels.closed_forms import FORMS
from evalign.kernels.triton_forms import divided, forms_of

MCC = tl.constexpr(FORMS.index("mcc"))


@triton.jit
def agreement(
    tp, predicted, actual, total, slopes, d, t0, t1, t2, t3, b0, b1, b2, b3, w0, w1, w2, w3,
    FORM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """1 - the metric, 0 for counts of nothing; and the total. The derivatives by tp and predicted go to `slopes`."""
    everything = tl.load(total)
    n = everything.to(tl.float64)
    right, chance = tl.zeros([BLOCK], tl.float64), tl.zeros([BLOCK], tl.float64)
    of_guesses, of_labels = tl.zeros([BLOCK], tl.float64), tl.zeros([BLOCK], tl.float64)
    for at in range(0, d, BLOCK):
        k = at + tl.arange(0, BLOCK)
        hits, predictions, truths, _, _ = forms_of(
            tp, predicted, actual, total, k, d, everything, t0, t1, t2, t3, b0, b1, b2, b3, w0, w1, w2, w3, False
        )
        guesses, labels = predictions.to(tl.float64), truths.to(tl.float64)
        right += hits
        chance += guesses * labels
        if FORM == MCC:
            of_guesses += guesses * (n - guesses)
            of_labels += labels * (n - labels)
    by_chance = tl.sum(chance, 0)
    if FORM == MCC:
        spread, other = tl.sum(of_guesses, 0), tl.sum(of_labels, 0)
        flat = (spread <= 0.0) | (other <= 0.0)
        bottom = tl.where(flat, 0.0, tl.sqrt(tl.where(flat, 1.0, spread)) * tl.sqrt(tl.where(flat, 1.0, other)))
        relative = bottom / tl.where(flat, 1.0, 2.0 * spread)
    else:
        bottom = n * n - by_chance
    value, empty, safe = divided(tl.sum(right, 0) * n - by_chance, bottom)
    scale = tl.where(empty, 0.0, 1.0 / safe)
    for at in range(0, d, BLOCK):
        k = at + tl.arange(0, BLOCK)
        _, guesses, labels, _, _ = forms_of(
            tp, predicted, actual, total, k, d, everything, t0, t1, t2, t3, b0, b1, b2, b3, w0, w1, w2, w3, False
        )
        growth = relative * (n - 2.0 * guesses) if FORM == MCC else -labels
        by_guesses = scale * (labels + value * growth)
        tl.store(slopes + k, by_guesses * b0 - scale * n * t0, mask=k < d)
        tl.store(slopes + d + k, by_guesses * b2 - scale * n * t2, mask=k < d)
    return tl.where(everything == 0.0, 0.0, 1.0 - value).to(tl.float32), everything
