"""Profile a table: column types, missing values, constants, duplicates, suspected leaks, class shares."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from evalign.tables.columns import column_kind, factorized, floats
from evalign.tables.files import quoted
from evalign.tables.formats import column_of_file

ID_VALUES = 64  # a text column with more distinct values than this, and in over half the rows, identifies the rows
KINDS = {"number": "numeric", "bool": "true/false", "text": "categorical", "empty": "empty"}
MANY_ROWS = 100  # above this, a column of consecutive integers numbers the rows
FEW_ROWS = 5  # rows of a class or a value below which a column may separate the classes by chance


@dataclass(frozen=True)
class ColumnProfile:
    """Profile of a feature column; `leak` describes how it determines the target, if it does."""

    name: str
    kind: str
    missing: int
    distinct: int
    id_like: bool = False
    leak: str | None = None

    @property
    def constant(self) -> bool:
        return self.distinct == 1 and self.missing == 0


@dataclass(frozen=True)
class TableProfile:
    """Profile of a table before training.

    >>> frame = pd.DataFrame({"age": [1, 2, None, 4], "planet": "earth"})
    >>> profile = profile_table(frame, np.array(["a", "b", "a", "b"]))
    >>> profile.columns[0].missing, profile.columns[1].constant, profile.classes
    (1, True, {'a': 2, 'b': 2})
    """

    rows: int
    columns: tuple[ColumnProfile, ...]
    classes: dict[str, int]
    duplicate_rows: int | None  # None if unknown, for rows of a stream
    conflicting_rows: int | None

    def to_json(self) -> dict[str, Any]:
        """The profile in plain types, with the share of each class."""
        shares = {name: count / self.rows for name, count in self.classes.items()}
        columns = [asdict(column) | {"constant": column.constant} for column in self.columns]
        return asdict(self) | {"columns": columns, "class_shares": shares}

    def summary(self) -> dict[str, str]:
        """The profile as a few lines of text.

        >>> frame = pd.DataFrame({"age": [1, 2, None, 4], "planet": "earth"})
        >>> profile_table(frame, np.array(["a", "b", "a", "b"])).summary()["missing values"]
        '1 of 8, in 1 of 2 columns'
        """
        kinds = Counter(KINDS[column.kind] for column in self.columns)
        missing = sum(column.missing for column in self.columns)
        gaps = sum(column.missing > 0 for column in self.columns)
        constant = [column.name for column in self.columns if column.constant]
        leaks = [column.name for column in self.columns if column.leak]
        shares = (f"{name} {count / self.rows:.1%}" for name, count in list(self.classes.items())[:20])
        known = self.duplicate_rows is not None
        repeated = f", of which {self.duplicate_rows} repeat another and {self.conflicting_rows} contradict one"
        return {
            "rows": f"{self.rows}{repeated if known else ', the training rows'}",
            "columns": ", ".join(f"{count} {kind}" for kind, count in kinds.items()),
            "missing values": f"{missing} of {self.rows * len(self.columns)}, in {gaps} of {len(self.columns)} columns",
            "constant columns": quoted(constant) or "none",
            "suspected leaks": quoted(leaks) or ("none" if known else "not looked for"),
            "class shares": ", ".join(shares),
        }

    def notes(self) -> list[str]:
        """Notes for the user, one sentence each."""
        leaks: dict[str, str] = {}
        names = {column.name for column in self.columns}
        for column in self.columns:
            if column.leak:
                leaks.setdefault(column_of_file(column.name, names), column.leak)
        said = [f"{leak}; if it is not known at prediction time, ignore it with --drop {name!r}"
                for name, leak in leaks.items()]  # fmt: skip
        if constant := [column.name for column in self.columns if column.constant]:
            said.append(f"constant columns carry no information: {quoted(constant)}")
        ids = {
            kind: [column.name for column in self.columns if column.id_like and column.kind == kind] for kind in KINDS
        }
        if ids["number"]:
            said.append(f"{quoted(ids['number'])} numbers the rows; unless the order matters, ignore it with --drop")
        if ids["text"]:
            said.append(
                f"nearly every row has a different text in {quoted(ids['text'])}; if it identifies the row, ignore it "
                "with --drop"
            )
        if self.conflicting_rows:
            said.append(f"{self.conflicting_rows} rows equal another row with a different label")
        return said


def profile_table(X: pd.DataFrame, y: Any) -> TableProfile:
    """Profile features and labels; a data frame y has a column of 0 and 1 for each label."""
    if isinstance(y, pd.DataFrame):
        codes = y.groupby(list(y), sort=False).ngroup().to_numpy()
        targets = [(y[name].to_numpy(), np.array([0, 1])) for name in y]
        classes = {str(name): int(y[name].sum()) for name in y}
    else:
        codes, labels = pd.factorize(y, sort=True)
        targets = [(codes, labels)]
        classes = dict(zip(map(str, labels.tolist()), np.bincount(codes, minlength=len(labels)).tolist(), strict=True))
    hashes = pd.util.hash_pandas_object(X, index=False).to_numpy()
    rows = pd.DataFrame({"row": hashes, "label": codes})
    conflicting = rows.groupby("row")["label"].transform("nunique") > 1
    return TableProfile(
        rows=len(X),
        columns=tuple(_profile_column(X[name], str(name), targets) for name in X.columns),
        classes=classes,
        duplicate_rows=int(rows.duplicated().sum()),
        conflicting_rows=int(conflicting.sum()),
    )


def _profile_column(column: "pd.Series[Any]", name: str, targets: Sequence[tuple[NDArray[Any], Any]]) -> ColumnProfile:
    kind = column_kind(column, name)
    codes, values = factorized(column)
    present = codes >= 0
    distinct = len(np.unique(codes[present]))
    id_like = _numbers_rows(column) or (kind == "text" and distinct > max(ID_VALUES, len(column) / 2))
    leak = None
    if kind != "empty" and distinct > 1:
        leaks = (_leak(column, name, kind, codes, values, *target) for target in targets)
        leak = next(filter(None, leaks), None)
    return ColumnProfile(name, kind, int((~present).sum()), distinct, id_like, leak)


def _numbers_rows(column: "pd.Series[Any]") -> bool:
    """Whether a column numbers the rows, from any start and in any order."""
    if column.dtype.kind not in "iu" or len(column) <= MANY_ROWS or not column.is_unique:
        return False
    return int(column.max()) - int(column.min()) == len(column) - 1


def _leak(
    column: "pd.Series[Any]", name: str, kind: str, codes: NDArray[Any], values: NDArray[Any], target: NDArray[Any],
    labels: Any,
) -> str | None:  # fmt: skip
    """How a column determines the target: as a copy, by one label per value, or by ranges that do not overlap."""
    if np.bincount(target).min() < FEW_ROWS:
        return None
    pairs = len(np.unique(codes.astype(np.int64) * len(labels) + target))
    places = len(np.unique(codes))
    if pairs == places and len(codes) >= FEW_ROWS * places:
        spelled, wanted = (np.array([str(value) for value in listed]) for listed in (values, labels))
        if (codes >= 0).all() and (spelled[codes] == wanted[target]).all():
            return f"column {name!r} is a copy of the target"
        return f"column {name!r} determines the target: all rows with the same value have the same label"
    if kind == "number" and (codes >= 0).all():
        x = floats(column, name)
        ends = pd.DataFrame({"x": x, "y": target}).groupby("y")["x"].agg(["min", "max"]).sort_values("min")
        if (ends["min"].to_numpy()[1:] > ends["max"].to_numpy()[:-1]).all():
            return f"column {name!r} determines the target: the ranges of its values in the classes do not overlap"
    return None
