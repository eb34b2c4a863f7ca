"""Networks the papers used, and the ones the classifiers default to."""

from evalign.networks.darknet import darknet19 as darknet19
from evalign.networks.darknet import tiny_darknet as tiny_darknet
from evalign.networks.embedding import TableEmbedding as TableEmbedding
from evalign.networks.ensemble import Ensemble as Ensemble
from evalign.networks.ensemble import Together as Together
from evalign.networks.graph import PairNetwork as PairNetwork
from evalign.networks.mlp import mlp as mlp
from evalign.networks.pictures import Pictures as Pictures
from evalign.networks.tabular import table_network as table_network
