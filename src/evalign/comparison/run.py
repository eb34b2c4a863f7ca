"""Compare contenders over splits: choices are made on the development part, test rows are read once, at the end."""

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.calibration import calibration_curve
from sklearn.metrics import precision_recall_curve
from sklearn.utils import _safe_indexing

from evalign import metrics
from evalign.comparison.contenders import OURS, Contender, HeldOut
from evalign.comparison.goals import INFEASIBLE, Aim, Judge
from evalign.decision import Rule
from evalign.estimators.base import MetricClassifier
from evalign.tables.split import Codes, Floats, indicator, rarest_label, split_rows
from evalign.training.loop import Epoch

TITLES = {"argmax": "argmax", "tuned": "tuned", "plug_in": "plug-in", "auto": "calibrated"}


@dataclass(frozen=True)
class Row:
    """One contender with one decision rule on one split's test rows."""

    contender: str
    title: str
    decision: str
    split: int
    score: float
    limits: dict[str, float]  # values that the constraints limit
    confusion: NDArray[np.int64]
    seconds: float
    feasible: bool  # whether held-out rows meet the constraints


@dataclass
class FittedContender:
    """One contender, fitted once, with its decision rules and their predictions of the test rows."""

    contender: Contender
    estimator: Any
    rules: dict[str, Rule]
    probabilities: Floats  # of the test rows, in the judge's order
    predictions: dict[str, Codes]
    truth: Codes
    seconds: float
    paid: dict[str, Floats] = field(default_factory=dict)  # cost of each test row, if there are costs

    def rows(self, judge: Judge, split: int = 0) -> list[Row]:
        """A row for every decision."""
        rows = []
        for name, predicted in self.predictions.items():
            matrix = judge.confusion(self.truth, predicted)
            score = -float(self.paid[name].mean()) if self.paid else judge.score(matrix)
            who, limits, feasible = self.contender, judge.limits(matrix), self.rules[name].feasible
            rows.append(Row(who.name, who.title, name, split, score, limits, matrix, self.seconds, feasible))
        return rows

    def precision_recall(self, judge: Judge, points: int) -> dict[str, Any] | None:
        """The curve of two classes on the test rows, with the points of the rules; None if a class has no row."""
        if not 0 < self.truth.sum() < len(self.truth):
            return None
        precision, recall, _ = precision_recall_curve(self.truth, self.probabilities[:, 1], drop_intermediate=True)
        keep = _spaced(len(recall), points)
        counts = {name: judge.counts(judge.confusion(self.truth, one)) for name, one in self.predictions.items()}
        stands = {name: [metrics.recall(c, "binary"), metrics.precision(c, "binary")] for name, c in counts.items()}
        return {
            "contender": self.contender.name,
            "title": self.contender.title,
            "recall": recall[::-1][keep].round(5).tolist(),
            "precision": precision[::-1][keep].round(5).tolist(),
            "points": {name: [float(value) for value in pair] for name, pair in stands.items()},
        }

    def calibration(self, bins: int = 10) -> dict[str, Any]:
        """Observed share against predicted probability of the positive class, on the test rows."""
        p = self.probabilities[:, 1].clip(0, 1)
        observed, predicted = calibration_curve(self.truth, p, n_bins=bins, strategy="quantile", pos_label=1)
        name, title = self.contender.name, self.contender.title
        return {"contender": name, "title": title, "observed": observed.tolist(), "predicted": predicted.tolist()}

    def operating_points(self, decision: str, points: int) -> dict[str, Any] | None:
        """Counts at every threshold of two classes, on the rows that training held out; None if none are kept.

        A decision that depends on the costs of each row has no threshold.
        """
        held_out = getattr(self.estimator, "held_out_predictions_", None)
        if held_out is None or self.rules[decision].kind == "row_costs":
            return None
        p, y, weight = held_out.probabilities[:, 1], held_out.labels, held_out.weight
        order = np.argsort(-p, kind="stable")
        ends = np.flatnonzero(np.diff(p[order], append=-np.inf))  # last row of each run of equal probabilities
        ends = ends[_spaced(len(ends), points)]
        tp, fp = (np.cumsum((weight * (y == label))[order])[ends] for label in (1, 0))
        flagged = self.rules[decision].predict(held_out.probabilities) == 1
        lowest = p[flagged].min() if flagged.any() else np.inf
        return {
            "title": line_title(self.contender.title, decision),
            "rows": len(p),
            "thresholds": p[order][ends].tolist(),
            "tp": tp.tolist(),
            "fp": fp.tolist(),
            "positives": float(weight[y == 1].sum()),
            "negatives": float(weight[y == 0].sum()),
            "chosen": int(np.searchsorted(-p[order][ends], -lowest, side="right").clip(1) - 1),
        }


def line_title(title: str, decision: str) -> str:
    return title if title.startswith("majority") else f"{title} + {TITLES.get(decision, decision)}"


def _spaced(size: int, points: int) -> Codes:
    """At most `points` evenly spaced positions of a list, including both ends."""
    return np.unique(np.linspace(0, size - 1, min(size, points)).round().astype(np.int64))


@dataclass
class Comparison:
    """All rows; the trials of the first split in full, for plots."""

    judge: Judge
    rows: list[Row] = field(default_factory=list)
    trials: list[FittedContender] = field(default_factory=list)
    splits: int = 0
    interrupted: bool = False
    test_share: float = 0.2  # of the rows of a split

    def add(self, trials: Sequence[FittedContender]) -> None:
        """Take the trials of one more split."""
        for trial in trials:
            self.rows += trial.rows(self.judge, self.splits)
        self.trials = self.trials or list(trials)
        self.splits += 1


@dataclass(frozen=True)
class Table:
    """Features and labels; `take` picks rows."""

    X: Any
    y: Any  # labels (n,), or a data frame with a column of 0 and 1 for each label

    def take(self, rows: NDArray[np.int64]) -> "Table":
        return Table(_safe_indexing(self.X, rows), _safe_indexing(self.y, rows))

    def __len__(self) -> int:
        return len(self.y)


def split(table: Table, test_size: float, seed: int) -> tuple[Table, Table]:
    """Development and test part, stratified; every class keeps at least one row for development."""
    several = np.ndim(table.y) == 2
    codes = rarest_label(indicator(table.y)) if several else np.unique(table.y, return_inverse=True)[1].astype(np.int64)
    development, test = split_rows(codes, test_size, seed)
    if not len(test):
        most = int(np.bincount(codes).max())
        raise ValueError(
            f"holding out {test_size:g} of each class, the largest of {most} rows, leaves no test rows; add rows, or "
            "test on another file"
        )
    return table.take(development), table.take(test)


@contextmanager
def warnings_of_ours(contender: Contender) -> Iterator[None]:
    """Silence warnings of constraints that a rival misses; the table shows them."""
    with warnings.catch_warnings():
        if not contender.name.startswith(OURS):
            warnings.filterwarnings("ignore", INFEASIBLE)
        yield


def evaluate(
    contender: Contender,
    development: Table,
    test: Table,
    judge: Judge,
    *,
    seed: int,
    on_epoch: Callable[[Epoch], None] | None = None,
) -> FittedContender:
    """Fit, learn every decision rule on the rows held out of development, and only then look at the test rows.

    If `on_epoch` has a method `follow`, that is called first, with the estimator.
    """
    started = time.perf_counter()
    estimator = contender.make(seed)
    if on_epoch is not None and hasattr(on_epoch, "follow"):
        on_epoch.follow(estimator)
    if not isinstance(estimator, MetricClassifier):
        estimator = HeldOut(estimator=estimator, random_state=seed)
    rival = isinstance(estimator, HeldOut)
    if rival:  # so that the same rows are held out as for a network
        estimator.set_params(pos_label=judge.positive)
    with warnings_of_ours(contender):
        estimator.fit(development.X, development.y, on_epoch=on_epoch)
    held_out = estimator.held_out_predictions_
    rules = {name: judge.rule(name, held_out, development.X) for name in judge.decisions(contender.decisions)}
    if not rival and estimator.decision in rules:
        rules[estimator.decision] = estimator.decision_
    seconds = time.perf_counter() - started
    p = np.ascontiguousarray(estimator.predict_proba(test.X)[:, judge.order])
    return judged(contender, estimator, rules, p, judge.codes(test.y), seconds, judge, test.X)


def judged(
    contender: Contender, estimator: Any, rules: dict[str, Rule], p: Floats, truth: Codes, seconds: float, judge: Judge,
    X: Any = None,
) -> FittedContender:  # fmt: skip
    """The trial of a fitted estimator whose test rows X have the probabilities p, classes in the judge's order."""
    predictions = {name: judge.decide(rule, p, X) for name, rule in rules.items()}
    paid = {}
    if judge.costs is not None:
        table = judge.cost_table(X)
        paid = {name: judge.paid(truth, decided, table) for name, decided in predictions.items()}
    return FittedContender(contender, estimator, rules, p, predictions, truth, seconds, paid)


def compare(
    X: Any,
    y: Any,
    contenders: Sequence[Contender] | Callable[[Judge], Sequence[Contender]],
    aim: Aim | Judge,
    *,
    splits: int = 5,
    test_size: float = 0.2,
    test: tuple[Any, NDArray[Any]] | None = None,
    seed: int = 0,
    on_step: Callable[[str, int], Callable[[Epoch], None] | None] = lambda title, split: None,
    interrupted: Callable[[], bool] = lambda: False,
) -> Comparison:
    """Every contender on every split.

    With `test` given, the test rows are the same in every split, and splits differ only in the seed. `on_step` is
    called with the contender and the split, and returns a callback for every epoch. Ctrl-C ends the comparison with the
    splits that are complete; `interrupted` is True if Ctrl-C ended a training early.

    >>> from sklearn.datasets import load_iris
    >>> from evalign.comparison import contenders
    >>> result = compare(*load_iris(return_X_y=True), [contenders.MAJORITY], Aim("accuracy"))
    >>> [round(row.score, 3) for row in result.rows]
    [0.333, 0.333, 0.333, 0.333, 0.333]
    """
    judge = aim if isinstance(aim, Judge) else Judge(aim, y)
    listed = contenders(judge) if callable(contenders) else contenders
    table, comparison = Table(X, y if judge.multilabel else np.asarray(y)), Comparison(judge)
    for number in range(splits):
        parts = split(table, test_size, seed + number) if test is None else (table, Table(*test))
        comparison.test_share = len(parts[1]) / (len(parts[0]) + len(parts[1]))
        trials: list[FittedContender] = []
        try:
            for contender in listed:
                on_epoch = on_step(contender.title, number)
                trials.append(evaluate(contender, *parts, judge, seed=seed + number, on_epoch=on_epoch))
                if interrupted():
                    raise KeyboardInterrupt
        except KeyboardInterrupt:
            comparison.interrupted = True
            if not comparison.splits:
                raise
            break
        comparison.add(trials)
    return comparison
