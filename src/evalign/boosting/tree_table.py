"""A data frame or an array -> numbers for trees: as they are, categories as codes, gaps as gaps."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from evalign.tables import TableEncoder
from evalign.tables.column_encoders import CategoryColumn
from evalign.tables.columns import as_table, column_kind, column_of


class TreeTable(TableEncoder):
    """`TableEncoder` with one column of numbers for each of the table: the library does the rest by itself.

    Numbers stay what they are, true and false become 1 and 0, categories their place among those of training. A
    missing value is nan, and so is a category that training did not have: trees learn where a gap belongs. Beyond
    the `max_categories` most frequent ones, categories share one code.

    >>> import pandas as pd
    >>> frame = pd.DataFrame({"age": [20.0, 40.0, None], "job": ["cook", "smith", "cook"]})
    >>> table = TreeTable().fit(frame)
    >>> table.categorical
    [1]
    >>> table.transform(pd.DataFrame({"age": [50.0, None], "job": ["smith", "baker"]}))
    array([[50.,  1.],
           [nan, nan]])
    """

    def __init__(self, *, numeric: Any = "standard", max_categories: int = 64) -> None:
        super().__init__(numeric=numeric, max_categories=max_categories)  # a tree sees no scale

    @property
    def categorical(self) -> list[int]:
        """Positions of the columns that hold codes."""
        return [j for j, column in enumerate(self._columns) if isinstance(column, CategoryColumn)]

    @property
    def feature_names_out(self) -> list[str]:
        """The columns' own names; `x0`, `x1`, ... where they have none."""
        self._check_fitted()
        return self._names or [f"x{j}" for j in range(self.n_features_in_)]

    def transform(self, X: Any, *, rows: NDArray[np.int64] | None = None) -> NDArray[np.float64]:  # type: ignore[override]
        """(n, columns) in float64, nan where nothing is known."""
        self._check_fitted()
        table = as_table(X)
        order = self._order(table)
        out = np.empty((table.shape[0] if rows is None else len(rows), len(order)))
        for k, (j, label, encoder) in enumerate(zip(order, self._labels, self._columns, strict=True)):
            column = column_of(table, j, rows)
            values = encoder.read(column, column_kind(column, label), label)
            out[:, k] = np.where(values < 0, np.nan, values) if isinstance(encoder, CategoryColumn) else values
        return out
