"""Networks for encoded tables, with or without embeddings of their columns."""

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from torch import nn

from evalign.networks.embedding import Curves, Fields, TableEmbedding
from evalign.networks.ensemble import Ensemble, Sharing
from evalign.networks.mlp import mlp
from evalign.tables.column_encoders import CategoryColumn
from evalign.tables.encode import TableEncoder


def fields_of(encoder: TableEncoder) -> Fields:
    """Positions of the columns for embeddings: a number's rank with its quantiles as edges, else its scaled value.

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


Network = Literal["mlp", "embedding", "periodic"]
CURVES: dict[str, Curves | None] = {"mlp": None, "embedding": "piecewise", "periodic": "periodic"}


def table_network(
    network: Network,
    fields: Fields,
    classes: int,
    hidden: Sequence[int] = (512, 256, 128),
    dropout: float = 0.25,
    *,
    ensemble: int = 1,
    sharing: Sharing = "none",
    **embedding: Any,
) -> nn.Module:
    """`network` names what the layers see: "mlp" the columns as they are, "embedding" with piecewise linear curves and
    vectors of categories, "periodic" with sines and cosines. Members of an `ensemble` share the embedding.

    >>> fields = Fields(3, numbers=(0,), edges=((0.0, 1.0),), categories=((1, 3),))
    >>> table_network("embedding", fields, 2, hidden=(16,), ensemble=4)[1].members
    4
    """
    curves = CURVES[network]
    front = None if curves is None else TableEmbedding(fields, curves, **embedding)
    features = fields.features if front is None else front.width
    body = (
        mlp(features, classes, hidden, dropout)
        if ensemble == 1
        else Ensemble(features, classes, hidden, dropout, members=ensemble, sharing=sharing)
    )
    return body if front is None else nn.Sequential(front, body)
