"""Shift: whether class shares differ between held-out rows and new ones, and whether that is all that differs.

Label shift means that P(class) changes and P(x | class) does not. Then new probabilities follow from the old ones,
p_k -> p_k shares_k / before_k, and the rule can be learned anew without a label. Both halves of that assumption are
tested: estimated shares that are applied where nothing changed, or where something else did, cost more than they gain.
"""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from evalign.decision.calibration import fit_calibration
from evalign.decision.rule import Floats, Labels, as_labels, as_probabilities, as_weights

Kind = Literal["none", "shares", "other", "given"]
LEVEL = 0.01  # of the test for changed shares
FIT_LEVEL = 0.02  # of the test for a change that shares do not explain
FEWEST = 50  # held-out rows, counted as (sum w)^2 / sum w^2, that estimated shares must rest on
EACH = 10  # new rows for each class whose share is estimated
ROWS = 4000  # held-out and new rows that tests and intervals look at, at most
DRAWS = 200  # permutations, and bootstrap samples of the fit
RESAMPLES = 40  # of the intervals
PRIOR = 1.0  # rows of the old shares that the Dirichlet prior adds to the new ones, for each class
ALLOWED = 0.5  # excess of a distance of scores over its usual size that models of folds, being weaker, may cause


class Reference(NamedTuple):
    """A sample of held-out rows: probabilities (n, C), labels, and optionally features (n, F) as numbers."""

    p: Floats
    y: Labels
    features: Floats | None = None

    @classmethod
    def of(cls, probabilities: Any, target: Any, sample_weight: Any = None, features: Any = None) -> "Reference":
        """Sample of at most `ROWS` rows, drawn by weight where weights differ.

        >>> Reference.of([0.2, 0.7], [0, 1]).y
        array([0, 1])
        """
        p = as_probabilities(probabilities)
        y = as_labels(target, p, "multiclass")
        rows = sampled_rows(p, as_weights(sample_weight, p))
        return cls(p[rows], y[rows], None if features is None else np.asarray(features, dtype=np.float64)[rows])


def sampled_rows(p: Floats, weight: Floats) -> Labels:
    """Rows of a `Reference`: all if they are few; drawn by weight where weights differ."""
    most = min(ROWS, max(100, 2**20 // p.shape[1]))
    random = np.random.default_rng(0)
    if weight.min() < weight.max():
        return np.asarray(random.choice(len(p), min(most, len(p)), p=weight / weight.sum()))
    return np.arange(len(p)) if len(p) <= most else np.sort(random.choice(len(p), most, replace=False))


@dataclass(frozen=True)
class Shift:
    """What was found about the class shares of new rows; `str` says it in words.

    ``kind`` is "none" (no evidence of a change), "shares" (class shares changed, and nothing else that shows),
    "other" (something else changed: no adaptation) or "given" (the user knows the shares). `shares` with `low` and
    `high` (95 %) are the estimate by EM, `cross_check` the estimate from the confusion matrix. `p_shares` is the
    p-value of "the mean probabilities did not change", `p_fit` that of "the new rows are a mixture of the held-out
    classes".
    """

    kind: Kind
    classes: tuple[Any, ...]
    before: tuple[float, ...]
    shares: tuple[float, ...]
    low: tuple[float, ...] | None = None
    high: tuple[float, ...] | None = None
    cross_check: tuple[float, ...] | None = None
    p_shares: float | None = None
    p_fit: float | None = None
    rows: int = 0
    reason: str = ""

    @property
    def adapts(self) -> bool:
        """Whether decisions change: shares were given, or found to have changed and nothing else."""
        return self.kind in ("shares", "given")

    @property
    def ratios(self) -> Floats:
        """New over old share of each class."""
        return np.asarray(np.asarray(self.shares) / np.maximum(np.asarray(self.before), 1e-12))

    def to_json(self) -> dict[str, Any]:
        """A dictionary of plain JSON types."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in self.__dict__.items() if v is not None}

    def __str__(self) -> str:
        lines = [self.reason]
        if self.kind != "none":
            for k in np.argsort(-np.abs(np.log(np.maximum(self.ratios, 1e-12))))[:10]:
                line = f"  {self.classes[k]}: {self.before[k]:.2%} -> {self.shares[k]:.2%}"
                if self.low is not None and self.high is not None:
                    line += f" (95 % interval {self.low[k]:.2%} to {self.high[k]:.2%})"
                if self.cross_check is not None:
                    line += f", by the confusion matrix {self.cross_check[k]:.2%}"
                lines.append(line)
        return "\n".join(lines)


def given_shares(reference: Reference, shares: Floats, classes: Any = None) -> Shift:
    """The shift to known class shares."""
    before = np.bincount(reference.y, minlength=reference.p.shape[1]) / len(reference.y)
    names = tuple(range(len(before)) if classes is None else classes)
    return Shift("given", names, tuple(before), tuple(shares.tolist()), reason="Class shares as given.")


def find_shift(
    reference: Reference, probabilities: Any, features: Any = None, *, classes: Any = None, intervals: bool = True,
    random_state: int = 0,
) -> Shift:  # fmt: skip
    """Test whether new rows have other class shares than the held-out ones, and estimate them.

    1. Held-out labels calibrate the probabilities: q.
    2. Did the mean of q change? A permutation test of Hotelling's T^2: exact, whatever the calibration is worth. At
       level 0.01: shares that are learned anew without a change cost more than a small change that is overlooked.
    3. If so, the new shares by EM (Saerens 2002), with a Dirichlet prior about the old ones, and by least squares
       from the confusion matrix of argmax (Lipton 2018) as a cross-check; intervals by the bootstrap.
    4. Are the new rows a mixture of the held-out classes in these shares? The largest Kolmogorov-Smirnov distance
       over the features (Wasserstein over the calibrated probabilities, where no features are kept) and their
       maximum mean discrepancy, against bootstrap samples of such a mixture. Where a few held-out rows stand for most
       of the new ones, or there are less than 10 new rows a class, this cannot be told, and nothing is adapted; nor
       is it where the features are closer to the held-out rows as they are than to the mixture.

    >>> rng = np.random.default_rng(0)
    >>> def sample(n, share):
    ...     y = (rng.random(n) < share).astype(int)
    ...     return y, 1 / (1 + 9 * np.exp(-rng.normal(4.0 * y - 2.0, 2.0)))
    >>> y, p = sample(2000, 0.1)
    >>> found = find_shift(Reference.of(p, y), sample(1000, 0.4)[1])
    >>> found.kind, 0.35 < found.shares[1] < 0.45
    ('shares', True)
    >>> find_shift(Reference.of(p, y), sample(1000, 0.1)[1]).kind
    'none'
    """
    p_new = as_probabilities(probabilities)
    size, total = reference.p.shape[1], len(p_new)
    if p_new.shape[1] != size:
        raise ValueError(f"probabilities must have {size} columns, as the held-out ones, got {p_new.shape[1]}")
    if not total:
        raise ValueError("at least one new row is needed to look for a shift, got none")
    names = tuple(range(size) if classes is None else classes)
    random = np.random.default_rng(random_state)
    before = np.bincount(reference.y, minlength=size) / len(reference.y)
    view = None if features is None or reference.features is None else np.asarray(features, dtype=np.float64)
    if total > ROWS:
        rows = np.sort(random.choice(total, ROWS, replace=False))
        sample, view = p_new[rows], None if view is None else view[rows]
    else:
        sample = p_new
    calibration = fit_calibration(reference.p, reference.y, np.ones(len(reference.y)))
    q, new = calibration(reference.p), calibration(sample)
    p_shares = _changed_means(q, new, random)
    changed = p_shares < LEVEL
    shares = class_shares(calibration(p_new), before)[0] if changed else before
    p_fit, worst, better = _fit(reference, q, new, view, before, shares, changed, random)
    disputed = changed and not better
    if disputed:
        changed, shares = False, before
        p_fit, worst, _ = _fit(reference, q, new, view, before, before, False, random)
    known: dict[str, Any] = {
        "classes": names, "before": tuple(before.tolist()), "shares": tuple(shares.tolist()), "rows": total,
        "p_shares": p_shares, "p_fit": p_fit,
    }  # fmt: skip
    if changed:
        known["cross_check"] = tuple(_from_confusion(reference, p_new).tolist())
        if intervals:
            low, high = _intervals(reference, sample, before, shares, total, random)
            known |= {"low": tuple(low.tolist()), "high": tuple(high.tolist())}
    held = (shares / np.maximum(before, 1e-12))[reference.y]
    effective = float(held.sum() ** 2 / (held**2).sum())
    few = effective < min(FEWEST, len(held) / 2)
    if changed and p_fit >= FIT_LEVEL and (few or total < EACH * size):
        rests = f"{effective:.0f} held-out rows" if few else f"{total} new rows, less than {EACH} a class"
        reason = (
            f"Class shares seem to have changed, but their estimate rests on {rests}: decisions stay as they were. "
            "Use more rows, or pass the shares as prevalence=."
        )
        return Shift("other", reason=reason, **known)
    if p_fit < FIT_LEVEL:
        reason = (
            f"The new rows are not a mixture of the held-out classes (p = {p_fit:.3g}; {worst}), so a change of class "
            "shares alone cannot be corrected: decisions stay as they were. Label some new rows, or train anew."
        )
        return Shift("other", reason=reason, **known)
    if changed:
        reason = f"Class shares changed (p = {p_shares:.2g} of equal means, {total} rows), and nothing else that shows."
        return Shift("shares", reason=reason, **known)
    reason = f"No evidence that class shares changed (p = {p_shares:.3g}, {total} rows)."
    if disputed:
        reason = (
            f"The mean probabilities changed (p = {p_shares:.2g}, {total} rows), but the features agree more with the "
            "old class shares than with those that this would mean: decisions stay as they were."
        )
    return Shift("none", reason=reason, **known)


def reweighted(q: Floats, ratios: Floats) -> Floats:
    """q_k ratio_k, normalised: probabilities after a change of class shares.

    >>> reweighted(np.array([[0.5, 0.5]]), np.array([0.5, 1.5]))
    array([[0.25, 0.75]])
    """
    moved = q * ratios
    return np.asarray(moved / np.maximum(moved.sum(axis=1, keepdims=True), 1e-300))


def class_shares(q: Floats, before: Floats, times: Floats | None = None, rounds: int = 500) -> Floats:
    """Shares (B, C) that maximise sum_i times_bi log sum_k shares_k q_ik / before_k plus a Dirichlet prior, by EM.

    `times` (B, n) says how often each row counts in each of B samples; None is one sample of every row once.
    """
    size = q.shape[1]
    ratio = q / np.maximum(before, 1e-12)
    weights = np.ones((1, len(q))) if times is None else times
    prior = PRIOR * size * before
    shares = np.tile(before, (len(weights), 1))
    scale = weights.sum(axis=1, keepdims=True) + prior.sum()
    for _ in range(rounds):
        inner = np.maximum(shares @ ratio.T, 1e-300)
        updated = (shares * ((weights / inner) @ ratio) + prior) / scale
        moved = float(np.abs(updated - shares).max())
        shares = updated
        if moved < 1e-6:
            break
    return np.asarray(shares / shares.sum(axis=1, keepdims=True))


def _changed_means(old: Floats, new: Floats, random: np.random.Generator) -> float:
    """p-value of equal means, by permuting rows; Hotelling's T^2 with the covariance of all rows."""
    pooled = np.concatenate([old, new])[:, 1:]
    pooled = pooled - pooled.mean(axis=0)
    covariance = pooled.T @ pooled / len(pooled)
    covariance += 1e-3 * np.diag(np.diag(covariance)) + 1e-12 * np.eye(len(covariance))
    whitened = pooled @ np.linalg.inv(np.linalg.cholesky(covariance)).T
    m = len(new)
    picks = np.stack([random.permutation(len(pooled))[:m] for _ in range(2 * DRAWS)])
    drawn = np.stack([whitened[pick].sum(axis=0) for pick in picks])
    seen = (whitened[len(old) :].sum(axis=0) ** 2).sum()
    return float((1 + ((drawn**2).sum(axis=1) >= seen - 1e-12).sum()) / (1 + 2 * DRAWS))


def _from_confusion(reference: Reference, p_new: Floats) -> Floats:
    """Shares s of the least |M s - d|^2: M[j, k] = P(argmax j | class k), d the shares of the new argmaxes."""
    size = p_new.shape[1]
    count = np.zeros((size, size))
    np.add.at(count, (reference.p.argmax(axis=1), reference.y), 1.0)
    rates = count / np.maximum(count.sum(axis=0), 1.0)
    decided = np.bincount(p_new.argmax(axis=1), minlength=size) / len(p_new)
    from scipy.optimize import nnls

    # The last row, heavily weighted, makes them add up to 1.
    solved = nnls(np.vstack([rates, np.full((1, size), 1e3)]), np.append(decided, 1e3))[0]
    return np.asarray(solved / max(solved.sum(), 1e-12))


def _intervals(
    reference: Reference, sample: Floats, before: Floats, shares: Floats, total: int, random: np.random.Generator
) -> tuple[Floats, Floats]:
    """95 % intervals on the logit scale: held-out rows (calibration and all) and new rows are both resampled."""
    found = []
    n, m = len(reference.y), len(sample)
    for _ in range(RESAMPLES):
        rows, new = random.integers(n, size=n), random.integers(m, size=m)
        y = reference.y[rows]
        if len(np.unique(y)) < len(before):
            continue
        calibration = fit_calibration(reference.p[rows], y, np.ones(n))
        own = np.bincount(y, minlength=len(before)) / n
        found.append(class_shares(calibration(sample[new]), own, rounds=200)[0])
    centre = _log_odds(shares)
    spread = 1.96 * _log_odds(np.array(found)).std(axis=0) if len(found) > 1 else np.full(len(before), np.inf)
    return 1 / (1 + np.exp(-(centre - spread))), 1 / (1 + np.exp(-(centre + spread)))


def _log_odds(shares: Floats) -> Floats:
    s = np.clip(shares, 1e-6, 1 - 1e-6)
    return np.asarray(np.log(s) - np.log1p(-s))


def _fit(
    reference: Reference, q: Floats, new: Floats, view: Floats | None, before: Floats, shares: Floats, changed: bool,
    random: np.random.Generator,
) -> tuple[float, str, bool]:  # fmt: skip
    """p-value of "the new rows are held-out classes mixed in these shares", and the column that fits worst.

    The last value says whether features fit these shares better than those of before. Held-out probabilities come from
    models of folds, and their means may differ from those of the model in use where no class share has changed.
    """
    n, m, y = len(reference.y), len(new), reference.y
    if view is None or reference.features is None:
        old, others, distance, what = q, new, _area, "probability of class"
    else:
        old, others, distance, what = reference.features, view, _height, "feature"
        # A column with one value but for a few rows says nothing, and its distances are too coarse to compare.
        told = [j for j in range(old.shape[1]) if _varied(old[:, j])]
        old, others = old[:, told], others[:, told]
        if not told:
            return 1.0, "no feature varies", True
    waves = _waves(old, others, random)

    def apart(of: Floats, columns: Floats, signed: Floats) -> Floats:
        """Distances (B, columns + 1) of two weighted samples: column by column, and of all columns together."""
        each = [distance(columns[:, j], signed) for j in range(columns.shape[1])]
        return np.stack([*each, np.sqrt(((signed @ of) ** 2).sum(axis=1))], axis=1)

    # Bootstrap: both samples drawn from the held-out rows, the new one in the estimated shares, these estimated again.
    held = (shares / np.maximum(before, 1e-12))[y]
    old_times = random.multinomial(n, np.full(n, 1 / n), size=DRAWS).astype(np.float64)
    new_times = random.multinomial(m, held / held.sum(), size=DRAWS).astype(np.float64)
    own = class_shares(q, before, new_times, rounds=100) if changed else np.tile(before, (DRAWS, 1))
    weights = old_times * (own / np.maximum(before, 1e-12))[:, y]
    signed = weights / weights.sum(axis=1, keepdims=True) - new_times / m
    null = apart(waves[:n], old, signed)
    usual = np.maximum(np.quantile(null, 0.9, axis=0), 2 / m if distance is _height else 1e-3)
    mixtures = np.stack([held / held.sum(), np.full(n, 1 / n)])
    signed = np.concatenate([mixtures, np.full((2, m), -1 / m)], axis=1)
    found, unchanged = apart(waves, np.concatenate([old, others]), signed)
    better = bool(distance is _area or ((found / usual) ** 2).sum() < ((unchanged / usual) ** 2).sum())
    worst = int((found / usual).argmax())
    most = float(found[worst] / usual[worst]) - (ALLOWED if distance is _area else 0.0)
    p_value = (1 + ((null / usual).max(axis=1) >= most).sum()) / (1 + DRAWS)
    if worst == old.shape[1]:
        return float(p_value), f"the joint distribution of {what} columns differs", better
    column = worst if distance is _area else told[worst]
    return float(p_value), f"{what} {column} differs most, by {found[worst]:.2g}", better


def _waves(old: Floats, new: Floats, random: np.random.Generator, size: int = 256) -> Floats:
    """Random Fourier features (Rahimi 2007) of the ranks: their means differ where joint distributions do.

    The distance of the means is the maximum mean discrepancy with a Gaussian kernel of the median width.
    """
    both = zip(old.T, new.T, strict=True)
    z = np.stack([np.searchsorted(np.sort(a), np.append(a, b), side="right") / len(a) for a, b in both], axis=1)
    pairs = random.integers(len(z), size=(2, 1000))
    squared = float(np.median(((z[pairs[0]] - z[pairs[1]]) ** 2).sum(axis=1)))
    frequencies = random.normal(size=(z.shape[1], size)) * np.sqrt(2 / max(squared, 1e-12))
    return np.asarray(np.sqrt(2 / size) * np.cos(z @ frequencies + random.uniform(0, 2 * np.pi, size)))


def _varied(column: Floats) -> bool:
    """Whether at least 5 % of the rows have another value than the most frequent one."""
    return bool(np.unique(column, return_counts=True)[1].max() <= 0.95 * len(column))


def _signed_sums(column: Floats, signed: Floats) -> tuple[Floats, Floats]:
    """Distinct values in order, and the sum of signed weights up to each, for every row of weights."""
    order = np.argsort(column, kind="stable")
    ordered = column[order]
    last = np.append(ordered[1:] > ordered[:-1], True)
    return ordered[last], np.cumsum(signed[:, order], axis=1)[:, last]


def _height(column: Floats, signed: Floats) -> Floats:
    """Kolmogorov-Smirnov distance: the largest difference of two cumulative distributions."""
    return np.asarray(np.abs(_signed_sums(column, signed)[1]).max(axis=1))


def _area(column: Floats, signed: Floats) -> Floats:
    """Wasserstein distance: the area between two cumulative distributions.

    Of probabilities: folds shift the small ones by a little each, which the largest difference would make much of.
    """
    values, sums = _signed_sums(column, signed)
    return np.asarray(np.abs(sums[:, :-1]) @ np.diff(values))
