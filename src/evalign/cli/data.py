"""Load the tables of a run and note what a user should know about them."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evalign.tables.files import TableError, check_header, check_source, quoted

if TYPE_CHECKING:
    import pandas as pd

    from evalign.comparison.aims import Judge
    from evalign.comparison.run import Table
    from evalign.tables.profile import TableProfile

Note = Callable[[str], None]
TEST_SIZE = 0.2


@dataclass(frozen=True)
class Reading:
    """How to read text files, as the command line says it."""

    decimal: str | None = None
    na: tuple[str, ...] = ()
    encoding: str | None = None

    def check(self) -> None:
        if self.decimal not in (None, ".", ","):
            raise ValueError(f"--decimal must be . or , got {self.decimal!r}")

    def options(self) -> dict[str, Any]:
        """Arguments of `read_table`."""
        from evalign.tables.read import MISSING

        return {"decimal": self.decimal, "missing": (*MISSING, *self.na), "encoding": self.encoding}

    def to_json(self) -> dict[str, Any]:
        return {"decimal": self.decimal, "na": list(self.na), "encoding": self.encoding}


@dataclass(frozen=True)
class Source:
    """The files of a run, and the columns and rows of them to use; `test_size` is None unless it was given."""

    path: Path
    target: str
    test: Path | None = None
    test_size: float | None = None
    drop: tuple[str, ...] = ()
    reading: Reading = Reading()
    drop_unlabelled: bool = False
    task: str | None = None

    def check(self) -> None:
        """Raise for what can be found without reading the files; needs neither pandas nor torch."""
        self.reading.check()
        if self.task not in (None, "classification"):
            raise ValueError(f"--task must be classification, got {self.task!r}; evalign does not predict amounts")
        if self.target in self.drop:
            raise ValueError(f"--drop names the target {self.target!r}; drop another column")
        if self.test_size is not None:
            if self.test is not None:
                raise ValueError("--test-size holds rows of DATA out, --test names a file of test rows; give only one")
            if not 0 < self.test_size < 1:
                raise ValueError(f"--test-size must lie between 0 and 1, such as 0.2, got {self.test_size:g}")
        if not self.path.is_dir():
            check_source(self.path, [self.target, *self.drop], self.reading.encoding)
        if self.test is not None:
            check_source(self.test, [self.target], self.reading.encoding)
            if not self.path.is_dir() and (self.test.samefile(self.path) or checksum(self.test) == checksum(self.path)):
                raise ValueError(f"--test {self.test} is the training file; test on rows that were not trained on")

    @property
    def share(self) -> float:
        """Share of each class to hold out for testing."""
        return TEST_SIZE if self.test_size is None else self.test_size


@dataclass(frozen=True)
class Loaded:
    """Tables of a run and their files; `test` is None if it has to be split off."""

    table: "Table"
    test: "Table | None"
    source: Source
    profile: "TableProfile"
    reading: dict[str, Any]  # how the file was read, to read rows to predict alike

    def describe(self) -> dict[str, Any]:
        """Names, sizes and checksums for result.json."""
        facts: dict[str, Any] = {
            "file": str(self.source.path),
            "sha256": checksum(self.source.path),
            "rows": len(self.table),
            "features": self.table.X.shape[1],
            "target": self.source.target,
            "classes": self.profile.classes,
        }
        if self.source.test is not None:
            facts |= {"test_file": str(self.source.test), "test_sha256": checksum(self.source.test)}
        return facts

    def details(self) -> dict[str, Any]:
        """More for result.json: a summary of the profile, each column, and how the file was read."""
        return {
            "profile": self.profile.summary(),
            "columns": self.profile.to_json()["columns"],
            "reading": self.reading,
        }


def load(source: Source, note: Note) -> Loaded:
    """Read and check everything that can be checked before training."""
    from evalign.comparison.run import Table
    from evalign.tables.delimited import DECIMAL
    from evalign.tables.formats import expand_dates, is_text
    from evalign.tables.profile import profile_table
    from evalign.tables.read import FORMATS, check_target, read_table

    path, target, options = source.path, source.target, source.reading.options()
    fractions = [target] if source.task == "classification" else []
    frame = read_table(path, **options, text=fractions, labels=target, note=note)
    check_header(str(path), list(frame.columns), [target, *source.drop])
    formats, decimal = frame.attrs[FORMATS], frame.attrs.get(DECIMAL)
    options["decimal"] = decimal
    reading = source.reading.to_json() | {"decimal": decimal, "formats": formats}
    X, y = check_target(
        frame.drop(columns=list(source.drop)), target, classification=bool(fractions),
        drop_unlabelled=source.drop_unlabelled, note=note,
    )  # fmt: skip
    text = [*(name for name in X if is_text(X[name])), *([target] if y.dtype.kind in "OUT" else [])]
    X = expand_dates(X, note=note)
    check_columns(X)
    profile = profile_table(X, y)
    for sentence in profile.notes():
        note(sentence)
    test = None
    if source.test is not None:
        # What is text in one file must be text in the other, even if it looks like numbers there.
        frame = read_table(source.test, **options, text=text, formats=formats)
        check_header(str(source.test), list(frame.columns), [target])
        if source.drop_unlabelled:
            frame = frame[frame[target].notna()].reset_index(drop=True)
        labels, frame = frame[target], expand_dates(frame.drop(columns=target), features=X.columns)
        check_header(str(source.test), list(frame.columns), list(X.columns))
        if extra := [name for name in frame.columns if name not in X and name not in source.drop]:
            note(f"{source.test.name} has columns that {path.name} lacks, which are ignored: {quoted(extra)}")
        check_columns(frame[list(X.columns)])
        test = Table(frame[list(X.columns)], check_labels(labels, y, source.test))
    return Loaded(Table(X, y), test, source, profile, reading)


def check_columns(frame: "pd.DataFrame") -> None:
    """Raise before training for any value that would be refused after it, in a test row."""
    from evalign.tables.columns import column_kind, floats

    for name in frame.columns:
        if column_kind(frame[name], name) == "number":
            floats(frame[name], name)


def check_labels(column: "pd.Series[Any]", known: Any, path: Path) -> Any:
    """Labels of another file, which must all be known."""
    import numpy as np
    import pandas as pd

    if lacking := int(column.isna().sum()):
        raise TableError(f"{path} has {lacking} rows without a label in {column.name!r}; drop them")
    labels, seen = column.infer_objects().to_numpy(), set(np.unique(known).tolist())
    if unknown := [label for label in pd.unique(labels).tolist() if label not in seen]:
        raise TableError(
            f"{path} has the label {quoted(unknown)} in {column.name!r}, but training has "
            f"{quoted(sorted(seen, key=str))}; drop these rows, or add such rows to the training file"
        )
    return labels.astype(np.asarray(known).dtype)


def checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def note_positive(judge: "Judge", counts: dict[str, int], note: Note) -> None:
    """Note that the default positive class is the more frequent one; usually the rare one is meant."""
    from evalign import metrics

    if judge.aim.positive is not None or judge.average != "binary" or not metrics.is_averaged(judge.aim.name):
        return
    other, positive = judge.names
    if counts[positive] > counts[other]:
        note(f"{positive!r} is the positive class, the more frequent one; use --positive {other} for the other")


def note_classes(judge: "Judge", truth: Any, note: Note) -> None:
    """Note classes with too few test rows."""
    import numpy as np

    counts = np.bincount(truth, minlength=len(judge.classes))
    if absent := [name for name, count in zip(judge.names, counts, strict=True) if count == 0]:
        note(f"no test row has the class {quoted(absent)}, which counts as 0 in a macro average")
    if few := [name for name, count in zip(judge.names, counts, strict=True) if 0 < count < 10]:
        note(f"fewer than 10 test rows have the class {quoted(few)}, whose scores are unreliable")


def note_batches(judge: "Judge", counts: dict[str, int], batch_size: int, note: Note) -> None:
    """Note classes that most batches will not contain."""
    total = sum(counts.values())
    if missed := [name for name in judge.names if (1 - counts[name] / total) ** batch_size > 0.5]:
        note(
            f"most batches of {batch_size} rows will not contain the class {quoted(missed)}; "
            "evalign advise shows the batch size that the metric needs"
        )
