"""A fitted network as one file; `evalign.storage.container` says how, and that nothing is executed."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from evalign.boosting.libraries import find_library
from evalign.boosting.tree_table import TreeTable
from evalign.decision import Rule
from evalign.estimators.boosted import EASTBooster
from evalign.estimators.forest import TYPES, EASTForest, TreeArrays
from evalign.estimators.network import EASTClassifier
from evalign.networks.ensemble import Together
from evalign.storage import container
from evalign.tables import TableEncoder

if TYPE_CHECKING:
    from evalign.estimators.blend import EASTBlend
    from evalign.estimators.boosted import EASTBooster
    from evalign.estimators.network import EASTClassifier


NETWORK_FORMAT = "evalign.classifier"
Arrays = dict[str, torch.Tensor]


def save_classifier(model: "EASTClassifier", path: Path) -> Path:
    """Write `model` to `path`, replacing what was there in one step."""
    return container.write(path, NETWORK_FORMAT, *classifier_content(model))


def load_classifier(cls: type["EASTClassifier"], path: Path) -> Any:
    """Read what `save_classifier` wrote, or say in one sentence why not."""
    return classifier_of(cls, *container.read(path, NETWORK_FORMAT))


def classifier_content(model: "EASTClassifier") -> tuple[Arrays, dict[str, Any]]:
    """A network's arrays, and the rest of it as JSON."""
    weights = {name: value.detach().cpu().contiguous() for name, value in model.network_.state_dict().items()}
    return weights, {**fitted_content(model), "encoder": model.encoder_.to_json(), "folds": model.folds_}


def classifier_of(cls: type["EASTClassifier"], weights: Arrays, fitted: dict[str, Any]) -> Any:
    """The network that has this content."""
    params = fitted["params"]
    params["hidden"] = tuple(params["hidden"])
    if str(params["device"]).startswith("cuda") and not torch.cuda.is_available():
        params["device"] = "auto"  # trained on a GPU, used on a machine without one
    model = cls(**params)
    set_fitted(model, fitted)
    model.encoder_ = TableEncoder.from_json(fitted["encoder"])
    model.folds_ = fitted.get("folds", 1)  # not in files that were written before there were folds
    members = [model._make_network(seed=0) for _ in range(model.folds_)]
    network = members[0] if len(members) == 1 else Together(members)
    network.load_state_dict(weights)
    model.network_ = network.to(model._device)
    return model


def fitted_content(model: Any) -> dict[str, Any]:
    """Options, and what every classifier of ours has learned; `set_fitted` reads it."""
    return {
        "params": container.saved_params(model),
        "classes": container.classes_to_json(model.classes_),
        "n_features_in": model.n_features_in_,
        "feature_names_in": list(model.feature_names_in_) if hasattr(model, "feature_names_in_") else None,
        "decision": model.decision_.to_json(),
        "history": model.history_,
        "temperature": model.temperature_,
    }


def set_fitted(model: Any, fitted: dict[str, Any]) -> None:
    """What every classifier of ours has learned."""
    model.classes_ = container.classes_from_json(fitted["classes"])
    model.n_features_in_ = fitted["n_features_in"]
    if fitted["feature_names_in"] is not None:
        model.feature_names_in_ = np.array(fitted["feature_names_in"], dtype=object)
    model.decision_ = Rule.from_json(fitted["decision"])
    # JSON knows lists only; what an epoch watched was a tuple.
    model.history_ = [{**row, "watched": tuple(row.get("watched", ()))} for row in fitted["history"]]
    model.temperature_ = fitted["temperature"]


def load_model(path: Path) -> Any:
    """A classifier of whichever kind the file holds."""
    found = container.format_of(path)
    if found == "evalign.estimators.boosted":
        from evalign.estimators.boosted import EASTBooster

        return EASTBooster.load(path)
    if found == "evalign.estimators.blend":
        from evalign.estimators.blend import EASTBlend

        return EASTBlend.load(path)
    from evalign.estimators.network import EASTClassifier

    return EASTClassifier.load(path)


BOOSTER_FORMAT = "evalign.estimators.boosted"


def save_booster(model: "EASTBooster", path: Path) -> Path:
    """Write `model` to `path`, replacing what was there in one step."""
    return container.write(path, BOOSTER_FORMAT, *booster_content(model))


def load_booster(cls: type["EASTBooster"], path: Path) -> Any:
    """Read what `save_booster` wrote, or say in one sentence why not."""
    return booster_of(cls, *container.read(path, BOOSTER_FORMAT))


def booster_content(model: "EASTBooster") -> tuple[Arrays, dict[str, Any]]:
    """A booster's trees as text in arrays, and the rest of it as JSON."""
    fitted = {
        **fitted_content(model),
        "encoder": model.encoder_.to_json(),
        "rounds": model.rounds_,
        "columns": model.columns_,
        "start": model.start_,
    }
    arrays = {f"trees_{i}": container.text_as_array(trees.to_text()) for i, trees in enumerate(model.trees_)}
    return arrays, fitted


def booster_of(cls: type["EASTBooster"], arrays: Arrays, fitted: dict[str, Any]) -> Any:
    """The booster that has this content."""
    model = cls(**fitted["params"])
    set_fitted(model, fitted)
    model.encoder_ = TreeTable.from_json(fitted["encoder"])
    model.rounds_, model.columns_, model.start_ = fitted["rounds"], fitted["columns"], np.array(fitted["start"])
    read = find_library(model.library).trees.from_text
    model.trees_ = [read(container.array_as_text(arrays[f"trees_{i}"])) for i in range(len(arrays))]
    return model


BLEND_FORMAT = "evalign.estimators.blend"


def save_blend(model: "EASTBlend", path: Path) -> Path:
    """Write `model` to `path`, replacing what was there in one step."""
    write = {"boost": booster_content, "forest": forest_content, "network": classifier_content}
    arrays: Arrays = {}
    fitted = {**fitted_content(model), "weights": model.weights_, "members": {}}
    for name, member in model.members_.items():
        own, fitted["members"][name] = write[name](member)
        arrays |= {f"{name}.{key}": value for key, value in own.items()}
    return container.write(path, BLEND_FORMAT, arrays, fitted)


def load_blend(cls: type["EASTBlend"], path: Path) -> Any:
    """Read what `save_blend` wrote, or say in one sentence why not."""
    arrays, fitted = container.read(path, BLEND_FORMAT)
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
