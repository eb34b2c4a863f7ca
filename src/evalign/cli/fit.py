"""`evalign fit`: train a model, compare it with baselines, save it."""

from pathlib import Path
from typing import Annotated, Any

import typer

from evalign.cli import options as o
from evalign.cli.console import Interrupt, watch_interrupt

NAME = "fit"
EXAMPLE = "evalign fit adult.csv --target income --metric f1 --out adult-run"


def command(
    context: typer.Context,
    data: o.Data,
    target: o.Target,
    out: Annotated[
        Path,
        typer.Option(
            "--out", "-o", help="Folder to write model and report to.", show_default=False, rich_help_panel=o.OUTPUT
        ),
    ],
    metric: o.Metric = "f1",
    average: o.Average = None,
    beta: o.Beta = None,
    positive: o.Positive = None,
    subject_to: o.SubjectTo = None,
    test: o.Test = None,
    test_size: o.TestSize = 0.2,
    drop: o.Drop = None,
    model: o.Model = "network",
    budget: o.Budget = 600.0,
    recipe: o.RecipeName = "anchored",
    decision: o.Decision = None,
    epochs: o.Epochs = None,
    network: o.Network = "mlp",
    ensemble: o.Ensemble = 1,
    folds: o.Folds = "auto",
    hidden: o.Hidden = "512,256,128",
    seed: o.Seed = 0,
    device: o.Device = "auto",
    stream: o.Stream = False,
    quiet: o.Quiet = False,
    json: o.Json = False,
) -> None:
    """Train a classifier for a metric and compare it with cross-entropy on held-out test rows.

    Writes model.safetensors, report.html and result.json to the --out folder. The saved model is the one that was
    tested; it was not trained on the test rows. Ctrl-C stops training and keeps the best weights so far.

    --model auto trains boosted trees, a network and a blend, each for at most a third of --budget, and keeps the one
    with the best score on the validation rows that all of them held out.

    A table of 1 GB (5 million rows, 10 numbers and a category) takes 2.8 GB of memory. A folder of Parquet files, or a
    Parquet file with --stream, is read in passes and may exceed the memory; repeat the command to resume a run that
    was killed.
    """
    from evalign.cli.console import Output

    settings = o.Settings(
        metric, average, o.parse_beta(beta), positive, tuple(subject_to or ()), recipe, decision, epochs,
        o.parse_hidden(hidden), seed, device, model, budget, network, ensemble, o.parse_folds(folds),
    )  # fmt: skip
    settings.check()
    with watch_interrupt() as interrupt:
        output = Output(quiet=quiet, as_json=json, words=context.obj)
        fit: Any = run
        if stream or data.is_dir():
            from evalign.cli.stream import run as fit
        fit(data, target, out, settings, test, test_size, drop or [], output, interrupt)


def run(
    path: Path,
    target: str,
    out: Path,
    settings: o.Settings,
    test_path: Path | None,
    test_size: float,
    drop: list[str],
    output: Any,
    interrupt: Interrupt,
) -> None:
    import numpy as np

    from evalign.cli import data
    from evalign.cli.candidates import train
    from evalign.cli.run_folder import MODEL, RunFolder, finish
    from evalign.comparison.aims import Judge
    from evalign.comparison.run import Comparison, split
    from evalign.training.batches import default_batch_size
    from evalign.training.recipes import find_recipe

    folder = RunFolder(out)
    folder.check()
    loaded = data.load(path, target, test=test_path, drop=drop, test_size=test_size, note=output.note)
    judge = Judge(settings.aim(), loaded.table.y)
    parts = (loaded.table, loaded.test) if loaded.test is not None else split(loaded.table, test_size, settings.seed)
    facts = loaded.describe()
    data.note_positive(judge, facts["classes"], output.note)
    recipe = find_recipe(settings.recipe)
    batch_size = recipe.batch_size or default_batch_size(round(0.8 * len(parts[0])))
    data.note_batches(judge, facts["classes"], batch_size, output.note)
    del loaded  # the parts are copies, and the whole may be large
    with output.warnings_as_notes():
        trials, kept, why = train(judge, settings, *parts, output, interrupt)
    comparison = Comparison(judge, interrupted=interrupt.pressed)
    comparison.add(trials)
    model = trials[0].estimator
    data.note_columns(model.encoder_, output.note)
    data.note_classes(judge, trials[0].truth, output.note)
    folder.path.mkdir(parents=True, exist_ok=True)
    for part in (model, *getattr(model, "members_", {}).values()):
        if hasattr(part, "device"):
            part.device = "auto"  # the saved model may be loaded on another machine
    saved = model.save(folder.path / MODEL)
    held_out, folds = len(np.unique(model.held_out_predictions_.rows)), getattr(model, "folds_", 1)
    if folds > 1:
        output.note(f"{folds} networks were trained, one per fold; predictions are their mean")
    sizes = {
        "test_from": str(test_path) if test_path else f"a stratified split, {test_size:g} of every class",
        "training_and_validation_rows": len(parts[0]),
        "validation_rows": held_out,
        "test_rows": len(parts[1]),
    }
    how = (
        "the same ones for all"
        if folds == 1
        else f"each of one of {folds} networks, by folds that are the same for all"
    )
    protocol = (
        f"{len(parts[1])} test rows, read once, at the end; every choice was made on the other {len(parts[0])}, of "
        f"which {held_out} were held out for it, {how}. "
        "The saved model is the one tested here."
    )
    rule = model.decision_.to_json()
    epochs = next((row["epoch"] for row in reversed(model.history_) if row["best"]), None)
    learned = {
        "file": MODEL, "kind": kept, "chosen_because": why, "decision": rule, "temperature": model.temperature_,
        "kept_epoch": epochs,
    }  # fmt: skip
    own = settings.decision_of(kept)
    finish(NAME, comparison, settings, facts, sizes, protocol, folder, output, decision=own, model=learned)
    if why is not None:
        output.show(f"Kept:   {trials[0].contender.title}; {why}")
    output.show(f"Model:  {saved} (trained on the {len(parts[0])} rows outside the test set)")
