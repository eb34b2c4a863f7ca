"""Compare contenders over splits: every choice on the development part, test rows read once, at the end."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from evalign import metrics
from evalign.comparison.aims import Aim, Judge
from evalign.comparison.contenders import Contender, HeldOut, StockBooster
from evalign.confusion import Confusion
from evalign.decision import Rule
from evalign.estimators.base import MetricClassifier
from evalign.estimators.rows import Codes, Floats
from evalign.tables.split import split_rows
from evalign.training.loop import Epoch


@dataclass(frozen=True)
class Row:
    """One contender with one decision rule on one split's test rows."""

    contender: str
    title: str
    decision: str
    split: int
    score: float
    limits: dict[str, float]  # what the constraints are about
    confusion: NDArray[np.int64]
    seconds: float


@dataclass
class Trial:
    """One contender, fitted once, with its decision rules and what they made of the test rows."""

    contender: Contender
    estimator: Any
    rules: dict[str, Rule]
    probabilities: Floats  # of the test rows, in the judge's order
    predictions: dict[str, Codes]
    truth: Codes
    seconds: float

    def rows(self, judge: Judge, split: int = 0) -> list[Row]:
        """A row for every decision."""
        rows = []
        for name, predicted in self.predictions.items():
            matrix = judge.confusion(self.truth, predicted)
            rows.append(
                Row(
                    self.contender.name, self.contender.title, name, split, judge.score(matrix), judge.limits(matrix),
                    matrix, self.seconds,
                )
            )  # fmt: skip
        return rows


@dataclass
class Comparison:
    """All rows; the trials of the first split in full, for plots."""

    judge: Judge
    rows: list[Row] = field(default_factory=list)
    trials: list[Trial] = field(default_factory=list)
    splits: int = 0
    interrupted: bool = False

    def add(self, trials: Sequence[Trial]) -> None:
        """Take the trials of one more split."""
        for trial in trials:
            self.rows += trial.rows(self.judge, self.splits)
        self.trials = self.trials or list(trials)
        self.splits += 1


@dataclass(frozen=True)
class Table:
    """Features and labels; `take` picks rows."""

    X: Any
    y: NDArray[Any]

    def take(self, rows: NDArray[np.int64]) -> "Table":
        return Table(self.X.iloc[rows] if hasattr(self.X, "iloc") else self.X[rows], self.y[rows])

    def __len__(self) -> int:
        return len(self.y)


def split(table: Table, test_size: float, seed: int) -> tuple[Table, Table]:
    """Development and test part: every class gives its share, and keeps at least one row for development."""
    codes = np.unique(table.y, return_inverse=True)[1].astype(np.int64)
    development, test = split_rows(codes, test_size, seed)
    if not len(test):
        raise ValueError(
            f"a share of {test_size:g} of {len(table)} rows leaves none to test on; add rows, or test on another file"
        )
    return table.take(development), table.take(test)


def evaluate(
    contender: Contender,
    development: Table,
    test: Table,
    judge: Judge,
    *,
    seed: int,
    on_epoch: Callable[[Epoch], None] | None = None,
) -> Trial:
    """Fit, learn every decision rule on the rows held out of development, and only then look at the test rows."""
    started = time.perf_counter()
    estimator = contender.make(seed)
    ours = isinstance(estimator, MetricClassifier)
    if ours:
        estimator.fit(development.X, development.y, on_epoch=on_epoch)
        rules = {name: judge.rule(name, estimator.held_out_predictions_) for name in contender.decisions}
        rules |= {estimator.decision: estimator.decision_} if estimator.decision in rules else {}
    else:
        # Labels as the judge's codes, so that the same rows are held out as for a network.
        by_itself = isinstance(estimator, StockBooster)
        estimator = estimator if by_itself else HeldOut(estimator, random_state=seed)
        estimator.fit(development.X, judge.codes(development.y))
        rules = {name: judge.rule(name, estimator.held_out_predictions_) for name in contender.decisions}
    seconds = time.perf_counter() - started
    p = estimator.predict_proba(test.X)
    p = np.ascontiguousarray(p[:, judge.order]) if ours else p
    predictions = {name: rule.predict(p) for name, rule in rules.items()}
    return Trial(contender, estimator, rules, p, predictions, judge.codes(test.y), seconds)


def compare(
    X: Any,
    y: NDArray[Any],
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

    With `test` given the test rows are the same in every split, which then is another seed only. `on_step` is told
    who starts on which split, and returns what to call after every epoch. Ctrl-C ends the comparison with the
    splits that are complete; `interrupted` tells of a Ctrl-C that training took as its end.

    >>> from sklearn.datasets import load_iris
    >>> from evalign.comparison import contenders
    >>> result = compare(*load_iris(return_X_y=True), lambda judge: [contenders.majority(judge)], Aim("accuracy"))
    >>> [round(row.score, 3) for row in result.rows]
    [0.333, 0.333, 0.333, 0.333, 0.333]
    """
    judge = aim if isinstance(aim, Judge) else Judge(aim, y)
    listed = contenders(judge) if callable(contenders) else contenders
    table, comparison = Table(X, np.asarray(y)), Comparison(judge)
    for number in range(splits):
        parts = split(table, test_size, seed + number) if test is None else (table, Table(*test))
        trials: list[Trial] = []
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


@dataclass(frozen=True)
class Choice:
    """The place of the best trial, every trial's score on the common held-out rows, and how many these are."""

    best: int
    scores: tuple[float, ...]
    rows: int

    def reason(self, trials: Sequence[Trial], metric: str) -> str:
        """Why, in one sentence.

        >>> Choice(0, (0.5,), 7).reason([], "f1")
        'it was the only one trained'
        """
        if len(self.scores) == 1:
            return "it was the only one trained"
        said = ", ".join(f"{t.contender.title} {s:.4f}" for t, s in zip(trials, self.scores, strict=True))
        who = "both" if len(self.scores) == 2 else "all"
        return f"{metric} on the {self.rows} rows that {who} held out of training: {said}"


def choose(trials: Sequence[Trial], judge: Judge) -> Choice:
    """The trial whose own decisions score best on held-out rows; of equals the first.

    Each classifier's rule was learned on its held-out rows, a network's on these or all and the others' on all rows, so
    scores here are a little too high, alike for all; they serve to choose only. A blend's weights were chosen there
    too, which is one more number or two.
    """
    common = trials[0].estimator.held_out_predictions_.rows
    for trial in trials[1:]:
        common = np.intersect1d(common, trial.estimator.held_out_predictions_.rows)
    scores = tuple(_score(trial, common, judge) for trial in trials)
    return Choice(int(np.argmax(scores)), scores, len(np.unique(common)))


def _score(trial: Trial, rows: np.ndarray, judge: Judge) -> float:
    own = trial.estimator.held_out_predictions_
    at = np.flatnonzero(np.isin(own.rows, rows))
    predicted = trial.estimator.decision_.predict(own.probabilities[at])
    confusion = Confusion.hard(
        torch.from_numpy(predicted), torch.from_numpy(own.labels[at]), len(judge.classes),
        sample_weight=torch.from_numpy(own.weight[at]),
    )  # fmt: skip
    return float(metrics.resolve(judge.aim.metric, average=judge.average, beta=judge.beta)(confusion))
