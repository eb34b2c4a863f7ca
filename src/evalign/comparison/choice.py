"""Which of our fitted classifiers to keep: judged on the rows that all of them held out, never on test rows."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from evalign import metrics
from evalign.comparison.aims import Judge
from evalign.comparison.run import Trial
from evalign.confusion import Confusion


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
    common = trials[0].estimator.held_out_
    for trial in trials[1:]:
        common = np.intersect1d(common, trial.estimator.held_out_)
    scores = tuple(_score(trial, common, judge) for trial in trials)
    return Choice(int(np.argmax(scores)), scores, len(np.unique(common)))


def _score(trial: Trial, rows: np.ndarray, judge: Judge) -> float:
    own, held_out = trial.estimator.validation_, trial.estimator.held_out_
    at = np.flatnonzero(np.isin(held_out, rows))
    predicted = trial.estimator.decision_.predict(own.probabilities[at])
    confusion = Confusion.hard(
        torch.from_numpy(predicted), torch.from_numpy(own.labels[at]), len(judge.classes),
        sample_weight=torch.from_numpy(own.weight[at]),
    )  # fmt: skip
    return float(metrics.resolve(judge.aim.metric, average=judge.average, beta=judge.beta)(confusion))
