"""`evalign predict`: predict labels and probabilities for new rows."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from evalign.cli import options as o
from evalign.cli.console import until_pipe_closes

if TYPE_CHECKING:
    import pandas as pd

NAME = "predict"
EXAMPLE = "evalign predict adult-run new.csv --out predictions.csv"
SUFFIXES = (".csv", ".tsv", ".parquet", ".pq")


def command(
    folder: Annotated[
        Path,
        typer.Argument(metavar="DIR", help="Folder written by evalign fit, or a model file.", show_default=False),
    ],
    data: o.Data,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help=f"File to write ({', '.join(SUFFIXES)}). Default: CSV to standard output."),
    ] = None,
    proba: Annotated[
        bool, typer.Option("--proba/--no-proba", help="Add a column probability_CLASS for each class.")
    ] = True,
    jointly: Annotated[
        bool,
        typer.Option(
            "--jointly", help="Choose the decision rule from the predicted rows themselves; better for rare classes."
        ),
    ] = False,
    keep: Annotated[
        list[str] | None, typer.Option("--keep", help="Column of DATA to copy to the output; repeatable.")
    ] = None,
    target: Annotated[
        str | None, typer.Option("--target", "-t", help="Column of DATA with labels, to report the score.")
    ] = None,
    device: o.Device = "auto",
    quiet: o.Quiet = False,
    json: o.Json = False,
) -> None:
    """Predict the label and the class probabilities of each row of DATA, in order.

    Columns are matched by name. Unknown columns are ignored with a note; a missing column is an error.
    """
    from evalign.cli.console import Output

    o.check_device(device)
    if out is not None and out.suffix.lower() not in SUFFIXES:
        raise ValueError(f"--out must end in {', '.join(SUFFIXES)}, got {out.name!r}")
    if json and out is None:
        raise ValueError("--json leaves stdout to the result, so --out must say where predictions go; give both")
    output = Output(quiet=quiet, as_json=json)
    model, trained_target = load_model(folder, device)
    frame = read(data, model, target, keep or [])
    features, extra = model.encoder_.select(frame.drop(columns=list(ignorable(model, target, trained_target, frame))))
    if extra := [name for name in extra if name not in (keep or [])]:
        from evalign.tables.columns import quoted

        output.note(f"columns unknown to the model were ignored: {quoted(extra)}")
    predictions = predicted_table(model, features, proba, jointly)
    for name in reversed(list(dict.fromkeys(keep or []))):
        if name in predictions:
            raise ValueError(f"--keep {name} would give two columns of that name; rename it in {data}")
        predictions.insert(0, name, frame[name].to_numpy())
    result: dict[str, Any] = {"rows": len(frame), "classes": [str(label) for label in model.classes_.tolist()]}
    if target is not None:
        from evalign.cli.data import check_labels

        truth = check_labels(frame[target], model.classes_, data)
        result["score"] = model.score_labels(predictions["prediction"].to_numpy(), truth)
        result["metric"] = model.metric
        output.say(f"{model.metric} on these rows: {result['score']:.4f}")
    write(predictions, out)
    if out is not None:
        result["file"] = str(out)
        output.show(f"{len(frame)} predictions: {out}")
    output.json(result)


def load_model(folder: Path, device: str) -> tuple[Any, str | None]:
    """Load the model of a folder or file, and the name of its target column if known."""
    from evalign.cli.run_folder import MODEL, read_result
    from evalign.estimators.saving import load_model as load

    path = folder / MODEL if folder.is_dir() else folder
    if not path.is_file():
        where = f"the folder {folder} has no {MODEL}" if folder.is_dir() else f"{folder} does not exist"
        raise ValueError(f"{where}; give the folder that evalign fit wrote")
    model = load(path)
    if device != "auto":
        model.to(device)
    result = read_result(path.parent)
    return model, None if result is None else result.get("data", {}).get("target")


def read(path: Path, model: Any, target: str | None, keep: list[str]) -> "pd.DataFrame":
    """Read the table; columns that were text in training stay text."""
    from evalign.tables.columns import check_header
    from evalign.tables.read import read_table

    text = [*model.encoder_.text_columns_, *([target] if target and model.classes_.dtype.kind in "OUT" else [])]
    frame = read_table(path, text=text)
    check_header(str(path), list(frame.columns), [*keep, *([target] if target else [])])
    return frame


def ignorable(model: Any, target: str | None, trained_target: str | None, frame: "pd.DataFrame") -> list[str]:
    """Label columns among the unknown ones, which need no note."""
    known = set(getattr(model, "feature_names_in_", ()))
    return [name for name in {target, trained_target} if name is not None and name in frame and name not in known]


def predicted_table(model: Any, features: Any, proba: bool, jointly: bool = False) -> "pd.DataFrame":
    import pandas as pd

    p = model.predict_proba(features)
    table = pd.DataFrame({"prediction": model.decide(p, jointly=jointly)})
    for label, column in zip(model.classes_.tolist(), p.T if proba else (), strict=bool(proba)):
        table[f"probability_{label}"] = column
    return table


def write(table: "pd.DataFrame", out: Path | None) -> None:
    """Write the table in the format of the suffix of `out`, or as CSV to standard output."""
    from evalign.storage.atomic import write_atomically

    if out is None:
        with until_pipe_closes():
            table.to_csv(sys.stdout, index=False)
    elif out.suffix.lower() in (".parquet", ".pq"):
        write_atomically(out, table.to_parquet(index=False))
    else:
        write_atomically(out, table.to_csv(index=False, sep="\t" if out.suffix.lower() == ".tsv" else ","))
