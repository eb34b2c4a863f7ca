"""`evalign fit`: train a model, compare it with baselines, save it."""

import math
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from evalign.cli import options as o
from evalign.cli.console import EXIT_INFEASIBLE, Interrupt, Output, watch_interrupt
from evalign.cli.run_files import CHECKPOINTS, InputFiles, RunFolder

NAME = "fit"
ROUNDS = 1000  # maximum number of boosting rounds, the end of the progress bar
# Permutation importance: shuffles per column, rows, rows of the rarest class, and seconds.
REPEATS, IMPORTANCE_ROWS, IMPORTANCE_RARE, IMPORTANCE_SECONDS = 3, 500, 50, 5.0
EXAMPLE = "evalign fit adult.csv --target income --metric f1 --out adult-run"


@o.takes()
def command(
    context: typer.Context,
    data: o.Data,
    out: Annotated[
        Path,
        typer.Option(
            "--out", "-o", help="Folder to write model and report to.", show_default=False, rich_help_panel=o.OUTPUT
        ),
    ],
    **given: Any,
) -> None:
    """Train a classifier for a metric or for costs, and compare it with a baseline on held-out test rows.

    Writes model.safetensors, report.html and result.json to the --out folder. The saved model is the one that was
    tested; it was not trained on the test rows. Ctrl-C stops training and keeps the best model so far.

    A table of 1 GB (5 million rows, 10 numbers and a category) takes 2.8 GB of memory. A folder of Parquet files, or a
    Parquet file with --stream, is read in passes to train a network, and may be larger than memory; repeat the command
    to resume a run that was killed.
    """
    settings = o.Settings.of(given, context)
    source = InputFiles.of(data, given, settings.cost_columns)
    in_passes = given["stream"] or data.is_dir()
    to_network = in_passes and "model" not in o.given_options(context)
    if to_network:
        settings = replace(settings, model="network")
    folder = RunFolder(out, also=tuple(CHECKPOINTS.values()) if in_passes else (), force=given["force"])
    source.check()
    folder.check()
    settings.check(context)
    with watch_interrupt() as interrupt:
        output = Output(quiet=given["quiet"], as_json=given["json"], words=context.obj)
        fit: Any = run
        if in_passes:
            from evalign.cli import stream as streaming

            fit = partial(streaming.run, importance=importance, by_default=to_network)
        fitted = fit(source, folder, settings, output, interrupt)
    if fitted is not None and not fitted.decision_.feasible:  # a note has already given the nearest feasible value
        raise typer.Exit(EXIT_INFEASIBLE)


def run(source: InputFiles, folder: RunFolder, settings: o.Settings, output: Output, interrupt: Interrupt) -> Any:
    """Train on a table in memory; returns the model that was saved."""
    from evalign.cli import run_files as data
    from evalign.comparison.goals import Judge
    from evalign.comparison.run import split

    loaded = data.load(source, output.note)
    judge = Judge(settings.aim(), loaded.table.y)
    parts = (loaded.table, loaded.test) if loaded.test is not None else split(loaded.table, source.share, settings.seed)
    facts = loaded.describe()
    data.note_positive(judge, facts["classes"], output.note)
    details = loaded.details()
    del loaded  # the parts are copies, and the original may be large
    with output.warnings_as_notes():
        trials = train(judge, settings, *parts, output, interrupt)
    model = trials[0].estimator
    return data.finish_fit(
        judge, trials, settings, facts, folder, output, interrupted=interrupt.pressed,
        rows=len(parts[0]), importance=importance(model, parts[0].X), leaderboard=leaderboard(model), **details,
        test_from=str(source.test) if source.test else f"a stratified split, {source.share:g} of every class",
    )  # fmt: skip


def leaderboard(model: Any) -> list[dict[str, Any]]:
    """Members of a blend with their weights and held-out scores; empty for other models."""
    if not hasattr(model, "leaderboard_"):
        return []
    board = model.leaderboard()
    if model.costs is not None:
        board = board.rename(columns={"score": "mean_cost"}).assign(mean_cost=-board["score"])
    return board.to_dict("records")  # type: ignore[no-any-return]


def importance(model: Any, X: Any, y: Any = None) -> list[dict[str, Any]]:
    """Permutation importance on a sample of the held-out rows; empty if it would take long.

    X is the table that the model was fitted on, or with labels y rows that it was not fitted on.
    """
    import numpy as np

    labels = model.held_out_predictions_.labels
    rarest = min(labels.sum(0)) if labels.ndim == 2 else min(np.bincount(labels)[np.unique(labels)])
    # The metric of a rare class needs rows of that class.
    rows = min(max(IMPORTANCE_ROWS, IMPORTANCE_RARE * len(labels) // max(int(rarest), 1)), len(X), 10 * IMPORTANCE_ROWS)
    started = time.perf_counter()
    model.predict(X[:rows])
    if (time.perf_counter() - started) * REPEATS * X.shape[1] > IMPORTANCE_SECONDS:
        return []
    if y is None:
        found = model.importance(X, repeats=REPEATS, rows=rows)
    else:
        import pandas as pd
        from sklearn.inspection import permutation_importance

        shuffled = permutation_importance(model, X[:rows], y[:rows], n_repeats=REPEATS, random_state=0)
        found = pd.DataFrame(
            {"column": X.columns, "mean": shuffled.importances_mean, "deviation": shuffled.importances_std}
        )
    return [
        {"column": str(name), "mean": float(mean), "error": float(deviation / math.sqrt(REPEATS))}
        for name, mean, deviation in found.itertuples(index=False)
    ]


def train(
    judge: Any, settings: o.Settings, development: Any, test: Any, output: Any, interrupt: Interrupt
) -> list[Any]:
    """The trials of our model and of its rivals; ours comes first, so that Ctrl-C leaves a model to save."""
    from evalign.comparison.run import evaluate

    ours = replace(settings.contender(judge, settings.model), name="ours", decisions=(settings.rule,))
    trials: list[Any] = []
    with output.progress(3, _epochs(settings)) as step:
        for contender in (ours, *_rivals(judge, settings)):
            if interrupt.pressed and contender.name == "cross_entropy":
                output.note("after Ctrl-C, cross-entropy was not trained for comparison")
                continue
            before, on_epoch = interrupt.pressed, step(contender.title, 0)
            trial = evaluate(contender, development, test, judge, seed=settings.seed, on_epoch=on_epoch)
            if interrupt.pressed and not before:
                if not trial.estimator.history_:
                    raise KeyboardInterrupt
                output.note(f"Ctrl-C ended the training of {contender.title}; its best weights so far were kept")
            trials.append(trial)
    return trials


def _epochs(settings: o.Settings) -> int:
    from evalign.training.recipes import find_recipe

    if settings.model in ("boost", "blend"):
        return settings.epochs or ROUNDS
    return find_recipe(settings.recipe_of(settings.model)).limited(settings.epochs).epochs


def _rivals(judge: Any, settings: o.Settings) -> list[Any]:
    """Baselines: boosted trees for a blend, else the same model trained on cross-entropy; and the majority class."""
    from evalign.boosting.growth import is_installed
    from evalign.comparison import contenders as c

    if settings.model == "boost":
        rival = c.boosted_cross_entropy(judge, **settings.options_of("boost"))
    elif settings.model == "blend":
        rival = c.BOOSTED["lightgbm"] if is_installed("lightgbm") else c.RIVALS["gradient_boosting"]
    else:
        rival = c.cross_entropy(judge, rival_of=settings.recipe_of("network"), **settings.options_of("network"))
    return [replace(rival, decisions=tuple(dict.fromkeys(("argmax", "plug_in", settings.rule)))), c.MAJORITY]
