"""How much each member of a blend counts: weights in quarters, by log-loss on rows that all of them held out."""

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

STEPS = 4  # quarters: finer steps follow the noise of the held-out rows
LEAST = 1e-5  # of a probability; trees say 0 of what they have not seen, and one such row would decide alone


def blended(probabilities: Sequence[Floats], weights: Sequence[float]) -> Floats:
    """The weighted mean, (members of (n, C)) -> (n, C).

    >>> blended([np.array([[1.0, 0.0]]), np.array([[0.0, 1.0]])], [0.75, 0.25])
    array([[0.75, 0.25]])
    """
    total = sum(w * p for w, p in zip(weights, probabilities, strict=True))
    assert isinstance(total, np.ndarray)
    return total


def best_weights(
    probabilities: Sequence[Floats], codes: NDArray[np.int64], row_weight: Floats
) -> tuple[tuple[float, ...], float]:
    """Weights of least held-out log-loss, and that loss; of equals the most even ones.

    >>> sure, unsure = np.array([[0.9, 0.1], [0.2, 0.8]]), np.array([[0.5, 0.5], [0.5, 0.5]])
    >>> best_weights([sure, unsure], np.array([0, 1]), np.ones(2))[0]
    (1.0, 0.0)
    """
    at_label = [p[np.arange(len(codes)), codes] for p in probabilities]

    def loss(weights: tuple[float, ...]) -> float:
        p = sum(w * p for w, p in zip(weights, at_label, strict=True))
        return float((row_weight * -np.log(np.maximum(p, LEAST))).sum() / row_weight.sum())

    return min(((w, loss(w)) for w in sorted(shares(len(at_label)), key=max)), key=lambda found: found[1])


def shares(members: int, left: int = STEPS) -> Iterator[tuple[float, ...]]:
    """Every way to share 1 among members in steps of 1 / `STEPS`.

    >>> list(shares(2))
    [(0.0, 1.0), (0.25, 0.75), (0.5, 0.5), (0.75, 0.25), (1.0, 0.0)]
    """
    if members == 1:
        yield (left / STEPS,)
        return
    for own in range(left + 1):
        for rest in shares(members - 1, left - own):
            yield (own / STEPS, *rest)
