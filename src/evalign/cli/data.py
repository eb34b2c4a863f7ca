"""Files -> development and test tables, with notes on what a user would want to know."""

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
    """The tables of a run and where they came from; `test` is None where it is to be split off."""

    table: Table
    test: Table | None
    path: Path
    test_path: Path | None
    target: str

    def describe(self) -> dict[str, Any]:
        """What to write down: names, sizes, checksums."""
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
    """Refuse in any row, before training, what would be refused in a test row after it."""
    for name in frame.columns:
        if column_kind(frame[name], name) == "number":
            floats(frame[name], name)


def check_labels(column: pd.Series, known: Any, path: Path) -> Any:
    """The labels of another file, all of which must be among the known ones."""
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
    """Whether a column of a file was read as text."""
    return bool(pd.api.types.is_string_dtype(column.dtype))


def checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _dropped(frame: pd.DataFrame, drop: Sequence[str], path: Path) -> pd.DataFrame:
    check_header(str(path), list(frame.columns), drop)
    return frame.drop(columns=list(drop))


def note_columns(encoder: Any, note: Note) -> None:
    """Say which columns are of no use, or look as if they were row numbers."""
    if constant := encoder.constant_columns_:
        note(f"always the same value, so of no use: {quoted(constant)}")
    if ids := encoder.id_like_columns_:
        note(f"nearly every row has its own text in {quoted(ids)}; if it only names the row, leave it out with --drop")


def note_positive(judge: Judge, counts: dict[str, int], note: Note) -> None:
    """Of two classes the rare one mostly is the one to find; say so where the sorted order chose the other."""
    if judge.aim.positive is not None or judge.average != "binary" or not metrics.is_averaged(judge.aim.name):
        return
    other, positive = judge.names
    if counts[positive] > counts[other]:
        note(f"{judge.aim.name} counts {positive!r}, the more frequent class; --positive {other} would count the other")


def note_classes(judge: Judge, truth: Any, note: Note) -> None:
    """Say which classes the test rows cannot tell about."""
    counts = np.bincount(truth, minlength=len(judge.classes))
    if absent := [name for name, count in zip(judge.names, counts, strict=True) if count == 0]:
        note(f"no test row has the class {quoted(absent)}; a macro average counts it as 0")
    if few := [name for name, count in zip(judge.names, counts, strict=True) if 0 < count < 10]:
        note(f"fewer than 10 test rows have the class {quoted(few)}; its scores say little")


def note_batches(judge: Judge, counts: dict[str, int], batch_size: int, note: Note) -> None:
    """Say which classes a batch will usually miss: their part of the metric is learned from few batches."""
    total = sum(counts.values())
    if missed := [name for name in judge.names if (1 - counts[name] / total) ** batch_size > 0.5]:
        note(
            f"a batch of {batch_size} rows will usually have no row of the class {quoted(missed)}; "
            "evalign advise tells how large a batch the metric needs"
        )
