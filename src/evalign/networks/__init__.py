"""Networks for encoded tables."""

from evalign.networks.embedding import TableEmbedding as TableEmbedding
from evalign.networks.mlp import Ensemble as Ensemble
from evalign.networks.mlp import MeanOfNetworks as MeanOfNetworks
from evalign.networks.mlp import mlp as mlp
from evalign.networks.mlp import table_network as table_network
