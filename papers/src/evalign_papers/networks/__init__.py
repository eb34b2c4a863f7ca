"""Networks of the papers: Darknet for images, message passing for conversation groups."""

from evalign_papers.networks.darknet import darknet19 as darknet19
from evalign_papers.networks.darknet import tiny_darknet as tiny_darknet
from evalign_papers.networks.graph import PairNetwork as PairNetwork
from evalign_papers.networks.image_input import Pictures as Pictures
