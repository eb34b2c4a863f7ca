"""Read a saved classifier of any kind."""

from pathlib import Path

from evalign.estimators.base import MetricClassifier
from evalign.estimators.blend import EASTBlend
from evalign.estimators.boosted import EASTBooster
from evalign.estimators.forest import EASTForest
from evalign.estimators.linear import EASTLinear
from evalign.estimators.network import EASTClassifier
from evalign.storage import container

KINDS: dict[str, type[MetricClassifier]] = {
    kind.FORMAT: kind for kind in (EASTBlend, EASTBooster, EASTForest, EASTLinear, EASTClassifier)
}


def load_model(path: Path) -> MetricClassifier:
    """The classifier that `save` wrote to `path`, whichever kind it is; nothing in the file is executed."""
    return KINDS.get(container.format_of(path), EASTClassifier).load(path)  # which says why a foreign file is refused
