"""Files of a run: the tables to read, with notes for the user, and the folder to write."""

import csv
import hashlib
import json
import math
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evalign.cli.options import Settings
from evalign.storage.atomic import check_writable, remove_staged, staged_folder, write_atomically
from evalign.tables.files import TableError, check_header, check_source, file_format, quoted

if TYPE_CHECKING:
    import pandas as pd

    from evalign.cli.console import Output
    from evalign.comparison.goals import Judge
    from evalign.comparison.run import Comparison, Table
    from evalign.tables.profile import TableProfile

Note = Callable[[str], None]
TEST_SIZE = 0.2
RESULT, REPORT, MODEL = "result.json", "report.html", "model.safetensors"
# Files that a streaming run resumes from, by contender.
CHECKPOINTS = {name: f"checkpoint-{name}.safetensors" for name in ("ours", "cross_entropy")}
FORMAT, VERSION = "evalign.result", 1


@dataclass(frozen=True)
class Reading:
    """Options for reading text files."""

    decimal: str | None = None
    na: tuple[str, ...] = ()
    encoding: str | None = None

    @classmethod
    def of(cls, given: dict[str, Any]) -> "Reading":
        return cls(given["decimal"], tuple(given["na"] or ()), given["encoding"])

    def otherwise(self, other: dict[str, Any]) -> "Reading":
        """These options; where one is not given, the value that `to_json` wrote for another file."""
        return Reading(
            self.decimal or other.get("decimal"), self.na or tuple(other.get("na", ())),
            self.encoding or other.get("encoding"),
        )  # fmt: skip

    def check(self, *paths: Path) -> None:
        """Raise for invalid values, and for options that the format of no file supports."""
        if self.decimal not in (None, ".", ","):
            raise ValueError(f"--decimal must be . or , got {self.decimal!r}")
        known = {"encoding": ("text",), "decimal": ("text", "excel", "json lines"), "na": ("text", "excel")}
        kinds = {"parquet" if path.is_dir() else file_format(path)[0] for path in paths}
        for name, formats in known.items():
            if getattr(self, name) and not kinds & {*formats}:
                raise ValueError(f"--{name} is an option of text files, got {paths[0]}; leave it out")

    def options(self, drop_unlabelled: bool = False) -> dict[str, Any]:
        """Arguments of `read_table`."""
        from evalign.tables.read import MISSING, MISSING_LABELS

        missing = (*MISSING, *self.na)
        no_label = missing if drop_unlabelled else (*MISSING_LABELS, *self.na)
        return {"decimal": self.decimal, "missing": missing, "encoding": self.encoding, "missing_labels": no_label}

    def to_json(self) -> dict[str, Any]:
        return {"decimal": self.decimal, "na": list(self.na), "encoding": self.encoding}


@dataclass(frozen=True)
class InputFiles:
    """Input files of a run, and which columns and rows to use; `test_size` is None unless it was given.

    `target` may name several columns, separated by commas; `costs` are columns that hold costs.
    """

    path: Path
    target: str
    test: Path | None = None
    test_size: float | None = None
    drop: tuple[str, ...] = ()
    reading: Reading = Reading()
    drop_unlabelled: bool = False
    task: str | None = None
    costs: Sequence[str] = ()

    @classmethod
    def of(cls, path: Path, given: dict[str, Any], costs: Sequence[str] = ()) -> "InputFiles":
        """The source that the options of a command describe."""
        own = {name: given[name] for name in ("test", "test_size", "drop_unlabelled", "task") if name in given}
        drop, reading = tuple(given.get("drop") or ()), Reading.of(given)
        return cls(path, given["target"], drop=drop, reading=reading, costs=costs, **own)

    @property
    def targets(self) -> list[str]:
        return split_names(self.target)

    def check(self) -> None:
        """Run the checks that do not read the files; needs neither pandas nor torch."""
        self.reading.check(*(path for path in (self.path, self.test) if path is not None))
        if self.task not in (None, "classification"):
            raise ValueError(f"--task must be classification, got {self.task!r}; evalign does not support regression")
        if self.task and len(self.targets) > 1:
            raise ValueError("--task classification needs a single target, got several of 0 and 1; leave it out")
        for kind, names in (("the target", self.targets), ("the costs", self.costs)):
            if both := [name for name in names if name in self.drop]:
                raise ValueError(f"--drop names {kind} {quoted(both)}; drop another column")
        if len(set(self.targets)) < len(self.targets):
            raise ValueError(f"--target {self.target} names a column twice; give each once")
        if self.test_size is not None:
            if self.test is not None:
                raise ValueError(
                    "--test-size holds out rows of DATA and --test names a file of test rows; give only one"
                )
            if not 0 < self.test_size < 1:
                raise ValueError(f"--test-size must lie between 0 and 1, such as 0.2, got {self.test_size:g}")
        if not self.path.is_dir():
            check_source(self.path, [*self.targets, *self.drop, *self.costs], self.reading.encoding)
        if self.test is not None:
            check_source(self.test, self.targets, self.reading.encoding)
            if not self.path.is_dir() and (self.test.samefile(self.path) or checksum(self.test) == checksum(self.path)):
                raise ValueError(f"--test {self.test} is the training file; use rows that are not trained on")

    @property
    def share(self) -> float:
        """Share of each class to hold out for testing."""
        return TEST_SIZE if self.test_size is None else self.test_size


@dataclass(frozen=True)
class Loaded:
    """Tables of a run; `test` is None if it is to be split off."""

    table: "Table"
    test: "Table | None"
    source: InputFiles
    profile: "TableProfile"
    reading: dict[str, Any]  # how the file was read, so that rows to predict are read in the same way

    def describe(self) -> dict[str, Any]:
        """Names, sizes and checksums for result.json."""
        path, test, targets = self.source.path, self.source.test, self.source.targets
        facts: dict[str, Any] = {
            "file": str(path), "sha256": checksum(path), "rows": len(self.table), "features": self.table.X.shape[1],
            "target": self.source.target if len(targets) == 1 else targets, "classes": self.profile.classes,
        }  # fmt: skip
        if test is not None:
            facts |= {"test_file": str(test), "test_sha256": checksum(test)}
        return facts

    def details(self) -> dict[str, Any]:
        """More for result.json: a summary of the profile, each column, and how the file was read."""
        return {
            "profile": self.profile.summary(),
            "columns": self.profile.to_json()["columns"],
            "reading": self.reading,
        }


def load(source: InputFiles, note: Note) -> Loaded:
    """Read and check everything that can be checked before training."""
    import pandas as pd

    from evalign.comparison.run import Table
    from evalign.tables.formats import expand_dates, is_text
    from evalign.tables.profile import profile_table
    from evalign.tables.read import DECIMAL, FORMATS, check_indicators, check_target, read_table

    path, targets, options = source.path, source.targets, source.reading.options(source.drop_unlabelled)
    labels = targets[0] if len(targets) == 1 else None
    fractions = targets if source.task == "classification" else []
    frame = read_table(path, **options, text=fractions, labels=labels, note=note)
    check_header(str(path), list(frame.columns), [*targets, *source.drop, *source.costs])
    formats, decimal = frame.attrs[FORMATS], frame.attrs.get(DECIMAL)
    options["decimal"] = decimal
    reading = source.reading.to_json() | {"decimal": decimal, "formats": formats}
    frame, dropped = frame.drop(columns=list(source.drop)), source.drop_unlabelled
    y: Any
    if labels is None:
        X, y = check_indicators(frame, targets, drop_unlabelled=dropped, note=note)
    else:
        X, y = check_target(frame, labels, classification=bool(fractions), drop_unlabelled=dropped, note=note)
    for name in source.costs:
        if not pd.api.types.is_numeric_dtype(X[name]):
            raise TableError(f"--costs names the column {name!r}, which must hold numbers, got {X[name].dtype}")
    if empty := [name for name in X if X[name].isna().all()]:
        X = X.drop(columns=empty)
        if X.empty:
            raise TableError(
                f"{path} has no values in any column except the target {source.target!r}; is it the right file?"
            )
        note(f"columns without any value were ignored: {quoted(empty)}")
    text = [*(name for name in X if is_text(X[name])), *(targets if labels and y.dtype.kind in "OUT" else [])]
    X = expand_dates(X, note=note)
    check_columns(X)
    profile = profile_table(X, y)
    for sentence in profile.notes():
        note(sentence)
    test = None
    if source.test is not None:
        # A text column stays text in the test file, even if it looks like numbers there.
        frame = read_table(source.test, **options, text=text, formats=formats, labels=labels)
        check_header(str(source.test), list(frame.columns), targets)
        if source.drop_unlabelled:
            frame = frame.dropna(subset=targets, ignore_index=True)
        truth, frame = frame[targets], expand_dates(frame.drop(columns=targets), features=X.columns)
        check_header(str(source.test), list(frame.columns), list(X.columns))
        if extra := [name for name in frame if name not in (*X, *source.drop, *empty)]:
            note(f"{source.test.name} has columns that {path.name} lacks, which are ignored: {quoted(extra)}")
        check_columns(frame[list(X.columns)])
        test = Table(frame[list(X.columns)], check_labels(truth, None if labels is None else y, source.test))
    return Loaded(Table(X, y), test, source, profile, reading)


def check_columns(frame: "pd.DataFrame") -> None:
    """Raise before training for values that prediction would refuse, such as infinity."""
    from evalign.tables.columns import column_kind, floats

    for name in frame.columns:
        if column_kind(frame[name], name) == "number":
            floats(frame[name], name)


def split_names(text: str) -> list[str]:
    """Split comma-separated column names; quotes keep a comma.

    >>> split_names("a, b"), split_names('"a,b"')
    (['a', 'b'], ['a,b'])
    """
    return next(csv.reader([text], skipinitialspace=True), [text]) or [text]


def check_labels(columns: "pd.DataFrame", known: Any, path: Path) -> Any:
    """Labels of another file: 0 and 1 of several columns, or one column of labels that are all known."""
    import numpy as np
    import pandas as pd

    from evalign.tables.read import indicators

    if known is None:
        return indicators(columns)
    column = columns.iloc[:, 0]
    if lacking := int(column.isna().sum()):
        raise TableError(f"{path} has {lacking} rows without a label in {column.name!r}; drop them")
    labels, seen = column.infer_objects().to_numpy(), set(np.unique(known).tolist())
    if unknown := [label for label in pd.unique(labels).tolist() if label not in seen]:
        raise TableError(
            f"{path} has the label{'s' * (len(unknown) > 1)} {quoted(unknown)} in {column.name!r}, but training has "
            f"{quoted(sorted(seen, key=str))}; drop these rows, or add such rows to the training file"
        )
    return labels.astype(np.asarray(known).dtype)


def checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def note_positive(judge: "Judge", counts: dict[str, int], note: Note) -> None:
    """Note if the default positive class is the more frequent one; usually the rare one is meant."""
    from evalign import metrics

    by_cell = judge.costs is not None and any(isinstance(key, str) and key != "reject" for key in judge.aim.costs or ())
    if judge.aim.positive is None and judge.average == "binary" and (by_cell or metrics.is_averaged(judge.aim.name)):
        other, positive = judge.names
        if counts[positive] > counts[other]:
            wanted = f"--positive {shlex.quote(other)}"
            note(f"{positive!r} is the positive class, the more frequent one; use {wanted} for the other")


def note_classes(judge: "Judge", truth: Any, note: Note) -> None:
    """Note classes with too few test rows."""
    import numpy as np

    from evalign.report.page import metric_title

    counts = truth.sum(0) if judge.multilabel else np.bincount(truth, minlength=len(judge.classes))
    rows = dict(zip(judge.names, counts, strict=True))
    if absent := [name for name, count in rows.items() if count == 0]:
        lost = ", which counts as 0 in a macro average" if judge.average == "macro" and judge.costs is None else ""
        if judge.binary and judge.costs is None and absent == judge.names[1:]:
            lost = f", the positive one, so {metric_title(judge)} cannot be measured"
        note(f"no test row has the class {quoted(absent)}{lost}")
    if few := [name for name, count in rows.items() if 0 < count < 10]:
        note(f"classes with fewer than 10 test rows, whose scores are unreliable: {quoted(few)}")


class RunFolder:
    """A folder for the files of one run and nothing else."""

    def __init__(self, path: Path, *, also: tuple[str, ...] = (), force: bool = False) -> None:
        self.path, self.known, self.force = path, {RESULT, REPORT, MODEL, *also}, force

    def check(self) -> None:
        """Raise, before any work is done, if the folder cannot be written or holds files that must be kept."""
        self._check_content()
        check_writable(self.path)

    def _check_content(self) -> None:
        if not self.path.exists():
            return
        if not self.path.is_dir():
            raise TableError(f"--out must be a folder, {self.path} is a file; choose another name")
        names = sorted(entry.name for entry in self.path.iterdir())
        # What a killed process may leave: a dot, the name of a file or `writing-`, and a random suffix.
        left = (".writing-", *(f".{name}." for name in self.known))
        if foreign := [name for name in names if name not in self.known and not name.startswith(left)]:
            raise TableError(
                f"--out must be a new folder or one of an earlier run, {self.path} also holds "
                f"{quoted(foreign, most=3)}; choose another one"
            )
        if {RESULT, REPORT, MODEL} & set(names) and read_result(self.path) is None:
            raise TableError(
                f"--out must be a new folder or one of an earlier run, {self.path} has no {RESULT} of one; "
                "choose another one, or empty it"
            )
        if RESULT in names and not self.force:
            raise TableError(
                f"--out {self.path} holds an earlier run; choose another folder, or pass --force to overwrite it"
            )

    def write(self, result: dict[str, Any], report: str, model: Any = None) -> None:
        """Write model, report and result together; if one fails, none is written."""
        remove_staged(self.path)
        with staged_folder(self.path, last=RESULT) as stage:
            if model is not None:
                model.save(stage / MODEL)
            write_atomically(stage / REPORT, report)
            write_atomically(stage / RESULT, json.dumps(result, indent=2, allow_nan=False) + "\n")


def read_result(folder: Path) -> dict[str, Any] | None:
    """Read the result in a folder; None if it holds no result of evalign."""
    try:
        result = json.loads((folder / RESULT).read_text())
    except (OSError, ValueError):
        return None
    return result if isinstance(result, dict) and result.get("format") == FORMAT else None


def finish(
    command: str,
    comparison: "Comparison",
    settings: Settings,
    data: dict[str, Any],
    split: dict[str, Any],
    protocol: str,
    folder: RunFolder,
    output: "Output",
    *,
    decision: str,
    estimator: Any = None,
    **more: Any,
) -> dict[str, Any]:
    """Write result, report and the `estimator`, if any, and print the table; `decision` is the reference row's."""
    from evalign.cli.console import as_table
    from evalign.report.page import build_result, headline, render, verdict, versions

    result: dict[str, Any] = {
        "format": FORMAT, "version": VERSION, "command": command,
        "command_line": shlex.join(["evalign", *(output.words or [command])]),
        "created": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"), "versions": versions(),
        "settings": settings.to_json() | {"decision": decision}, "data": data, "split": split, "protocol": protocol,
        **build_result(comparison, ("ours", decision), seed=settings.seed), **more, "notes": output.notes,
    }  # fmt: skip
    result = {name: _finite(value) for name, value in result.items()}
    folder.write(result, render(result), estimator)
    output.show(as_table(result))
    output.show(f"{headline(result)} {verdict(result)}")
    output.show(f"Report: {folder.path / REPORT}")
    output.json(result)
    return result


def finish_fit(
    judge: "Judge", trials: list[Any], settings: Settings, data: dict[str, Any], folder: RunFolder, output: "Output", *,
    interrupted: bool, rows: int, test_from: str, remark: str = "", split: dict[str, Any] | None = None, **more: Any,
) -> Any:  # fmt: skip
    """Write what `evalign fit` writes, and return the saved model: the one of the first trial.

    `rows` is the number of rows outside the test set.
    """
    import numpy as np

    from evalign.comparison.run import Comparison

    model, tested = trials[0].estimator, len(trials[0].truth)
    note_classes(judge, trials[0].truth, output.note)
    for part in parts_of(model):
        if hasattr(part, "device"):
            part.device = "auto"  # the saved model may be loaded on another machine
    found = model.held_out_predictions_
    held_out, folds = len(np.unique(found.rows)) or len(found.labels), len(np.unique(found.fold))
    if folds > 1 and settings.model == "network":
        output.note(f"{folds} networks were trained, one per fold; predictions are their mean")
    sizes = {
        "test_from": test_from, "training_and_validation_rows": rows, "validation_rows": held_out, "test_rows": tested,
    }  # fmt: skip
    how = f"each by one of {folds} folds" if folds > 1 else "the same for all models"
    protocol = (
        f"The {tested:,} test rows were read once, at the end; every choice was made on {held_out:,} held-out rows of "
        f"the other {rows:,} ({how}). {remark}The saved model is the one tested here."
    )
    learned = {
        "file": MODEL, "kind": settings.model, "decision": model.decision_.to_json(),
        "temperature": model.temperature_,
        "kept_epoch": next((row["epoch"] for row in reversed(model.history_) if row["best"]), None),
    }  # fmt: skip
    comparison = Comparison(judge, interrupted=interrupted)
    comparison.add(trials)
    finish(
        "fit", comparison, settings, data, sizes | (split or {}), protocol, folder, output,
        decision=settings.rule, estimator=model, model=learned, **more,
    )  # fmt: skip
    output.show(f"Model:  {folder.path / MODEL} (trained on the {rows} rows outside the test set)")
    return model


def parts_of(model: Any) -> list[Any]:
    """A model, and the models it is made of."""
    made_of = [*getattr(model, "members_", {}).values(), *getattr(model, "label_models_", ())]
    return [model, *(part for one in made_of if not isinstance(one, float) for part in parts_of(one))]


def _finite(value: Any) -> Any:
    """Replace nan and infinity by None: JSON has neither."""
    if isinstance(value, dict):
        return {key: _finite(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
