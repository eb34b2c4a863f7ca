"""`evalign compare`: our models against common baselines over several splits."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from evalign.cli import options as o
from evalign.cli.console import EXIT_INFEASIBLE, Interrupt, Output, watch_interrupt
from evalign.cli.run_files import InputFiles, Loaded, RunFolder, load

NAME = "compare"
EXAMPLE = "evalign compare adult.csv --target income --metric f1 --splits 5"


@o.takes(without=("network", "ensemble", "stream"))
def command(
    context: typer.Context,
    data: o.Data,
    out: Annotated[
        Path, typer.Option("--out", "-o", help="Folder to write the report to.", rich_help_panel=o.OUTPUT)
    ] = Path("evalign-compare"),
    splits: Annotated[
        int, typer.Option("--splits", help="Number of random splits.", min=1, rich_help_panel=o.DATA)
    ] = 5,
    model: Annotated[
        str,
        typer.Option(
            "--model",
            help="blend: our blend and other libraries; network: our network, boosted trees and blend as well.",
            rich_help_panel=o.TRAINING,
        ),
    ] = "blend",
    **given: Any,
) -> None:
    """Compare our models with cross-entropy, LightGBM, XGBoost, a random forest and histogram gradient boosting over
    several splits.

    Each model is scored with argmax, tuned and plug-in decision rules, learned on rows held out of its training part.
    With --test the test rows are fixed and splits differ only in their seed. Ctrl-C keeps the completed splits. Writes
    report.html and result.json to the --out folder.
    """
    settings = o.Settings.of(given | {"model": model}, context)
    source = InputFiles.of(data, given, settings.cost_columns)
    folder = RunFolder(out, force=given["force"])
    source.check()
    folder.check()
    from evalign.checks import check_choice

    check_choice("--model", model, ("blend", "network"))
    settings.check()
    with watch_interrupt() as interrupt:
        output = Output(quiet=given["quiet"], as_json=given["json"], words=context.obj)
        feasible = run(NAME, load(source, output.note), settings, splits, folder, output, interrupt)
    if not feasible:  # a note has already given the nearest feasible value
        raise typer.Exit(EXIT_INFEASIBLE)


def run(
    name: str, loaded: Loaded, settings: o.Settings, splits: int, folder: RunFolder, output: Output,
    interrupt: Interrupt, rivals: Sequence[str] | None = None,
) -> bool:  # fmt: skip
    """Compare on a loaded table and write the results; shared with `evalign demo`, which names fewer `rivals`.

    Returns whether our model's decision met the constraints in every split.
    """
    import numpy as np

    from evalign.cli.run_files import finish, note_classes, note_positive
    from evalign.comparison import contenders as c
    from evalign.comparison.goals import Judge
    from evalign.comparison.run import compare
    from evalign.training.recipes import find_recipe

    test_size = loaded.source.share
    judge, recipe = Judge(settings.aim(), loaded.table.y), settings.recipe_of("network")
    facts = loaded.describe()
    note_positive(judge, facts["classes"], output.note)
    others = [*stock_libraries(output.note), *c.RIVALS.values(), c.MAJORITY]
    own = own_models(judge, settings)
    if rivals is not None:  # as they are commonly used: the most probable class, or a tuned threshold
        own = [replace(one, decisions=("argmax", settings.rule)) for one in own]
        others = [replace(one, decisions=("argmax", "tuned")) for one in others if one.name in rivals]
    listed = [*own, *others]
    epochs = find_recipe(recipe).limited(settings.epochs).epochs
    with output.warnings_as_notes(), output.progress(len(listed) * splits, epochs, splits) as step:
        comparison = compare(
            loaded.table.X, loaded.table.y, listed, judge,
            splits=splits, test_size=test_size, test=None if loaded.test is None else (loaded.test.X, loaded.test.y),
            seed=settings.seed, on_step=step, interrupted=lambda: interrupt.pressed,
        )  # fmt: skip
    if comparison.interrupted:
        output.note(f"Ctrl-C ended the comparison after {comparison.splits} of {splits} splits")
    first = comparison.trials[0]
    note_classes(judge, first.truth, output.note)
    held_out, rows = len(np.unique(first.estimator.held_out_predictions_.rows)), len(loaded.table)
    tested = len(first.truth)
    sizes = {
        "test_from": str(loaded.source.test or f"stratified splits, {test_size:g} of every class"),
        "splits": comparison.splits, "training_and_validation_rows": rows if loaded.test is not None else rows - tested,
        "validation_rows": held_out, "test_rows": tested,
    }  # fmt: skip
    folds = len(np.unique(first.estimator.held_out_predictions_.fold))
    how = "the same for all" if folds == 1 else f"ours by {folds} folds, rivals by one of these"
    over = "" if comparison.splits == 1 else f"Mean over {comparison.splits} splits. "
    overlap = "" if comparison.splits == 1 else " Splits overlap, so standard errors are somewhat too small."
    protocol = (
        f"{over}The {tested:,} test rows were read once, at the end; decisions and early stopping used {held_out:,} "
        f"held-out rows of the training part ({how}).{overlap}"
    )
    finish(
        name, comparison, settings, facts, sizes, protocol, folder, output, decision=settings.rule, **loaded.details(),
    )  # fmt: skip
    return all(row.feasible for row in comparison.rows if (row.contender, row.decision) == (c.OURS, settings.rule))


def own_models(judge: Any, settings: o.Settings) -> list[Any]:
    """Our contenders, the reference first; a network trained on cross-entropy is the control of our network."""
    from evalign.boosting.growth import is_installed
    from evalign.comparison import contenders as c

    if settings.model == "blend":
        return [replace(settings.contender(judge, "blend"), name=c.OURS)]
    kinds = ["network", *(["boost"] if is_installed("lightgbm") else []), "blend"]
    control = c.cross_entropy(judge, rival_of=settings.recipe_of("network"), **settings.options_of("network"))
    return [*(settings.contender(judge, kind) for kind in kinds), control]


def stock_libraries(note: Any) -> list[Any]:
    """LightGBM and XGBoost with their defaults; a note lists those that are not installed."""
    from evalign.boosting.growth import is_installed
    from evalign.comparison import contenders as c

    here = {name: is_installed(name) for name in c.BOOSTED}
    if lacking := [name for name, found in here.items() if not found]:
        note(f"{' and '.join(lacking)} left out, because not installed; run pip install 'evalign[boost]'")
    return [contender for name, contender in c.BOOSTED.items() if here[name]]
