"""Networks the papers used, and the ones the classifiers default to."""

from evalign.networks.mlp import mlp as mlp
