"""`evalign demo`: a complete comparison on a table that comes with scikit-learn."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from evalign.cli import options as o
from evalign.cli.console import watch_interrupt

if TYPE_CHECKING:
    import pandas as pd

NAME = "demo"
EXAMPLE = "evalign demo --out my-demo"
FILE, TARGET, POSITIVE = "patients.csv", "progression", "fast"


def command(
    context: typer.Context,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Folder to write data and report to. Default: a new one, evalign-demo."),
    ] = None,
    splits: Annotated[int, typer.Option("--splits", help="Number of random splits.", min=1)] = 5,
    epochs: o.Epochs = None,
    seed: o.Seed = 0,
    force: o.Force = False,
    quiet: o.Quiet = False,
    json: o.Json = False,
) -> None:
    """Run a comparison on a small table: which of 442 diabetes patients get worse fast?

    Writes the table, report.html and result.json to the --out folder. Takes less than a minute on two cores.
    """
    from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

    from evalign.cli.compare import run
    from evalign.cli.console import Output
    from evalign.cli.data import Source, load
    from evalign.cli.run_folder import RunFolder
    from evalign.storage.atomic import write_atomically

    settings = o.Settings(positive=POSITIVE, epochs=epochs, seed=seed, device="cpu")
    out = out or next(path for path in new_names("evalign-demo") if force or not path.exists())
    output, folder = Output(quiet=quiet, as_json=json, words=context.obj), RunFolder(out, also=(FILE,), force=force)
    folder.check()
    settings.check()
    with watch_interrupt() as interrupt:
        table = patients()
        output.say(
            f"{len(table)} diabetes patients (Efron 2004, from scikit-learn); to find: the fifth whose disease "
            f"advanced most in a year. F1 of that class, {splits} splits; about half a minute."
        )
        data = write_atomically(out / FILE, table.to_csv(index=False))
        loaded = load(Source(data, TARGET), output.note)
        # Two threads on batches this small took over ten minutes on a busy machine; one takes half a minute.
        with threadpool_limits(1):
            run(NAME, loaded, settings, splits, folder, output, interrupt)
    output.show(
        f"Next:   evalign fit {data} --target {TARGET} --positive {POSITIVE} --metric f1 --out my-run; "
        "then your own table"
    )


def new_names(name: str) -> Iterator[Path]:
    """Folder names to try: name, name-2, name-3, ..."""
    yield Path(name)
    yield from (Path(f"{name}-{number}") for number in itertools.count(2))


def patients() -> "pd.DataFrame":
    """Ten measurements of 442 patients; the target marks the fifth whose disease advanced most."""
    from sklearn.datasets import load_diabetes

    bunch = load_diabetes(as_frame=True, scaled=False)
    table: pd.DataFrame = bunch.data.copy()
    table["sex"] = table["sex"].map({1.0: "first", 2.0: "second"})  # the source does not say which is which
    table[TARGET] = (bunch.target >= bunch.target.quantile(0.8)).map({True: POSITIVE, False: "slow"})
    return table
