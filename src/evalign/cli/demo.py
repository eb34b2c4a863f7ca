"""`evalign demo`: a complete comparison on simulated card payments, few of which are fraud."""

import itertools
import os
import shlex
import sys
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from evalign.cli import options as o
from evalign.cli.console import watch_interrupt

if TYPE_CHECKING:
    import pandas as pd

NAME = "demo"
EXAMPLE = "evalign demo --out my-demo"
FILE, NEW, TARGET, POSITIVE = "payments.csv", "new_payments.csv", "outcome", "fraud"
ROWS, NEW_ROWS = 5000, 20000
RIVALS = ("lightgbm", "logistic_regression", "random_forest")


@o.takes("preset", "seed", "force", "quiet", "json", preset="quick")
def command(
    context: typer.Context,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Folder to write data and report to. Default: a new one, evalign-demo."),
    ] = None,
    splits: Annotated[
        int, typer.Option("--splits", help="Number of training runs, each with a different seed.", min=1)
    ] = 1,
    show: Annotated[bool, typer.Option("--open/--no-open", help="Open the report, when run in a terminal.")] = True,
    **given: Any,
) -> None:
    """Find frauds among simulated card payments: the default classifier against common baselines.

    Compares the blend with logistic regression, a random forest and LightGBM, each with default settings and with a
    tuned threshold. Writes the tables, report.html and result.json to the --out folder. Takes about half a minute.
    """
    from evalign.cli.compare import run
    from evalign.cli.console import Output
    from evalign.cli.run_files import REPORT, InputFiles, RunFolder, load
    from evalign.storage.atomic import created, write_atomically
    from evalign.tables.files import TableError

    settings = o.Settings(positive=POSITIVE, preset=given["preset"], seed=given["seed"], device="cpu")
    force, quiet, json = given["force"], given["quiet"], given["json"]
    names = itertools.chain(["evalign-demo"], (f"evalign-demo-{number}" for number in itertools.count(2)))
    out = out or next(path for path in map(Path, names) if force or not path.exists())
    output, folder = Output(quiet=quiet, as_json=json, words=context.obj), RunFolder(out, also=(FILE, NEW), force=force)
    folder.check()
    settings.check()
    table, new = payments(ROWS, seed=0), payments(NEW_ROWS, seed=1)
    tables = {out / FILE: table.to_csv(index=False), out / NEW: new.to_csv(index=False)}
    if other := [path for path, text in tables.items() if path.exists() and path.read_bytes() != text.encode()]:
        raise TableError(f"{other[0]} exists and was not written by evalign demo; choose another --out")
    with watch_interrupt() as interrupt, created(out, *tables):
        share = (table[TARGET] == POSITIVE).mean()
        output.say(
            f"Training on {ROWS:,} simulated card payments, {share:.1%} of them fraud, testing on {NEW_ROWS:,} new "
            "ones; about half a minute."
        )
        data, later = (write_atomically(path, text) for path, text in tables.items())
        source = InputFiles(data, TARGET, test=later)
        run(NAME, load(source, output.note), settings, splits, folder, output, interrupt, rivals=RIVALS)
    output.show(
        f"Next:   evalign fit {shlex.quote(str(data))} --target {TARGET} --positive {POSITIVE} --metric precision "
        f"--subject-to 'recall >= 0.8' --confidence 0.9 --out my-run\n"
        f"        evalign predict my-run {shlex.quote(str(later))} --out predictions.csv"
    )
    if show and not quiet and not json and sys.stdout.isatty() and "CI" not in os.environ:
        webbrowser.open((out / REPORT).resolve().as_uri())


def payments(rows: int, seed: int) -> "pd.DataFrame":
    """Simulated card payments: numbers, categories, missing values, and frauds that show in combinations of columns."""
    import numpy as np
    import pandas as pd

    rng = np.random.default_rng(seed)
    merchants = ["grocery", "fuel", "travel", "electronics", "restaurant", "gift cards"]
    table = pd.DataFrame(
        {
            "amount": rng.lognormal(3.4, 1.0, rows).round(2),
            "hour": rng.integers(0, 24, rows),
            "merchant": rng.choice(merchants, rows, p=[0.3, 0.2, 0.1, 0.15, 0.2, 0.05]),
            "country": rng.choice(["home", "neighbour", "overseas"], rows, p=[0.85, 0.1, 0.05]),
            "km_from_home": rng.lognormal(2.0, 1.3, rows).round(1),
            "card_age_days": rng.integers(1, 3000, rows),
            "payments_last_hour": rng.poisson(0.6, rows),
            "chip": rng.random(rows) < 0.8,
        }
    )
    resold = table.merchant.isin(["electronics", "gift cards"]) & (table.amount > 60)
    at_night, far = (table.hour < 6) & ~table.chip, (table.km_from_home > 60) & ~table.chip
    risk = -4.0 + 1.6 * resold + 1.5 * at_night + 1.4 * far + 1.1 * (table.country == "overseas")
    risk += 0.5 * table.payments_last_hour + 1.3 * (table.card_age_days < 60) + 0.25 * np.log(table.amount)
    fraud = rng.random(rows) < 1 / (1 + np.exp(-3.2 * risk - 1.4))
    table.loc[rng.random(rows) < 0.05, "km_from_home"] = np.nan
    table[TARGET] = np.where(fraud, POSITIVE, "fine")
    return table
