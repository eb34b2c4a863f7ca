"""Load the tables of a run and note what a user should know about them."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from evalign import metrics
from evalign.comparison.aims import Judge
from evalign.comparison.run import Table
from evalign.tables.columns import TableError, check_header, column_kind, floats, quoted
from evalign.tables.read import check_target, read_table

Note = Callable[[str], None]


@dataclass(frozen=True)
class Loaded:
    """Tables of a run and their files; `test` is None if it has to be split off."""

    table: Table
    test: Table | None
    path: Path
    test_path: Path | None
    target: str

    def describe(self) -> dict[str, Any]:
        """Names, sizes and checksums for result.json."""
        labels, counts = np.unique(self.table.y, return_counts=True)
        facts: dict[str, Any] = {
            "file": str(self.path),
            "sha256": checksum(self.path),
            "rows": len(self.table),
            "features": self.table.X.shape[1],
            "target": self.target,
            "classes": {str(label): int(n) for label, n in zip(labels.tolist(), counts, strict=True)},
        }
        if self.test is not None and self.test_path is not None:
            facts |= {"test_file": str(self.test_path), "test_sha256": checksum(self.test_path)}
        return facts


def load(path: Path, target: str, *, test: Path | None, drop: Sequence[str], test_size: float, note: Note) -> Loaded:
    """Read and check everything that can be checked before training."""
    if test is None and not 0 < test_size < 1:
        raise TableError(f"--test-size must lie between 0 and 1, such as 0.2, got {test_size:g}")
    X, y = check_target(_dropped(read_table(path), drop, path), target)
    check_columns(X)
    held_out = None
    if test is not None:
        # What is text in one file must be text in the other, even if it looks like numbers there.
        text = [*(name for name in X if is_text(X[name])), *([target] if y.dtype.kind in "OUT" else [])]
        frame = read_table(test, text=text)
        check_header(str(test), list(frame.columns), [target, *X.columns])
        if extra := [name for name in frame.columns if name not in X and name != target and name not in drop]:
            note(f"{test.name} has columns that {path.name} lacks, which are ignored: {quoted(extra)}")
        check_columns(frame[list(X.columns)])
        held_out = Table(frame[list(X.columns)], check_labels(frame[target], y, test))
    return Loaded(Table(X, y), held_out, path, test, target)


def check_columns(frame: pd.DataFrame) -> None:
    """Raise before training for any value that would be refused after it, in a test row."""
    for name in frame.columns:
        if column_kind(frame[name], name) == "number":
            floats(frame[name], name)


def check_labels(column: pd.Series, known: Any, path: Path) -> Any:
    """Labels of another file, which must all be known."""
    if lacking := int(column.isna().sum()):
        raise TableError(f"{path} has {lacking} rows without a label in {column.name!r}; drop them")
    labels, seen = column.infer_objects().to_numpy(), set(np.unique(known).tolist())
    if unknown := [label for label in pd.unique(labels).tolist() if label not in seen]:
        raise TableError(
            f"{path} has the label {quoted(unknown)} in {column.name!r}, but training has "
            f"{quoted(sorted(seen, key=str))}; drop these rows, or add such rows to the training file"
        )
    return labels.astype(np.asarray(known).dtype)


def is_text(column: pd.Series) -> bool:
    """Whether a column was read as text."""
    return bool(pd.api.types.is_string_dtype(column.dtype))


def checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _dropped(frame: pd.DataFrame, drop: Sequence[str], path: Path) -> pd.DataFrame:
    check_header(str(path), list(frame.columns), drop)
    return frame.drop(columns=list(drop))


def note_columns(encoder: Any, note: Note) -> None:
    """Note constant columns and columns that look like identifiers."""
    if constant := encoder.constant_columns_:
        note(f"constant columns carry no information: {quoted(constant)}")
    if ids := encoder.id_like_columns_:
        note(f"nearly every row has a different text in {quoted(ids)}; if it identifies the row, ignore it with --drop")


def note_positive(judge: Judge, counts: dict[str, int], note: Note) -> None:
    """Note that the default positive class is the more frequent one; usually the rare one is meant."""
    if judge.aim.positive is not None or judge.average != "binary" or not metrics.is_averaged(judge.aim.name):
        return
    other, positive = judge.names
    if counts[positive] > counts[other]:
        note(f"{positive!r} is the positive class, the more frequent one; use --positive {other} for the other")


def note_classes(judge: Judge, truth: Any, note: Note) -> None:
    """Note classes with too few test rows."""
    counts = np.bincount(truth, minlength=len(judge.classes))
    if absent := [name for name, count in zip(judge.names, counts, strict=True) if count == 0]:
        note(f"no test row has the class {quoted(absent)}, which counts as 0 in a macro average")
    if few := [name for name, count in zip(judge.names, counts, strict=True) if 0 < count < 10]:
        note(f"fewer than 10 test rows have the class {quoted(few)}, whose scores are unreliable")


def note_batches(judge: Judge, counts: dict[str, int], batch_size: int, note: Note) -> None:
    """Note classes that most batches will not contain."""
    total = sum(counts.values())
    if missed := [name for name in judge.names if (1 - counts[name] / total) ** batch_size > 0.5]:
        note(
            f"most batches of {batch_size} rows will not contain the class {quoted(missed)}; "
            "evalign advise shows the batch size that the metric needs"
        )
