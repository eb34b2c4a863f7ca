"""`evalign predict`: predict labels and probabilities for new rows."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from evalign.cli import options as o
from evalign.cli.console import Output, until_pipe_closes
from evalign.cli.run_files import MODEL, Reading, parts_of, read_result, split_names
from evalign.storage.atomic import check_writable, write_atomically
from evalign.tables.files import check_header, check_source, quoted

if TYPE_CHECKING:
    import pandas as pd

NAME = "predict"
EXAMPLE = "evalign predict adult-run new.csv --out predictions.csv"
SUFFIXES = (".csv", ".tsv", ".parquet", ".pq")


@o.takes(*o.READING, "device", "force", "quiet", "json")
def command(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="Folder written by evalign fit, or a model file.", show_default=False)
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
    adapt: Annotated[
        bool,
        typer.Option(
            "--adapt",
            help="Test whether class shares differ from training; if nothing else does, adapt the decision. "
            "A report is written next to --out.",
        ),
    ] = False,
    keep: Annotated[
        list[str] | None, typer.Option("--keep", help="Column of DATA to copy to the output; repeatable.")
    ] = None,
    target: Annotated[
        str | None, typer.Option("--target", "-t", help="Column of DATA with labels, to report the score; as in fit.")
    ] = None,
    **given: Any,
) -> None:
    """Predict the label and the class probabilities of each row of DATA, in order.

    Columns are matched by name. Unknown columns are ignored with a note; a missing column is an error. A model of
    several targets writes a column prediction_TARGET for each.
    """
    device, force, json = given["device"], given["force"], given["json"]
    trained = read_result(folder if folder.is_dir() else folder.parent) or {}
    Reading.of(given).check(data)
    reading = Reading.of(given).otherwise(trained.get("reading") or {})
    targets = split_names(target) if target else []
    if not data.is_dir():
        check_source(data, [*(keep or []), *targets], reading.encoding)
    report = None if out is None or not adapt else out.with_suffix(".report.html")
    check_out(out, data, folder, force)
    if report is not None and report.exists() and not force:
        raise ValueError(
            f"{report}, the report of --adapt, exists; choose another --out, or pass --force to overwrite it"
        )
    if json and out is None:
        raise ValueError("--json prints the result to standard output, so predictions need a file; add --out")
    from evalign.tables.formats import expand_dates

    o.resolve_device(device)
    output = Output(quiet=given["quiet"], as_json=json)
    model = load_model(folder, device)
    known = getattr(model, "feature_names_in_", ())
    if both := [name for name in targets if name in known]:
        raise ValueError(f"--target names {quoted(both)}, which is a feature of the model; give the column of labels")
    labelled = trained.get("data", {}).get("target") or []  # as in training
    answers = [*targets, *([labelled] if isinstance(labelled, str) else labelled)]
    answers = [name for name in answers if name not in known]
    formats = (trained.get("reading") or {}).get("formats")
    frame = read(data, model, targets, answers, keep or [], reading, formats, output.note)
    features = frame.drop(columns=[name for name in answers if name in frame])
    named = list(features.columns)
    features = expand_dates(features, features=known)
    check_header(str(data), named, [name for name in known if name not in features])
    features, extra = encoder(model).select(features)
    if extra := [name for name in extra if name not in (keep or [])]:
        output.note(f"columns unknown to the model were ignored: {quoted(extra)}")
    trained_model = model
    if adapt:
        model = model.adapt(features)
        output.say(str(model.shift_))
    p = model.predict_proba(features)
    decided = model.decide(p, jointly=jointly, X=features)
    predictions = predicted_table(model, p, decided, proba)
    for name in reversed(list(dict.fromkeys(keep or []))):
        if name in predictions:
            raise ValueError(f"--keep {name} would give two columns of that name; rename it in {data}")
        predictions.insert(0, name, frame[name].to_numpy())
    result: dict[str, Any] = {"rows": len(frame), "classes": [str(label) for label in model.classes_.tolist()]}
    if adapt:
        result["shift"] = describe_shift(model.shift_, trained_model.decide(p, X=features), decided, data)
    if targets:
        from evalign.cli.run_files import check_labels

        truth = check_labels(frame[targets], None if model.multilabel_ else model.classes_, data)
        score, costs = model.score_labels(decided, truth, X=features), model.metric == "cost"
        result |= {"metric": model.metric, "score": -score if costs else score}
        output.say(f"{'mean cost' if costs else model.metric} on these rows: {result['score']:.4f}")
    write(predictions, out)
    if out is not None:
        result["file"] = str(out)
        output.show(f"{len(frame)} predictions: {out}")
    if report is not None and trained:
        from evalign.report.page import render

        result["report"] = str(write_atomically(report, render(trained | {"shift": result["shift"]})))
        output.show(f"Report: {report}")
    output.json(result)


def check_out(out: Path | None, data: Path, folder: Path, force: bool) -> None:
    """Raise, before any work is done, if --out cannot be written or would overwrite something."""
    if out is None:
        return
    if out.suffix.lower() not in SUFFIXES:
        raise ValueError(f"--out must end in {', '.join(SUFFIXES)}, got {out.name!r}")
    if out.is_dir():
        raise ValueError(f"--out must be a file, {out} is a folder; choose another name")
    if data.is_dir() and data.resolve() in out.resolve().parents:
        raise ValueError(f"--out {out} is inside the input folder {data}; choose another place")
    if out.exists():
        if any(path.exists() and out.samefile(path) for path in (data, folder)):
            raise ValueError(f"--out {out} is an input of this command; choose another name")
        if not force:
            raise ValueError(f"--out {out} exists; choose another name, or pass --force to overwrite it")
    check_writable(out)


def load_model(folder: Path, device: str) -> Any:
    """Load the model of a folder or file."""
    from evalign.estimators.blend import load_model as load

    path = folder / MODEL if folder.is_dir() else folder
    if not path.is_file():
        where = f"the folder {folder} has no {MODEL}" if folder.is_dir() else f"{folder} does not exist"
        raise ValueError(f"{where}; give the folder that evalign fit wrote")
    model = load(path)
    if device != "auto":
        model.to(device)
    return model


def read(
    path: Path, model: Any, targets: list[str], answers: list[str], keep: list[str], reading: Reading, formats: Any,
    note: Any,
) -> "pd.DataFrame":  # fmt: skip
    """Read the table, or the Parquet files of a folder, as the training file was read; its text columns stay text.

    `answers` are columns of labels: the `targets` to score, or those of training, which are not converted.
    """
    import pandas as pd

    from evalign.streaming.source import parquet_files
    from evalign.tables.read import read_table

    if targets and len(targets) != (len(model.classes_) if model.multilabel_ else 1):
        raise ValueError(f"--target must name the columns that the model was trained on, got {quoted(targets)}")
    worded = not model.multilabel_ and model.classes_.dtype.kind in "OUT"
    text = [*encoder(model).text_columns_, *(answers if worded else set(answers) - set(targets))]
    if path.is_dir():
        frame = pd.concat([read_table(file, text=text) for file in parquet_files(path)], ignore_index=True)
    else:
        labels = targets[0] if len(targets) == 1 else None
        frame = read_table(path, text=text, **reading.options(), formats=formats, labels=labels, note=note)
    check_header(str(path), list(frame.columns), [*keep, *targets])
    return frame


def encoder(model: Any) -> Any:
    """The encoder of a model's table; the models of several labels share equal ones."""
    return next(part.encoder_ for part in parts_of(model) if hasattr(part, "encoder_"))


def describe_shift(shift: Any, before: Any, now: Any, data: Path) -> dict[str, Any]:
    """Describe the class shares of DATA, and how many rows of each class are predicted with and without adapting."""
    import numpy as np

    def counts(decisions: Any) -> dict[str, int]:
        if decisions.ndim == 2:  # one column per label
            return dict(zip(map(str, shift.classes), decisions.sum(0).tolist(), strict=True))
        return {str(label): int(n) for label, n in zip(*np.unique(decisions, return_counts=True), strict=True)}

    first, last = counts(before), counts(now)
    decided = {name: [first.get(name, 0), last.get(name, 0)] for name in map(str, shift.classes)}
    return {**shift.to_json(), "file": data.name, "decided": decided}


def predicted_table(model: Any, p: Any, decided: Any, proba: bool) -> "pd.DataFrame":
    """A column of predictions, or one per label, and the probabilities."""
    import pandas as pd

    names = [f"prediction_{label}" for label in model.classes_] if model.multilabel_ else ["prediction"]
    table = pd.DataFrame(dict(zip(names, decided.T if model.multilabel_ else [decided], strict=True)))
    for label, column in zip(model.classes_.tolist(), p.T if proba else (), strict=bool(proba)):
        table[f"probability_{label}"] = column
    return table


def write(table: "pd.DataFrame", out: Path | None) -> None:
    """Write the table in the format of the suffix of `out`, or as CSV to standard output."""
    if out is None:
        with until_pipe_closes():
            table.to_csv(sys.stdout, index=False)
    elif out.suffix.lower() in (".parquet", ".pq"):
        write_atomically(out, table.to_parquet(index=False))
    else:
        write_atomically(out, table.to_csv(index=False, sep="\t" if out.suffix.lower() == ".tsv" else ","))
