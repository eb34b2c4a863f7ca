"""Encode a data frame or an array as numbers: a float32 matrix for networks, or category codes for trees.

The matrix is allocated once and filled column by column, to keep at most one further column in memory.
"""

from collections.abc import Hashable
from typing import Any, Self, TypeAlias

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from pandas.api.types import is_numeric_dtype
from scipy.sparse import issparse
from sklearn.exceptions import NotFittedError

from evalign import checks
from evalign.tables.columns import (
    FEW,
    MOST,
    NUMERIC,
    AnyColumn,
    Blocks,
    CategoryColumn,
    Column,
    Label,
    Numeric,
    column_from_json,
    column_kind,
    column_to_json,
    fit_categories,
    fit_numbers,
)
from evalign.tables.files import did_you_mean, quoted
from evalign.tables.packed import Layout, PackedTable

FORMAT, VERSION = "evalign.tables", 1
AnyTable: TypeAlias = pd.DataFrame | NDArray[Any]
MOST_ENTRIES = 1e9  # maximum size of a sparse matrix that is converted to dense
ONE_HOT_ENTRIES = 10_000_000  # maximum size of the one-hot columns of a table, by default


class TableEncoder:
    """Encode the columns of a data frame or an array as numbers, with parameters learned from the training table.

    - Numbers: (x - mean) / std, cut at ±1e4; with `numeric="quantile"` the normal quantile of the rank, for heavy
      tails, to the three digits of float16; with "both" one column of each. A missing value becomes the mean (the
      median), with a column that marks it if training had missing ones.
    - Booleans: 1 and 0; a missing value becomes the share of 1, marked in the same way.
    - Text and pandas categories: one column per category; beyond the `max_categories` most frequent (by default 1,024,
      in large tables fewer, but at least 64) all go to one column "<other>", and so do unseen ones; without that column
      an unseen category is all zeros. A missing value has a separate column if training had missing ones, else it is
      all zeros.
    - A constant number becomes zeros. Infinity, dates, lists, mixed types and columns without any value are refused.

    After `fit`: `n_features_in_`; `feature_names_in_`, only for a frame with string names; `constant_columns_`;
    `id_like_columns_`, text columns in which most values are distinct; `text_columns_`, which a file reader
    must keep as text.

    >>> frame = pd.DataFrame({"age": [20.0, 40.0, None], "job": ["cook", "smith", "cook"]})
    >>> encoder = TableEncoder().fit(frame)
    >>> encoder.feature_names_out
    ['age', 'age=<missing>', 'job=cook', 'job=smith']
    >>> encoder.transform(pd.DataFrame({"age": [50.0, None], "job": ["smith", "baker"]}))
    array([[2., 0., 0., 1.],
           [0., 1., 0., 0.]], dtype=float32)
    """

    n_features_in_: int
    feature_names_in_: NDArray[np.object_]
    constant_columns_: list[Label]
    id_like_columns_: list[Label]
    text_columns_: list[Label]

    def __init__(self, *, numeric: Numeric = "standard", max_categories: int | None = None) -> None:
        checks.check_choice("numeric", numeric, NUMERIC)
        if max_categories is not None:
            checks.check_number("max_categories", max_categories, low=1, whole=True)
        self.numeric, self.max_categories = numeric, max_categories

    def fit(self, X: Any, *, rows: NDArray[np.int64] | None = None) -> Self:
        """Learn from the table, or from the given `rows` of it, without copying them."""
        table = as_table(X)
        for count, what in zip(table.shape, ("sample", "feature"), strict=True):
            if count == 0:  # scikit-learn's wording, which its checks require
                raise ValueError(
                    f"Found array with 0 {what}(s) (shape={table.shape}) while a minimum of 1 is required."
                )
        names = column_names(table)
        labels = labels_of(names, table.shape[1])
        dtypes = table.dtypes if isinstance(table, pd.DataFrame) else [table.dtype] * table.shape[1]
        texts = sum(not is_numeric_dtype(dtype) for dtype in dtypes)
        most = self.most_categories(len(table) if rows is None else len(rows), texts)
        fitted = [self._fit_column(column_of(table, j, rows), label, most) for j, label in enumerate(labels)]
        if empty := [label for label, column in zip(labels, fitted, strict=True) if column is None]:
            one = len(empty) == 1
            raise ValueError(
                f"column{'' if one else 's'} {quoted(empty)} {'has' if one else 'have'} no value at all; "
                f"drop {'it' if one else 'them'}"
            )
        self.set_columns(names, [column for column in fitted if column is not None])
        return self

    def _fit_column(self, column: Column, label: Label, most: int) -> AnyColumn | None:
        kind = column_kind(column, label)
        if kind == "text" or isinstance(column.dtype, pd.CategoricalDtype):
            return fit_categories(column, kind, label, max_categories=most)
        return None if kind == "empty" else fit_numbers(column, kind, label, numeric=self.numeric)

    def most_categories(self, rows: int, columns: int) -> int:
        """Number of distinguished categories per column, for this number of categorical columns."""
        return self.max_categories or max(FEW, min(MOST, ONE_HOT_ENTRIES // max(rows * columns, 1)))

    def set_columns(self, names: list[str] | None, columns: list[AnyColumn]) -> None:
        """Set everything learned in one step, so that a failed fit leaves the encoder unchanged."""
        self.n_features_in_ = len(columns)
        if names is not None:
            self.feature_names_in_ = np.array(names, dtype=object)
        elif hasattr(self, "feature_names_in_"):  # from an earlier fit
            del self.feature_names_in_
        self.columns_ = columns
        pairs = list(zip(self._labels, columns, strict=True))
        self.constant_columns_ = [label for label, column in pairs if column.constant]
        categories = [(label, column) for label, column in pairs if isinstance(column, CategoryColumn)]
        self.id_like_columns_ = [label for label, column in categories if column.id_like]
        self.text_columns_ = [label for label, column in categories if column.text]

    def transform(self, X: Any, *, rows: NDArray[np.int64] | None = None) -> NDArray[np.float32]:
        """A C-contiguous matrix (n, F). Columns of a frame are matched by name; none may be missing or extra."""
        table, order = self._checked(X)
        count = table.shape[0] if rows is None else len(rows)
        out = np.zeros((count, sum(column.width for column in self.columns_)), dtype=np.float32)
        ends = np.cumsum([column.width for column in self.columns_])[:-1]
        blocks = [
            Blocks(*np.split(block, np.cumsum(column.widths)[:2], axis=1))
            for block, column in zip(np.split(out, ends, axis=1), self.columns_, strict=True)
        ]
        self._write(table, order, rows, blocks)
        return out

    def packed(self, X: Any, *, rows: NDArray[np.int64] | None = None) -> PackedTable:
        """The numbers of `transform` as a `PackedTable`, which takes fewer bytes.

        >>> frame = pd.DataFrame({"age": [20.0, 40.0, 60.0], "job": ["cook", "smith", "cook"]})
        >>> encoder = TableEncoder(numeric="both").fit(frame)
        >>> table = encoder.packed(frame)
        >>> table.layout.row_bytes, bool((table[:].numpy() == encoder.transform(frame)).all())
        (8, True)
        """
        table, order = self._checked(X)
        kinds = np.concatenate([np.repeat(range(3), column.widths) for column in self.columns_])
        layout = Layout(*(tuple(np.flatnonzero(kinds == kind).tolist()) for kind in range(3)))
        data = layout.zeros(table.shape[0] if rows is None else len(rows))
        ends = np.cumsum([column.widths for column in self.columns_], axis=0)[:-1]
        views: tuple[NDArray[Any], ...] = layout.views(data)
        parts = [np.split(view, own, axis=1) for view, own in zip(views, ends.T, strict=True)]
        self._write(table, order, rows, [Blocks(*blocks) for blocks in zip(*parts, strict=True)])
        return PackedTable(torch.from_numpy(data), layout)

    def _write(self, table: AnyTable, order: list[int], rows: NDArray[np.int64] | None, blocks: list[Blocks]) -> None:
        for j, label, encoder, out in zip(order, self._labels, self.columns_, blocks, strict=True):
            column = column_of(table, j, rows)
            encoder.write(column, column_kind(column, label), label, out)

    def fit_transform(self, X: Any) -> NDArray[np.float32]:
        return self.fit(X).transform(X)

    def select(self, X: Any) -> tuple[AnyTable, list[str]]:
        """The columns of training in their order, and the names of additional columns of `X`.

        >>> encoder = TableEncoder().fit(pd.DataFrame({"a": [1, 2], "b": [3, 4]}))
        >>> table, extra = encoder.select(pd.DataFrame({"id": [7], "b": [5], "a": [6]}))
        >>> list(table.columns), extra
        (['a', 'b'], ['id'])
        """
        self._check_fitted()
        table = as_table(X)
        names = column_names(table)
        known = self._names
        if names is None or known is None or not isinstance(table, pd.DataFrame):
            return table, []
        self._check_missing(names)
        seen = set(known)
        return (table if names == known else table[known]), [name for name in names if name not in seen]

    @property
    def feature_names_out(self) -> list[str]:
        """Names of the columns of the matrix; `x0`, `x1`, ... for unnamed columns."""
        self._check_fitted()
        names = self._names or [f"x{j}" for j in range(self.n_features_in_)]
        return [out for name, column in zip(names, self.columns_, strict=True) for out in column.names(name)]

    def to_json(self) -> dict[str, Any]:
        """Everything learned, in plain JSON types."""
        self._check_fitted()
        return {
            "format": FORMAT,
            "version": VERSION,
            "numeric": self.numeric,
            "max_categories": self.max_categories,
            "names": self._names,
            "columns": [column_to_json(column) for column in self.columns_],
        }

    @classmethod
    def from_json(cls, data: Any) -> Self:
        """The encoder from the output of `to_json`; nothing in `data` is executed, and unknown content is refused.

        >>> encoder = TableEncoder().fit([[1.0, "x"], [2.0, "y"]])
        >>> TableEncoder.from_json(encoder.to_json()).feature_names_out
        ['x0', 'x1=x', 'x1=y']
        """
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise ValueError(f"a table encoder must be a JSON object of format {FORMAT!r}, got something else")
        if data.get("version") != VERSION:
            raise ValueError(
                f"a table encoder of version {VERSION} is expected, got {data.get('version')!r}; "
                "load it with the version that saved it"
            )
        try:
            encoder = cls(numeric=data["numeric"], max_categories=data["max_categories"])
            columns = [column_from_json(column) for column in data["columns"]]
            names = None if data["names"] is None else [str(name) for name in data["names"]]
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"the table encoder is damaged ({error}); save it again") from None
        if not columns or (names is not None and len(set(names)) != len(columns)):
            raise ValueError(f"the table encoder is damaged ({len(columns)} columns, other names); save it again")
        encoder.set_columns(names, columns)
        return encoder

    @property
    def _names(self) -> list[str] | None:
        return self.feature_names_in_.tolist() if hasattr(self, "feature_names_in_") else None

    @property
    def _labels(self) -> list[Label]:
        return labels_of(self._names, self.n_features_in_)

    def _check_fitted(self) -> None:
        if not hasattr(self, "n_features_in_"):
            raise NotFittedError("This TableEncoder instance is not fitted yet; call fit first")

    def _check_missing(self, names: list[str]) -> None:
        given, known = set(names), set(self._labels)
        if missing := [name for name in self._names or () if name not in given]:
            hint = did_you_mean(missing[0], [name for name in names if name not in known])
            raise ValueError(f"X must have the columns of training, but lacks {quoted(missing)}{hint}")

    def _checked(self, X: Any) -> tuple[AnyTable, list[int]]:
        self._check_fitted()
        table = as_table(X)
        return table, self._order(table)

    def _order(self, table: AnyTable) -> list[int]:
        """Position in `table` of each training column: by name if both have names, else by position."""
        names, known = column_names(table), self._names
        if names is not None and known is not None:
            self._check_missing(names)
            if extra := set(names) - set(known):
                more = quoted(name for name in names if name in extra)
                raise ValueError(
                    f"X must have only the columns of training, but also has {more}; drop them or use select"
                )
            at = {name: j for j, name in enumerate(names)}
            return [at[name] for name in known]
        if table.shape[1] != self.n_features_in_:  # scikit-learn's wording, which its checks require
            raise ValueError(
                f"X has {table.shape[1]} features, "
                f"but TableEncoder is expecting {self.n_features_in_} features as input."
            )
        return list(range(self.n_features_in_))


class TreeTable(TableEncoder):
    """`TableEncoder` for tree libraries: one numeric column per column of the table, neither scaled nor one-hot.

    Numbers stay unchanged, true and false become 1 and 0, a category becomes its index among those of training.
    Missing values and unseen categories are nan, which trees can split on. Beyond the `max_categories` most frequent
    ones, categories share one code.

    >>> import pandas as pd
    >>> frame = pd.DataFrame({"age": [20.0, 40.0, None], "job": ["cook", "smith", "cook"]})
    >>> table = TreeTable().fit(frame)
    >>> table.categorical
    [1]
    >>> table.transform(pd.DataFrame({"age": [50.0, None], "job": ["smith", "baker"]}))
    array([[50.,  1.],
           [nan, nan]])
    """

    def __init__(self, *, numeric: Any = "standard", max_categories: int | None = MOST) -> None:
        super().__init__(numeric=numeric, max_categories=max_categories)  # trees ignore scale

    @property
    def categorical(self) -> list[int]:
        """Positions of the columns that hold codes."""
        return [j for j, column in enumerate(self.columns_) if isinstance(column, CategoryColumn)]

    @property
    def feature_names_out(self) -> list[str]:
        """The columns' names; `x0`, `x1`, ... for unnamed columns."""
        self._check_fitted()
        return self._names or [f"x{j}" for j in range(self.n_features_in_)]

    def transform(self, X: Any, *, rows: NDArray[np.int64] | None = None) -> NDArray[np.float64]:  # type: ignore[override]
        """A matrix (n, columns) in float64, nan for missing values."""
        table, order = self._checked(X)
        out = np.empty((table.shape[0] if rows is None else len(rows), len(order)))
        for k, (j, label, encoder) in enumerate(zip(order, self._labels, self.columns_, strict=True)):
            column = column_of(table, j, rows)
            values = encoder.read(column, column_kind(column, label), label)
            out[:, k] = np.where(values < 0, np.nan, values) if isinstance(encoder, CategoryColumn) else values
        return out


def as_table(X: Any) -> AnyTable:
    """Convert polars frames, Arrow tables, sparse matrices and lists; return data frames and 2-D arrays unchanged."""
    if issparse(X):
        sparse: Any = X
        if np.prod(sparse.shape, dtype=np.float64) > MOST_ENTRIES:
            raise ValueError(
                f"a sparse X is converted to dense, and shape {sparse.shape} would not fit in memory; "
                "reduce its columns first, e.g. with sklearn.decomposition.TruncatedSVD"
            )
        X = sparse.toarray()
    if not isinstance(X, pd.DataFrame | np.ndarray):
        if hasattr(X, "to_pandas"):
            X = X.to_pandas()
        else:
            # As objects, since [[1, "a"]] would otherwise become all text.
            X = np.array(X, dtype=object) if isinstance(X, list | tuple) else np.asarray(X)
    if X.ndim != 2:
        raise ValueError(
            f"Expected 2D array, got {X.ndim}D array instead. Reshape your data either using array.reshape(-1, 1) "
            "if your data has a single feature or array.reshape(1, -1) if it contains a single sample."
        )
    return X  # type: ignore[no-any-return]


def column_names(table: AnyTable) -> list[str] | None:
    """Column names if all are strings, None if none is; duplicates are refused."""
    if not isinstance(table, pd.DataFrame):
        return None
    names: list[Hashable] = list(table.columns)
    if twice := list(dict.fromkeys(table.columns[table.columns.duplicated()])):
        raise ValueError(f"column names must be unique, got {quoted(twice)} more than once; rename or drop one")
    texts = [name for name in names if isinstance(name, str)]
    if 0 < len(texts) < len(names):  # scikit-learn's wording
        types = sorted({type(name).__name__ for name in names})
        raise TypeError(
            f"Feature names are only supported if all input features have string names, but your input has {types} "
            "as feature name / column name types; use X.columns = X.columns.astype(str)"
        )
    return texts or None


def column_of(table: AnyTable, j: int, rows: NDArray[np.int64] | None = None) -> Column:
    column = table.iloc[:, j] if isinstance(table, pd.DataFrame) else table[:, j]
    return column if rows is None else column.take(rows)


def labels_of(names: list[str] | None, count: int) -> list[Label]:
    return [*names] if names is not None else [*range(count)]
