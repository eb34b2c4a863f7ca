"""Networks for tables."""

from evalign.networks.embedding import TableEmbedding as TableEmbedding
from evalign.networks.ensemble import Ensemble as Ensemble
from evalign.networks.ensemble import MeanOfNetworks as MeanOfNetworks
from evalign.networks.mlp import mlp as mlp
from evalign.networks.tabular import table_network as table_network
