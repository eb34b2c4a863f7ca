"""Parameters, decision rules, costs, reports and `adapt` shared by `MetricDecision` and every classifier."""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any, Self

import numpy as np
import pandas as pd
import torch
from numpy.typing import ArrayLike, NDArray
from sklearn.utils.validation import check_is_fitted, column_or_1d

from evalign import checks, metrics
from evalign.confusion import Confusion
from evalign.decision.calibration import fit_calibration, sampled_rows
from evalign.decision.certified import check_confidence
from evalign.decision.constraints import class_index, parse_constraints
from evalign.decision.costs import COST, Costs, cheapest, cost_metric, mean_cost
from evalign.decision.learned import DECISIONS, Decision, joint_rule, learn_rule
from evalign.decision.plug_in import plug_in
from evalign.decision.rule import REJECTED, Floats, Labels, Rule, logit
from evalign.decision.rule_report import RuleReport, evaluate_rule
from evalign.decision.search.problem import Problem, class_betas
from evalign.decision.shift import Reference, Shift, find_label_shifts, find_shift, given_shares, reweighted
from evalign.metrics import Average, MetricFunction
from evalign.tables.split import indicator

FEWEST = 50  # rows of a joint prediction below which class shares are not tested
COLUMNS = 64  # maximum number of feature columns kept
CATEGORIES = 8  # maximum number of categories kept per text column


@dataclass(frozen=True)
class FeatureView:
    """Numeric columns of a table for comparing distributions; text becomes an indicator per frequent category."""

    columns: tuple[tuple[int, str | None], ...]  # (position, category); None is the number itself

    @classmethod
    def of(cls, X: Any) -> "FeatureView | None":
        """View of the columns of a table or array; None for a sparse matrix."""
        if hasattr(X, "tocsr") or np.ndim(X) != 2:
            return None
        table = pd.DataFrame(X)
        found: list[tuple[int, str | None]] = []
        for j in range(table.shape[1]):
            column = table.iloc[:, j]
            if _is_number(column):
                found.append((j, None))
            else:
                found += [(j, str(name)) for name in column.astype(str).value_counts().index[:CATEGORIES]]
        step = max(1, -(-len(found) // COLUMNS))
        return cls(tuple(found[::step]))

    def __call__(self, X: Any) -> Floats:
        """Columns (n, F); missing numbers are below all others."""
        table = pd.DataFrame(X)
        made = []
        for j, category in self.columns:
            column = table.iloc[:, j]
            if category is not None:
                made.append((column.astype(str) == category).to_numpy(np.float64))
            else:
                values = pd.to_numeric(column, errors="coerce").to_numpy(np.float64, na_value=np.nan)
                made.append(np.nan_to_num(values, nan=-1e300, posinf=1e300, neginf=-1e299))
        return np.stack(made, axis=1) if made else np.zeros((len(table), 0))

    def names(self, table: Any) -> list[str]:
        """Names of the view's columns, from those of the table or from their positions."""
        own = [str(j if table is None else table[j]) for j, _ in self.columns]
        return [n if c is None else f"{n} = {c}" for n, (_, c) in zip(own, self.columns, strict=True)]


def _is_number(column: "pd.Series[Any]") -> bool:
    if pd.api.types.is_numeric_dtype(column) or pd.api.types.is_bool_dtype(column):
        return True
    return column.dtype == object and bool(pd.to_numeric(column.dropna(), errors="coerce").notna().all())


def _rows_in_shares(y: Labels, shares: Floats) -> Labels:
    """The largest set of rows with these class shares, each row once."""
    counts = np.bincount(y, minlength=len(shares))
    size = (counts[shares > 0] / shares[shares > 0]).min()
    random = np.random.default_rng(0)
    wanted = np.floor(size * shares + 1e-9).astype(int)
    parts = [random.permutation(np.flatnonzero(y == k))[:number] for k, number in enumerate(wanted)]
    return np.sort(np.concatenate(parts))


@dataclass(kw_only=True, eq=False, repr=False)
class DecisionParameters:
    """Parameters that `MetricDecision` and every classifier of evalign have besides `metric`.

    average: None means "binary" for two classes and "macro" for more.
    beta: for metric "fbeta": one number, one per class, or a mapping from label to number (1 for the others).
    pos_label: the positive one of two classes; None means the second of `classes_`.
    decision: "auto" (`decision.calibrated`: calibrate on held-out labels, then plug in), "plug_in" (trusts the
        probabilities), "tuned" (maximises the metric on held-out labels) or "argmax".
    subject_to: constraints such as "recall >= 0.9", "recall['fraud'] >= 90%", "flagged <= 2%", "flagged <= 200"
        (rows of each call of `predict`), or a list of them.
    confidence: None meets constraints on held-out rows only; 0.9 certifies them for new rows with probability 0.9.
    costs: for metric "cost": a matrix by true and decided class in the order of `classes_`, or a mapping with keys
        "fp", "fn", "tp", "tn" or (true, decided) labels, whose values are numbers or columns of X; "reject" is the
        cost of rejecting a row, whose label is then -1, or None if labels are text or include -1.
    random_state: random seed.
    """

    average: Average | None = None
    beta: float | Sequence[float] | Mapping[Any, float] | None = None
    pos_label: Any = None
    decision: Decision = "auto"
    subject_to: Any = None
    confidence: float | None = None
    costs: Any = None
    random_state: Any = None


class Deciding(DecisionParameters):
    """A classifier that decides by a `Rule` learned from held-out predictions, and adapts it to other class shares."""

    metric: str | MetricFunction
    classes_: NDArray[Any]
    decision_: Rule
    multilabel_ = False
    reference_: Reference
    view_: FeatureView | None
    shift_: Shift

    @abstractmethod
    def _decision_probabilities(self, X: Any) -> Floats:
        """Probabilities with classes in the order of the rule."""

    def _check_decision(self) -> None:
        if not callable(self.metric) and self.metric != COST:
            checks.check_choice("metric", self.metric, metrics.METRICS)
        checks.check_choice("decision", self.decision, DECISIONS)
        if self.decision == "argmax" and self.subject_to is not None:
            raise ValueError("decision 'argmax' cannot meet constraints; subject_to needs 'auto', 'plug_in' or 'tuned'")
        if self.confidence is not None and self.subject_to is None:
            raise ValueError(f"confidence requires subject_to, got confidence={self.confidence!r} without a constraint")
        if (self.metric == COST) != (self.costs is not None):
            raise ValueError("metric 'cost' and costs require each other: metric='cost', costs=[[0, 1], [5, 0]]")

    # -- classes ------------------------------------------------------------------------------------------------

    @property
    def class_order(self) -> Labels:
        """Position of each class in decision rules, where the positive one of two is second. It is its own inverse."""
        order = np.arange(len(self.classes_))
        if self.pos_label is None:
            return order
        if len(order) != 2:
            raise ValueError(f"pos_label requires two classes, got {len(order)}; leave it out")
        if self.pos_label not in self.classes_.tolist():
            raise ValueError(f"pos_label must be one of {self.classes_.tolist()}, got {self.pos_label!r}")
        return order if self.classes_[1] == self.pos_label else order[::-1].copy()

    def _decision_classes(self) -> NDArray[Any]:
        """Classes in the order of the rule."""
        return self.classes_[self.class_order]

    def _labels(self, decisions: Labels) -> NDArray[Any]:
        """Labels of a rule's decisions; 0/1 (n, L) if multilabel."""
        if self.multilabel_:
            return decisions
        labels = np.asarray(self._decision_classes()[decisions])
        rejected = decisions == REJECTED
        if rejected.any():
            own = labels.dtype.kind in "if" and REJECTED not in self.classes_  # -1 may be a class
            labels = labels.copy() if own else labels.astype(object)
            labels[rejected] = None if labels.dtype == object else REJECTED
        return labels

    @property
    def _average(self) -> Average:
        return self.average or ("binary" if len(self.classes_) <= 2 and not self.multilabel_ else "macro")

    @property
    def _beta(self) -> float | list[float] | None:
        return class_betas(self.beta, self._decision_classes().tolist(), self.class_order)

    def _costs(self) -> Costs:
        """Costs with classes in the order of the rule; a matrix is given in the order of `classes_`."""
        names = self._decision_classes().tolist()
        if isinstance(self.costs, Mapping):
            return Costs.of(self.costs, names)
        order = self.class_order
        return Costs.of(Costs.of(self.costs, names).matrix()[np.ix_(order, order)], names)

    # -- rules --------------------------------------------------------------------------------------------------

    def _rule_options(self) -> dict[str, Any]:
        """Options of every rule; constraints name classes by index."""
        names, limits = self._decision_classes().tolist(), self.subject_to
        return {
            "metric": self.metric if self.costs is None else cost_metric(self._costs().matrix()),
            "average": self._average, "beta": self._beta, "task": "multilabel" if self.multilabel_ else "multiclass",
            "subject_to": None if limits is None else parse_constraints(limits, names) or None,
        }  # fmt: skip

    def _forget(self) -> None:
        """Delete attributes of an earlier fit that the next one may not set."""
        for name in ("reference_", "shift_", "cost_matrix_", "feature_names_in_"):
            self.__dict__.pop(name, None)

    def _check_goal(self) -> None:
        """Refuse constraints and options that do not fit the classes, before any training."""
        if self.costs is not None:
            own = self._costs()
            if self.subject_to is None:
                return
            if own.per_row or own.reject is not None:
                raise ValueError("constraints require costs that are equal for all rows, without rejection")
        options = self._rule_options()
        problem = Problem.of(p=np.zeros((1, len(self.classes_))), **options)
        if self.confidence is not None:
            check_confidence(problem, np.ones(1), self.confidence)

    def _learned_rule(self, p: Floats, labels: Labels, weight: Floats | None, row_costs: Floats | None = None) -> Rule:
        """Rule learned from held-out rows as `decision` specifies; `row_costs` (n, C, C) if costs are columns."""
        if self.costs is not None and self.subject_to is None:
            own = self._costs()
            table = own.matrix() if row_costs is None else row_costs
            return cheapest(p, labels, table, reject=own.reject, sample_weight=weight)
        options = self._rule_options()
        rule = learn_rule(self.decision, p, labels, confidence=self.confidence, sample_weight=weight, **options)
        return rule if self.costs is None else replace(rule, value=-(rule.value or 0.0))  # maximised: minus the cost

    def _plug_in(self, p: Floats, weight: Floats | None = None) -> Rule:
        """The plug-in rule of calibrated probabilities."""
        # Keep argmax unless the expected gain exceeds one row.
        options = self._rule_options() | {"subject_to": None}
        return plug_in(p, sample_weight=weight, margin=1 / max(len(p), 1), **options)

    def _joint_plug_in(self, p: Floats) -> Rule:
        """The rule of a batch without a change of shares."""
        return joint_rule(self.decision_, p, **self._rule_options())

    def _decided(self, p: Floats, X: Any, rule: Rule | None = None) -> Labels:
        """Decisions by a rule, `decision_` by default; columns of X may hold the costs of each row."""
        rule = rule or self.decision_
        return rule.predict(p, costs=self._costs().rows(X) if rule.kind == "row_costs" else None)

    def _score_codes(
        self, decisions: Labels, truth: Labels, weight: Floats | None = None, row_costs: Floats | None = None
    ) -> float:
        """The metric of decisions, classes numbered as in the rule; for "cost", minus the mean cost."""
        if self.costs is not None:
            own, ones = self._costs(), np.ones(len(truth))
            table = own.matrix() if row_costs is None else row_costs
            return -mean_cost(decisions, truth, table, ones if weight is None else weight, own.reject)
        predicted, target = torch.from_numpy(decisions), torch.from_numpy(truth)
        weights = None if weight is None else torch.from_numpy(weight)
        size = len(self.classes_) if self.multilabel_ else max(2, len(self.classes_))
        c = Confusion.hard(predicted, target, size, sample_weight=weights, multilabel=self.multilabel_)
        return float(metrics.resolve(self.metric, average=self._average, beta=self._beta)(c))

    def score_labels(
        self, predicted: NDArray[Any], y: ArrayLike, sample_weight: ArrayLike | None = None, X: Any = None
    ) -> float:
        """The metric of predicted labels against the true labels `y`; `X` is needed if its columns hold costs."""
        weight = None if sample_weight is None else np.asarray(sample_weight, dtype=np.float64)
        if self.multilabel_:
            return self._score_codes(np.asarray(predicted), self._codes(y), weight)
        order = {label: i for i, label in enumerate(self._decision_classes().tolist())}
        decided = np.array([order.get(label, REJECTED) for label in predicted.tolist()])
        table = self._costs().rows(X) if self.costs is not None and self._costs().per_row else None
        return self._score_codes(decided, self._codes(y), weight, table)

    def _codes(self, y: ArrayLike) -> Labels:
        """Labels as class numbers of the rule; 0/1 (n, L) if multilabel."""
        if self.multilabel_:
            return np.asarray(indicator(y), dtype=np.int64)
        order = {label: i for i, label in enumerate(self._decision_classes().tolist())}
        truth = column_or_1d(y).tolist()
        if unknown := set(truth) - set(order):
            raise ValueError(f"y must hold labels seen in training, got {sorted(map(str, unknown))[:5]}")
        return np.array([order[label] for label in truth], dtype=np.int64)

    def report(self, X: Any, y: ArrayLike) -> RuleReport:
        """Threshold, metric and constraints on labelled rows, with 95 % intervals; see `decision.evaluate_rule`.

        Use rows that `fit` has not seen. Printing gives text; `.html()` is a page, with a plot for two classes.
        """
        p, truth = self._decision_probabilities(X), self._codes(y)
        options = self._rule_options() if self.decision_.kind != "row_costs" else {"costs": self._costs().rows(X)}
        options.pop("task", None)
        found = evaluate_rule(self.decision_, p, truth, **options)
        return replace(found, positive=f"class {self._decision_classes()[-1]}")

    # -- other class shares -------------------------------------------------------------------------------------

    def adapt(self, X: Any = None, *, prevalence: Mapping[Any, float] | None = None) -> Self:
        """A copy that decides for other class shares: those found in new rows `X`, or given ones.

        With `X`, decisions change only if tests find that class shares, and nothing else, have changed; `shift_` holds
        the result and the reason (`print(adapted.shift_)`). `prevalence` maps labels to shares; the other classes keep
        their relative proportions. Labels of a multilabel `y` are tested separately, and keep their threshold if
        their share did not change. Probabilities never change.

        >>> import numpy as np
        >>> from sklearn.linear_model import LogisticRegression
        >>> from evalign import MetricDecision
        >>> rng = np.random.default_rng(0)
        >>> y = (rng.random(2000) < 0.1).astype(int)
        >>> X = rng.normal(size=(2000, 2)) + 2 * y[:, None]
        >>> model = MetricDecision(LogisticRegression(), "f1").fit(X, y)
        >>> later = (rng.random(500) < 0.5).astype(int)
        >>> adapted = model.adapt(rng.normal(size=(500, 2)) + 2 * later[:, None])
        >>> adapted.shift_.kind, round(adapted.shift_.shares[1], 1)
        ('shares', 0.5)
        >>> known = model.adapt(prevalence={1: 0.02})
        >>> bool((known.predict(X) == 1).sum() < (model.predict(X) == 1).sum())
        True
        """
        check_is_fitted(self)
        if not hasattr(self, "reference_"):
            raise ValueError(
                f"this {type(self).__name__} kept no held-out rows (decision='argmax'), so it cannot adapt; "
                "fit it again with decision='auto'"
            )
        if X is None and (prevalence is None or self.multilabel_):
            given = "neither" if prevalence is None else "prevalence alone, for a multilabel y"
            raise ValueError(f"adapt needs rows X, or prevalence={{label: share}} for a single-label y, got {given}")
        if self.multilabel_ and self.subject_to is not None:
            raise ValueError("constraints on multilabel y cannot be adapted; fit again on rows with the new shares")
        p = None if X is None else self._decision_probabilities(X)
        if prevalence is not None:
            shift = given_shares(self.reference_, self._shares(prevalence), self._decision_classes().tolist())
        else:
            shift = self._find_shift(p, X, intervals=True)
        adapted = copy(self)
        adapted.shift_ = shift
        if shift.adapts:
            adapted.decision_ = self._adapted_rule(shift, p)
        return adapted

    def _find_shift(self, p: Any, X: Any, *, intervals: bool) -> Shift:
        known = getattr(self, "feature_names_in_", None)
        if known is not None and hasattr(X, "columns") and list(X.columns) != list(known):
            X = X[list(known)]
        features = None if self.view_ is None or X is None else self.view_(X)
        columns = None if self.view_ is None else self.view_.names(known)
        names = self._decision_classes().tolist()
        find = find_label_shifts if self.multilabel_ else find_shift
        return find(self.reference_, p, features, classes=names, columns=columns, intervals=intervals)

    def _joint_rule(self, p: Floats, X: Any) -> Rule:
        """The plug-in rule of these rows, adapted to changed shares if there is evidence of a change."""
        if hasattr(self, "reference_") and len(p) >= FEWEST and not (self.multilabel_ and self.subject_to is not None):
            shift = self._find_shift(p, X, intervals=False)
            if shift.adapts:
                return self._adapted_rule(shift, p)
        return self._joint_plug_in(p)

    def _adapted_rule(self, shift: Shift, p: Floats | None) -> Rule:
        if self.multilabel_:
            return self._adapted_labels(shift, p)
        reference, ratios = self.reference_, shift.ratios
        if self.costs is not None and self.subject_to is None:  # lowest expected cost: only probabilities change
            before = np.zeros(len(ratios)) if self.decision_.offsets is None else np.asarray(self.decision_.offsets)
            return replace(self.decision_, offsets=tuple(before + np.log(np.maximum(ratios, 1e-12))))
        calibration = fit_calibration(reference.p, reference.y, np.ones(len(reference.y)))
        if p is None or self.subject_to is not None:
            # Constraints need labels: those of the held-out rows, weighted by the change of their class share.
            q, y, weight = reweighted(calibration(reference.p), ratios), reference.y, ratios[reference.y]
            if self.confidence is not None:  # certificates need rows of equal weight
                rows = _rows_in_shares(y, np.asarray(shift.shares))
                q, y, weight = q[rows], y[rows], np.ones(len(rows))
            rule = self._learned_rule(q, y, weight)
        else:
            rule = self._plug_in(reweighted(calibration(p), ratios))
        # The rule may calibrate q once more: (z / T + o) / T' + o' = z / (T T') + o / T' + o'.
        first = np.asarray(calibration.offsets) + np.log(np.maximum(ratios, 1e-12))
        second = np.zeros(len(first)) if rule.offsets is None else np.asarray(rule.offsets)
        return replace(
            rule,
            temperature=float(np.multiply(calibration.temperature, rule.temperature)),
            offsets=tuple((first / np.asarray(rule.temperature) + second).tolist()),
            floor=calibration.floor,
        )

    def _adapted_labels(self, shift: Shift, p: Floats | None) -> Rule:
        """The plug-in thresholds of labels whose shares changed, and the previous ones of the others."""
        assert p is not None
        reference, before = self.reference_, self.decision_
        calibration = fit_calibration(reference.p, reference.y, np.ones(len(reference.y)), multilabel=True)
        moved = logit(np.asarray(shift.shares)) - logit(np.asarray(shift.before))
        calibration = replace(calibration, offsets=tuple(calibration.offsets + moved))
        rule = replace(self._plug_in(calibration(p)), **calibration.fields)
        kept: dict[str, Any] = {}
        for name in ("thresholds", "temperature", "offsets"):
            own = getattr(before, name)
            kept[name] = tuple(np.where(moved == 0, 0.0 if own is None else own, getattr(rule, name)).tolist())
        return replace(rule, **kept)

    def _shares(self, prevalence: Mapping[Any, float]) -> Floats:
        if not isinstance(prevalence, Mapping):
            raise TypeError(
                f"prevalence must map labels to shares, like {{'fraud': 0.02}}, got {type(prevalence).__name__}"
            )
        names = self._decision_classes().tolist()
        numbers = {k: float(v) if isinstance(v, Real) else float("nan") for k, v in prevalence.items()}
        given = {class_index(label, names, "label of prevalence"): share for label, share in numbers.items()}
        left = 1 - (max if self.multilabel_ else sum)(given.values())
        others = [k for k in range(len(names)) if k not in given]
        valid = all(share >= 0 for share in given.values()) and left >= -1e-9  # False for nan, too
        if not valid or (not others and abs(left) > 1e-6):
            most = "at most " if others else ""
            raise ValueError(f"shares must be at least 0 and add up to {most}1, got {prevalence}")
        shares = self.reference_.shares
        if not self.multilabel_:
            shares[others] *= max(left, 0.0) / max(shares[others].sum(), 1e-12)
        shares[list(given)] = list(given.values())
        return shares

    def _keep_reference(
        self, p: Floats, labels: Labels, weight: Floats | None, take: Callable[[Labels], Any] | None = None
    ) -> None:
        """Keep a sample of held-out rows; `take` returns the features of given ones."""
        rows = sampled_rows(p, np.ones(len(p)) if weight is None else weight)
        X = None if take is None else take(rows)
        self.view_ = None if X is None else FeatureView.of(X)
        self.reference_ = Reference(p[rows], labels[rows], None if self.view_ is None else self.view_(X))

    def _reference_content(self) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
        """The kept rows as arrays; their columns and the shift found in JSON's types; nothing if there are none."""
        if not hasattr(self, "reference_"):
            return {}, {}
        p, y, features = self.reference_
        arrays = {"reference.p": p, "reference.y": y}
        if features is not None and self.view_ is not None:
            arrays["reference.features"] = features
        view = None if self.view_ is None else [list(column) for column in self.view_.columns]
        return arrays, {"view": view, "shift": self.shift_.to_json() if hasattr(self, "shift_") else None}

    def _set_reference(self, arrays: Mapping[str, Any], fitted: Mapping[str, Any]) -> None:
        """Restore what `_reference_content` returned."""
        if "reference.p" not in arrays:
            return
        p, y = np.asarray(arrays["reference.p"]), np.asarray(arrays["reference.y"])
        columns, features = fitted.get("view"), arrays.get("reference.features")
        self.view_ = None if columns is None else FeatureView(tuple((j, category) for j, category in columns))
        self.reference_ = Reference(p, y, None if features is None else np.asarray(features))
        if (found := fitted.get("shift")) is not None:
            known = {name: tuple(value) if isinstance(value, list) else value for name, value in found.items()}
            self.shift_ = Shift(**known | {"classes": tuple(self._decision_classes().tolist())})
