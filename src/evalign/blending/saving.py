"""A fitted blend as one file: every member's arrays under its name; `evalign.container` says how."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from evalign import container
from evalign.blending.trees import TYPES, TreeArrays
from evalign.booster import EASTBooster
from evalign.boosting.saving import booster_content, booster_of
from evalign.boosting.table import TreeTable
from evalign.estimator import EASTClassifier
from evalign.forest import EASTForest
from evalign.saving import Arrays, classifier_content, classifier_of, fitted_content, set_fitted

if TYPE_CHECKING:
    from evalign.blend import EASTBlend

FORMAT = "evalign.blend"


def save_blend(model: "EASTBlend", path: Path) -> Path:
    """Write `model` to `path`, replacing what was there in one step."""
    write = {"boost": booster_content, "forest": forest_content, "network": classifier_content}
    arrays: Arrays = {}
    fitted = {**fitted_content(model), "weights": model.weights_, "members": {}}
    for name, member in model.members_.items():
        own, fitted["members"][name] = write[name](member)
        arrays |= {f"{name}.{key}": value for key, value in own.items()}
    return container.write(path, FORMAT, arrays, fitted)


def load_blend(cls: type["EASTBlend"], path: Path) -> Any:
    """Read what `save_blend` wrote, or say in one sentence why not."""
    arrays, fitted = container.read(path, FORMAT)
    read: dict[str, Any] = {
        "boost": lambda *content: booster_of(EASTBooster, *content),
        "forest": forest_of,
        "network": lambda *content: classifier_of(EASTClassifier, *content),
    }
    model = cls(**fitted["params"])
    model.weights_ = fitted["weights"]
    model.members_ = {
        name: read[name]({key.removeprefix(f"{name}."): a for key, a in arrays.items() if key.startswith(name)}, own)
        for name, own in fitted["members"].items()
    }
    set_fitted(model, fitted)
    return model


def forest_content(model: EASTForest) -> tuple[Arrays, dict[str, Any]]:
    """A forest's trees as arrays, and the rest of it as JSON."""
    arrays = {
        f"{i}.{name}": torch.from_numpy(getattr(forest, name))
        for i, forest in enumerate(model.forests_)
        for name in TYPES
    }
    return arrays, {**fitted_content(model), "encoder": model.encoder_.to_json(), "forests": len(model.forests_)}


def forest_of(arrays: Arrays, fitted: dict[str, Any]) -> EASTForest:
    """The forest that has this content."""
    model = EASTForest(**fitted["params"])
    set_fitted(model, fitted)
    model.encoder_ = TreeTable.from_json(fitted["encoder"])
    model.forests_ = [
        TreeArrays(**{name: arrays[f"{i}.{name}"].numpy() for name in TYPES}) for i in range(fitted["forests"])
    ]
    for forest in model.forests_:
        forest.check(model.n_features_in_)
    return model
