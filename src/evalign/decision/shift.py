"""Label shift: test whether class shares, and nothing else, differ between held-out and new rows; estimate them.

Under label shift P(class) changes and P(x | class) does not, so that new probabilities are p_k shares_k / before_k and
the rule can be learned again without labels. Both assumptions are tested first: correcting where nothing changed, or
where something else did, costs more than it gains.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from scipy.special import chdtrc, expit

from evalign.decision.calibration import ROWS, fit_calibration, sampled_rows
from evalign.decision.rule import Floats, Labels, as_labels, as_probabilities, as_weights, logit

Kind = Literal["none", "shares", "other", "given"]
LEVEL = 0.05  # level of the test for changed shares
LEVEL_WITHOUT = 0.02  # the same without features: the means of fold models and the final model may differ
TREES = 50  # trees of the forest that predicts classes from the features
LEAST = 1e-3  # smallest probability of the forest
FIT_LEVEL = 0.01  # level of the test for a change that shares do not explain
FEWEST = 50  # effective held-out rows, (sum w)^2 / sum w^2, below which shares are not corrected
EACH = 10  # new rows for each class whose share is estimated
DRAWS = 200  # permutations, and bootstrap samples of the fit
RESAMPLES = 40  # bootstrap samples for the intervals
PRIOR = 2.0  # rows per class that the Dirichlet prior adds in the old shares
ALLOWED = 0.5  # relative excess of a distance of scores that the difference of fold and final models explains


class Reference(NamedTuple):
    """A sample of held-out rows: probabilities (n, C), labels (n,) or, if multilabel, (n, L), features (n, F)."""

    p: Floats
    y: Labels
    features: Floats | None = None

    @property
    def shares(self) -> Floats:
        """Share of each class or label."""
        if self.y.ndim == 2:
            return np.asarray(self.y.mean(axis=0))
        return np.bincount(self.y, minlength=self.p.shape[1]) / len(self.y)

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


@dataclass(frozen=True)
class Shift:
    """Result of the tests of class shares in new rows; `str` describes it in words.

    ``kind`` is "none" (no evidence of a change), "shares" (class shares changed, and no other change was found),
    "other" (something else changed: no adaptation) or "given" (shares given by the user). `shares` with `low` and
    `high` (95 %) are the estimate by EM, `cross_check` the estimate from the confusion matrix. `p_shares` is the
    p-value of "the mean probabilities did not change" (of a forest, where features are kept), `p_fit` that of "the new
    rows are a mixture of the held-out classes".
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
        """Whether decisions change: shares were given, or changed while nothing else did."""
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
    names = tuple(range(len(shares)) if classes is None else classes)
    before = tuple(reference.shares.tolist())
    return Shift("given", names, before, tuple(shares.tolist()), reason="Class shares as given.")


def find_shift(
    reference: Reference, probabilities: Any, features: Any = None, *, classes: Any = None,
    columns: Sequence[str] | None = None, intervals: bool = True, random_state: int = 0, tests: int = 1,
    explain: bool = True, forest: Sequence[Floats] | None = None,
) -> Shift:  # fmt: skip
    """Test whether new rows have different class shares than the held-out ones, and estimate them.

    1. A forest of the held-out rows predicts their classes out of bag, and those of the new rows. Held-out labels
       calibrate its probabilities, those of the model, and the product of both: q.
    2. Did the mean of the forest's probabilities change? A permutation test of Hotelling's T^2, at level 0.05. The
       forest is used because held-out probabilities of the model come from models of folds, whose means may differ
       from those of the final model where no share has changed. Where no features are kept, the probabilities of the
       model are tested at level 0.02.
    3. If so, the new shares by EM (Saerens 2002) on q, with a Dirichlet prior about the old ones, and by least squares
       from the confusion matrix of argmax (Lipton 2018) as a cross-check; intervals by the bootstrap.
    4. Are the new rows a mixture of the held-out classes in these shares? The largest Kolmogorov-Smirnov distance
       over the features (Wasserstein over the calibrated probabilities, where no features are kept) and their
       maximum mean discrepancy, against bootstrap samples of such a mixture. If a few held-out rows represent most
       of the new ones, or there are fewer than 10 new rows per class, this cannot be tested, and nothing is adapted.

    `columns` are the names of the features in messages; the level of the second step is divided by `tests`; without
    `explain`, the last step is left out where shares did not change; `forest` holds the forest's probabilities of the
    held-out and of the new rows, if they are known.

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
        raise ValueError(f"probabilities must have {size} columns, like the held-out ones, got {p_new.shape[1]}")
    if not total:
        raise ValueError("at least one new row is needed to detect a shift, got none")
    names = tuple(range(size) if classes is None else classes)
    before, ones = reference.shares, np.ones(len(reference.y))
    rows, random = _tested_rows(total, random_state), np.random.default_rng(random_state)
    old, new, view = reference.p, p_new[rows], None
    calibration = fit_calibration(old, reference.y, ones)
    q, q_new = calibration(old), calibration(new)
    p_shares = _changed_means(q, q_new, random)
    changed, disputed = p_shares < LEVEL_WITHOUT / tests, False
    if features is not None and reference.features is not None:
        view = np.asarray(features, dtype=np.float64)[rows]
        trees, trees_new = map(_bounded, forest or _forest(reference.features, np.eye(size)[reference.y], view))
        own = fit_calibration(trees, reference.y, ones)
        seen, seen_new = own(trees), own(trees_new)
        by_features = _changed_means(seen, seen_new, random)
        disputed = changed and by_features >= LEVEL / tests
        changed, p_shares = by_features < LEVEL / tests, p_shares if disputed else by_features
        if total <= ROWS:  # of more rows, all are worth more than a sample with the forest
            old, new = _bounded(np.sqrt(q * seen)), _bounded(np.sqrt(q_new * seen_new))
            calibration = fit_calibration(old, reference.y, ones)
            q, q_new = calibration(old), calibration(new)
    shares = class_shares(q_new if total <= ROWS else calibration(p_new), before)[0] if changed else before
    p_fit, worst = 1.0, ""
    if changed or explain:
        p_fit, worst = _fit(reference, q, q_new, view, before, shares, changed, columns, random)
    known: dict[str, Any] = {
        "classes": names, "before": tuple(before.tolist()), "shares": tuple(shares.tolist()), "rows": total,
        "p_shares": p_shares, "p_fit": p_fit,
    }  # fmt: skip
    if changed:
        known["cross_check"] = tuple(_from_confusion(reference, p_new).tolist())
        if intervals:
            low, high = _intervals(old, reference.y, new, before, shares, random)
            known |= {"low": tuple(low.tolist()), "high": tuple(high.tolist())}
    held = (shares / np.maximum(before, 1e-12))[reference.y]
    effective = float(held.sum() ** 2 / (held**2).sum())
    few = effective < min(FEWEST, len(held) / 2)
    kind: Kind = "shares" if changed else "none"
    if p_fit < FIT_LEVEL:
        kind = "other"
        reason = (
            f"The new rows are not a mixture of the held-out classes (p = {p_fit:.3g}; {worst}), so a change of class "
            "shares alone cannot be corrected: decisions stay the same. Label some new rows, or train again."
        )
    elif changed and (few or total < EACH * size):
        kind = "other"
        rests = f"{effective:.0f} held-out rows" if few else f"{total} new rows, fewer than {EACH} per class"
        reason = (
            f"Class shares seem to have changed, but their estimate rests on {rests}: decisions stay the same. "
            "Use more rows, or pass the shares as prevalence=."
        )
    elif changed:
        reason = f"Class shares changed (p = {p_shares:.2g} of equal means, {total} rows); no other change was found."
    elif disputed:
        reason = (
            f"The mean probabilities changed (p = {p_shares:.2g}, {total} rows), but the features do not confirm the "
            "implied class shares: decisions stay the same."
        )
    else:
        reason = f"No evidence that class shares changed (p = {p_shares:.3g}, {total} rows)."
    return Shift(kind, reason=reason, **known)


def find_label_shifts(
    reference: Reference, probabilities: Any, features: Any = None, *, classes: Any = None, **options: Any
) -> Shift:
    """`find_shift` for each label (n, L) as a binary problem; shares are those of the positives.

    A label keeps its share if it did not change, or if something else did. The level is divided by the number of
    labels.
    """
    p = as_probabilities(probabilities, "multilabel")
    names = tuple(range(p.shape[1]) if classes is None else classes)
    trees = None
    if features is not None and reference.features is not None and len(p):
        view = np.asarray(features, dtype=np.float64)[_tested_rows(len(p), options.get("random_state", 0))]
        trees = _forest(reference.features, reference.y.astype(np.float64), view)

    def of_label(k: int, **more: Any) -> Shift:
        own = Reference(np.stack([1 - reference.p[:, k], reference.p[:, k]], axis=1), reference.y[:, k], *reference[2:])
        both = None if trees is None else [np.stack([1 - part[:, k], part[:, k]], axis=1) for part in trees]
        return find_shift(own, p[:, k], features, tests=len(names), forest=both, **options, **more)

    found = [of_label(k, explain=False) for k in range(len(names))]
    kinds = [one.kind for one in found]
    whole = of_label(0) if set(kinds) == {"none"} else None  # do all columns together differ?
    kind: Kind = whole.kind if whole else "shares" if "shares" in kinds else "other"
    reasons = [f"Label {name}: {one.reason}" for name, one in zip(names, found, strict=True) if one.kind != "none"]
    p_shares = min(one.p_shares or 0.0 for one in found)
    if whole:
        unchanged = f"No evidence that the share of a label changed (smallest p = {p_shares:.3g}, {len(p)} rows)."
        reasons = [unchanged if whole.kind == "none" else whole.reason]
    return Shift(
        kind, names, tuple(one.before[1] for one in found),
        tuple(one.shares[1] if one.adapts else one.before[1] for one in found), p_shares=p_shares,
        p_fit=min(one.p_fit or 0.0 for one in ([whole] if whole else found)), rows=len(p), reason="\n".join(reasons),
    )  # fmt: skip


def reweighted(q: Floats, ratios: Floats) -> Floats:
    """q_k ratio_k, normalised: probabilities after a change of class shares.

    >>> reweighted(np.array([[0.5, 0.5]]), np.array([0.5, 1.5]))
    array([[0.25, 0.75]])
    """
    moved = q * ratios
    return np.asarray(moved / np.maximum(moved.sum(axis=1, keepdims=True), 1e-300))


def class_shares(q: Floats, before: Floats, times: Floats | None = None, rounds: int = 500) -> Floats:
    """Shares (B, C) that maximise sum_i times_bi log sum_k shares_k q_ik / before_k plus a Dirichlet prior, by EM.

    `times` (B, n) are the multiplicities of rows in B samples; None is one sample with every row once.
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
    """p-value of equal means, by permuting rows; Hotelling's T^2 with the covariance of all rows.

    Beyond all permutations the tail is that of chi^2.
    """
    pooled = np.concatenate([old, new])[:, 1:]
    pooled = pooled - pooled.mean(axis=0)
    covariance = pooled.T @ pooled / len(pooled)
    covariance += 1e-3 * np.diag(np.diag(covariance)) + 1e-12 * np.eye(len(covariance))
    whitened = pooled @ np.linalg.inv(np.linalg.cholesky(covariance)).T
    m = len(new)
    picks = np.stack([random.permutation(len(pooled))[:m] for _ in range(2 * DRAWS)])
    drawn = np.stack([whitened[pick].sum(axis=0) for pick in picks])
    seen = (whitened[len(old) :].sum(axis=0) ** 2).sum()
    beyond = int(((drawn**2).sum(axis=1) >= seen - 1e-12).sum())
    tail = float(chdtrc(whitened.shape[1], seen / (m * (1 - m / len(pooled))))) if not beyond else 1.0
    return min((1 + beyond) / (1 + 2 * DRAWS), tail)


def _from_confusion(reference: Reference, p_new: Floats) -> Floats:
    """Shares s that minimise |M s - d|^2: M[j, k] = P(argmax j | class k), d the shares of argmax in new rows."""
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
    old: Floats, labels: Labels, sample: Floats, before: Floats, shares: Floats, random: np.random.Generator
) -> tuple[Floats, Floats]:
    """95 % intervals on the logit scale: held-out rows (with their calibration) and new rows are both resampled."""
    found = []
    n, m = len(labels), len(sample)
    for _ in range(RESAMPLES):
        rows, new = random.integers(n, size=n), random.integers(m, size=m)
        y = labels[rows]
        if len(np.unique(y)) < len(before):
            continue
        calibration = fit_calibration(old[rows], y, np.ones(n))
        own = np.bincount(y, minlength=len(before)) / n
        found.append(class_shares(calibration(sample[new]), own, rounds=200)[0])
    centre, *draws = logit(np.array([shares, *found]), 1e-6)
    spread = 1.96 * np.std(draws, axis=0) if len(found) > 1 else np.full(len(before), np.inf)
    return expit(centre - spread), expit(centre + spread)


def _tested_rows(total: int, random_state: int) -> Labels:
    """New rows that are tested: all, or a random sample of `ROWS`."""
    if total <= ROWS:
        return np.arange(total)
    return np.sort(np.random.default_rng(random_state).choice(total, ROWS, replace=False))


def _bounded(p: Floats) -> Floats:
    """Rows of probabilities of at least `LEAST`, normalised."""
    p = np.maximum(p, LEAST)
    return np.asarray(p / p.sum(axis=1, keepdims=True))


def _forest(features: Floats, target: Floats, view: Floats) -> tuple[Floats, Floats]:
    """Predictions (n, C) of a forest: out of bag for its own rows, and for new rows."""
    from sklearn.ensemble import RandomForestRegressor

    n = len(features)
    ranks = _ranks(features, view)
    forest = RandomForestRegressor(TREES, min_samples_leaf=5, max_features="sqrt", oob_score=True, random_state=0)
    forest.fit(ranks[:n], target)
    return forest.oob_prediction_.reshape(target.shape), forest.predict(ranks[n:]).reshape(-1, target.shape[1])


def _fit(
    reference: Reference, q: Floats, new: Floats, view: Floats | None, before: Floats, shares: Floats, changed: bool,
    columns: Sequence[str] | None, random: np.random.Generator,
) -> tuple[float, str]:  # fmt: skip
    """p-value of "the new rows are held-out classes mixed in these shares", and the column that fits worst."""
    n, m, y = len(reference.y), len(new), reference.y
    if view is None or reference.features is None:
        old, others, distance, what = q, new, _area, "probability of class"
        names: Sequence[Any] = range(q.shape[1])
    else:
        old, others, distance, what = reference.features, view, _height, "feature"
        # A column with a single value in all but a few rows is uninformative, and its distances are too coarse to
        # compare.
        varied = [j for j in range(old.shape[1]) if _varied(old[:, j])]
        old, others = old[:, varied], others[:, varied]
        names = [j if columns is None else columns[j] for j in varied]
        if not varied:
            return 1.0, "no feature varies"
    waves = _waves(old, others, random)

    def apart(of: Floats, columns: Floats, signed: Floats) -> Floats:
        """Distances (B, columns + 1) of two weighted samples: by column, and of all columns together."""
        each = [distance(columns[:, j], signed) for j in range(columns.shape[1])]
        return np.stack([*each, np.sqrt(((signed @ of) ** 2).sum(axis=1))], axis=1)

    # Bootstrap: both samples are drawn from the held-out rows, the new one in the estimated shares, which are estimated
    # again.
    held = (shares / np.maximum(before, 1e-12))[y]
    old_times = random.multinomial(n, np.full(n, 1 / n), size=DRAWS).astype(np.float64)
    new_times = random.multinomial(m, held / held.sum(), size=DRAWS).astype(np.float64)
    own = class_shares(q, before, new_times, rounds=100) if changed else np.tile(before, (DRAWS, 1))
    weights = old_times * (own / np.maximum(before, 1e-12))[:, y]
    signed = weights / weights.sum(axis=1, keepdims=True) - new_times / m
    null = apart(waves[:n], old, signed)
    usual = np.maximum(np.quantile(null, 0.9, axis=0), 2 / m if distance is _height else 1e-3)
    signed = np.append(held / held.sum(), np.full(m, -1 / m))[None]
    found = apart(waves, np.concatenate([old, others]), signed)[0]
    worst = int((found / usual).argmax())
    most = float(found[worst] / usual[worst]) - (ALLOWED if distance is _area else 0.0)
    p_value = float((1 + ((null / usual).max(axis=1) >= most).sum()) / (1 + DRAWS))
    if worst == old.shape[1]:
        return p_value, f"the joint distribution of {what} columns differs"
    return p_value, f"{what} {names[worst]} differs most, by {found[worst]:.2g}"


def _ranks(old: Floats, new: Floats) -> Floats:
    """Both samples as ranks: per column, the share of old values that are at most as large."""
    both = zip(old.T, new.T, strict=True)
    return np.stack([np.searchsorted(np.sort(a), np.append(a, b), side="right") / len(a) for a, b in both], axis=1)


def _waves(old: Floats, new: Floats, random: np.random.Generator, size: int = 256) -> Floats:
    """Random Fourier features (Rahimi 2007) of the ranks: their means differ where joint distributions do.

    The distance of the means is the maximum mean discrepancy with a Gaussian kernel of the median width.
    """
    z = _ranks(old, new)
    pairs = random.integers(len(z), size=(2, 1000))
    squared = float(np.median(((z[pairs[0]] - z[pairs[1]]) ** 2).sum(axis=1)))
    frequencies = random.normal(size=(z.shape[1], size)) * np.sqrt(2 / max(squared, 1e-12))
    return np.asarray(np.sqrt(2 / size) * np.cos(z @ frequencies + random.uniform(0, 2 * np.pi, size)))


def _varied(column: Floats) -> bool:
    """Whether at least 5 % of the rows differ from the most frequent value."""
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

    For probabilities: folds shift many small ones slightly, which the largest difference would overstate.
    """
    values, sums = _signed_sums(column, signed)
    return np.asarray(np.abs(sums[:, :-1]) @ np.diff(values))
