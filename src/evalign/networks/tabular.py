"""Networks for tables by name: a body, alone or as an ensemble, on the encoded columns or on embeddings of them."""

from collections.abc import Sequence
from typing import Any, Literal

from torch import nn

from evalign.networks.embedding import Curves, Fields, TableEmbedding
from evalign.networks.ensemble import Ensemble, Sharing
from evalign.networks.mlp import mlp

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
