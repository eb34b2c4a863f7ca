"""What `Memory` does to the counts of a batch as one compiled loop: a dozen small operations cost more than a batch."""

import numpy as np
from numpy.typing import NDArray

from evalign.kernels.compiled import loop

Doubles = NDArray[np.float64]


@loop(exact=True)
def remember(
    counts: Doubles, rows: Doubles, weight: float, state: Doubles, seen: Doubles, decay: float, rows_of_rarest: float
) -> float:
    """Adds what is remembered to `counts`, remembers the batch, and returns how many times the batch the sum is.

    `state` has the remembered counts and their weight, `seen` the rows of each class. A `decay` below 0 is "auto".
    """
    rows = rows.copy()  # a part of the counts, which change
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
