"""Column types of a table: names, kinds, conversion to numbers or category codes.

Dates, lists and mixtures of numbers and text raise an error that names the column and says what to do.
"""

from collections.abc import Hashable
from typing import Any, Literal, TypeAlias

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from pandas.api.types import infer_dtype
from scipy.sparse import issparse

from evalign.tables.files import quoted

Column: TypeAlias = "pd.Series[Any] | pd.Index[Any] | NDArray[Any]"
Table: TypeAlias = pd.DataFrame | NDArray[Any]
Kind = Literal["number", "bool", "text", "empty"]
Label = str | int  # a column's name, or its position where it has none

MOST_ENTRIES = 1e9  # of a sparse matrix that is made dense
LARGEST = 1e300  # numbers beyond are taken as this one: the difference of any two then stays finite
NUMPY_KINDS: dict[str, Kind] = {"b": "bool", "i": "number", "u": "number", "f": "number", "U": "text", "T": "text"}
INFERRED: dict[str, Kind] = {
    "boolean": "bool",
    "integer": "number",
    "floating": "number",
    "mixed-integer-float": "number",
    "decimal": "number",
    "string": "text",
    "empty": "empty",
}
NUMPY_REFUSED = {"M": "datetime", "m": "timedelta", "c": "complex", "S": "bytes", "V": "record"}
REFUSED = {
    **dict.fromkeys(
        ("datetime", "datetime64", "date"), ("dates", "turn it into numbers with evalign.tables.formats.expand_dates")
    ),
    **dict.fromkeys(("timedelta", "timedelta64"), ("time spans", "turn it into numbers first, e.g. seconds")),
    "time": ("times of day", "turn it into numbers first, e.g. seconds since midnight"),
    "period": ("periods", "turn it into numbers first, e.g. the year"),
    "interval": ("intervals", "turn it into numbers or text first, e.g. the midpoint"),
    "complex": ("complex numbers", "give the real and the imaginary part a column each"),
    "bytes": ("bytes", "decode it to text first"),
    "record": ("records", "give each field a column of its own"),
}


class ColumnTypeError(ValueError, TypeError):
    """A column holds what cannot be encoded; also a TypeError, which is what scikit-learn expects here."""


def column_kind(column: Column, label: Label) -> Kind:
    """What a column holds, by its dtype, or by its values where the dtype is object; raises for what is refused."""
    dtype = column.dtype
    if isinstance(dtype, pd.CategoricalDtype):
        return column_kind(dtype.categories, label) if len(dtype.categories) else "empty"
    if isinstance(dtype, pd.StringDtype):
        return "text"
    if dtype.kind in NUMPY_KINDS:
        return NUMPY_KINDS[dtype.kind]
    # Period and interval dtypes say "O" too, and only their own name tells them from Python objects.
    inferred = NUMPY_REFUSED.get(dtype.kind) or infer_dtype(column, skipna=True)
    if inferred in REFUSED:
        what, remedy = REFUSED[inferred]
        raise ColumnTypeError(f"column {label!r} holds {what}; {remedy}")
    if inferred in INFERRED:
        return INFERRED[inferred]
    values = np.asarray(column, dtype=object)
    types = sorted({type(value).__name__ for value in values[~pd.isna(values)]})
    if types == ["str"]:  # text with a missing date in it
        return "text"
    what = f"holds {types[0]} values" if len(types) == 1 else f"mixes {' and '.join(types)} values"
    raise ColumnTypeError(
        f"column {label!r} {what}, but every argument must be a string or a number, of one sort in a column; "
        "make it all numbers or all text, e.g. with astype(str)"
    )


def floats(column: Column, label: Label) -> NDArray[np.float64]:
    """A copy in float64, nan where a value is missing, cut at ±1e300; an infinity is refused."""
    dtype = column.dtype
    with np.errstate(over="ignore"):  # a long double beyond float64 becomes an infinity, told below
        if isinstance(dtype, np.dtype) and dtype.kind != "O":
            x = np.array(column, dtype=np.float64)
        else:
            known = ~np.asarray(pd.isna(column))
            x = np.full(len(known), np.nan)
            try:
                x[known] = np.asarray(column[known], dtype=np.float64)
            except OverflowError:  # a Python integer has no upper end
                raise ValueError(f"column {label!r} holds a number beyond 1.8e308; make it smaller") from None
    if infinite := int(np.count_nonzero(np.isinf(x))):
        rows = "1 row" if infinite == 1 else f"{infinite} rows"
        raise ValueError(
            f"column {label!r} holds infinity in {rows}; put a finite number there, or nan for a missing value"
        )
    return np.clip(x, -LARGEST, LARGEST, out=x)


def check_kind(column: Column, kind: Kind, label: Label, *, expected: str, right: bool) -> None:
    """What a column holds at prediction must be what it held in training; nothing at all is right too."""
    if right or kind == "empty":
        return
    values = np.asarray(column, dtype=object)
    values = values[~pd.isna(values)]
    if len(values):
        raise ColumnTypeError(f"column {label!r} held {expected} in training, got {values[0]!r}; pass the same kind")


def factorized(column: Column) -> tuple[NDArray[Any], NDArray[Any]]:
    """Codes (n,), -1 where missing, and the values they stand for as Python objects."""
    if isinstance(column, pd.Series) and isinstance(column.dtype, pd.CategoricalDtype):
        return column.cat.codes.to_numpy(), np.asarray(column.cat.categories, dtype=object)
    if column.dtype.kind in "UT":
        column = np.asarray(column, dtype=object)
    codes, uniques = pd.factorize(column)
    return codes, np.asarray(uniques, dtype=object)


def as_table(X: Any) -> Table:
    """A pandas frame or a two-dimensional array, as it is; polars frames, Arrow tables, sparse matrices and lists are
    converted."""
    if issparse(X):
        sparse: Any = X
        if np.prod(sparse.shape, dtype=np.float64) > MOST_ENTRIES:
            raise ValueError(
                f"a sparse X is made dense, and one of shape {sparse.shape} would not fit into memory; "
                "reduce its columns first, e.g. with sklearn.decomposition.TruncatedSVD"
            )
        X = sparse.toarray()
    if not isinstance(X, pd.DataFrame | np.ndarray):
        if hasattr(X, "to_pandas"):
            X = X.to_pandas()
        else:
            # As objects, else [[1, "a"]] would become text throughout.
            X = np.array(X, dtype=object) if isinstance(X, list | tuple) else np.asarray(X)
    if X.ndim != 2:
        raise ValueError(
            f"Expected 2D array, got {X.ndim}D array instead. Reshape your data either using array.reshape(-1, 1) "
            "if your data has a single feature or array.reshape(1, -1) if it contains a single sample."
        )
    return X  # type: ignore[no-any-return]


def column_names(table: Table) -> list[str] | None:
    """A frame's names where all are strings, None where none is; twice the same one is refused."""
    if not isinstance(table, pd.DataFrame):
        return None
    names: list[Hashable] = list(table.columns)
    if twice := list(dict.fromkeys(table.columns[table.columns.duplicated()])):
        raise ValueError(f"column names must differ, got {quoted(twice)} more than once; rename or drop one")
    texts = [name for name in names if isinstance(name, str)]
    if 0 < len(texts) < len(names):  # scikit-learn's words
        types = sorted({type(name).__name__ for name in names})
        raise TypeError(
            f"Feature names are only supported if all input features have string names, but your input has {types} "
            "as feature name / column name types; use X.columns = X.columns.astype(str)"
        )
    return texts or None


def column_of(table: Table, j: int, rows: NDArray[np.int64] | None = None) -> Column:
    column = table.iloc[:, j] if isinstance(table, pd.DataFrame) else table[:, j]
    return column if rows is None else column.take(rows)


def labels_of(names: list[str] | None, count: int) -> list[Label]:
    return [*names] if names is not None else [*range(count)]
