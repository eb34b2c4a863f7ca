"""`evalign fit` on Parquet data that is read in passes; writes the same files as `fit`."""

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from evalign.cli import run_files as data
from evalign.cli.console import Interrupt, Output
from evalign.cli.options import Settings
from evalign.cli.run_files import CHECKPOINTS, RunFolder
from evalign.comparison import contenders
from evalign.comparison.contenders import Contender
from evalign.comparison.goals import Judge
from evalign.comparison.run import FittedContender, judged, warnings_of_ours
from evalign.decision import Rule
from evalign.streaming.fit_stream import Stream, fit_stream, probabilities
from evalign.streaming.source import ParquetRows, own_rank, process_group, rank_count
from evalign.streaming.statistics import labels_of
from evalign.tables.files import TableError, quoted
from evalign.training.loop import Epoch


def run(
    source: data.InputFiles, folder: RunFolder, settings: Settings, output: Output, interrupt: Interrupt,
    importance: Callable[[Any, pd.DataFrame, Any], list[dict[str, Any]]], by_default: bool = False,
) -> Any:  # fmt: skip
    """Collect statistics, train our network and cross-entropy, save; under torchrun the first rank writes.

    `importance` is that of the columns on held-out rows; `by_default` means that no model was requested. Returns the
    model that was saved, None on other ranks.
    """
    if source.test is not None or settings.model != "network":
        raise TableError("data read in passes requires --model network and does not support --test")
    if len(source.targets) > 1 or settings.costs is not None:
        raise TableError("data read in passes requires a single --target and does not support --costs; remove --stream")
    if source.drop_unlabelled or source.task is not None:
        raise TableError("data read in passes does not support --drop-unlabelled and --task; prepare the labels first")
    if settings.folds not in (1, "auto"):
        raise TableError(f"data read in passes is not split into folds; remove --folds {settings.folds}")
    with process_group(settings.device):
        rows = ParquetRows(source.path, source.target, source.drop)
        output.quiet = output.quiet or own_rank() > 0
        if by_default:
            output.note("a network is trained, because a blend needs the whole table in memory")
        with output.warnings_as_notes():
            stream, judge, trials = _train(rows, folder, settings, source.share, output, interrupt)
        if own_rank():
            return None
        model, valid, important = trials[0].estimator, stream.survey.valid, []
        if valid:
            held_out = pd.concat(valid, ignore_index=True)
            labels = labels_of(held_out[rows.target], rows.target)
            important = importance(model, held_out[rows.features], labels)
        return _finish(stream, judge, trials, folder, settings, output, interrupt, important)


def _train(
    source: ParquetRows, folder: RunFolder, settings: Settings, test_size: float, output: Output, interrupt: Interrupt
) -> tuple[Stream, Judge, list[FittedContender]]:
    output.say(f"{source.rows} rows in {len(source.files)} files: reading them once")
    stream = Stream.open(source, test_size=test_size, seed=settings.seed)
    output.say(f"first pass: {stream.survey.statistics.rows} training rows")
    judge = Judge(settings.aim(), stream.survey.classes)
    data.note_positive(judge, _counts(stream), output.note)
    own, options = settings.rule, settings.options_of("network")
    ours = replace(settings.contender(judge, "network"), decisions=(own,))
    rival = contenders.cross_entropy(judge, rival_of=settings.recipe_of("network"), **options)
    rival = replace(rival, decisions=tuple(dict.fromkeys(("argmax", "plug_in", own))))
    trials = [_trial(ours, stream, judge, folder, settings, output, interrupt)]
    if not interrupt.pressed:
        trials.append(_trial(rival, stream, judge, folder, settings, output, interrupt))
    return stream, judge, [*trials, _majority(stream, judge, trials[0])]


def _counts(stream: Stream) -> dict[str, int]:
    return {str(label): count for label, count in stream.survey.labels.items()}


def _trial(
    contender: Contender, stream: Stream, judge: Judge, folder: RunFolder, settings: Settings, output: Output,
    interrupt: Interrupt,
) -> FittedContender:  # fmt: skip
    """Train, learn decision rules on validation rows, then predict the test rows."""
    started = time.perf_counter()
    model = contender.make(settings.seed)

    def say(epoch: Epoch) -> None:
        output.say(f"{contender.title}: epoch {epoch.epoch}, {epoch.stage}, {epoch.score:.4f}")

    quiet = output.quiet or not sys.stderr.isatty()
    with warnings_of_ours(contender):
        fit_stream(model, stream, checkpoint=folder.path / CHECKPOINTS[contender.name], on_epoch=None if quiet else say)
    if interrupt.pressed:
        if not model.history_:
            raise KeyboardInterrupt
        output.note(f"Ctrl-C ended the training of {contender.title}; its best weights so far were kept")
    rules = {name: judge.rule(name, model.held_out_predictions_) for name in contender.decisions}
    rules |= {model.decision: model.decision_} if model.decision in rules else {}
    seconds = time.perf_counter() - started
    p, truth = probabilities(model, stream.survey.test, stream.source)
    if not len(truth):
        raise TableError(f"{stream.source.path} has too few rows to test on; remove --stream")
    return judged(contender, model, rules, p, truth, seconds, judge)


def _majority(stream: Stream, judge: Judge, like: FittedContender) -> FittedContender:
    """The majority-class baseline, from the label counts."""
    counts = np.array([stream.survey.labels[label] for label in judge.classes.tolist()])
    p = np.zeros_like(like.probabilities)
    p[:, counts.argmax()] = 1.0
    return judged(contenders.MAJORITY, None, {"argmax": Rule("argmax", len(counts))}, p, like.truth, 0.0, judge)


def _finish(
    stream: Stream, judge: Judge, trials: list[FittedContender], folder: RunFolder, settings: Settings, output: Output,
    interrupt: Interrupt, importance: list[dict[str, Any]],
) -> Any:  # fmt: skip
    source = stream.source
    if constant := trials[0].estimator.encoder_.constant_columns_:
        output.note(f"constant columns carry no information: {quoted(constant)}")
    facts = {
        "file": str(source.path), "files": len(source.files), "rows": source.rows, "features": len(source.features),
        "target": source.target, "classes": _counts(stream),
    }  # fmt: skip
    model = data.finish_fit(
        judge, trials, settings, facts, folder, output, interrupted=interrupt.pressed,
        profile=stream.survey.statistics.profile(stream.survey.labels).summary(),
        importance=importance,
        rows=source.rows - len(trials[0].truth), remark="The data set was read in passes. ",
        test_from=f"a hash of the row number, a share of {stream.parts.test:.3g}", split={"ranks": rank_count()},
    )  # fmt: skip
    for name in CHECKPOINTS.values():
        (folder.path / name).unlink(missing_ok=True)
    return model
