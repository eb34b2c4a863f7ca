"""Where the columns of an encoded table stand, for networks that embed each by itself."""

import numpy as np

from evalign.networks.embedding import Fields
from evalign.tables.encoder import TableEncoder
from evalign.tables.encoders import CategoryColumn


def fields_of(encoder: TableEncoder) -> Fields:
    """Of a number its rank is embedded, with the ranks of its quantiles as edges; where it has none, its scaled value.

    >>> import pandas as pd
    >>> frame = pd.DataFrame({"age": [20.0, 40.0, 60.0], "job": ["cook", "smith", "cook"]})
    >>> fields = fields_of(TableEncoder(numeric="both").fit(frame))
    >>> fields.features, fields.numbers, fields.categories, np.round(fields.edges, 1).tolist()
    (4, (1,), ((2, 4),), [[-5.2, 0.0, 5.2]])
    """
    numbers, edges, categories, start = [], [], [], 0
    for column in encoder._columns:
        if isinstance(column, CategoryColumn):
            categories.append((start, start + column.width))
        elif column.kind == "number" and column.scale:
            numbers.append(start + column.both)
            known = () if column.quantiles is None else np.unique(column._ranked(np.array(column.quantiles))).tolist()
            edges.append(tuple(known))
        start += column.width
    return Fields(start, tuple(numbers), tuple(edges), tuple(categories))
